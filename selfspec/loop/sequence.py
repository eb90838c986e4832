"""One prompt on its way to an answer, and the batch of those that decode together.

`Sequence` is the host's view: what was emitted, why it ended, what it cost. `Batch` adds the tensors that a step needs of
all rows. Invariant: a row's committed prefix in the cache is all its tokens but the last, which is the next tree's root.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from selfspec.cache.kv import CacheRow, KVCache
from selfspec.config import SamplingParams
from selfspec.kernels.noise import sample_key
from selfspec.loop.accept import Acceptance
from selfspec.loop.sampling import Grammar, Sampler
from selfspec.loop.text import TextStream
from selfspec.model.target import Target
from selfspec.tree import CandidateTree


@dataclass(frozen=True)
class Request:
    """A tokenised prompt with its settings. `index` and `sample_index` say where its answer belongs.

    Attributes:
        num_top_logprobs: how many of the likeliest tokens to report beside each emitted one, where `logprobs` are asked for.
        begin_grammar: begins the grammar that the answer must follow; None for any text.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    index: int = 0
    sample_index: int = 0
    num_top_logprobs: int = 0
    begin_grammar: Callable[[], Grammar] | None = None


@dataclass(eq=False)
class Sequence:
    """A request being decoded.

    Counters cover what was emitted: draft tokens accepted behind a stop are not counted as accepted. `num_paused_passes`
    counts the passes for which the drafter could not draft, because the text had outgrown its context. `started` is the
    time of admission, `num_reused_tokens` the part of the prompt whose KV was there already.
    """

    request: Request
    row: CacheRow
    text_stream: TextStream
    key: int
    max_tokens: int
    eos_token_ids: frozenset[int]
    grammar: Grammar | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    num_target_passes: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_paused_passes: int = 0
    num_reused_tokens: int = 0
    created: float = field(default_factory=time.perf_counter)
    started: float = 0.0
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
    def prefix_ids(self) -> list[int]:
        """All tokens but the root: what the cache holds while the sequence decodes."""
        return [*self.request.prompt_ids, *self.token_ids][:-1]

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Tokens `start … end - 1` of prompt and output."""
        prompt, size = self.request.prompt_ids, len(self.request.prompt_ids)
        return prompt[start:end] + self.token_ids[max(start - size, 0) : max(end - size, 0)]

    @property
    def max_depth(self) -> int:
        """The deepest draft that can still be emitted: one place is the bonus token's."""
        return self.max_tokens - len(self.token_ids) - 1

    def fail(self, error: Exception) -> None:
        """End the sequence with an error in place of an answer."""
        self.error = error
        self.finish_reason = "error"

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


@dataclass(frozen=True)
class Emission:
    """What a step gave one row: the tokens appended (cut where the sequence ended), the draft's size, its emitted part."""

    tokens: list[int]
    num_drafted: int
    num_accepted: int


