"""The address that a server listens on, and a warning for one that other machines can reach."""

import typer

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def warn_if_open(host: str, remedy: str) -> None:
    """Print one line for an address that lets others in; `remedy` says what to do about it."""
    if host not in LOOPBACK:
        typer.echo(f"selfspec: anyone who can reach {host} can use the model: {remedy}", err=True)
