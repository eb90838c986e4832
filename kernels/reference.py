"""The specification of every kernel: one function of naive torch per kernel, written to be read and compared against.
Those of the kernels that grow trees are in reference_growth.py.

Each function has the name of its kernel with `_reference`, and the same signature. A kernel's public function calls it where
neither Triton nor a faster form in torch serves; nothing outside this folder and the tests does.

A paged pool stores one row per slot: `key_cache [num_slots, G, D]`. Storage index `i` of batch row `b` lies in slot
`block_tables[b, i // block_size] * block_size + i % block_size`. Indices `0 … T-1` hold the committed prefix. Node `j` of
the candidate tree has the storage index `T + j`, while its position in the text is `T + depths[j]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from selfspec.kernels.noise import Stream, gumbel
from selfspec.kernels.slots import slots_of

if TYPE_CHECKING:
    from selfspec.kernels.rms_norm import Norm


def tree_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    depths: torch.Tensor,
    ancestor_mask: torch.Tensor,
    block_size: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every tree node to the prefix, its ancestors and itself, in float32.

        out[i] = softmax_j(cap(scaling * q_i . k_j) | j visible to i) @ v,    cap(x) = softcap * tanh(x / softcap)

    A prefix key at position t is visible to node i if `T + depths[i] - t < sliding_window`. The key of tree node j is
    visible to i if j is i or an ancestor of i and `depths[i] - depths[j] < sliding_window`. A sink adds `exp(sinks[h])` to
    head h's softmax denominator (https://arxiv.org/abs/2309.17453).

    Args:
        query: [B, H, N, D]; head h reads key-value head `h // (H // G)`.
        key_cache, value_cache: [num_slots, G, D] and [num_slots, G, Dv]; the tree's rows are already written.
        block_tables: [B, P] int64, the blocks of each row.
        lengths: [B] int64, each row's T.
        depths, ancestor_mask: [B, M] int64 and [B, N, M] bool, of the tree's M stored nodes. The queries are the last N of
            these: all in a verify pass, the newest layer where a tree grows.
        sinks: [H] or None.

    Returns:
        [B, N, H, Dv], query's dtype.
    """
    B, H, N, _ = query.shape
    G, M = key_cache.shape[1], ancestor_mask.shape[2]
    S = int(lengths.max()) + M
    index = torch.arange(S, device=query.device).expand(B, S)
    in_row = index < (lengths + M)[:, None]
    slots = slots_of(block_tables, index.minimum((lengths + M - 1)[:, None]), block_size)
    keys = key_cache[slots].float().repeat_interleave(H // G, dim=2)  # [B, S, H, D]
    values = value_cache[slots].float().repeat_interleave(H // G, dim=2)

    node = (index - lengths[:, None]).clamp(0, M - 1)
    in_tree = (index >= lengths[:, None]) & in_row
    key_positions = torch.where(in_tree, lengths[:, None] + depths.gather(1, node), index)
    visible = torch.where(
        in_tree[:, None], ancestor_mask.gather(2, node[:, None].expand(B, N, S)), in_row[:, None]
    )  # [B, N, S]
    if sliding_window is not None:
        query_positions = lengths[:, None] + depths[:, M - N :]
        visible = visible & (query_positions[:, :, None] - key_positions[:, None] < sliding_window)

    scores = torch.einsum("bhnd,bshd->bhns", query.float(), keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        sink_scores = sinks.float()[None, :, None, None].expand(B, H, N, 1)
        probs = torch.cat([scores, sink_scores], dim=-1).softmax(-1)[..., :-1]
    else:
        probs = scores.softmax(-1)
    return torch.einsum("bhns,bshd->bnhd", probs, values).to(query.dtype)


def kv_compaction_reference(
    key_cache: torch.Tensor, value_cache: torch.Tensor, source_slots: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """Move slots `source_slots` to `target_slots` in all layers, as if every source were read before any write.

    Args:
        key_cache, value_cache: [L, num_slots, G, D] and [L, num_slots, G, Dv]; changed in place.
        source_slots, target_slots: [P] or [B, P] int64. A row of B may not name another row's slot; it may name one move
            twice.
    """
    key_cache[:, target_slots] = key_cache[:, source_slots]
    value_cache[:, target_slots] = value_cache[:, source_slots]


def path_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    depths: torch.Tensor,
    path_slots: torch.Tensor,
    block_size: int,
    scaling: float,
) -> torch.Tensor:
    """`tree_attention_reference` for nodes whose paths are known, node by node.

    Args:
        query: [B, H, N, D].
        key_cache, value_cache: [num_slots, G, D] and [num_slots, G, Dv].
        block_tables, lengths: [B, P] and [B], int64.
        depths: [B, N] int64.
        path_slots: [B, N, K] int64. A node of depth d has the slots of its ancestors at 0 … d - 1, and its own at d.

    Returns:
        [B, N, H, Dv].
    """
    B, H, N, _ = query.shape
    G = key_cache.shape[1]
    out = query.new_empty(B, N, H, value_cache.shape[2])
    for b in range(B):
        prefix = slots_of(block_tables[b : b + 1], torch.arange(int(lengths[b]), device=query.device)[None], block_size)[0]
        for n in range(N):
            slots = torch.cat([prefix, path_slots[b, n, : int(depths[b, n]) + 1]])
            keys, values = (each[slots].float().repeat_interleave(H // G, dim=1) for each in (key_cache, value_cache))
            scores = torch.einsum("hd,shd->hs", query[b, :, n].float(), keys) * scaling
            out[b, n] = torch.einsum("hs,shd->hd", scores.softmax(-1), values).to(query.dtype)
    return out


def row_argmax_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of every row's first greatest logit, and whether that logit is finite. NaN counts as +inf.

    Args:
        logits: [..., V].

    Returns:
        [...] int64 and [...] bool.
    """
    ordered = logits.float().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = ordered.argmax(-1)
    return best, ordered.gather(-1, best[..., None])[..., 0].isfinite()


def row_sample_reference(
    logits: torch.Tensor, depths: torch.Tensor, integers: torch.Tensor, fractions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every node's token by its text's settings, and whether its greatest logit is finite, as in `row_argmax_reference`.

    A greedy text takes the first greatest logit, and so does any node whose greatest logit is not finite. The others take
    the first greatest `logit / temperature + gumbel`, a draw from softmax(logit / temperature), among the kept tokens:

        top-k:  fewer than k tokens have greater logits
        top-p:  among those that top-k keeps, the tokens with greater logits have less than top_p of the probability
        min-p:  the probability is at least min_p times the greatest

    These are transformers' filters in its order; each sees what the one before leaves. Equal logits are kept or dropped
    together, while transformers may cut a nucleus between them, depending on its sort. Probabilities at a filter's edge are
    compared up to rounding.

    Args:
        logits: [B, N, V].
        depths: [B, N] int64; the noise of a node's token is that of position `num_tokens + depth`.
        integers: [B, 3] int64: noise key, `num_tokens` (the number of committed tokens), top-k (0 keeps all).
        fractions: [B, 3] float32: temperature (0 is greedy), top-p, min-p.

    Returns:
        [B, N] int64 and [B, N] bool.
    """
    _, N, V = logits.shape
    keys, num_tokens, top_k = integers[:, :, None].expand(-1, 3, N).unbind(1)  # [B, N] each
    temperature, top_p, min_p = fractions[:, :, None, None].unbind(1)  # [B, 1, 1] each
    logits = logits.float().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    is_valid = logits.amax(-1).isfinite()
    divisor = torch.where(temperature == 0, 1.0, temperature)
    scores = logits / divisor + gumbel(keys, num_tokens + depths, Stream.TARGET, V)
    if bool(((top_k > 0)[:, :, None] | (top_p < 1) | (min_p > 0)).any()):
        scores = scores.masked_fill(~_kept_tokens(logits, divisor, top_k[:, :, None], top_p, min_p), -torch.inf)
    is_drawn = (temperature > 0)[:, :, 0] & is_valid
    return torch.where(is_drawn, scores.argmax(-1), logits.argmax(-1)), is_valid


def _kept_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[B, N, V] bool: the tokens of `logits [B, N, V]` that top-k, top-p and min-p, each [B, 1, 1] or [B, N, 1], keep."""
    ordered, indices = logits.sort(-1, descending=True)
    weights = ((ordered - ordered[:, :, :1]) / temperature).double().exp()
    # The number of tokens with greater logits.
    num_above = torch.searchsorted(-ordered, -ordered)
    is_in_top_k = (num_above < top_k) | (top_k == 0)
    weights = torch.where(is_in_top_k, weights, 0.0)
    total = weights.sum(-1, keepdim=True)
    above = (weights.cumsum(-1) - weights).gather(-1, num_above)
    is_kept = is_in_top_k & ((above < top_p.double() * total) | (top_p >= 1)) & (weights >= min_p.double())
    is_kept = is_kept | (num_above == 0)
    return torch.zeros_like(is_kept).scatter_(-1, indices, is_kept)


def tree_accept_reference(
    tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk from the root while the target's chosen token is among the current node's children.

    Args:
        tokens, parents: [B, N] int64; padding nodes have token -1 and parent -1, and the walk never reaches them.
        chosen: [B, N] int64, the target's own next token at every node.
        max_depth: K, at least the depth of the longest path.

    Returns:
        `path [B, K + 1]` (node ids, the root first, -1 past the end) and `num_accepted [B]`, both int64.
    """
    B, N = tokens.shape
    path = torch.full((B, max_depth + 1), -1, dtype=torch.int64)
    num_accepted = torch.zeros(B, dtype=torch.int64)
    for b in range(B):
        node = 0
        path[b, 0] = 0
        while True:
            children = [i for i in range(1, N) if int(parents[b, i]) == node and int(tokens[b, i]) == int(chosen[b, node])]
            if not children or int(tokens[b, children[0]]) < 0:
                break
            node = children[0]
            num_accepted[b] += 1
            path[b, num_accepted[b]] = node
    return path.to(tokens.device), num_accepted.to(tokens.device)


def tree_paths_reference(
    parents: torch.Tensor,
    depths: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    max_depth: int,
    nodes: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slot of every node's ancestor at each depth, and its own at its own depth; 0 at the depths past its own.

    Args:
        parents, depths: [B, N] int64. Roots and padding nodes have parent -1 and depth 0.
        lengths, block_tables: [B] and [B, P], int64. Node i of row b is stored at storage index `lengths[b] + i`.
        max_depth: K, at least every node's depth.
        nodes: [F] int64, the nodes that are asked for, as `b * N + i`; None asks for all, and F is B * N.

    Returns:
        [F, K + 1] int64.
    """
    B, N = parents.shape
    nodes = torch.arange(B * N, device=parents.device) if nodes is None else nodes
    row, node = nodes // N, nodes % N
    depth = depths[row, node]
    paths = parents.new_zeros(len(nodes), max_depth + 1)
    for d in range(max_depth, -1, -1):
        is_on_path = d <= depth
        slots = slots_of(block_tables[row], torch.where(is_on_path, lengths[row] + node, 0)[:, None], block_size)[:, 0]
        paths[:, d] = torch.where(is_on_path, slots, 0)
        # The root is met last, and its parent is not looked at.
        node = torch.where(is_on_path, parents[row, node], node)
    return paths


def ngram_lookup_reference(
    history: torch.Tensor, rows: torch.Tensor | None, num_tokens: torch.Tensor, num_draft_tokens: int, max_match: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The continuation of each text's longest earlier match of its ending; among equally long ones, of the latest.

    Args:
        history: [S, C] int64. What stands after a text's end does not matter.
        rows: [B] int64, each text's row of the history; None for all rows in their order.
        num_tokens: [B] int64; a text may be empty.
        num_draft_tokens: K.
        max_match: longest ending that is compared; longer matches count as this long.

    Returns:
        Draft tokens [B, K], -1 throughout where nothing matches, and the match's length [B], 0 for none. A continuation
        that reaches the text's end starts over after the match, which is right where the text repeats.
    """
    if not history.is_cuda:
        # Elsewhere asking for the longest would wait for the device.
        history = history[:, : max(1, int(num_tokens.max()))]
    if rows is not None:
        history = history[rows]
    B, C = history.shape
    index = torch.arange(C, device=history.device)
    # run[b, j]: how many tokens ending at j equal the row's ending.
    run = torch.zeros(B, C, dtype=torch.int64, device=history.device)
    is_equal = (index < num_tokens[:, None] - 1).clone()
    for back in range(min(max_match, C)):
        last = history.gather(1, (num_tokens - 1 - back).clamp(min=0)[:, None])
        is_equal[:, back:] &= history[:, : C - back] == last
        is_equal[:, :back] = False
        is_equal &= (back < num_tokens)[:, None]
        run += is_equal
    # Longest first, then latest.
    best = (run * C + index).argmax(1)
    matched = run.gather(1, best[:, None])[:, 0]
    period = (num_tokens - 1 - best).clamp(min=1)[:, None]
    wanted = best[:, None] + 1 + torch.arange(num_draft_tokens, device=history.device) % period
    drafts = history.gather(1, wanted.clamp(max=C - 1))
    return torch.where((matched > 0)[:, None], drafts, -1), matched


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer, summed in float32 and rounded once: [..., OUT] from x [..., IN], weight [OUT, IN] and bias [OUT]."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0, is_rounded_first: bool = False
) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) * (offset + weight)` in float32: [..., E], x's type, from x [..., E] and weight [E].

    Args:
        offset: 1 where a checkpoint stores the weight's difference from 1 (Gemma).
        is_rounded_first: also round to x's type before the multiplication by the weight (Llama).
    """
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if is_rounded_first:
        normed = normed.to(x.dtype).float()
    return (normed * (offset + weight.float())).to(x.dtype)


def gated_silu_reference(x: torch.Tensor) -> torch.Tensor:
    """`silu(first half) * second half`: [..., F] from x [..., 2F]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotary_store_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    head_norms: tuple[Norm, Norm] | None = None,
) -> torch.Tensor:
    """Rotate queries and keys; store keys and values.

    Args:
        qkv: [B, N, (H + 2 G) * D], each token's query, key and value heads side by side.
        cos, sin: [B or 1, N, D].
        slots: [B * N] int64, where each token's key and value go.
        key_cache, value_cache: [num_slots, G, D], written in place.
        head_norms: the norms of query heads and of key heads, applied before the rotation. They differ only in their
            weights [D].

    Returns:
        The rotated queries, [B, N, H, D].
    """
    G, D = key_cache.shape[1:]
    heads = qkv.unflatten(2, (-1, D))
    turning, values = heads[:, :, :-G], heads[:, :, -G:]
    if head_norms is not None:
        parts = turning.split([turning.shape[2] - G, G], dim=2)
        normed = [rms_norm_reference(x, n.weight, n.eps, **n.rule) for x, n in zip(parts, head_norms, strict=True)]
        turning = torch.cat(normed, dim=2)
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]
    key_cache.index_copy_(0, slots, turned[:, :, -G:].flatten(0, 1))
    value_cache.index_copy_(0, slots, values.flatten(0, 1))
    return turned[:, :, :-G].contiguous()
