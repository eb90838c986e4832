"""Drafters: what prompt lookup finds, how a draft model keeps in step, and which drafters are refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from selfspec.api import generate
from selfspec.config import SamplingParams
from selfspec.drafters import Drafter, DraftModelDrafter, NgramDrafter, NoDrafter, load_drafter
from selfspec.drafters.draft_model import check_same_tokenizer, fit_vocab
from selfspec.drafters.ngram import MEMORY, count
from selfspec.kernels.ngram_lookup import ngram_lookup
from selfspec.loop.batch import Batch
from selfspec.loop.decode import decode
from selfspec.loop.drafter import Proposal
from selfspec.loop.group import Step
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request
from selfspec.model.target import Target
from selfspec.tree import chain

VOCAB_SIZE = 40


def llama(seed: int = 0, **changes: object) -> transformers.PreTrainedModel:
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **changes})).eval()  # type: ignore[arg-type]


def gpt2(context_length: int) -> transformers.PreTrainedModel:
    """Its positions are learned, so that one past the context's end is an error of its own."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=context_length,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(llama(), name="tiny")


def all_steps(
    target: Target, prompts: list[list[int]], drafter: Drafter, sampling: SamplingParams, max_batch: int = 1
) -> list[Step]:
    requests = [Request(prompt, sampling, index) for index, prompt in enumerate(prompts)]
    return list(decode(target, requests, drafter=drafter, max_batch=max_batch, planner=Planner(is_active=False)))


def outputs(steps: list[Step]) -> dict[int, list[int]]:
    return {sequence.request.index: sequence.token_ids for step in steps for sequence in step.finished}


# Prompt lookup.


def naive_lookup(tokens: list[int], num_draft_tokens: int, max_match: int) -> tuple[list[int], int]:
    """The last occurrence of the longest ending that occurs before, read off one ending and one place at a time."""
    for length in range(min(max_match, len(tokens) - 1), 0, -1):
        for begin in range(len(tokens) - length - 1, -1, -1):
            if tokens[begin : begin + length] == tokens[-length:]:
                continuation = tokens[begin + length :]
                return [continuation[k % len(continuation)] for k in range(num_draft_tokens)], length
    return [-1] * num_draft_tokens, 0


@PROPERTY
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=3),
    st.integers(1, 7),
    st.integers(1, 5),
    st.integers(0, 6),
)
def test_lookup_equals_a_naive_search(rows: list[list[int]], num_drafts: int, max_match: int, spare: int) -> None:
    """The longest match up to the cap, the most recent among equals, its continuation going round where it ends.

    Behind a row's end the history holds what an earlier walk left there, which must not be matched.
    """
    width = max(len(row) for row in rows) + spare
    history = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows])
    drafts, matched = ngram_lookup(history, None, torch.tensor([len(row) for row in rows]), num_drafts, max_match)
    expected = [naive_lookup(row, num_drafts, max_match) for row in rows]
    assert drafts.tolist() == [tokens for tokens, _ in expected]
    assert matched.tolist() == [length for _, length in expected]


@pytest.mark.parametrize(
    ("tokens", "drafts", "length"),
    [
        ([1, 2, 3, 9, 2, 3], [9, 2, 3, 9], 2),
        ([1, 3, 4, 8, 3, 5, 3], [5, 3, 5, 3], 1),
        ([7, 7, 7], [7, 7, 7, 7], 2),
        ([1, 2, 3], [-1, -1, -1, -1], 0),
        ([1], [-1, -1, -1, -1], 0),
    ],
    ids=["longest", "most recent", "repetition", "no match", "one token"],
)
def test_lookup_by_example(tokens: list[int], drafts: list[int], length: int) -> None:
    found, matched = ngram_lookup(torch.tensor([tokens]), None, torch.tensor([len(tokens)]), 4, 8)
    assert (found[0].tolist(), int(matched[0])) == (drafts, length)


