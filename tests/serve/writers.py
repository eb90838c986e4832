"""Families of models that write calls and reasoning each in its way: their chat templates and what marks the parts."""

from __future__ import annotations

from typing import Any

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
DAYS = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"], "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "time", "parameters": DAYS}},
]
BODY = """{% if tools %}<|im_start|>system
{{ tools | tojson }}MARKS<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}"""
HARMONY = """{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"""
# For each family its template, its ordinary and its special tokens.
FAMILIES: dict[str, tuple[str, list[str], list[str]]] = {
    "hermes": (BODY.replace("MARKS", "<tool_call>"), ["<tool_call>", "</tool_call>", "<think>", "</think>"], []),
    "hermes without tokens": (BODY.replace("MARKS", "<tool_call>"), [], []),
    "mistral": (BODY.replace("MARKS", "[TOOL_CALLS]"), [], ["[TOOL_CALLS]"]),
    "mistral by names": (BODY.replace("MARKS", "[TOOL_CALLS][ARGS]"), [], ["[TOOL_CALLS]", "[ARGS]"]),
    "llama3": (BODY.replace("MARKS", "<|python_tag|>"), [], ["<|python_tag|>"]),
    "harmony": (HARMONY, [], ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"]),
}
