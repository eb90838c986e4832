"""What the page gives to its tabs: each is a module with `build(frame)`, which opens its own `gr.Tab`."""

from __future__ import annotations

from dataclasses import dataclass

import gradio as gr

from selfspec.app.races import Races
from selfspec.app.remote import Server
from selfspec.model.target import Target

WHY = "why"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The page's shared parts.

    Attributes:
        source: the target, or the server, that the page is for.
        tabs: the row of tabs; an event selects one by its id.
        finished: the last race that ended, complete or stopped. Compare sets it.
        picked: the step that a visitor chose: (drafter, step from 0, serial number). Compare sets it, and opens Why.
        drafters: the component that offers drafters. A tab that finds a new one updates its choices.
    """

    source: Target | Server
    races: Races
    tabs: gr.Tabs
    finished: gr.State
    picked: gr.State
    drafters: gr.CheckboxGroup
