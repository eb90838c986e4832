"""The address that a server listens on. This file imports nothing heavy, so a port that is taken is told at once."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free port.

    Raises:
        ValueError: the address is taken, or is not one of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # Python adds the address to the system's message; it stands in ours already.
        reason = str(error.strerror).partition(" (while ")[0]
        raise ValueError(f"cannot listen on {host}:{port} ({reason}): choose another --host or --port") from error


def url_of(host: str, listener: socket.socket) -> str:
    """The address as clients write it."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"
