"""The page within a server of the API: mounted at its root, and racing on the server itself."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import gradio as gr
from fastapi import FastAPI

from selfspec.app.main import LOOK, build
from selfspec.app.remote import Server


def mount(app: FastAPI, url: str, api_keys: Sequence[str] = ()) -> None:
    """Mount the page at `/`. Where the server has keys, a visitor must know one, because the page uses the server with it.

    Args:
        url: the server's own address, as this machine reaches it.
    """

    def may_enter(name: str, password: str) -> bool:
        # Compare with every key, each in constant time, so the time taken reveals nothing.
        matches = [secrets.compare_digest(password.encode(), key.encode()) for key in api_keys]
        return any(matches)

    page = build(Server(url, next(iter(api_keys), None))).queue(max_size=None, default_concurrency_limit=4)
    gr.mount_gradio_app(
        app,
        page,
        path="/",
        auth=may_enter if api_keys else None,
        auth_message="The password is a key of this server; any name will do.",
        show_error=False,
        **LOOK,
    )
