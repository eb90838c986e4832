"""The target: a frozen Hugging Face causal LM, unmodified, that prefills prompts and verifies candidate trees.

The model runs with our attention function (`selfspec.model.attention`), `use_cache=False` and explicit positions, so none of
transformers' cache classes takes part, and with a ready-made 4-D mask, so that it builds none of its own.

Invariant, checked on every model at load: the logits of a tree's node equal the plain forward's on the node's own path.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from selfspec.cache.kv import CacheRow, KVCache, KVShape, Places
from selfspec.kernels.linear import MAX_ROWS
from selfspec.model.attention import ATTENTION_NAME, TreePass
from selfspec.model.fused_layer import fuse_layers
from selfspec.model.graphs import (
    CHUNK_BUCKETS,
    DEPTH_BUCKETS,
    NODE_BUCKETS,
    ROW_BUCKETS,
    Graphs,
    bucket,
    column_bucket,
    fill_rows,
)
from selfspec.model.layers import Resume, decoder_layers, with_layers
from selfspec.model.load import check_family, load_model
from selfspec.model.output import LogitShape
from selfspec.tree import CandidateTree, chain, from_parents

logger = logging.getLogger(__name__)

# A feature is named by transformers' numbering: k is the hidden state entering layer k (0 = embeddings, L = the last
# layer's output before the final norm), FINAL the one after the final norm.
FINAL = -1


@dataclass(frozen=True)
class Verification:
    """One pass's results: `logits [B, N, V]`, and the features asked for, each [B, N, E]."""

    logits: torch.Tensor
    features: dict[int, torch.Tensor]


@dataclass(frozen=True)
class GraphShape:
    """The shape that a batch of trees is padded to, so that one CUDA graph serves many of them."""

    num_rows: int
    num_nodes: int
    max_depth: int
    is_chain: bool

    @classmethod
    def of(cls, tree: CandidateTree, rows: list[CacheRow], *, has_exact_nodes: bool = False) -> GraphShape | None:
        """None where the batch or the tree is too large for a graph.

        Args:
            has_exact_nodes: no node may be added.
        """
        num_rows, num_nodes = bucket(len(rows), ROW_BUCKETS), bucket(tree.num_nodes, NODE_BUCKETS)
        if num_rows is None or num_nodes is None:
            return None
        num_nodes = tree.num_nodes if has_exact_nodes else num_nodes
        max_depth = bucket(tree.max_depth, DEPTH_BUCKETS)
        assert max_depth is not None
        return cls(num_rows, num_nodes, min(max_depth, num_nodes - 1), tree.is_chain)

    def pad(self, tree: CandidateTree) -> torch.Tensor:
        """The tree's tokens, parents and depths [3, B', N'], padded with empty nodes and the last row's likes."""
        B, N = tree.tokens.shape
        nodes = torch.stack([tree.tokens, tree.parents, tree.depths])
        if N < self.num_nodes:
            nodes = F.pad(nodes, (0, self.num_nodes - N), value=-1)
            nodes[2, :, N:] = 0
        if B < self.num_rows:
            nodes = torch.cat([nodes, nodes[:, -1:].expand(-1, self.num_rows - B, -1)], dim=1)
        return nodes


