"""Compare's question and settings: a component for each setting, and the way from their values to `Settings` and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from selfspec.app.races import Races
from selfspec.app.settings import ALONE, CHAT, EXAMPLES, LEVEL, LIVE, MESSAGE, MOST, TEXT, Settings

TYPED = "Separated by commas: eagle:PATH_OR_ID, draft_model:PATH_OR_ID, truncated:LAYERS, ngram:K"
# How the columns are timed: on a local target, and on a server.
TIMINGS = [("level clocks", LEVEL), ("each alone", ALONE)]
REMOTE_TIMINGS = [("one after the other", LEVEL), ("all at once, not comparable", LIVE)]


class Controls:
    """The components.

    Attributes:
        prompt, drafters, start, stop: the components that events of the tab need.
        inputs: the components of all settings, in the order that `settings` takes their values.
    """

    def __init__(self, races: Races, *, has_target: bool) -> None:
        self._races = races
        self._by_name: dict[str, Any] = {}
        self._defaults = Settings(drafters=races.default_drafters)
        self._has_target = has_target

    def lay_out_question(self) -> None:
        """The question and the button on one line, and the drafters and examples below it."""
        with gr.Row(elem_id="question", equal_height=True):
            self.prompt = self._by_name["prompt"] = gr.Textbox(
                label="Prompt",
                show_label=False,
                placeholder="Ask something: Enter starts the race, Shift+Enter begins a new line",
                max_lines=6,
                autofocus=True,
                container=False,
                elem_id="prompt",
                scale=8,
                min_width=240,
            )
            self.start = gr.Button("Race", variant="primary", elem_id="start", scale=1, min_width=90)
            self.stop = gr.Button("Stop", interactive=False, elem_id="stop", scale=1, min_width=70)
        with gr.Row(elem_id="choices"):
            self.drafters = self._by_name["drafters"] = gr.CheckboxGroup(
                self._offered(),
                value=list(self._defaults.drafters),
                label="Against plain decoding",
                show_label=False,
                container=False,
                elem_id="drafters",
                min_width=200,
            )
            gr.Examples(
                [[text] for text in EXAMPLES.values()],
                self.prompt,
                example_labels=list(EXAMPLES),
                label="Try",
                elem_id="examples",
                api_visibility="private",
            )

    def lay_out_settings(self) -> None:
        """What few people change, folded away."""
        defaults, most = self._defaults, MOST
        with gr.Accordion("Settings", open=False, elem_id="settings"):
            with gr.Row():
                kinds = [("one message", MESSAGE), ("chat", CHAT), ("raw text", TEXT)]
                self._by_name["kind"] = gr.Radio(kinds, value=defaults.kind, label="The prompt is")
                timings = TIMINGS if self._has_target else REMOTE_TIMINGS
                self._by_name["timing"] = gr.Radio(timings, value=defaults.timing, label="Timing", elem_id="timing")
                self._by_name["max_new_tokens"] = gr.Slider(
                    1, most["max_new_tokens"], defaults.max_new_tokens, step=1, label="Tokens at most"
                )
            with gr.Row():
                self._by_name["temperature"] = gr.Slider(
                    0, most["temperature"], defaults.temperature, step=0.05, label="Temperature", info="0 is greedy"
                )
                self._by_name["top_p"] = gr.Slider(0.01, 1, defaults.top_p, step=0.01, label="Top-p", info="1 keeps all")
                self._by_name["top_k"] = gr.Slider(
                    0, most["top_k"], defaults.top_k, step=1, label="Top-k", info="0 keeps all"
                )
                self._by_name["seed"] = gr.Number(defaults.seed, precision=0, label="Seed", info="Of samples")
            with gr.Row():
                self._by_name["system"] = gr.Textbox(label="System message", max_lines=4)
                self._typed = gr.Textbox(label="Other drafters", info=TYPED, elem_id="typed", visible=self._has_target)
                self._by_name["use_cost_guard"] = gr.Checkbox(
                    defaults.use_cost_guard,
                    label="Cost guard: draft only as much as measurably pays",
                    info="Off, so that a drafter is seen at work. Servers and commands have it on",
                    visible=self._has_target,
                )

    @property
    def inputs(self) -> list[Any]:
        return [self._typed, *self._by_name.values()]

    def settings(self, typed: str, *values: Any) -> Settings:
        """The settings that the components hold."""
        given = dict(zip(self._by_name, values, strict=True))
        drafters = (*(given["drafters"] or ()), *(typed or "").split(","))
        # An emptied field arrives as None.
        return Settings(**{**given, "drafters": drafters, "seed": given["seed"] or 0})

    def show(self, settings: Settings) -> dict[Any, Any]:
        """Updates that make the components hold these settings."""
        values: dict[str, Any] = settings.to_dict()
        offered = [name for name in settings.drafters if name in self._races.drafters]
        values["drafters"] = gr.CheckboxGroup(self._offered(), value=offered)
        typed = ", ".join(name for name in settings.drafters if name not in offered)
        return {self._typed: typed, **{control: values[name] for name, control in self._by_name.items()}}

    def from_link(self, query: Mapping[str, str]) -> tuple[Settings, str]:
        """The settings of a link, over the page's defaults, and what is wrong with it."""
        self._defaults = Settings(drafters=self._races.default_drafters)
        first_example = next(iter(EXAMPLES.values()))
        return Settings.from_link({"prompt": first_example, "drafters": ",".join(self._defaults.drafters), **query})

    def _offered(self) -> list[tuple[str, str]]:
        return [(label, name) for name, label in self._races.drafters.items()]
