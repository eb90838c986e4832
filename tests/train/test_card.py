"""What a card says to those who read it elsewhere."""

from __future__ import annotations

from pathlib import Path

from selfspec.train.card import CARD_NAME, Compared, add_comparison, public_command


def test_a_command_is_shown_as_others_would_call_it() -> None:
    assert public_command(["/opt/lib/selfspec/__main__.py", "train", "/home/me/logs", "--output=/x/run"]) == (
        "selfspec train logs --output=run"
    )
    assert public_command(["/opt/bin/selfspec", "train", "logs"]) == "selfspec train logs"
    assert public_command(["recipes/train_eagle.py", "--hub_token", "secret"]) == "recipes/train_eagle.py --hub_token …"


def test_a_comparison_stands_before_the_versions(tmp_path: Path) -> None:
    (tmp_path / CARD_NAME).write_text("# head\n\nVersions: torch 2.\n")
    row = {"vs_transformers": 1.0, "is_identical": True, "num_prompts": 6, "num_tokens": 288}
    plain = Compared(name="none", tokens_per_second=10.0, vs_plain=1.0, acceptance_length=1.0, **row)
    head = Compared(name="the new head", tokens_per_second=25.0, vs_plain=2.5, acceptance_length=3.1, **row)
    add_comparison(tmp_path, [plain, head])
    card = (tmp_path / CARD_NAME).read_text()
    assert "6 held-out prompts, greedy, one at a time, 288 tokens" in card
    assert "| the new head | 3.10 | 25.0 | 2.50x | 1.00x | yes |" in card
    assert card.endswith("\n\nVersions: torch 2.\n") and card.index("## Speed") < card.index("Versions")
