"""Where an output ends: at the first end token, stop string or full length, wherever in an accepted run that falls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from selfspec.api import Completion, generate, stream
from selfspec.config import SamplingParams
from selfspec.loop.accept import accept
from selfspec.loop.batch import Batch
from selfspec.loop.decode import decode
from selfspec.loop.drafter import Drafter, Proposal
from selfspec.loop.group import Step
from selfspec.loop.planner import Planner
from selfspec.loop.sampling import Sampler
from selfspec.loop.sequence import Request, Sequence
from selfspec.model.target import Target
from selfspec.tree import chain

# Tokens drafted a pass; all are right, so a pass emits K + 1 and its last token is the bonus token.
K = 4
ANSWER_LENGTH = 18


class TrueDrafter(Drafter):
    """Drafts what plain decoding is known to say, as far as it is known.

    Args:
        answers: prompt -> true continuation.
        is_eager: draft K tokens even where the loop asks for fewer, and where the truth has ended.
    """

    name = "true"
    num_draft_tokens = K

    def __init__(self, answers: dict[tuple[int, ...], list[int]], *, is_eager: bool = False) -> None:
        self.answers = answers
        self.is_eager = is_eager
        self.admitted: list[Sequence] = []
        self.retired: list[Sequence] = []

    def admit(self, sequence: Sequence, features: object) -> None:
        self.admitted.append(sequence)

    def retire(self, sequence: Sequence) -> None:
        self.retired.append(sequence)

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        depth = K if self.is_eager else num_draft_tokens
        rows = []
        for sequence in batch.sequences:
            truth = self.answers[tuple(sequence.request.prompt_ids)][len(sequence.token_ids) :][:depth]
            rows.append(truth + [0 if self.is_eager else -1] * (depth - len(truth)))
        return Proposal(chain(batch.roots, torch.tensor(rows, dtype=torch.int64).view(len(rows), depth)))


def greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int, banned: tuple[int, ...] = ()) -> list[int]:
    """`count` tokens by repeated plain forwards, `banned` ones never chosen."""
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            logits[list(banned)] = -torch.inf
            text.append(int(logits.argmax()))
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def model(tiny_target_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> transformers.PreTrainedModel:
    """The tiny random Llama, but it says printable ASCII only: all other tokens' logits are zero, never the best."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_target_dir).eval()
    texts = [tiny_tokenizer.decode([token]) for token in range(len(tiny_tokenizer))]
    unreadable = [i for i, text in enumerate(texts) if not (text.isascii() and text.isprintable()) or text.startswith("<|")]
    with torch.no_grad():
        model.lm_head.weight[unreadable] = 0
    return model


