"""From target logits to tokens, for a batch of rows that each have their own settings. Accept calls it at every node.

Invariant: a token at absolute position t is `argmax(processed_logits + gumbel(key, t))`, one draw from the processed
distribution, and depends only on the logits, the request's key and the position. Greedy rows take the plain argmax.

The filters and the repetition penalty are transformers' own logits processors, applied to the rows a walk visits. On CUDA
`row_sample` replaces temperature and filters wherever the target chooses, because a row's token must not depend on the other
rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.config import SamplingParams
from selfspec.kernels.jit import is_compiled_for
from selfspec.kernels.noise import Stream, gumbel, uniform
from selfspec.kernels.row_argmax import row_argmax
from selfspec.kernels.row_sample import row_sample

__all__ = ["Grammar", "Laws", "Sampler", "Stream"]


class Grammar(ABC):
    """The form that one answer must have.

    Attributes:
        problem: why the grammar cannot be followed any further.
    """

    problem: str | None = None

    @abstractmethod
    def allowed(self, token_ids: list[int]) -> torch.Tensor:
        """[V] bool on the CPU: the tokens that may follow an answer that began with `token_ids`; at least one is true."""


@dataclass(frozen=True)
class Laws:
    """What B rows' tokens depend on besides their logits, where nothing depends on a path.

    Only tensors, because a CUDA graph takes them.

    Attributes:
        integers: [B, 3] int64: noise key, number of committed tokens, top-k (0 keeps all).
        fractions: [B, 3] float32: temperature (0 is greedy), top-p, min-p.
    """

    integers: torch.Tensor
    fractions: torch.Tensor

    def choose(self, logits: torch.Tensor, depths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The token after every node [B, N], and whether its logits are sound [B, N].

        Args:
            logits: [B, N, V].
            depths: [B, N].
        """
        return row_sample(logits, depths, self.integers, self.fractions)