@pytest.mark.parametrize("min_match", [1, 2, 3])
def test_ngram_drafts_what_lookup_finds_for_the_text_so_far(target: Target, min_match: int) -> None:
    """Of each row's own text, at every step, and only where the match is long enough."""
    prompts = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 5, 6, 7], [8]]
    sampling = SamplingParams(max_new_tokens=40)
    drafter = NgramDrafter(6, max_match=4, min_match=min_match)
    texts = {index: list(prompt) for index, prompt in enumerate(prompts)}
    num_matched = num_short = 0
    for step in all_steps(target, prompts, drafter, sampling, max_batch=3):
        for b, sequence in enumerate(step.sequences):
            text = texts[sequence.request.index]
            room = sampling.max_new_tokens - (len(text) - len(sequence.request.prompt_ids)) - 1
            expected, length = naive_lookup(text, 6, 4)
            is_used = length >= min_match and room > 0
            num_matched += is_used
            num_short += 0 < length < min_match
            drafted = [token for token in step.tree.tokens[b, 1:].tolist() if token >= 0]
            assert drafted == (expected[:room] if is_used else [])
            text += step.emitted[b]
    assert num_matched > 0 and (num_short > 0 or min_match == 1)


def test_ngram_scores_its_drafts_with_how_often_such_drafts_held() -> None:
    """Per length of the match and depth: a prior, then counts that remember some 64 trials."""
    target = Target(llama(initializer_range=0.1))
    trials = {(length, depth): 4.0 for length in range(1, 3) for depth in range(2)}
    hits = {(length, depth): 4 * (1 - 0.6 / length) for length, depth in trials}
    prompt = [1, 2, 3, 4] * 3
    text = list(prompt)
    num_held = num_failed = 0
    for step in all_steps(target, [prompt], NgramDrafter(2, max_match=2), SamplingParams(max_new_tokens=200)):
        num_drafts = step.tree.num_nodes - 1
        if num_drafts:
            length = naive_lookup(text, 2, 2)[1]
            rates = torch.tensor([hits[length, depth] / trials[length, depth] for depth in range(num_drafts)])
            assert step.tree.scores is not None
            torch.testing.assert_close(step.tree.scores[0, 1:], rates.log().cumsum(0), atol=1e-4, rtol=1e-4)
            num_accepted = int(step.acceptance.num_accepted[0])
            for depth in range(min(num_drafts, num_accepted + 1)):
                trials[length, depth] += 1
                hits[length, depth] += depth < num_accepted
                num_held += depth < num_accepted
                num_failed += depth == num_accepted
            for key, count in trials.items():
                fade = min(1.0, 64 / count)
                trials[key], hits[key] = count * fade, hits[key] * fade
        text += step.emitted[0]
    assert num_held > 64 and num_failed > 5 and max(trials.values()) == 64


def test_counts_are_changed_in_place_and_only_by_drafts_that_were_reached() -> None:
    """A graph keeps the tensor's address. A row without drafts, or without a match, counts nothing."""
    counts = torch.full((2, 4, 3), 4.0)
    counts[0, 3, 0], counts[1, 3, 0] = MEMORY, MEMORY / 2
    address = counts.data_ptr()
    tokens = torch.tensor([[9, 1, 2], [9, 1, 2], [9, 1, -1], [9, -1, -1], [0, -1, -1]])
    count(counts, torch.tensor([3, 2, 2, 2, 0]), tokens, torch.tensor([0, 2, 1, 0, 0]))
    faded = MEMORY / (MEMORY + 1)
    trials = torch.tensor([[4.0, 4, 4], [4, 4, 4], [6, 5, 4], [MEMORY, 4, 4]])
    hits = torch.tensor([[4.0, 4, 4], [4, 4, 4], [6, 5, 4], [MEMORY / 2 * faded, 4, 4]])
    torch.testing.assert_close(counts, torch.stack([trials, hits]))
    assert counts.data_ptr() == address


# Draft models.


