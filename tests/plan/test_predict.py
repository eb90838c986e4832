"""Predictions from configurations: sizes are those of what is then loaded, memory adds up, and a mistake is one sentence."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from rich.console import Console
from support import FAMILIES, tiny_target
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from selfspec import Target, load_drafter
from selfspec.cli import plan_view
from selfspec.cli.main import app
from selfspec.drafters.draft_model import DraftModelDrafter
from selfspec.drafters.names import KINDS, STUDENT_SHAPE
from selfspec.drafters.shipped import identity, load_head
from selfspec.files import shipped_heads
from selfspec.heads.base import TargetIdentity
from selfspec.heads.eagle import Eagle1Config, EagleConfig, EagleHead
from selfspec.heads.early_exit import DistilledDraft, EarlyExitHead
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.model.graphs import Graphs
from selfspec.model.load import QUANTIZED
from selfspec.plan.accelerators import CARDS, Card, card_of_device
from selfspec.plan.cards import CardFigures, eval_results, read_figures
from selfspec.plan.formulas import expected_tokens, kv_bytes
from selfspec.plan.predict import (
    GRAPHS_SHARE,
    NOTHING_DRAFTED,
    assumed_rates,
    card_acceptance,
    graph_bytes,
    make_plan,
    measured_length,
    memory_of,
)
from selfspec.plan.sizes import BYTES_PER_WEIGHT, DraftSize, ModelSize, draft_size, kv_shape_of
from selfspec.train.card import CardFacts, write_card
from selfspec.train.evaluation import AcceptanceReport

CARD = Card("test", memory=2e9, bandwidth=1e9, peak=1e12)


@pytest.fixture(scope="module")
def size(tiny_target_dir: Path) -> ModelSize:
    return ModelSize.of(tiny_target_dir)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir, device="cpu", use_packing=False)


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A head of every kind, as `--drafter` takes it."""
    record = identity(target)
    layer = Eagle1Config.layer_shape(target.config)
    made = {
        "medusa": MedusaHead(MedusaConfig(target=record, num_heads=3)),
        "eagle": EagleHead(EagleConfig(target=record, feature_layers=(0, 1), draft_vocab_size=100, **layer)),
        "early_exit": EarlyExitHead.for_target(record, target.model, exit_layer=1, blocks=(1,)),
        "draft_model": DistilledDraft.for_target(record, target.model, blocks=(0,)),
    }
    folder = tmp_path_factory.mktemp("heads")
    for name, head in made.items():
        head.save_pretrained(folder / name)
    return {name: folder / name for name in made}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_tells_what_the_cache_stores(family):
    config = FAMILIES[family]()
    if family in ("gpt-neox", "gpt2", "opt"):
        # No field of theirs: the tests' common settings put it there.
        del config.num_key_value_heads
    assert kv_shape_of(config) == tiny_target(family).kv_shape


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3-moe", "gemma3", "gpt2", "deepseek-v3"])
def test_weights_are_those_of_the_model(family, tmp_path):
    model = tiny_target(family).model
    model.save_pretrained(tmp_path)
    num_bytes = sum(p.numel() for p in model.parameters()) * 2
    size = ModelSize.of(tmp_path, dtype="bfloat16")
    # A checkpoint may hold a few buffers, too.
    assert size.weight_bytes == pytest.approx(num_bytes, rel=1e-3) and size.weights_from == "safetensors header"
    (tmp_path / "model.safetensors").unlink()
    assert ModelSize.of(tmp_path, dtype="bfloat16").weight_bytes == num_bytes
    # What is only looked up is not read: an embedding that is not the LM head, too.
    embedding = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    read = size.forward.num_parameters + size.forward.num_expert_parameters
    assert read == num_bytes // 2 - (0 if is_tied else embedding.numel())


