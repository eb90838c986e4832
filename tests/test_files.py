"""Files for others: written with the umask's mode, and told as unreadable where they are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import draft_head, identity, tiny_model, tiny_target

from selfspec import load_drafter
from selfspec.files import save_file, share
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.interop.draft_model import write_draft_model
from selfspec.interop.files import Export, read_checkpoint
from selfspec.model.adapter import merge_adapter
from selfspec.model.load import load_model

WEIGHTS = {"weight": torch.arange(6.0).reshape(2, 3)}


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(directory: Path) -> set[int]:
    return {file.stat().st_mode & 0o777 for file in directory.rglob("*") if file.is_file()}


def write_head(directory: Path) -> None:
    MedusaHead(MedusaConfig(target=identity(tiny_target()), num_heads=1)).save_pretrained(directory)


def write_draft(directory: Path) -> None:
    target = tiny_target()
    write_draft_model(draft_head(target, 0), target, "vllm", directory)


WRITERS: dict[str, Callable[[Path], object]] = {
    "weights": lambda directory: save_file(WEIGHTS, directory / "a.safetensors"),
    "a head": write_head,
    "an export": lambda directory: Export({}, WEIGHTS, []).save(directory),
    "a draft model": write_draft,
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_has_the_umasks_mode(name: str, umask: int, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    assert modes(tmp_path) == {0o666 & ~umask}
    assert not list(tmp_path.glob(".mode-*"))


def test_weights_come_back_and_old_modes_do_not_stay(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.touch(mode=0o600)
    save_file(WEIGHTS, file)
    assert torch.equal(load_file(file)["weight"], WEIGHTS["weight"])
    assert file.stat().st_mode & 0o077
    (tmp_path / "folder").mkdir(mode=0o700)
    share(tmp_path)
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700


@pytest.fixture
def denied() -> Iterator[Path]:
    """A folder whose weights belong to another user: the tests' own, where that is not root."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        directory = Path(folder)
        directory.chmod(0o755)
        write_head(directory / "head")
        tiny_model("llama").save_pretrained(directory / "model")
        write_head(directory / "secret")
        save_file(WEIGHTS, directory / "adapter_model.safetensors")
        for file in (*directory.rglob("*.safetensors"), directory / "secret" / "config.json"):
            file.chmod(0)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        yield directory
        if is_root:
            os.seteuid(0)


READERS: dict[str, Callable[[Path], object]] = {
    "a head": lambda directory: MedusaHead.from_pretrained(directory / "head"),
    "a drafter": lambda directory: load_drafter(f"medusa:{directory / 'head'}", tiny_target()),
    "a head whose config is unreadable, too": lambda directory: load_drafter(
        f"medusa:{directory / 'secret'}", tiny_target()
    ),
    "a draft model": lambda directory: load_drafter(f"draft_model:{directory / 'head'}", tiny_target()),
    "a checkpoint": lambda directory: read_checkpoint(str(directory / "head")),
    "a target": lambda directory: load_model(directory / "model", dtype="auto", device="cpu"),
}


@pytest.mark.parametrize("name", READERS)
def test_what_may_not_be_read_is_told_as_such(name: str, denied: Path) -> None:
    with pytest.raises(
        PermissionError,
        match=r"(model\.safetensors|config\.json) may not be read by this user: let its owner run `chmod a\+r",
    ):
        READERS[name](denied)


def test_an_adapter_that_may_not_be_read_is_told_as_such(denied: Path) -> None:
    pytest.importorskip("peft", reason="adapters need peft: pip install 'selfspec[lora]'")
    with pytest.raises(PermissionError, match=r"adapter_model\.safetensors may not be read by this user"):
        merge_adapter(tiny_model("llama"), denied, target="llama")
