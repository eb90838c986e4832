"""The picture in docs/heads.md shows what the shipped heads' cards say. `python tests/heads/test_figure.py` draws it."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from selfspec.train.curves import Chart, Line, draw

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "images" / "heads.svg"
TASKS = {
    "mt_bench": "chat",
    "translation": "translation",
    "summarization": "summary",
    "qa": "questions",
    "math_reasoning": "maths",
    "rag": "rag",
    "HumanEval": "code",
}
HEADS = {"eagle": "eagle", "early_exit": "early_exit", "draft": "draft_model", "medusa": "medusa"}


def card(head: str) -> str:
    return (ROOT / "heads" / "pretrained" / "smollm2-135m-instruct" / head / "README.md").read_text()


def by_task(head: str) -> dict[str, float]:
    """Tokens per pass of each task that a card's table names."""
    lengths: dict[str, float] = {}
    for names, values in re.findall(r"^\| ([\w /]+?)(?:,[^|]*)? \| ([\d. /]+) \|$", card(head), re.MULTILINE):
        lengths |= dict(zip(names.split(" / "), map(float, values.split(" / ")), strict=True))
    return lengths


def by_step(head: str) -> list[tuple[float, float]]:
    """The evaluations during training that a card tells of, the last one at the end of the recipe's steps."""
    text = " ".join(card(head).split())
    points = [
        (float(step.replace(",", "")), float(length)) for length, step in re.findall(r"(\d\.\d\d) after ([\d,]*\d)", text)
    ]
    settings = yaml.safe_load((ROOT / "recipes" / "configs" / f"{head}_smollm2.yaml").read_text())
    [last] = re.findall(r"(\d\.\d\d) at the end", text)
    return sorted([*points, (settings["max_steps"], float(last))])


def picture() -> str:
    tasks = [Line(name, [(place, by_task(head)[task]) for place, task in enumerate(TASKS)]) for head, name in HEADS.items()]
    steps = [Line(name, by_step(head)) for head, name in HEADS.items() if head in ("eagle", "medusa")]
    return draw(
        [
            Chart("Tokens per target pass, by task", "Spec-Bench and HumanEval", tasks, names=list(TASKS.values())),
            Chart("Tokens per target pass during training, held-out prompts", "step", steps),
        ],
        columns=1,
        width=640,
    )


def test_the_picture_shows_what_the_cards_say() -> None:
    assert FILE.read_text() == picture(), "draw it again: python tests/heads/test_figure.py"
    assert by_step("eagle")[0] == (951, 3.23) and by_task("eagle")["HumanEval"] == 4.65


if __name__ == "__main__":
    FILE.write_text(picture())
