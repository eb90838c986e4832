"""Models are read from safetensors alone, and messages do not show where they lie."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import SamplingParams, Target, generate, load_drafter
from selfspec.config import WEIGHT_DTYPES
from selfspec.drafters import shipped
from selfspec.drafters.shipped import load_head
from selfspec.heads import base
from selfspec.model.load import QUANTIZED


@pytest.fixture
def pickled(tiny_target_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_target_dir, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_a_pickled_model_is_refused_with_the_way_to_convert_it(tiny_target_dir: Path, pickled: Path, tmp_path: Path) -> None:
    """As the target and as a draft model; and the way works."""
    target = Target.from_pretrained(tiny_target_dir, device="cpu")
    for load in (lambda: Target.from_pretrained(pickled), lambda: load_drafter(f"draft_model:{pickled}", target)):
        with pytest.raises(
            ValueError, match="no weights in safetensors.*AutoModelForCausalLM and AutoTokenizer.*save_pretrained"
        ):
            load()
    for kind in (AutoModelForCausalLM, AutoTokenizer):
        kind.from_pretrained(pickled).save_pretrained(tmp_path / "converted")
    converted = Target.from_pretrained(tmp_path / "converted", device="cpu")
    sampling = SamplingParams(max_new_tokens=8)
    ours, theirs = (generate(each, ["the cat"], sampling=sampling)[0].token_ids for each in (target, converted))
    assert ours == theirs


def test_a_sharded_pickle_is_no_other(pickled: Path, tiny_target_dir: Path) -> None:
    (pickled / "pytorch_model.bin").rename(pickled / "pytorch_model-00001-of-00001.bin")
    weight_map = dict.fromkeys(load_file(tiny_target_dir / "model.safetensors"), "pytorch_model-00001-of-00001.bin")
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="no weights in safetensors"):
        Target.from_pretrained(pickled)


def test_messages_name_a_target_without_its_folders(tiny_target_dir: Path) -> None:
    """A server's clients read them."""
    target = Target.from_pretrained(tiny_target_dir, device="cpu")
    for mistake in (
        lambda: load_drafter("medusa", target),
        lambda: load_drafter("truncated:9", target),
        lambda: generate(target, [[3] * 5000]),
        lambda: generate(target, [[10**6]]),
    ):
        with pytest.raises(ValueError, match=tiny_target_dir.name) as caught:
            mistake()
        assert str(tiny_target_dir.parent) not in str(caught.value)


@pytest.mark.parametrize("config", [None, "{}", '{"head_type": "medusa", "target": {}}'])
def test_messages_name_a_head_of_the_hub_by_its_id(
    config: str | None, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by the folder of the cache into which it was fetched."""
    cached = tmp_path / "cache"
    cached.mkdir()
    if config is not None:
        (cached / "config.json").write_text(config)
    for module in (shipped, base):
        monkeypatch.setattr(module, "find_head", lambda *args, **options: cached)
    target = Target.from_pretrained(tiny_target_dir, device="cpu")
    with pytest.raises(ValueError, match="owner/head") as caught:
        load_head("owner/head", target, drafter="medusa")
    assert str(tmp_path) not in str(caught.value)


def test_a_target_is_loaded_by_default_and_tells_what_it_is(tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.model.default_target.default_target", lambda: tiny_target_dir)
    target = Target.from_pretrained(device="cpu")
    assert target.name == Target.from_pretrained("smollm2", device="cpu").name == str(tiny_target_dir)
    assert repr(target) == (
        f"Target({str(tiny_target_dir)!r}, llama, num_layers=2, vocab_size={target.vocab_size}, context_length=4096, "
        "float32 on cpu)"
    )


@pytest.mark.parametrize("source", ["/no/such/folder", "./no-such-folder", "../no-such-folder", "~/no-such-folder"])
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(tiny_target_dir: Path, source: str) -> None:
    target = Target.from_pretrained(tiny_target_dir, device="cpu")
    for load in (
        lambda: Target.from_pretrained(source),
        lambda: load_drafter(f"eagle:{source}", target),
        lambda: load_drafter(f"draft_model:{source}", target),
    ):
        with pytest.raises(ValueError, match=rf"^{re.escape(source)}: no such folder$"):
            load()


def test_types_of_weights_alone_are_those_of_the_options() -> None:
    assert set(QUANTIZED) == set(WEIGHT_DTYPES)