def test_a_mixture_reads_the_experts_that_its_rows_meet(tmp_path):
    tiny_target("qwen3-moe").model.save_pretrained(tmp_path)
    forward = ModelSize.of(tmp_path).forward
    assert (forward.num_experts, forward.num_experts_per_token) == (4, 2)
    one, many = (forward.seconds(CARD, num_rows=1, num_nodes=n, num_tokens=0) for n in (1, 64))
    read = forward.num_parameters + forward.num_expert_parameters / 2
    assert one == pytest.approx(read * forward.bytes_per_parameter / CARD.bandwidth)
    assert many == pytest.approx((read + forward.num_expert_parameters / 2) * forward.bytes_per_parameter / CARD.bandwidth)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("int8", 1.0), ("fp8", 1.0), ("int4", 0.53125)])
def test_weights_may_be_quantised_as_they_are_loaded(dtype, num_bytes, tmp_path):
    assert set(BYTES_PER_WEIGHT) == set(QUANTIZED)
    model = tiny_target("llama").model.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    num_linear = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    whole, quantised = ModelSize.of(tmp_path), ModelSize.of(tmp_path, dtype=dtype)
    assert whole.weight_bytes - quantised.weight_bytes == round((2 - num_bytes) * num_linear)
    # The KV cache and what drafts keep the checkpoint's type.
    assert quantised.dtype == torch.bfloat16 and quantised.kv_shape == whole.kv_shape


