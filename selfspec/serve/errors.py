"""Errors as each API has them: a status that says whose fault it is, and one sentence that says what to do.

Requests of other APIs are translated into chats. A chat's error names the field that the client wrote.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from selfspec.engine import EngineClosed, EngineFull
from selfspec.failures import describe
from selfspec.serve.fields import FORMS, ProtocolObject
from selfspec.serve.protocol import ChatRequest, CompletionRequest, HeadRequest

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# What Anthropic's API calls errors; other statuses of the client's fault are invalid requests.
MESSAGES_TYPES = {
    **TYPES,
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
}
NOT_AN_OBJECT = "the body is not a JSON object: send one, with `Content-Type: application/json`"
UNKNOWN_FIELD = "is not a field of this request: check its spelling or leave it out"
ROUTES = (
    "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, /v1/models, /v1/heads, "
    "/health and /metrics"
)
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

    @property
    def kind(self) -> str:
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same error in another API's names for a chat's fields."""
        # A name that is a word of English counts at the beginning alone.
        sure = {name: own for name, own in names.items() if "_" in name or re.match(rf"{name}\b", self.message)}
        message = re.sub(r"\w+", lambda word: sure.get(word[0], word[0]), self.message)
        param = self.param and names.get(self.param, self.param)
        return ApiError(self.status, message, param=param, code=self.code, headers=self.headers)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def messages_body(self) -> dict[str, Any]:
        """In the form of Anthropic's API."""
        kind = MESSAGES_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str) -> JSONResponse:
        """The answer to a request for a path, as the path's API has it."""
        body = self.messages_body() if path.startswith("/v1/messages") else self.body()
        return JSONResponse(body, self.status, self.headers)


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of a chat name the fields of the API that the client used."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from error


def unavailable(message: str, retry_seconds: int = 1) -> ApiError:
    """503, with the time after which to try again."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(retry_seconds)})


def field_of(message: str, fields: Collection[str] = FIELDS) -> str | None:
    """The field that a message begins with, as in `seed=1.5 is not allowed`."""
    name = re.match(r"\w*", message)
    return name[0] if name and name[0] in fields else None


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
        return error.response(request.url.path)

    @app.exception_handler(HTTPException)
    async def of_framework(request: Request, error: HTTPException) -> JSONResponse:
        message = error.detail
        place = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            message = f"{place} is not served: the routes are {ROUTES}"
        elif error.status_code == 405:
            message = f"{place} is not allowed: use {(error.headers or {}).get('Allow', 'another method')}"
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response(request.url.path)

    @app.exception_handler(Exception)
    async def of_nobody(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response(request.url.path)


def invalid(first: Mapping[str, Any], body: Any, form: type[ProtocolObject]) -> ApiError:
    """What is wrong with a request's body, from the first of pydantic's errors about its form."""
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "invalid_key":
        return ApiError(400, "a field's name is not valid Unicode: send names without halves of surrogate pairs")
    if not first["loc"]:
        if kind == "value_error":
            return ApiError(400, message, param=field_of(message, {*form.model_fields, *form.REFUSED}))
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