@pytest.mark.parametrize(
    ("settings", "is_sampled"),
    [
        ({}, False),
        ({"temperature": 0.9, "seed": 3}, False),
        ({"temperature": 1.1, "top_k": 9, "seed": 4, "repetition_penalty": 1.2}, False),
        ({"temperature": 0.9, "seed": 5}, True),
        ({"temperature": 0.7, "top_p": 0.8, "seed": 6, "presence_penalty": 0.5}, True),
    ],
    ids=["greedy", "seeded", "seeded with filters", "drawn", "drawn with filters"],
)
def test_the_target_as_its_own_draft_accepts_every_token(
    target: Target, settings: dict[str, float], is_sampled: bool
) -> None:
    """[H1] in float32, greedy or sampled, alone and in a batch whose rows end at different times."""
    drafter = DraftModelDrafter(Target(target.model), target.vocab_size, num_draft_tokens=5, is_sampled=is_sampled)
    sampling = SamplingParams(max_new_tokens=26, **settings)  # type: ignore[arg-type]
    prompts = [[1, 2, 3], [4], list(range(20))]
    for max_batch in (1, 3):
        for step in all_steps(target, prompts, drafter, sampling, max_batch):
            assert torch.equal(step.acceptance.num_accepted, step.tree.is_real.sum(1) - 1)
    for sequence in step.sequences:
        assert sequence.num_accepted_tokens == sequence.num_draft_tokens > 0


