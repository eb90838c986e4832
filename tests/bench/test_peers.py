"""Engines beside each other: all are driven and counted alike, and the tables say what the records say."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from selfspec.bench.peers import News, Settings, Trace, drive, first_token_seconds, jump, phase_rates
from selfspec.bench.peers_suite import PLAIN, Suite, Work, measure, num_requests
from selfspec.bench.peers_table import compare
from selfspec.bench.peers_vllm import VllmPeer


@dataclass
class CountingPeer:
    """Answers with its prompt's tokens, two at a time, and watches how many requests are open."""

    takes_all: bool = False
    num_requests: int = 0
    most_open: int = 0
    pause: float = 0.0
    is_closed: bool = False
    left: dict[int, list[int]] = field(default_factory=dict)
    open_counts: list[int] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0
    num_passes: int = 0

    def submit(self, number: int, prompt_ids: list[int], settings: Settings) -> None:
        self.num_requests += 1
        self.seen.append(prompt_ids)
        self.left[number] = prompt_ids[: settings.max_tokens]

    def news(self) -> list[News]:
        time.sleep(self.pause)
        self.open_counts.append(len(self.left))
        out = []
        for number, ids in list(self.left.items()):
            self.num_tokens, self.num_passes = self.num_tokens + len(ids[:2]), self.num_passes + 1
            self.left[number] = ids[2:]
            out.append(News(number, ids[:2], not ids[2:]))
            if not ids[2:]:
                del self.left[number]
        return out

    def counts(self) -> tuple[float, float]:
        return self.num_tokens, self.num_passes

    def close(self) -> None:
        self.is_closed = True


PROMPTS = [[10 * number + place for place in range(4 + number % 3)] for number in range(9)]


@pytest.mark.parametrize("takes_all", [False, True])
def test_every_request_is_answered_and_only_so_many_are_open(takes_all: bool) -> None:
    peer = CountingPeer(takes_all)
    trace = drive(peer, PROMPTS, 3, Settings(max_tokens=100))
    assert [trace.answers[number] for number in range(9)] == PROMPTS
    assert trace.num_tokens == sum(map(len, PROMPTS)) and sum(is_last for *_, is_last in trace.steps) == 9
    assert max(peer.open_counts) == (9 if takes_all else 3)
    assert trace.acceptance_length == peer.num_tokens / peer.num_passes


def test_a_run_counts_until_a_stream_has_nothing_left() -> None:
    """Two streams and three requests: the second end leaves one."""
    trace = Trace([(1.0, 4, False), (2.0, 4, True), (3.0, 2, False), (4.0, 6, True), (9.0, 1, True)])
    assert trace.busy(2) == (4.0, 16) and trace.busy(1) == (9.0, 17) and trace.busy(3) == (2.0, 8)
    assert trace.busy(4) == (0.0, 0)


def test_windows_are_half_seconds_and_whole() -> None:
    trace = Trace([(0.1, 4, False), (0.4, 1, False), (0.5, 2, False), (1.7, 3, False), (2.2, 5, True)])
    assert trace.windows() == [10.0, 4.0, 0.0, 6.0]
    assert phase_rates([8.0, 1.0, 2.0, 3.0, 9.0, 9.0, 7.0, 5.0], [(4, 2.0), (1, 1.0), (4, 1.0)]) == [2.5, 9.0, 5.0]
    assert phase_rates([1.0], [(4, 0.5)]) == [0.0], "no window lies in the second half alone"


def test_load_jumps_and_prompts_come_again() -> None:
    peer = CountingPeer(takes_all=True, pause=0.005)
    trace = jump(peer, PROMPTS, [(4, 0.3), (1, 0.3), (4, 0.3)], Settings(max_tokens=100))
    assert trace.steps[-1][2] and not peer.left and peer.num_requests > len(PROMPTS)
    extremes = [count for count, _ in groupby(count for count in peer.open_counts if count in (1, 4))]
    assert extremes[:3] == [4, 1, 4] and max(peer.open_counts) == 4


def test_a_first_token_is_one_request_alone() -> None:
    peer = CountingPeer(pause=0.02)
    assert 0.02 <= first_token_seconds(peer, [1, 2, 3]) < 0.2 and peer.num_requests == 1


SUITE = Suite(
    streams=[1, 3],
    repeats=2,
    lengths=[5, 7],
    parts=["speed", "alone", "prompts", "hard", "jump"],
    num_alone=2,
    jump_streams=2,
    jump_seconds=0.05,
)


def make_work(suite: Suite) -> Work:
    prompts = [[1000 + number, 7, 8, 9, 10][: 3 + number % 3] for number in range(suite.num_requests)]
    long = {length: [[2000 + length + text] * length for text in range(3)] for length in suite.lengths}
    return Work(prompts, [[3000 + number, 1] for number in range(10)], long)


