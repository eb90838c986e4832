"""Plan: the predicted memory and speed-up of a target and a drafter on an accelerator, as `selfspec plan` computes them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import gradio as gr
import pandas as pd

from selfspec.app import render
from selfspec.app.events import DRAWING, Updates, html
from selfspec.app.frame import Frame
from selfspec.app.remote import Server
from selfspec.drafters.names import KINDS
from selfspec.failures import describe
from selfspec.plan.accelerators import CARDS
from selfspec.plan.formulas import MAX_PLANNED_DEPTH
from selfspec.plan.predict import assumed_rates, make_plan
from selfspec.plan.sizes import DraftSize, ModelSize, draft_size

DEPTH, SPEEDUP = "draft tokens", "speed-up"


def build(frame: Frame) -> None:
    """Open the tab, which predicts when it is first looked at."""
    source = "" if isinstance(frame.source, Server) else frame.source.name
    with gr.Tab("Plan") as tab:
        plan = PlanTab(
            source, {name: label for name, label in frame.races.drafters.items() if name in KINDS} or {"ngram": "n-gram"}
        )
    tab.select(plan.predict, plan.inputs, plan.outputs, **DRAWING)


class PlanTab:
    """The tab's components and events.

    Args:
        target: folder or id of the first target. Its configuration is read, its weights are not.
        drafters: labels by name.
    """

    def __init__(self, target: str, drafters: dict[str, str]) -> None:
        # Moving a slider must not read files again.
        self._sizes = lru_cache(maxsize=16)(_sizes)
        with gr.Row():
            source = gr.Textbox(
                target, label="Target", info="A folder or a Hub id; only its configuration is read", elem_id="plan-target"
            )
            drafter = gr.Dropdown(
                [(label, name) for name, label in drafters.items()],
                value="eagle" if "eagle" in drafters else next(iter(drafters)),
                allow_custom_value=True,
                label="Drafter",
                info="Or type eagle:PATH_OR_ID, draft_model:PATH_OR_ID, truncated:LAYERS",
                elem_id="plan-drafter",
            )
            card = gr.Dropdown(list(CARDS), value="h100", label="GPU", info="Bandwidth and peak as published")
        with gr.Row():
            rate = gr.Slider(0, 1, 0.7, step=0.01, label="α, chance that a draft token holds", elem_id="plan-rate")
            depth = gr.Slider(0, MAX_PLANNED_DEPTH, 4, step=1, label="γ, draft tokens a step", elem_id="plan-depth")
            batch_size = gr.Slider(1, 512, 1, step=1, label="Batch, sequences together", elem_id="plan-batch")
            context = gr.Slider(128, 1 << 17, 2048, step=128, label="Context, tokens of each", elem_id="plan-context")
        self._prediction = html(elem_id="prediction")
        self._plot = gr.LinePlot(
            x=DEPTH,
            y=SPEEDUP,
            title="Predicted speed-up by draft tokens",
            x_axis_format="d",
            height=240,
            visible=False,
            elem_id="plan-plot",
        )
        self.inputs: list[Any] = [source, drafter, card, rate, depth, batch_size, context]
        self.outputs = [self._prediction, self._plot]
        changes = [source.submit, source.blur, *(component.change for component in self.inputs[1:])]
        gr.on(changes, self.predict, self.inputs, self.outputs, **DRAWING)

    def predict(
        self, source: str, drafter: str | None, card: str, rate: float, depth: int, batch_size: int, context: int
    ) -> Updates:
        """The prediction for these settings, or a sentence that says what is wrong with them."""
        try:
            if not source.strip():
                raise ValueError("No target is given: type a folder or an id on the Hugging Face Hub.")
            target, draft = self._sizes(source.strip(), drafter or "ngram")
            acceptance = assumed_rates([rate], draft)
            plan = make_plan(target, draft, acceptance, CARDS[card], batch_size=batch_size, context=context)
        except Exception as error:
            if (sentence := describe(error)) is None:
                raise
            return {self._prediction: render.note(sentence, "error"), self._plot: gr.LinePlot(visible=False)}
        # A head has a largest depth.
        chosen = plan.choices[min(depth, len(plan.choices) - 1)]
        curve = pd.DataFrame(
            {DEPTH: [choice.depth for choice in plan.choices], SPEEDUP: [choice.speedup for choice in plan.choices]}
        )
        return {self._prediction: render.plan(plan, chosen), self._plot: gr.LinePlot(curve, visible=True)}


def _sizes(source: str, drafter: str) -> tuple[ModelSize, DraftSize]:
    target = ModelSize.of(source)
    return target, draft_size(drafter, target)
