"""The target: a frozen Hugging Face causal LM, unmodified, that prefills prompts and verifies candidate trees.

The model runs with our attention function (`selfspec.model.attention`), `use_cache=False` and explicit positions, so none of
transformers' cache classes takes part, and with a ready-made 4-D mask, so that it builds none of its own.

Invariant, checked on every model at load: the logits of a tree's node equal the plain forward's on the node's own path.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from selfspec.cache.blocks import CacheRow
from selfspec.cache.kv import KVCache, KVShape, Places
from selfspec.model.attention import TreePass
from selfspec.model.checks import adopt, check_model
from selfspec.model.layers import decoder_layers, with_layers
from selfspec.model.load import load_model
from selfspec.model.output import LogitShape
from selfspec.model.passes import Passes
from selfspec.tree import CandidateTree, chain

# A feature is named by transformers' numbering: k is the hidden state entering layer k (0 = embeddings, L = the last
# layer's output before the final norm), FINAL the one after the final norm.
FINAL = -1


@dataclass(frozen=True)
class Verification:
    """One pass's results: `logits [B, N, V]`, and the features asked for, each [B, N, E]."""

    logits: torch.Tensor
    features: dict[int, torch.Tensor]


class Target:
    """A frozen causal LM behind the two calls of the decode loop, `prefill` and `verify`.

    Args:
        model: any decoder-only model whose attention follows transformers' AttentionInterface. Its attention
            implementation is switched to selfspec's, which outside a `Target` call behaves like `sdpa`.
        tokenizer: the model's; None for work on token ids only.
        name: path or Hub id, for reports.
        adapter: path or Hub id of the LoRA adapter that the model's weights hold, for reports.

    Attributes:
        passes: how the model's passes run, and those of the drafters that serve it.
        lock: held by whoever runs a pass. Threads that share a target take turns, a step at a time; for many callers at once
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
        self.config = model.config.get_text_config()
        self.device = model.device
        self.dtype = model.dtype
        self.context_length: int = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        # A ready-made mask, so that the model builds none of its own.
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        self.lock = threading.RLock()
        self._spare_cache: KVCache | None = None
        # The checks compare single passes: nothing is captured for them.
        self.passes = Passes()
        self.kv_shape: KVShape
        self.kv_shape, self.vocab_size = adopt(self)
        self.passes = Passes.on(self.device)

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

    def new_cache(
        self,
        shape: KVShape | None = None,
        *,
        block_size: int = 16,
        max_tokens: int | None = None,
        use_sharing: bool = False,
    ) -> KVCache:
        """An empty KV cache of this target's dtype on its device, and of its shape unless another is given."""
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
        """An empty KV cache for a while. The next borrower gets it where CUDA graphs were captured for its addresses."""
        with self.lock:
            cache, self._spare_cache = self._spare_cache or self.new_cache(), None
        try:
            yield cache
        finally:
            if self.passes.is_captured and not cache.num_used_blocks:
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

        Chunks have at most `Passes.max_rows` tokens, so a text's KV has the same bits however it is cut or shared.
        """
        if not len(token_ids):
            nothing = torch.zeros(1, 0, self.config.hidden_size, dtype=self.dtype, device=self.device)
            return dict.fromkeys(features, nothing)
        parts: list[dict[int, torch.Tensor]] = []
        with self.lock:
            for tokens in token_ids.split(min(chunk_size, self.passes.max_rows)):
                parts.append(self._enter(chain(tokens[:1], tokens[None, 1:]), row, cache, features))
                cache.advance(row, len(tokens))
            # A padded chunk takes more blocks than its tokens need.
            cache.trim(row)
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in features}

    def _enter(self, tree: CandidateTree, row: CacheRow, cache: KVCache, features: Sequence[int]) -> dict[int, torch.Tensor]:
        """Store one chunk of a prompt."""

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
        """One forward over every node of a batch of trees; the nodes' KV lands in the rows' scratch slots."""

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
        """`verify` of rows that have the room: a function of tensors."""
        with self._taps(features) as taken:
            output = self.run(self.model, tree, places, cache)
        return Verification(output.logits, {name: taken[name] for name in features})

    @torch.inference_mode()
    def extend(self, nodes: CandidateTree, rows: list[CacheRow], cache: KVCache, num_new: int) -> torch.Tensor:
        """Logits [B, num_new, V] of the last nodes; the ones before them are in the rows' scratch slots already."""

        def extend(places: Places, nodes: CandidateTree) -> tuple[torch.Tensor, ...]:
            return (self.run(self.model, nodes, places, cache, num_new=num_new).logits,)

        with self.lock:
            shape = self.passes.shape_of(nodes, len(rows), has_exact_nodes=True)
            (logits,) = self.passes.run(("extend", num_new), extend, nodes, rows, cache, shape=shape, num_kept=0)
        return logits

    def hidden_states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, features: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        """Hidden states of plain rows, as training needs them: each [B, T, E], without gradients.

        Positions [B, T] that start over begin a new text, which does not see those before it in its row.
        """
        with torch.no_grad(), self.lock, self._taps(features) as taken:
            self.model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return taken

    def truncated(self, num_layers: int) -> Target:
        """A target of this one's first `num_layers` layers, final norm and LM head; every weight is shared."""
        if not 1 <= num_layers < self.num_layers:
            raise ValueError(f"truncated:{num_layers} is out of range: {self.name} has {self.num_layers} layers")
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
        """What `model`, this target's or a part of it, returns for a tree's last `num_new` nodes (all by default).

        The rows have room for the tree already. A function of tensors.
        """
        layout, write_slots = cache.layout(places, tree, num_new)
        new = slice(0 if num_new is None else tree.num_nodes - num_new, None)
        return model(
            input_ids=tree.tokens[:, new].clamp(min=0),
            position_ids=(layout.lengths[:, None] + tree.depths[:, new]).clamp(max=self.context_length - 1),
            attention_mask=self.mask,
            use_cache=False,
            tree_pass=TreePass(cache, layout, write_slots),
            **options,
        )

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


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """The ids at which the model ends: generation config first, as in transformers' `generate`."""
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()
