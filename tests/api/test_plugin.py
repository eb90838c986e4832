"""transformers' `generate` with our decoding: the tokens, paddings, streams and outputs are its own."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support import FAMILIES, tiny_model
from transformers import (
    AsyncTextIteratorStreamer,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
    set_seed,
)
from transformers.generation.logits_process import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

import selfspec
from selfspec import Target
from selfspec.api.plugin import target_of

OURS: dict[str, Any] = {"custom_generate": selfspec.custom_generate, "drafter": "ngram", "use_cost_guard": False}
# Three prompts of different lengths, which repeat themselves so that there is something to accept.
PROMPTS = [[5, 6, 7, 8] * 4, [9, 10, 11], [20, 21] * 5 + [22]]


def padded(prompts: list[list[int]] = PROMPTS, pad: int = 0) -> dict[str, torch.Tensor]:
    length = max(map(len, prompts))
    rows = [[pad] * (length - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def reference(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, which selfspec never touches."""
    return copy.deepcopy(model)


@pytest.fixture(scope="module")
def pretrained(tiny_target_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    return AutoModelForCausalLM.from_pretrained(tiny_target_dir), AutoTokenizer.from_pretrained(
        tiny_target_dir, padding_side="left"
    )


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "gemma2", "gpt2", "opt", "gpt-oss", "qwen3-moe"])
def test_padded_batches_get_the_tokens_of_generate(family: str) -> None:
    """And `generate` alone gives the same before and after."""
    assert family in FAMILIES
    model = tiny_model(family)
    inputs, options = padded(), {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**inputs, **options)
    for drafter in ("ngram", "none"):
        got = model.generate(**inputs, **options, **{**OURS, "drafter": drafter})
        assert torch.equal(got, expected) and got.dtype == expected.dtype
    assert torch.equal(model.generate(**inputs, **options), expected)


SETTINGS: dict[str, dict[str, Any]] = {
    "an end": {"eos_token_id": [17, 30, 44, 51, 8]},
    "no end": {"eos_token_id": None},
    "another padding": {"eos_token_id": [17, 30, 44, 51, 8], "pad_token_id": 3},
    "length with the prompt": {"max_length": 30, "max_new_tokens": None},
    "a shortest answer": {"eos_token_id": [17, 30, 44, 51, 8], "min_new_tokens": 9},
    "a shortest answer with the prompt": {"eos_token_id": [17, 30, 44, 51, 8], "min_length": 25},
    "greedy with settings of sampling": {"temperature": 0.3, "top_k": 3, "top_p": 0.5},
    "a configuration": {"generation_config": GenerationConfig(max_new_tokens=7, eos_token_id=2, pad_token_id=0)},
    "several of each": {"num_return_sequences": 1, "use_cache": False},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_followed(model: PreTrainedModel, reference: PreTrainedModel, name: str) -> None:
    options = {"max_new_tokens": 24, "do_sample": False, **SETTINGS[name]}
    if "generation_config" in options:
        del options["max_new_tokens"]
    expected = reference.generate(**padded(), **options)
    assert torch.equal(model.generate(**padded(), **options, **OURS), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 1.4, "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])},
    ],
    ids=["as a setting", "as a processor"],
)
def test_penalties_are_followed(model: PreTrainedModel, reference: PreTrainedModel, options: dict[str, Any]) -> None:
    """Of a prompt without padding, because older transformers count padding too."""
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, **options}
    expected = reference.generate(**padded(PROMPTS[:1]), **options)
    assert torch.equal(model.generate(**padded(PROMPTS[:1]), **options, **OURS), expected)


def test_a_prompt_alone_and_a_mask_left_out(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    ids = torch.tensor([PROMPTS[0]])
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = reference.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, **OURS), expected)
    assert torch.equal(model.generate(inputs=ids, custom_generate=selfspec.custom_generate, **options), expected)
    output = model.generate(ids, return_dict_in_generate=True, **options, **OURS)
    assert torch.equal(output.sequences, expected) and output.scores is None


def test_samples_repeat_with_the_seed_and_differ_from_each_other(model: PreTrainedModel) -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01}

    def sampled(seed: int) -> torch.Tensor:
        set_seed(seed)
        return model.generate(**padded(), num_return_sequences=2, **options, **OURS)

    first = sampled(1)
    assert first.shape[0] == 6 and torch.equal(first, sampled(1)) and not torch.equal(first, sampled(2))
    assert not torch.equal(first[0], first[1])