def test_a_suite_uses_no_prompt_twice_and_opens_each_part_anew() -> None:
    peers: list[CountingPeer] = []

    def open_peer(places: int, longest: int) -> CountingPeer:
        assert longest >= 5 + SUITE.max_tokens or places == 1
        peers.append(CountingPeer(takes_all=places > 1, pause=0.001))
        return peers[-1]

    record: dict[str, Any] = {}
    lines: list[str] = []
    work = make_work(SUITE)
    measure(open_peer, work, SUITE, record, is_plain=True, on_part=lines.append)
    # One for each number of streams, twice; alone, prompts and the jump.
    assert len(peers) == 2 + 1 + 1 + 2 + 1 and all(peer.is_closed for peer in peers)
    runs = record["speed"]
    assert [(run["streams"], run["repeat"], run["is_first"]) for run in runs] == [
        (streams, repeat, repeat == 0) for streams in (1, 3) for repeat in (0, 1, 2)
    ]
    answers = [tuple(answer) for run in runs for answer in run["answers"]]
    assert len(set(answers)) == len(answers) == SUITE.num_requests == 3 * (num_requests(1) + num_requests(3))
    for peer, num_warm in zip(peers, (4, 6), strict=False):
        seen = [tuple(ids) for ids in peer.seen]
        assert len(set(seen)) == len(seen) and sum(ids[0] >= 3000 for ids in seen) == num_warm
    alone = {of["streams"]: of["answers"] for of in record["alone"]}
    assert all(alone[run["streams"]] == run["answers"][:2] for run in runs if run["repeat"] == 1)
    assert [len(seconds) for seconds in record["prompts"].values()] == [3, 3]
    known = {token for texts in work.long.values() for text in texts for token in text}
    assert {token for run in record["hard"] for answer in run["answers"] for token in answer} <= known
    assert len(record["jump"]["rates"]) == 3
    assert lines[0].startswith("speed, 1 at once, first: ")


def test_an_engine_that_stays_open_has_one_first_run() -> None:
    peer = CountingPeer()
    record: dict[str, Any] = {}
    suite = Suite(streams=[1, 3], repeats=1, lengths=[5], parts=["speed", "alone"])
    measure(lambda places, longest: peer, make_work(suite), suite, record, is_plain=False, on_part=lambda line: None)
    assert [run["is_first"] for run in record["speed"]] == [True, False, False, False]
    assert "alone" not in record, "only plain decoding says what all must say"


def test_the_work_is_read_and_must_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="work.json is not there: make the work first"):
        Work.read(tmp_path, SUITE)
    work = make_work(SUITE)
    work.save(tmp_path)
    assert Work.read(tmp_path, SUITE) == work
    with pytest.raises(ValueError, match="has 45 prompts, and 150 are needed: make the work with these --streams"):
        Work.read(tmp_path, Suite(streams=[25], lengths=[5], repeats=1))
    with pytest.raises(ValueError, match="has no texts of 9 tokens"):
        Work.read(tmp_path, Suite(streams=[1], lengths=[9]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": ["speed", "colour"]}, "part 'colour' is not known: use some of speed, alone"),
        ({"repeats": 0}, "repeats=0 is not allowed"),
        ({"streams": []}, r"streams=\[\] is not allowed"),
        ({"streams": [4, 0]}, r"streams=\[4, 0\] is not allowed"),
        ({"jump_seconds": float("nan")}, "jump_seconds=nan is not allowed"),
    ],
)
def test_bad_suites_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Suite(**settings)


def run(streams: int, repeat: int, speed: float, answers: list[list[int]], length: float | None, **more: Any) -> dict:
    return {
        "streams": streams,
        "repeat": repeat,
        "is_first": repeat == 0,
        "tokens_per_second": speed,
        "acceptance_length": length,
        "answers": answers,
        **more,
    }


def record_of(engine: str, mode: str, factor: float, answers: list[list[int]], **more: Any) -> dict[str, Any]:
    length = None if mode == PLAIN else 2.5
    speeds = {1: (5.0, 10.0, 30.0, 20.0), 8: (50.0, 100.0, 90.0, 70.0)}
    runs = [run(n, i, factor * speed, answers, length) for n, of in speeds.items() for i, speed in enumerate(of)]
    return {"engine": engine, "is_ours": engine == "selfspec", "mode": mode, "speed": runs, **more}


