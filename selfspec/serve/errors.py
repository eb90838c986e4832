"""Errors in the form of OpenAI's API: a status that says whose fault it is, and one sentence that says what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from selfspec.engine import EngineClosed, EngineFull
from selfspec.failures import describe
from selfspec.serve.protocol import FORMS, ChatRequest, CompletionRequest, HeadRequest

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
NOT_AN_OBJECT = "the body is not a JSON object: send one, with `Content-Type: application/json`"
UNKNOWN_FIELD = "is not a field of this request: check its spelling or leave it out"
ROUTES = "/v1/chat/completions, /v1/completions, /v1/models, /v1/heads, /health and /metrics"
FIELDS = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *HeadRequest.model_fields}
# A message that quotes a long value keeps this many characters of its beginning, and of its end, where the remedy is.
MAX_BEGINNING, MAX_END = 300, 200


class ApiError(Exception):
    """A request that is refused or has failed.

    Args:
        param: the wrong field of the request.
        code: a word for programs, such as `model_not_found`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _sentence(message)
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def unavailable(message: str, retry_seconds: int = 1) -> ApiError:
    """503, with the time after which to try again."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(retry_seconds)})


def field_of(message: str) -> str | None:
    """The field that a message begins with, as in `seed=1.5 is not allowed`."""
    name = re.match(r"\w*", message)
    return name[0] if name and name[0] in FIELDS else None


def api_error(error: Exception) -> ApiError:
    """What a client is told about an engine's error.

    A ValueError is the client's fault if it begins with a field of the request. Any other may hold anything, so its text
    stays in the log.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_seconds)})
    if isinstance(error, EngineClosed):
        return unavailable(str(error))
    if isinstance(error, ValueError) and (param := field_of(str(error))):
        return ApiError(400, str(error), param=param)
    message = None if isinstance(error, ValueError | TypeError) else describe(error)
    return ApiError(500, message or f"the server failed on this request ({type(error).__name__})", code="failed")


def add_handlers(app: FastAPI) -> None:
    """Give every error of an app this form, the framework's own errors included."""

    @app.exception_handler(ApiError)
    async def of_ours(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def of_framework(request: Request, error: HTTPException) -> JSONResponse:
        message = error.detail
        place = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            message = f"{place} is not served: the routes are {ROUTES}"
        elif error.status_code == 405:
            message = f"{place} is not allowed: use {(error.headers or {}).get('Allow', 'another method')}"
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()

    @app.exception_handler(Exception)
    async def of_nobody(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()


def invalid(first: Mapping[str, Any], body: Any) -> ApiError:
    """What is wrong with a request's body, from the first of pydantic's errors."""
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "invalid_key":
        return ApiError(400, "a field's name is not valid Unicode: send names without halves of surrogate pairs")
    if not first["loc"]:
        if kind == "value_error":
            return ApiError(400, message, param=field_of(message))
        return ApiError(400, NOT_AN_OBJECT)
    place = _place(first["loc"], body)
    if kind == "missing":
        place.append(str(first["loc"][-1]))
        message = "this field is missing: add it"
    elif kind != "value_error" and len(place) < len(first["loc"]):
        # None of the field's forms fits.
        message = FORMS.get(place[-1], message)
    if kind == "extra_forbidden":
        return ApiError(400, f"{'.'.join(place)} {UNKNOWN_FIELD}", param=place[0])
    if not message.startswith(place[0]):
        message = f"{'.'.join(place)}: {message}"
    return ApiError(400, message, param=place[0])


def _place(loc: Sequence[str | int], body: Any) -> list[str]:
    """The keys and indices that lead from the body to the wrong value, without pydantic's names for a field's forms."""
    place = []
    for part in loc:
        if isinstance(body, dict | list) and (part in body if isinstance(body, dict) else isinstance(part, int)):
            body = body[part]  # type: ignore[index]
            place.append(str(part))
    return place


def _sentence(message: str) -> str:
    """One line of valid Unicode, shortened in the middle where it quotes a long value."""
    line = " ".join(message.encode(errors="replace").decode().split())
    if len(line) <= MAX_BEGINNING + MAX_END:
        return line
    return f"{line[:MAX_BEGINNING]} … {line[-MAX_END:]}"
