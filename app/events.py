"""What the tabs share: the options of their events, and the component for our own HTML."""

from typing import Any

import gradio as gr

# Component -> its new value or properties.
Updates = dict[Any, Any]

# Events that compute run one at a time. On the target they also take their turn in `Races.line`, after the races.
COMPUTING: dict[str, Any] = {
    "concurrency_id": "target",
    "concurrency_limit": 1,
    "show_progress": "hidden",
    "api_visibility": "private",
}

# A race runs as soon as it is asked for, and waits in `Races.line`: in Gradio's own queue it could not be stopped.
RACING: dict[str, Any] = {"concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private"}

# Events that only draw follow the newest request; older ones that still wait are dropped.
DRAWING: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last", "api_visibility": "private"}

# Outside the queue, because there a stop would wait for the race that it ends.
AT_ONCE: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


def html(value: str = "", **options: Any) -> gr.HTML:
    """A component for HTML made by `render`. Its class keeps our styles away from Gradio's own elements."""
    return gr.HTML(value, elem_classes="selfspec", **options)
