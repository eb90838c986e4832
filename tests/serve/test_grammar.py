"""[S9] A form holds at every token, whatever is drafted, and speculation does not change what is written in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
import torch
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from selfspec import SamplingParams, Target
from selfspec.drafters import Drafter, DraftModelDrafter, NgramDrafter
from selfspec.engine import SpecEngine
from selfspec.loop.batch import Batch
from selfspec.loop.drafter import Proposal
from selfspec.loop.sequence import Request
from selfspec.serve.app import create_app
from selfspec.serve.grammar import GrammarCompiler
from selfspec.serve.options import ServeOptions
from selfspec.serve.protocol import ResponseFormat
from selfspec.serve.service import Service
from selfspec.tree import from_parents

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    },
    "required": ["animal", "count", "names"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "pets", "schema": SCHEMA, "strict": True}}
PATTERN = r"(cat|dog) [0-9]{3}-[a-f]{2,6}"
BY_PATTERN = {"type": "regex", "pattern": PATTERN}
BY_GRAMMAR = {"type": "grammar", "grammar": 'start: animal (" and " animal)~1..3\nanimal: "cat" | "dog"'}


class BreakingDrafter(Drafter):
    """Random bushes: most tokens break any form, some follow it by accident, and single bytes make half characters."""

    name = "breaking"
    num_draft_tokens = 7

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        tokens = torch.randint(batch.target.vocab_size, (len(batch), 8), generator=self.generator)
        tokens[:, 0] = batch.roots
        # Now and then the end itself, the most tempting break of all.
        tokens[:, 1] = batch.target.eos_token_ids[0]
        parents = torch.tensor([[-1, 0, 0, 0, 1, 2, 2, 5]]).expand(len(batch), -1)
        return Proposal(from_parents(tokens, parents))


def request(target: Target, form: dict[str, Any], seed: int, index: int = 0) -> Request:
    begin = GrammarCompiler(target).compile(ResponseFormat.model_validate(form))
    settings = {} if seed == 0 else {"temperature": 1.2, "seed": seed, "top_p": 0.95, "presence_penalty": 0.3}
    return Request([5 + seed, 9, 11], SamplingParams(max_new_tokens=400, **settings), index, begin_grammar=begin)


def check(form: dict[str, Any], text: str) -> None:
    if form is BY_SCHEMA:
        answer = json.loads(text)
        assert set(answer) == {"animal", "count", "names"}
        assert answer["animal"] in ("cat", "dog") and 0 <= answer["count"] <= 999
        assert len(answer["names"]) <= 2 and all(len(name) <= 5 for name in answer["names"])
    else:
        pattern = PATTERN if form is BY_PATTERN else r"(cat|dog)( and (cat|dog)){1,3}"
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("form", [BY_SCHEMA, BY_PATTERN, BY_GRAMMAR], ids=["schema", "regex", "grammar"])
def test_a_form_holds_and_drafts_change_nothing(
    make_engine: Callable[..., SpecEngine], target: Target, form: dict[str, Any]
) -> None:
    """Greedy and sampled, beside neighbours without a form, with blocks running out."""
    draft_model = DraftModelDrafter(target.truncated(1), target.vocab_size, num_draft_tokens=3, name="draft")
    engine = make_engine(BreakingDrafter(), NgramDrafter(4), draft_model, max_batch=11, cache_tokens=256)
    free = [Request([7, 8, 9 + i], SamplingParams(max_new_tokens=60, ignore_eos=True), 100 + i) for i in range(3)]
    texts = {}
    for name in ("none", "breaking", "ngram", "draft"):
        requests = [request(target, form, seed, index=seed) for seed in range(8)]
        done = {}
        for event in engine.stream([*requests, *free], drafter=name):
            assert event.error is None
            if event.completion is not None:
                done[event.request.index] = event.completion
        texts[name] = {index: completion.token_ids for index, completion in done.items()}
        for seed in range(8):
            check(form, done[seed].text)
            assert done[seed].finish_reason == "stop"
        if name == "draft":
            assert sum(completion.num_accepted_tokens for completion in done.values()) > 0
    assert texts["none"] == texts["breaking"] == texts["ngram"] == texts["draft"]
    assert form is not BY_SCHEMA or engine._scheduler.num_preemptions > 0
    assert len({tuple(ids) for index, ids in texts["none"].items() if index < 100}) > 3, "the form left no choice"


def test_answers_in_a_form_by_openais_package(server: Any, target: Target) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        call: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "pets"}], "seed": 1}
        whole = client.chat.completions.create(**call, response_format=BY_SCHEMA).choices[0].message.content
        check(BY_SCHEMA, whole)
        stream = client.chat.completions.create(**call, response_format=BY_SCHEMA, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
        plain, as_text = (
            client.chat.completions.create(**call, max_tokens=8, **form).choices[0].message.content
            for form in ({}, {"response_format": {"type": "text"}})
        )
        assert plain == as_text
        form = {"response_format": BY_PATTERN}
        legacy = client.completions.create(model="tiny", prompt="a", max_tokens=60, extra_body=form)
        check(BY_PATTERN, legacy.choices[0].text)
        thing = client.chat.completions.create(**call, max_tokens=40, response_format={"type": "json_object"})
        assert thing.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"response_format": {"type": "regex", "pattern": "(["}}, 'invalid regex "(["'),
        ({"response_format": {"type": "grammar", "grammar": "begin: nothing"}}, "response_format cannot be used: "),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wrong"}}}},
            "Invalid type: wrong",
        ),
        ({"response_format": {"type": "json_schema"}}, "takes json_schema: give just that"),
        ({"response_format": {"type": "text", "pattern": "a"}}, "takes no other field"),
        ({"response_format": {"type": "xml"}}, "'json_schema'"),
        ({"response_format": BY_PATTERN, "ignore_eos": True}, "leave out ignore_eos"),
        ({"response_format": BY_PATTERN, "min_tokens": 5}, "and min_tokens"),
    ],
)
def test_mistakes_in_forms_are_named(post: Callable[..., httpx.Response], body: dict[str, Any], message: str) -> None:
    answer = post(messages=[{"role": "user", "content": "a"}], **body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"] and "\n" not in answer.json()["error"]["message"]


def test_a_tokenizer_that_forms_cannot_use_is_the_request_s_error(target: Target) -> None:
    """A client can leave the form out; to try again, as after a fault of the server, would not help it."""
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("</s>", -2.0)], 0))
    backend.decoder = decoders.Metaspace()
    words = Target(target.model, PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"), name="words")
    service = Service("words", ServeOptions())
    service.open(words, [], use_cost_guard=False)
    with TestClient(create_app(service), base_url="http://127.0.0.1") as client:
        call = {"model": "words", "prompt": [1], "max_tokens": 1}
        assert client.post("/v1/completions", json=call).status_code == 200
        answer = client.post("/v1/completions", json={**call, "response_format": BY_PATTERN})
    service.close()
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"
    assert "response_format cannot be used with this model's tokenizer" in answer.json()["error"]["message"]


def test_paths_may_be_asked_for_in_any_order(target: Target) -> None:
    """A parser that goes back and forth says what a fresh one says."""
    begin = GrammarCompiler(target).compile(ResponseFormat.model_validate(BY_PATTERN))
    assert begin is not None
    parser = begin()
    eos = target.eos_token_ids[0]
    texts = ["", "cat", "dog 123-", "do", "cat 999-abcdef", "dog 1", "cat 999-ab", "nonsense", "cat"]
    for text in texts:
        ids = list(target.tokenizer(text).input_ids) if text else []
        for path in (ids, [*ids, eos], [*ids, eos, 5]):
            asked = parser.allowed(path)
            assert torch.equal(asked, begin().allowed(path)) and asked.any(), (text, path)
        assert bool(parser.allowed(ids)[eos]) == (text in ("cat 999-abcdef", "cat 999-ab", "nonsense"))


def test_a_form_too_complex_to_follow_fails_alone(make_engine: Callable[..., SpecEngine], target: Target) -> None:
    engine = make_engine()
    hopeless = request(target, BY_SCHEMA, seed=1, index=1)
    begin = hopeless.begin_grammar
    assert begin is not None

    def begin_with_problem() -> object:
        grammar = begin()
        grammar.problem = "response_format became too complex to follow: too many states"
        return grammar

    broken = Request(hopeless.prompt_ids, hopeless.sampling, 1, begin_grammar=begin_with_problem)
    events = list(engine.stream([broken, request(target, BY_SCHEMA, seed=2, index=2)]))
    [failed] = [event for event in events if event.error is not None]
    assert failed.request.index == 1 and "too many states" in str(failed.error)
    [done] = [event.completion for event in events if event.completion is not None]
    check(BY_SCHEMA, done.text)
