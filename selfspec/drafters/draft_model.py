"""Draft with a small model of the same vocabulary: a chain (https://arxiv.org/abs/2211.17192), or a tree.

The draft model is itself a `Target` with its own KV cache.

Invariant: for every row it has cached a prefix of the committed tokens. The next proposal's first pass enters the rest (one
token after a rejection, two after a fully accepted chain). Rolling back only shortens the prefix.

Deterministic drafts (the default) take the token that the *draft's* processed logits and the *target's* noise at that
position choose. Both choose the same token more often, the better draft and target agree. The noise depends only on seed and
position, so exactness does not depend on the draft. Sampled drafts are drawn with their own noise and verified by
`accept_sampled`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from selfspec.cache.blocks import CacheRow
from selfspec.drafters.growth import grow, over_nodes, tree_shapes
from selfspec.kernels.noise import Stream
from selfspec.loop.drafter import DefaultShape, Drafter, DraftShape, Outcome, Proposal
from selfspec.loop.planner import Shape
from selfspec.tree import CandidateTree, chain, spread

if TYPE_CHECKING:
    from selfspec.loop.batch import Batch
    from selfspec.loop.sequence import Sequence
    from selfspec.model.target import Target

logger = logging.getLogger(__name__)

# The most missing tokens that a proposal's first pass enters; if more are missing, they are prefilled before it.
CATCH_UP = 16


class DraftModelDrafter(Drafter):
    """Drafts with another causal LM.

    Args:
        draft: the draft model; its logits are cut or padded to the target's vocabulary size.
        vocab_size: the target's.
        is_sampled: draw the drafts and verify by speculative sampling. The output has the target's law, but it is no longer
            token for token what plain sampling gives with the same seed.
        width: nodes expanded at each depth of a greedy draft, and children considered for each; 1 drafts a chain. Rows that
            sample always get a chain, because its tokens can follow the target's own noise.
        num_nodes: most nodes of a tree, root included.
    """

    is_costly = True
    default_shape = DefaultShape(cpu=DraftShape(5, 16, 1), gpu=DraftShape(5, 16, 1))

    def __init__(
        self,
        draft: Target,
        vocab_size: int,
        *,
        num_draft_tokens: int | None = None,
        is_sampled: bool = False,
        width: int | None = None,
        num_nodes: int | None = None,
        name: str = "draft_model",
    ) -> None:
        shape = self.default_shape.on(draft.device)
        num_draft_tokens = shape.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens={num_draft_tokens} is not allowed: draft at least one token")
        self.name = name
        self.draft = draft
        self.vocab_size = vocab_size
        self.num_draft_tokens = num_draft_tokens
        self.is_sampled = is_sampled
        self.width = width or shape.width
        self.num_nodes = num_nodes or shape.num_nodes
        self._cache = draft.new_cache()
        self._rows: dict[Sequence, CacheRow] = {}

    def shapes(self, num_rows: int) -> list[Shape]:
        return tree_shapes(self.num_draft_tokens, self.width, self.num_nodes)

    def admit(self, sequence: Sequence, features: Mapping[int, torch.Tensor]) -> None:
        self._rows[sequence] = self._cache.open_row()

    def retire(self, sequence: Sequence) -> None:
        if (row := self._rows.pop(sequence, None)) is not None:
            self._cache.release(row)

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        K = num_draft_tokens
        if K == 0:
            return Proposal(chain(batch.roots))
        # The length of each row's text with its deepest useful draft, whatever room other rows have.
        ends = [s.num_tokens + min(K, s.max_depth) for s in batch.sequences]
        active = [b for b, end in enumerate(ends) if end <= self.draft.context_length]
        paused = tuple(b for b, end in enumerate(ends) if end > self.draft.context_length)
        for b in paused:
            if batch.sequences[b].num_paused_passes == 0:
                logger.warning(
                    "the text has outgrown the draft model's context of %d tokens: decoding it without drafts",
                    self.draft.context_length,
                )
        if not active:
            return Proposal(chain(batch.roots), paused=paused)
        num_set_up = self.draft.passes.num_set_up
        tree = self._draft(batch, active, K)
        return Proposal(tree, is_typical=self.draft.passes.num_set_up == num_set_up, paused=paused)

    def _draft(self, batch: Batch, active: list[int], depth: int) -> CandidateTree:
        """Chains or trees for the active rows, only roots for the others."""
        rows = [self._rows[batch.sequences[b]] for b in active]
        index = torch.tensor(active).to(batch.device)
        logits = self._catch_up(batch, active, rows)
        if self.width > 1 and batch.is_greedy and not self.is_sampled:
            tree = self._grow(batch.roots[index], logits, rows, depth)
            return spread(tree, batch.roots, index)
        drafts, probs = [], []
        for at in range(depth):
            token, draft_probs = self._choose(batch, logits, index, at)
            drafts.append(token)
            probs.append(draft_probs)
            if at + 1 < depth:
                logits = self.draft.verify(chain(token[index]), rows, self._cache).logits[:, 0]
                for row in rows:
                    self._cache.advance(row, 1)
        is_active = torch.zeros(len(batch), dtype=torch.bool, device=batch.device).index_fill_(0, index, True)
        tokens = torch.where(is_active[:, None], torch.stack(drafts, dim=1), -1)
        return chain(batch.roots, tokens, draft_probs=torch.stack(probs, dim=1) if self.is_sampled else None)

    def _grow(self, roots: torch.Tensor, logits: torch.Tensor, rows: list[CacheRow], depth: int) -> CandidateTree:
        @over_nodes
        def run(nodes: CandidateTree, num_new: int, parent: torch.Tensor) -> torch.Tensor:
            return fit_vocab(self.draft.extend(nodes, rows, self._cache, num_new), self.vocab_size)

        first = fit_vocab(logits, self.vocab_size)[:, None]
        return grow(roots, first, run, depth=depth, width=self.width, num_nodes=self.num_nodes)

    def commit(self, batch: Batch, proposal: Proposal, outcome: Outcome) -> None:
        """Drop the drafts that were not accepted, because the draft's prefix must not be longer than the target's.

        A tree's nodes were never in the prefix. The next proposal enters its accepted path.
        """
        for sequence in batch.sequences:
            row = self._rows[sequence]
            self._cache.rewind(row, min(row.length, sequence.row.length))

    def _catch_up(self, batch: Batch, active: list[int], rows: list[CacheRow]) -> torch.Tensor:
        """Enter the committed tokens that the draft has not seen; returns the logits [A, V] after each active row's root."""
        pending = []
        for b, row in zip(active, rows, strict=True):
            num_tokens = batch.sequences[b].num_tokens
            if num_tokens - row.length > CATCH_UP:
                self.draft.prefill(self._known(batch.history[b, row.length : num_tokens - 1]), row, self._cache)
            pending.append(num_tokens - row.length)
        width = max(pending)
        first = torch.tensor([row.length for row in rows]).to(batch.device)
        count = torch.tensor(pending).to(batch.device)
        offsets = torch.arange(width, device=batch.device)
        tokens = batch.history[torch.tensor(active).to(batch.device)].gather(1, first[:, None] + offsets)
        tokens = torch.where(offsets < count[:, None], self._known(tokens), -1)
        logits = self.draft.verify(chain(tokens[:, 0], tokens[:, 1:]), rows, self._cache).logits
        for row, num_tokens in zip(rows, pending, strict=True):
            self._cache.advance(row, num_tokens)
        return logits.gather(1, (count - 1)[:, None, None].expand(-1, 1, logits.shape[-1]))[:, 0]

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [...] with ids past the draft's vocabulary read as its last id, which can only make drafts worse.

        The target may have such ids, because its vocabulary may be padded further.
        """
        return tokens.clamp(max=self.draft.vocab_size - 1)

    def _choose(
        self, batch: Batch, logits: torch.Tensor, index: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's next draft [B], and for sampled drafts the distribution [B, V] it was drawn from.

        Args:
            logits: [A, V'] of the active rows.
            index: [A] the active rows' numbers.
        """
        fitted = logits.new_zeros(len(batch), self.vocab_size)
        fitted[index] = fit_vocab(logits, self.vocab_size)
        sampler = batch.sampler
        if self.is_sampled:
            processed = sampler.process(fitted, depth)
            token = sampler.draw(processed, depth, Stream.DRAFT)
            probs = processed.softmax(-1)
        else:
            token, probs = sampler.choose(fitted, depth), fitted
        sampler.record(token, depth)
        return token, probs


