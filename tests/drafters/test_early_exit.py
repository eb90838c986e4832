"""Early exit and distilled drafts: put together from the target's layers, they must be the target where they copy it."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import FAMILIES, draft_head, exit_head, identity, tiny_target

from selfspec import SamplingParams, generate
from selfspec.drafters import DraftModelDrafter, EarlyExitDrafter, drafter_of
from selfspec.drafters.shipped import load_head
from selfspec.heads.early_exit import DistilledDraft, EarlyExitHead
from selfspec.loop.decode import decode
from selfspec.loop.planner import Plan, Planner
from selfspec.loop.scheduler import Scheduler
from selfspec.loop.sequence import Request
from selfspec.model.layers import Resume, decoder_layers
from selfspec.model.target import FINAL
from selfspec.train.module import HeadTraining

PROMPTS = [[1, 2, 3], [4], list(range(20))]
SAMPLING = SamplingParams(max_new_tokens=25, ignore_eos=True)
# LoRA needs peft, which the base install leaves out; the tests run with and without it.
HAS_PEFT = find_spec("peft") is not None
LORA_FAMILIES = [family for family in FAMILIES if family != "gpt2" and HAS_PEFT]


def disturb_lora(head: EarlyExitHead) -> None:
    for name, parameter in head.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)


def final_states(
    model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor, **options: torch.Tensor
) -> torch.Tensor:
    with torch.no_grad():
        return model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **options).last_hidden_state  # type: ignore


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stack_of_the_targets_own_layers_is_the_target(family: str) -> None:
    """Early exit, LoRA and distilled draft with all the layers that are left give the target's final states bit for bit."""
    target = tiny_target(family)
    L = target.num_layers
    ids, positions = torch.arange(3, 17).view(2, 7), torch.arange(7).expand(2, 7)
    expected = target.hidden_states(ids, positions, (1, FINAL))
    resumed = exit_head(target, 1, *range(1, L)).student(target.model)
    assert isinstance(decoder_layers(resumed)[1][0], Resume)
    assert torch.equal(final_states(resumed, ids, positions, resume_from=expected[1]), expected[FINAL])
    assert torch.equal(final_states(draft_head(target, *range(L)).student(target.model), ids, positions), expected[FINAL])
    if family in LORA_FAMILIES:
        lora = exit_head(target, 2, *range(2, L), lora_rank=3)
        assert torch.equal(final_states(lora.student(target.model), ids, positions), expected[FINAL])
        disturb_lora(lora)
        adapted = final_states(lora.student(target.model), ids, positions)
        assert not torch.allclose(adapted, expected[FINAL], atol=0.1)
        torch.testing.assert_close(final_states(lora.merged(target.model), ids, positions), adapted, atol=1e-4, rtol=1e-4)
    # The target itself is as it was.
    assert torch.equal(target.hidden_states(ids, positions, (FINAL,))[FINAL], expected[FINAL])


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt", "deepseek-v3", "mistral-window", "gpt-oss"])
def test_a_head_that_copies_the_rest_of_the_target_accepts_every_token(family: str, batch_size: int) -> None:
    """[H1] [H6] with exact states at the exit layer, in every row, whatever the others accept."""
    target = tiny_target(family)
    L = target.num_layers
    expected = [c.token_ids for c in generate(target, PROMPTS, sampling=SAMPLING)]
    heads = [exit_head(target, 1, *range(1, L)), draft_head(target, *range(L))]
    if family in LORA_FAMILIES:
        heads.append(exit_head(target, 2, *range(2, L), lora_rank=2))
    for head in heads:
        drafter = drafter_of(head, target, num_draft_tokens=4, width=1, num_nodes=5)
        got = generate(target, PROMPTS, drafter=drafter, sampling=SAMPLING, batch_size=batch_size, use_cost_guard=False)
        assert [c.token_ids for c in got] == expected
        assert [c.num_target_passes for c in got] == [5, 5, 5], type(head)


def test_blocks_that_read_the_token_before_accept_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """[H6] the proof above would fail if an entry stood for another token."""
    target = tiny_target("llama")
    head = exit_head(target, 1, *range(1, target.num_layers))
    drafter = EarlyExitDrafter(target, head, num_draft_tokens=4, width=1, num_nodes=5)
    run_blocks = drafter._run_blocks
    monkeypatch.setattr(drafter, "_run_blocks", lambda nodes, rows, hidden: run_blocks(nodes, rows, hidden.roll(1, -1)))
    got = generate(target, PROMPTS, drafter=drafter, sampling=SAMPLING, use_cost_guard=False)
    assert all(c.acceptance_length < 2 for c in got)