def test_samples_have_the_distribution_of_generate(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """All settings of sampling at once: the tokens that may come, and roughly how often."""
    ids = torch.tensor([PROMPTS[1]])
    options = {"max_new_tokens": 1, "do_sample": True, "temperature": 1.3, "top_k": 4, "repetition_penalty": 1.2}
    counts = []
    for each, ours in ((reference, {}), (model, OURS)):
        set_seed(0)
        tokens = each.generate(ids, num_return_sequences=400, **options, **ours)[:, -1]
        counts.append(torch.bincount(tokens, minlength=61) / 400)
    assert (counts[0] > 0).sum() == 4 and torch.equal(counts[0] > 0, counts[1] > 0)
    assert float((counts[0] - counts[1]).abs().max()) < 0.12


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "the generation mode beam_search"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "the generation mode assisted_generation"),
    "an assistant": ({"assistant_model": tiny_model("llama")}, "an assistant_model"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "hidden states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    "a processor": ({"no_repeat_ngram_size": 2}, "the logits processor NoRepeatNGramLogitsProcessor"),
    "bad words": ({"bad_words_ids": [[5]]}, "the logits processor NoBadWordsLogitsProcessor"),
    "a filter": ({"do_sample": True, "typical_p": 0.5}, "the logits processor TypicalLogitsWarper"),
    "a constraint": ({"prefix_allowed_tokens_fn": lambda b, ids: [5]}, "PrefixConstrainedLogitsProcessor"),
    "a time limit": ({"max_time": 1.0}, "the stopping criterion MaxTimeCriteria"),
    "a criterion": ({"stopping_criteria": StoppingCriteriaList([lambda ids, scores: False])}, "criterion function"),
    "positions": ({"position_ids": torch.arange(16)[None] + 2}, "a prompt with position_ids of its own"),
    "a prompt's end that does not count": (
        {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=2)])},
        "prompt_ignore_length",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(model: PreTrainedModel, name: str) -> None:
    options, words = REFUSED[name]
    with pytest.raises(ValueError, match=f"{words}.* is not served by selfspec.custom_generate"):
        model.generate(torch.tensor([PROMPTS[0]]), **{"max_new_tokens": 4, "do_sample": False, **options}, **OURS)


