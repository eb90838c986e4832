"""The address that a server listens on, and a warning for one that other machines can reach."""

import errno
import socket

import typer

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check_host(host: str) -> None:
    """Refuse an empty address, which Python would take for every address of this machine."""
    if not host.strip():
        raise ValueError("--host is empty: leave it out, or give an address such as 127.0.0.1")


def check_port(host: str, port: int | None) -> None:
    """Refuse a port that something else listens on, before anything is loaded."""
    if port is None:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: a port that was closed a moment ago is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(
                    f"port {port} of {host} is taken: give another --port, or leave it out for a free one"
                ) from None


def warn_if_open(host: str, remedy: str) -> None:
    """Print one line for an address that lets others in; `remedy` says what to do about it."""
    if host not in LOOPBACK:
        typer.echo(f"selfspec: anyone who can reach {host} can use the model: {remedy}", err=True)
