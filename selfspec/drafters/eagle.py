"""EAGLE: a one-layer head drafts a candidate tree from the target's features (https://arxiv.org/abs/2406.16858).

The head has one layer of keys and values in the target's cache, in the same slots. Invariant: with the root at position T,
a tree grows from entries 0 … T - 1, each computed from the target's features (`selfspec.heads.eagle` says what an entry
pairs). A layer's keys and values do not depend on its attention, so a pass of the target ends with those of the tokens that
it committed, and nothing more. Entry T - 1 carries the root's embedding. A draft begins with the whole layer on it; its
logits give the first drafts. Drafted nodes are scratch entries after it: a node of depth d is entry T - 1 + d, and its
hidden input is the output of its parent's entry.

Where a row begins with another text's blocks, their last entry carries that text's next token. It can only make a draft
worse.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from selfspec.cache.kv import KVCache, KVShape, Places, SideLayer
from selfspec.cache.rows import ROOT
from selfspec.drafters.fused_eagle import EaglePass, Growth
from selfspec.drafters.growth import LayerPass, as_tensors, from_tensors, grow, over_nodes, tree_shapes
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.kernels.tree_attention import tree_attention
from selfspec.loop.drafter import DefaultShape, Drafter, DraftShape, Observed, Proposal
from selfspec.loop.planner import Shape
from selfspec.model.layers import private_copy
from selfspec.model.load import lay_out
from selfspec.model.output import LogitShape
from selfspec.model.stored_linear import StoredLinear
from selfspec.model.target import Target
from selfspec.tree import CandidateTree, chain

if TYPE_CHECKING:
    from selfspec.loop.batch import Batch

logger = logging.getLogger(__name__)

# For more rows than this trees are narrow.
MAX_WIDE_ROWS = 16


class EagleDrafter(Drafter):
    """Drafts with a trained EAGLE head. It uses a copy of the given head that shares the weights.

    Args:
        num_draft_tokens: depth of the tree.
        num_nodes: most nodes of the tree, root included.
        width: nodes expanded at each depth, and children considered for each.
    """

    is_costly = True
    is_resident = True
    default_shape = DefaultShape(cpu=DraftShape(4, 8, 2), gpu=DraftShape(6, 16, 4))

    def __init__(
        self,
        target: Target,
        head: EagleHead | Eagle1Head,
        *,
        num_draft_tokens: int | None = None,
        num_nodes: int | None = None,
        width: int | None = None,
        name: str = "eagle",
    ) -> None:
        shape = self.default_shape.on(target.device)
        self.name = name
        self._target = target
        self.features = head.features
        self.block_names = (("eagle", self.graph_key),)
        self.num_draft_tokens = num_draft_tokens or shape.num_draft_tokens
        self.num_nodes = num_nodes or shape.num_nodes
        self.width = width or shape.width
        # Products with the target's LM head become logits as the target's own do.
        has_own_output = isinstance(head, EagleHead) and head.lm_head is not None
        self._logit_shape = LogitShape() if has_own_output else target.logit_shape
        own = private_copy(head).to(target.device, target.dtype)
        self._draft_ids = own.draft_ids
        lm_head = target.model.get_output_embeddings()
        look_up = lm_head.rows if isinstance(lm_head, StoredLinear) else None
        layers = nn.ModuleDict({"head": own, "output": own.output_layer(lm_head, look_up)})
        lay_out(layers, may_round=True)
        self.head = own
        self._output_layer = layers["output"]
        self._embed = target.model.get_input_embeddings()
        config = head.config
        self._kv_shape = KVShape(1, config.num_kv_heads, config.head_dim, config.head_dim)
        self._scaling = config.head_dim**-0.5
        self._pass: EaglePass | None = None
        if EaglePass.is_common(own, self._output_layer):
            assert isinstance(own, EagleHead)
            self._pass = EaglePass(own, self._output_layer, self._embed)
            self._check_pass()

    def shapes(self, num_rows: int) -> list[Shape]:
        return tree_shapes(self.num_draft_tokens, self._width_for(num_rows), self.num_nodes)

    def _width_for(self, num_rows: int) -> int:
        """Many rows have few nodes each, so they need fewer candidates."""
        return self.width if num_rows <= MAX_WIDE_ROWS else min(self.width, 2)

    def attach(self, cache: KVCache) -> None:
        self._side(cache)
        self._hidden(cache)

    def _side(self, cache: KVCache) -> SideLayer:
        return cache.side(self, self._kv_shape)

    def _hidden(self, cache: KVCache) -> torch.Tensor:
        """[S + 1, E]: by slot, the fused feature of the last token before the root."""
        return cache.state.owned(self, self.head.config.target.hidden_size, cache.keys.dtype)

    def num_scratch(self, num_draft_tokens: int) -> int:
        return self.width * num_draft_tokens

    def observe(self, cache: KVCache, observed: Observed) -> None:
        """Store the committed tokens' keys and values, and the feature from which each row's next draft starts."""
        entries = observed.entries
        assert entries is not None
        fused = self.head.fuse([observed.features[name][None] for name in self.features])[0, entries.nodes]  # [X, E]
        self._store(cache, fused[None], entries.next_ids[None], entries.positions[None], entries.slots)
        self._hidden(cache)[entries.owners] = fused[entries.last]

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        cache, depth, width = batch.cache, num_draft_tokens, self._width_for(len(batch))
        if depth == 0:
            return Proposal(chain(batch.roots))

        def draft(slots: torch.Tensor, places: Places) -> tuple[torch.Tensor, ...]:
            roots = cache.state.integers[slots, ROOT]
            return as_tensors(self._draft(cache, places, roots, self._hidden(cache)[slots], depth, width))

        key = ("eagle", self.graph_key, depth, width, self.num_nodes)
        return Proposal(from_tensors(self._target.passes.draft(key, draft, batch.rows, cache), depth=depth))

    def _draft(
        self, cache: KVCache, places: Places, roots: torch.Tensor, hidden: torch.Tensor, depth: int, width: int
    ) -> CandidateTree:
        """Grow a tree. A function of tensors.

        Args:
            places: where the rows lie.
            roots: [B].
            hidden: [B, E], from which the drafts start.
        """
        products, fed = self._enter(cache, chain(roots), _before(places), hidden[:, None], 1)
        run: LayerPass
        if self._pass is not None:
            run = Growth(self._pass, cache, self._side(cache), places, fed, depth=depth, width=width)
        else:

            @over_nodes
            def run(nodes: CandidateTree, num_new: int, parent: torch.Tensor) -> torch.Tensor:
                nonlocal fed
                hidden = fed.gather(1, parent[:, :, None].expand(-1, -1, fed.shape[-1]))
                products, fed = self._enter(cache, nodes, places, hidden, num_new)
                return products

        def shaped(tokens: torch.Tensor, parent: torch.Tensor) -> torch.Tensor:
            return self._logit_shape(run(tokens, parent))

        shape = {"depth": depth, "width": width, "num_nodes": self.num_nodes}
        tree = grow(roots, self._logit_shape(products), shaped, token_ids=self._draft_ids, **shape)
        # A prompt of one token has no feature to start from.
        return tree.limit_depth(torch.where(places.lengths > 0, depth, 0))

    def _enter(
        self, cache: KVCache, nodes: CandidateTree, places: Places, hidden: torch.Tensor, num_new: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over the last `num_new` of `nodes`, which become entries in the rows' scratch slots.

        Args:
            hidden: [B, num_new, E], the entries' hidden inputs.

        Returns:
            The output layer's products [B, num_new, V], and the states to feed back [B, num_new, E].
        """
        side = self._side(cache)
        layout, slots = cache.layout(places, nodes, num_new)
        new = slice(nodes.num_nodes - num_new, None)
        tokens = nodes.tokens[:, new].clamp(min=0)
        positions = layout.lengths[:, None] + nodes.depths[:, new]
        if self._pass is not None:
            return self._pass(hidden, tokens, self._pass.angles(positions, hidden.dtype), layout, slots, side)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            _keep(side, slots, key, value)
            return tree_attention(query, side.keys, side.values, layout, self._scaling)

        normed, fed = self.head(hidden, self._embed(tokens), positions, attend)
        return self._output_layer(normed), fed

    def _store(
        self, cache: KVCache, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store the keys and values of entries, which need no attention.

        Args:
            hidden: [1, X, E], their fused features.
            tokens, positions: [1, X], the tokens after them and their positions.
            slots: [X].
        """
        side = self._side(cache)
        if self._pass is not None:
            return self._pass.store(hidden, tokens, self._pass.angles(positions, hidden.dtype), slots, side)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            _keep(side, slots, key, value)
            return query.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2)

        self.head(hidden, self._embed(tokens), positions, attend)

    @torch.inference_mode()
    def _check_pass(self) -> None:
        """Drop the fused pass if it differs from the head's own forward, because a head may have parts unknown to it."""
        fused = self._pass
        generator = torch.Generator().manual_seed(0)
        size = self.head.config.target.hidden_size
        cache = self._target.new_cache()
        hidden = torch.randn(1, 5, size, generator=generator).to(cache.device, cache.keys.dtype)
        tokens = torch.arange(5, device=cache.device)[None] % self._target.config.vocab_size
        entries, row = chain(tokens[:, 0], tokens[:, 1:]), cache.open_row()
        places = cache.place([row], 5)
        ours = self._enter(cache, entries, places, hidden, 5)[0].float()
        self._pass = None
        own = self._enter(cache, entries, places, hidden, 5)[0].float()
        # In low precision the two round at different places.
        gap = float((ours - own).norm() / own.norm())
        if gap < (1e-3 if hidden.dtype == torch.float32 else 5e-2):
            self._pass = fused
            return
        logger.warning(
            "%s: the fused pass gives different logits (relative gap %.2g), so the head's own pass runs", self.name, gap
        )


def _before(places: Places) -> Places:
    """The rows without their last token, whose entry the head computes again as a draft begins."""
    rows = None if places.rows is None else [replace(row, length=max(row.length - 1, 0)) for row in places.rows]
    return Places((places.lengths - 1).clamp(min=0), places.block_tables, rows)


def _keep(side: SideLayer, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store keys and values [B, G, N, D] in slots [B * N]."""
    side.keys.index_copy_(0, slots, key.transpose(1, 2).flatten(0, 1))
    side.values.index_copy_(0, slots, value.transpose(1, 2).flatten(0, 1))