def test_a_cache_with_a_text_in_it_is_refused(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    ids = torch.tensor([PROMPTS[0]])
    # Its name changed between versions.
    name = "cache" if "cache" in inspect.signature(reference.forward).parameters else "past_key_values"
    cache = {name: reference(ids[:, :-1])[name]}
    with pytest.raises(ValueError, match=f"the model input {name} is not served"):
        model.generate(ids, **cache, max_new_tokens=4, **OURS)


def test_padding_on_the_right_is_refused(model: PreTrainedModel) -> None:
    inputs = {"input_ids": torch.tensor([[5, 6, 7], [5, 6, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    with pytest.raises(ValueError, match="prompt 1 has padding after .*: set the tokenizer's padding_side to 'left'"):
        model.generate(**inputs, max_new_tokens=4, **OURS)


def test_a_wrong_drafter_and_a_family_that_is_not_served_are_told(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="drafter 'nrgam' is not known"):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4, **{**OURS, "drafter": "nrgam"})
    with pytest.raises(ValueError, match="not used by the model|drafters"):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4, drafters="ngram", **OURS)


# Streamers.


class Recorded(BaseStreamer):
    """Every call, as a list of lists."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "three"])
def test_streamers_are_called_as_generate_calls_them(
    model: PreTrainedModel, reference: PreTrainedModel, prompts: list[list[int]]
) -> None:
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": [17, 30, 44, 51, 8]}
    expected, got = Recorded(), Recorded()
    reference.generate(**padded(prompts), streamer=expected, **options)
    model.generate(**padded(prompts), streamer=got, **options, **OURS)
    assert got.calls == expected.calls and got.calls[-1] == "end"


def test_text_streamers(
    pretrained: tuple[PreTrainedModel, PreTrainedTokenizerFast], capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = pretrained
    inputs = tokenizer("the cat sat on the mat", return_tensors="pt")
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = tokenizer.decode(model.generate(**inputs, **options)[0])
    model.generate(**inputs, streamer=TextStreamer(tokenizer), **options, **OURS)
    assert capsys.readouterr().out == expected + "\n"

    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    work = threading.Thread(target=model.generate, kwargs={**inputs, "streamer": streamer, **options, **OURS})
    work.start()
    assert "".join(streamer) == expected
    work.join()

    async def read() -> str:
        streamer = AsyncTextIteratorStreamer(tokenizer, timeout=60)
        work = asyncio.to_thread(model.generate, **inputs, streamer=streamer, **options, **OURS)
        task = asyncio.create_task(work)
        text = "".join([piece async for piece in streamer])
        await task
        return text

    assert asyncio.run(read()) == expected


# Text.


def test_stop_strings(pretrained: tuple[PreTrainedModel, PreTrainedTokenizerFast]) -> None:
    model, tokenizer = pretrained
    inputs = tokenizer("the cat sat on the mat", return_tensors="pt")
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = tokenizer.decode(model.generate(**inputs, **options)[0, inputs.input_ids.shape[1] :])
    stop = next(answer[i : i + 2] for i in range(12, len(answer)) if answer[i : i + 2].isascii())
    expected = model.generate(**inputs, **options, stop_strings=stop, tokenizer=tokenizer)
    assert expected.shape[1] < inputs.input_ids.shape[1] + 30
    for given in ({"stop_strings": stop}, {"stop_strings": [stop], "tokenizer": tokenizer}):
        assert torch.equal(model.generate(**inputs, **options, **given, **OURS), expected)
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, stop)])
    assert torch.equal(model.generate(**inputs, **options, stopping_criteria=criteria, **OURS), expected)


def test_stop_strings_without_a_tokenizer(
    model: PreTrainedModel, pretrained: tuple[PreTrainedModel, PreTrainedTokenizerFast]
) -> None:
    ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(ValueError, match="needs a tokenizer"):
        model.generate(ids, max_new_tokens=4, stop_strings="a", **OURS)
    _, tokenizer = pretrained
    own = tiny_model("llama", vocab_size=len(tokenizer))
    got = own.generate(ids, max_new_tokens=4, eos_token_id=None, stop_strings="zzz", target=Target(own, tokenizer), **OURS)
    assert got.shape == (1, 20)


def test_pipelines(pretrained: tuple[PreTrainedModel, PreTrainedTokenizerFast]) -> None:
    model, tokenizer = pretrained
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts, options = ["the cat sat", "one two three four"], {"max_new_tokens": 12, "do_sample": False}
    expected = pipe(texts, batch_size=2, **options)
    assert pipe(texts, batch_size=2, **options, **OURS) == expected
    chat = [{"role": "user", "content": "the cat"}]
    assert pipe(chat, **options, **OURS) == pipe(chat, **options)


def test_a_hub_folder(pretrained: tuple[PreTrainedModel, PreTrainedTokenizerFast], tmp_path: Path) -> None:
    """The folder of docs/python.md."""
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    code = page.partition("`custom_generate/generate.py`")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(code)
    (tmp_path / "config.json").write_text("{}")
    model, tokenizer = pretrained
    inputs = tokenizer("the cat sat on the mat", return_tensors="pt")
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**inputs, **options)
    got = model.generate(**inputs, **options, custom_generate=str(tmp_path), trust_remote_code=True, drafter="ngram")
    assert torch.equal(got, expected)


# The model and its target.


def test_the_target_is_made_once_and_goes_with_its_model() -> None:
    model = tiny_model("llama")
    ids = torch.tensor([PROMPTS[0]])
    model.generate(ids, max_new_tokens=4, **OURS)
    target = target_of(model)
    model.generate(ids, max_new_tokens=4, **OURS)
    assert target_of(model) is target and list(target.drafters) == ["ngram"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert target_of(twin) is not target and target_of(twin).model is twin
    gone = weakref.ref(model)
    del model, target
    gc.collect()
    assert gone() is None


def test_a_model_that_was_changed_gets_a_new_target(reference: PreTrainedModel) -> None:
    model = tiny_model("llama")
    ids = torch.tensor([PROMPTS[0]])
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = reference.generate(ids, **options)
    first = target_of(model)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(ids, **options, **OURS), expected) and target_of(model) is not first
    model.to(torch.bfloat16)
    assert model.generate(ids, **options, **OURS).shape == expected.shape and target_of(model).dtype == torch.bfloat16


def test_threads_may_share_a_model(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    options = {"max_new_tokens": 12, "do_sample": False}
    inputs = [torch.tensor([prompt]) for prompt in PROMPTS * 2]
    got: dict[int, torch.Tensor] = {}

    def answer(number: int) -> None:
        got[number] = model.generate(inputs[number], **options, **OURS)

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, ids in enumerate(inputs):
        assert torch.equal(got[number], reference.generate(ids, **options))
