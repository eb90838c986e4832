"""What a user can set for the loop from prompt to text. Invariant: a `SamplingParams` that exists has valid fields."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _is_shift(value: object) -> bool:
    return _is_finite(value) and abs(value) <= MAX_SHIFT  # type: ignore[arg-type]


def _is_token_id(value: object) -> bool:
    """True for a whole number from 0 or its digits, because JSON has digits for keys."""
    return (_is_whole(value) or (isinstance(value, str) and value.isdecimal())) and int(value) >= 0  # type: ignore[call-overload]


# Lower temperatures are greedy.
MIN_TEMPERATURE = 1e-10
# Limits of what is added to logits and of what they are multiplied with, because float32 must hold the outcome divided by
# the temperature.
MAX_SHIFT, MAX_FACTOR = 1e15, 1e10


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends.

    Penalties, bias and filters are applied in transformers' order: logit bias, repetition penalty, presence and frequency
    penalties, minimum length, temperature, top-k, top-p, min-p. Presence and frequency penalties count emitted tokens
    (OpenAI's definition); the repetition penalty counts the prompt too (transformers' definition).
    """

    max_new_tokens: int = field(default=256, metadata={"help": "most tokens to emit, at least 1"})
    min_new_tokens: int = field(default=0, metadata={"help": "no end of sequence before this many tokens"})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy"})
    top_k: int = field(default=0, metadata={"help": "keep the k most probable tokens; 0 keeps all"})
    top_p: float = field(default=1.0, metadata={"help": "keep the smallest set of tokens with this much probability"})
    min_p: float = field(default=0.0, metadata={"help": "drop tokens below this share of the top probability"})
    repetition_penalty: float = field(default=1.0, metadata={"help": "> 1 discourages tokens of prompt and output"})
    presence_penalty: float = field(default=0.0, metadata={"help": "subtracted once from every token emitted before"})
    frequency_penalty: float = field(default=0.0, metadata={"help": "subtracted per earlier emission of a token"})
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, hash=False, metadata={"help": "token id -> added to its logit"}
    )
    seed: int | None = field(default=None, metadata={"help": "same seed, same output; by default a fresh one"})
    stop: Sequence[str] = field(default=(), metadata={"help": "strings that end the output, not part of it"})
    stop_token_ids: Sequence[int] = field(default=(), metadata={"help": "token ids that end the output"})
    ignore_eos: bool = field(default=False, metadata={"help": "do not end at the model's end-of-sequence tokens"})
    skip_special_tokens: bool = field(default=True, metadata={"help": "leave special tokens out of the text"})
    logprobs: bool = field(default=False, metadata={"help": "log-probability of each emitted token under the target"})
    n: int = field(default=1, metadata={"help": "samples for each prompt"})

    def __post_init__(self) -> None:
        def check(name: str, is_ok: Callable[[Any], bool], allowed: str) -> None:
            value = getattr(self, name)
            if not is_ok(value):
                raise ValueError(f"{name}={value!r} is not allowed: use {allowed}")

        check("max_new_tokens", lambda x: _is_whole(x) and x >= 1, "a whole number of at least 1")
        check(
            "min_new_tokens",
            lambda x: _is_whole(x) and 0 <= x <= self.max_new_tokens,
            f"0 to max_new_tokens ({self.max_new_tokens})",
        )
        check("temperature", lambda x: _is_finite(x) and x >= 0, "0 or more")
        check("top_k", lambda x: _is_whole(x) and 0 <= x < 2**31, "0 (off) or a positive whole number below 2**31")
        check("top_p", lambda x: _is_finite(x) and 0 < x <= 1, "a number in (0, 1]")
        check("min_p", lambda x: _is_finite(x) and 0 <= x <= 1, "a number in [0, 1]")
        check(
            "repetition_penalty",
            lambda x: _is_finite(x) and 1 / MAX_FACTOR <= x <= MAX_FACTOR,
            f"{1 / MAX_FACTOR:g} to {MAX_FACTOR:g}, a positive number (1 is off)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            check(name, _is_shift, f"-{MAX_SHIFT:g} to {MAX_SHIFT:g}, a finite number (0 is off)")
        check(
            "logit_bias",
            lambda x: all(_is_token_id(k) and (_is_shift(v) or v == -math.inf) for k, v in x.items()),
            f"-{MAX_SHIFT:g} to {MAX_SHIFT:g}, or -inf to ban a token: token ids of at least 0 with a number below +inf",
        )
        check("seed", lambda x: x is None or (_is_whole(x) and -(2**63) <= x < 2**63), "a 64-bit whole number")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check("stop", lambda x: all(isinstance(s, str) and s for s in x), "strings that are not empty")
        check("stop_token_ids", lambda x: all(map(_is_token_id, x)), "token ids of at least 0")
        check("n", lambda x: _is_whole(x) and x >= 1, "a whole number of at least 1")
        if 0 < self.temperature < MIN_TEMPERATURE:
            # No draw would differ from the likeliest token.
            object.__setattr__(self, "temperature", 0.0)
        # Normal forms, because equal settings must compare and hash equal, and nothing outside may change them.
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(token_id) for token_id in self.stop_token_ids))
        object.__setattr__(self, "logit_bias", {int(k): float(v) for k, v in self.logit_bias.items()})

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def uses_history(self) -> bool:
        """True where a penalty makes a token's logit depend on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_pathless(self) -> bool:
        """True where a choice does not depend on its node's path: only temperature and filters are set."""
        return not (self.uses_history or self.logit_bias or self.min_new_tokens)

    @property
    def is_plain(self) -> bool:
        """True where every node's token can be chosen at once: argmax, or a draw from the unfiltered distribution."""
        filters = not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        return self.is_pathless and not filters

    def law(self) -> tuple[object, ...]:
        """The settings that decide the token distribution, hashable. Rows with equal laws are processed together."""
        return (
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            tuple(sorted(self.logit_bias.items())),
            self.min_new_tokens,
            self.stop_token_ids if self.min_new_tokens else (),
            self.ignore_eos if self.min_new_tokens else False,
        )

    def with_(self, **changes: object) -> SamplingParams:
        """A copy with some fields replaced; it is checked again."""
        return replace(self, **changes)  # type: ignore[arg-type]


