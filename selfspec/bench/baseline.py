"""transformers' own `generate`, greedy, on a copy of the target that is left as it is: the baseline that people know."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from selfspec.model.adapter import merge_adapter
from selfspec.model.target import Target


def load_baseline(target: Target, source: str | None = None, *, revision: str | None = None) -> PreTrainedModel:
    """A copy of the target as transformers loads it, of the same dtype and on the same device, adapter included.

    Args:
        source: the path or Hub id to load; by default the one that the target's model came from.
    """
    source = source or target.model.name_or_path
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=target.dtype, revision=revision)
    if target.adapter is not None:
        model = merge_adapter(model, target.adapter, target=source)
    return model.to(target.device).eval()


def plain_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a stock model with transformers' own attention. It shares the model's weights and copies none."""
    shared = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor):
                shared[id(value)] = value
    twin = copy.deepcopy(model, shared)
    twin.set_attn_implementation("sdpa")
    return twin


def generate_greedily(
    model: Any, prompt_ids: Sequence[int], max_new_tokens: int, *, streamer: BaseStreamer | None = None
) -> list[int]:
    """The tokens of `generate` after one prompt."""
    input_ids = torch.tensor([list(prompt_ids)], device=model.device)
    output_ids = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=streamer,
    )
    return output_ids[0, input_ids.shape[1] :].tolist()


def stream_transformers(model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int) -> Iterator[int]:
    """Answer greedily with transformers' `generate` on such a copy, and yield each token as soon as it is made.

    `generate` works in a thread of its own, and only while a token is asked for. So the time between asking and getting is
    that token's, and whoever takes turns with it is not slowed down. Closing the iterator ends it.
    """
    asked: SimpleQueue[bool] = SimpleQueue()
    # Tokens, then an error if there was one, then None.
    made: SimpleQueue[int | Exception | None] = SimpleQueue()

    def work() -> None:
        try:
            if asked.get():
                generate_greedily(model, prompt_ids, max_new_tokens, streamer=_Turns(made, asked))
        except _Stopped:
            pass
        except Exception as error:
            made.put(error)
        made.put(None)

    thread = Thread(target=work, name="transformers", daemon=True)
    thread.start()
    try:
        while True:
            asked.put(True)
            token = made.get()
            if isinstance(token, Exception):
                raise token
            if token is None:
                return
            yield token
    finally:
        asked.put(False)
        thread.join()


class _Stopped(Exception):
    """Nobody wants more tokens."""


class _Turns(BaseStreamer):
    """Hands each token over, and waits until the next one is asked for."""

    def __init__(self, made: SimpleQueue[int | Exception | None], asked: SimpleQueue[bool]) -> None:
        self._made = made
        self._asked = asked
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        # The prompt comes first.
        if self._is_prompt:
            self._is_prompt = False
            return
        self._made.put(int(value))
        if not self._asked.get():
            raise _Stopped

    def end(self) -> None:
        """Nothing is held back, so nothing is left."""
