"""What a CPU target holds: weights once, in the bits they need, and no more than that while they are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import FAMILIES, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from selfspec.heads.base import TargetIdentity
from selfspec.model.checkpoint import read_model
from selfspec.model.compact_embedding import CompactEmbedding, compact_embeddings
from selfspec.model.default_target import default_target
from selfspec.model.linear_layout import PACKED, lay_out_linear_layers
from selfspec.model.load import lay_out, load_config
from selfspec.model.memory import Memory
from selfspec.model.packed_linear import can_pack

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
# What importing transformers' model and reading a tokenizer takes besides the weights.
SLACK = 64 * MIB
# The most that `selfspec generate` may take with the default target and its EAGLE head.
MOST = 1.2 * (1 << 30)

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="a process's memory is read from /proc")
packs = pytest.mark.skipif(not can_pack(), reason="this torch build has no oneDNN packed linear layers")


def run(*command: str, timeout: float = 300) -> list[str]:
    """The lines that a fresh Python prints, under the command's limits. A peak is the whole process's."""
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    caches = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
    environment = {**os.environ, **caches, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@on_linux
@packs
def test_loading_takes_little_more_than_the_weights(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Neither the files nor the plain weights stay beside the packed ones, not even for a moment."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=4096, num_key_value_heads=8, tie_word_embeddings=True, **shape)
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    [line] = run(__file__, str(tmp_path))
    before, peak = json.loads(line)
    assert weights < peak - before < 1.2 * weights + SLACK


@on_linux
@packs
def test_the_default_target_and_its_head_stay_within_the_promised_peak() -> None:
    try:
        source = default_target()
    except ValueError as error:
        pytest.skip(str(error))
    lines = run("-m", "selfspec.bench.memory", "--target", str(source), "--drafter", "eagle")
    stages = [json.loads(line) for line in lines]
    assert [stage["stage"] for stage in stages] == ["python", "imports", "target", "drafter", "answer 1"]
    assert stages[-1]["peak_mib"] * MIB <= MOST


@packs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_table_of_16_bits_is_held_in_16_bits_and_looked_up_bit_for_bit(dtype: torch.dtype) -> None:
    model = tiny_model("llama-tied").to(dtype).float()
    plain = model.lm_head.weight.detach().clone()
    lay_out(model)
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, CompactEmbedding) and embedding.table.itemsize == 2
    ids = torch.tensor([[0, 5, 5, len(plain) - 1]])
    assert torch.equal(embedding(ids), plain[ids]) and embedding(ids).dtype == torch.float32
    for weight in (embedding.weight, lm_head.weight):
        assert torch.equal(weight, plain) and weight.dtype == torch.float32
    assert torch.equal(lm_head.rows(ids[0]), plain[ids[0]]) and lm_head.rows(ids[0]).dtype == torch.float32


def test_a_table_that_needs_32_bits_stays_as_it_is() -> None:
    table = nn.Embedding(9000, 4)
    nn.init.constant_(table.weight, 0.5)
    # One value, in the last rows that are compared.
    table.weight.data[-1, -1] = 0.1
    model = nn.ModuleDict({"table": table})
    assert compact_embeddings(model) == {} and model["table"] is table
    table.weight.data[-1, -1] = torch.nan
    assert compact_embeddings(model) == {}


@packs
def test_rows_of_a_layer_without_a_table_come_from_its_own_weight() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(8, 6)})
    plain = model["layer"].weight.detach().clone()
    assert lay_out_linear_layers(model, forms=[PACKED]) == {"packed": 1}
    assert torch.equal(model["layer"].rows(torch.tensor([5, 0])), plain[[5, 0]])


@packs
def test_a_target_is_the_same_to_its_heads_however_it_is_laid_out() -> None:
    model = tiny_model("llama-tied").bfloat16().float()
    before = TargetIdentity.of(model, None, name="tiny")
    lay_out(model)
    assert TargetIdentity.of(model, None, name="tiny") == before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", ["1GB", "40KB"])
def test_a_checkpoint_is_read_as_transformers_reads_it(family: str, shards: str, tmp_path: Path) -> None:
    tiny_model(family).bfloat16().save_pretrained(tmp_path, max_shard_size=shards)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model, missing = read_model(tmp_path, load_config(tmp_path, None), revision=None, dtype=torch.float32)
    assert not missing and type(model) is type(expected) and not model.training
    states = model.state_dict(), expected.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    buffers = dict(expected.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert model.config.to_dict() == expected.config.to_dict() and model.name_or_path == expected.name_or_path


def main(source: str) -> None:
    """What the measured process does."""
    from selfspec.model.load import load_model

    before = Memory.now().resident
    load_model(source, dtype="float32", device="cpu")
    sys.stdout.write(json.dumps([before, Memory.now().peak]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