# The name of the default target, which `selfspec fetch` makes.
DEFAULT_TARGET = "smollm2"

# Types of a target's weights and numbers, by torch's names; and of its linear layers' weights alone.
DTYPES = ("float32", "bfloat16", "float16")
WEIGHT_DTYPES = ("int8", "fp8", "int4")


def check_dtype(dtype: str) -> None:
    """Raise a ValueError unless a model may be loaded in this type."""
    if dtype not in ("auto", *DTYPES, *WEIGHT_DTYPES):
        raise ValueError(f"dtype={dtype!r} is not known: use auto, {', '.join([*DTYPES, *WEIGHT_DTYPES])}")


def check_device(device: str) -> None:
    """Raise a ValueError for what is no device's name. Whether the device is there, torch knows."""
    if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:\d+)?", device):
        raise ValueError(f"device={device!r} is not known: use auto, cpu, cuda or cuda:N")


# The formats of other engines that heads are written in.
EXPORT_FORMATS = ("vllm", "sglang", "speculators", "medusa")


def check_format(name: str) -> None:
    """Raise a ValueError unless heads can be written in this format."""
    if name not in EXPORT_FORMATS:
        raise ValueError(f"format {name!r} is not known: use {', '.join(EXPORT_FORMATS)}")


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Which target to load and how.

    Invariant: dtype and device are names of such, and `target` is None for the default target, however it was named.
    """

    target: str | None = field(
        default=None,
        metadata={"help": "directory or Hub id of the target; smollm2, the default, is the one that `selfspec fetch` makes"},
    )
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit, for a Hub id"})
    adapter: str | None = field(
        default=None, metadata={"help": "directory or Hub id of a LoRA adapter (PEFT) to merge into the target"}
    )
    dtype: str = field(default="auto", metadata={"help": "float32, bfloat16, float16, auto; int8, fp8, int4: weights alone"})
    device: str = field(default="auto", metadata={"help": "cpu, cuda, cuda:N, or auto"})
    chat_template_kwargs: str | None = field(
        default=None, metadata={"help": 'JSON object of arguments for the chat template, such as {"enable_thinking": false}'}
    )

    def __post_init__(self) -> None:
        if self.target == DEFAULT_TARGET:
            object.__setattr__(self, "target", None)
        check_dtype(self.dtype)
        check_device(self.device)


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """How to load the drafters a command names, and when to draft."""

    num_draft_tokens: int | None = field(
        default=None, metadata={"help": "most tokens to draft in a step; each drafter has its default"}
    )
    num_nodes: int | None = field(
        default=None, metadata={"help": "most nodes of a candidate tree, root included; each drafter has its default"}
    )
    width: int | None = field(
        default=None,
        metadata={"help": "nodes of a tree expanded at each depth; 1 drafts a chain; each drafter has its default"},
    )
    draft_dtype: str | None = field(
        default=None, metadata={"help": "dtype of a draft model, as --dtype; the target's by default"}
    )
    sampled_draft: bool = field(
        default=False,
        metadata={"help": "draft models sample their drafts: same distribution, but not the tokens of plain sampling"},
    )
    no_cost_guard: bool = field(
        default=False, metadata={"help": "always draft, even where drafting is measured to be slower"}
    )

    def __post_init__(self) -> None:
        if self.draft_dtype is not None:
            check_dtype(self.draft_dtype)
