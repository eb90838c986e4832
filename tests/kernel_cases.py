"""Random passes over a paged pool, shared by the tests of the kernels and of their twins."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
import torch

from selfspec.kernels import tree_attention as tree_attention_file
from selfspec.kernels.jit import triton
from selfspec.kernels.reference import kv_compaction_reference, tree_attention_reference
from selfspec.kernels.slots import slots_of
from selfspec.kernels.tree_attention import Tile, launch_tree_attention, tree_attention
from selfspec.kernels.tree_layout import TreeLayout
from selfspec.tree import chain, from_parents

# Both sum at most some fifty products of unit variance in float32, in different order.
FLOAT32 = {"atol": 2e-6, "rtol": 2e-5}
# Bfloat16 keeps 8 bits: the fused form rounds probabilities and output, the twin only the output.
BFLOAT16 = {"atol": 2e-2, "rtol": 2e-2}
TOLERANCES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
# Of a Triton kernel and its twin. In float32 the exponentials of two libraries differ in the last place and long sums add up
# in another order. Low precision rounds the probabilities and the output, 11 bits and 8, of values of unit variance.
KERNEL_TOLERANCES = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-4},
    torch.float16: {"atol": 3e-3, "rtol": 3e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}

# Triton kernels run compiled where there is a CUDA device, elsewhere in Triton's interpreter. The interpreter shows the
# logic, not the device's rounding: the tests marked `gpu` add real sizes and equality of bits.
HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
NEEDS_TRITON = pytest.mark.skipif(
    triton is None or (not HAS_CUDA and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="Triton is not installed, or there is no CUDA device and TRITON_INTERPRET=1 was not set before it was imported",
)
# The interpreter multiplies bfloat16's bit patterns as integers.
DTYPES = [torch.float32, torch.bfloat16 if HAS_CUDA else torch.float16]

BLOCK_SIZE = 4

PARENTS = {
    "root": [-1],
    "chain": [-1, 0, 1, 2, 3, 4, 5],
    "star": [-1, 0, 0, 0, 0, 0, 0],
    "random": [-1, 0, 0, 2, 2, 1, 4, 4, 7],
    "padded": [-1, 0, -1, 1, 1, -1, 3, -1],
}
# Prefix lengths of the rows: empty, on and off the block of four, and three rows of different length.
LENGTHS = {"empty": [0], "one": [1], "on the block": [8], "off the block": [13], "ragged": [0, 6, 21]}
# Query heads, key-value heads, key dim, value dim.
HEADS = {
    "multi-head": (4, 4, 8, 8),
    "grouped": (6, 2, 8, 8),
    "one key-value head": (3, 1, 16, 16),
    "unequal": (4, 2, 12, 5),
}
# The same where Triton's interpreter runs, in which a program takes milliseconds.
SMALL_HEADS = {"multi-head": (2, 2, 16, 16), "grouped": (3, 1, 8, 8), "unequal": (4, 2, 12, 5)}


def make_splits_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many splits, tiles and launches in short texts."""
    monkeypatch.setattr(tree_attention_file, "SPLIT", 32)
    for name, rows in (("TILE", 16), ("FLOAT32_TILE", 16), ("CHAIN_TILE", 32), ("HIGH_CHAIN_TILE", 64)):
        monkeypatch.setattr(tree_attention_file, name, Tile(rows, 16, 4, 2))
    monkeypatch.setattr(tree_attention_file, "MAX_NODES", 5)


