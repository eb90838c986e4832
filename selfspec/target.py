"""The target: a frozen Hugging Face causal LM, unmodified, that prefills prompts and verifies candidate trees.

The only file that knows transformers' models. One attention function is registered with transformers' AttentionInterface;
the modeling files hand it our keyword argument `tree_pass`, and it stores the pass's keys and values in the paged cache and
attends to them there. The model runs with `use_cache=False` and explicit positions, so none of transformers' cache classes
takes part, and with a ready-made 4-D mask, so that it builds none of its own.

Invariant, checked on every model at load: the logits of a tree's node equal the plain forward's on the node's own path.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from selfspec.cache import CacheRow, KVCache, KVShape
from selfspec.kernels.tree_attention import TreeLayout, tree_attention
from selfspec.loading import check_family, load_model
from selfspec.tree import CandidateTree, chain, from_parents

ATTENTION_NAME = "selfspec"

# A feature is named by transformers' numbering: k is the hidden state entering layer k (0 = embeddings, L = the last
# layer's output before the final norm), FINAL the one after the final norm.
FINAL = -1


@dataclass
class _TreePass:
    """What the attention function needs during one forward; `shapes` collects what it saw."""

    cache: KVCache | None = None
    layout: TreeLayout | None = None
    write_slots: torch.Tensor | None = None
    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)


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

    Raises:
        ValueError: the model's family or its attention cannot be served; the sentence names it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *, name: str = "") -> None:
        check_family(model.config)
        kind = model.config.model_type
        if getattr(model, "_is_stateful", False):
            raise ValueError(f"{kind} keeps a recurrent state instead of a KV cache: selfspec serves attention models only")
        if not model._can_set_attn_implementation():
            raise ValueError(f"{kind} does not follow transformers' attention interface, so its attention cannot be served")
        self.model = model
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path or kind
        self.config = model.config.get_text_config()
        self.device = model.device
        self.dtype = model.dtype
        self.context_length: int = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        self.kv_shape: KVShape
        self.vocab_size: int
        self._adopt()

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        use_packing: bool = True,
    ) -> Target:
        """Load a target from a folder or the Hub; see `selfspec.loading.load_model` for the arguments and errors."""
        model, tokenizer = load_model(source, dtype=dtype, device=device, revision=revision, use_packing=use_packing)
        return cls(model, tokenizer, name=str(source))

    @property
    def num_layers(self) -> int:
        return self.kv_shape.num_layers

    def new_cache(self, *, block_size: int = 16, max_tokens: int | None = None) -> KVCache:
        """An empty KV cache of this target's shape."""
        return KVCache(self.kv_shape, dtype=self.dtype, device=self.device, block_size=block_size, max_tokens=max_tokens)

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
        """Commit `token_ids [T]` to a row's prefix, a chunk at a time; returns the features asked for, each [1, T, E]."""
        if not len(token_ids):
            nothing = torch.zeros(1, 0, self.config.hidden_size, dtype=self.dtype, device=self.device)
            return dict.fromkeys(features, nothing)
        parts: list[dict[int, torch.Tensor]] = []
        for tokens in token_ids.split(chunk_size):
            tree = chain(tokens[:1], tokens[None, 1:])
            parts.append(self._forward(tree, [row], cache, features, logits_to_keep=1).features)
            cache.advance(row, len(tokens))
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in features}

    @torch.inference_mode()
    def verify(
        self, tree: CandidateTree, rows: list[CacheRow], cache: KVCache, *, features: Sequence[int] = ()
    ) -> Verification:
        """One forward over every node of a batch of trees; the nodes' KV lands in the rows' scratch slots."""
        return self._forward(tree, rows, cache, features, logits_to_keep=0)

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
        return Target(_with_layers(self.model, num_layers), self.tokenizer, name=f"{self.name}[:{num_layers}]")

    def _forward(
        self,
        tree: CandidateTree,
        rows: list[CacheRow],
        cache: KVCache,
        features: Sequence[int],
        logits_to_keep: int,
    ) -> Verification:
        cache.reserve(rows, tree.num_nodes)
        layout, write_slots = cache.layout(rows, tree)
        positions = (layout.lengths[:, None] + tree.depths).clamp(max=self.context_length - 1)
        with self._taps(features) as taken:
            output = self.model(
                input_ids=tree.tokens.clamp(min=0),
                position_ids=positions,
                attention_mask=self._mask,
                use_cache=False,
                logits_to_keep=logits_to_keep,
                tree_pass=_TreePass(cache, layout, write_slots),
            )
        return Verification(output.logits, taken)

    @contextmanager
    def _taps(self, features: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Collect hidden states by hooks that live for one forward."""
        taken: dict[int, torch.Tensor] = {}
        if not features:
            yield taken
            return
        layers = _decoder_layers(self.model)[1]
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

    @torch.inference_mode()
    def _adopt(self) -> None:
        """Switch the attention over, learn the KV shape, and check a tree pass against the plain forward."""
        kind = self.model.config.model_type
        limit = min(self.config.vocab_size, 64)
        tokens = (torch.arange(6, device=self.device) * 7 + 3) % limit
        # The formula as the modeling file writes it: sdpa of older transformers leaves soft-caps out.
        self.model.set_attn_implementation("eager")
        plain = self.model(input_ids=tokens[None], use_cache=False).logits[0].float()
        self.vocab_size = plain.shape[-1]
        self.model.set_attn_implementation(ATTENTION_NAME)

        probe = _TreePass()
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
        cache, row = self.new_cache(), CacheRow()
        self.prefill(tokens[:3], row, cache)
        nodes = torch.stack([tokens[3], tokens[4], (tokens[5] + 1) % limit, tokens[5]])[None]
        tree = from_parents(nodes, torch.tensor([[-1, 0, 0, 1]], device=self.device))
        served = self.verify(tree, [row], cache).logits[0, [0, 1, 3]].float()
        gap = (served - plain[3:]).norm() / plain[3:].norm()
        # Float32 agrees to about 1e-6. Low precision rounds differently along two paths, and experts may switch.
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.2
        if not gap < tolerance:
            raise ValueError(
                f"{kind} gives other logits in a tree pass than alone (relative gap {gap:.2g}): it cannot be served"
            )


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    tree_pass: _TreePass | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention: queries [B, H, N, D], keys and values [B, G, N, D]; returns [B, N, H, Dv]."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if position_bias is not None:
        raise ValueError(f"{module.config.model_type} adds a position bias to its attention, which selfspec does not serve")
    if tree_pass is None or tree_pass.cache is None:
        if tree_pass is not None:
            tree_pass.shapes[module.layer_idx] = (key.shape[1], key.shape[3], value.shape[3])
            attention_mask = None
        return _plain_attention(query, key, value, attention_mask, scaling, softcap, s_aux), None
    cache, layout, layer = tree_pass.cache, tree_pass.layout, module.layer_idx
    assert layout is not None and tree_pass.write_slots is not None
    keys, values = cache.keys[layer], cache.values[layer]
    keys.index_copy_(0, tree_pass.write_slots, key.transpose(1, 2).flatten(0, 1).to(keys.dtype))
    values.index_copy_(0, tree_pass.write_slots, value.transpose(1, 2).flatten(0, 1).to(values.dtype))
    return tree_attention(query, keys, values, layout, scaling, sliding_window, softcap, s_aux), None


def _plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Ordinary attention, for the model's use outside tree passes: causal where no mask is given."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    N, S = query.shape[2], key.shape[2]
    if softcap is None and sinks is None:
        is_causal = mask is None and N == S
        if mask is None and N < S:
            mask = torch.ones(N, S, dtype=torch.bool, device=query.device).tril(S - N)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scaling)
        return out.transpose(1, 2).contiguous()
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(N, S, dtype=torch.bool, device=scores.device).tril(S - N)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    probs = scores.softmax(-1)[..., :S].to(value.dtype)
    return (probs @ value).transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def _decoder_layers(model: PreTrainedModel) -> tuple[list[str], nn.ModuleList]:
    """The stack of decoder layers and the attribute path to it."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name.split("."), module
    raise ValueError(f"{model.config.model_type}: no stack of {num_layers} decoder layers was found")


def _with_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A shallow copy of the model with the first layers only: copied along the path to the stack, shared elsewhere."""
    path, layers = _decoder_layers(model)
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = num_layers
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = text_config.layer_types[:num_layers]

    def clone(module: Any) -> Any:
        twin = copy.copy(module)
        twin._modules = dict(module._modules)
        if hasattr(twin, "config"):
            twin.config = text_config
        return twin

    top = clone(model)
    top.config = config
    node = top
    for name in path[:-1]:
        setattr(node, name, clone(node.get_submodule(name)))
        node = node.get_submodule(name)
    setattr(node, path[-1], nn.ModuleList(list(layers)[:num_layers]))
    return top


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """The ids at which the model ends: generation config first, as in transformers' `generate`."""
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()
