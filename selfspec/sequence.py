"""One prompt on its way to an answer, and the batch of those that decode together.

`Sequence` is the host's view: what was emitted, why it ended, what it cost. `Batch` adds the tensors that a step needs of
all rows. Invariant: a row's committed prefix in the cache is all its tokens but the last, which is the next tree's root.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

import torch

from selfspec.accept import Acceptance
from selfspec.cache import CacheRow, KVCache
from selfspec.config import SamplingParams
from selfspec.detokenize import TextStream
from selfspec.noise import sample_key
from selfspec.sampling import Sampler
from selfspec.target import Target
from selfspec.tree import CandidateTree


@dataclass(frozen=True)
class Request:
    """A tokenised prompt with its settings. `index` and `sample_index` say where its answer belongs."""

    prompt_ids: list[int]
    sampling: SamplingParams
    index: int = 0
    sample_index: int = 0


@dataclass(eq=False)
class Sequence:
    """A request being decoded.

    Counters cover what was emitted: draft tokens accepted behind a stop are not counted as accepted. `num_paused_passes`
    counts the passes for which the drafter could not draft, because the text had outgrown its context.
    """

    request: Request
    row: CacheRow
    text_stream: TextStream
    key: int
    max_tokens: int
    eos_token_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    num_target_passes: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_paused_passes: int = 0
    started: float = field(default_factory=time.perf_counter)
    prefill_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        """Prompt and output together; the last of them is the root."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def max_depth(self) -> int:
        """The deepest draft that can still be emitted: one place is the bonus token's."""
        return self.max_tokens - len(self.token_ids) - 1

    def emit(self, tokens: list[int]) -> list[int]:
        """Append a verify pass's tokens up to the first that ends the sequence; returns those that were appended."""
        for count, token in enumerate(tokens, start=1):
            self.token_ids.append(token)
            may_stop = len(self.token_ids) >= self.sampling.min_new_tokens
            is_end = token in self.eos_token_ids
            # The end token ends the text too; its own characters are not part of it.
            if is_end or self.text_stream.push(token, may_stop=may_stop):
                self.finish_reason = "stop"
            elif len(self.token_ids) == self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                self.text_stream.finish()
                return tokens[:count]
        return tokens


