"""What is sent: other prompts for every load and for its warm-up, of the wanted length, at the wanted times."""

import itertools
from statistics import fmean, pstdev

import pytest

from selfspec.bench.prompts import read_benchmark
from selfspec.bench.serve_options import BenchServeOptions
from selfspec.bench.serve_work import Load, Prompts, arrivals, chars_per_token, random_rows, samples
from selfspec.traffic.prompt_files import PromptRow

ROWS = [PromptRow(i, f"row {i} says something") for i in range(40)]
OTHERS = [PromptRow(i, [{"role": "system", "content": f"other {i}"}, {"role": "user", "content": "b"}]) for i in range(30)]


def test_no_prompt_is_sent_twice_as_long_as_there_are_others() -> None:
    prompts = Prompts(ROWS, OTHERS)
    taken = [prompts.take(10, is_warm_up=is_warm_up) for is_warm_up in (True, False) * 3]
    texts = [prompt.text for part in taken for prompt in part]
    assert len(set(texts)) == len(texts) == 60 and not prompts.has_repeated
    assert taken[0][0].messages == OTHERS[0].prompt and taken[1][0].messages[0]["content"] == "row 0 says something"
    again = prompts.take(20)
    assert prompts.has_repeated and again[10].text == texts[10]


@pytest.mark.parametrize("num_tokens", [5, 700])
def test_prompts_have_the_length_asked_for(num_tokens: int) -> None:
    prompts = Prompts(ROWS, OTHERS, num_tokens=num_tokens, chars_per_token=4.5).take(40)
    assert {len(prompt.text) for prompt in prompts} == {round(num_tokens * 4.5)}
    assert len({prompt.text[:20] for prompt in prompts}) == 40, "they begin with rows of their own"


def test_a_shared_beginning_is_one_loads_alone() -> None:
    prompts = Prompts(ROWS, OTHERS, num_shared=50)
    loads = [prompts.take(4, is_warm_up=True), prompts.take(4), prompts.take(4)]
    beginnings = [{prompt.messages[0]["content"][:200] for prompt in load} for load in loads]
    assert [len(beginning) for beginning in beginnings] == [1, 1, 1]
    assert len(set().union(*beginnings)) == 3
    assert loads[1][2].text.endswith("\n\nrow 2 says something")
    assert [message["role"] for message in loads[0][0].messages] == ["system", "user"]


def test_arrivals_are_at_random_and_at_the_rate() -> None:
    load = Load(20_000, rate=50.0)
    times = arrivals(load, 1)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0.0 and len(times) == 20_000 and min(pauses) >= 0
    # Those of a Poisson process: as wide as they are long.
    assert fmean(pauses) == pytest.approx(0.02, rel=0.03) and pstdev(pauses) == pytest.approx(0.02, rel=0.05)
    assert times == arrivals(load, 1) != arrivals(load, 2)


@pytest.mark.parametrize(("burstiness", "width"), [(0.25, 2.0), (4.0, 0.5)])
def test_bursts_keep_the_rate(burstiness: float, width: float) -> None:
    times = arrivals(Load(20_000, rate=50.0, burstiness=burstiness), 1)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert fmean(pauses) == pytest.approx(0.02, rel=0.05) and pstdev(pauses) == pytest.approx(0.02 * width, rel=0.06)


def test_random_words_make_no_sense_and_are_the_seeds() -> None:
    words = read_benchmark("spec_bench")
    rows = random_rows(words, 0)
    assert rows == random_rows(words, 0) != random_rows(words, 1)
    assert len({row.prompt for row in rows}) == len(rows)


def test_a_templates_tokens_do_not_count_for_the_ratio() -> None:
    short, long = samples(ROWS)
    assert (len(short), len(long)) == (200, 2000)
    assert not any(long.startswith(str(row.prompt)[:5]) for row in ROWS)
    assert chars_per_token((200, 50 + 30), (2000, 500 + 30)) == 4.0


def test_loads_are_read_from_options() -> None:
    assert [load.name for load in BenchServeOptions().loads] == ["1 stream", "8 streams", "32 streams"]
    assert [load.num_requests for load in BenchServeOptions(concurrency="1,64").loads] == [8, 256]
    [rate] = BenchServeOptions(rate="2.50", burstiness=0.5, num_prompts=9).loads
    assert (rate.name, rate.num_requests, rate.burstiness) == ("2.5/s", 9, 0.5)
    both = BenchServeOptions(concurrency="4", rate="1,3").loads
    assert [load.name for load in both] == ["4 streams", "1/s", "3/s"]


def test_a_packaged_benchmark_is_never_warmed_up_with_itself() -> None:
    for name in ("spec_bench", "humaneval", "random"):
        measured, others = BenchServeOptions(prompts=name).rows()
        assert not {row.prompt if isinstance(row.prompt, str) else row.prompt[0]["content"] for row in measured} & {
            row.prompt if isinstance(row.prompt, str) else row.prompt[0]["content"] for row in others
        }


def test_what_differs_between_servers_is_given_once_or_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFSPEC_API_KEY", "of the environment")
    urls = ["http://a:1/v1", "http://a:1", "https://b"]
    servers = BenchServeOptions(extra_body=['{"drafter": "none"}', "{}", "{}"], model=["m"]).servers(urls)
    assert [server.name for server in servers] == ["a:1", "a:1 (2)", "b"]
    assert [server.url for server in servers] == ["http://a:1", "http://a:1", "https://b"]
    assert [server.more for server in servers] == [{"drafter": "none"}, {}, {}]
    assert [server.model for server in servers] == ["m"] * 3
    assert {server.api_key for server in servers} == {"of the environment"} and "of the" not in repr(servers)
    with pytest.raises(ValueError, match="--model is given twice for 3 servers: give it once, or once for each"):
        BenchServeOptions(model=["m", "n"]).servers(urls)
