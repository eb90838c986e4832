"""The few shapes that passes are padded to, because one CUDA graph should serve many of them.

Invariant: what is added belongs to nobody, or repeats a row, so results do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from selfspec.tree import CandidateTree

# Numbers of rows, nodes and depths are rounded up to these sizes, because few graphs should serve all.
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NODE_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
DEPTH_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 127)
# Few sizes for passes with prompts, because their shapes seldom return: of the whole pass, in whole tiles of linear layers,
# which cost as much where they are not full. Larger passes keep the device busy for longer than their launch takes, so no
# graph runs them.
CHUNK_BUCKETS = (64, 128, 256, 384, 512, 640, 768, 1024)
# Numbers of rows at which a linear layer's tiles are full and fill the card.
FULL_ROWS = 256
# Numbers of nodes of all trees in a pass.
FLAT_BUCKETS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
# Numbers of chunks in a pass, and one more.
CHUNK_ROW_BUCKETS = (8, 32)
# The fewest columns of a block table in a graph, and the factor from one size to the next.
MIN_COLUMNS, COLUMN_FACTOR = 128, 4


@dataclass(frozen=True)
class GraphShape:
    """What a batch of trees is padded to, because one CUDA graph should serve many batches."""

    num_rows: int
    num_nodes: int
    max_depth: int
    is_chain: bool

    def pad(self, tree: CandidateTree) -> torch.Tensor:
        """The tree's tokens, parents and depths as [B, 3, N'], padding nodes included."""
        N = tree.num_nodes
        nodes = torch.stack([tree.tokens, tree.parents, tree.depths], dim=1)
        if N < self.num_nodes:
            nodes = F.pad(nodes, (0, self.num_nodes - N), value=-1)
            nodes[:, 2, N:] = 0
        return nodes

    def pad_along(self, values: torch.Tensor) -> torch.Tensor:
        """From values of nodes [B, N, ...] to [B, N', ...], with zeros for padding nodes."""
        missing = self.num_nodes - values.shape[1]
        return F.pad(values, (0, 0) * (values.ndim - 2) + (0, missing)) if missing else values


@dataclass(frozen=True)
class FlatShape:
    """What a flat pass is padded to: B rows with trees of N nodes, of which it computes F, and C chunks of P tokens in all.

    Rows and tokens that are added belong to nobody.
    """

    num_rows: int
    num_tree_nodes: int
    # None for all nodes of every tree.
    num_nodes: int | None
    max_depth: int
    num_columns: int
    num_chunks: int
    num_tokens: int
    num_chunk_columns: int

    def pad_tree(self, tree: CandidateTree) -> list[torch.Tensor]:
        """The trees' nodes [B, 3, N], and their scores [B, N] if they have any."""
        shape = GraphShape(self.num_rows, self.num_tree_nodes, self.max_depth, tree.is_chain)
        num_missing = self.num_rows - len(tree.tokens)
        nodes = shape.pad(tree)
        if num_missing:
            # Rows of padding nodes alone.
            nodes = F.pad(nodes, (0, 0, 0, 0, 0, num_missing), value=-1)
            nodes[-num_missing:, 2] = 0
        return [nodes, *([] if tree.scores is None else [fill_rows(shape.pad_along(tree.scores), self.num_rows)])]


def bucket(size: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket of at least `size`; None where all are smaller."""
    return next((each for each in buckets if each >= size), None)


def column_bucket(num_columns: int) -> int:
    """The number of columns of a block table in a graph."""
    size = MIN_COLUMNS
    while size < num_columns:
        size *= COLUMN_FACTOR
    return size


def fill_rows(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """From at most `num_rows` rows [B, ...] to [num_rows, ...], by repeating the last one."""
    return torch.cat([rows, rows[-1:].expand(num_rows - len(rows), *rows.shape[1:])]) if num_rows > len(rows) else rows
