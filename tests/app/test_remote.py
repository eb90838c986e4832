"""The page over a running server: answers are the server's, a stop reaches it, and whatever fails is one sentence."""

# ruff: noqa: E402
from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

for name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(name, reason=f"a live server needs {name}: pip install 'selfspec[serve]'")

from live_server import LiveServer

from selfspec import SamplingParams, generate
from selfspec.app import lanes
from selfspec.app.remote import RemoteColumn, Server
from selfspec.app.remote_races import RemoteRaces
from selfspec.app.settings import LIVE, TEXT, Settings
from selfspec.drafters import NgramDrafter, load_drafter
from selfspec.serve.options import ServeOptions
from selfspec.serve.service import Service

PROMPT = "the cat sat on the mat and the cat sat"
SHORT = {"prompt": PROMPT, "max_new_tokens": 24, "drafters": ("ngram", "first")}
KEY = "open sesame"


@pytest.fixture(scope="module")
def live(target) -> Iterator[LiveServer]:
    """A server with a key, whose drafters have names of their own; nothing may be left in its cache."""
    service = Service("models/tiny", ServeOptions(api_key=[KEY]))
    first = load_drafter("truncated:1", target)
    first.name = "first"
    service.open(target, [NgramDrafter(4), first], use_cost_guard=False)
    live = LiveServer(service)
    yield live
    live.wait_until_idle()
    live.close()


@pytest.fixture
def races(live) -> RemoteRaces:
    return RemoteRaces(Server(live.url, KEY))


def last(views):
    *_, end = views
    return end


def test_the_servers_drafters_can_be_chosen(races):
    races.refresh()
    assert races.drafters == {"ngram": "n-gram", "first": "first"}


@pytest.mark.parametrize("kind", ["message", TEXT])
def test_columns_hold_the_servers_answers(races, target, kind):
    views = list(races.race(Settings(**SHORT, kind=kind), [], "me"))
    race = views[-1].race
    prompt = PROMPT if kind == TEXT else [{"role": "user", "content": PROMPT}]
    [expected] = generate(target, [prompt], sampling=SamplingParams(max_new_tokens=24))
    for column in race.columns:
        assert column.text == expected.text
        assert column.finish_reason == expected.finish_reason
        figures = column.figures()
        assert figures.num_tokens == len(expected.token_ids)
        assert figures.acceptance_length == pytest.approx(column.speculation["acceptance_length"])
        assert column.speculation["drafter"] == column.name
        # What was counted on the way is what the server counts at the end.
        assert column.pieces[-1].num_passes == column.speculation["verify_passes"]
    assert race.columns[0].figures().acceptance_length == 1
    assert race.columns[1].figures().num_target_passes < len(expected.token_ids)
    html = views[-1].html
    assert html.count("✓ identical") == 2 and html.count(">to match<") == 1 and "×" in html
    assert "one after the other" in views[-1].message


def test_text_grows_while_it_streams(races, target, monkeypatch):
    slow_down(target, monkeypatch)
    shown = [view.html for view in races.race(Settings(**{**SHORT, "drafters": ("ngram",)}), [], "me")]
    assert len(set(shown)) > 5


def test_all_at_once_shows_no_speed_up(races):
    end = last(races.race(Settings(**SHORT, timing=LIVE), [], "me"))
    assert "not comparable" in end.message
    assert "vs plain" not in end.html and "winner" not in end.html
    assert end.html.count("✓ identical") == 2


def test_sampled_columns_are_identical_too(races):
    race = last(races.race(Settings(**SHORT, temperature=1.0, seed=5), [], "me")).race
    assert [race.is_identical(column) for column in race.columns] == [None, True, True]


def test_a_different_text_is_told(races):
    race = last(races.race(Settings(**SHORT), [], "me")).race
    race.columns[1].pieces.pop(3)
    assert race.is_identical(race.columns[1]) is False
    assert "✗ differs at character" in race.html()
    assert "character 3" in lanes.text_badge("ab", "abc")


def test_the_saved_run_has_all_that_was_measured(races):
    race = last(races.race(Settings(**SHORT), [], "me")).race
    record = json.loads(races.save(race).read_text(encoding="utf-8"))
    assert record["environment"] == {"server": races.server.url}
    assert [column["is_identical"] for column in record["columns"]] == [None, True, True]
    assert "".join(piece["text"] for piece in record["columns"][0]["pieces"]) == record["columns"][0]["text"]
    assert KEY not in json.dumps(record)


