"""Errors as OpenAI's API has them: a status that says whose fault it is, and one sentence that says what to do."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from selfspec.engine import EngineClosed, EngineFull
from selfspec.failures import describe

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# What pydantic says of fields that are not there, in a sentence with a remedy.
UNKNOWN_FIELD = "is not a field of this request: check its spelling or leave it out"


class ApiError(Exception):
    """An answer other than 200.

    Args:
        param: the field of the request that is wrong.
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
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def unavailable(message: str, retry_seconds: int = 1) -> ApiError:
    """503: not now."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(retry_seconds)})


def api_error(error: Exception) -> ApiError:
    """What a client is told of an engine's error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_seconds)})
    if isinstance(error, EngineClosed):
        return unavailable(str(error))
    return ApiError(500, describe(error) or f"the server failed on this request ({type(error).__name__})", code="failed")


def add_handlers(app: FastAPI) -> None:
    """Give every error of an app that shape, the framework's own included."""

    @app.exception_handler(ApiError)
    async def of_ours(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def of_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        return _invalid(error).response()

    @app.exception_handler(HTTPException)
    async def of_framework(request: Request, error: HTTPException) -> JSONResponse:
        message = error.detail
        if message == HTTPStatus(error.status_code).phrase:
            message = f"{request.method} {request.url.path}: {message.lower()}"
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()

    @app.exception_handler(Exception)
    async def of_nobody(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()


def _invalid(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a request's body."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON ({first.get('ctx', {}).get('error', 'invalid')}): send one object")
    if first["loc"] == ("body",) and first["type"] != "value_error":
        return ApiError(400, "the body is not a JSON object: send one, with `Content-Type: application/json`")
    place = [str(part) for part in first["loc"] if part != "body"]
    param = place[0] if place else None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{'.'.join(place)} {UNKNOWN_FIELD}", param=param)
    message = first["msg"].removeprefix("Value error, ")
    if param and not message.startswith(param):
        message = f"{'.'.join(place)}: {message}"
    return ApiError(400, message, param=param)
