"""Medusa's tree is what its heads think likeliest."""

from __future__ import annotations

import pytest
import torch
from support import identity, tiny_target

from selfspec.drafters.medusa import MedusaDrafter
from selfspec.heads.medusa import MedusaConfig, MedusaHead


@pytest.mark.parametrize(("depth", "num_nodes"), [(1, 16), (2, 16), (3, 16), (3, 40)])
def test_the_tree_has_the_best_paths_of_the_heads(depth: int, num_nodes: int) -> None:
    """Among all paths of the whole vocabulary, because a head's tokens beyond the tree's size cannot matter."""
    target = tiny_target("llama")
    head = MedusaHead(MedusaConfig(target=identity(target), num_heads=3))
    torch.manual_seed(depth)
    for parameter in head.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    drafter = MedusaDrafter(target, head, num_nodes=num_nodes, width=num_nodes)
    roots, hidden = torch.tensor([5, 9]), torch.randn(2, head.config.target.hidden_size)
    with torch.inference_mode():
        tree = drafter._draft(hidden, roots, depth)
        log_probs = drafter.head(hidden, drafter._embed(roots), drafter._lm_head, depth).float().log_softmax(-1)
    assert tree.scores is not None
    assert tree.tokens.shape == (2, num_nodes) and tree.max_depth == depth and torch.equal(tree.tokens[:, 0], roots)
    for b in range(2):
        paths, scores = [(5, 9)[b : b + 1]], [0.0]
        for node in range(1, num_nodes):
            parent, token = int(tree.parents[b, node]), int(tree.tokens[b, node])
            assert parent < node and len(paths[parent]) == int(tree.depths[b, node])
            scores.append(scores[parent] + float(log_probs[b, len(paths[parent]) - 1, token]))
            paths.append((*paths[parent], token))
        assert len(set(paths)) == num_nodes
        torch.testing.assert_close(tree.scores[b], torch.tensor(scores), atol=1e-4, rtol=1e-4)
        layer = best = torch.zeros(1)
        for level in range(depth):
            layer = (layer[:, None] + log_probs[b, level]).flatten().topk(num_nodes).values
            best = torch.cat([best, layer])
        expected = best.topk(num_nodes).values
        torch.testing.assert_close(tree.scores[b].sort(descending=True).values, expected, atol=1e-4, rtol=1e-4)