class Target:
    """A frozen causal LM behind the two calls of the decode loop, `prefill` and `verify`.

    Args:
        model: any decoder-only model whose attention follows transformers' AttentionInterface. Its attention
            implementation is switched to selfspec's, which outside a `Target` call behaves like `sdpa`.
        tokenizer: the model's; None for work on token ids only.
        name: path or Hub id, for reports.
        adapter: path or Hub id of the LoRA adapter that the model's weights hold, for reports.

    Raises:
        ValueError: the model's family or its attention cannot be served; the sentence names it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *, name: str = "", adapter: str | None = None) -> None:
        check_family(model.config)
        kind = model.config.model_type
        if getattr(model, "_is_stateful", False):
            raise ValueError(f"{kind} keeps a recurrent state instead of a KV cache: selfspec serves attention models only")
        if not model._can_set_attn_implementation():
            raise ValueError(f"{kind} does not follow transformers' attention interface, so its attention cannot be served")
        devices = sorted({str(weight.device) for weight in model.parameters()})
        if len(devices) > 1 or devices == ["meta"]:
            raise ValueError(
                f"the model's weights are on {' and '.join(devices)}: selfspec keeps one KV cache on one device: "
                'load them there whole, with device_map={"": DEVICE} or none'
            )
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path or kind
        self.adapter = adapter
        self.config = model.config.get_text_config()
        self.device = model.device
        self.dtype = model.dtype
        self.context_length: int = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        # What launches passes as a whole; None where each kernel is launched for itself.
        self.graphs: Graphs | None = None
        self._spare_cache: KVCache | None = None
        # Nodes of all rows in one pass, up to which a row's bits do not depend on their number.
        self.max_rows = sys.maxsize
        self.kv_shape: KVShape
        self.vocab_size: int
        self._adopt()
        if self.device.type == "cuda":
            self.graphs = Graphs(self.device)
            self.max_rows = MAX_ROWS

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        adapter: str | Path | None = None,
        use_packing: bool = True,
    ) -> Target:
        """Load a target from a folder or the Hub; see `selfspec.model.load.load_model` for the arguments and errors."""
        model, tokenizer = load_model(
            source, dtype=dtype, device=device, revision=revision, adapter=adapter, use_packing=use_packing
        )
        return cls(model, tokenizer, name=str(source), adapter=None if adapter is None else str(adapter))

    @property
    def num_layers(self) -> int:
        return self.kv_shape.num_layers

    @cached_property
    def logit_shape(self) -> LogitShape:
        """What the model does to its LM head's products (see `LogitShape`).

        Raises:
            ValueError: something that no head can imitate.
        """
        return LogitShape.of(self.model)

    def logits_of(self, final: torch.Tensor) -> torch.Tensor:
        """The model's own logits [..., V] from the hidden states [..., E] after its final norm."""
        return self.logit_shape(self.model.get_output_embeddings()(final))

    def new_cache(self, *, block_size: int = 16, max_tokens: int | None = None) -> KVCache:
        """An empty KV cache of this target's shape."""
        return KVCache(self.kv_shape, dtype=self.dtype, device=self.device, block_size=block_size, max_tokens=max_tokens)

    @contextmanager
    def borrowed_cache(self) -> Iterator[KVCache]:
        """An empty KV cache for a while; on a GPU it is kept for the next, with all that was captured for its addresses."""
        cache, self._spare_cache = self._spare_cache or self.new_cache(), None
        try:
            yield cache
        finally:
            if self.device.type == "cuda" and not cache.num_used_blocks:
                self._spare_cache = cache

    def agreed(self, numbers: Sequence[float]) -> list[float]:
        """The numbers themselves; where processes share the model (`tp_plan`), those of the first, the same for all."""
        mesh = getattr(self.model, "_device_mesh", None)
        if mesh is None:
            return list(numbers)
        group = (mesh["tp"] if mesh.mesh_dim_names else mesh).get_group()
        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        torch.distributed.broadcast(shared, group=group, group_src=0)
        return shared.tolist()

    def most_nodes(self, num_rows: int) -> int:
        """The most nodes of a tree, 1 at least, that `num_rows` rows of a pass may have each, lest its bits be others."""
        padded = None if self.graphs is None else bucket(num_rows, ROW_BUCKETS)
        if padded is None:
            return max(self.max_rows // num_rows, 1)
        # A graph's rows and nodes are filled up.
        return max(size for size in NODE_BUCKETS if size == 1 or size * padded <= self.max_rows)

    def encode(self, prompt: str | Sequence[dict[str, str]]) -> list[int]:
        """Token ids of raw text, or of chat messages through the chat template with the assistant's header open."""
        if self.tokenizer is None:
            raise ValueError("this target has no tokenizer: pass token ids")
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt).input_ids)
        if not self.tokenizer.chat_template:
            raise ValueError(f"{self.name} has no chat template: pass the prompt as raw text")
        encoded = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    @torch.inference_mode()
    def prefill(
        self,
        token_ids: torch.Tensor,
        row: CacheRow,
        cache: KVCache,
        *,
        features: Sequence[int] = (),
        chunk_size: int = 512,
    ) -> dict[int, torch.Tensor]:
        """Commit `token_ids [T]` to a row's prefix, a chunk at a time; returns the features asked for, each [1, T, E].

        Chunks are of at most `max_rows` tokens: however a text is cut, or its beginning shared, its KV has the same bits.
        """
        if not len(token_ids):
            nothing = torch.zeros(1, 0, self.config.hidden_size, dtype=self.dtype, device=self.device)
            return dict.fromkeys(features, nothing)
        parts: list[dict[int, torch.Tensor]] = []
        for tokens in token_ids.split(min(chunk_size, self.max_rows)):
            parts.append(self._enter(chain(tokens[:1], tokens[None, 1:]), row, cache, features))
            cache.advance(row, len(tokens))
        if self.graphs is not None:
            # Chunks are padded.
            cache.trim(row)
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in features}

    def _enter(self, tree: CandidateTree, row: CacheRow, cache: KVCache, features: Sequence[int]) -> dict[int, torch.Tensor]:
        """Store one chunk of a prompt; by a graph, padded, where there is room for it."""
        size = bucket(tree.num_nodes, CHUNK_BUCKETS)
        if self.graphs is None or size is None or not cache.can_reserve([row], size):
            return self._forward(tree, [row], cache, features, logits_to_keep=1).features

        def run(places: Places, padded: CandidateTree) -> tuple[torch.Tensor, ...]:
            with self._taps(features) as taken:
                self.run(self.model, padded, places, cache, logits_to_keep=1)
            return tuple(taken[name] for name in features)

        key, shape = ("prefill", tuple(features)), GraphShape(1, size, size - 1, is_chain=True)
        taken = self.replay(key, run, tree, [row], cache, shape, num_kept=0)
        return {name: each[:, : tree.num_nodes].clone() for name, each in zip(features, taken, strict=True)}

    @torch.inference_mode()
    def verify(
        self, tree: CandidateTree, rows: list[CacheRow], cache: KVCache, *, features: Sequence[int] = ()
    ) -> Verification:
        """One forward over every node of a batch of trees; the nodes' KV lands in the rows' scratch slots."""
        shape = None if self.graphs is None else GraphShape.of(tree, rows)
        if shape is None:
            return self._forward(tree, rows, cache, features, logits_to_keep=0)

        def run(places: Places, padded: CandidateTree) -> tuple[torch.Tensor, ...]:
            verification = self.verify_at(padded, places, cache, features=features)
            return verification.logits, *verification.features.values()

        key = ("verify", tuple(features))
        B, N = tree.tokens.shape
        logits, *taken = (each[:B, :N] for each in self.replay(key, run, tree, rows, cache, shape, num_kept=0))
        return Verification(logits, dict(zip(features, taken, strict=True)))

    def verify_at(
        self, tree: CandidateTree, places: Places, cache: KVCache, *, features: Sequence[int] = ()
    ) -> Verification:
        """`verify` of rows that have the room, by tensors alone: what a CUDA graph captures."""
        with self._taps(features) as taken:
            output = self.run(self.model, tree, places, cache)
        return Verification(output.logits, {name: taken[name] for name in features})

    def replay(
        self,
        key: Hashable,
        function: Callable[..., tuple[torch.Tensor, ...]],
        tree: CandidateTree,
        rows: list[CacheRow],
        cache: KVCache,
        shape: GraphShape,
        *,
        extra: Sequence[torch.Tensor] = (),
        num_kept: int | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """`function` of where the rows lie, of the tree and of `extra`, padded to a graph's shape, as a CUDA graph.

        Args:
            key: with the shape and the cache, all that the function depends on beside its arguments.
            extra: tensors [B, ...] on the device.
            num_kept: as in `Graphs`.
        """
        assert self.graphs is not None
        # Rows that are filled up with do what the last one does: the same bits to the same places.
        rows = rows + [rows[-1]] * (shape.num_rows - len(rows))
        cache.reserve(rows[: len(tree.tokens)], shape.num_nodes)
        numbers = cache.pack(rows, column_bucket(max(len(row.blocks) for row in rows)))

        extra = [fill_rows(each, shape.num_rows) for each in extra]

        def body(numbers: torch.Tensor, nodes: torch.Tensor, *extra: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tokens, parents, depths = nodes
            padded = CandidateTree(tokens, parents, depths, max_depth=shape.max_depth, is_chain=shape.is_chain)
            return function(Places.unpack(numbers), padded, *extra)

        return self.graphs((key, shape, cache.serial), body, (numbers, shape.pad(tree), *extra), num_kept=num_kept)

    def hidden_states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, features: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        """Hidden states of plain rows, as training needs them: each [B, T, E], without gradients.

        Positions [B, T] that start over begin a new text, which does not see those before it in its row.
        """
        with torch.no_grad(), self._taps(features) as taken:
            self.model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return taken

    def truncated(self, num_layers: int) -> Target:
        """A target of this one's first `num_layers` layers, final norm and LM head; every weight is shared."""
        if not 1 <= num_layers < self.num_layers:
            raise ValueError(f"truncated:{num_layers} is out of range: {self.name} has {self.num_layers} layers")
        layers = list(decoder_layers(self.model)[1])[:num_layers]
        model = with_layers(self.model, layers, range(num_layers))
        return Target(model, self.tokenizer, name=f"{self.name}[:{num_layers}]")

    @torch.inference_mode()
    def extend(self, nodes: CandidateTree, rows: list[CacheRow], cache: KVCache, num_new: int) -> torch.Tensor:
        """Logits [B, num_new, V] of the last nodes; the ones before them are in the rows' scratch slots already."""
        shape = None if self.graphs is None else GraphShape.of(nodes, rows, has_exact_nodes=True)
        if shape is None:
            return self.forward(self.model, nodes, rows, cache, num_new=num_new).logits

        def run(places: Places, padded: CandidateTree) -> tuple[torch.Tensor, ...]:
            return (self.run(self.model, padded, places, cache, num_new=num_new).logits,)

        (logits,) = self.replay(("extend", num_new), run, nodes, rows, cache, shape, num_kept=0)
        return logits[: len(rows)]

    def forward(
        self,
        model: nn.Module,
        tree: CandidateTree,
        rows: list[CacheRow],
        cache: KVCache,
        *,
        num_new: int | None = None,
        **options: Any,
    ) -> Any:
        """What `model`, this target's or a part of it, returns for a tree's last `num_new` nodes (all by default)."""
        cache.reserve(rows, tree.num_nodes)
        return self.run(model, tree, cache.locate(rows), cache, num_new=num_new, **options)

    def run(
        self,
        model: nn.Module,
        tree: CandidateTree,
        places: Places,
        cache: KVCache,
        *,
        num_new: int | None = None,
        **options: Any,
    ) -> Any:
        """`forward` of rows that have the room, by tensors alone."""
        layout, write_slots = cache.layout(places, tree, num_new)
        new = slice(0 if num_new is None else tree.num_nodes - num_new, None)
        return model(
            input_ids=tree.tokens[:, new].clamp(min=0),
            position_ids=(layout.lengths[:, None] + tree.depths[:, new]).clamp(max=self.context_length - 1),
            attention_mask=self._mask,
            use_cache=False,
            tree_pass=TreePass(cache, layout, write_slots),
            **options,
        )

    def _forward(
        self,
        tree: CandidateTree,
        rows: list[CacheRow],
        cache: KVCache,
        features: Sequence[int],
        logits_to_keep: int,
    ) -> Verification:
        with self._taps(features) as taken:
            output = self.forward(self.model, tree, rows, cache, logits_to_keep=logits_to_keep)
        return Verification(output.logits, taken)

    @contextmanager
    def _taps(self, features: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Collect hidden states by hooks that live for one forward."""
        taken: dict[int, torch.Tensor] = {}
        if not features:
            yield taken
            return
        layers = decoder_layers(self.model)[1]
        handles = []

        def keep(name: int, hidden: Any) -> None:
            taken[name] = hidden[0] if isinstance(hidden, tuple) else hidden

        for name in features:
            if name == FINAL:
                hook = lambda module, args, output, name=name: keep(name, output.last_hidden_state)  # noqa: E731
                handles.append(self.model.base_model.register_forward_hook(hook))
            elif name == len(layers):
                hook = lambda module, args, output, name=name: keep(name, output)  # noqa: E731
                handles.append(layers[-1].register_forward_hook(hook))
            elif 0 <= name < len(layers):
                hook = lambda module, args, kwargs, name=name: keep(  # noqa: E731
                    name, args[0] if args else kwargs["hidden_states"]
                )
                handles.append(layers[name].register_forward_pre_hook(hook, with_kwargs=True))
            else:
                raise ValueError(f"feature {name} does not exist: {self.name} has hidden states 0 to {len(layers)}")
        try:
            yield taken
        finally:
            for handle in handles:
                handle.remove()
        if FINAL in features and FINAL not in taken:
            kind = self.model.config.model_type
            raise ValueError(f"{kind} does not show its last hidden state: a head that reads it cannot serve this target")

    @torch.inference_mode()
    def _adopt(self) -> None:
        """Switch the attention over, learn the KV shape, and check a tree pass against the plain forward."""
        kind = self.model.config.model_type
        limit = min(self.config.vocab_size, 64)
        tokens = (torch.arange(6, device=self.device) * 7 + 3) % limit
        # Far enough for a layer without positions to tell itself from one with them.
        prefix = (torch.arange(min(96, self.context_length // 2), device=self.device) * 11 + 5) % limit
        # The formula as the modeling file writes it: sdpa of older transformers leaves soft-caps out.
        self.model.set_attn_implementation("eager")
        texts = (tokens, torch.cat([prefix, tokens[3:]]))
        plain, plain_far = (self.model(input_ids=ids[None], use_cache=False).logits[0, -3:].float() for ids in texts)
        self.vocab_size = plain.shape[-1]
        self.model.set_attn_implementation(ATTENTION_NAME)

        probe = TreePass()
        positions = torch.arange(6, device=self.device)[None]
        self.model(
            input_ids=tokens[None], position_ids=positions, attention_mask=self._mask, use_cache=False, tree_pass=probe
        )
        shapes = set(probe.shapes.values())
        if sorted(probe.shapes) != list(range(self.config.num_hidden_layers)):
            raise ValueError(
                f"{kind} routes {len(probe.shapes)} of {self.config.num_hidden_layers} layers through the attention "
                "interface, so it cannot be served"
            )
        if len(shapes) != 1:
            raise ValueError(
                f"{kind} has key-value states of several shapes ({sorted(shapes)}), which selfspec does not serve"
            )
        self.kv_shape = KVShape(self.config.num_hidden_layers, *shapes.pop())

        # Root, its child, a sibling that nobody may see, and the child's child.
        nodes = torch.stack([tokens[3], tokens[4], (tokens[5] + 1) % limit, tokens[5]])[None]
        tree = from_parents(nodes, torch.tensor([[-1, 0, 0, 1]], device=self.device))

        def served(prefix: torch.Tensor) -> torch.Tensor:
            cache, row = self.new_cache(), CacheRow()
            self.prefill(prefix, row, cache)
            return self.verify(tree, [row], cache).logits[0, [0, 1, 3]].float()

        gap = _gap(served(tokens[:3]), plain)
        # Float32 agrees to about 1e-6. Low precision rounds differently along two paths, and experts may switch.
        if not gap < (1e-3 if self.dtype == torch.float32 else 0.2):
            raise ValueError(
                f"{kind} gives other logits in a tree pass than alone (relative gap {gap:.2g}): it cannot be served"
            )
        own = served(prefix)
        if (undo := fuse_layers(list(decoder_layers(self.model)[1]), probe.options)) is None:
            return
        # Two forms that round at other places are as far apart as this model lets rounding grow.
        most = 1e-4 if self.dtype == torch.float32 else max(0.02, 2 * _gap(own, plain_far))
        if not (gap := _gap(served(prefix), own)) < most:
            undo()
            logger.warning("%s: fused layers give other logits (relative gap %.2g), so its own run", kind, gap)


class SplitTarget:
    """A target cut at a layer: the layers before it run alone, and the rest goes on from what they gave.

    Args:
        exit_layer: E, the first layer of the rest.

    Raises:
        ValueError: this family's two parts don't give what the whole gives.
    """

    def __init__(self, target: Target, exit_layer: int) -> None:
        layers = list(decoder_layers(target.model)[1])
        E = exit_layer
        self.target = target
        self.exit_layer = E
        self._first = with_layers(target.model, layers[:E], range(E), norm=nn.Identity()).base_model
        self._resume = Resume(layers[E - 1])
        self._rest = with_layers(target.model, [self._resume, *layers[E:]], range(E - 1, len(layers)))
        self._check()

    @torch.inference_mode()
    def enter(self, nodes: CandidateTree, rows: list[CacheRow], cache: KVCache, num_new: int) -> torch.Tensor:
        """Hidden states [B, num_new, E] entering layer E at the last nodes, whose KV of the layers before is stored."""
        return self.target.forward(self._first, nodes, rows, cache, num_new=num_new).last_hidden_state

    @torch.inference_mode()
    def resume(self, tree: CandidateTree, rows: list[CacheRow], cache: KVCache, hidden: torch.Tensor) -> Verification:
        """`verify` for a tree whose every node went through `enter` and lies in its slot: `hidden` [B, N, E] is theirs."""
        self._resume.hidden = hidden
        output = self.target.forward(self._rest, tree, rows, cache)
        self._resume.hidden = None
        return Verification(output.logits, {self.exit_layer: hidden})

    def _check(self) -> None:
        target = self.target
        tokens = (torch.arange(4, device=target.device) * 5 + 2) % min(target.config.vocab_size, 64)
        tree = from_parents(tokens[None], torch.tensor([[-1, 0, 0, 1]], device=target.device))
        cache, rows = target.new_cache(), [CacheRow()]
        whole = target.verify(tree, rows, cache).logits.float()
        cut = self.resume(tree, rows, cache, self.enter(tree, rows, cache, tree.num_nodes)).logits.float()
        gap = (cut - whole).norm() / whole.norm()
        if not gap < 1e-3:
            raise ValueError(
                f"{target.name} gives other logits when layer {self.exit_layer} resumes from stored states (relative gap "
                f"{gap:.2g}): its early-exit heads cannot be served"
            )


def _gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative to the norm."""
    return float((ours - theirs).norm() / theirs.norm())


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """The ids at which the model ends: generation config first, as in transformers' `generate`."""
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()
