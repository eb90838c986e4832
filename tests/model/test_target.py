"""The target: every served family gives a tree's node its own path's logits; what cannot be served is refused by name."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import transformers
from support import FAMILIES, REFUSED, VOCAB_SIZE, tiny_model, tiny_target

from selfspec.cache.blocks import CacheRow
from selfspec.model.linear_layout import PACKED, lay_out_linear_layers
from selfspec.model.packed_linear import PackedLinear, can_pack
from selfspec.model.target import FINAL, Target
from selfspec.tree import CandidateTree, chain, from_parents

# Two float32 evaluations of one formula in different order.
TOLERANCE = 2e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_node_logits_equal_plain_forward_on_its_path(family: str) -> None:
    """[K3] positions come from depth, siblings are invisible; [K4] windows are crossed inside the tree."""
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    prefix = torch.randint(3, VOCAB_SIZE, (17,), generator=generator)
    nodes = torch.randint(3, VOCAB_SIZE, (8,), generator=generator)
    parents = [-1, 0, 0, 1, 1, 3, 2, 5]
    expected = []
    for i in range(8):
        path, node = [], i
        while node >= 0:
            path.insert(0, int(nodes[node]))
            node = parents[node]
        ids = torch.cat([prefix, torch.tensor(path)])
        with torch.inference_mode():
            expected.append(model(ids[None], use_cache=False).logits[0, -1])
    target = Target(model)
    cache = target.new_cache(block_size=4)
    row = cache.open_row()
    target.prefill(prefix, row, cache, chunk_size=5)
    tree = from_parents(nodes[None], torch.tensor([parents]))
    served = target.verify(tree, [row], cache).logits[0]
    torch.testing.assert_close(served, torch.stack(expected), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(kind: str) -> None:
    config = REFUSED[kind]()
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    model = auto.from_config(config).eval()
    with pytest.raises(ValueError, match=kind):
        Target(model)


def test_features_are_the_hidden_states_that_transformers_reports() -> None:
    model = tiny_model("llama")
    ids = torch.arange(3, 15)
    with torch.inference_mode():
        plain = model(ids[None], output_hidden_states=True)
    target = Target(model)
    cache = target.new_cache()
    row = cache.open_row()
    wanted = (0, 1, 2, 3, FINAL)
    head = target.prefill(ids[:7], row, cache, features=wanted, chunk_size=3)
    tail = target.verify(chain(ids[None, 7], ids[None, 8:]), [row], cache, features=wanted).features
    for name in (0, 1, 2):
        served = torch.cat([head[name], tail[name]], dim=1)
        torch.testing.assert_close(served, plain.hidden_states[name], atol=TOLERANCE, rtol=TOLERANCE)
    # transformers' last hidden state is the one after the final norm.
    after = torch.cat([head[FINAL], tail[FINAL]], dim=1)
    torch.testing.assert_close(after, plain.hidden_states[3], atol=TOLERANCE, rtol=TOLERANCE)
    before = torch.cat([head[3], tail[3]], dim=1)
    torch.testing.assert_close(model.model.norm(before), after, atol=TOLERANCE, rtol=TOLERANCE)
    with pytest.raises(ValueError, match="feature 4 does not exist"):
        target.prefill(ids[:2], cache.open_row(), cache, features=(4,))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "mistral-window"])
def test_adopted_model_still_works_by_itself(family: str) -> None:
    """A target stays an ordinary transformers model: its own forward and generate give what they gave before."""
    model = tiny_model(family)
    ids = torch.arange(3, 23)[None]
    with torch.inference_mode():
        before = model(ids, use_cache=False).logits
        generated = model.generate(ids, max_new_tokens=12, do_sample=False)
    Target(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids, use_cache=False).logits, before, atol=TOLERANCE, rtol=TOLERANCE)
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), generated)


def test_serving_changes_no_bit_of_the_target() -> None:
    model = tiny_model("llama")

    def digest() -> str:
        state = sorted(model.state_dict().items())
        return hashlib.sha256(b"".join(value.numpy().tobytes() for _, value in state)).hexdigest()

    before = digest()
    target = Target(model)
    cache = target.new_cache()
    row = cache.open_row()
    target.prefill(torch.arange(3, 12), row, cache)
    target.verify(chain(torch.tensor([5]), torch.tensor([[6, 7]])), [row], cache)
    assert digest() == before


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "opt", "gpt-neox"])
def test_truncated_target_is_the_first_layers_and_shares_their_weights(family: str) -> None:
    model = tiny_model(family)
    small = tiny_model(family)
    config = small.config
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.load_state_dict(model.state_dict(), strict=False)
    ids = torch.arange(3, 15)
    with torch.inference_mode():
        expected = reference(ids[None], use_cache=False).logits[0]
    target = Target(model)
    cut = target.truncated(2)
    cache = cut.new_cache()
    row = cache.open_row()
    served = cut.verify(chain(ids[None, 0], ids[None, 1:]), [row], cache).logits[0]
    torch.testing.assert_close(served, expected, atol=TOLERANCE, rtol=TOLERANCE)
    shared = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in cut.model.parameters()} <= shared
    assert target.num_layers == 3 and cut.num_layers == 2
    with pytest.raises(ValueError, match="has 3 layers"):
        target.truncated(3)


@pytest.mark.skipif(not can_pack(), reason="this torch build has no oneDNN packed linear layers")
@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "mixtral"])
def test_packed_layers_keep_weights_bit_for_bit_and_logits_to_rounding(family: str) -> None:
    model = tiny_model(family)
    weight = model.lm_head.weight.detach().clone()
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        assert lay_out_linear_layers(model, forms=[PACKED])["packed"] > 0
        assert isinstance(model.lm_head, PackedLinear)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(model.lm_head.weight, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_unpacked_and_works_on_cpu(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    assert not lay_out_linear_layers(model)
    assert Target(model).dtype == dtype


def test_a_model_that_ignores_the_interface_is_refused() -> None:
    """The check at load is of behaviour: an attention that skips the registered function is noticed."""
    model = tiny_model("llama")
    layer = model.model.layers[1].self_attn

    def own_attention(hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    layer.forward = own_attention
    with pytest.raises(ValueError, match="routes 2 of 3 layers"):
        Target(model)


def test_a_model_that_runs_its_layers_again_is_refused_in_words_of_its_own() -> None:
    """As the Hierarchical Reasoning Model does: two passes over three layers, which its configuration counts as six."""
    model = tiny_model("llama")
    model.model.layers = torch.nn.ModuleList([*model.model.layers, *model.model.layers])
    model.config.num_hidden_layers = 6
    with pytest.raises(ValueError, match="llama attends 6 times for each token in 3 layers, which it runs again and again"):
        Target(model)


def test_a_model_of_more_layers_than_its_configuration_counts_is_refused_in_words_of_its_own() -> None:
    """As a decoder of an encoder-decoder model whose encoder has fewer layers."""
    model = tiny_model("opt")
    model.config.num_hidden_layers = 2
    with pytest.raises(ValueError, match="opt has 3 layers of attention, although its configuration counts 2"):
        Target(model)


def test_ragged_rows_get_the_logits_of_rows_alone() -> None:
    target = tiny_target("llama")
    cache = target.new_cache(block_size=4)
    prefixes = [torch.arange(3, 3 + size) for size in (1, 9, 20)]
    rows = []
    for prefix in prefixes:
        row = cache.open_row()
        target.prefill(prefix, row, cache)
        rows.append(row)
    drafts = torch.tensor([[7, 8, 9], [10, -1, -1], [11, 12, -1]])
    together = target.verify(chain(torch.tensor([4, 5, 6]), drafts), rows, cache).logits
    for b, prefix in enumerate(prefixes):
        alone_cache = target.new_cache(block_size=16)
        row = alone_cache.open_row()
        target.prefill(prefix, row, alone_cache)
        alone = target.verify(chain(torch.tensor([4 + b]), drafts[b : b + 1]), [row], alone_cache).logits[0]
        real = 1 + int((drafts[b] >= 0).sum())
        torch.testing.assert_close(together[b, :real], alone[:real], atol=TOLERANCE, rtol=TOLERANCE)


def test_prefill_takes_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    target.passes.chunk_size = 7
    sizes: list[int] = []
    run = target.run

    def recorded(model: Any, tree: CandidateTree, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tree.num_nodes)
        return run(model, tree, *args, **kwargs)

    monkeypatch.setattr(target, "run", recorded)
    row, cache = CacheRow(), target.new_cache()
    features = target.prefill(torch.arange(3, 23), row, cache, features=(1,))
    assert sizes == [7, 7, 6] and row.length == 20 and features[1].shape[1] == 20
