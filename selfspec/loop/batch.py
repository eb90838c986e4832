"""The sequences that decode together, and what draft, verify and accept need of them.

Lengths, roots and texts are on the device, in the cache's `state`, and passes keep them up to date. Invariant: the host's
lists may lag behind them by the steps that are not read yet, never the other way round.
"""

from __future__ import annotations

import time

import torch

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache
from selfspec.cache.rows import KEY, LENGTH, ROOT, TOP_K
from selfspec.kernels.jit import is_compiled_for
from selfspec.loop.report import Report
from selfspec.loop.sampling import Laws, Sampler
from selfspec.loop.sequence import Emission, Sequence
from selfspec.model.target import Target
from selfspec.tree import CandidateTree


class Batch:
    """Rows come and go between steps.

    Attributes:
        sequences: those that decode.
        is_greedy: every row takes the likeliest token.
        is_pathless: no row's choice depends on a path, so every node's token can be chosen at once.
    """

    def __init__(self, target: Target, cache: KVCache) -> None:
        self.target = target
        self.cache = cache
        self.device = target.device
        self.sequences: list[Sequence] = []
        self.is_greedy = self.is_pathless = True
        self._sampler: Sampler | None = None
        self._slots: torch.Tensor | None = None
        self._history: torch.Tensor | None = None
        self._num_tokens: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def rows(self) -> list[CacheRow]:
        return [sequence.row for sequence in self.sequences]

    def part(self, sequences: list[Sequence]) -> Batch:
        """The batch of some of the sequences."""
        if len(sequences) == len(self):
            return self
        part = Batch(self.target, self.cache)
        part.sequences = sequences
        part._note_change()
        return part

    def is_walked(self, tree: CandidateTree) -> bool:
        """Whether tokens are chosen along paths, node after node, and not at every node at once."""
        if not tree.is_deterministic or not self.is_pathless:
            return True
        # Without a kernel, filters cost less along a walk than at every node.
        has_kernel = is_compiled_for(self.cache.keys) or self.target.passes.is_captured
        return not has_kernel and not all(s.sampling.is_plain for s in self.sequences)

    def begin_step(self) -> None:
        """Forget what was read of the texts for the last step."""
        self._history = self._num_tokens = None

    @property
    def slots(self) -> torch.Tensor:
        """[B] int64: the rows' slots in the cache's `state`."""
        if self._slots is None:
            slots = torch.tensor([sequence.row.slot for sequence in self.sequences])
            self._slots = slots.to(self.device, non_blocking=True)
        return self._slots

    @property
    def history(self) -> torch.Tensor:
        """[B, C] int64: a copy, for this step, of each row's prompt and output, with room for a walk after the end."""
        if self._history is None:
            self._history = self.cache.state.history[self.slots]
        return self._history

    @property
    def num_tokens(self) -> torch.Tensor:
        """[B] int64: the sequences' `num_tokens`."""
        if self._num_tokens is None:
            self._num_tokens = self.cache.state.integers[self.slots, LENGTH] + 1
        return self._num_tokens

    @property
    def roots(self) -> torch.Tensor:
        """[B] int64: the last token of each row."""
        return self.cache.state.integers[self.slots, ROOT]

    @property
    def sampler(self) -> Sampler:
        """The present rows' sampler. It reads and writes `history`."""
        if self._sampler is None:
            self._sampler = Sampler(
                [s.sampling for s in self.sequences],
                self.cache.state.integers[self.slots, KEY],
                self.history,
                self.num_tokens,
                torch.tensor([len(s.request.prompt_ids) for s in self.sequences]).to(self.device, non_blocking=True),
                self.target.eos_token_ids,
                [s.grammar for s in self.sequences],
            )
        self._sampler.history, self._sampler.num_tokens = self.history, self.num_tokens
        return self._sampler

    @property
    def max_depths(self) -> torch.Tensor:
        """[B] int64: how deep each row's draft may go."""
        return torch.tensor([sequence.max_depth for sequence in self.sequences]).to(self.device, non_blocking=True)

    def add(self, sequence: Sequence) -> None:
        """Add a prefilled sequence that has a slot. It takes part from the next step on."""
        self.sequences.append(sequence)
        self._note_change()

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; its row keeps its blocks and its slot."""
        self.sequences.remove(sequence)
        self._note_change()

    def _note_change(self) -> None:
        self._sampler = self._slots = self._history = self._num_tokens = None
        self.is_greedy = all(sequence.sampling.is_greedy for sequence in self.sequences)
        self.is_pathless = all(sequence.sampling.is_pathless and sequence.grammar is None for sequence in self.sequences)


def open_slot(sequence: Sequence, cache: KVCache) -> int:
    """Give a sequence whose prompt is about to be complete a slot, and write there what it begins with."""
    params = sequence.sampling
    slot = cache.open_slot(sequence.row)
    cache.state.put(
        slot,
        [*sequence.request.prompt_ids, *sequence.token_ids],
        key=sequence.key,
        top_k=params.top_k,
        fractions=(params.temperature, params.top_p, params.min_p),
    )
    return slot


def laws_of(cache: KVCache, slots: torch.Tensor) -> Laws:
    """What the choices of pathless rows [B] depend on."""
    integers = cache.state.integers[slots]
    numbers = [integers[:, KEY], integers[:, LENGTH] + 1, integers[:, TOP_K]]
    return Laws(torch.stack(numbers, dim=1), cache.state.fractions[slots])


def commit_row(sequence: Sequence, cache: KVCache, row: Report, problem: Exception | None) -> Emission:
    """Record a step's outcome for one sequence: its length in the cache, and its output.

    A fault in one row ends only that row, with an error: logits that are not finite where a token had to be chosen, a
    grammar that cannot be followed, a tokenizer that fails.

    Args:
        problem: why no token could be chosen; None if one was.
    """
    cache.advance(sequence.row, row.num_accepted + 1)
    sequence.num_target_passes += 1
    sequence.num_draft_tokens += row.num_drafted
    if problem is not None:
        sequence.fail(problem)
    kept = _emit(sequence, row.tokens)
    emission = Emission(kept, row.num_drafted, min(row.num_accepted, len(kept)))
    sequence.token_depths += emission.depths
    sequence.num_accepted_tokens += emission.num_accepted
    sequence.seconds = time.perf_counter() - sequence.started
    return emission


def without_choice(sequence: Sequence, logits: torch.Tensor | None) -> Exception:
    """Why a sequence had no token to choose after a path.

    Args:
        logits: the target's logits [K + 1, V] along it; None where the sequence's own settings rule nothing out.
    """
    place = f"after {len(sequence.token_ids)} tokens"
    if logits is not None and logits.float().amax(-1).isfinite().all():
        return ValueError(f"logit_bias and the answer's other settings leave no token to choose {place}: ban fewer tokens")
    return FloatingPointError(
        f"the target's logits are not finite {place}: use a wider dtype (float32 or bfloat16) or check the model's weights"
    )


def _emit(sequence: Sequence, tokens: list[int]) -> list[int]:
    """Append a pass's tokens to a sequence; returns those it took, none if it failed."""
    if sequence.grammar is not None and sequence.grammar.problem is not None:
        sequence.fail(ValueError(sequence.grammar.problem))
    elif sequence.error is None:
        try:
            return sequence.emit(tokens)
        except Exception as error:
            # The row's own fault: a tokenizer that cannot decode its text, for instance.
            sequence.fail(error)
    return []
