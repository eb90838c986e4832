"""`selfspec app`: the page on which drafters race."""

from typing import Annotated

import typer

from selfspec.app.address import api_of
from selfspec.cli.hosts import check_host, check_port, warn_if_open
from selfspec.cli.loading import loading
from selfspec.cli.options import command, quiet_libraries
from selfspec.config import TargetOptions
from selfspec.model.default_target import source_of


def register(cli: typer.Typer) -> None:
    """Add the command."""

    @command(cli, target=TargetOptions)
    def app(
        *,
        target: TargetOptions,
        host: Annotated[str, typer.Option("--host", help="address to listen on; 0.0.0.0 lets others in")] = "127.0.0.1",
        port: Annotated[
            int | None, typer.Option("--port", help="by default the first free port from 7860 on", min=1, max=65535)
        ] = None,
        server: Annotated[
            str | None, typer.Option("--server", help="race on a running `selfspec serve`, such as http://127.0.0.1:8000/v1")
        ] = None,
        api_key: Annotated[
            str | None, typer.Option("--api-key", envvar="SELFSPEC_API_KEY", help="the key that the server asks for")
        ] = None,
    ) -> None:
        """Open a page on which drafters race, and which shows why one wins.

        Example: selfspec app --port 7860

        Example: selfspec app --server http://127.0.0.1:8000/v1
        """
        check_host(host)
        check_port(host, port)
        if server is not None:
            api_of(server)
            if target.target is not None:
                raise ValueError("--target and --server exclude each other: a server has its own target")
        name = f"the server at {server}" if server is not None else source_of(target)
        typer.echo(f"selfspec app: importing gradio and torch, then loading {name} …")
        try:
            import gradio  # noqa: F401
        except ImportError as error:
            raise ValueError("the page needs gradio: pip install 'selfspec[app]'") from error

        from selfspec.app.main import serve
        from selfspec.app.remote import Server
        from selfspec.drafters.options import load_target

        quiet_libraries()
        warn_if_open(host, "the page has no password, so put it behind a proxy that asks for one, or leave out --host")
        if server is not None:
            page = serve(Server(server, api_key), host=host, port=port)
        else:
            with loading(target):
                page = serve(load_target(target), host=host, port=port)
        typer.echo(f"selfspec app: {page.local_url} (Ctrl-C ends it)")
        page.block_thread()
