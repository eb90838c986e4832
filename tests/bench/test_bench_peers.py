"""The recipe that puts this project's engine beside a peer: made, measured and compared on a tiny target."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import eagle_head

from selfspec import Target
from selfspec.recipes import bench_peers

ROOT = Path(__file__).parents[2]
SMALL = ["--streams", "1", "2", "--repeats", "1", "--lengths", "16", "40", "--max-tokens", "6"]
EVERYTHING = ["--parts", "speed", "alone", "prompts", "hard", "jump", "--jump-streams", "2", "--jump-seconds", "0.5"]


@pytest.fixture(scope="module")
def folder(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    target = Target.from_pretrained(tiny_target_dir, device="cpu", use_packing=False)
    eagle_head(target).save_pretrained(folder / "head")
    made = folder / "work"
    args = ["--target", tiny_target_dir, "--head", folder / "head", "--expand", "64x3x64x8", "--dtype", "float32"]
    args += ["--device", "cpu", "--most-prompt-tokens", "300", *SMALL]
    bench_peers.main(["work", str(made), *map(str, args)])
    return made


def test_the_work_is_what_both_engines_read(folder: Path) -> None:
    work = json.loads((folder / "work.json").read_text())
    assert len(work["prompts"]) == 4 * 6 and {len(ids) <= 300 for ids in [*work["prompts"], *work["warm"]]} == {True}
    texts = [tuple(ids) for ids in [*work["prompts"], *work["warm"]]]
    assert len(set(texts)) == len(texts)
    assert {length: [len(ids) for ids in of] for length, of in work["long"].items()} == {"16": [16] * 3, "40": [40] * 3}
    config = json.loads((folder / "target" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (64, 3)
    assert (folder / "eagle_vllm" / "model.safetensors").is_file() and (folder / "eagle" / "config.json").is_file()


def test_our_engine_is_measured_and_its_answers_are_equal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_peers.main(["ours", str(folder), "--dtype", "float32", "--device", "cpu", *SMALL, *EVERYTHING])
    plain, drafted = (json.loads((folder / f"selfspec-{mode}.json").read_text()) for mode in ("none", "eagle"))
    assert {*plain} == {"engine", "is_ours", "mode", "environment", "suite", "speed", "alone", "prompts", "hard", "jump"}
    assert [run["answers"] for run in plain["speed"]] == [run["answers"] for run in drafted["speed"]]
    # Sampled answers, too, because each request has its own seed.
    assert [run["answers"] for run in plain["hard"]] == [run["answers"] for run in drafted["hard"]]
    assert all(run["acceptance_length"] == 1 for run in plain["speed"])
    assert len(plain["jump"]["windows"]) >= 3

    bench_peers.main(["compare", str(folder)])
    printed = capsys.readouterr().out
    assert (folder / "peers.md").read_text() == printed
    figures = json.loads((folder / "peers.json").read_text())["records"]["selfspec, eagle"]
    assert figures["equal"]["2"] == {"plain": [12, 12], "alone": [6, 6]}
    for title in ("Tokens per second", "Time to the first token", "Equal answers", "Load that jumps"):
        assert f"## {title}\n" in printed


def documented() -> Iterator[list[str]]:
    for page in (ROOT / "docs" / "benchmark.md", ROOT / "docs" / "serving.md", ROOT / "recipes" / "bench_peers.py"):
        for line in re.findall(
            r"^ *python recipes/bench_peers\.py ([^#\n]*)", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            yield line.split()


@pytest.mark.parametrize("words", list(documented()), ids=" ".join)
def test_the_pages_lines_are_understood(words: list[str]) -> None:
    mode, folder, *_ = bench_peers.parsed(words)
    assert (mode.__name__, folder) == (words[0], Path("work"))


def test_the_pages_have_every_mode() -> None:
    assert {words[0] for words in documented()} == set(bench_peers.MODES)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ours", "{folder}", "--streams", "9"], "make the work with these --streams"),
        (["ours", "{tmp}"], "make the work first"),
        (["vllm", "{folder}", "--drafter", "medusa"], "drafter='medusa' is not known: use none, or eagle:3"),
        (["vllm", "{folder}", "--drafter", "eagle:0"], "drafter='eagle:0' is not known"),
        (["vllm", "{folder}", *SMALL], "vLLM is not installed here"),
        (["compare", "{tmp}"], "has no records: measure an engine on it first"),
    ],
)
def test_mistakes_are_one_sentence(
    folder: Path, tmp_path: Path, args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=message):
        bench_peers.main([arg.format(folder=folder, tmp=tmp_path) for arg in args])


def test_without_a_mode_the_modes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_peers.main([])
    assert ended.value.code == 2 and "one of work, ours, vllm, compare" in capsys.readouterr().out