class Batch:
    """The sequences decoding now, and their tensors. Rows come and go between steps; `sampler` follows.

    What is emitted reaches the tensors when someone asks for them: of greedy decoding nobody does, and no step waits.
    """

    def __init__(self, target: Target, cache: KVCache) -> None:
        self.target = target
        self.cache = cache
        self.device = target.device
        self.sequences: list[Sequence] = []
        self._history = torch.zeros(0, 0, dtype=torch.int64, device=self.device)
        self._num_tokens = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._sampler: Sampler
        self._is_stale = False
        # The steps that the tensors don't know of; None where they are too many to be worth keeping.
        self._missing: list[Acceptance] | None = []

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def rows(self) -> list[CacheRow]:
        return [sequence.row for sequence in self.sequences]

    @property
    def history(self) -> torch.Tensor:
        """[B, C] int64, prompt and output of each row, with room for a walk behind the end."""
        self._catch_up()
        return self._history

    @property
    def num_tokens(self) -> torch.Tensor:
        """[B] int64, the same numbers as the sequences' `num_tokens`."""
        self._catch_up()
        return self._num_tokens

    @property
    def sampler(self) -> Sampler:
        """The present rows'. It reads and writes `history`."""
        self._catch_up()
        return self._sampler

    @property
    def is_greedy(self) -> bool:
        return self._sampler.is_greedy

    @property
    def is_pathless(self) -> bool:
        """No row's choice depends on a path, as `Sampler` has it."""
        return self._sampler.is_pathless

    @property
    def roots(self) -> torch.Tensor:
        """[B] the last token of each row."""
        last = [(sequence.token_ids or sequence.request.prompt_ids)[-1] for sequence in self.sequences]
        return torch.tensor(last).to(self.device, non_blocking=True)

    @property
    def max_depths(self) -> torch.Tensor:
        """[B] how deep a draft of each row may go."""
        return torch.tensor([sequence.max_depth for sequence in self.sequences]).to(self.device)

    def open(self, request: Request) -> Sequence:
        """A sequence with an empty cache row, not part of the batch yet.

        Raises:
            MemoryError: the prompt leaves no room in the cache, were it alone there.
        """
        sampling = request.sampling
        target = self.target
        room = target.context_length - len(request.prompt_ids)
        if self.cache.max_tokens is not None:
            room = min(room, self.cache.max_tokens - len(request.prompt_ids))
        if room < 1:
            raise MemoryError(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room for an answer in a KV cache of "
                f"{self.cache.max_tokens}: shorten the prompt or raise the cache's max_tokens"
            )
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(target.eos_token_ids))
        return Sequence(
            request=request,
            row=self.cache.open_row(),
            text_stream=TextStream(target.tokenizer, sampling.stop),
            key=sample_key(seed, request.sample_index),
            max_tokens=min(sampling.max_new_tokens, room),
            eos_token_ids=frozenset(ends),
            grammar=request.begin_grammar() if request.begin_grammar is not None else None,
        )

    def add(self, sequence: Sequence) -> None:
        """Let a prefilled sequence take part from the next step on."""
        self.sequences.append(sequence)
        self._is_stale = True

    def refresh(self) -> None:
        """Make the tensors fit the present rows; once a step, after rows have come and gone."""
        if not self.sequences:
            return
        longest = max(sequence.num_tokens for sequence in self.sequences)
        if self._is_stale or longest + MAX_WALK > self._history.shape[1]:
            self._rebuild(longest + HISTORY_GROWTH + MAX_WALK)
            self._is_stale = False

    def remove(self, sequence: Sequence) -> None:
        """Take a row out; its blocks are its own still."""
        self.sequences.remove(sequence)
        self._is_stale = True

    def commit(
        self, acceptance: Acceptance, logits: torch.Tensor, report: torch.Tensor
    ) -> tuple[list[Emission], list[int], list[list[float]]]:
        """Take a step's outcome over: cache lengths, outputs, and in time the tensors.

        A row whose logits held a NaN or an infinity where a token was to be chosen ends with an error, alone.

        Args:
            report: what `report_of` gave.

        Returns:
            Each row's emission, how many of its drafts were accepted (behind an end, too), and the report's facts.
        """
        if self._missing is not None:
            self._missing.append(acceptance)
            if len(self._missing) > MAX_MISSING:
                self._missing = None
        logprobs = self._logprobs(acceptance, logits)
        width = acceptance.tokens.shape[1]
        emissions, accepted, facts = [], [], []
        # The step's one read: everything the host must know, in one tensor.
        for b, (sequence, row) in enumerate(zip(self.sequences, report.tolist(), strict=True)):
            num_accepted, is_valid, num_drafts, *tokens = map(int, row[: 3 + width])
            accepted.append(num_accepted)
            facts.append(row[3 + width :])
            self.cache.advance(sequence.row, num_accepted + 1)
            sequence.num_target_passes += 1
            sequence.num_draft_tokens += num_drafts
            kept: list[int] = []
            if sequence.grammar is not None and sequence.grammar.problem is not None:
                sequence.fail(ValueError(sequence.grammar.problem))
            elif is_valid:
                kept = sequence.emit(tokens[: num_accepted + 1])
            else:
                sequence.fail(
                    FloatingPointError(
                        f"the target's logits are not finite after {len(sequence.token_ids)} tokens: "
                        "use a wider dtype (float32 or bfloat16) or check the model's weights"
                    )
                )
            emission = Emission(kept, num_drafts, min(num_accepted, len(kept)))
            sequence.num_accepted_tokens += emission.num_accepted
            if logprobs is not None and sequence.sampling.logprobs:
                chosen, top = logprobs[b]
                sequence.logprobs += chosen[: len(kept)]
                if count := sequence.request.num_top_logprobs:
                    sequence.top_logprobs += [entries[:count] for entries in top[: len(kept)]]
            sequence.seconds = time.perf_counter() - sequence.started
            emissions.append(emission)
        return emissions, accepted, facts

    def _catch_up(self) -> None:
        """Let the tensors have all that was emitted; what the rows ended behind does not matter any more."""
        if self._missing is None:
            return self._rebuild(self._history.shape[1])
        for acceptance in self._missing:
            index = self._num_tokens[:, None] + torch.arange(acceptance.tokens.shape[1], device=self.device)
            self._history.scatter_(1, index, acceptance.tokens.clamp(min=0))
            self._num_tokens += acceptance.num_accepted + 1
        self._missing.clear()

    def _logprobs(
        self, acceptance: Acceptance, logits: torch.Tensor
    ) -> list[tuple[list[float], list[list[tuple[int, float]]]]] | None:
        """Log-probabilities under the target alone (no temperature, filter or penalty), along each row's path.

        Returns:
            Per row: that of every emitted token, and the likeliest tokens with theirs, as many as any row asks for.
        """
        if not any(sequence.sampling.logprobs for sequence in self.sequences):
            return None
        nodes = acceptance.path.clamp(min=0)
        rows = logits.gather(1, nodes[:, :, None].expand(*nodes.shape, logits.shape[-1])).float()
        log_probs = rows.log_softmax(-1)  # [B, K + 1, V]
        chosen = log_probs.gather(2, acceptance.tokens.clamp(min=0)[:, :, None])[:, :, 0].tolist()
        best = log_probs.topk(max(sequence.request.num_top_logprobs for sequence in self.sequences), dim=-1)
        top = [
            [list(zip(ids, values, strict=True)) for ids, values in zip(*row, strict=True)]
            for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        return list(zip(chosen, top, strict=True))

    def _rebuild(self, capacity: int) -> None:
        """Make the tensors and the sampler anew for the present rows, with room for `capacity` tokens each."""
        sequences = self.sequences
        tokens = [s.request.prompt_ids + s.token_ids for s in sequences]
        self._history = torch.tensor([ids + [0] * (capacity - len(ids)) for ids in tokens]).to(self.device)
        self._num_tokens = torch.tensor([len(ids) for ids in tokens]).to(self.device)
        self._missing = []
        self._sampler = Sampler(
            [s.sampling for s in sequences],
            torch.tensor([s.key for s in sequences]).to(self.device),
            self._history,
            self._num_tokens,
            torch.tensor([len(s.request.prompt_ids) for s in sequences]).to(self.device),
            self.target.eos_token_ids,
            [s.grammar for s in sequences],
        )


def report_of(tree: CandidateTree, acceptance: Acceptance, facts: torch.Tensor | None) -> torch.Tensor:
    """What the host reads of a step, [B, 3 + K + 1 + F]: `num_accepted`, `is_valid`, drafted nodes, `tokens`, `facts`.

    Args:
        facts: [B, F] float64 of someone else's. Float64 holds any token.
    """
    num_drafted = tree.is_real.sum(1, keepdim=True) - 1
    columns = [acceptance.num_accepted[:, None], acceptance.is_valid[:, None], num_drafted, acceptance.tokens]
    outcome = torch.cat(columns, dim=1).double()
    return outcome if facts is None else torch.cat([outcome, facts], dim=1)


# The deepest walk that `Batch.history` keeps room for.
MAX_WALK = 128
# How many tokens it has room for beyond that when it is made: drafters look through all of it, so that room for the longest
# possible output would cost every step.
HISTORY_GROWTH = 256
# Steps that it may lag behind before it is cheaper to make it anew.
MAX_MISSING = 16