def test_quantised_weights_stay_as_they_are_stored(tmp_path, tiny_target_dir):
    from safetensors.torch import load_file, save_file

    for file in tiny_target_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    num_saved = state[name].numel() * (state[name].itemsize - 1)
    whole = ModelSize.of(tmp_path).weight_bytes
    save_file({**state, name: state[name].to(torch.int8)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert ModelSize.of(tmp_path).weight_bytes == whole - num_saved


@pytest.mark.parametrize("kind", ["medusa", "eagle", "early_exit", "draft_model"])
def test_a_head_takes_what_it_takes_once_loaded(kind, size, target, heads):
    found = draft_size(f"{kind}:{heads[kind]}", size)
    drafter = load_drafter(f"{kind}:{heads[kind]}", target)
    assert found.weight_bytes == load_head(heads[kind], target, drafter=kind).num_parameters * 4
    # An EAGLE head's layer lies in the target's cache.
    shape = drafter._cache.shape if hasattr(drafter, "_cache") else getattr(drafter, "_kv_shape", None)
    assert found.kv_bytes_per_token == (0 if shape is None else shape.bytes_per_token(torch.float32))
    on_gpu = STUDENT_SHAPE if kind == "draft_model" else KINDS[kind].default_shape
    assert found.depth == (3 if kind == "medusa" else on_gpu.on("cuda").num_draft_tokens)
    assert found.num_nodes == on_gpu.on("cuda").num_nodes
    num_kept = 0 if drafter.is_resident else len(drafter.features)
    assert found.feature_bytes_per_token == num_kept * target.config.hidden_size * 4
    assert found.is_second_target == isinstance(drafter, DraftModelDrafter)


def test_rows_of_the_targets_lm_head_are_a_copy(size, target, tmp_path):
    layer = Eagle1Config.layer_shape(target.config)
    shape = {"target": identity(target), "feature_layers": (0, 1), "draft_vocab_size": 100, **layer}
    sizes = []
    for has_lm_head in (True, False):
        head = EagleHead(EagleConfig(has_lm_head=has_lm_head, **shape))
        head.save_pretrained(tmp_path / str(has_lm_head))
        sizes.append(draft_size(f"eagle:{tmp_path / str(has_lm_head)}", size))
    assert sizes[0].weight_bytes == sizes[1].weight_bytes and sizes[0].forward == sizes[1].forward


def test_the_targets_first_layers_are_no_weights_of_their_own(size, target):
    found = draft_size("truncated:1", size)
    assert found.weight_bytes == 0
    shallow = target.truncated(1)
    assert found.kv_bytes_per_token == shallow.kv_shape.bytes_per_token(torch.float32)
    embedding = target.model.get_input_embeddings().weight.numel()
    num_read = sum(p.numel() for p in shallow.model.parameters()) - embedding
    # The final norm is shared out among the layers.
    assert found.forward.num_parameters == pytest.approx(num_read, abs=2 * target.config.hidden_size)


def test_a_draft_model_is_a_model(size, tiny_target_dir):
    found = draft_size(f"draft_model:{tiny_target_dir}", size)
    assert (found.weight_bytes, found.forward) == (size.weight_bytes, size.forward)


def test_memory_adds_up_and_ends_where_it_says(size, heads):
    draft = draft_size(f"eagle:{heads['eagle']}", size)
    card = replace(CARD, memory=1.3e9)
    plan = make_plan(size, draft, assumed_rates([0.8], draft), card, batch_size=3, context=100)
    slots = {"num_rows": 3, "num_tokens": 100 + plan.best.num_nodes}
    assert plan.memory["KV cache"] == kv_bytes(size.kv_shape.bytes_per_token(torch.float32), **slots)
    assert plan.memory["draft KV cache"] == kv_bytes(draft.kv_bytes_per_token, **slots)
    assert plan.total_bytes == sum(plan.memory.values()) and plan.fits
    largest = make_plan(size, draft, assumed_rates([0.8], draft), card, batch_size=plan.largest_batch, context=100)
    assert largest.fits or largest.best != plan.best
    one_more = make_plan(size, draft, assumed_rates([0.8], draft), card, batch_size=plan.largest_batch + 1, context=100)
    assert not one_more.fits or one_more.best != plan.best
    assert plan.largest_context == size.context_length


def test_an_eagle_head_s_layer_is_memory(tmp_path):
    """EAGLE-3 for an 8B Llama keeps a layer in the cache, 4 KiB per token besides 128 KiB, and no hidden states."""
    layer = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**layer, num_hidden_layers=32, vocab_size=128256, max_position_embeddings=8192, dtype="bfloat16")
    config.save_pretrained(tmp_path / "target")
    target = ModelSize.of(tmp_path / "target")
    shape = {"intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "draft_vocab_size": 32000}
    record = TargetIdentity(
        name="target",
        revision=None,
        model_type="llama",
        hidden_size=4096,
        num_layers=32,
        vocab_size=128256,
        tokenizer="",
        embedding=(),
        lm_head=(),
    )
    head = EagleConfig(target=record, feature_layers=(2, 16, 29), **shape)
    (tmp_path / "config.json").write_text(json.dumps(head.to_dict()))
    draft = draft_size(f"eagle:{tmp_path}", target)
    memory = memory_of(target, draft, CARDS["h100"], num_rows=4, num_tokens=4000, num_nodes=16)
    num_slots = 4 * 4016
    assert memory["KV cache"] == num_slots * 128 * 1024
    assert memory["prompt features, at most"] == 0
    assert memory["draft KV cache"] == num_slots * 4 * 1024


def test_every_target_has_graphs(size, tiny_target_dir, monkeypatch):
    shares = {None: 1, "ngram": 1, "truncated:1": 2, f"draft_model:{tiny_target_dir}": 2}
    # Where a tenth of the card is less than the graphs would take, it is all that they get.
    small = replace(CARD, memory=1e6)
    for spec, num_targets in shares.items():
        draft = None if spec is None else draft_size(spec, size)
        memory = memory_of(size, draft, small, num_rows=1, num_tokens=16, num_nodes=1)
        assert memory["CUDA graphs, at most"] == round(num_targets * GRAPHS_SHARE * small.memory)
        memory = memory_of(size, draft, CARD, num_rows=1, num_tokens=16, num_nodes=1)
        assert memory["CUDA graphs, at most"] == num_targets * graph_bytes(size, num_rows=1, num_nodes=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80_000_000_000))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    assert Graphs(torch.device("cuda")).max_bytes == GRAPHS_SHARE * 80_000_000_000


def test_graphs_keep_the_logits_of_every_shape_that_is_captured(size):
    one, wider, deeper = (graph_bytes(size, num_rows=B, num_nodes=N) for B, N in ((1, 1), (3, 1), (1, 4)))
    row = size.config.vocab_size * size.dtype.itemsize
    # One row alone, and beside each of eight sizes of prompts; rows in twos and fours likewise.
    assert wider - one == (2 + 4) * (1 + 8) * row
    # Two, three and four nodes alone; two beside prompts.
    assert deeper - one == (2 + 3 + 4 + 8 * 2) * row


def llama(folder: Path, *, num_layers: int, hidden_size: int, intermediate_size: int) -> ModelSize:
    """A Llama of which there is only the configuration."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    return ModelSize.of(folder)


def test_nothing_is_promised_where_host_time_decides(tmp_path):
    """The default target on an H200 takes 1.02 ms a pass, of which its weights are 0.06 ms."""
    small = llama(tmp_path / "small", num_layers=30, hidden_size=576, intermediate_size=1536)
    plan = make_plan(small, None, NOTHING_DRAFTED, CARDS["h200"], context=512)
    assert plan.host_decides and plan.to_dict()["host_decides"]
    assert plan.roofline_seconds < 0.1e-3
    assert plan.roofline_seconds + plan.launch_seconds == pytest.approx(1.02e-3, rel=0.05)
    # The graphs of so small a model are small, too.
    assert plan.memory["CUDA graphs, at most"] < 0.1e9
    # Its caches take longer to read than its kernels to launch.
    assert not make_plan(small, None, NOTHING_DRAFTED, CARDS["h200"], batch_size=256).host_decides


def test_launches_are_part_of_a_pass(tmp_path):
    """The default target expanded to 8B takes 4.3 to 4.5 ms a pass on an H200, with 3.6 ms at its bandwidth for a copy."""
    large = llama(tmp_path / "large", num_layers=32, hidden_size=3840, intermediate_size=16384)
    card = replace(CARDS["h200"], bandwidth=4.2e12)
    plan = make_plan(large, None, NOTHING_DRAFTED, card, context=512)
    assert not plan.host_decides
    assert 4.2e-3 < plan.roofline_seconds + plan.launch_seconds < 4.7e-3
    assert plan.choices[0].tokens_per_second == pytest.approx(1 / (plan.roofline_seconds + plan.launch_seconds))


def test_no_pass_is_larger_than_the_runtime_makes(tmp_path):
    size = llama(tmp_path, num_layers=32, hidden_size=3840, intermediate_size=16384)
    draft = DraftSize("x", depth=6, num_nodes=31)
    for batch_size, depth in ((1, 6), (64, 1), (512, 0)):
        plan = make_plan(size, draft, measured_length(3.0, draft), CARDS["h200"], batch_size=batch_size, context=64)
        assert max(choice.depth for choice in plan.choices) == depth
        assert all(batch_size * choice.num_nodes <= 512 for choice in plan.choices)


def test_what_does_not_fit_says_so(size):
    plan = make_plan(size, None, NOTHING_DRAFTED, replace(CARD, memory=1e6))
    assert not plan.fits
    assert (plan.largest_batch, plan.largest_context) == (0, 0)


def test_speed_is_the_papers_where_a_pass_costs_the_same(size):
    draft = DraftSize("free")
    plan = make_plan(size, draft, assumed_rates([0.7], draft), replace(CARD, peak=float("inf")))
    for choice in plan.choices:
        assert (choice.draft_cost, choice.verify_cost) == (0, 1)
        assert choice.speedup == pytest.approx(expected_tokens(0.7, choice.depth))
    assert plan.best is plan.choices[-1]


def test_a_large_batch_computes_longer_than_it_reads(size):
    draft = DraftSize("free")
    few, many = (
        make_plan(size, draft, assumed_rates([0.7], draft), replace(CARD, peak=1e11), batch_size=n, context=1)
        for n in (1, 512)
    )
    assert few.best.depth > many.best.depth
    assert all(choice.verify_cost == pytest.approx(choice.num_nodes, rel=1e-6) for choice in many.choices)


def test_a_measured_length_is_given_back():
    draft = DraftSize("x", depth=6, num_nodes=16)
    trees = measured_length(3.1, draft).trees
    assert (trees[0].num_nodes, trees[0].depth, trees[0].expected_tokens) == (1, 0, 1)
    assert (trees[-1].num_nodes, trees[-1].depth) == (16, 6)
    assert trees[-1].expected_tokens == pytest.approx(3.1)
    assert [tree.depth for tree in measured_length(2.5, draft, depth=3, num_nodes=10).trees] == [0, 1, 2, 3]


def test_a_card_says_what_it_measured():
    rates = "| depth | 1 | 2 |\n| --- | --- | --- |\n| acceptance rate | 0.80 | 0.50 |"
    draft = DraftSize("x", card=f"| prompts | acceptance length |\n| --- | --- |\n| all | 2.30 |\n\n{rates}")
    assert card_acceptance(draft).trees[-1].expected_tokens == pytest.approx(2.3)
    assert card_acceptance(draft, depth=1).trees[-1].expected_tokens == pytest.approx(1.8)
    length = DraftSize(
        "x", card="tree of at\nmost 32 nodes, depth 6:\n\n| prompts | acceptance length |\n| --- | --- |\n| a | 3.28 |"
    )
    tree = card_acceptance(length).trees[-1]
    assert (tree.num_nodes, tree.depth) == (32, 6) and tree.expected_tokens == pytest.approx(3.28)
    assert [tree.depth for tree in card_acceptance(length, depth=2).trees] == [0, 1, 2]
    assert card_acceptance(length, depth=2).trees == card_acceptance(length).trees[:3]
    with pytest.raises(ValueError, match="give --alpha"):
        card_acceptance(DraftSize("x", card="# Nothing measured"))


def test_metadata_says_what_was_measured():
    figures = CardFigures(length=2.61234, rates=(0.81, 0.52, 0.281), depth=3, num_nodes=24)
    results = eval_results("held_out.jsonl", figures, {"qa": 2.0, "rag": 3.0})
    data = ModelCardData(library_name="selfspec", model_name="head", eval_results=results)
    card = f"---\n{data.to_yaml()}\n---\n\n# A head\n\nwhose words say nothing"
    assert read_figures(card) == replace(figures, length=2.6123)
    [model] = ModelCard(card).data.to_dict()["model-index"]
    assert [result["dataset"].get("config") for result in model["results"]] == [None, "qa", "rag"]
    assert card_acceptance(DraftSize("x", card=card)).trees[-1].expected_tokens == pytest.approx(2.611)
    assert card_acceptance(DraftSize("x", card=card)).trees[-1].num_nodes == 24
    length = eval_results("held_out.jsonl", CardFigures(length=2.5, depth=4, num_nodes=9))
    data = ModelCardData(library_name="selfspec", model_name="head", eval_results=length)
    tree = card_acceptance(DraftSize("x", card=f"---\n{data.to_yaml()}\n---\n")).trees[-1]
    assert (tree.num_nodes, tree.depth) == (9, 4) and tree.expected_tokens == pytest.approx(2.5)


def test_metadata_of_others_is_passed_over():
    other = "---\nmodel-index:\n- name: x\n---\n| prompts | acceptance length |\n| --- | --- |\n| all | 2.30 |"
    assert read_figures(other).length == 2.3
    with pytest.raises(ValueError, match="metadata that cannot be read"):
        read_figures("---\na: b: c\n---\n")


def test_the_plan_reads_the_card_that_training_writes(tmp_path):
    report = AcceptanceReport(
        num_prompts=4, num_tokens=300, length=2.6, rates=[0.81, 0.52, 0.2712], lengths={"qa": 2.1, "rag": 3.2}, num_nodes=24
    )
    facts = CardFacts(
        kind="eagle",
        target="org/target",
        num_parameters=1000,
        data={"file": "train.jsonl"},
        training={"steps": "10 of 100 tokens"},
        acceptance=report,
        eval_file="held_out.jsonl",
        num_eval_tokens=96,
        command="train_eagle.py config.yaml",
        versions={"selfspec": "0"},
    )
    write_card(tmp_path, facts)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    # Four digits come from the metadata: the tables have two.
    assert read_figures(text) == CardFigures(2.6, (0.81, 0.52, 0.2712), depth=3, num_nodes=24)
    tree = card_acceptance(DraftSize("eagle", card=text)).trees[-1]
    assert (tree.depth, tree.num_nodes) == (3, 24) and tree.expected_tokens == pytest.approx(2.6012)


@pytest.mark.parametrize("head", shipped_heads(), ids=lambda folder: folder.name)
def test_every_shipped_head_has_a_card_that_can_be_read(head):
    draft = DraftSize(head.name, card=(head / "README.md").read_text(encoding="utf-8"))
    best = card_acceptance(draft).trees[-1]
    assert best.num_nodes == 32 and 1.9 < best.expected_tokens < best.depth + 1


@pytest.mark.parametrize(
    ("device", "memory", "card"),
    [
        ("NVIDIA H100 80GB HBM3", 85e9, "h100"),
        ("NVIDIA H100 PCIe", 85e9, "h100-pcie"),
        ("NVIDIA H200", 150e9, "h200"),
        ("NVIDIA A100-SXM4-40GB", 42e9, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 85e9, "a100-80gb"),
        ("NVIDIA L4", 24e9, "l4"),
        ("NVIDIA L40S", 48e9, "l40s"),
        ("NVIDIA GeForce RTX 4090", 25e9, "rtx4090"),
        ("AMD Instinct MI300X", 206e9, "mi300x"),
    ],
)
def test_devices_are_recognised(device, memory, card):
    found = card_of_device(device, memory)
    assert found == replace(CARDS[card], memory=memory)


def test_an_unknown_device_is_not_guessed():
    assert card_of_device("NVIDIA A30", 24e9) is None


@pytest.fixture
def run(tiny_target_dir):
    def run(*args: object, code: int = 0):
        result = CliRunner().invoke(app, ["plan", "--target", str(tiny_target_dir), *map(str, args)])
        assert result.exit_code == code, result.output
        return result

    return run


def test_the_command_shows_memory_and_sizes(run, heads):
    output = " ".join(run("--drafter", f"medusa:{heads['medusa']}", "--gpu", "l4", "--alpha", "0.5,0.2").output.split())
    assert "It fits." in output and "Largest batch" in output
    assert "weights 0.00" in output and "l4 24.00" in output
    assert "assumed: a draft token is accepted with chance 0.5, 0.2 by rank" in output


def test_the_command_refuses_to_predict_what_the_host_decides(run):
    output = " ".join(run("--drafter", "ngram", "--gpu", "h200", "--alpha", "0.5").output.split())
    assert "Too small to predict: host time decides." in output and "Measure with `selfspec bench`" in output
    assert "speed-" not in output and "at most 2.00 (assumed: a draft token is accepted with chance 0.5)" in output
    assert "draft KV cache" not in output


@pytest.mark.parametrize("width", [60, 80])
def test_tables_are_readable_in_a_narrow_terminal(width, tmp_path, monkeypatch, capsys):
    size = llama(tmp_path, num_layers=32, hidden_size=3840, intermediate_size=16384)
    draft = DraftSize("ngram")
    plan = make_plan(size, draft, assumed_rates([0.9], draft), CARDS["b200"], batch_size=32)
    monkeypatch.setattr(plan_view, "stdout", Console(file=sys.stdout, width=width, highlight=False))
    plan_view.show_plan(plan)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines) and "…" not in "".join(lines)
    [first] = [i for i, line in enumerate(lines) if "verify" in line]
    assert lines[first].split() == ["draft", "tokens", "draft", "verify", "speed-", "tokens/s"]
    assert lines[first + 1].split() == ["depth", "nodes", "/pass", "cost", "cost", "up", "at", "most"]


def test_the_command_speaks_json(run):
    options = ["--drafter", "ngram", "--gpu-memory-gb", 10, "--bandwidth", 100, "--alpha", 0.5, "--num-draft-tokens", 3]
    record = json.loads(run(*options, "--json").stdout)
    assert record["fits"] and record["card"] == {
        "name": "given",
        "memory": 1e10,
        "bandwidth": 1e11,
        "peak": None,
        "layer_seconds": 3e-5,
    }
    assert [choice["depth"] for choice in record["choices"]] == [0, 1, 2, 3]
    assert record["best"]["speedup"] == pytest.approx(expected_tokens(0.5, 3))
    assert record["total_bytes"] == sum(record["memory"].values())


def test_without_a_drafter_it_is_memory_alone(run):
    record = json.loads(run("--gpu", "h100", "--gpu-memory-gb", 40, "--json").stdout)
    assert record["card"]["memory"] == 4e10
    assert [choice["speedup"] for choice in record["choices"]] == [1.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator to plan for")
def test_without_an_accelerator_one_must_be_named(run):
    assert "name one with --gpu" in run(code=1).stderr


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--gpu", "abacus"], "gpu 'abacus' is not in the table: use a10"),
        (["--gpu", "h100", "--alpha", "2", "--drafter", "ngram"], "acceptance rate 2.0 is not allowed"),
        (["--gpu", "h100", "--alpha", "high", "--drafter", "ngram"], "alpha='high' is not allowed"),
        (["--gpu", "h100", "--alpha", "0.5"], "name one with --drafter"),
        (["--gpu", "h100", "--alpha", "0.5", "--acceptance-length", "2"], "give one of them"),
        (["--gpu", "h100", "--drafter", "ngram"], "nothing says how many"),
        (["--gpu", "h100", "--drafter", "ngram", "--acceptance-length", "20"], "give 1 to 16"),
        (["--gpu", "h100", "--drafter", "oracle"], "drafter 'oracle' is not known"),
        (["--gpu", "h100", "--drafter", "truncated:9"], "truncated:9"),
        (["--gpu", "h100", "--drafter", "eagle"], "no shipped eagle head has the shape"),
        (["--gpu", "h100", "--context", "5000"], "context=5000 is not allowed"),
        (["--gpu", "h100", "--batch-size", "0"], "batch_size=0"),
        (["--gpu", "h100", "--bandwidth", "-1"], "bandwidth=-1.0 is not allowed"),
        (["--gpu", "h100", "--target", "absent/target"], "absent/target"),
    ],
)
def test_mistakes_take_one_line(run, args, problem):
    stderr = run(*args, code=1).stderr
    assert problem in stderr
    assert len(stderr.splitlines()) == 1 and stderr.startswith("selfspec: ")


def test_a_head_of_another_target_is_refused(size, heads, tmp_path):
    record = json.loads((heads["medusa"] / "config.json").read_text())
    record["target"]["hidden_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="hidden_size 64 for 32"):
        draft_size(f"medusa:{tmp_path}", size)
    with pytest.raises(ValueError, match="is a medusa head: drafter eagle serves"):
        draft_size(f"eagle:{heads['medusa']}", size)


def test_no_weights_are_loaded(run, tmp_path, tiny_target_dir, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("the weights were loaded"))
    (tmp_path / "config.json").write_bytes((tiny_target_dir / "config.json").read_bytes())
    record = json.loads(run("--target", tmp_path, "--gpu", "l4", "--json").stdout)
    assert record["weights_from"] == "configuration"
