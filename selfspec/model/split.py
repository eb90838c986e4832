"""A target cut at a layer: draft runs the layers before it, and verify runs the rest from their hidden states.

Invariant, checked when it is made: the two parts give the whole target's logits.
"""

from __future__ import annotations

import torch
from torch import nn

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache, Places
from selfspec.model.layers import Resume, decoder_layers, with_layers
from selfspec.model.target import Target, Verification
from selfspec.tree import CandidateTree, from_parents


class SplitTarget:
    """The two parts of a target.

    Args:
        exit_layer: the first layer of the second part, called layer E below.

    Raises:
        ValueError: the two parts do not give the whole target's logits.
    """

    def __init__(self, target: Target, exit_layer: int) -> None:
        layers = list(decoder_layers(target.model)[1])
        E = exit_layer
        self.target = target
        self.exit_layer = E
        self._first = with_layers(target.model, layers[:E], range(E), norm=nn.Identity()).base_model
        self._rest = with_layers(target.model, [Resume(layers[E - 1]), *layers[E:]], range(E - 1, len(layers)))
        self._check()

    @torch.inference_mode()
    def enter(self, nodes: CandidateTree, rows: list[CacheRow], cache: KVCache, num_new: int) -> torch.Tensor:
        """The hidden states [B, num_new, E] that enter layer E at the last nodes; the layers before E store their KV."""
        places = cache.place(rows, nodes.num_nodes)
        return self.target.run(self._first, nodes, places, cache, num_new=num_new).last_hidden_state

    @torch.inference_mode()
    def resume(self, tree: CandidateTree, places: Places, cache: KVCache, hidden: torch.Tensor) -> Verification:
        """`Target.verify_at` for a tree whose N nodes went through `enter` and lie in their slots.

        Args:
            hidden: [B, N, E], the nodes' states from `enter`.
        """
        output = self.target.run(self._rest, tree, places, cache, resume_from=hidden)
        return Verification(output.logits, {self.exit_layer: hidden})

    def _check(self) -> None:
        target = self.target
        tokens = (torch.arange(4, device=target.device) * 5 + 2) % min(target.config.vocab_size, 64)
        tree = from_parents(tokens[None], torch.tensor([[-1, 0, 0, 1]], device=target.device))
        cache, rows = target.new_cache(), [CacheRow()]
        whole = target.verify(tree, rows, cache).logits.float()
        hidden = self.enter(tree, rows, cache, tree.num_nodes)
        cut = self.resume(tree, cache.locate(rows), cache, hidden).logits.float()
        gap = (cut - whole).norm() / whole.norm()
        if not gap < 1e-3:
            raise ValueError(
                f"{target.name} gives different logits when layer {self.exit_layer} resumes from stored states "
                f"(relative gap {gap:.2g}): its early-exit heads cannot be served"
            )
