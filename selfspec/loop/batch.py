"""The sequences that decode together, and the tensors that draft, verify and accept need of them.

Invariant: the tensors may lag behind the host's lists, and are brought up to date when someone asks for them.
"""

from __future__ import annotations

import time

import torch

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache
from selfspec.loop.accept import Acceptance
from selfspec.loop.sampling import Laws, Sampler
from selfspec.loop.sequence import Emission, Sequence
from selfspec.model.target import Target
from selfspec.tree import CandidateTree

# The deepest walk that `Batch.history` keeps room for.
MAX_WALK = 128
# Room for further tokens when the history is made. Not for the longest possible output, because drafters look through all of
# it in every step.
HISTORY_GROWTH = 256
# When the history has missed more steps than this, it is cheaper to rebuild it.
MAX_MISSING = 16


class Batch:
    """Rows come and go between steps. The history and the sampler follow only when someone asks for them, because greedy
    decoding needs neither.

    Attributes:
        is_greedy: every row takes the likeliest token.
        is_pathless: no row's choice depends on a path, so every node's token can be chosen at once.
    """

    def __init__(self, target: Target, cache: KVCache) -> None:
        self.target = target
        self.cache = cache
        self.device = target.device
        self.sequences: list[Sequence] = []
        self.is_greedy = self.is_pathless = True
        self._history = torch.zeros(0, 0, dtype=torch.int64, device=self.device)
        self._num_tokens = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._sampler: Sampler
        # Steps that are not in the tensors yet; None where the tensors must be rebuilt.
        self._missing: list[Acceptance] | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def rows(self) -> list[CacheRow]:
        return [sequence.row for sequence in self.sequences]

    @property
    def history(self) -> torch.Tensor:
        """[B, C] int64: each row's prompt and output, with room for a walk after the end."""
        self._catch_up()
        return self._history

    @property
    def num_tokens(self) -> torch.Tensor:
        """[B] int64: the sequences' `num_tokens`."""
        self._catch_up()
        return self._num_tokens

    @property
    def sampler(self) -> Sampler:
        """The present rows' sampler. It reads and writes `history`."""
        self._catch_up()
        return self._sampler

    @property
    def laws(self) -> Laws:
        """What the choices of pathless rows depend on, as host tensors."""
        rows = [(sequence, sequence.sampling) for sequence in self.sequences]
        return Laws(
            torch.tensor([[sequence.key, sequence.num_tokens, params.top_k] for sequence, params in rows]),
            torch.tensor([[params.temperature, params.top_p, params.min_p] for _, params in rows], dtype=torch.float32),
        )

    @property
    def roots(self) -> torch.Tensor:
        """[B] int64: the last token of each row."""
        last = [(sequence.token_ids or sequence.request.prompt_ids)[-1] for sequence in self.sequences]
        return torch.tensor(last).to(self.device, non_blocking=True)

    @property
    def max_depths(self) -> torch.Tensor:
        """[B] int64: how deep each row's draft may go."""
        return torch.tensor([sequence.max_depth for sequence in self.sequences]).to(self.device)

    def add(self, sequence: Sequence) -> None:
        """Add a prefilled sequence, which takes part from the next step on."""
        self.sequences.append(sequence)
        self._note_change()

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; its row keeps its blocks."""
        self.sequences.remove(sequence)
        self._note_change()

    def _note_change(self) -> None:
        self._missing = None
        self.is_greedy = all(sequence.sampling.is_greedy for sequence in self.sequences)
        self.is_pathless = all(sequence.sampling.is_pathless and sequence.grammar is None for sequence in self.sequences)

    def commit(
        self, acceptance: Acceptance, logits: torch.Tensor, report: torch.Tensor
    ) -> tuple[list[Emission], list[int], list[list[float]]]:
        """Record a step's outcome: cache lengths, outputs, and later the tensors.

        A fault in one row ends only that row, with an error: logits that are not finite where a token had to be chosen, a
        grammar that cannot be followed, a tokenizer that fails.

        Args:
            logits: [B, N, V] the target's logits at every node.
            report: [B, 3 + K + 1 + F] from `report_of`.

        Returns:
            Each row's emission, how many of its drafts were accepted (those after its end included), and its F facts.
        """
        if self._missing is not None:
            self._missing.append(acceptance)
            if len(self._missing) > MAX_MISSING:
                self._missing = None
        logprobs = self._logprobs(acceptance, logits)
        width = acceptance.tokens.shape[1]
        emissions, accepted, facts = [], [], []
        # The step's only read from the device: everything the host must know, in one tensor.
        for b, (sequence, row) in enumerate(zip(self.sequences, report.tolist(), strict=True)):
            num_accepted, is_valid, num_drafts, *tokens = map(int, row[: 3 + width])
            accepted.append(num_accepted)
            facts.append(row[3 + width :])
            self.cache.advance(sequence.row, num_accepted + 1)
            sequence.num_target_passes += 1
            sequence.num_draft_tokens += num_drafts
            if not is_valid:
                sequence.fail(_without_choice(sequence, logits[b, acceptance.path[b, : num_accepted + 1]]))
            kept = _emit(sequence, tokens[: num_accepted + 1])
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
        """Write the steps since the last call into the tensors, or rebuild them.

        Tokens accepted after a row's end may be written too; no one reads them.
        """
        longest = max(sequence.num_tokens for sequence in self.sequences)
        if self._missing is None or longest + MAX_WALK > self._history.shape[1]:
            return self._rebuild(longest + HISTORY_GROWTH + MAX_WALK)
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
            Per row: each emitted token's log-probability, and the likeliest tokens with theirs, as many as any row asks
            for.
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
        """Rebuild the tensors and the sampler for the present rows, with room for `capacity` tokens each."""
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


def _without_choice(sequence: Sequence, logits: torch.Tensor) -> Exception:
    """Why a sequence had no token to choose after a path, by the target's logits [K + 1, V] along it."""
    place = f"after {len(sequence.token_ids)} tokens"
    if logits.float().amax(-1).isfinite().all():
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


def report_of(tree: CandidateTree, acceptance: Acceptance, facts: torch.Tensor | None) -> torch.Tensor:
    """All that the host reads of a step: [B, 3 + K + 1 + F] float64, which holds any token exactly.

    The columns are `num_accepted`, `is_valid`, the number of drafted nodes, `tokens`, `facts`.

    Args:
        facts: [B, F] float64, passed through for the planner.
    """
    num_drafted = tree.is_real.sum(1, keepdim=True) - 1
    columns = [acceptance.num_accepted[:, None], acceptance.is_valid[:, None], num_drafted, acceptance.tokens]
    outcome = torch.cat(columns, dim=1).double()
    return outcome if facts is None else torch.cat([outcome, facts], dim=1)
