"""Compare: a prompt, the drafters, and the race between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from selfspec.app import render
from selfspec.app.events import AT_ONCE, COMPUTING, Updates, html
from selfspec.app.races import Messages, Outcome, Races
from selfspec.app.settings import ALONE, CHAT, EXAMPLES, LIVE, MAX_DRAFTERS, MAX_NEW_TOKENS, MESSAGE, TEXT, Settings
from selfspec.failures import describe

TYPED = "Choose up to three, or type: eagle:PATH_OR_ID, draft_model:PATH_OR_ID, truncated:LAYERS, ngram:K"
# How the columns are timed: on a local target, and on a server.
TIMINGS = [("measure, then race", ALONE), ("live, not comparable", LIVE)]
REMOTE_TIMINGS = [("one after the other", ALONE), ("all at once, not comparable", LIVE)]


class CompareTab:
    """The tab's components and events.

    Args:
        has_target: races run on a local target, not on a server.

    Attributes:
        drafters: the dropdown of drafters, to which another tab may add.
        linked: the components that a link sets.
    """

    def __init__(self, races: Races, finished: gr.State, *, has_target: bool) -> None:
        self._races = races
        self._has_target = has_target
        self._finished = finished
        self._defaults = Settings(drafters=self._chosen_drafters())
        self._history = gr.State([])
        self._conversation = gr.Chatbot(label="Conversation", height=260, buttons=["copy"], visible=False)
        # A component for each setting, by the setting's name.
        self._controls: dict[str, Any] = {}
        self._lay_out_question()
        self._lay_out_settings()
        self._lay_out_answer()
        self.drafters = self._controls["drafters"]
        self.linked = [self._message, *self._controls.values()]
        self._connect()

    def _chosen_drafters(self) -> tuple[str, ...]:
        """The drafters that race by default: prompt lookup and EAGLE, or else the first ones there are."""
        known = [name for name in self._races.drafters if name in ("ngram", "eagle")]
        return tuple(known or list(self._races.drafters)[:MAX_DRAFTERS] or ("ngram",))

    def _lay_out_question(self) -> None:
        self._controls["prompt"] = gr.Textbox(
            label="Prompt",
            placeholder="Ask something. Enter starts the race, Shift+Enter begins a new line.",
            max_lines=12,
            autofocus=True,
            elem_id="prompt",
        )
        gr.Examples(
            [[text] for text in EXAMPLES.values()],
            self._controls["prompt"],
            example_labels=list(EXAMPLES),
            api_visibility="private",
        )
        self._controls["drafters"] = gr.Dropdown(
            [(label, name) for name, label in self._races.drafters.items()],
            value=list(self._defaults.drafters),
            multiselect=True,
            max_choices=MAX_DRAFTERS,
            allow_custom_value=True,
            label="Drafters against plain decoding",
            info=TYPED if self._has_target else "Choose up to three of the server's",
            elem_id="drafters",
        )
        with gr.Row():
            self._start = gr.Button("Race", variant="primary", elem_id="start", scale=3, min_width=120)
            self._stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="stop", scale=1, min_width=90)

    def _lay_out_settings(self) -> None:
        defaults = self._defaults
        with gr.Accordion("Settings", open=False):
            with gr.Row():
                kinds = [("one message", MESSAGE), ("chat", CHAT), ("raw text", TEXT)]
                self._controls["kind"] = gr.Radio(kinds, value=defaults.kind, label="The prompt is")
                timings = TIMINGS if self._has_target else REMOTE_TIMINGS
                self._controls["timing"] = gr.Radio(timings, value=defaults.timing, label="Timing")
            with gr.Row():
                self._controls["max_new_tokens"] = gr.Slider(
                    1, MAX_NEW_TOKENS, defaults.max_new_tokens, step=1, label="Most tokens"
                )
                self._controls["temperature"] = gr.Slider(
                    0, 2, defaults.temperature, step=0.05, label="Temperature, 0 is greedy"
                )
                self._controls["top_p"] = gr.Slider(0.01, 1, defaults.top_p, step=0.01, label="Top-p, 1 keeps all")
                self._controls["top_k"] = gr.Slider(0, 200, defaults.top_k, step=1, label="Top-k, 0 keeps all")
                self._controls["seed"] = gr.Number(defaults.seed, precision=0, label="Seed")
            self._controls["use_cost_guard"] = gr.Checkbox(
                defaults.use_cost_guard, label="Draft only as much as measurably pays", visible=self._has_target
            )
            self._controls["system"] = gr.Textbox(label="System message", max_lines=4)

    def _lay_out_answer(self) -> None:
        self._message = html(elem_id="message")
        self._columns = html(elem_id="columns")
        with gr.Row(visible=False) as self._results:
            self._link = html(elem_id="permalink")
            self._download = gr.DownloadButton("Download this run (JSON)", size="sm", elem_id="download")
            self._forget = gr.Button("New conversation", size="sm", visible=False, elem_id="forget")

    def _connect(self) -> None:
        buttons = [self._message, self._start, self._stop]
        asked = gr.on(
            [self._controls["prompt"].submit, self._start.click],
            self._wait,
            None,
            buttons,
            trigger_mode="once",
            **AT_ONCE,
        )
        raced = asked.then(
            self._race,
            [self._history, *self._controls.values()],
            [
                *(*buttons, self._columns, self._finished),
                *(self._results, self._link, self._download),
                *(self._history, self._conversation, self._forget, self._controls["prompt"]),
            ],
            **COMPUTING,
        )
        raced.failure(self._give_up, None, buttons, **AT_ONCE)
        self._stop.click(self._end, **AT_ONCE)
        self._forget.click(self._start_anew, None, [self._history, self._conversation, self._forget], **AT_ONCE)

    def _wait(self, request: gr.Request) -> Updates:
        self._races.expect(str(request.session_hash))
        return {
            self._message: render.note("Waiting for the target, which runs one race at a time …"),
            self._start: gr.Button(interactive=False),
            self._stop: gr.Button(interactive=True),
        }

    def _end(self, request: gr.Request) -> None:
        """Stop this visitor's race, whether it runs or waits."""
        self._races.stop(str(request.session_hash))

    def follow_link(self, request: gr.Request) -> Updates:
        """Take the settings from the page's address."""
        problem = ""
        try:
            self._races.refresh()
        except ValueError as error:
            problem = str(error)
        drafters = self._chosen_drafters()
        try:
            settings = Settings.from_query({"drafters": ",".join(drafters), **dict(request.query_params)})
        except ValueError as error:
            problem = str(error)
            settings = Settings(drafters=drafters)
        choices = [(label, name) for name, label in self._races.drafters.items()]
        values = {**settings.to_dict(), "drafters": gr.Dropdown(choices, value=list(settings.drafters))}
        return {
            self._message: render.note(problem, "error"),
            **{control: values[name] for name, control in self._controls.items()},
        }

    def _race(self, request: gr.Request, history: Messages, *values: Any) -> Iterator[Updates]:
        last = self._rest()
        try:
            settings = self._settings(values)
            for view in self._races.race(settings, history, str(request.session_hash)):
                yield {self._message: render.note(view.message), self._columns: view.html or gr.skip()}
                if view.race is not None:
                    last |= self._outcome(view.race, history)
        except Exception as error:
            if (sentence := describe(error)) is None:
                raise
            last[self._message] = render.note(sentence, "error")
        yield last

    def _rest(self) -> Updates:
        return {self._start: gr.Button(interactive=True), self._stop: gr.Button(interactive=False)}

    def _give_up(self) -> Updates:
        """The race did not run: the queue was full, or a bug of ours ended it, and its traceback is in the log."""
        sentence = "The race did not run: too many wait for this target, or selfspec failed (see its log). Try again."
        return {self._message: render.note(sentence, "error"), **self._rest()}

    def _settings(self, values: tuple[Any, ...]) -> Settings:
        given = dict(zip(self._controls, values, strict=True))
        # An emptied field arrives as None.
        return Settings(**{**given, "drafters": tuple(given["drafters"] or ()), "seed": given["seed"] or 0})

    def _outcome(self, race: Outcome, history: Messages) -> Updates:
        updates: Updates = {
            self._finished: race,
            self._results: gr.Row(visible=True),
            self._link: render.permalink(race.settings.query()),
            self._download: str(self._races.save(race)),
        }
        answer = race.columns[0]
        if race.settings.kind == CHAT and answer.finish_reason is not None:
            question = {"role": "user", "content": race.settings.prompt}
            # Gradio's annotation allows messages as objects only.
            talk: list[Any] = [*history, question, {"role": "assistant", "content": answer.text}]
            updates |= {
                self._history: talk,
                self._conversation: gr.Chatbot(talk, visible=True),
                self._forget: gr.Button(visible=True),
                self._controls["prompt"]: "",
            }
        return updates

    def _start_anew(self) -> Updates:
        return {
            self._history: [],
            self._conversation: gr.Chatbot([], visible=False),
            self._forget: gr.Button(visible=False),
        }
