"""Compare: a prompt, the drafters, and the race between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from selfspec.app import render
from selfspec.app.controls import Controls
from selfspec.app.events import AT_ONCE, DRAWING, RACING, Updates, html
from selfspec.app.frame import WHY
from selfspec.app.races import Messages, Outcome, Races, View
from selfspec.app.settings import ALONE, CHAT, Settings
from selfspec.failures import describe

SCRIPT = Path(__file__).with_name("columns.js").read_text(encoding="utf-8")
# What a tab of the browser remembers of a page, by its address: a link that is opened in the same tab is another page.
REMEMBER = "(name, value) => sessionStorage.setItem(`selfspec ${name} ${location.search}`, value)"
RECALL = "(name) => sessionStorage.getItem(`selfspec ${name} ${location.search}`) ?? ''"
SPEEDS = [("½×", 0.5), ("1×", 1.0), ("2×", 2.0)]
COLOURED, PROSE = "coloured", "text"


class CompareTab:
    """The tab's components and events.

    Args:
        finished, picked, tabs: see `Frame`.
        has_target: races run on a local target, not on a server.

    Attributes:
        drafters: the component that offers drafters.
    """

    def __init__(self, races: Races, finished: gr.State, picked: gr.State, tabs: gr.Tabs, *, has_target: bool) -> None:
        self._races = races
        self._finished = finished
        self._history = gr.State([])
        self._conversation = gr.Chatbot(label="Conversation", height=260, buttons=["copy"], visible=False)
        self._controls = Controls(races, has_target=has_target)
        self._controls.lay_out_question()
        self._message = html(elem_id="message")
        self._columns = html(elem_id="columns", js_on_load=SCRIPT)
        self._lay_out_results(has_target=has_target)
        self._controls.lay_out_settings()
        self.drafters = self._controls.drafters
        self._connect()
        # Through the queue, because a state that changes outside it tells nobody.
        self._columns.select(self._pick, picked, [picked, tabs], **DRAWING)

    def _lay_out_results(self, *, has_target: bool) -> None:
        # The key to the race that is kept for a page that is loaded anew.
        self._key = gr.Textbox(visible="hidden", elem_id="key")
        with gr.Row(visible=False, elem_id="results") as self._results:
            self._replay = gr.Button("Replay", size="sm", elem_id="replay", min_width=80)
            self._speed = gr.Radio(
                SPEEDS,
                value=1.0,
                label="Speed of the replay",
                show_label=False,
                container=False,
                elem_id="speed",
                min_width=150,
            )
            self._alone = gr.Button("Measure alone", size="sm", elem_id="alone", min_width=120, visible=has_target)
            look = gr.Radio(
                [COLOURED, PROSE],
                value=COLOURED,
                label="Answers",
                show_label=False,
                container=False,
                elem_id="look",
                min_width=170,
            )
            self._link = html(elem_id="permalink")
            self._download = gr.DownloadButton("Download (JSON)", size="sm", elem_id="download", min_width=130)
            self._forget = gr.Button("New conversation", size="sm", visible=False, elem_id="forget", min_width=140)
        look.change(None, look, None, js="(look) => {document.querySelector('#columns').dataset.look = look}", **AT_ONCE)

    def _connect(self) -> None:
        controls = self._controls
        self._buttons = [self._message, controls.start, controls.stop, self._replay, self._alone]
        outcome = [self._results, self._link, self._download, self._key]
        talk = [self._history, self._conversation, self._forget, controls.prompt]
        outputs = [*self._buttons, self._columns, self._finished, *outcome, *talk]
        begun = {"fn": self._begin, "inputs": None, "outputs": self._buttons, "trigger_mode": "once", **AT_ONCE}
        asked = gr.on([controls.prompt.submit, controls.start.click], **begun)
        raced = asked.then(self._race, [self._history, *controls.inputs], outputs, **RACING)
        alone = self._alone.click(**begun).then(self._measure_alone, [self._history, self._finished], outputs, **RACING)
        replayed = self._replay.click(**begun).then(
            self._play_again, [self._finished, self._speed], [*self._buttons, self._columns], **RACING
        )
        for run in raced, alone, replayed:
            run.failure(self._give_up, None, self._buttons, **AT_ONCE)
        controls.stop.click(self._end, **AT_ONCE)
        self._forget.click(self._start_anew, None, talk[:3], **AT_ONCE)
        controls.prompt.change(None, controls.prompt, None, js=f"(text) => ({REMEMBER})('prompt', text)", **AT_ONCE)
        self._key.change(None, self._key, None, js=f"(key) => ({REMEMBER})('race', key)", **AT_ONCE)

    def load(self, page: gr.Blocks) -> gr.events.Dependency:
        """What happens when the page is opened: the link's settings, or what this tab of the browser had before."""
        controls = self._controls
        shown = [self._message, *controls.inputs, self._columns, self._finished, self._results, self._link, self._download]
        recall = f"() => [({RECALL})('prompt'), ({RECALL})('race')]"
        return page.load(
            self._open, [controls.prompt, self._key], shown, js=recall, api_visibility="private", show_progress="hidden"
        )

    def _open(self, request: gr.Request, prompt: str, key: str) -> Updates:
        problem = ""
        try:
            self._races.refresh()
        except ValueError as error:
            problem = str(error)
        race = self._races.kept(key)
        query = dict(request.query_params)
        settings, wrong = self._controls.from_link({**query, "prompt": prompt} if prompt else query)
        if race is None:
            return {self._message: render.note(problem or wrong, "error"), **self._controls.show(settings)}
        return {
            self._message: render.note("The race before the page was loaded anew."),
            **self._controls.show(race.settings),
            **({self._controls.prompt: prompt} if prompt else {}),
            self._columns: race.html(),
            **self._shown(race),
        }

    def _begin(self, request: gr.Request) -> Updates:
        self._races.expect(str(request.session_hash))
        return {
            self._message: render.note("Starting …"),
            self._controls.start: gr.Button(interactive=False),
            self._controls.stop: gr.Button(interactive=True),
            self._replay: gr.Button(interactive=False),
            self._alone: gr.Button(interactive=False),
        }

    def _end(self, request: gr.Request) -> None:
        """Stop this visitor's race, whether it runs or waits."""
        self._races.stop(str(request.session_hash))

    def _race(self, request: gr.Request, history: Messages, *values: Any) -> Iterator[Updates]:
        yield from self._follow(request, lambda: self._controls.settings(*values), history)

    def _measure_alone(self, request: gr.Request, history: Messages, race: Outcome) -> Iterator[Updates]:
        settings = replace(race.settings, timing=ALONE)
        if settings.kind == CHAT and race.columns[0].finish_reason is not None:
            # The race is the conversation's last turn, and is not a question after itself.
            history = history[:-2]
        yield from self._follow(request, lambda: settings, history)

    def _follow(self, request: gr.Request, settings: Callable[[], Settings], history: Messages) -> Iterator[Updates]:
        def views() -> Iterator[View]:
            yield from self._races.race(settings(), history, str(request.session_hash))

        yield from self._told(views(), lambda race: self._outcome(race, history))

    def _play_again(self, request: gr.Request, race: Outcome, speed: float) -> Iterator[Updates]:
        yield from self._told(self._races.replay(race, str(request.session_hash), speed=speed))

    def _told(self, views: Iterator[View], outcome: Callable[[Outcome], Updates] | None = None) -> Iterator[Updates]:
        """Views as updates, and what stays when they have ended. A mistake of the visitor's becomes a sentence."""
        last = self._rest()
        try:
            for view in views:
                yield {self._message: render.note(view.message), self._columns: view.html or gr.skip()}
                if view.race is not None and outcome is not None:
                    last |= outcome(view.race)
        except Exception as error:
            if (sentence := describe(error)) is None:
                raise
            last[self._message] = render.note(sentence, "error")
        yield last

    def _rest(self) -> Updates:
        controls = self._controls
        ready = {button: gr.Button(interactive=True) for button in (controls.start, self._replay, self._alone)}
        return {**ready, controls.stop: gr.Button(interactive=False)}

    def _give_up(self) -> Updates:
        """The race did not run, because of a bug of ours, whose traceback is in the log."""
        return {self._message: render.note("selfspec failed (see its log): try again.", "error"), **self._rest()}

    def _shown(self, race: Outcome) -> Updates:
        return {
            self._finished: race,
            self._results: gr.Row(visible=True),
            self._link: render.permalink(race.settings.query()),
            self._download: str(self._races.save(race)),
        }

    def _outcome(self, race: Outcome, history: Messages) -> Updates:
        updates: Updates = {**self._shown(race), self._key: self._races.keep(race)}
        answer = race.columns[0]
        if race.settings.kind == CHAT and answer.finish_reason is not None:
            question = {"role": "user", "content": race.settings.prompt}
            # Gradio's annotation allows messages as objects only.
            talk: list[Any] = [*history, question, {"role": "assistant", "content": answer.text}]
            updates |= {
                self._history: talk,
                self._conversation: gr.Chatbot(talk, visible=True),
                self._forget: gr.Button(visible=True),
                self._controls.prompt: "",
            }
        return updates

    def _start_anew(self) -> Updates:
        return {
            self._history: [],
            self._conversation: gr.Chatbot([], visible=False),
            self._forget: gr.Button(visible=False),
        }

    def _pick(self, event: gr.EventData, picked: tuple[str, int, int] | None) -> tuple[tuple[str, int, int], gr.Tabs]:
        """Show a step under Why. The serial number makes the same step, chosen again, a change."""
        serial = picked[2] + 1 if picked else 0
        return (event.lane, event.step, serial), gr.Tabs(selected=WHY)