def slow_down(target, monkeypatch, seconds: float = 0.02) -> None:
    """A tiny target is done before anyone could stop it."""
    verify = target.run_flat

    def slowly(*args, **kwargs):
        time.sleep(seconds)
        return verify(*args, **kwargs)

    monkeypatch.setattr(target, "run_flat", slowly)


@pytest.mark.parametrize("timing", ["alone", LIVE])
def test_a_stop_cancels_what_the_server_does(races, live, target, monkeypatch, timing):
    slow_down(target, monkeypatch)
    settings = Settings(prompt=PROMPT, max_new_tokens=512, drafters=("ngram",), timing=timing)
    views = races.race(settings, [], "me")
    races.expect("me")
    view = next(view for view in views if "<dd>1.00</dd>" in view.html)
    live.wait_until_busy()
    races.stop("somebody else")
    races.stop("me")
    start = time.perf_counter()
    end = last(views)
    live.wait_until_idle()
    assert time.perf_counter() - start < 5
    assert end.message == "Stopped." and "stopped" in end.html and view.race is None
    assert 0 < max(column.figures().num_tokens for column in end.race.columns if column.pieces) < 512
    assert last(races.race(Settings(**SHORT), [], "me")).race.columns[-1].finish_reason is not None


def test_a_stop_need_not_wait_for_the_server(races, live, target, monkeypatch):
    """The connection is closed in the middle of a pass, which ends only after the page has shown the stop."""
    verify, shown = target.run_flat, threading.Event()

    def stop_and_wait(*args, **kwargs):
        races.stop("me")
        assert shown.wait(60)
        return verify(*args, **kwargs)

    views = races.race(Settings(**SHORT), [], "me")
    with monkeypatch.context() as patch:
        patch.setattr(target, "run_flat", stop_and_wait)
        try:
            assert last(views).message == "Stopped."
        finally:
            shown.set()
        live.wait_until_idle()


def test_closing_the_page_ends_its_race(races, live, target, monkeypatch):
    slow_down(target, monkeypatch)
    views = races.race(Settings(prompt=PROMPT, max_new_tokens=512, drafters=("ngram",), timing=LIVE), [], "me")
    next(views)
    live.wait_until_busy()
    views.close()
    live.wait_until_idle()


def failing(server: Server) -> str:
    with pytest.raises(ValueError, match=server.url) as error:
        last(RemoteRaces(server).race(Settings(**SHORT), [], "me"))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nobody_there_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "does not answer: start `selfspec serve` there" in failing(Server(f"http://127.0.0.1:{port}/v1"))


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_wrong_key_is_one_sentence(live, key):
    assert "refuses this page's API key" in failing(Server(live.url, key))


def test_a_wrong_model_is_one_sentence(live, monkeypatch):
    server = Server(live.url, KEY)
    monkeypatch.setattr(server, "model", lambda: "other")
    assert "model 'other' is not served here: ask for 'tiny'" in failing(server)


def test_a_drafter_that_is_not_there_is_one_sentence(races):
    with pytest.raises(ValueError, match="drafter 'mine' is not loaded"):
        last(races.race(Settings(**{**SHORT, "drafters": ("mine",)}), [], "me"))


class Stranger(BaseHTTPRequestHandler):
    """Lists a model and heads, and breaks off in the middle of an answer."""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "m", "status": "ready"}]}) if self.path.startswith("/v1/") else "")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        chunk = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
        chunk["usage"] = {"completion_tokens": 1, "speculation": {"verify_passes": 1}}
        self._send(200, f"data: {json.dumps(chunk)}\n\n", num_missing=100)

    def _send(self, status: int, text: str, num_missing: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text) + num_missing))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def stranger() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Stranger)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_that_goes_away_is_one_sentence(stranger):
    assert "went away before its answer was whole" in failing(Server(stranger))


def test_another_kind_of_server_is_one_sentence(stranger):
    assert "is not a selfspec server" in failing(Server(f"{stranger}/elsewhere"))


def test_what_is_no_address_is_one_sentence():
    with pytest.raises(ValueError, match="server 'localhost:8000' is not an address"):
        Server("localhost:8000")


def test_an_answer_without_text_yet_has_no_figures():
    column = RemoteColumn("none", "")
    column.take({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None}, 0.1)
    assert column.figures() is None and column.text == ""
