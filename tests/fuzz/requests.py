"""Random requests of the server's routes, most of them good, and what the library says to each."""

from __future__ import annotations

import json
from typing import Any

import torch
from fuzz.vocabularies import PIECES, Vocabulary
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec import Target, load_drafter
from selfspec.api import Completion, completion_of, encode
from selfspec.drafters import Drafter
from selfspec.loop.decode import decode
from selfspec.loop.sequence import Request
from selfspec.loop.text import text_of
from selfspec.serve.grammar import GrammarCompiler
from selfspec.serve.protocol import ChatRequest, CompletionRequest
from selfspec.serve.service import DEFAULT_MAX_TOKENS

TEMPLATE = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}a{% endif %}"
FORMS = [
    {"type": "json_object"},
    {"type": "regex", "pattern": "(a|b|日)+ ?é?"},
    {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2}}},
]
CONTEXT_LENGTH = 48


def target_of(vocabulary: Vocabulary) -> Target:
    """A tiny random model of the vocabulary, whose text varies."""
    vocabulary.tokenizer.chat_template = TEMPLATE
    torch.manual_seed(vocabulary.num_rows)
    config = LlamaConfig(
        vocab_size=vocabulary.num_rows,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.5,
        eos_token_id=vocabulary.tokenizer.eos_token_id,
        bos_token_id=vocabulary.tokenizer.bos_token_id,
        pad_token_id=None,
    )
    return Target(LlamaForCausalLM(config).eval(), vocabulary.tokenizer, name="m")


def drafters_of(target: Target) -> list[Drafter]:
    return [drafter for name in ("ngram", "truncated:1") if (drafter := load_drafter(name, target)) is not None]


@st.composite
def bodies(draw: st.DrawFn, vocabulary: Vocabulary) -> tuple[str, dict[str, Any]]:
    """A route, and a request for it."""
    ids = st.integers(0, vocabulary.num_rows - 1)
    # Tokens that come often, and stop strings out of their text.
    forced = draw(st.lists(ids, max_size=4))
    written = text_of(vocabulary.tokenizer, forced[:1] * 4, skip_special_tokens=False)
    places = st.tuples(st.integers(0, max(len(written) - 1, 0)), st.integers(1, 4))
    parts = places.map(lambda place: written[place[0] :][: place[1]]).filter(bool) if written else PIECES
    texts = st.lists(PIECES, min_size=1, max_size=4).map("".join)
    settings: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.sampled_from([0, 0, 1e-40, 1e-12, 0.3, 1, 2]),
        "top_k": st.sampled_from([-1, 0, 1, 3, 2**31 - 1]),
        "top_p": st.sampled_from([1e-12, 0.5, 0.9, 1]),
        "min_p": st.sampled_from([0, 0.2, 1]),
        "presence_penalty": st.sampled_from([-2, 0, 0.5, 2]),
        "frequency_penalty": st.sampled_from([-2, 0, 0.5, 2]),
        "repetition_penalty": st.sampled_from([1e-10, 0.5, 1, 1.3, 1e10, 1e300]),
        "logit_bias": st.dictionaries(ids.map(str), st.sampled_from([-100, -5, 5, 100]), max_size=6),
        "stop": parts | st.lists(parts | PIECES, max_size=3),
        "stop_token_ids": st.lists(ids, max_size=3) | st.just(list(range(vocabulary.num_rows))),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "min_tokens": st.integers(0, 3),
        "n": st.integers(1, 3),
        "response_format": st.sampled_from(FORMS),
    }
    names = draw(st.sets(st.sampled_from(sorted(settings)), max_size=6))
    body = {name: draw(settings[name]) for name in sorted(names)}
    if forced:
        body["logit_bias"] = body.get("logit_bias", {}) | dict.fromkeys(map(str, forced), 5)
        if draw(st.booleans()):
            body["logit_bias"][str(forced[0])] = 100
            body["stop"] = draw(parts)
    body |= {"model": "m", "seed": draw(st.integers(-(2**63), 2**63 - 1)), "max_tokens": draw(st.integers(1, 8))}
    num_tops = draw(st.sampled_from([None, 0, 2, 20]))
    if draw(st.booleans()):
        body["messages"] = [{"role": "user", "content": text} for text in draw(st.lists(texts, min_size=1, max_size=2))]
        if num_tops is not None:
            body |= {"logprobs": True, "top_logprobs": num_tops}
        return "chat/completions", body
    tokens = st.lists(ids, min_size=1, max_size=12)
    body["prompt"] = draw(
        texts | tokens | st.lists(texts, min_size=1, max_size=2) | st.lists(tokens, min_size=1, max_size=2)
    )
    if num_tops is not None:
        body["logprobs"] = num_tops
    return "completions", body


def requests_of(target: Target, route: str, body: dict[str, Any]) -> list[Request]:
    """The body as the library takes it.

    Raises:
        ValueError: it is none that can be served.
    """
    written = json.dumps(body)
    parsed: ChatRequest | CompletionRequest
    if route == "completions":
        parsed = CompletionRequest.model_validate_json(written)
        prompts = [encode(target, prompt, 0) for prompt in parsed.prompts]
        num_tops, default = parsed.logprobs, DEFAULT_MAX_TOKENS
    else:
        parsed = ChatRequest.model_validate_json(written)
        prompts = [encode(target, [message.for_template() for message in parsed.messages], 0)]
        num_tops, default = parsed.top_logprobs if parsed.logprobs else None, target.context_length
    sampling = parsed.sampling(default, target.context_length, use_logprobs=True)
    form = parsed.response_format
    begin = GrammarCompiler(target).compile(form) if form is not None else None
    return [
        Request(prompt, sampling, index, sample, num_tops or 0, begin)
        for index, prompt in enumerate(prompts)
        for sample in range(sampling.n)
    ]


def said_by_the_library(target: Target, requests: list[Request]) -> list[Completion]:
    """The answers without drafts, one at a time."""
    steps = decode(target, requests)
    done = [completion_of(sequence) for step in steps for sequence in step.finished]
    return sorted(done, key=lambda completion: (completion.prompt_index, completion.sample_index))