@pytest.fixture(scope="module")
def target(model: transformers.PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> Target:
    return Target(model, tiny_tokenizer, name="tiny")


@pytest.fixture(scope="module")
def prompt(target: Target) -> list[int]:
    return target.encode("one two the dog")


@pytest.fixture(scope="module")
def answer(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """The true continuation, without any end."""
    answer = greedy(model, prompt, ANSWER_LENGTH)
    assert len(set(answer)) > ANSWER_LENGTH // 2, "an answer of one token for ever would test little"
    return answer


@pytest.fixture
def complete(target: Target, prompt: list[int], answer: list[int]) -> Callable[..., Completion]:
    """One completion of the prompt, whole runs of drafts accepted."""

    def run(**settings: object) -> Completion:
        sampling = SamplingParams(**{"max_new_tokens": ANSWER_LENGTH, **settings})  # type: ignore[arg-type]
        drafter = TrueDrafter({tuple(prompt): answer})
        (done,) = generate(target, [prompt], drafter=drafter, sampling=sampling, use_cost_guard=False)
        return done

    return run


def assert_counters(done: Completion, num_tokens: int, max_new_tokens: int = ANSWER_LENGTH) -> None:
    """[E4] with every draft right, passes and accepted tokens follow from the number of emitted tokens."""
    assert len(done.token_ids) == num_tokens
    full_passes, rest = divmod(num_tokens, K + 1)
    assert done.num_target_passes == full_passes + (rest > 0)
    assert done.acceptance_length == num_tokens / done.num_target_passes
    # A last pass that was cut emitted drafts only, unless the clamped draft left its last place to the bonus token.
    is_clamped = num_tokens == max_new_tokens and rest > 0
    assert done.num_accepted_tokens == full_passes * K + rest - is_clamped
    if done.finish_reason == "length":
        assert done.num_draft_tokens == done.num_accepted_tokens, "nothing is drafted that could not be emitted"
    else:
        assert done.num_draft_tokens <= done.num_target_passes * K


# End tokens and length.


@pytest.mark.parametrize("kind", ["eos", "one of several eos", "stop id"])
@pytest.mark.parametrize("offset", range(2 * K + 3))
def test_an_end_token_ends_the_output_wherever_in_a_run_it_falls(
    model: transformers.PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerFast,
    prompt: list[int],
    answer: list[int],
    offset: int,
    kind: str,
) -> None:
    """[E1] [E4] the plain output, cut behind the end token; nothing after it is emitted or counted."""
    end = answer[offset]
    absent = next(token for token in range(100) if token not in answer)
    ids = {"eos": end, "one of several eos": [absent, end], "stop id": absent}[kind]
    kept = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = ids
    try:
        target = Target(model, tiny_tokenizer)
    finally:
        model.generation_config.eos_token_id = kept
    sampling = SamplingParams(max_new_tokens=ANSWER_LENGTH, stop_token_ids=[end] if kind == "stop id" else [], logprobs=True)
    drafter = TrueDrafter({tuple(prompt): answer})
    (done,) = generate(target, [prompt], drafter=drafter, sampling=sampling, use_cost_guard=False)
    expected = answer[: answer.index(end) + 1]
    assert done.token_ids == expected
    assert (done.finish_reason, done.stop_string) == ("stop", None)
    assert done.text == tiny_tokenizer.decode(expected[:-1]), "the end token's own characters are no part of the text"
    assert done.logprobs is not None and len(done.logprobs) == len(expected)
    assert_counters(done, len(expected))


def test_ignored_eos_is_a_token_like_any_other(
    model: transformers.PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, prompt: list[int], answer: list[int]
) -> None:
    target = Target(model, tiny_tokenizer)
    target.eos_token_ids = (answer[1], answer[K + 1])
    drafter = TrueDrafter({tuple(prompt): answer})
    settings = {"max_new_tokens": ANSWER_LENGTH, "ignore_eos": True}
    for stop_ids, expected in ([], answer), ([answer[3]], answer[: answer.index(answer[3]) + 1]):
        sampling = SamplingParams(**settings, stop_token_ids=stop_ids)
        (done,) = generate(target, [prompt], drafter=drafter, sampling=sampling, use_cost_guard=False)
        assert done.token_ids == expected
        assert done.finish_reason == ("stop" if stop_ids else "length")


@pytest.mark.parametrize("num_tokens", range(1, 2 * K + 4))
def test_max_new_tokens_is_exact(complete: Callable[..., Completion], answer: list[int], num_tokens: int) -> None:
    """[E3] [E4] 1 to K + 1 and beyond: never a token more, and no draft for a place that is not there."""
    done = complete(max_new_tokens=num_tokens)
    assert done.token_ids == answer[:num_tokens]
    assert done.finish_reason == "length"
    assert_counters(done, num_tokens, max_new_tokens=num_tokens)


@pytest.mark.parametrize("offset", range(K + 2))
def test_stop_beats_length_where_both_fall_on_one_token(
    complete: Callable[..., Completion], answer: list[int], target: Target, offset: int
) -> None:
    """[E3] the finish reason of an end token or a stop string at the last allowed place is `stop`."""
    count = answer.index(answer[offset]) + 1
    assert complete(max_new_tokens=count, stop_token_ids=[answer[offset]]).finish_reason == "stop"
    later = next(token for token in answer[count:] if token not in answer[:count])
    assert complete(max_new_tokens=count, stop_token_ids=[later]).finish_reason == "length"
    text = target.tokenizer.decode(answer[: offset + 1])
    done = complete(max_new_tokens=offset + 1, stop=[text])
    assert (done.finish_reason, done.stop_string, done.text) == ("stop", text, "")
    assert done.token_ids == answer[: offset + 1]


@pytest.mark.parametrize("minimum", [1, K, K + 1, K + 2, ANSWER_LENGTH])
def test_no_end_token_before_min_new_tokens(
    model: transformers.PreTrainedModel, target: Target, prompt: list[int], answer: list[int], minimum: int
) -> None:
    """[E1] [S4] the minimum counts emitted tokens, not passes: no end token up to it, and one right behind ends."""
    end = answer[0]
    start = greedy(model, prompt, minimum, banned=(end,))
    after = greedy(model, prompt + start, ANSWER_LENGTH - minimum)
    truth = start + after
    expected = start + after[: after.index(end) + 1] if end in after else truth
    sampling = SamplingParams(max_new_tokens=ANSWER_LENGTH, min_new_tokens=minimum, stop_token_ids=[end])
    drafter = TrueDrafter({tuple(prompt): truth})
    (done,) = generate(target, [prompt], drafter=drafter, sampling=sampling, use_cost_guard=False)
    assert done.token_ids == expected
    assert end not in done.token_ids[:minimum]
    assert done.num_accepted_tokens > len(expected) // 2, "the drafts were right and should have been accepted"


def test_no_stop_string_before_min_new_tokens(
    complete: Callable[..., Completion], answer: list[int], target: Target
) -> None:
    """[E2] a stop string that is complete too early stays in the text; its next occurrence ends it."""
    text = target.tokenizer.decode(answer)
    ends = [len(target.tokenizer.decode(answer[:count])) for count in range(len(answer) + 1)]
    early = text[0]
    for minimum in range(1, K + 3):
        later = text.find(early, ends[minimum - 1])
        done = complete(min_new_tokens=minimum, stop=[early])
        if later < 0:
            assert (done.text, done.finish_reason) == (text, "length")
        else:
            assert (done.text, done.finish_reason) == (text[:later], "stop")


# Stop strings.


def stop_positions(tokenizer: PreTrainedTokenizerFast, answer: list[int], stop: str) -> tuple[int, int] | None:
    """How many tokens it takes to complete the stop string, and where in the text it begins."""
    for count in range(1, len(answer) + 1):
        at = tokenizer.decode(answer[:count]).find(stop)
        if at >= 0:
            return count, at
    return None


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_stop_string_is_found_wherever_it_falls(
    complete: Callable[..., Completion], target: Target, prompt: list[int], answer: list[int], length: int
) -> None:
    """[E1] [E2] [E4] every piece of the text of a length as the stop string, streamed: no part of it is ever shown."""
    tokenizer = target.tokenizer
    text = tokenizer.decode(answer)
    ends = [len(tokenizer.decode(answer[:count])) for count in range(len(answer) + 1)]
    assert text.isascii() and ends == sorted(set(ends))
    kinds = set()
    for begin in range(len(text) - length + 1):
        stop = text[begin : begin + length]
        found = stop_positions(tokenizer, answer, stop)
        assert found is not None
        count, at = found
        first = next(i for i in range(count) if ends[i + 1] > at)
        kinds.add("one token" if first == count - 1 else "several tokens")
        kinds.add("one step" if first // (K + 1) == (count - 1) // (K + 1) else "two steps")
        kinds.add("bonus token" if count % (K + 1) == 0 else "draft token")

        shown = ""
        emitted: list[int] = []
        sampling = SamplingParams(max_new_tokens=ANSWER_LENGTH, stop=[stop])
        drafter = TrueDrafter({tuple(prompt): answer})
        for event in stream(target, prompt, drafter=drafter, sampling=sampling, use_cost_guard=False):
            shown += event.text
            emitted += event.token_ids
            assert text[:at].startswith(shown), "text was shown that is not part of the answer"
        done = event.completion
        assert done is not None
        assert (shown, emitted) == (text[:at], answer[:count])
        assert (done.text, done.token_ids) == (shown, emitted)
        assert (done.finish_reason, done.stop_string) == ("stop", stop)
        assert_counters(done, count)
    expected_kinds = {"one step", "bonus token", "draft token"}
    expected_kinds |= {"one token"} if length == 1 else {"several tokens", "two steps"}
    assert kinds >= expected_kinds, "the answer leaves a kind of place untested"


def test_the_earliest_of_several_stop_strings_ends_the_text(
    complete: Callable[..., Completion], answer: list[int], target: Target
) -> None:
    """[E2] whatever their order; one that shares a beginning with the text but not its end is no hit."""
    text = target.tokenizer.decode(answer)
    early, late, never = text[6:8], text[12:16], text[3:6] + "\n"
    at = text.find(early)
    for stops in ([early, late, never], [never, late, early]):
        done = complete(stop=stops)
        assert (done.text, done.stop_string) == (text[:at], early)


def test_a_beginning_of_a_stop_string_is_shown_once_it_is_none(target: Target, prompt: list[int], answer: list[int]) -> None:
    """[E2] held back while it may become a stop string, and part of the text at the end of the output."""
    text = target.tokenizer.decode(answer)
    sampling = SamplingParams(max_new_tokens=ANSWER_LENGTH, stop=[text[2:5] + "\n", text[-3:] + "\n"])
    drafter = TrueDrafter({tuple(prompt): answer})
    events = list(stream(target, prompt, drafter=drafter, sampling=sampling, use_cost_guard=False))
    assert "".join(event.text for event in events) == text
    assert all(not "".join(e.text for e in events[: i + 1]).endswith(text[-3:]) for i in range(len(events) - 1))


def test_stop_strings_without_a_tokenizer_are_refused(model: transformers.PreTrainedModel) -> None:
    """They could never be found, and the output would silently run on."""
    with pytest.raises(ValueError, match="stop.*tokenizer"):
        generate(Target(model), [[5, 6]], sampling=SamplingParams(stop=["x"]))


@pytest.mark.parametrize("settings", [{"stop_token_ids": [3, 5000]}, {"logit_bias": {5000: 1.0}}], ids=str)
def test_settings_that_name_tokens_the_target_has_not_are_refused(
    target: Target, prompt: list[int], settings: dict[str, object]
) -> None:
    name = next(iter(settings))
    sampling = SamplingParams(min_new_tokens=1, **settings)  # type: ignore[arg-type]
    message = f"{name} has token id 5000: tiny knows ids 0 to {target.vocab_size - 1}"
    with pytest.raises(ValueError, match=message):
        generate(target, [prompt], sampling=sampling)
    with pytest.raises(ValueError, match=message):
        list(stream(target, prompt, sampling=sampling))


# The end of the context.

CONTEXT = 32
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    # Rotary positions go on past the end in silence, learned ones are out of bounds there.
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
        eos_token_id=None,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.4, eos_token_id=None
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def short_target(request: pytest.FixtureRequest) -> Target:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    return Target(model, name="short")


def prompt_of(length: int) -> list[int]:
    return [(7 * i + length) % 50 for i in range(length)]


@pytest.mark.parametrize("is_eager", [False, True])
def test_prompts_up_to_the_last_place_of_the_context_fill_it(short_target: Target, is_eager: bool) -> None:
    """[E5] prompt of context length - k: the tree is clamped and exactly k tokens come out, alone or beside others."""
    prompts = [prompt_of(CONTEXT - k) for k in range(1, 2 * K + 2)]
    expected = [greedy(short_target.model, prompt, CONTEXT - len(prompt)) for prompt in prompts]
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
    for batch_size in (1, 4):
        drafter = TrueDrafter(answers, is_eager=is_eager)
        done = generate(
            short_target,
            prompts,
            drafter=drafter,
            sampling=SamplingParams(max_new_tokens=100),
            batch_size=batch_size,
            use_cost_guard=False,
        )
        assert [completion.token_ids for completion in done] == expected
        assert {completion.finish_reason for completion in done} == {"length"}
        for completion in done:
            assert completion.num_draft_tokens == completion.num_accepted_tokens
            assert completion.num_accepted_tokens == len(completion.token_ids) - completion.num_target_passes


@pytest.mark.parametrize("surplus", [0, 1, 40])
def test_a_prompt_that_leaves_no_room_is_refused(short_target: Target, surplus: int) -> None:
    """[E5] one sentence with the prompt's length, the model's, and what to do."""
    message = f"prompt 1 has {CONTEXT + surplus} tokens, and short takes {CONTEXT} with its answer: shorten the prompt"
    with pytest.raises(ValueError, match=message):
        generate(short_target, [[1, 2], prompt_of(CONTEXT + surplus)], sampling=SamplingParams(max_new_tokens=1))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 0 is empty"),
        ("", "prompt 0 is empty"),
        ([1, 50], "prompt 0 has token id 50: short knows ids 0 to 49"),
        ([1, -1], "prompt 0 has token id -1"),
        ("text", "no tokenizer"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named(short_target: Target, prompt: list[int] | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(short_target, [prompt])


# What is freed.


def run_steps(target: Target, prompt: list[int], answer: list[int], num_steps: int) -> tuple[TrueDrafter, int, int]:
    """Take some steps of three sequences, close the generator, and tell the blocks in use before and after."""
    cache = target.new_cache(block_size=4)
    drafter = TrueDrafter({tuple(prompt): answer})
    requests = [Request(prompt, SamplingParams(max_new_tokens=count)) for count in (3, ANSWER_LENGTH, ANSWER_LENGTH)]
    steps = decode(target, requests, drafter=drafter, max_batch=2, cache=cache, planner=Planner(is_active=False))
    for _ in range(num_steps):
        step = next(steps)
        assert isinstance(step, Step)
    before = cache.num_used_blocks
    steps.close()  # type: ignore[attr-defined]
    return drafter, before, cache.num_used_blocks


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_closing_early_frees_every_block_and_retires_every_drafter_state(
    target: Target, prompt: list[int], answer: list[int], num_steps: int
) -> None:
    """Whether sequences are running, have just ended, or have not been let in yet."""
    drafter, before, after = run_steps(target, prompt, answer, num_steps)
    assert before > 0 and after == 0
    assert len(drafter.admitted) == (2 if num_steps == 1 else 3)
    assert sorted(map(id, drafter.admitted)) == sorted(map(id, drafter.retired)), "each exactly once"


def test_a_finished_run_frees_every_block(target: Target, prompt: list[int], answer: list[int]) -> None:
    """[E1] nothing of an ended sequence stays in the KV cache, and its blocks are free while others run on."""
    cache = target.new_cache(block_size=4)
    drafter = TrueDrafter({tuple(prompt): answer})
    settings = [
        SamplingParams(max_new_tokens=ANSWER_LENGTH, stop_token_ids=[answer[2]]),
        SamplingParams(max_new_tokens=12),
    ]
    requests = [Request(prompt, sampling) for sampling in settings]
    steps = decode(target, requests, drafter=drafter, max_batch=2, cache=cache, planner=Planner(is_active=False))
    for step in steps:
        running = [sequence for sequence in step.sequences if sequence not in step.finished]
        assert cache.num_used_blocks == sum(len(sequence.row.blocks) for sequence in running)
        for sequence in running:
            assert sequence.row.length == sequence.num_tokens - 1
        for sequence in step.finished:
            assert sequence.row.blocks == []
    assert cache.num_used_blocks == 0
    assert len(drafter.retired) == 2


def test_a_prompt_that_does_not_fit_the_cache_leaves_nothing_behind(target: Target, prompt: list[int]) -> None:
    """It is a request that can never be served, as one too long for the context is; those that were running are freed."""
    cache = target.new_cache(max_tokens=640)
    requests = [Request(prompt, SamplingParams(max_new_tokens=4)), Request([5] * 800, SamplingParams(max_new_tokens=4))]
    with pytest.raises(ValueError, match="max_tokens"):
        list(decode(target, requests, max_batch=2, cache=cache))
    assert cache.num_used_blocks == 0


def test_logits_that_are_not_finite_end_the_run_and_free_it(tiny_target_dir: Path, tiny_tokenizer: object) -> None:
    """A NaN is an error with a way out, never a token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_target_dir).eval()
    target = Target(model, tiny_tokenizer)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    cache = target.new_cache()
    with pytest.raises(FloatingPointError, match="not finite after 0 tokens: use a wider dtype"):
        list(decode(target, [Request([5, 6, 7], SamplingParams(max_new_tokens=4))], cache=cache))
    assert cache.num_used_blocks == 0


@pytest.mark.parametrize("top_k", [0, 3], ids=["all nodes at once", "node by node"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_only_logits_that_decide_a_token_must_be_finite(bad: float, top_k: int) -> None:
    """A wrong draft that makes the target overflow behind it is rejected like any other: plain decoding is not there."""
    num_tokens = torch.tensor([2, 2])
    params = [SamplingParams(temperature=1.0, top_k=top_k, seed=1)] * 2
    sampler = Sampler(params, num_tokens, torch.ones(2, 9, dtype=torch.int64), num_tokens, num_tokens, ())
    tree = chain(torch.tensor([1, 1]), torch.tensor([[4, 2], [4, 2]]))
    logits = torch.zeros(2, 3, 6)
    logits[0, 0, 3] = logits[1, 0, 4] = 100
    logits[:, 1, 5] = bad
    acceptance = accept(tree, logits, sampler)
    assert acceptance.num_accepted.tolist()[0] == 0
    assert acceptance.is_valid.tolist() == [True, False]
