"""The gate that every request passes: is it meant for this server, may it enter, and how did it end."""

from __future__ import annotations

import ipaddress
import logging
import secrets
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.api import Completion
from selfspec.serve.errors import ApiError
from selfspec.serve.streams import Events

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
# Longer paths are cut in the log.
MAX_LOGGED_PATH = 200
# What monitors ask for every few seconds, which would drown the rest of the log.
PROBES = ("/health", "/metrics")


class Tally:
    """What one request came to, for the line that the log has of it.

    Attributes:
        events: the request's, once the engine has it.
    """

    def __init__(self) -> None:
        self.events: Events | None = None
        self._began = time.perf_counter()
        self._num_prompt = self._num_answer = self._num_passes = 0
        self._seconds = 0.0

    def add(self, completion: Completion) -> None:
        # The samples of one prompt share it.
        self._num_prompt += completion.num_prompt_tokens if completion.sample_index == 0 else 0
        self._num_answer += len(completion.token_ids)
        self._num_passes += completion.num_target_passes
        # Samples are written side by side.
        self._seconds = max(self._seconds, completion.seconds)

    def __str__(self) -> str:
        facts = [f"in {1000 * (time.perf_counter() - self._began):.0f} ms"]
        if self.events is not None and self.events.first_at is not None:
            facts.append(f"first token after {1000 * (self.events.first_at - self._began):.0f} ms")
        if self._num_answer:
            facts.append(f"{self._num_answer / self._seconds:.1f} tokens/s")
            facts.append(f"acceptance length {self._num_answer / self._num_passes:.2f}")
        return ", ".join([*facts, f"{self._num_prompt}+{self._num_answer} tokens"])


class Gate:
    """Refuses requests for other hosts and requests without a key, returns an id with every answer, and logs a line.

    Args:
        api_keys: those that requests to `/v1` must bring one of; none for no keys.
        hosts: names that the `Host` header may have, besides this machine's own and addresses; `*` allows all.
        has_log: a line for each request that is no monitor's.
        has_page: there is a page, whose many small requests are no monitor's and get no line either.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        hosts: Sequence[str],
        has_log: bool = True,
        has_page: bool = False,
    ) -> None:
        self._app = app
        self._has_log = has_log
        self._has_page = has_page
        self._keys = [key.encode() for key in api_keys]
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID, "")
        if not (0 < len(request_id) <= 128 and request_id.isascii() and request_id.isprintable()):
            request_id = f"req-{uuid.uuid4().hex}"
        status = 0
        tally = scope.setdefault("state", {})["tally"] = Tally()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            refusal = self._refusal(scope["path"], headers)
            await (refusal.response(scope["path"]) if refusal else self._app)(scope, receive, send_with_id)
        finally:
            # What the client wrote is not trusted to fit into a line, so the path is the one that is still encoded.
            path = scope.get("raw_path", b"").decode("latin-1").encode("unicode_escape").decode()[:MAX_LOGGED_PATH]
            # An error that nobody foresaw is answered by the layer above this one.
            outcome = (scope["method"], path, status or 500, tally, request_id)
            is_of_page = self._has_page and not scope["path"].startswith("/v1/")
            is_quiet = not self._has_log or ((scope["path"] in PROBES or is_of_page) and status != 403)
            logger.log(logging.DEBUG if is_quiet else logging.INFO, "%s %s %d %s, %s", *outcome)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if not self._is_for_us(headers.get("host", "")):
            return ApiError(
                403,
                "this server does not have the name in the Host header: use its address, or start it with --allowed-host",
                code="host_not_allowed",
            )
        if path.startswith("/v1/") and not self._may_enter(headers):
            return ApiError(
                401,
                "the API key is missing or wrong: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return None

    def _is_for_us(self, host: str) -> bool:
        """Whether a request cannot come from a page whose name was pointed at this machine (DNS rebinding).

        Such a page sends its own name. An address names no page but this server's own, and whoever is no browser may
        leave the header out.
        """
        if "*" in self._hosts or not host:
            return True
        name = host.lower()
        if not name.endswith("]"):
            name = name.rpartition(":")[0] or name
        if name in self._hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True

    def _may_enter(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer] if scheme.lower() == "bearer" else []
        given += headers.getlist("x-api-key")
        # Compare with every key, each in constant time, so the time taken reveals nothing.
        matches = [secrets.compare_digest(key.strip().encode(), known) for key in given for known in self._keys]
        return not self._keys or any(matches)
