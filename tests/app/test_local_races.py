"""What the page does with the target, without a browser."""

from __future__ import annotations

import json
import time

import pytest

from selfspec import SamplingParams, generate
from selfspec.app.local_races import LocalRaces, without_front_matter
from selfspec.app.race import SECONDS_PER_FRAME, Parting
from selfspec.app.races import prompt_of
from selfspec.app.settings import CHAT, LIVE, TEXT, Settings

PROMPT = "the cat sat on the mat and the cat sat"
SHORT = {"prompt": PROMPT, "max_new_tokens": 24, "drafters": ("ngram", "truncated:1")}


@pytest.fixture(scope="module")
def races(target):
    return LocalRaces(target)


def last(views):
    *_, end = views
    return end


def test_a_race_ends_with_every_column_identical(races, target):
    views = list(races.race(Settings(**SHORT), [], "me"))
    race = views[-1].race
    assert all(view.race is None for view in views[:-1])
    prompt = target.encode([{"role": "user", "content": PROMPT}])
    [expected] = generate(target, [prompt], sampling=SamplingParams(max_new_tokens=24))
    assert [column.token_ids for column in race.columns] == [expected.token_ids] * 3
    assert views[-1].html.count("✓ identical") == 2 and views[-1].html.count(">reference<") == 1
    assert "measured alone" in views[-1].message


def test_the_replay_takes_the_time_that_the_slowest_column_took(races):
    times = []
    for view in races.race(Settings(**{**SHORT, "max_new_tokens": 120}), [], "me"):
        times.append((time.perf_counter(), view))
    racing = [at for at, view in times if view.message.startswith("Racing")]
    slowest = max(column.steps[-1].at for column in times[-1][1].race.columns)
    assert times[-1][0] - racing[0] <= slowest + 1.0
    assert times[-1][0] - racing[0] >= slowest - 2 * SECONDS_PER_FRAME - 0.05
    assert len(racing) <= slowest / SECONDS_PER_FRAME + 2


def test_live_shows_no_speed_up_and_says_why(races):
    views = list(races.race(Settings(**SHORT, timing=LIVE), [], "me"))
    assert "not comparable" in views[0].message and "not comparable" in views[-1].message
    assert views[-1].html.count("<dt>speed-up</dt><dd>–</dd>") == 3
    assert views[-1].html.count("✓ identical") == 2


def test_sampled_columns_are_identical_too(races):
    race = last(races.race(Settings(**SHORT, temperature=1.0, seed=5), [], "me")).race
    assert set(race.partings.values()) == {None}


@pytest.mark.parametrize("timing", ["alone", LIVE])
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
