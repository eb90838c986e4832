"""The routes of the API."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from selfspec import __version__
from selfspec.api import Completion
from selfspec.failures import describe
from selfspec.serve.answers import ChatAnswer
from selfspec.serve.bodies import read
from selfspec.serve.errors import ApiError, add_handlers, api_error, in_words_of
from selfspec.serve.gate import REQUEST_ID, Gate, Tally
from selfspec.serve.messages import CountRequest, MessagesRequest
from selfspec.serve.messages_answer import MessagesAnswer
from selfspec.serve.new_drafters import prepare_drafter
from selfspec.serve.page import add_root
from selfspec.serve.protocol import ChatRequest, CompletionRequest, HeadRequest
from selfspec.serve.responses import ResponsesRequest
from selfspec.serve.responses_answer import ResponsesAnswer
from selfspec.serve.service import Service, Submitted
from selfspec.serve.streams import EventStream, collect, lines, while_connected


def create_app(service: Service, add_page: Callable[[FastAPI], None] | None = None) -> FastAPI:
    """The API as an ASGI application.

    Args:
        add_page: mounts a page at `/`; without one, `GET /` names the routes.
    """
    app = FastAPI(title="selfspec", version=__version__, openapi_url=None)
    has_log = not service.options.no_request_log
    app.add_middleware(Gate, api_keys=service.api_keys, hosts=service.hosts, has_log=has_log, has_page=add_page is not None)
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
    async def chat(http: Request) -> Response:
        raw = await read(http, service.limits.max_body_bytes)

        async def prepare() -> tuple[bool, Submitted]:
            body = await service.parse(raw, ChatRequest)
            new_answer = partial(ChatAnswer, options=body.stream_options)
            return bool(body.stream), await service.chat(body, _new_id("chatcmpl-"), len(raw), new_answer)

        return await _respond(http, service, prepare())

    @app.post("/v1/completions")
    async def complete(http: Request) -> Response:
        raw = await read(http, service.limits.max_body_bytes)

        async def prepare() -> tuple[bool, Submitted]:
            body = await service.parse(raw, CompletionRequest)
            return bool(body.stream), await service.complete(body, _new_id("cmpl-"))

        return await _respond(http, service, prepare())

    @app.post("/v1/responses")
    async def respond(http: Request) -> Response:
        raw = await read(http, service.limits.max_body_bytes)

        async def prepare() -> tuple[bool, Submitted]:
            asked, body = await service.parse_as_chat(raw, ResponsesRequest)
            new_answer = partial(ResponsesAnswer, asked=asked)
            with in_words_of(ResponsesAnswer.NAMES):
                return bool(body.stream), await service.chat(body, _new_id("resp_"), len(raw), new_answer)

        return await _respond(http, service, prepare())

    @app.post("/v1/messages")
    async def create_message(http: Request) -> Response:
        raw = await read(http, service.limits.max_body_bytes)

        async def prepare() -> tuple[bool, Submitted]:
            _, body = await service.parse_as_chat(raw, MessagesRequest)
            with in_words_of(MessagesAnswer.NAMES):
                return bool(body.stream), await service.chat(body, _new_id("msg_"), len(raw), MessagesAnswer)

        return await _respond(http, service, prepare())

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(http: Request) -> Response:
        raw = await read(http, service.limits.max_body_bytes)

        async def count() -> int:
            _, body = await service.parse_as_chat(raw, CountRequest)
            with in_words_of(CountRequest.NAMES):
                return await service.count_tokens(body, len(raw))

        number = await service.while_wanted(http.receive, count())
        return _nobody() if number is None else JSONResponse({"input_tokens": number})

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
    async def load_head(http: Request) -> dict[str, Any]:
        _check_may_change_heads(service)
        body = await service.parse(await read(http, service.limits.max_body_bytes), HeadRequest)
        engine = service.engine

        def load() -> str:
            return engine.load(partial(prepare_drafter, body.drafter), body.name)

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

    @app.exception_handler(ClientDisconnect)
    async def of_leavers(request: Request, error: ClientDisconnect) -> Response:
        return _nobody()

    @app.head("/health")
    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "failed_drafters": list(service.engine.problems)}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    add_root(app, service.name, add_page)
    return app


def _new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


async def _respond(http: Request, service: Service, preparing: Coroutine[Any, Any, tuple[bool, Submitted]]) -> Response:
    """The answer to a call, as a stream or whole, once it is prepared."""
    prepared = await service.while_wanted(http.receive, preparing)
    if prepared is None:
        return _nobody()
    is_stream, call = prepared
    tally: Tally = http.state.tally
    tally.events = call.events

    def count(completion: Completion) -> None:
        tally.add(completion)
        call.log(completion)

    if is_stream:
        return EventStream(lines(call.answer, call.events, count), call.events)
    try:
        completions = await while_connected(http.receive, collect(call.events, count))
    except Exception as error:
        raise api_error(error).renamed(call.answer.NAMES) from error
    finally:
        call.events.close()
    return _nobody() if completions is None else JSONResponse(call.answer.whole(completions))


def _nobody() -> Response:
    """An answer that nobody reads, because the client has gone."""
    return Response(status_code=499)


def _model(service: Service) -> dict[str, Any]:
    target = service.engine.target
    return {
        "id": service.name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "selfspec",
        # A folder's path is this machine's own affair.
        "root": target.label if Path(target.name).exists() else target.name,
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
