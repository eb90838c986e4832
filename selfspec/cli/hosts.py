"""The address that a server listens on, and a warning for one that other machines can reach."""

import typer

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check_host(host: str) -> None:
    """Refuse an empty address, which Python would take for every address of this machine."""
    if not host.strip():
        raise ValueError("--host is empty: leave it out, or give an address such as 127.0.0.1")


def warn_if_open(host: str, remedy: str) -> None:
    """Print one line for an address that lets others in; `remedy` says what to do about it."""
    if host not in LOOPBACK:
        typer.echo(f"selfspec: anyone who can reach {host} can use the model: {remedy}", err=True)