def fit_vocab(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Cut or pad draft logits [..., V'] to the target's [..., V]: equal tokenizers may come with differently padded V."""
    size = logits.shape[-1]
    if size >= vocab_size:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - size), value=-torch.inf)


def check_same_tokenizer(target: Any, draft: Any) -> None:
    """Refuse a draft model whose tokenizer gives other ids than the target's.

    Raises:
        ValueError: a tokenizer is missing, or they differ; the sentence names the first difference.
    """
    if target is None or draft is None:
        raise ValueError("a draft model needs the target's own tokenizer, and one of the two models has none")
    ours, theirs = target.get_vocab(), draft.get_vocab()
    by_id = sorted(ours.items(), key=lambda item: item[1])
    for token, token_id in by_id:
        if theirs.get(token) != token_id:
            raise ValueError(
                f"the draft model's tokenizer differs from the target's: token {token!r} has id {token_id} in the target "
                f"and {theirs.get(token, 'none')} in the draft; a draft model needs the target's own tokenizer"
            )
    extra = sorted(set(theirs) - set(ours), key=theirs.__getitem__)
    if extra:
        raise ValueError(
            f"the draft model's tokenizer differs from the target's: only the draft has token {extra[0]!r} "
            f"(id {theirs[extra[0]]}); a draft model needs the target's own tokenizer"
        )
    sample = "Hello, world! 12345 déjà vu\n\tx = [1, 2]  # 日本"
    ids = target(sample).input_ids, draft(sample).input_ids
    if ids[0] != ids[1]:
        raise ValueError(
            f"the draft model's tokenizer splits text differently from the target's ({ids[1][:8]}, not {ids[0][:8]} …); "
            "a draft model needs the target's own tokenizer"
        )