class Sampler:
    """Chooses tokens for B rows.

    Args:
        params: each row's settings.
        keys: [B] int64 noise keys.
        history: [B, C] int64, each row's tokens (prompt and output), with room for one walk past the end.
        num_tokens: [B] int64, how many of these are committed; the token at depth d gets position `num_tokens + d`.
        num_prompt_tokens: [B] int64.
        eos_token_ids: the model's end-of-sequence ids.
        grammars: each row's grammar, None for any text; empty where no row has one.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        keys: torch.Tensor,
        history: torch.Tensor,
        num_tokens: torch.Tensor,
        num_prompt_tokens: torch.Tensor,
        eos_token_ids: Sequence[int],
        grammars: Sequence[Grammar | None] = (),
    ) -> None:
        self._grammars = [(row, grammar) for row, grammar in enumerate(grammars) if grammar is not None]
        self.params = list(params)
        self.keys = keys
        self.history = history
        self.num_tokens = num_tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.is_plain = all(p.is_plain for p in params) and not self._grammars
        self.is_pathless = all(p.is_pathless for p in params) and not self._grammars
        self.is_greedy = all(p.is_greedy for p in params)
        device = keys.device
        self._top_k = torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device)
        self._fractions = torch.tensor([[p.temperature, p.top_p, p.min_p] for p in params], device=device)
        self._groups: list[tuple[torch.Tensor | None, _Law]] = []
        if not self.is_plain or not self.is_greedy:
            by_law: dict[tuple[object, ...], list[int]] = {}
            for row, p in enumerate(params):
                by_law.setdefault(p.law(), []).append(row)
            for rows in by_law.values():
                index = None if len(by_law) == 1 else torch.tensor(rows, device=device)
                self._groups.append((index, _Law(params[rows[0]], eos_token_ids, device)))

    @property
    def laws(self) -> Laws:
        """The rows' laws at the present number of tokens: temperature and filters, but no penalties or grammars."""
        return Laws(torch.stack([self.keys, self.num_tokens, self._top_k], dim=1), self._fractions)

    def choose(self, logits: torch.Tensor, depth: int, stream: Stream = Stream.TARGET) -> torch.Tensor:
        """The token [B] after the node at `depth` of each row's walk, from logits [B, V]."""
        return self.choose_among(self.follow_paths(logits, depth), depth, stream)

    def process(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """From logits [B, V] to those whose softmax is the distribution to sample: [B, V] float32.

        A greedy row becomes a point mass on its argmax (0 there, -inf elsewhere).
        """
        return self.warp(self.follow_paths(logits, depth))

    def follow_paths(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [B, V] after what depends on each row's path: grammar, bias, penalties, minimum length."""
        if self.is_pathless:
            return logits
        logits = logits.float()
        if self._grammars:
            logits = self._within_grammars(logits, depth)
        return self._by_group(logits, lambda law, logits, rows: law.follow_paths(logits, self, rows, depth))

    def warp(self, scores: torch.Tensor) -> torch.Tensor:
        """What `process` makes of scores [B, V] from `follow_paths`, by temperature and filters."""
        if not self._groups:
            return _point_mass(scores.float())
        return self._by_group(scores.float(), lambda law, scores, rows: law.warp(scores))

    def choose_among(self, scores: torch.Tensor, depth: int, stream: Stream = Stream.TARGET) -> torch.Tensor:
        """What `choose` makes of scores [B, V] from `follow_paths`."""
        if stream == Stream.TARGET and (self.is_plain or is_compiled_for(scores)):
            if self.is_greedy:
                return row_argmax(scores)[0]
            return self.laws.choose(scores[:, None], torch.full_like(self.num_tokens, depth)[:, None])[0][:, 0]
        return self.draw(self.warp(scores), depth, stream)

    def _by_group(self, logits: torch.Tensor, change: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Apply `change` to logits [B, V], once for each law and its rows."""
        if len(self._groups) == 1:
            return change(self._groups[0][1], logits, None)
        out = logits.clone()
        for rows, law in self._groups:
            out[rows] = change(law, logits[rows], rows)
        return out

    def _within_grammars(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [B, V] with -inf for tokens that may not follow a row's path. Reads the paths from the device."""
        logits = logits.clone()
        begins, ends = self.num_prompt_tokens.tolist(), (self.num_tokens + depth).tolist()
        for row, grammar in self._grammars:
            path = self.history[row, begins[row] : ends[row]].tolist()
            try:
                allowed = grammar.allowed(path)
            except Exception as error:
                # Only this row ends with the error; what it chooses no longer matters.
                grammar.problem = grammar.problem or f"the grammar failed: {type(error).__name__}: {error}"
                continue
            logits[row].masked_fill_(~allowed.to(logits.device), -torch.inf)
        return logits

    def draw(self, processed: torch.Tensor, depth: int, stream: Stream) -> torch.Tensor:
        """One draw per row, [B], from softmax(processed), processed [B, V]."""
        if self.is_greedy:
            # A point mass has one finite entry, so noise changes nothing.
            return processed.argmax(-1)
        noise = gumbel(self.keys, self.num_tokens + depth, stream, processed.shape[-1])
        return (processed + noise).argmax(-1)

    def uniform(self, depth: int, stream: Stream) -> torch.Tensor:
        """One number in (0, 1) per row: [B]."""
        return uniform(self.keys, self.num_tokens + depth, stream, 1)[:, 0]

    def record(self, tokens: torch.Tensor, depth: int) -> None:
        """Write a walk's tokens [B] after the committed history, because deeper nodes choose by their own path."""
        self.history.scatter_(1, (self.num_tokens + depth)[:, None], tokens[:, None])


class _Law:
    """The logits processors of one law, applied to the rows that share it."""

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self.params = params
        self.by_model = LogitsProcessorList()
        if params.logit_bias:
            self.by_model.append(SequenceBiasLogitsProcessor([[[k], v] for k, v in params.logit_bias.items()]))
        if params.repetition_penalty != 1:
            self.by_model.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        self.warpers = LogitsProcessorList()
        if not params.is_greedy:
            if params.temperature != 1:
                self.warpers.append(TemperatureLogitsWarper(params.temperature))
            if params.top_k > 0:
                self.warpers.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1:
                self.warpers.append(TopPLogitsWarper(params.top_p))
            if params.min_p > 0:
                self.warpers.append(MinPLogitsWarper(params.min_p))
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self.end_ids = torch.tensor(sorted(ends), dtype=torch.int64, device=device)

    def follow_paths(self, logits: torch.Tensor, sampler: Sampler, rows: torch.Tensor | None, depth: int) -> torch.Tensor:
        """Logits [R, V] of the law's rows after bias, penalties and minimum length."""
        params = self.params

        def of_rows(x: torch.Tensor) -> torch.Tensor:
            return x if rows is None else x[rows]

        num_tokens = of_rows(sampler.num_tokens) + depth
        num_prompt_tokens = of_rows(sampler.num_prompt_tokens)
        scores = logits
        if self.by_model:
            scores = self.by_model(_padded(of_rows(sampler.history), num_tokens), scores)
        if params.presence_penalty or params.frequency_penalty:
            counts = _emitted_counts(of_rows(sampler.history), num_prompt_tokens, num_tokens, logits.shape[-1])
            scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        if params.min_new_tokens and len(self.end_ids):
            is_early = num_tokens - num_prompt_tokens < params.min_new_tokens
            scores = scores.clone()
            scores[:, self.end_ids] = scores[:, self.end_ids].masked_fill(is_early[:, None], -torch.inf)
        return scores

    def warp(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [R, V] after temperature and filters."""
        return _point_mass(scores) if self.params.is_greedy else self.warpers(None, scores)


def _point_mass(scores: torch.Tensor) -> torch.Tensor:
    best = scores.argmax(-1, keepdim=True)
    return torch.full_like(scores, -torch.inf).scatter_(1, best, 0.0)


def _padded(history: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """Rows of equal length [B, C], filled with each row's last token, which a penalty on the set of tokens cannot notice."""
    index = torch.arange(history.shape[1], device=history.device)
    return history.gather(1, index.expand(len(num_tokens), -1).minimum(num_tokens[:, None] - 1))


def _emitted_counts(
    history: torch.Tensor, num_prompt_tokens: torch.Tensor, num_tokens: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """[B, V] float32: how often each token was emitted so far; the prompt is not counted."""
    index = torch.arange(history.shape[1], device=history.device)
    is_emitted = (index >= num_prompt_tokens[:, None]) & (index < num_tokens[:, None])
    counts = torch.zeros(len(num_tokens), vocab_size, device=history.device)
    return counts.scatter_add_(1, history.clamp(min=0), is_emitted.to(counts.dtype))
