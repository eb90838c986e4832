"""Settings survive a link, and a bad link says what is wrong with it."""

from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.app.settings import ALONE, CHAT, LEVEL, LIVE, MESSAGE, TEXT, Settings, label_of

anything = st.builds(
    Settings,
    prompt=st.text(),
    kind=st.sampled_from([MESSAGE, CHAT, TEXT]),
    system=st.text(),
    drafters=st.lists(
        st.sampled_from(["ngram", "ngram:4", "eagle", "medusa:a/b c&d"]), min_size=1, max_size=3, unique=True
    ).map(tuple),
    timing=st.sampled_from([LEVEL, ALONE, LIVE]),
    max_new_tokens=st.integers(1, 512),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(0, 100),
    seed=st.integers(-(2**63), 2**63 - 1),
    use_cost_guard=st.booleans(),
)


@given(anything)
def test_a_link_brings_the_settings_back(settings):
    query = dict(parse_qsl(settings.query(), keep_blank_values=True, strict_parsing=True))
    assert Settings.from_query(query) == settings


def test_a_link_names_only_what_was_changed():
    assert Settings().query() == ""
    assert Settings(prompt="a b&c", drafters=("eagle", "ngram")).query() == "prompt=a+b%26c&drafters=eagle%2Cngram"
    assert Settings.from_query({"__theme": "dark"}) == Settings()


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"seed": "x"}, "the link's seed='x' cannot be read"),
        ({"use_cost_guard": "maybe"}, "the link's use_cost_guard='maybe' cannot be read"),
        ({"temperature": "-1"}, "temperature=-1.0 is not allowed"),
        ({"max_new_tokens": "100000"}, "too many for the page: use at most 512"),
        ({"temperature": "9"}, "temperature=9.0 is too many for the page: use at most 2"),
        ({"temperature": "nan"}, "temperature=nan is not allowed"),
        ({"top_k": "1000"}, "top_k=1000 is too many for the page: use at most 200"),
        ({"timing": "never"}, "timing='never' is not known: use level, alone, live"),
        ({"drafters": ""}, "0 drafters are chosen: choose one to 3"),
        ({"drafters": "ngram,ngram:2,ngram:3,ngram:4"}, "4 drafters are chosen"),
    ],
)
def test_a_bad_link_is_refused_in_a_sentence(query, message):
    with pytest.raises(ValueError, match=message):
        Settings.from_query(query)


@pytest.mark.parametrize(
    ("text", "value"), [("false", False), ("False", False), ("0", False), ("true", True), ("TRUE", True)]
)
def test_a_link_may_say_yes_and_no_as_people_do(text, value):
    assert Settings.from_query({"use_cost_guard": text}).use_cost_guard is value


def test_a_bad_link_loses_nothing_else():
    query = {"prompt": "Hello", "temperature": "9", "max_new_tokens": "12", "drafters": "eagle", "seed": "x"}
    settings, problem = Settings.from_link(query)
    assert settings == Settings(prompt="Hello", max_new_tokens=12, drafters=("eagle",))
    assert "seed='x' cannot be read" in problem
    assert Settings.from_link({"prompt": "Hello"}) == (Settings(prompt="Hello"), "")


def test_drafters_are_told_apart_once_each():
    assert Settings(drafters=("none", " ngram", "ngram", "")).drafters == ("ngram",)


def test_samples_are_always_seeded():
    assert Settings(temperature=1.0).sampling.seed == 0


def test_labels():
    assert label_of("none") == "plain"
    assert label_of("eagle:runs/mine/head/") == "EAGLE · head"
