"""What the server answers at `/`: a page that is mounted there, or else the names of its routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.routing import APIRoute

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


def add_root(app: FastAPI, model: str, add_page: Callable[[FastAPI], None] | None) -> None:
    """Add `/` to an application that has all its other routes."""
    if add_page is not None:
        # A page at the root takes every path that is nobody's; those of the API stay the API's.
        app.add_api_route("/v1/{rest:path}", _not_served, methods=METHODS)
        add_page(app)
        return
    answer: dict[str, Any] = {
        "name": app.title,
        "version": app.version,
        "model": model,
        "routes": [
            f"{method} {route.path}"
            for route in app.routes
            if isinstance(route, APIRoute)
            for method in sorted(set(route.methods or ()) - {"HEAD"})
        ],
        "page": "start the server with --app for a page at this address",
    }
    app.add_api_route("/", lambda: answer, methods=["GET"])


async def _not_served() -> None:
    raise HTTPException(404)
