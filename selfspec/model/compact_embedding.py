"""The token embedding of prefill, draft and verify on a CPU: float32 values, held in the 16 bits that they need.

A float32 model usually comes from a checkpoint of 16 bits, so the table's lower halves are zeros. Packed layers hold an LM
head of their own, and the table is only looked up.

Invariant: a compact embedding gives its plain weight back bit for bit.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

# Rows that are compared at once, because a copy of the whole table would be the largest tensor of the load.
CHUNK_ROWS = 4096


class CompactEmbedding(nn.Module):
    """A float32 `nn.Embedding` whose table is stored in a 16-bit dtype. For inference only.

    `weight` gives the plain [vocab, E] tensor back, bit for bit.
    """

    def __init__(self, embedding: nn.Embedding, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self.table = embedding.weight.detach().to(dtype)

    @property
    def weight(self) -> torch.Tensor:
        return self.table.float()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.table).float()


def compact_embeddings(model: nn.Module) -> dict[int, torch.Tensor]:
    """Replace, in place, every plain float32 `nn.Embedding` on the CPU whose values all fit in 16 bits.

    Returns:
        The 16-bit table of each weight that was replaced, by the weight's `id`: an LM head may share it.
    """
    tables = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_plain(child) and (dtype := _exact_dtype(child.weight.detach())) is not None:
                compact = CompactEmbedding(child, dtype)
                setattr(parent, name, compact)
                tables[id(child.weight)] = compact.table
    return tables


def _is_plain(module: nn.Module) -> TypeGuard[nn.Embedding]:
    if type(module) is not nn.Embedding or module.max_norm is not None:
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype == torch.float32


def _exact_dtype(table: torch.Tensor) -> torch.dtype | None:
    """The first 16-bit dtype that holds all values of a table [vocab, E] exactly; None where neither does."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(rows.to(dtype).float(), rows) for rows in table.split(CHUNK_ROWS)):
            return dtype
    return None
