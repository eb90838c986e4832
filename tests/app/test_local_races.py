"""What the page does with the target, without a browser."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from selfspec import SamplingParams, generate
from selfspec.app import races as races_module
from selfspec.app.local_races import LocalRaces, without_front_matter
from selfspec.app.race import SECONDS_PER_FRAME
from selfspec.app.races import prompt_of
from selfspec.app.records import Parting
from selfspec.app.settings import ALONE, CHAT, LEVEL, TEXT, TRANSFORMERS, Settings

PROMPT = "the cat sat on the mat and the cat sat"
SHORT = {"prompt": PROMPT, "max_new_tokens": 24, "drafters": ("ngram", "truncated:1")}


@pytest.fixture(scope="module")
def races(target):
    return LocalRaces(target)


def last(views):
    *_, end = views
    return end


@pytest.mark.parametrize("timing", [LEVEL, ALONE])
def test_a_race_ends_with_every_column_identical(races, target, timing):
    views = list(races.race(Settings(**SHORT, timing=timing), [], "me"))
    race = views[-1].race
    assert all(view.race is None for view in views[:-1])
    prompt = target.encode([{"role": "user", "content": PROMPT}])
    [expected] = generate(target, [prompt], sampling=SamplingParams(max_new_tokens=24))
    assert [column.token_ids for column in race.columns] == [expected.token_ids] * 3
    assert views[-1].html.count("✓ identical") == 2 and views[-1].html.count(">to match<") == 1
    assert ("ran alone" if timing == ALONE else "Level clocks") in views[-1].message


def test_no_column_is_called_stopped_while_it_runs(races, target, monkeypatch):
    forward = target.run_flat

    def slow_forward(*args, **kwargs):
        time.sleep(0.02)
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "run_flat", slow_forward)
    *running, end = races.race(Settings(**SHORT), [], "me")
    shown = [view.html for view in running if view.html]
    assert len(shown) > 5 and not any(">stopped<" in html for html in shown)
    assert shown[0].count(">waits<") == 3 and any(html.count(">runs<") == 3 for html in shown)
    assert end.html.count('class="column done') == 3 and end.html.count("winner") == 1


def test_transformers_races_and_every_lane_is_compared_with_it(races):
    settings = Settings(prompt=PROMPT, max_new_tokens=12, drafters=("ngram", TRANSFORMERS))
    end = last(races.race(settings, [], "me"))
    assert [column.name for column in end.race.columns] == ["none", TRANSFORMERS, "ngram"]
    assert end.html.count("<dt>vs transformers</dt>") == 3 and end.html.count("✓ identical") == 2
    sampled = last(races.race(replace(settings, temperature=1.0), [], "me"))
    assert [column.name for column in sampled.race.columns] == ["none", "ngram"]
    assert "transformers is left out" in sampled.message and "vs transformers" not in sampled.html


@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
def test_a_replay_takes_the_time_of_the_slowest_column(races, speed):
    race = last(races.race(Settings(**{**SHORT, "max_new_tokens": 120}), [], "me")).race
    start = time.perf_counter()
    views = [(time.perf_counter() - start, view) for view in races.replay(race, "me", speed=speed)]
    slowest = max(column.steps[-1].at for column in race.columns) / speed
    assert slowest - 2 * SECONDS_PER_FRAME - 0.05 <= views[-1][0] <= slowest + 1.0
    assert len(views) <= slowest / SECONDS_PER_FRAME + 3
    assert views[-1][1].html == race.html()


def test_a_replay_can_be_stopped(races):
    race = last(races.race(Settings(**{**SHORT, "max_new_tokens": 120}), [], "me")).race
    replay = races.replay(race, "me", speed=0.01)
    next(replay)
    races.stop("me")
    assert next(replay).html == race.html()
    assert list(replay) == []


def test_visitors_wait_in_line_are_told_their_place_and_can_leave(target):
    races = LocalRaces(target, max_waiting=2)
    long = Settings(prompt=PROMPT, max_new_tokens=512, drafters=("ngram",))
    first, second, third = (races.race(long, [], name) for name in ("a", "b", "c"))
    next(first)
    assert "one visitor is before you" in next(second).message
    assert "2 visitors are before you" in next(third).message
    with pytest.raises(ValueError, match="too many wait for this target"):
        next(races.race(long, [], "d"))
    start = time.perf_counter()
    races.stop("b")
    assert [view.message for view in second] == ["Stopped."]
    assert time.perf_counter() - start < 0.5
    assert "one visitor is before you" in next(third).message
    first.close()
    assert "Waiting" not in next(third).message
    third.close()


def test_finished_races_are_kept_for_a_while(races, monkeypatch):
    monkeypatch.setattr(races_module, "MAX_KEPT", 2)
    kept = [object() for _ in range(3)]
    keys = [races.keep(race) for race in kept]
    assert len(set(keys)) == 3 and [races.kept(key) for key in keys] == [None, *kept[1:]]
    assert races.kept("") is None


def test_sampled_columns_are_identical_too(races):
    race = last(races.race(Settings(**SHORT, temperature=1.0, seed=5), [], "me")).race
    assert set(race.partings.values()) == {None}


@pytest.mark.parametrize("timing", [ALONE, LEVEL])
def test_stop_ends_a_race_that_would_go_on(races, target, monkeypatch, timing):
    settings = Settings(prompt=PROMPT, max_new_tokens=512, drafters=("ngram",), timing=timing)
    verify, num_passes = target.run_flat, 0

    def stop_in_the_middle(*args, **kwargs):
        nonlocal num_passes
        num_passes += 1
        if num_passes == 20:
            races.stop("me")
        return verify(*args, **kwargs)

    views = races.race(settings, [], "me")
    with monkeypatch.context() as patch:
        patch.setattr(target, "run_flat", stop_in_the_middle)
        next(views)
        races.stop("somebody else")
        end = last(views)
    # Those of the pass under way, and no more.
    assert num_passes in (20, 21)
    assert end.message == "Stopped."
    assert end.race.columns[1].finish_reason is None and "stopped" in end.html
    assert last(races.race(Settings(**SHORT), [], "me")).race.columns[-1].finish_reason is not None


def test_a_race_can_be_stopped_before_its_turn(races):
    races.expect("me")
    races.stop("me")
    end = last(races.race(Settings(**SHORT), [], "me"))
    assert end.message == "Stopped."
    assert [column.steps for column in end.race.columns] == [[], [], []]


def test_a_chat_goes_on_from_its_history():
    history = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    settings = Settings(prompt="three", system="be brief", kind=CHAT)
    messages = [{"role": "system", "content": "be brief"}, *history, {"role": "user", "content": "three"}]
    assert prompt_of(settings, history) == messages
    assert prompt_of(Settings(prompt=" as it stands", kind=TEXT), history) == " as it stands"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(prompt=" \n"), "The prompt is empty"),
        (Settings(prompt="the cat " * 3000), "tokens, and the target takes 4096"),
        (Settings(prompt="x", drafters=("a",)), "drafter 'a' is not known"),
        (Settings(prompt="x", drafters=("truncated:9",)), "truncated:9 is out of range"),
        (Settings(prompt="x", drafters=("eagle",)), "no shipped eagle head fits"),
        (Settings(prompt="x", drafters=("medusa:nowhere/at-all",)), "nowhere/at-all: no such folder"),
    ],
)
def test_what_a_person_can_get_wrong_is_one_sentence(races, settings, message):
    with pytest.raises(ValueError, match=message) as error:
        last(races.race(settings, [], "me"))
    assert "\n" not in str(error.value)
    assert not races._stops


def test_a_different_output_is_told(races):
    race = last(races.race(Settings(**SHORT), [], "me")).race
    race.partings["ngram"] = Parting(6, "dog", "cat", 0.25)
    html = race.html()
    assert "✗ differs at token 7, logit gap 0.25" in html and html.count("✓ identical") == 1


def test_the_saved_run_has_all_that_was_measured(races):
    race = last(races.race(Settings(**SHORT), [], "me")).race
    record = json.loads(races.save(race).read_text(encoding="utf-8"))
    assert record["settings"]["prompt"] == PROMPT
    assert record["environment"]["dtype"] == "float32"
    assert [column["name"] for column in record["columns"]] == ["none", "ngram", "truncated:1"]
    assert [column["is_identical"] for column in record["columns"]] == [None, True, True]
    first = record["columns"][0]
    assert sum(len(step["token_ids"]) for step in first["steps"]) == len(first["steps"])
    assert "".join(piece for step in first["steps"] for piece in step["pieces"]) == first["text"]


def test_a_head_that_fits_can_be_raced(target, head_dir):
    races = LocalRaces(target)
    report = races.examine(f" {head_dir} ")
    assert report.drafter == f"medusa:{head_dir}"
    assert report.card == "# A tiny card\n"
    assert report.facts["kind"] == "medusa" and report.facts["num_heads"] == 2
    race = last(races.race(Settings(prompt=PROMPT, max_new_tokens=8, drafters=(report.drafter,)), [], "me")).race
    assert race.partings == {report.drafter: None}
    assert report.drafter in races.drafters


def test_a_head_of_another_target_is_shown_and_refused(target):
    races = LocalRaces(target)
    offered = set(races.drafters)
    [(_, folder)] = [(label, folder) for label, folder in races.shipped_heads() if label.endswith("/ eagle")]
    report = races.examine(folder)
    assert report.drafter is None and "SmolLM2-135M-Instruct" in report.verdict and "hidden_size" in report.verdict
    assert report.card.startswith("# EAGLE-3 head")
    assert set(races.drafters) == offered


@pytest.mark.parametrize("source", ["", "nowhere/at-all", "/"])
def test_no_head_is_one_sentence(races, source):
    with pytest.raises(ValueError, match=r"No head|no such folder|holds no head"):
        races.examine(source)


def test_front_matter_is_for_the_hub():
    assert without_front_matter("---\na: b\n---\n\n# Card\n---\nrest") == "# Card\n---\nrest"
    assert without_front_matter("# Card") == "# Card"
    assert without_front_matter("---\nnever closed") == "---\nnever closed"
