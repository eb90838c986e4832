"""`selfspec app`: the page. It is a module of its own because in `selfspec.cli` that name is taken."""

from typing import Annotated

import typer

from selfspec.options import TargetOptions, command, quiet_libraries


def register(cli: typer.Typer) -> None:
    """Add the command."""

    @command(cli, target=TargetOptions)
    def app(
        *,
        target: TargetOptions,
        host: Annotated[str, typer.Option("--host", help="address to listen on; 0.0.0.0 lets others in")] = "127.0.0.1",
        port: Annotated[
            int | None, typer.Option("--port", help="the first free one from 7860 by default", min=1, max=65535)
        ] = None,
    ) -> None:
        """Open a page on which drafters race, and that shows why one wins."""
        try:
            import gradio  # noqa: F401
        except ImportError as error:
            raise ValueError("the page needs gradio: pip install 'selfspec[app]'") from error

        from selfspec import display
        from selfspec.app.main import serve

        quiet_libraries()
        with display.stage(f"loading {target.source}"):
            model = target.load()
            page = serve(model, host=host, port=port)
        typer.echo(f"{page.local_url} (Ctrl-C ends it)")
        page.block_thread()
