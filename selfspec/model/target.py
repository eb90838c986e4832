"""The target: a frozen Hugging Face causal LM, which runs the stages prefill and verify.

The model runs with our attention function (`selfspec.model.attention`), `use_cache=False`, explicit positions and a
ready-made 4-D mask, so it builds no cache and no mask of its own.

Invariant, checked on every model at load: a node's logits equal those of the plain forward over the node's own path.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache, KVShape, Places
from selfspec.model.attention import TreePass, text_options
from selfspec.model.checks import adopt, check_model, fixed_context
from selfspec.model.default_target import resolve_source
from selfspec.model.flat import FlatNodes
from selfspec.model.layers import decoder_layers, with_layers
from selfspec.model.load import load_model
from selfspec.model.memory import release_free_memory
from selfspec.model.output import LogitShape
from selfspec.model.passes import Passes
from selfspec.model.text_side import TextSide
from selfspec.tree import CandidateTree, chain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
class FlatOutput:
    """One flat pass's results: `logits [F, V]` of its tree nodes, and the features asked for, each [F + P, E]."""

    logits: torch.Tensor
    features: dict[int, torch.Tensor]


class Target(TextSide):
    """A frozen causal LM with the two calls that the decode loop needs, `prefill` and `verify`.

    Args:
        model: any decoder-only model whose attention follows transformers' AttentionInterface. Its attention
            implementation is switched to selfspec's, which outside a `Target` call behaves like `sdpa`.
        tokenizer: the model's; None for work on token ids only.
        name: path or Hub id, for reports.
        adapter: path or Hub id of the LoRA adapter that was merged into the weights, for reports.

    Attributes:
        passes: runs the passes of the model and of its drafters.
        drafters: those that were asked for by name, which stay loaded with the target.
        lock: held while a pass runs. Threads that share a target take turns, a step at a time; for many callers at once
            `selfspec.engine.SpecEngine` is faster.

    Raises:
        ValueError: the model's family or its attention cannot be served; the sentence names it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *, name: str = "", adapter: str | None = None) -> None:
        check_model(model)
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path or model.config.model_type
        self.adapter = adapter
        self.chat_template_kwargs = {}
        self.config = model.config.get_text_config()
        self.device = model.device
        self.dtype = model.dtype
        self.context_length = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        longest, kind = fixed_context(self.config)
        if longest is not None and longest < self.context_length:
            logger.warning(
                "%s: its %s rotary table changes beyond %d tokens, so contexts are limited to that",
                self.name,
                kind,
                longest,
            )
            self.context_length = longest
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        # A ready-made mask, because the model would otherwise build its own.
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        self.lock = threading.RLock()
        self.drafters: dict[str, Any] = {}
        self._spare_cache: KVCache | None = None
        # Nothing is captured for the checks, which compare single passes.
        self.passes = Passes(device=self.device)
        self.kv_shape: KVShape
        self.kv_shape, self.vocab_size = adopt(self)
        # A resized model's configuration may name ends that it has no logits for.
        self.eos_token_ids = tuple(token for token in self.eos_token_ids if 0 <= token < self.vocab_size)
        self.passes = Passes.on(self.device)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        adapter: str | Path | None = None,
        use_packing: bool = True,
    ) -> Target:
        """Load a target from a folder or the Hub; see `selfspec.model.load.load_model` for the arguments and errors.

        Args:
            source: folder or Hub id; `smollm2` is the default target, which `selfspec fetch` makes.
        """
        source = resolve_source(source)
        model, tokenizer = load_model(
            source, dtype=dtype, device=device, revision=revision, adapter=adapter, use_packing=use_packing
        )
        target = cls(model, tokenizer, name=source, adapter=None if adapter is None else str(adapter))
        # The checks' passes over a whole text are larger than those of decoding.
        release_free_memory()
        return target

    def __repr__(self) -> str:
        adapter = f", adapter={self.adapter!r}" if self.adapter else ""
        return (
            f"Target({self.name!r}, {self.config.model_type}, num_layers={self.num_layers}, vocab_size={self.vocab_size}, "
            f"context_length={self.context_length}, {str(self.dtype).removeprefix('torch.')} on {self.device}{adapter})"
        )

    @property
    def num_layers(self) -> int:
        return self.kv_shape.num_layers

    @cached_property
    def _layers(self) -> nn.ModuleList:
        # Kept, because a search through the whole model in every pass would take milliseconds.
        return decoder_layers(self.model)[1]

    @cached_property
    def logit_shape(self) -> LogitShape:
        """How the model turns its LM head's products into logits (see `LogitShape`).

        Raises:
            ValueError: in a way that selfspec does not know.
        """
        return LogitShape.of(self.model)

    @cached_property
    def logits_of(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """From hidden states [..., E] after the final norm to the model's own logits [..., V].

        Raises:
            ValueError: see `logit_shape`.
        """
        shape, output = self.logit_shape, self.model.get_output_embeddings()
        return lambda final: shape(output(final))

    def new_cache(
        self,
        shape: KVShape | None = None,
        *,
        block_size: int = 16,
        max_tokens: int | None = None,
        use_sharing: bool = False,
    ) -> KVCache:
        """An empty KV cache with this target's dtype and device, and with its shape unless another is given."""
        return KVCache(
            shape or self.kv_shape,
            dtype=self.dtype,
            device=self.device,
            block_size=block_size,
            max_tokens=max_tokens,
            use_sharing=use_sharing,
            is_captured=self.passes.is_captured,
        )

    @contextmanager
    def borrowed_cache(self) -> Iterator[KVCache]:
        """Lend an empty KV cache. With CUDA graphs the next borrower gets the same one, because they hold its addresses."""
        with self.lock:
            cache, self._spare_cache = self._spare_cache or self.new_cache(), None
        try:
            yield cache
        finally:
            if self.passes.is_captured and not cache.num_used_blocks:
                self._spare_cache = cache

    def agreed(self, numbers: Sequence[float]) -> list[float]:
        """The numbers themselves, or where processes share the model (`tp_plan`) the first process's numbers, for all."""
        mesh = getattr(self.model, "_device_mesh", None)
        if mesh is None:
            return list(numbers)
        group = (mesh["tp"] if mesh.mesh_dim_names else mesh).get_group()
        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        torch.distributed.broadcast(shared, group=group, group_src=0)
        return shared.tolist()

    @torch.inference_mode()
    def prefill(
        self,
        token_ids: torch.Tensor,
        row: CacheRow,
        cache: KVCache,
        *,
        features: Sequence[int] = (),
        chunk_size: int | None = None,
    ) -> dict[int, torch.Tensor]:
        """Commit `token_ids` [T] to a row's prefix, a chunk at a time; returns the features asked for, each [1, T, E].

        A text's KV has the same bits however the text is cut or shared.

        Args:
            chunk_size: the most tokens in a pass, `Passes.chunk_size` by default.
        """
        if not len(token_ids):
            nothing = torch.zeros(1, 0, self.config.hidden_size, dtype=self.dtype, device=self.device)
            return dict.fromkeys(features, nothing)
        parts: list[dict[int, torch.Tensor]] = []
        with self.lock:
            for tokens in token_ids.split(chunk_size or self.passes.chunk_size):
                parts.append(self._enter(chain(tokens[:1], tokens[None, 1:]), row, cache, features))
                cache.advance(row, len(tokens))
            # A padded chunk takes more blocks than its tokens need.
            cache.trim(row)
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in features}

    def _enter(self, tree: CandidateTree, row: CacheRow, cache: KVCache, features: Sequence[int]) -> dict[int, torch.Tensor]:
        """Store the KV of one chunk of T tokens; returns the features asked for, each [1, T, E]."""

        def enter(places: Places, tree: CandidateTree) -> tuple[torch.Tensor, ...]:
            with self._taps(features) as taken:
                self.run(self.model, tree, places, cache, logits_to_keep=1)
            return tuple(taken[name] for name in features)

        shape = self.passes.chunk_shape(tree.num_nodes, row, cache)
        taken = self.passes.run(("prefill", tuple(features)), enter, tree, [row], cache, shape=shape)
        return {name: each[:, : tree.num_nodes] for name, each in zip(features, taken, strict=True)}

    @torch.inference_mode()
    def verify(
        self, tree: CandidateTree, rows: list[CacheRow], cache: KVCache, *, features: Sequence[int] = ()
    ) -> Verification:
        """One forward over every node of B trees; the nodes' KV goes to the rows' scratch slots."""

        def verify(places: Places, tree: CandidateTree) -> tuple[torch.Tensor, ...]:
            verification = self.verify_at(tree, places, cache, features=features)
            return verification.logits, *verification.features.values()

        with self.lock:
            shape = self.passes.shape_of(tree, len(rows))
            results = self.passes.run(("verify", tuple(features)), verify, tree, rows, cache, shape=shape, num_kept=0)
        logits, *taken = (each[:, : tree.num_nodes] for each in results)
        return Verification(logits, dict(zip(features, taken, strict=True)))

    def verify_at(
        self, tree: CandidateTree, places: Places, cache: KVCache, *, features: Sequence[int] = ()
    ) -> Verification:
        """`verify` for rows that have the room already. A function of tensors."""
        with self._taps(features) as taken:
            output = self.run(self.model, tree, places, cache)
        return Verification(output.logits, {name: taken[name] for name in features})

    @torch.inference_mode()
    def extend(self, nodes: CandidateTree, rows: list[CacheRow], cache: KVCache, num_new: int) -> torch.Tensor:
        """Logits [B, num_new, V] of the last nodes [B, num_new]; those before them are in the scratch slots already."""

        def extend(places: Places, nodes: CandidateTree) -> tuple[torch.Tensor, ...]:
            return (self.run(self.model, nodes, places, cache, num_new=num_new).logits,)

        with self.lock:
            shape = self.passes.shape_of(nodes, len(rows), has_exact_nodes=True)
            (logits,) = self.passes.run(("extend", num_new), extend, nodes, rows, cache, shape=shape, num_kept=0)
        return logits

    def hidden_states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, features: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        """The features of plain rows, for training: each [B, T, E], without gradients.

        Args:
            input_ids: [B, T].
            position_ids: [B, T]. Where positions start over, a new text begins, which does not see the texts before it.
        """
        with torch.no_grad(), self.lock, self._taps(features) as taken:
            options = text_options(position_ids)
            self.model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **options)
        return taken

    def truncated(self, num_layers: int) -> Target:
        """A target with this one's first `num_layers` layers, final norm and LM head; every weight is shared."""
        if not 1 <= num_layers < self.num_layers:
            raise ValueError(f"truncated:{num_layers} is out of range: {self.label} has {self.num_layers} layers")
        layers = list(decoder_layers(self.model)[1])[:num_layers]
        model = with_layers(self.model, layers, range(num_layers))
        return Target(model, self.tokenizer, name=f"{self.name}[:{num_layers}]")

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
        """Run `model`, this target's or a part of it, over a tree's last `num_new` nodes [B, num_new] (all by default).

        The rows must have room for the tree. A function of tensors.
        """
        layout, write_slots = cache.layout(places, tree, num_new)
        new = slice(0 if num_new is None else tree.num_nodes - num_new, None)
        return model(
            input_ids=tree.tokens[:, new].clamp(min=0),
            position_ids=(layout.lengths[:, None] + tree.depths[:, new]).clamp(max=self.context_length - 1),
            attention_mask=self.mask,
            use_cache=False,
            tree_pass=TreePass(cache, layout, write_slots=write_slots),
            **options,
        )

    def run_flat(self, nodes: FlatNodes, cache: KVCache, *, features: Sequence[int] = ()) -> FlatOutput:
        """Run the model over the nodes of one pass, trees and chunks together. A function of tensors."""
        tree_pass = TreePass(cache, nodes.trees, nodes.chunks, write_slots=nodes.slots)
        # Only trees need logits; where there are none, the last token's cost least.
        kept: Any = slice(0, nodes.num_nodes) if nodes.num_nodes else 1
        with self._taps(features) as taken:
            output = self.model(
                input_ids=nodes.tokens[None],
                position_ids=nodes.positions.clamp(max=self.context_length - 1)[None],
                attention_mask=self.mask,
                use_cache=False,
                tree_pass=tree_pass,
                logits_to_keep=kept,
            )
        return FlatOutput(output.logits[0, : nodes.num_nodes], {name: taken[name][0] for name in features})

    @contextmanager
    def _taps(self, features: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Collect hidden states, each [B, N, E], by hooks that stay for one forward."""
        taken: dict[int, torch.Tensor] = {}
        if not features:
            yield taken
            return
        layers = self._layers
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
                raise ValueError(f"feature {name} does not exist: {self.label} has hidden states 0 to {len(layers)}")
        try:
            yield taken
        finally:
            for handle in handles:
                handle.remove()
        if FINAL in features and FINAL not in taken:
            kind = self.model.config.model_type
            raise ValueError(f"{kind} does not show its last hidden state: a head that reads it cannot serve this target")


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end an answer; the generation config comes first, as in transformers' `generate`."""
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()
