"""From target logits to tokens, for a batch of rows with settings of their own.

A token at absolute position t of a request is `argmax(processed_logits + gumbel(key, t))`: one draw from the processed
distribution that depends on nothing but the logits, the request's key and the position. Greedy rows take the plain argmax.
The filters and the repetition penalty are transformers' own logits processors, applied to the rows a walk visits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

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
from selfspec.noise import Stream, gumbel, uniform

__all__ = ["Grammar", "Sampler", "Stream"]


class Grammar(ABC):
    """The form that one answer must have.

    Attributes:
        problem: why it cannot be followed any further.
    """

    problem: str | None = None

    @abstractmethod
    def allowed(self, token_ids: list[int]) -> torch.Tensor:
        """[V] bool on the CPU: which tokens may follow an answer that has begun with `token_ids`; at least one may."""


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
        self.is_greedy = all(p.is_greedy for p in params)
        device = keys.device
        self._greedy_rows = torch.tensor([p.is_greedy for p in params], device=device)
        temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
        self._temperatures = torch.tensor(temperatures, device=device)
        self._groups: list[tuple[torch.Tensor | None, _Law]] = []
        if not self.is_plain or not self.is_greedy:
            by_law: dict[tuple[object, ...], list[int]] = {}
            for row, p in enumerate(params):
                by_law.setdefault(p.law(), []).append(row)
            for rows in by_law.values():
                index = None if len(by_law) == 1 else torch.tensor(rows, device=device)
                self._groups.append((index, _Law(params[rows[0]], eos_token_ids, device)))

    def choose_all(self, logits: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """The target's token at every node, where no row needs history or filters.

        Args:
            logits: [B, N, V].
            depths: [B, N].

        Returns:
            [B, N] int64.
        """
        assert self.is_plain
        if self.is_greedy:
            return logits.argmax(-1)
        positions = self.num_tokens[:, None] + depths
        noise = gumbel(self.keys[:, None].expand_as(positions), positions, Stream.TARGET, logits.shape[-1])
        scores = logits.float() / self._temperatures[:, None, None] + noise
        return torch.where(self._greedy_rows[:, None], logits.argmax(-1), scores.argmax(-1))

    def choose(self, logits: torch.Tensor, depth: int, stream: Stream = Stream.TARGET) -> torch.Tensor:
        """The token after the node at `depth` of each row's walk: [B] from logits [B, V]."""
        if self.is_plain and stream == Stream.TARGET:
            return self.choose_all(logits[:, None], torch.full_like(self.num_tokens, depth)[:, None])[:, 0]
        return self.draw(self.process(logits, depth), depth, stream)

    def process(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits whose softmax is the distribution to sample: [B, V] float32.

        Greedy rows come out as a point mass on their argmax (0 there, -inf elsewhere).
        """
        logits = logits.float()
        if self._grammars:
            logits = self._within_grammars(logits, depth)
        if not self._groups:
            return _point_mass(logits)
        if len(self._groups) == 1:
            return self._groups[0][1](logits, self, None, depth)
        out = torch.empty_like(logits)
        for rows, law in self._groups:
            out[rows] = law(logits[rows], self, rows, depth)
        return out

    def _within_grammars(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [B, V] with -inf for the tokens that may not follow each row's path. Reads the paths to the host."""
        logits = logits.clone()
        begins, ends = self.num_prompt_tokens.tolist(), (self.num_tokens + depth).tolist()
        for row, grammar in self._grammars:
            path = self.history[row, begins[row] : ends[row]].tolist()
            logits[row].masked_fill_(~grammar.allowed(path).to(logits.device), -torch.inf)
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
        """Put a walk's tokens [B] behind the committed history, so that deeper nodes see their own path."""
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

    def __call__(self, logits: torch.Tensor, sampler: Sampler, rows: torch.Tensor | None, depth: int) -> torch.Tensor:
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
        if params.is_greedy:
            return _point_mass(scores)
        return self.warpers(None, scores)


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