@pytest.mark.parametrize("max_batch", [1, 3])
def test_a_prompt_that_outgrows_the_draft_models_context_pauses_drafting(
    target: Target, max_batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """[H2] from the pass on for which the context is too small: counted, said once a sequence, the output right."""
    prompts = [[1, 2, 3], list(range(30)), [7] * 40]
    sampling = SamplingParams(max_new_tokens=50)
    expected = outputs(all_steps(target, prompts, NoDrafter(), sampling))
    draft = Target(gpt2(32), name="short")
    drafter = DraftModelDrafter(draft, VOCAB_SIZE, num_draft_tokens=4)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        steps = all_steps(target, prompts, drafter, sampling, max_batch)
    assert outputs(steps) == expected
    num_tokens = [len(prompt) for prompt in prompts]
    paused, drafted = [0, 0, 0], [0, 0, 0]
    for step in steps:
        rows = [sequence.request.index for sequence in step.sequences]
        room = [min(4, len(prompts[i]) + 50 - num_tokens[i] - 1) for i in rows]
        for b, i in enumerate(rows):
            num_drafts = int(step.tree.is_real[b].sum()) - 1
            is_paused = max(room) > 0 and num_tokens[i] + room[b] > 32
            assert num_drafts == (0 if is_paused else room[b])
            drafted[i] += num_drafts
            paused[i] += is_paused
            num_tokens[i] += len(step.emitted[b])
    for sequence in (sequence for step in steps for sequence in step.finished):
        i = sequence.request.index
        assert (sequence.num_draft_tokens, sequence.num_paused_passes) == (drafted[i], paused[i])
    assert drafted[0] > 0 and paused[0] > 0 and drafted[2] == 0
    assert [record.getMessage() for record in caplog.records] == [
        "the text has outgrown the draft model's context of 32 tokens: decoding it without drafts"
    ] * 3


def test_a_row_near_the_common_end_of_context_is_not_paused() -> None:
    """[H2] in a batch with roomier rows it drafts as far as it may go; only the draft model's own context pauses.

    [E5] the depth of the others takes it past the last learned position, and what it drafts there is thrown away.
    """
    target = Target(gpt2(64))
    drafter = DraftModelDrafter(Target(target.model), target.vocab_size, num_draft_tokens=5)
    prompts = [[i % VOCAB_SIZE for i in range(64 - 7)], [1, 2, 3]]
    sampling = SamplingParams(max_new_tokens=40)
    steps = all_steps(target, prompts, drafter, sampling, max_batch=2)
    assert outputs(steps) == outputs(all_steps(target, prompts, NoDrafter(), sampling))
    near = next(sequence for step in steps for sequence in step.finished if sequence.request.index == 0)
    assert len(near.token_ids) == 7
    assert near.num_paused_passes == 0
    assert near.num_target_passes == 2 and near.num_accepted_tokens == near.num_draft_tokens == 5


def test_a_draft_model_catches_up_after_passes_without_drafts(target: Target) -> None:
    """What it missed is cached before it drafts again, so that its drafts are as good as before."""

    class Sometimes(DraftModelDrafter):
        count = 0

        def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
            self.count += 1
            return super().propose(batch, 0 if self.count % 7 < 4 else num_draft_tokens)

    drafter = Sometimes(Target(target.model), target.vocab_size, num_draft_tokens=3)
    steps = all_steps(target, [[1, 2, 3], [4] * 9], drafter, SamplingParams(max_new_tokens=40), max_batch=2)
    depths = {int(step.tree.is_real.sum(1).max()) - 1 for step in steps}
    assert depths >= {0, 3}
    for step in steps:
        assert torch.equal(step.acceptance.num_accepted, step.tree.is_real.sum(1) - 1)


def test_a_draft_models_cache_is_free_after_a_run(target: Target) -> None:
    drafter = DraftModelDrafter(Target(llama(seed=9)), target.vocab_size)
    requests = [Request([1, 2], SamplingParams(max_new_tokens=30))] * 3
    steps = decode(target, requests, drafter=drafter, max_batch=2, planner=Planner(is_active=False))
    next(steps)
    assert drafter._cache.num_used_blocks > 0
    steps.close()  # type: ignore[attr-defined]
    assert drafter._cache.num_used_blocks == 0
    all_steps(target, [[1, 2], [3]], drafter, SamplingParams(max_new_tokens=30))
    assert drafter._cache.num_used_blocks == 0


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("num_embeddings", [VOCAB_SIZE - 4, VOCAB_SIZE, VOCAB_SIZE + 24])
def test_padded_vocabularies_work_in_both_directions(target: Target, num_embeddings: int, is_sampled: bool) -> None:
    """[H3] a draft model with more or fewer embedding rows drafts, and never a token that the target has no row for.

    Nor does a token of the target's that the draft model has no row for, in the prompt or in the output, break it.
    """
    drafter = DraftModelDrafter(
        Target(llama(seed=1, vocab_size=num_embeddings)), target.vocab_size, num_draft_tokens=4, is_sampled=is_sampled
    )
    prompts = [[1, 2, 3], [VOCAB_SIZE - 1, 4, VOCAB_SIZE - 2]]
    # The last rows, which the smaller draft model does not have, are likely too.
    bias = {VOCAB_SIZE - 1: 2.0, VOCAB_SIZE - 2: 2.0}
    sampling = SamplingParams(max_new_tokens=30, logit_bias=bias, temperature=1.0 if is_sampled else 0.0, seed=1)
    steps = all_steps(target, prompts, drafter, sampling, max_batch=2)
    assert sum(sequence.num_draft_tokens for step in steps for sequence in step.finished) > 0
    assert max(int(step.tree.tokens.max()) for step in steps) < VOCAB_SIZE
    emitted = outputs(steps)
    assert any(token >= VOCAB_SIZE - 4 for tokens in emitted.values() for token in tokens)
    if not is_sampled:
        assert emitted == outputs(all_steps(target, prompts, NoDrafter(), sampling))


def test_fit_vocab_cuts_and_pads_with_impossible_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert fit_vocab(logits, 2).tolist() == [[1, 2]]
    assert fit_vocab(logits, 3).tolist() == [[1, 2, 3]]
    assert fit_vocab(logits, 5).tolist() == [[1, 2, 3, -torch.inf, -torch.inf]]


# Tokenizers.


def renamed(tokenizer: PreTrainedTokenizerFast, directory: Path, changes: dict[str, str]) -> PreTrainedTokenizerFast:
    """A copy of a tokenizer with the given strings replaced in its file."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return PreTrainedTokenizerFast.from_pretrained(directory)


def test_equal_tokenizers_are_accepted(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    check_same_tokenizer(tiny_tokenizer, renamed(tiny_tokenizer, tmp_path, {}))


def test_different_tokenizers_are_refused_with_the_first_difference(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """[H3] the lowest id on which they disagree, by name and with both ids."""
    low, high = tiny_tokenizer.convert_tokens_to_ids(["!", "#"])
    swapped = renamed(tiny_tokenizer, tmp_path / "swapped", {f'"!": {low}': f'"!": {high}', f'"#": {high}': f'"#": {low}'})
    with pytest.raises(ValueError, match=rf"token '!' has id {low} in the target and {high} in the draft.*own tokenizer"):
        check_same_tokenizer(tiny_tokenizer, swapped)
    fewer = renamed(tiny_tokenizer, tmp_path / "fewer", {f'"!": {low}': f'"unheard of": {low}'})
    with pytest.raises(ValueError, match=rf"token '!' has id {low} in the target and none in the draft"):
        check_same_tokenizer(tiny_tokenizer, fewer)
    more = renamed(tiny_tokenizer, tmp_path / "more", {})
    more.add_tokens(["extra"])
    with pytest.raises(ValueError, match=rf"only the draft has token 'extra' \(id {len(tiny_tokenizer)}\)"):
        check_same_tokenizer(tiny_tokenizer, more)


def test_equal_vocabularies_that_split_text_otherwise_are_refused(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """[H3] the same names and ids, but a space before the first word."""
    other = renamed(tiny_tokenizer, tmp_path, {})
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ValueError, match="splits text differently from the target's"):
        check_same_tokenizer(tiny_tokenizer, other)


# Drafters by name.


@pytest.fixture(scope="module")
def disk_target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir)


def test_load_drafter_knows_every_name(disk_target: Target, tiny_target_dir: Path) -> None:
    assert load_drafter("none", disk_target) is None
    ngram = load_drafter("ngram", disk_target)
    assert isinstance(ngram, NgramDrafter) and ngram.num_draft_tokens == 15
    for spec, number, expected in ("ngram:7", None, 7), ("ngram:7", 3, 3), ("ngram", 9, 9), ("ngram:64", None, 64):
        drafter = load_drafter(spec, disk_target, num_draft_tokens=number)
        assert isinstance(drafter, NgramDrafter) and drafter.num_draft_tokens == expected
    truncated = load_drafter("truncated:1", disk_target, is_sampled=True)
    assert isinstance(truncated, DraftModelDrafter) and truncated.is_sampled and truncated.draft.num_layers == 1
    model = load_drafter(f"draft_model:{tiny_target_dir}", disk_target, num_draft_tokens=3)
    assert isinstance(model, DraftModelDrafter) and not model.is_sampled
    assert (model.num_draft_tokens, model.name) == (3, f"draft_model:{tiny_target_dir}")
    # The same weights, from disk: [H1] by the front door.
    prompts = ["one two three", "the cat"]
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    for done in generate(disk_target, prompts, drafter=model, sampling=sampling, use_cost_guard=False):
        assert done.num_accepted_tokens == done.num_draft_tokens == 15


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("nope", {}, r"drafter 'nope' is not known: use none .*ngram.*draft_model.*truncated"),
        ("", {}, "drafter '' is not known"),
        ("none:3", {}, "drafter 'none:3' takes no argument"),
        ("ngram:x", {}, "drafter 'ngram:x' needs a whole number after the colon, as in ngram:8"),
        ("ngram:-1", {}, "drafter 'ngram:-1' needs a whole number"),
        ("ngram:²", {}, "drafter 'ngram:²' needs a whole number"),
        ("ngram:0", {}, "drafter 'ngram:0' is out of range: draft 1 to 64 tokens"),
        ("ngram:65", {}, "drafter 'ngram:65' is out of range: draft 1 to 64 tokens"),
        ("ngram:65", {"num_draft_tokens": 3}, "drafter 'ngram:65' is out of range"),
        ("truncated", {}, "drafter 'truncated' needs a whole number after the colon, as in truncated:"),
        ("truncated:0", {}, "truncated:0 is out of range: .* has 2 layers"),
        ("truncated:2", {}, "truncated:2 is out of range: .* has 2 layers"),
        ("draft_model", {}, "no shipped draft_model head fits .*: name one as draft_model:PATH_OR_HUB_ID, or train one"),
        ("draft_model:", {}, "name one as draft_model:PATH_OR_HUB_ID"),
        ("draft_model:/no/such/folder", {}, "/no/such/folder: no such folder"),
        ("ngram", {"num_draft_tokens": 0}, "num_draft_tokens=0 is not allowed: use 1 to 64"),
        ("ngram", {"num_draft_tokens": 65}, "num_draft_tokens=65 is not allowed: use 1 to 64"),
        ("ngram", {"is_sampled": True}, "drafter 'ngram' cannot draw its drafts"),
        ("none", {"is_sampled": True}, "drafter 'none' cannot draw its drafts"),
        ("truncated:1", {"dtype": "float16"}, "drafter 'truncated:1' has no weights of its own"),
    ],
)
def test_a_bad_drafter_is_refused_in_one_sentence(
    disk_target: Target, spec: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(spec, disk_target, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_draft_model_for_a_target_without_tokenizer_is_refused(target: Target, tiny_target_dir: Path) -> None:
    """[H3] equal ids cannot be known then; the drafter can still be built by hand."""
    with pytest.raises(ValueError, match="tokenizer"):
        load_drafter(f"draft_model:{tiny_target_dir}", target)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_target_with_weights_in_fewer_bits_decodes_the_same_with_drafts(tiny_target_dir: Path, dtype: str) -> None:
    pytest.importorskip("torchao", reason="targets in int8 need torchao: pip install 'selfspec[quant]'")
    target = Target.from_pretrained(tiny_target_dir, dtype=dtype, device="cpu")
    layer = target.model.model.layers[0].mlp.up_proj
    assert type(layer.weight.data) is not torch.Tensor and type(target.model.lm_head.weight.data) is torch.Tensor
    sampling = SamplingParams(max_new_tokens=16)
    prompts = ["the cat sat on the mat and the cat sat", "one two three one two"]
    plain = generate(target, prompts, sampling=sampling)
    drafted = generate(target, prompts, sampling=sampling, drafter=NgramDrafter(5), use_cost_guard=False)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]


def test_int4_is_for_gpus(tiny_target_dir: Path) -> None:
    with pytest.raises(ValueError, match="int4.*needs a CUDA device: use int8"):
        Target.from_pretrained(tiny_target_dir, dtype="int4", device="cpu")


def test_an_int8_draft_of_a_float32_target_changes_nothing(tiny_target_dir: Path) -> None:
    """The draft may be stored in fewer bits than the target; int8 goes through torchao, where that is installed."""
    pytest.importorskip("torchao", reason="int8 drafts need torchao: pip install 'selfspec[quant]'")
    target = Target.from_pretrained(tiny_target_dir)
    prompts = ["the cat sat on", "one two three"]
    sampling = SamplingParams(max_new_tokens=24)
    expected = [c.token_ids for c in generate(target, prompts, sampling=sampling)]
    for dtype in ("int8", "bfloat16", "float16"):
        drafter = load_drafter(f"draft_model:{tiny_target_dir}", target, dtype=dtype)
        got = generate(target, prompts, drafter=drafter, sampling=sampling, batch_size=2, use_cost_guard=False)
        assert [c.token_ids for c in got] == expected
        assert sum(c.num_accepted_tokens for c in got) > 0


class _Onlooker(NoDrafter):
    """Looks at a batch's tensors in every so many steps, and compares them with what the sequences hold."""

    num_draft_tokens = 3

    def __init__(self, period: int) -> None:
        self.period, self.num_steps, self.num_looks = period, 0, 0

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        self.num_steps += 1
        roots = batch.roots.tolist()
        if self.num_steps % self.period == 0:
            self.num_looks += 1
            sampler = batch.sampler
            assert sampler.history is batch.history and sampler.num_tokens is batch.num_tokens
            for b, sequence in enumerate(batch.sequences):
                tokens = sequence.request.prompt_ids + sequence.token_ids
                assert batch.history[b, : batch.num_tokens[b]].tolist() == tokens and roots[b] == tokens[-1]
        return Proposal(chain(batch.roots, torch.randint(0, 8, (len(batch), num_draft_tokens))))


@pytest.mark.parametrize("period", [1, 5, 16, 17, 18, 40])
def test_a_batch_s_tensors_have_all_that_was_emitted(target: Target, period: int) -> None:
    """However long nobody has asked; rows come and go meanwhile."""
    onlooker = _Onlooker(period)
    prompts = [[1, 2, 3, 1, 2], [7], [5, 6, 5, 6, 5, 6, 5], [9, 9]]
    all_steps(target, prompts, onlooker, SamplingParams(max_new_tokens=45), max_batch=2)
    assert onlooker.num_looks >= 1
