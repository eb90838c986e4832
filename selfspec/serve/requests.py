"""From a client's request, once it is validated, to the engine's: settings, token ids, and one request for each sample."""

from __future__ import annotations

from collections.abc import Callable

from selfspec.api import encode
from selfspec.config import SamplingParams
from selfspec.loop.sampling import Grammar
from selfspec.loop.sequence import PromptTooLong, Request, check_sampling
from selfspec.model.chat import LiteralText, check_arguments, reads_tools
from selfspec.model.text_side import TextSide
from selfspec.serve.errors import ApiError, field_of
from selfspec.serve.fields import NOT_TEXT
from selfspec.serve.protocol import ChatRequest, CompletionRequest

# The word that OpenAI's clients look for.
TOO_LONG = "context_length_exceeded"


def sampling_of(
    body: ChatRequest | CompletionRequest, target: TextSide, default_max_tokens: int, *, use_logprobs: bool
) -> SamplingParams:
    """The request's settings, checked against the target."""
    try:
        sampling = body.sampling(
            min(default_max_tokens, target.context_length), target.context_length, use_logprobs=use_logprobs
        )
        check_sampling(target, sampling)
    except ValueError as error:
        raise ApiError(400, str(error), param=field_of(str(error))) from error
    return sampling


def requests_of(
    prompts: list[list[int]],
    sampling: SamplingParams,
    num_top_logprobs: int,
    begin_grammar: Callable[[], Grammar] | None,
) -> list[Request]:
    """One request for each sample of each prompt, in the order of the answer's choices."""
    return [
        Request(prompt, sampling, index, sample_index, num_top_logprobs, begin_grammar)
        for index, prompt in enumerate(prompts)
        for sample_index in range(sampling.n)
    ]


def refusal(error: ValueError, param: str) -> ApiError:
    """A 400 in the error's words, with the code that OpenAI's clients know for prompts that are too long."""
    return ApiError(400, str(error), param=param, code=TOO_LONG if isinstance(error, PromptTooLong) else None)


def encode_chat(target: TextSide, body: ChatRequest, literal: LiteralText | None) -> list[int]:
    """The prompt's token ids. `literal` reads control tokens in the messages as text."""
    messages, tools, arguments = body.for_template(), body.offered_tools or None, body.chat_template_kwargs or {}
    try:
        check_arguments(target.tokenizer, arguments)
        token_ids = target.encode(messages, tools=tools, chat_template_kwargs=arguments, literal=literal)
        if tools and not reads_tools(target.tokenizer, messages, tools, **{**target.chat_template_kwargs, **arguments}):
            raise ValueError("tools are not read by this model's chat template: leave them out, or serve another model")
        return encode(target, token_ids, 0)
    except ValueError as error:
        field = field_of(str(error))
        raise refusal(error, field if field in ("tools", "chat_template_kwargs") else "messages") from error
    except TypeError as error:
        raise ApiError(400, NOT_TEXT, param="messages") from error


def encode_prompt(target: TextSide, prompt: str | list[int], index: int) -> list[int]:
    """The token ids of raw text, or of ids; `index` is the prompt's number, for the error's sentence."""
    try:
        return encode(target, prompt, index)
    except ValueError as error:
        raise refusal(error, "prompt") from error
    except TypeError as error:
        raise ApiError(400, NOT_TEXT, param="prompt") from error
