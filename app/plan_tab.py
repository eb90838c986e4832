"""Plan: the predicted memory and speed-up of a target and a drafter on an accelerator, as `selfspec plan` computes them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import gradio as gr

from selfspec.app import plan_render, render
from selfspec.app.events import DRAWING, Updates, html
from selfspec.app.frame import Frame
from selfspec.app.remote import Server
from selfspec.drafters.names import KINDS
from selfspec.failures import describe
from selfspec.plan.accelerators import CARDS
from selfspec.plan.formulas import MAX_PLANNED_DEPTH
from selfspec.plan.predict import Assumption, assumed_rates, card_acceptance, make_plan, predict_speed
from selfspec.plan.sizes import DraftSize, ModelSize, draft_size

MEASURED, ASSUMED = "measured", "assumed"
NO_CARD = ""


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
        # Where the loaded target lies on this machine is nobody's affair: the page shows its name.
        self._folders = {Path(target).name: target} if target else {}
        # Moving a slider must not read files again.
        self._sizes = lru_cache(maxsize=16)(self._read_sizes)
        with gr.Row():
            source = gr.Textbox(
                Path(target).name if target else "",
                label="Target",
                info="A folder or a Hub id; only its configuration is read",
                elem_id="plan-target",
            )
            drafter = gr.Dropdown(
                [(label, name) for name, label in drafters.items()],
                value="eagle" if "eagle" in drafters else next(iter(drafters)),
                allow_custom_value=True,
                label="Drafter",
                info="Or type eagle:PATH_OR_ID, draft_model:PATH_OR_ID, truncated:LAYERS",
                elem_id="plan-drafter",
            )
            card = gr.Dropdown(
                list(CARDS), value="h100", label="GPU", info="Bandwidth and peak as published", elem_id="plan-card"
            )
            other = gr.Dropdown(
                [("none", NO_CARD), *((name, name) for name in CARDS)],
                value=NO_CARD,
                label="Beside it",
                info="A second GPU to compare with",
                elem_id="plan-other",
            )
        with gr.Row():
            acceptance = gr.Radio(
                [("the head’s card", MEASURED), ("α", ASSUMED)],
                value=MEASURED,
                label="Drafts held",
                info="What says how many",
                elem_id="plan-acceptance",
                min_width=220,
            )
            rate = gr.Slider(
                0, 1, 0.7, step=0.01, label="α", info="Chance that a draft token holds", elem_id="plan-rate", min_width=220
            )
            depth = gr.Slider(
                0, MAX_PLANNED_DEPTH, 4, step=1, label="γ", info="Draft tokens a step", elem_id="plan-depth", min_width=220
            )
            batch_size = gr.Slider(
                1, 512, 1, step=1, label="Batch", info="Sequences together", elem_id="plan-batch", min_width=220
            )
            context = gr.Slider(
                128, 1 << 17, 2048, step=128, label="Context", info="Tokens of each", elem_id="plan-context", min_width=220
            )
        self._prediction = html(elem_id="prediction")
        self._plot = html(elem_id="plan-plot")
        self.inputs: list[Any] = [source, drafter, card, other, acceptance, rate, depth, batch_size, context]
        self.outputs = [self._prediction, self._plot]
        changes = [source.submit, source.blur, *(component.change for component in self.inputs[1:])]
        # Whoever moves α wants it to count.
        rate.input(lambda: ASSUMED, None, acceptance, **DRAWING)
        gr.on(changes, self.predict, self.inputs, self.outputs, **DRAWING)

    def predict(
        self,
        source: str,
        drafter: str | None,
        card: str,
        other: str,
        acceptance: str,
        rate: float,
        depth: int,
        batch_size: int,
        context: int,
    ) -> Updates:
        """The prediction for these settings, or a sentence that says what is wrong with them."""
        load = {"batch_size": batch_size, "context": context}
        try:
            if not source.strip():
                raise ValueError("No target is given: type a folder or an id on the Hugging Face Hub.")
            target, draft = self._sizes(source.strip(), drafter or "ngram")
            assumption = _acceptance(draft, acceptance, rate)
            cards = [CARDS[name] for name in dict.fromkeys((card, other)) if name != NO_CARD]
            plan, *others = (make_plan(target, draft, assumption, each, **load) for each in cards)
        except Exception as error:
            if (sentence := describe(error)) is None:
                raise
            return {self._prediction: render.note(sentence, "error"), self._plot: ""}
        # A head has a largest depth, and a large batch has room for small trees only.
        chosen = min(plan.choices, key=lambda choice: (abs(choice.depth - depth), choice.depth))
        batches = [
            [predict_speed(target, draft, assumption, each, batch_size=B, context=context) for B in plan_render.BATCHES]
            for each in cards
        ]
        return {
            self._prediction: plan_render.plan(plan, chosen),
            self._plot: plan_render.pictures(plan, chosen, others, batches),
        }

    def _read_sizes(self, source: str, drafter: str) -> tuple[ModelSize, DraftSize]:
        target = replace(ModelSize.of(self._folders.get(source, source)), name=source)
        return target, draft_size(drafter, target)


def _acceptance(draft: DraftSize, acceptance: str, rate: float) -> Assumption:
    """What the head's card says, or else one rate."""
    if acceptance == MEASURED:
        try:
            return card_acceptance(draft)
        except ValueError:
            found = assumed_rates([rate], draft)
            return replace(found, source=f"nothing measured is known of {draft.name}; {found.source}")
    return assumed_rates([rate], draft)