def random_parents(num_nodes: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [-1, *(draw.randrange(max(0, i - 8), i) for i in range(1, num_nodes))]


@dataclass
class Case:
    """A pool whose unused slots are NaN, and one pass's query and layout on it."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    layout: TreeLayout
    parents: list[list[int]]

    @property
    def scaling(self) -> float:
        # Not the default 1 / sqrt(D): an ignored argument must show.
        return 0.7 * self.query.shape[-1] ** -0.5

    def run(self, **options: object) -> torch.Tensor:
        return tree_attention(self.query, self.key_cache, self.value_cache, self.layout, self.scaling, **options)  # type: ignore[arg-type]

    def run_kernel(self, **options: object) -> torch.Tensor:
        return launch_tree_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.layout,
            self.scaling,
            **options,  # type: ignore[arg-type]
        )

    def run_kernel_alone(self, row: int, node: int, **options: object) -> torch.Tensor:
        """[H, Dv]: the node once its ancestors are committed and it is the only one, in a batch of one."""
        assert self.layout.host_lengths is not None
        length, table = self.layout.host_lengths[row], self.layout.block_tables[row : row + 1]
        path = self.layout.ancestor_mask[row, node].nonzero().T  # [1, depth + 1]
        depths = torch.arange(path.shape[1], device=path.device)[None]
        keys, values = self.key_cache[None].clone(), self.value_cache[None].clone()
        kv_compaction_reference(
            keys, values, slots_of(table, length + path, BLOCK_SIZE)[0], slots_of(table, length + depths, BLOCK_SIZE)[0]
        )
        now = length + path.shape[1] - 1
        root = chain(path[:, 0])
        layout = TreeLayout(
            table,
            torch.tensor([now], device=path.device),
            [now],
            root.depths,
            root.ancestor_mask(),
            BLOCK_SIZE,
            max_depth=0,
            is_chain=True,
        )
        query = self.query[row : row + 1, :, node : node + 1]
        return launch_tree_attention(query, keys[0], values[0], layout, self.scaling, **options)[0, 0]  # type: ignore[arg-type]

    def run_reference(self, **options: object) -> torch.Tensor:
        layout = self.layout
        return tree_attention_reference(
            self.query,
            self.key_cache,
            self.value_cache,
            layout.block_tables,
            layout.lengths,
            layout.depths,
            layout.ancestor_mask,
            layout.block_size,
            self.scaling,
            **options,  # type: ignore[arg-type]
        )

    def slot(self, row: int, index: int) -> int:
        return int(self.layout.block_tables[row, index // BLOCK_SIZE]) * BLOCK_SIZE + index % BLOCK_SIZE


def make_case(
    parents: list[list[int]],
    lengths: list[int],
    heads: tuple[int, int, int, int] = HEADS["grouped"],
    *,
    dtype: torch.dtype = torch.float32,
    is_scattered: bool = True,
    is_chain: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    H, G, D, Dv = heads
    B, N = len(lengths), len(parents[0])
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-(length + N) // BLOCK_SIZE) for length in lengths]
    pool = torch.arange(sum(num_blocks) + 3)
    if is_scattered:
        pool = pool[torch.randperm(len(pool), generator=generator)]
    tables = torch.zeros(B, max(num_blocks), dtype=torch.int64)
    key_cache = torch.full((len(pool) * BLOCK_SIZE, G, D), torch.nan, dtype=dtype)
    value_cache = torch.full((len(pool) * BLOCK_SIZE, G, Dv), torch.nan, dtype=dtype)
    row_slots: list[slice | torch.Tensor] = []
    used = 1
    for b, length in enumerate(lengths):
        blocks = pool[used : used + num_blocks[b]]
        used += num_blocks[b]
        tables[b, : len(blocks)] = blocks
        slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[: length + N]
        key_cache[slots] = torch.randn(length + N, G, D, generator=generator).to(dtype)
        value_cache[slots] = torch.randn(length + N, G, Dv, generator=generator).to(dtype)
        row_slots.append(slots if is_scattered else slice(int(slots[0]), int(slots[-1]) + 1))
    parent_rows = torch.tensor(parents)
    is_real = (parent_rows >= 0) | (torch.arange(N) == 0)
    tree = from_parents(torch.where(is_real, 5, -1), parent_rows)
    layout = TreeLayout(
        block_tables=tables.to(device),
        lengths=torch.tensor(lengths).to(device),
        host_lengths=lengths,
        depths=tree.depths.to(device),
        ancestor_mask=tree.ancestor_mask().to(device),
        block_size=BLOCK_SIZE,
        row_slots=row_slots,
        max_depth=tree.max_depth,
        is_chain=is_chain,
    )
    query = torch.randn(B, H, N, D, generator=generator).to(device, dtype)
    return Case(query, key_cache.to(device), value_cache.to(device), layout, parents)
