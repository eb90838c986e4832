"""What the tabs share: options of their events, and the component that holds our own HTML."""

from typing import Any

import gradio as gr

# Component -> its new value or properties.
Updates = dict[Any, Any]

# Everything that computes shares one place in the queue, so that nothing disturbs a measurement.
COMPUTING: dict[str, Any] = {
    "concurrency_id": "target",
    "concurrency_limit": 1,
    "show_progress": "hidden",
    "api_visibility": "private",
}

# What only draws follows the newest request; those that it overtook are dropped.
DRAWING: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last", "api_visibility": "private"}

# Outside the queue, where it would wait for what it is to end.
AT_ONCE: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


def html(value: str = "", **options: Any) -> gr.HTML:
    """A place for what `render` makes; its class keeps our styles off Gradio's own elements."""
    return gr.HTML(value, elem_classes="selfspec", **options)
