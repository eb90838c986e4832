"""The Plan tab without a browser: it says what the command says, shows no path, and refuses what nobody can predict."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gradio as gr
import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from selfspec.app.plan_tab import ASSUMED, MEASURED, NO_CARD, PlanTab
from selfspec.cli.main import app
from selfspec.drafters.shipped import identity
from selfspec.heads.medusa import MedusaConfig

CARD = "| prompts | acceptance length |\n| --- | --- |\n| all | 2.30 |\n\n| acceptance rate | 0.80 | 0.50 |\n"


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory) -> Path:
    """The configuration of an 8B Llama, which is large enough for a prediction."""
    folder = tmp_path_factory.mktemp("secret-place") / "llama"
    shape = {"hidden_size": 3840, "intermediate_size": 16384, "num_hidden_layers": 32, "num_attention_heads": 60}
    LlamaConfig(**shape, num_key_value_heads=10, vocab_size=49152, dtype="bfloat16").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def head_dir(target, target_dir) -> Path:
    """The configuration of a Medusa head for it, whose card reports rates."""
    folder = target_dir.parent / "head"
    record = identity(target).__class__(**{**vars(identity(target)), "hidden_size": 3840, "num_layers": 32})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MedusaConfig(target=record, num_heads=2).to_dict()))
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture(scope="module")
def tab(target_dir):
    with gr.Blocks():
        yield PlanTab(str(target_dir), {"ngram": "n-gram"})


def predict(tab: PlanTab, **changes: object) -> tuple[str, str]:
    """The words and the pictures."""
    settings = {
        "source": "llama",
        "drafter": "ngram",
        "card": "h100",
        "other": NO_CARD,
        "acceptance": MEASURED,
        "rate": 0.7,
        "depth": 4,
        "batch_size": 1,
        "context": 1024,
    }
    updates = tab.predict(**{**settings, **changes})
    return tuple(updates[output] for output in tab.outputs)


def test_page_and_command_agree(tab, target_dir, head_dir):
    drafter = f"medusa:{head_dir}"
    args = ["plan", "--target", target_dir, "--drafter", drafter, "--gpu", "h100", "--context", 1024, "--json"]
    record = json.loads(CliRunner().invoke(app, list(map(str, args))).stdout)
    words, _ = predict(tab, drafter=drafter)
    best = record["best"]
    assert best["depth"] == 2
    assert f"<b>{best['speedup']:.2f}×</b> with 2 draft tokens a step" in words
    assert record["acceptance"].removeprefix("the head's card: ") in words
    assert f"Largest batch at this context: {record['largest_batch']:,}" in words
    # An α that somebody sets counts in place of the card.
    assert "accepted with chance 0.7" in predict(tab, drafter=drafter, acceptance=ASSUMED)[0]


def test_where_nothing_is_measured_it_says_so(tab):
    words, _ = predict(tab)
    assert "Nothing measured is known of ngram; assumed: a draft token is accepted with chance 0.7" in words


def test_no_path_of_this_machine_is_shown(tab, target_dir):
    for words in (*predict(tab), *predict(tab, context=1 << 17), *predict(tab, drafter="truncated:99")):
        assert str(target_dir.parent) not in words and "secret-place" not in words
    assert "llama takes 1 to" in predict(tab, context=1 << 17)[0]
    labels = [component.value for component in tab.inputs if isinstance(component, gr.Textbox)]
    assert labels == ["llama"]


def test_curves_mark_the_best_and_the_chosen(tab):
    words, pictures = predict(tab, depth=3)
    assert pictures.count("<svg") == 2 and pictures.count('class="stack"') == 1
    by_depth, by_batch = re.findall(r"<svg.*?</svg>", pictures, re.DOTALL)
    assert by_depth.count("chosen") == by_depth.count("best") == by_batch.count("best") == 1
    assert "draft tokens a step 3, speed-up" in by_depth
    assert re.search(r"<dt>draft tokens</dt><dd>3</dd>", words)
    # In order of weight.
    names = re.findall(r"<dt>([^<]+)</dt>", words)
    assert names == ["speed-up", "tokens/s at most", "tokens per target pass", "draft tokens", "draft cost", "verify cost"]


def test_two_cards_are_compared(tab):
    _, pictures = predict(tab, other="b200")
    assert pictures.count("line s1") == 4 and pictures.count('class="stack"') == 2
    assert [row[0] for row in re.findall(r"<tr><td>(h100|b200)</td><td>([\d.]+×)</td>", pictures)] == ["h100", "b200"]
    # The same card twice is one card.
    assert "compared" not in predict(tab, other="h100")[1]


def test_nothing_is_promised_where_host_time_decides(tiny_target_dir):
    with gr.Blocks():
        tab = PlanTab(str(tiny_target_dir), {"ngram": "n-gram"})
    words, pictures = predict(tab, source=Path(tiny_target_dir).name, other="b200")
    assert "Too small to predict: host time decides" in words and "It fits" in words
    assert "speed-up" not in words and "×" not in words
    assert "Tokens per pass by draft size" in pictures and pictures.count("<td>–</td>") == 4


def test_a_batch_too_large_for_drafts_says_that_plain_is_fastest(tab, head_dir):
    words, _ = predict(tab, drafter=f"medusa:{head_dir}", batch_size=512)
    assert "plain decoding is fastest at this batch" in words