@pytest.mark.parametrize("use_guard", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_change_nothing_in_any_batch(temperature: float, use_guard: bool) -> None:
    """[K1] [K2] also where the planner prunes the drafted tree, leaves drafting out, or a row's end cuts it."""
    target = tiny_target("llama")
    prompts = [[5], [6, 7], list(range(3, 30)), list(range(20, 40)), [9, 8, 7]]
    sampling = [SamplingParams(max_new_tokens=20 + i, temperature=temperature, seed=i) for i in range(len(prompts))]
    expected = [c.token_ids for c in generate(target, prompts, sampling=sampling)]
    heads = [exit_head(target, 1, 2), exit_head(target, 2), draft_head(target, 0, 2)]
    heads += [exit_head(target, 1, 2, lora_rank=2)] if HAS_PEFT else []
    for head in heads:
        drafter = drafter_of(head, target, num_draft_tokens=4, width=3, num_nodes=9)
        for batch_size in (1, 3, 5):
            got = generate(
                target, prompts, drafter=drafter, sampling=sampling, batch_size=batch_size, use_cost_guard=use_guard
            )
            assert [c.token_ids for c in got] == expected, (drafter.name, batch_size)
        assert isinstance(drafter, EarlyExitDrafter | DraftModelDrafter)
        assert drafter._cache.num_used_blocks == 0 and not drafter._rows


class RootsOnly(Planner):
    """Has every row draft, and no draft verified."""

    def plan(self, *args: Any, **options: Any) -> Plan:
        plan = super().plan(*args, **options)
        num_rows = len(plan.is_drafting)
        return replace(plan, shape=options["shapes"][-1], num_nodes=num_rows, is_drafting=(True,) * num_rows)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafted_tree_may_be_cut_down_to_its_root(temperature: float) -> None:
    """[K1] the pass goes on from what drafting computed of the root."""
    target = tiny_target("llama")
    sampling = [SamplingParams(max_new_tokens=12, temperature=temperature, seed=i, ignore_eos=True) for i in range(3)]
    expected = [c.token_ids for c in generate(target, PROMPTS, sampling=sampling)]
    drafter = drafter_of(exit_head(target, 1, 2), target, num_draft_tokens=3, width=3, num_nodes=9)
    requests = [Request(prompt, params) for prompt, params in zip(PROMPTS, sampling, strict=True)]
    steps = list(decode(target, requests, drafter=drafter, max_batch=3, planner=RootsOnly()))
    assert sum(step.tree.num_nodes == 1 for step in steps) > 6
    done = {id(sequence): sequence for step in steps for sequence in step.finished}
    assert sorted(s.token_ids for s in done.values()) == sorted(expected)


@pytest.mark.parametrize("late", [[5], [7] * 17], ids=["one token", "all in the cache"])
def test_a_prompt_without_a_token_to_enter_has_no_features(late: list[int]) -> None:
    """Beside a row that decodes, and alone."""
    target = tiny_target("llama")
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    expected = generate(target, [late], sampling=sampling)[0].token_ids
    scheduler = Scheduler(target, target.new_cache(block_size=4, max_tokens=400, use_sharing=True), max_batch=4)
    drafter = EarlyExitDrafter(target, exit_head(target, 1, 2))
    group = scheduler.add_group(drafter, Planner(is_active=False))
    with torch.inference_mode():
        scheduler.submit(Request([7] * 17, sampling), group)
        for _ in range(3):
            scheduler.round()
        beside = scheduler.submit(Request(late, sampling), group)
        while len(scheduler):
            scheduler.round()
        alone = scheduler.submit(Request(late, sampling), group)
        while len(scheduler):
            scheduler.round()
    assert beside.token_ids == alone.token_ids == expected
    assert alone.num_reused_tokens == beside.num_reused_tokens == (len(late) - 1) // 4 * 4


def test_verification_resumes_where_drafting_stopped() -> None:
    """The first layers run once for each drafted node, and not again to verify it."""
    target = tiny_target("llama")
    first, last = (decoder_layers(target.model)[1][i] for i in (0, 2))
    drafter = EarlyExitDrafter(target, exit_head(target, 1, 2), num_draft_tokens=3, width=2, num_nodes=5)
    seen: dict[str, list[int]] = {"first": [], "last": []}
    hooks = [
        layer.register_forward_pre_hook(lambda m, args, name=name: seen[name].append(args[0].shape[1]))
        for name, layer in (("first", first), ("last", last))
    ]
    generate(target, [[1, 2]], drafter=drafter, sampling=SAMPLING, use_cost_guard=False)
    for hook in hooks:
        hook.remove()
    # Prefill, then for each pass the root, two, two and two nodes (fewer at the very end); verification has five.
    assert seen["first"][:5] == [1, 1, 2, 2, 2]
    assert seen["last"][:2] == [1, 5]
    assert sum(seen["first"]) > sum(seen["last"])


@pytest.mark.parametrize("dtype", [None, torch.int8])
@pytest.mark.parametrize("kind", ["early_exit", "lora", "draft_model"])
def test_a_head_comes_back_as_it_was_saved_without_the_targets_weights(
    kind: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    if kind == "lora" and not HAS_PEFT:
        pytest.skip("LoRA needs peft: pip install 'selfspec[train]'")
    target = tiny_target("llama")
    head = {
        "early_exit": lambda: exit_head(target, 1, 2),
        "lora": lambda: exit_head(target, 2, 2, lora_rank=2),
        "draft_model": lambda: draft_head(target, 0, 2),
    }[kind]()
    disturb_lora(head)
    head.student(target.model)
    head.save_pretrained(tmp_path, dtype=dtype)
    stored = load_file(tmp_path / "model.safetensors")
    # Nor are they in a checkpoint of the training.
    assert set(HeadTraining(head, target).state_dict()) == {f"head.{name}" for name in head.state_dict()}
    assert not any(".base_layer." in name for name in head.state_dict())
    assert sum(v.numel() for k, v in stored.items() if not k.endswith(".scale")) == sum(
        v.numel() for v in head.state_dict().values()
    )
    drafter = "draft_model" if kind == "draft_model" else "early_exit"
    again = load_head(tmp_path, target, drafter=drafter)
    assert again.config == head.config
    for name, value in head.state_dict().items():
        # Half a step of 127 in the largest value of a row.
        room = 0.0 if dtype is None else float(value.abs().max()) / 120
        torch.testing.assert_close(again.state_dict()[name].float(), value, atol=room, rtol=0)


def test_training_fits_what_serving_accepts_and_leaves_the_target_alone() -> None:
    """[T2] on texts of the target's own, for every kind; the frozen weights keep every bit."""
    target = tiny_target("llama")
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    texts = [[s, *c.token_ids] for s, c in enumerate(generate(target, [[s] for s in range(8)], sampling=SAMPLING))]
    ids = torch.tensor(texts)
    positions = torch.arange(ids.shape[1]).expand_as(ids)

    def acceptance(head: EarlyExitHead) -> float:
        drafter = drafter_of(head.eval(), target, num_draft_tokens=4, width=1, num_nodes=5)
        got = generate(target, [[s] for s in range(8)], drafter=drafter, sampling=SAMPLING, use_cost_guard=False)
        assert [[s, *c.token_ids] for s, c in enumerate(got)] == texts
        return sum(len(c.token_ids) for c in got) / sum(c.num_target_passes for c in got)

    kinds = [lambda: exit_head(target, 1, 2), lambda: draft_head(target, 0)]
    kinds += [lambda: exit_head(target, 1, 2, lora_rank=4)] if HAS_PEFT else []
    for new in kinds:
        head = new()
        training = HeadTraining(head.train(), target)
        optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=5e-3)
        for _ in range(150):
            optimizer.zero_grad()
            loss = training(ids, torch.ones_like(ids, dtype=torch.bool), positions)["loss"]
            loss.backward()
            optimizer.step()
        assert acceptance(new()) < 2 and acceptance(head) > 2.7, head.config
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"exit_layer": 0, "blocks": (1,)}, "exit_layer=0: llama has 3 layers, so use 1 to 2"),
        ({"exit_layer": 3, "blocks": (1,)}, "exit_layer=3: llama has 3 layers, so use 1 to 2"),
        ({"exit_layer": 1, "blocks": (3,)}, r"blocks=\(3,\): llama has layers 0 to 2"),
        ({"exit_layer": 1, "blocks": (1,), "lora_rank": -1}, "lora_rank=-1: use 0"),
    ],
)
def test_a_shape_that_the_target_does_not_have_is_refused(shape: dict[str, object], message: str) -> None:
    target = tiny_target("llama")
    with pytest.raises(ValueError, match=message):
        EarlyExitHead.for_target(identity(target), target.model, **shape)
    with pytest.raises(ValueError, match="a distilled draft has blocks"):
        DistilledDraft.for_target(identity(target), target.model, blocks=())
