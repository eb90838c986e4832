"""The Heads tab's table and bars: what cards report, and no raw data."""

from __future__ import annotations

import re

from selfspec.app import heads_render
from selfspec.app.local_races import LocalRaces
from selfspec.drafters import shipped
from selfspec.files import shipped_heads
from selfspec.plan.cards import CardFigures, eval_results, read_figures, read_task_lengths


def test_the_table_has_every_shipped_head_the_best_first():
    heads = list(heads_render.summaries(shipped_heads()))
    html = heads_render.shipped(heads, {"eagle"})
    labels = re.findall(r"<td><b>([^<]+)</b></td>", html)
    assert labels[0] == "EAGLE" and len(labels) == len(shipped_heads())
    lengths = [float(length) for length in re.findall(r"<td>(\d\.\d\d)</td>", html)]
    assert lengths == sorted(lengths, reverse=True) and len(lengths) == len(labels)
    assert html.count("<td>yes</td>") == 1


def test_acceptance_by_task_is_the_cards():
    for folder in shipped_heads():
        card = (folder / "README.md").read_text(encoding="utf-8")
        lengths = read_task_lengths(card)
        assert {"qa", "rag", "translation", "HumanEval"} <= set(lengths)
        assert all(1 < length < 8 for length in lengths.values())
        html = heads_render.acceptance(folder)
        assert "Acceptance by task" in html and f"<b>{lengths['qa']:.2f}</b>" in html
        assert ("Acceptance by depth" in html) == bool(read_figures(card).rates)


def test_acceptance_by_depth_comes_from_the_metadata(tmp_path):
    from huggingface_hub import ModelCardData

    figures = CardFigures(length=2.6, rates=(0.81, 0.52), depth=2, num_nodes=24)
    data = ModelCardData(eval_results=eval_results("held_out.jsonl", figures, {"qa": 2.0, "rag": 3.0}), model_name="x")
    (tmp_path / "README.md").write_text(f"---\n{data.to_yaml()}\n---\n")
    html = heads_render.acceptance(tmp_path)
    assert re.findall(r"--share:([\d.]+)", html) == ["0.8100", "0.5200", "0.6667", "1.0000"]
    assert "<b>81%</b>" in html and "<b>3.00</b>" in html


def test_a_card_without_figures_draws_nothing(tmp_path):
    assert heads_render.acceptance(tmp_path) == ""
    (tmp_path / "README.md").write_text("# A head")
    assert heads_render.acceptance(tmp_path) == ""


def test_facts_are_words():
    html = heads_render.facts(
        {
            "kind": "draft_model",
            "layer_config": {"transformers_version": "5"},
            "blocks": [0, 1],
            "has_bias": False,
            "lora_alpha": 32.0,
            "revision": None,
        }
    )
    assert "transformers_version" not in html and "{" not in html and "[" not in html
    assert "<dd>0, 1</dd>" in html and "<dd>no</dd>" in html and "<dd>32</dd>" in html
    assert html.index("draft_model") < html.index("<details>") < html.index("blocks")


def test_a_shipped_head_is_offered_once(target, head_dir, monkeypatch):
    monkeypatch.setattr(shipped, "shipped_heads", lambda: [head_dir])
    races = LocalRaces(target)
    offered = dict(races.drafters)
    assert "medusa" in offered
    assert races.examine(str(head_dir)).drafter == "medusa"
    assert races.drafters == offered
