"""From target logits to tokens, for a batch of rows with settings of their own.

A token at absolute position t of a request is `argmax(processed_logits + gumbel(key, t))`: one draw from the processed
distribution that depends on nothing but the logits, the request's key and the position. Greedy rows take the plain argmax.
The filters and the repetition penalty are transformers' own logits processors, applied to the rows a walk visits. On CUDA
`row_sample` stands for temperature and filters wherever the target chooses, so that a row's token depends on none beside it.
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
        problem: why it cannot be followed any further.
    """

    problem: str | None = None

    @abstractmethod
    def allowed(self, token_ids: list[int]) -> torch.Tensor:
        """[V] bool on the CPU: which tokens may follow an answer that has begun with `token_ids`; at least one may."""


@dataclass(frozen=True)
class Laws:
    """What B rows' tokens depend on beside their logits, where nothing depends on their paths.

    Tensors alone, which a CUDA graph can take.

    Attributes:
        integers: [B, 3] int64: noise key, number of committed tokens, top-k (0 keeps all).
        fractions: [B, 3] float32: temperature (0 is greedy), top-p, min-p.
    """

    integers: torch.Tensor
    fractions: torch.Tensor

    def choose(self, logits: torch.Tensor, depths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The token after every node, from logits [B, N, V] at depths [B, N], and whether its logits are sound."""
        return row_sample(logits, depths, self.integers, self.fractions)


class Sampler:
    """Chooses tokens for B rows.

    Args:
        params: each row's settings.
        keys: [B] int64 noise keys.
        history: [B, C] int64, each row's tokens (prompt and output), with room for one walk past the end.
        num_tokens: [B] int64, how many of them are committed; the token of depth d gets position `num_tokens + d`.
        num_prompt_tokens: [B] int64.
        eos_token_ids: the model's end-of-sequence ids.
        grammars: each row's, None for any text; nothing at all where no row has one.
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
        """What the rows' choices depend on, temperature and filters alone, at the present number of tokens."""
        return Laws(torch.stack([self.keys, self.num_tokens, self._top_k], dim=1), self._fractions)

    def choose(self, logits: torch.Tensor, depth: int, stream: Stream = Stream.TARGET) -> torch.Tensor:
        """The token after the node at `depth` of each row's walk: [B] from logits [B, V]."""
        if stream == Stream.TARGET and (self.is_plain or is_compiled_for(logits)):
            if not self.is_pathless:
                logits = self._follow_paths(logits.float(), depth)
            if self.is_greedy:
                return row_argmax(logits)[0]
            return self.laws.choose(logits[:, None], torch.full_like(self.num_tokens, depth)[:, None])[0][:, 0]
        return self.draw(self.process(logits, depth), depth, stream)

    def process(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits whose softmax is the distribution to sample: [B, V] float32.

        Greedy rows come out as a point mass on their argmax (0 there, -inf elsewhere).
        """
        scores = self._follow_paths(logits.float(), depth)
        if not self._groups:
            return _point_mass(scores)
        return self._by_group(scores, lambda law, scores, rows: law.warp(scores))

    def _follow_paths(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """Float32 logits [B, V] as each row's path changes them: grammar, bias, penalties, minimum length."""
        if self._grammars:
            logits = self._within_grammars(logits, depth)
        return self._by_group(logits, lambda law, logits, rows: law.follow_paths(logits, self, rows, depth))

    def _by_group(self, logits: torch.Tensor, change: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Logits [B, V] changed law by law, each time those of the rows that share it."""
        if len(self._groups) == 1:
            return change(self._groups[0][1], logits, None)
        out = logits.clone()
        for rows, law in self._groups:
            out[rows] = change(law, logits[rows], rows)
        return out

    def _within_grammars(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [B, V] with -inf for the tokens that may not follow each row's path. Reads the paths to the host."""
        logits = logits.clone()
        begins, ends = self.num_prompt_tokens.tolist(), (self.num_tokens + depth).tolist()
        for row, grammar in self._grammars:
            path = self.history[row, begins[row] : ends[row]].tolist()
            try:
                allowed = grammar.allowed(path)
            except Exception as error:
                # The row ends with this, alone; what it would choose does not matter any more.
                grammar.problem = grammar.problem or f"the grammar failed: {type(error).__name__}: {error}"
                continue
            logits[row].masked_fill_(~allowed.to(logits.device), -torch.inf)
        return logits

    def draw(self, processed: torch.Tensor, depth: int, stream: Stream) -> torch.Tensor:
        """One draw per row from softmax(processed) [B, V]: [B]."""
        if self.is_greedy:
            # Every finite entry of a point mass is its only one.
            return processed.argmax(-1)
        noise = gumbel(self.keys, self.num_tokens + depth, stream, processed.shape[-1])
        return (processed + noise).argmax(-1)

    def uniform(self, depth: int, stream: Stream) -> torch.Tensor:
        """[B] numbers in (0, 1)."""
        return uniform(self.keys, self.num_tokens + depth, stream, 1)[:, 0]

    def record(self, tokens: torch.Tensor, depth: int) -> None:
        """Append a walk's tokens [B] to the committed history, because deeper nodes choose by their own path."""
        self.history.scatter_(1, (self.num_tokens + depth)[:, None], tokens[:, None])


class _Law:
    """One distinct setting's processors, applied to the rows that share it."""

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
        """Logits with bias, penalties and minimum length."""
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
        """Scores with temperature and filters."""
        return _point_mass(scores) if self.params.is_greedy else self.warpers(None, scores)


def _point_mass(scores: torch.Tensor) -> torch.Tensor:
    best = scores.argmax(-1, keepdim=True)
    return torch.full_like(scores, -torch.inf).scatter_(1, best, 0.0)


def _padded(history: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """Rows of equal length [B, C]: each row's own last token fills its end, which no set-based penalty can notice."""
    index = torch.arange(history.shape[1], device=history.device)
    return history.gather(1, index.expand(len(num_tokens), -1).minimum(num_tokens[:, None] - 1))


def _emitted_counts(
    history: torch.Tensor, num_prompt_tokens: torch.Tensor, num_tokens: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """[B, V] float32: how often each token was emitted so far, prompt not counted."""
    index = torch.arange(history.shape[1], device=history.device)
    is_emitted = (index >= num_prompt_tokens[:, None]) & (index < num_tokens[:, None])
    counts = torch.zeros(len(num_tokens), vocab_size, device=history.device)
    return counts.scatter_add_(1, history.clamp(min=0), is_emitted.to(counts.dtype))