class Batch:
    """The sequences decoding now, and their tensors. Rows come and go between steps; `sampler` follows.

    Attributes:
        history: [B, C] int64, prompt and output of each row, with room for a walk behind the end.
        num_tokens: [B] int64, the same numbers as the sequences' `num_tokens`.
    """

    def __init__(self, target: Target, cache: KVCache) -> None:
        self.target = target
        self.cache = cache
        self.device = target.device
        self.sequences: list[Sequence] = []
        self.history = torch.zeros(0, 0, dtype=torch.int64, device=self.device)
        self.num_tokens = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.sampler: Sampler
        self._is_stale = False

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def rows(self) -> list[CacheRow]:
        return [sequence.row for sequence in self.sequences]

    @property
    def roots(self) -> torch.Tensor:
        """[B] the last token of each row."""
        return self.history.gather(1, self.num_tokens[:, None] - 1)[:, 0]

    @property
    def max_depths(self) -> torch.Tensor:
        """[B] how deep a draft of each row may go."""
        return torch.tensor([sequence.max_depth for sequence in self.sequences]).to(self.device)

    def open(self, request: Request) -> Sequence:
        """A sequence with an empty cache row, not part of the batch yet."""
        sampling = request.sampling
        target = self.target
        room = target.context_length - len(request.prompt_ids)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(target.eos_token_ids))
        return Sequence(
            request=request,
            row=self.cache.open_row(),
            text_stream=TextStream(target.tokenizer, sampling.stop),
            key=sample_key(seed, request.sample_index),
            max_tokens=min(sampling.max_new_tokens, room),
            eos_token_ids=frozenset(ends),
        )

    def add(self, sequence: Sequence) -> None:
        """Let a prefilled sequence take part from the next step on."""
        self.sequences.append(sequence)
        self._is_stale = True

    def refresh(self) -> None:
        """Make the tensors fit the present rows; once a step, after rows have come and gone."""
        if self._is_stale and self.sequences:
            self._rebuild()
        self._is_stale = False

    def remove_finished(self) -> list[Sequence]:
        """Drop the rows that have ended and free their blocks."""
        finished = [sequence for sequence in self.sequences if sequence.finish_reason is not None]
        if finished:
            self.sequences = [sequence for sequence in self.sequences if sequence.finish_reason is None]
            for sequence in finished:
                self.cache.release(sequence.row)
            self._is_stale = True
        return finished

    def commit(self, tree: CandidateTree, acceptance: Acceptance, logits: torch.Tensor) -> list[list[int]]:
        """Take a step's outcome over: tensors, cache lengths, outputs. Returns each row's emitted tokens.

        Raises:
            FloatingPointError: the target's logits held a NaN or an infinity where a token was to be chosen.
        """
        index = self.num_tokens[:, None] + torch.arange(acceptance.tokens.shape[1], device=self.device)
        self.history.scatter_(1, index, acceptance.tokens.clamp(min=0))
        self.num_tokens += acceptance.num_accepted + 1
        logprobs = self._logprobs(acceptance, logits)
        # The step's one read: everything the host must know, in one tensor.
        outcome = torch.cat(
            [
                acceptance.num_accepted[:, None],
                acceptance.is_valid[:, None],
                (tree.is_real.sum(1) - 1)[:, None],
                acceptance.tokens,
            ],
            dim=1,
        ).tolist()
        emitted = []
        for b, (sequence, (num_accepted, is_valid, num_drafts, *tokens)) in enumerate(
            zip(self.sequences, outcome, strict=True)
        ):
            if not is_valid:
                raise FloatingPointError(
                    f"the target's logits are not finite after {len(sequence.token_ids)} tokens: "
                    "use a wider dtype (float32 or bfloat16) or check the model's weights"
                )
            self.cache.advance(sequence.row, num_accepted + 1)
            kept = sequence.emit(tokens[: num_accepted + 1])
            sequence.num_target_passes += 1
            sequence.num_draft_tokens += num_drafts
            sequence.num_accepted_tokens += min(num_accepted, len(kept))
            if logprobs is not None and sequence.sampling.logprobs:
                sequence.logprobs += logprobs[b][: len(kept)]
            sequence.seconds = time.perf_counter() - sequence.started
            emitted.append(kept)
        return emitted

    def _logprobs(self, acceptance: Acceptance, logits: torch.Tensor) -> list[list[float]] | None:
        """Log-probability of every emitted token under the target alone (no temperature, filter or penalty)."""
        if not any(sequence.sampling.logprobs for sequence in self.sequences):
            return None
        nodes = acceptance.path.clamp(min=0)
        rows = logits.gather(1, nodes[:, :, None].expand(*nodes.shape, logits.shape[-1])).float()
        chosen = acceptance.tokens.clamp(min=0)[:, :, None]
        return rows.log_softmax(-1).gather(2, chosen)[:, :, 0].tolist()

    def _rebuild(self) -> None:
        """Make the tensors and the sampler anew for the present rows."""
        sequences = self.sequences
        # Room for the longest output that any row may reach, and for one walk of drafts past it.
        capacity = max(len(s.request.prompt_ids) + s.max_tokens for s in sequences) + MAX_WALK
        tokens = [s.request.prompt_ids + s.token_ids for s in sequences]
        self.history = torch.tensor([ids + [0] * (capacity - len(ids)) for ids in tokens]).to(self.device)
        self.num_tokens = torch.tensor([len(ids) for ids in tokens]).to(self.device)
        self.sampler = Sampler(
            [s.sampling for s in sequences],
            torch.tensor([s.key for s in sequences]).to(self.device),
            self.history,
            self.num_tokens,
            torch.tensor([len(s.request.prompt_ids) for s in sequences]).to(self.device),
            self.target.eos_token_ids,
        )


# The deepest walk that `Batch.history` keeps room for.
MAX_WALK = 128
