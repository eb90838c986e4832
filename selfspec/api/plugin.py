"""Decoding for transformers' own `generate`, which prepares prompts and settings and then calls `custom_generate`.

Invariant: greedy answers are those of `generate` without it, padded in the same way, and the model stays as it is.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from selfspec.api.arguments import DrafterLike, planner_of, resolve_drafter
from selfspec.api.generation_settings import check_mode, check_model_inputs, refuse, sampling_of
from selfspec.loop.decode import decode
from selfspec.loop.sequence import Request, check_sampling
from selfspec.model.attention import ATTENTION_NAME
from selfspec.model.target import Target

KEPT = "_selfspec_target"


def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: GenerationConfig,
    *,
    drafter: DrafterLike = "auto",
    use_cost_guard: bool = True,
    target: Target | None = None,
    stop_strings: str | Sequence[str] = (),
    streamer: BaseStreamer | None = None,
    **model_inputs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Pass it to `generate` as `model.generate(**inputs, custom_generate=selfspec.custom_generate, drafter="eagle")`.

    `generate` fills in the first five arguments from its own; the others are further arguments of `generate`.

    Args:
        input_ids: [B, T] prompts, padded on the left.
        drafter: what proposes tokens, or its name; by default the shipped head that fits the model, or else `ngram`.
        use_cost_guard: draft only as much as measurements say pays; False always drafts all it can.
        target: the model's target, where it was made before; otherwise it is made at the first call and kept.
        stop_strings: strings that end an answer. They need the model's tokenizer, which is found by the model's path; for a
            model without one, pass `target=Target(model, tokenizer)`.

    Returns:
        [B, L] prompts and answers, padded on the right; or an output with these as `sequences`, where
        `return_dict_in_generate` is set.

    Raises:
        ValueError: something was asked for that is not served; the sentence names it.
    """
    kept_back = _kept_back(sys._getframe(1))
    streamer = streamer or kept_back.get("streamer")
    if kept_back.get("assistant_model") is not None:
        refuse("an assistant_model")
    B, T = input_ids.shape
    check_mode(generation_config)
    check_model_inputs(model_inputs)
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    sampling = sampling_of(generation_config, logits_processor, stopping_criteria, strings, T)
    target = target or target_of(model)
    check_sampling(target, sampling)
    prompts = _without_padding(input_ids, model_inputs.get("attention_mask"), model_inputs.get("position_ids"))
    requests = [Request(prompt, sampling, index=b, sample_index=b) for b, prompt in enumerate(prompts)]
    pad = getattr(generation_config, "_pad_token_tensor", None)
    columns = _Columns(B, None if pad is None else int(pad), streamer)
    planner = planner_of(use_cost_guard)
    for step in decode(target, requests, drafter=resolve_drafter(drafter, target), max_batch=B, planner=planner):
        for sequence, tokens in zip(step.sequences, step.emitted, strict=True):
            columns.add(sequence.request.index, tokens, is_last=sequence.finish_reason is not None)
        columns.tell()
    if streamer is not None:
        streamer.end()
    answers = torch.tensor(columns.padded(), dtype=input_ids.dtype, device=input_ids.device)
    sequences = torch.cat([input_ids, answers], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


class _Columns:
    """The answers of all rows, which grow by different steps, and what a streamer was told of them column by column."""

    def __init__(self, num_rows: int, pad: int | None, streamer: BaseStreamer | None) -> None:
        self._rows: list[list[int]] = [[] for _ in range(num_rows)]
        self._is_over = [False] * num_rows
        self._pad = pad
        self._streamer = streamer
        self._num_told = 0

    def add(self, row: int, tokens: list[int], *, is_last: bool) -> None:
        self._rows[row] += tokens
        self._is_over[row] = is_last

    def tell(self) -> None:
        """Give the streamer each column [B] that every row has come to, as `generate` does."""
        if self._streamer is None:
            return
        ends = [len(row) for row, is_over in zip(self._rows, self._is_over, strict=True) if not is_over]
        for column in range(self._num_told, min(ends, default=self._longest)):
            self._streamer.put(torch.tensor([self._token(row, column) for row in self._rows]))
            self._num_told += 1

    def padded(self) -> list[list[int]]:
        """The rows, each as long as the longest."""
        return [[self._token(row, column) for column in range(self._longest)] for row in self._rows]

    @property
    def _longest(self) -> int:
        return max(map(len, self._rows))

    def _token(self, row: list[int], column: int) -> int:
        if column < len(row):
            return row[column]
        if self._pad is None:
            raise ValueError("the answers differ in length, and there is no padding token: pass pad_token_id to generate")
        return self._pad


def _without_padding(input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> list[list[int]]:
    """The prompts' own tokens.

    Raises:
        ValueError: there is padding after or between them, or they have positions of their own.
    """
    T = input_ids.shape[1]
    # `generate` leaves out a mask without zeros.
    sizes = [T] * len(input_ids) if mask is None else mask.bool().sum(1).tolist()
    for b, size in enumerate(sizes):
        if mask is not None and not mask[b, T - size :].all():
            raise ValueError(
                f"prompt {b} has padding after or between its tokens: set the tokenizer's padding_side to 'left'"
            )
        if positions is not None:
            own = positions[b % len(positions), T - size :]
            if not torch.equal(own.cpu(), torch.arange(size)):
                refuse("a prompt with position_ids of its own")
    return [row[T - size :].tolist() for row, size in zip(input_ids, sizes, strict=True)]


def _kept_back(frame: FrameType) -> dict[str, Any]:
    """The arguments of our caller, if it is `generate`, which hands some to its own decoding methods alone.

    Among them is the streamer. It would hear the prompt and then nothing, and whoever reads it would wait for ever.
    """
    return frame.f_locals if frame.f_code is inspect.unwrap(GenerationMixin.generate).__code__ else {}


class _Kept:
    """Holds a model's target in the model, so that both go together. Copies of the model get targets of their own.

    A table of weak references would not do, because a target refers to its model, which then would never go.
    """

    def __init__(self) -> None:
        self.target: Target | None = None
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def target_of(model: PreTrainedModel) -> Target:
    """The target of a model, which is made once, and again after the model was moved or changed its attention.

    Raises:
        ValueError: the model's family or its attention cannot be served; the sentence names it.
    """
    kept = vars(model).setdefault(KEPT, _Kept())
    with kept.lock:
        made = kept.target
        is_current = made is not None and (made.device, made.dtype) == (model.device, model.dtype)
        if not is_current or model.config._attn_implementation != ATTENTION_NAME:
            kept.target = Target(model, made.tokenizer if made is not None else _tokenizer_of(model))
        return kept.target


def _tokenizer_of(model: PreTrainedModel) -> Any:
    """The tokenizer in the folder or repository that a model came from; None if there is none."""
    source = model.config.name_or_path
    if not source:
        return None
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):
        return None
