"""`selfspec serve`: the target as an OpenAI-compatible server."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.hosts import check_host, warn_if_open
from selfspec.cli.options import command, quiet_libraries
from selfspec.config import DraftOptions, TargetOptions
from selfspec.model.default_target import source_of
from selfspec.serve.options import ServeOptions

if TYPE_CHECKING:
    from selfspec.engine import Listener, SpecEngine
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
                "--drafter", help="what proposes tokens, ngram by default; repeatable, and a request may choose among them"
            ),
        ] = None,
        draft: DraftOptions,
        options: ServeOptions,
        host: Annotated[str, typer.Option("--host", help="address to listen on; 0.0.0.0 lets others in")] = "127.0.0.1",
        port: Annotated[int, typer.Option("--port", help="0 takes any free port", min=0, max=65535)] = 8000,
    ) -> None:
        """Serve the target over HTTP with OpenAI's API.

        Example: selfspec serve --drafter eagle --drafter ngram --port 8000
        """
        check_host(host)
        try:
            import fastapi  # noqa: F401
            import prometheus_client  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ValueError(
                "serving needs fastapi, uvicorn and prometheus-client: pip install 'selfspec[serve]'"
            ) from error

        from selfspec.model.devices import resolve_device
        from selfspec.serve.remote import RemoteEngine
        from selfspec.serve.server import listen, run
        from selfspec.serve.service import Service

        quiet_libraries()
        capture = open_capture(options)
        service = Service(source_of(target), options, host=host)
        if not service.api_keys:
            warn_if_open(host, "think of --api-key")
        listener = listen(host, port)
        url = f"http://{host}:{listener.getsockname()[1]}/v1"

        make = partial(load_engine, target, drafter or ["ngram"], draft, options)

        def load() -> None:
            has_process = options.http_process == "on"
            if options.http_process == "auto":
                has_process = resolve_device(target.device).type == "cuda"
            if has_process:
                make_there = partial(make, makes_text=False)
                engine = RemoteEngine(
                    make_there, listener=service.metrics, on_death=service.fail, log_level=options.log_level
                )
                service.attach(engine, capture=capture)
            else:
                service.attach(make(service.metrics), capture=capture)
            typer.echo(f"{url} serves {service.name} (Ctrl-C ends it)")

        run(service, listener, load)


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
    return make_engine(
        model,
        [each for each in loaded if each is not None],
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
