"""The routes of the API, and the gate that every request passes."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec import __version__
from selfspec.api import Completion
from selfspec.failures import describe
from selfspec.serve.answers import Answer, Events, EventStream, collect, lines, while_connected
from selfspec.serve.errors import ApiError, add_handlers, api_error
from selfspec.serve.protocol import ChatRequest, CompletionRequest, HeadRequest
from selfspec.serve.service import Service

# Ten times a prompt of a million tokens.
MAX_BODY_BYTES = 64 << 20
REQUEST_ID = "x-request-id"


def create_app(service: Service) -> FastAPI:
    """The API as an ASGI application."""
    app = FastAPI(title="selfspec", version=__version__, openapi_url=None)
    app.add_middleware(Gate, api_keys=service.api_keys)
    if service.options.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.options.cors_origin),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    add_handlers(app)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: Request) -> Response:
        parts = await service.chat(body, f"chatcmpl-{uuid.uuid4().hex}")
        return await _respond(body, http, *parts, use_logprobs=bool(body.logprobs))

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, http: Request) -> Response:
        parts = await service.complete(body, f"cmpl-{uuid.uuid4().hex}")
        return await _respond(body, http, *parts, num_prompts=len(body.prompts), use_logprobs=body.logprobs is not None)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @app.get("/v1/heads")
    async def heads() -> dict[str, Any]:
        return {"object": "list", "data": [_head(service, name) for name in service.engine.drafters]}

    @app.post("/v1/heads")
    async def load_head(body: HeadRequest) -> dict[str, Any]:
        _check_may_change_heads(service)
        engine = service.engine

        def load() -> str:
            return engine.load(service.prepare_drafter(body.drafter), body.name)

        try:
            return _head(service, await asyncio.to_thread(load))
        except Exception as error:
            if (message := describe(error)) is None:
                raise
            raise ApiError(400, message, param="drafter") from error

    @app.delete("/v1/heads/{name:path}")
    async def unload_head(name: str) -> dict[str, Any]:
        _check_may_change_heads(service)
        try:
            await asyncio.to_thread(service.engine.unload, name)
        except KeyError as error:
            known = ", ".join(service.engine.drafters)
            raise ApiError(404, f"drafter {name!r} is not loaded: use one of {known}", code="head_not_found") from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return {"id": name, "object": "head", "deleted": True}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "failed_drafters": list(service.engine.problems)}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


async def _respond(
    body: ChatRequest | CompletionRequest,
    http: Request,
    answer: Answer,
    events: Events,
    on_completion: Callable[[Completion], None],
    *,
    num_prompts: int = 1,
    use_logprobs: bool,
) -> Response:
    if body.stream:
        return EventStream(
            lines(
                answer,
                events,
                on_completion,
                num_prompts=num_prompts,
                wants_usage=body.wants_usage,
                wants_running_usage=body.wants_running_usage,
                use_logprobs=use_logprobs,
            ),
            events,
        )
    try:
        completions = await while_connected(http.receive, collect(events, on_completion))
    except Exception as error:
        raise api_error(error) from error
    finally:
        events.close()
    if completions is None:
        # Nobody reads this answer: the client has gone.
        return Response(status_code=499)
    return JSONResponse(answer.whole(completions))


def _model(service: Service) -> dict[str, Any]:
    target = service.engine.target
    return {
        "id": service.name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "selfspec",
        "root": target.name,
        "max_model_len": target.context_length,
    }


def _head(service: Service, name: str) -> dict[str, Any]:
    engine = service.engine
    problem = engine.problems.get(name)
    return {
        "id": name,
        "object": "head",
        "is_default": name == engine.default_drafter,
        "status": "failed" if problem else "ready",
        "problem": problem,
    }


def _check_may_change_heads(service: Service) -> None:
    if not service.options.allow_heads:
        raise ApiError(403, "drafters are fixed on this server: start it with --allow-heads to load and unload them")


class Gate:
    """Checks every request: limits its size, asks for the API key, and returns an id with the answer."""

    def __init__(self, app: ASGIApp, api_keys: list[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID, "")
        if not (0 < len(request_id) <= 128 and request_id.isascii() and request_id.isprintable()):
            request_id = f"req-{uuid.uuid4().hex}"
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB: send less")
            return message

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        if scope["path"].startswith("/v1/") and not self._may_enter(headers.get("authorization", "")):
            refusal = ApiError(
                401,
                "the API key is missing or wrong: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal.response()(scope, receive, send_with_id)
            return
        await self._app(scope, receive_limited, send_with_id)

    def _may_enter(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode()
        # Compare with every key, each in constant time, so the time taken reveals nothing.
        matches = [secrets.compare_digest(given, known) for known in self._keys]
        return not self._keys or (scheme.lower() == "bearer" and any(matches))
