"""What the routes use: the engine, once it is loaded, and the way from a client's request to the engine's."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Message

from selfspec.api import Completion
from selfspec.drafters import Drafter
from selfspec.engine import Intake
from selfspec.loop.sampling import Grammar
from selfspec.loop.sequence import Request
from selfspec.model.chat import LiteralText
from selfspec.model.target import Target
from selfspec.model.text_side import TextSide
from selfspec.serve.answers import Answer, CompletionAnswer, message_of, take_apart
from selfspec.serve.bodies import Form, Translated, parse, parse_as_chat
from selfspec.serve.engines import make_engine
from selfspec.serve.errors import ApiError, api_error, field_of, unavailable
from selfspec.serve.forced_calls import forced_grammar
from selfspec.serve.forms import grammar_compiler
from selfspec.serve.lanes import Lanes
from selfspec.serve.limits import Limits
from selfspec.serve.messages import CountRequest
from selfspec.serve.metrics import Metrics
from selfspec.serve.options import ServeOptions
from selfspec.serve.parts import PartParser
from selfspec.serve.protocol import ChatRequest, CompletionRequest, NamedTool, ResponseFormat
from selfspec.serve.requests import TOO_LONG, encode_chat, encode_prompt, refusal, requests_of, sampling_of
from selfspec.serve.streams import Doorbells, Events, while_connected
from selfspec.serve.syntax import Syntax
from selfspec.serve.traffic_log import TrafficLog
from selfspec.traffic.capture import Capture

if TYPE_CHECKING:
    from selfspec.serve.grammar import GrammarCompiler

# OpenAI's default for completions; a chat may go on to the end of the context.
DEFAULT_MAX_TOKENS = 16

Result = TypeVar("Result")


@dataclass(frozen=True)
class Submitted:
    """A call that the engine works on.

    Attributes:
        answer: the form of its answer.
        log: is to be called with each completion.
    """

    answer: Answer
    events: Events
    log: Callable[[Completion], None]


class Service:
    """One model being served.

    Args:
        name: path or Hub id of the model; clients write its last part, or the options' `served_name`.
        host: the name or address that the server was told to listen on.
    """

    def __init__(self, name: str, options: ServeOptions, *, host: str = "localhost") -> None:
        self.name = options.served_name or Path(name).name
        self.options = options
        self.api_keys = [*options.api_key, *filter(None, [os.environ.get("SELFSPEC_API_KEY")])]
        # No page can know a key, so a server with keys goes by any name, unless its names are given.
        self.hosts = ["*"] if self.api_keys and not options.allowed_host else [host, *options.allowed_host]
        self.metrics = Metrics(self.name)
        self.started = time.time()
        self.traffic_log: TrafficLog | None = None
        self.is_draining = False
        # Called if the engine ends by itself; the server then ends, too.
        self.on_failure: Callable[[Exception], None] = lambda error: None
        self._engine: Intake | None = None
        self._limits: Limits | None = None
        self._lanes = Lanes()
        self._doorbells = Doorbells()
        self._grammars: GrammarCompiler | None = None
        self._syntax: Syntax | None = None
        self._literal: LiteralText | None = None

    def open(self, target: Target, drafters: list[Drafter], *, use_cost_guard: bool, capture: Capture | None = None) -> None:
        """Start to serve with an engine in this process. Before this, every request is told to wait."""
        engine = make_engine(target, drafters, self.options, use_cost_guard=use_cost_guard, listener=self.metrics)
        self.attach(engine, capture=capture)

    def attach(self, engine: Intake, *, capture: Capture | None = None) -> None:
        """Start to serve with an engine that tells `self.metrics` what it does."""
        target, options = engine.target, self.options
        self._syntax = Syntax.of(
            target.tokenizer, tool_format=options.tool_format, reasoning_format=options.reasoning_format
        )
        if options.literal_text:
            self._literal = LiteralText(target.tokenizer)
        self.metrics.watch("num_requests_running", "requests in prefill or decoding", lambda: engine.num_running)
        self.metrics.watch("num_requests_waiting", "requests in the queue", lambda: engine.num_waiting)
        self.metrics.watch("kv_cache_usage_perc", "share of the KV cache in use, 0 to 1", lambda: engine.cache_use)
        if capture is not None:
            self.traffic_log = TrafficLog(capture, self.name, target)
            self.metrics.watch("captured_conversations", "conversations logged", lambda: capture.num_written)
            self.metrics.watch("capture_dropped", "conversations that could not be logged", lambda: capture.num_dropped)
        self._grammars = grammar_compiler(target)
        max_megabytes = options.max_body_megabytes
        self._limits = Limits.of(engine, max_body_bytes=None if max_megabytes is None else max_megabytes << 20)
        self._engine = engine

    @property
    def limits(self) -> Limits:
        """What a request may cost; a 503 if none is taken."""
        limits = self._limits
        # They are there as soon as the engine is.
        assert self.engine and limits is not None
        return limits

    @property
    def engine(self) -> Intake:
        """The engine, if it takes requests; a 503 if it does not."""
        if self.is_draining:
            raise unavailable("the server is shutting down: try again later, or elsewhere", retry_seconds=10)
        if self._engine is None:
            raise unavailable(f"{self.name} is being loaded: try again in a moment", retry_seconds=5)
        return self._engine

    def fail(self, error: Exception) -> None:
        """Take no more requests, because the engine has ended by itself."""
        self.is_draining = True
        self.on_failure(error)

    def drain(self) -> None:
        """Refuse new requests, and give running ones `drain_seconds` to end. Blocks."""
        self.is_draining = True
        if self._engine is not None:
            self._engine.drain(self.options.drain_seconds)
            self._engine.close()

    def close(self) -> None:
        """End what still runs, and write the rest of the log."""
        self.is_draining = True
        if self._engine is not None:
            self._engine.close()
        self._lanes.close()
        if self.traffic_log is not None:
            self.traffic_log.capture.close()

    def check_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(404, f"model {name!r} is not served here: ask for {self.name!r}", code="model_not_found")

    async def parse(self, raw: bytes, form: type[Form]) -> Form:
        """A request's body, validated in a lane."""
        return await self._lanes.run(len(raw), parse, raw, form, self.limits)

    async def while_wanted(
        self, receive: Callable[[], Awaitable[Message]], preparing: Coroutine[Any, Any, Result]
    ) -> Result | None:
        """What a preparation returns; None, and it is given up, if the client goes first."""
        result = await while_connected(receive, preparing)
        if result is None:
            self.metrics.failed(is_cancelled=True)
        return result

    async def parse_as_chat(self, raw: bytes, form: type[Translated]) -> tuple[Translated, ChatRequest]:
        """The body of a request of another API and the chat that it is, validated in a lane."""
        body, chat = await self._lanes.run(len(raw), parse_as_chat, raw, form, self.limits)
        if isinstance(body, CountRequest) and body.forbids_thinking and self._syntax and self._syntax.reasoning_format:
            message = "thinking cannot be disabled here: set chat_template_kwargs, if the model's chat template has a switch"
            raise ApiError(400, message, param="thinking")
        return body, chat

    async def chat(self, body: ChatRequest, answer_id: str, num_bytes: int, new_answer: Callable[..., Answer]) -> Submitted:
        """Submit a chat request.

        Args:
            num_bytes: the size of its body, which bounds what its template and its tokens cost.
            new_answer: makes the form of its answer.
        """
        target = self._target(body.model)
        sampling = sampling_of(body, target, target.context_length, use_logprobs=bool(body.logprobs))
        self._check_texts(body)
        self._check_room(sampling.n, body.drafter)
        prompt = await self._encode(body, num_bytes)
        begin_grammar = await self._grammar(body, prompt)
        syntax, tools = self._syntax, body.offered_tools
        assert syntax is not None
        is_hiding = sampling.skip_special_tokens and syntax.needs_special_tokens(has_tools=bool(tools))
        # JSON begins with the answer, so there is no reasoning before it.
        is_open = not body.is_json and syntax.is_open(prompt)
        if is_hiding:
            sampling = sampling.with_(skip_special_tokens=False)
        requests = requests_of([prompt], sampling, body.top_logprobs or 0, begin_grammar)

        def new_parser() -> PartParser | None:
            return syntax.parser(tools, is_open=is_open, is_hiding=is_hiding)

        drafter = self._drafter_name(body.drafter)
        given = (answer_id, self.name, target.tokenizer, sampling.n, drafter, requests)
        answer = new_answer(*given, new_parser=new_parser)

        def log(completion: Completion) -> None:
            if self.traffic_log is not None:
                said = message_of(take_apart(new_parser(), completion.text, is_last=True))
                self.traffic_log.add_chat(answer_id, body, body.for_template(), said, completion, drafter)

        return Submitted(answer, self._submit(requests, body.drafter, prompt_field="messages"), log)

    async def count_tokens(self, body: ChatRequest, num_bytes: int) -> int:
        """The number of tokens of a chat's prompt."""
        self.check_model(body.model)
        self._check_texts(body)
        return len(await self._encode(body, num_bytes))

    async def complete(self, body: CompletionRequest, answer_id: str) -> Submitted:
        """Submit a completion request."""
        target = self._target(body.model)
        sampling = sampling_of(body, target, DEFAULT_MAX_TOKENS, use_logprobs=body.logprobs is not None)
        if not body.prompts:
            raise ApiError(400, "prompt is an empty list: give at least one", param="prompt")
        for index, prompt in enumerate(body.prompts):
            if isinstance(prompt, str):
                self._check_length(len(prompt), f"prompt {index}", "prompt")
        self._check_room(len(body.prompts) * sampling.n, body.drafter)
        # One by one, so that shorter work comes in between, and the rest is left once the client has gone.
        prompts = [
            await self._lanes.run(len(prompt), encode_prompt, target, prompt, index)
            for index, prompt in enumerate(body.prompts)
        ]
        begin_grammar = await self._grammar(body)
        requests = requests_of(prompts, sampling, body.logprobs or 0, begin_grammar)

        drafter = self._drafter_name(body.drafter)
        given = (answer_id, self.name, target.tokenizer, sampling.n, drafter, requests)
        answer = CompletionAnswer(*given, options=body.stream_options)

        def log(completion: Completion) -> None:
            if self.traffic_log is not None:
                self.traffic_log.add_completion(answer_id, body, completion, drafter)

        return Submitted(answer, self._submit(requests, body.drafter, prompt_field="prompt"), log)

    def _target(self, model: str) -> TextSide:
        self.check_model(model)
        return self.engine.target

    def _drafter_name(self, name: str | None) -> str:
        return name or self.engine.default_drafter

    async def _encode(self, body: ChatRequest, num_bytes: int) -> list[int]:
        return await self._lanes.run(num_bytes, encode_chat, self.engine.target, body, self._literal)

    def _check_texts(self, body: ChatRequest) -> None:
        self._check_length(sum(len(message.content or "") for message in body.messages), "a text", "messages")

    def _check_length(self, num_characters: int, name: str, param: str) -> None:
        """Refuse a text that cannot fit into the context, before it is tokenised."""
        most = self.limits.max_characters
        if num_characters > most:
            message = (
                f"{name} of {num_characters} characters cannot fit: the {self.engine.max_tokens} tokens of a prompt and its "
                f"answer never hold more than {most}: shorten the prompt"
            )
            raise ApiError(400, message, param=param, code=TOO_LONG)

    def _check_room(self, num_answers: int, drafter: str | None) -> None:
        """Refuse what the engine would refuse at once, before anything is prepared for it."""
        try:
            self.engine.check_drafter(drafter)
            self.engine.check_room(num_answers)
        except ValueError as error:
            raise ApiError(400, str(error), param=field_of(str(error)) or "n") from error
        except Exception as error:
            raise api_error(error) from error

    async def _grammar(
        self, body: ChatRequest | CompletionRequest, prompt: Sequence[int] = ()
    ) -> Callable[[], Grammar] | None:
        """What begins the grammar of an answer; None for any text."""
        forced = self._forced_form(body, prompt) if isinstance(body, ChatRequest) and body.forced_tools else None
        wanted = forced or body.response_format
        if wanted is None or wanted.type == "text":
            return None
        return await self._lanes.run_form(self._compile, wanted, "response_format" if forced is None else "tool_choice")

    def _compile(self, wanted: ResponseFormat, field: str) -> Callable[[], Grammar] | None:
        if self._grammars is None:
            raise ApiError(501, f"this server has no llguidance, which {field} needs: leave it out", param=field)
        try:
            return self._grammars.compile(wanted)
        except ValueError as error:
            raise ApiError(400, str(error).replace("response_format", field), param=field) from error

    def _forced_form(self, body: ChatRequest, prompt: Sequence[int]) -> ResponseFormat:
        assert self._syntax is not None
        is_single = isinstance(body.tool_choice, NamedTool) or body.parallel_tool_calls is False
        is_open = self._syntax.is_open(prompt)
        try:
            grammar = forced_grammar(self._syntax, body.forced_tools, is_open=is_open, is_single=is_single)
        except ValueError as error:
            raise ApiError(400, str(error), param=field_of(str(error))) from error
        return ResponseFormat(type="grammar", grammar=grammar)

    def _submit(self, requests: list[Request], drafter: str | None, *, prompt_field: str) -> Events:
        engine = self.engine
        try:
            return Events(engine, requests, drafter, self._doorbells.here())
        except ValueError as error:
            # What is left that the engine can refuse is the prompt's length.
            raise refusal(error, field_of(str(error)) or prompt_field) from error
        except Exception as error:
            raise api_error(error) from error
