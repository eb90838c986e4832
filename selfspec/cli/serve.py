"""`selfspec serve`: the target as a server that OpenAI's and Anthropic's clients can talk to."""

import json
import shlex
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.hosts import check_host, warn_if_open
from selfspec.cli.options import command, quiet_libraries
from selfspec.config import DraftOptions, TargetOptions
from selfspec.model.default_target import source_of
from selfspec.serve.options import ServeOptions

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from fastapi import FastAPI

    from selfspec.engine import Intake, Listener, SpecEngine
    from selfspec.model.text_side import TextSide
    from selfspec.traffic.capture import Capture


def register(cli: typer.Typer) -> None:
    """Add the command."""

    @command(cli, target=TargetOptions, draft=DraftOptions, options=ServeOptions)
    def serve(
        *,
        target: TargetOptions,
        drafter: Annotated[
            list[str] | None,
            typer.Option(
                "--drafter", help="what proposes tokens, auto by default; repeatable, and a request may choose among them"
            ),
        ] = None,
        draft: DraftOptions,
        options: ServeOptions,
        host: Annotated[str, typer.Option("--host", help="address to listen on; 0.0.0.0 lets others in")] = "127.0.0.1",
        port: Annotated[int, typer.Option("--port", help="0 takes any free port", min=0, max=65535)] = 8000,
        app: Annotated[
            bool, typer.Option("--app", help="the page, too, at the server's root: races and the server's figures")
        ] = False,
    ) -> None:
        """Serve the target over HTTP with OpenAI's and Anthropic's APIs.

        Example: selfspec serve --drafter eagle --drafter ngram --port 8000

        Example: selfspec serve PATH_OR_ID --app
        """
        from selfspec.cli import display
        from selfspec.serve.sockets import listen, url_of

        check_host(host)
        listener = listen(host, port)
        # It turns while libraries are imported and the model is loaded in a thread, and stops when that is ready.
        spinner = ExitStack()
        say = spinner.enter_context(display.stage("importing torch, transformers and fastapi"))
        try:
            check_libraries()
            from selfspec.model.devices import resolve_device
            from selfspec.serve.remote import RemoteEngine
            from selfspec.serve.server import run
            from selfspec.serve.service import Service

            quiet_libraries()
            capture = open_capture(options)
            service = Service(source_of(target), options, host=host)
            if not service.api_keys:
                warn_if_open(host, "think of --api-key")
            make = partial(load_engine, target, drafter or ["auto"], draft, options)

            def load() -> None:
                say(f"loading {service.name}")
                has_process = options.http_process == "on"
                if options.http_process == "auto":
                    has_process = resolve_device(target.device).type == "cuda"
                if has_process:
                    make_there = partial(make, makes_text=False)
                    engine: Intake = RemoteEngine(
                        make_there, listener=service.metrics, on_death=service.fail, log_level=options.log_level
                    )
                else:
                    engine = make(service.metrics)
                service.attach(engine, capture=capture)
                spinner.close()
                url = url_of(host, listener)
                typer.echo(f"{url}/v1 serves {service.name} (Ctrl-C ends it)")
                if app:
                    typer.echo(f"{url} is the page")
                if options.log_level in ("debug", "info"):
                    typer.echo(first_steps(url, service.name, has_key=bool(service.api_keys), text_side=engine.target))

            run(service, listener, load, add_page=page_of(host, listener, service.api_keys) if app else None)
        finally:
            spinner.close()


def page_of(host: str, listener: "socket.socket", api_keys: list[str]) -> "Callable[[FastAPI], None]":
    """What mounts the page on the server, which it reaches at this machine's own address."""
    try:
        from selfspec.app.mounted import mount
    except ImportError as error:
        raise ValueError("the page needs gradio: pip install 'selfspec[app]', or leave out --app") from error
    from selfspec.serve.sockets import url_of

    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return partial(mount, url=url_of(own, listener), api_keys=api_keys)


def check_libraries() -> None:
    """Refuse to start without the libraries that serving needs."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError("serving needs fastapi, uvicorn and prometheus-client: pip install 'selfspec[serve]'") from error


def first_steps(url: str, model: str, *, has_key: bool, text_side: "TextSide") -> str:
    """What the server offers, and a request that can be pasted into a shell."""
    from selfspec.model.chat import template_text

    route, body = "/v1/completions", {"model": model, "prompt": "Once upon a time", "max_tokens": 64}
    if template_text(text_side.tokenizer):
        route, body = (
            "/v1/chat/completions",
            {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64},
        )
    key = ' -H "Authorization: Bearer $SELFSPEC_API_KEY"' if has_key else ""
    content = shlex.quote(json.dumps(body))
    return (
        "  OpenAI:    POST /v1/chat/completions, /v1/responses, /v1/completions; GET /v1/models\n"
        "  Anthropic: POST /v1/messages, /v1/messages/count_tokens\n"
        "  besides:   GET /v1/heads, /health, /metrics\n"
        f"try:  curl {url}{route} -H 'Content-Type: application/json'{key} -d {content}"
    )


def load_engine(
    target: TargetOptions,
    drafters: list[str],
    draft: DraftOptions,
    options: ServeOptions,
    listener: "Listener",
    *,
    makes_text: bool = True,
) -> "SpecEngine":
    """The engine that the options name, warm. It may be called in a process of its own."""
    from selfspec.drafters.options import load_drafter_of, load_target
    from selfspec.serve.engines import make_engine

    quiet_libraries()
    model = load_target(target)
    loaded = [load_drafter_of(draft, spec, model) for spec in dict.fromkeys(drafters)]
    # By name, because `auto` may be one that is named beside it.
    by_name = {each.name: each for each in loaded if each is not None}
    return make_engine(
        model,
        list(by_name.values()),
        options,
        use_cost_guard=not draft.no_cost_guard,
        listener=listener,
        makes_text=makes_text,
    )


def open_capture(options: ServeOptions) -> "Capture | None":
    """The log of conversations; None where the options ask for none."""
    if options.capture is None:
        return None
    from selfspec.traffic.capture import Capture

    redactor = None
    if options.capture_redact:
        try:
            from selfspec.traffic.redact import Redactor
        except ImportError as error:
            raise ValueError("redacting personal data needs Presidio: pip install 'selfspec[redact]'") from error
        redactor = Redactor()
    return Capture(options.capture, share=options.capture_share, max_bytes=options.capture_megabytes << 20, redact=redactor)
