"""The command line: puts the commands together, each from the file of its own that reads options, calls, and shows.

torch and transformers take seconds to import, so each command imports what it needs when it runs.
"""

import os
from typing import Annotated, Any

import typer

from selfspec import __version__
from selfspec.cli import app as page
from selfspec.cli import bench, bench_runtime, bench_serve, chat, doctor, fetch, generate, plan, serve, train
from selfspec.cli.data import app as data_app
from selfspec.cli.heads import app as heads_app
from selfspec.cli.help import Group

# What `selfspec --help` shows, in this order.
PANELS = {
    "Try": ("demo", "generate", "chat", "app"),
    "Serve": ("serve",),
    "Heads": ("data", "train", "compare-runs", "import", "export", "verify-head"),
    "Measure": ("compare", "bench", "bench-runtime", "bench-engine", "bench-serve", "plot"),
    "Machine": ("fetch", "doctor", "plan"),
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


class Commands(Group):
    """All commands, in the order of `PANELS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        places = list(PANEL_OF)
        return sorted(super().list_commands(ctx), key=lambda name: places.index(name) if name in PANEL_OF else len(places))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.rich_help_panel = PANEL_OF.get(cmd_name)  # type: ignore[attr-defined]
        return command


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", metavar="", help="Show the version and exit.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Several tokens per forward pass from a frozen Hugging Face model, with unchanged output.

    Begin with: selfspec demo
    """
    # Read when torch is loaded. Threads that spin while they wait are many times slower where cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Both keep 1024 compiled kernels by default, one for every number of rows that a pass ever had: hundreds of MiB.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "256")


for commands in (generate, chat, serve, page, train, bench, bench_runtime, bench_serve, plan, fetch, doctor):
    commands.register(app)
app.add_typer(data_app, name="data")
app.add_typer(heads_app)