def test_tables_have_medians_ratios_and_equal_answers() -> None:
    expected, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    alone = [{"streams": n, "repeat": 1, "answers": [[1, 2]]} for n in (1, 8)]
    records = [
        record_of("vllm", "eagle:3", 4.0, other),
        record_of(
            "selfspec", "eagle", 3.0, expected, jump={"phases": [[4, 1.0], [1, 1.0]], "windows": [], "rates": [8.0, 2.0]}
        ),
        record_of("selfspec", PLAIN, 1.0, expected, alone=alone, prompts={"512": [0.3, 0.1, 0.2], "16384": [1.0, 2.0, 1.5]}),
        record_of("vllm", PLAIN, 2.0, expected),
    ]
    tables, figures = compare(records)
    assert list(figures["records"]) == ["selfspec, none", "selfspec, eagle", "vllm, none", "vllm, eagle:3"]
    assert figures["records"]["selfspec, none"]["speed"]["8"] == {
        "tokens_per_second": 90.0,
        "repeats": [100.0, 90.0, 70.0],
        "first": 50.0,
        "acceptance_length": None,
    }
    assert figures["relative"]["speed"] == {"plain": {"1": 0.5, "8": 0.5}, "drafted": {"1": 0.75, "8": 0.75}}
    by_title = {table.title: table for table in tables}
    assert by_title["Tokens per second"].rows[1] == ["8", "90 (50)", "270 (150)", "180 (100)", "360 (200)", "0.50", "0.75"]
    assert by_title["Acceptance length"].head == ["streams", "selfspec, eagle", "vllm, eagle:3"]
    assert by_title["Time to the first token"].rows == [["512", "200.0 (300.0)"], ["16384", "1,500.0 (1,000.0)"]]
    # Four runs of two answers; one answer of one run was given alone.
    assert by_title["Equal answers"].rows[0] == ["1", "1/1 alone", "8/8 plain, 1/1 alone", "–", "4/8 plain"]
    assert by_title["Load that jumps"].rows == [["4 for 1 s", "8"], ["1 for 1 s", "2"]]
    markdown = by_title["Tokens per second"].markdown()
    assert markdown.startswith("## Tokens per second\n") and "| 8 | 90 (50) | 270 (150) |" in markdown


def test_records_that_were_cut_short_are_compared_as_far_as_they_go() -> None:
    cut = {"engine": "vllm", "is_ours": False, "mode": PLAIN, "speed": [run(1, 0, 9.0, [[1]], None)]}
    tables, figures = compare([record_of("selfspec", PLAIN, 1.0, [[1], [2]]), cut])
    assert tables[0].rows[0] == ["1", "20 (5)", "– (9)"] and tables[0].rows[1] == ["8", "90 (50)", "–"]
    assert figures["relative"]["speed"] == {"plain": {}, "drafted": {}}


def test_the_same_record_twice_is_refused() -> None:
    record = record_of("vllm", PLAIN, 1.0, [[1]])
    with pytest.raises(ValueError, match="two records are of vllm, none: compare one of each"):
        compare([record, record])
    with pytest.raises(ValueError, match="no records to compare"):
        compare([])


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A module in vLLM's place, which keeps what it is asked, and whose answers are prompts turned around."""
    calls: dict[str, Any] = {"requests": []}
    told: dict[str, int] = {}
    prompts: dict[str, list[int]] = {}

    def add_request(name: str, prompt: dict[str, list[int]], params: dict[str, Any]) -> None:
        calls["requests"].append(params)
        prompts[name], told[name] = prompt["prompt_token_ids"][::-1], 0

    def step() -> list[SimpleNamespace]:
        out = [SimpleNamespace(request_id="of somebody else", outputs=[], finished=False)]
        for name in list(prompts):
            told[name] += 1
            ids, is_last = prompts[name][: told[name]], told[name] == len(prompts[name])
            out.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=ids)], finished=is_last))
            if is_last:
                del prompts[name]
        return out

    def llm(path: str, **settings: Any) -> SimpleNamespace:
        calls.update(path=path, settings=settings)
        metrics = [
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=4),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=6),
            SimpleNamespace(name="vllm:e2e_request_latency_seconds", buckets={}),
        ]
        return SimpleNamespace(llm_engine=SimpleNamespace(add_request=add_request, step=step), get_metrics=lambda: metrics)

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams, module.__version__ = llm, lambda **settings: settings, "0.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return calls


def open_vllm(head: Path | None) -> VllmPeer:
    return VllmPeer(Path("target"), head=head, num_draft_tokens=3, places=4, longest=100, dtype="bfloat16")


def test_vllm_is_driven_like_the_others(fake_vllm: dict[str, Any]) -> None:
    peer = open_vllm(Path("head"))
    trace = drive(peer, PROMPTS, 2, Settings(max_tokens=9, temperature=1.5, ignore_eos=True))
    assert [trace.answers[number] for number in range(9)] == [ids[::-1] for ids in PROMPTS]
    assert fake_vllm["requests"][3] == {"max_tokens": 9, "temperature": 1.5, "seed": 3, "ignore_eos": True}
    settings = fake_vllm["settings"]
    assert settings["speculative_config"] == {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    assert (settings["max_num_seqs"], settings["max_model_len"], settings["enable_prefix_caching"]) == (4, 100, False)
    assert peer.counts() == (10, 4) and peer.num_requests == 9 and peer.environment["vllm"] == "0.0"
    drive(peer, PROMPTS[:1], 1, Settings(max_tokens=9))
    assert fake_vllm["requests"][-1]["seed"] is None


def test_vllm_decodes_plainly_without_a_head(fake_vllm: dict[str, Any]) -> None:
    open_vllm(None)
    assert fake_vllm["settings"]["speculative_config"] is None


def test_a_machine_without_vllm_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match="vLLM is not installed here: run this mode where it is"):
        open_vllm(None)
