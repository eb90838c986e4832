"""The settings of a race, checked, and their form as a link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any
from urllib.parse import urlencode

from selfspec.config import SamplingParams
from selfspec.drafters.names import KINDS

MESSAGE, CHAT, TEXT = "message", "chat", "text"
# How columns are timed: with level clocks on a target, or one after the other on a server, which cannot be held back; each
# alone; all at once on a server, whose timings cannot be compared.
LEVEL, ALONE, LIVE = "level", "alone", "live"
# Races as a drafter does, and is none: transformers' own `generate`.
TRANSFORMERS = "transformers"

# The most that the page's controls can show.
MOST = {"max_new_tokens": 512, "temperature": 2, "top_k": 200}
# Besides plain decoding, which always runs. More than four columns would be too narrow to read.
MAX_DRAFTERS = 3

# What the default target, small as it is, can do, and what its heads foresee.
EXAMPLES = {
    "Code": "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "Maths": "A farmer has 17 sheep. He buys 5 more, then sells 8. How many sheep does he have now? Think step by step.",
    "Summary": (
        "Summarize: The library of Alexandria was one of the largest and most significant libraries of the ancient world. "
        "It was part of a research institution called the Mouseion, which was dedicated to the Muses, the nine goddesses "
        "of the arts. The library quickly acquired many papyrus scrolls, due largely to the Ptolemaic kings' well-funded "
        "policies for procuring texts. Alexandria came to be regarded as the capital of knowledge and learning, in part "
        "because of the library. It declined gradually over several centuries, starting with the purging of intellectuals "
        "from Alexandria in 145 BC."
    ),
    "Rainbows": "Explain how rainbows form.",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one race. `kind` says what the prompt is: one message, the next message of a chat, or text to continue."""

    prompt: str = ""
    kind: str = MESSAGE
    system: str = ""
    drafters: tuple[str, ...] = ("ngram",)
    timing: str = LEVEL
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    # Here a drafter is to be seen at work; a server has the guard on.
    use_cost_guard: bool = False

    def __post_init__(self) -> None:
        drafters = tuple(dict.fromkeys(name.strip() for name in self.drafters if name.strip() not in ("", "none")))
        object.__setattr__(self, "drafters", drafters)
        if not 1 <= len(drafters) <= MAX_DRAFTERS:
            raise ValueError(f"{len(drafters)} drafters are chosen: choose one to {MAX_DRAFTERS} to race plain decoding")
        for name, value, allowed in (
            ("kind", self.kind, (MESSAGE, CHAT, TEXT)),
            ("timing", self.timing, (LEVEL, ALONE, LIVE)),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not known: use {', '.join(allowed)}")
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name}={getattr(self, name)} is too many for the page: use at most {most}")
        _ = self.sampling

    @property
    def sampling(self) -> SamplingParams:
        """Always with a seed, because samples without one differ by design and could not be compared."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
        )

    def query(self) -> str:
        """The settings that differ from the defaults, as the query of an address."""
        changed: dict[str, Any] = {}
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value != setting.default:
                changed[setting.name] = ",".join(value) if isinstance(value, tuple) else value
        return urlencode(changed)

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> Settings:
        """The settings of a link. Other keys are ignored; a bad value raises a ValueError."""
        values: dict[str, Any] = {}
        for setting in fields(cls):
            if (text := query.get(setting.name)) is None:
                continue
            try:
                values[setting.name] = _READERS[type(setting.default)](text)
            except (ValueError, KeyError):
                raise ValueError(f"the link's {setting.name}={text!r} cannot be read: correct it or leave it out") from None
        return cls(**values)

    @classmethod
    def from_link(cls, query: Mapping[str, str]) -> tuple[Settings, str]:
        """The settings of a link without what is wrong with it, and what that is in one sentence, or nothing."""
        try:
            return cls.from_query(query), ""
        except ValueError as error:
            problem = str(error)
        good: dict[str, str] = {}
        for name, text in query.items():
            try:
                cls.from_query({**good, name: text})
            except ValueError:
                continue
            good[name] = text
        return cls.from_query(good), problem

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_READERS: dict[type, Any] = {
    str: str,
    int: int,
    float: float,
    bool: lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()],
    tuple: lambda text: tuple(text.split(",")),
}


def label_of(drafter: str) -> str:
    """A drafter's name as the heading of a column: `eagle:runs/mine/head` becomes `EAGLE · head`."""
    name, _, argument = drafter.partition(":")
    label = KINDS[name].label if name in KINDS else name
    return f"{label} · {argument.rstrip('/').rpartition('/')[2]}" if argument else label


def contestants_of(settings: Settings) -> tuple[str, ...]:
    """The columns by name: plain decoding first, then transformers if it takes part, which is greedy only."""
    drafters = [name for name in settings.drafters if name != TRANSFORMERS]
    has_transformers = TRANSFORMERS in settings.drafters and settings.sampling.is_greedy
    return ("none", *([TRANSFORMERS] if has_transformers else []), *drafters)
