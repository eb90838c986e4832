"""From the bytes of a request's body to one of the protocol's forms, within the limits.

FastAPI would read any body to its end and validate it on the event loop. Here its size is looked at first, then how many
values it holds, and only then is it parsed, in a lane.
"""

from __future__ import annotations

import asyncio
import json
import re
from email.message import Message
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError

from selfspec.serve.errors import ApiError, field_of, invalid
from selfspec.serve.fields import ProtocolObject
from selfspec.serve.limits import BODY_SECONDS, Limits
from selfspec.serve.messages import CountRequest
from selfspec.serve.protocol import ChatRequest
from selfspec.serve.responses import ResponsesRequest

Form = TypeVar("Form", bound=ProtocolObject)
# A request of another API, which is a chat in other words.
Translated = TypeVar("Translated", bound=ResponsesRequest | CountRequest)

JSON_HEADER = "Content-Type: application/json"
# A string, or a character after which a value may begin.
STRING_OR_BEGINNING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[,\[{]', re.DOTALL)


async def read(http: Request, max_bytes: int) -> bytes:
    """A request's whole body.

    Raises:
        ApiError: it is larger than allowed, takes too long, or is not called JSON.
        starlette.requests.ClientDisconnect: the client went before its end.
    """
    kind = http.headers.get("content-type", "")
    if not _is_json(kind):
        sent = f"the body is sent as {kind}" if kind else "the body is sent without a content type"
        raise ApiError(400, f"{sent}: send JSON, with `{JSON_HEADER}` (curl: -H '{JSON_HEADER}')")
    told = http.headers.get("content-length", "")
    if told.isdecimal() and int(told) > max_bytes:
        raise _too_large(max_bytes)
    parts, num_bytes = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in http.stream():
                parts.append(part)
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds: send it faster") from None
    return b"".join(parts)


def parse(raw: bytes, form: type[Form], limits: Limits) -> Form:
    """Validate a body. Not for the event loop.

    Raises:
        ApiError: what is wrong first.
    """
    if has_more_values(raw, limits.max_values):
        raise ApiError(400, f"the body holds more than {limits.max_values} values: send shorter lists")
    content = None
    try:
        content = json.loads(raw.decode("utf-8-sig"))
        return form.model_validate(content, context=limits)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False)[0], content, form) from error
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON ({error.msg}): send one object") from error
    except (ValueError, RecursionError) as error:
        # Not UTF-8, a number of thousands of digits, or brackets without end.
        message = "the body cannot be read as JSON: send one object in UTF-8 that is not nested too deeply"
        raise ApiError(400, message) from error


def parse_as_chat(raw: bytes, form: type[Translated], limits: Limits) -> tuple[Translated, ChatRequest]:
    """Validate a body of another API, and make a chat of it. Not for the event loop.

    Raises:
        ApiError: what is wrong first.
    """
    body = parse(raw, form, limits)
    content = None
    try:
        content = body.chat()
        return body, ChatRequest.model_validate(content, context=limits)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False)[0], content, ChatRequest).renamed(form.NAMES) from error
    except ValueError as error:
        raise ApiError(400, str(error), param=field_of(str(error), form.model_fields)) from error


def has_more_values(raw: bytes, limit: int) -> bool:
    """Whether a JSON text may hold more values than a limit, found without parsing it.

    Each value but the first comes after a comma or an opening bracket. Where all of these are few enough, none has to be
    looked at; where not, those within strings do not count.
    """
    if sum(map(raw.count, (b",", b"[", b"{"))) <= limit:
        return False
    count = 0
    for match in STRING_OR_BEGINNING.finditer(raw):
        count += raw[match.start()] != 0x22
        if count > limit:
            return True
    return False


def _is_json(content_type: str) -> bool:
    """Whether a content type is JSON: no web page can send that without its server's leave (CORS)."""
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype() if message.get_content_maintype() == "application" else ""
    return subtype == "json" or subtype.endswith("+json")


def _too_large(max_bytes: int) -> ApiError:
    size: Any = max_bytes / 2**20
    return ApiError(413, f"the body is larger than {size:.3g} MiB: send less, or start the server with --max-body-megabytes")
