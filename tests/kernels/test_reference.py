"""The kernels' specification is for kernels and their tests alone."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nothing_else_imports_the_specification() -> None:
    files = [file for top in ("selfspec", "heads", "app", "recipes") for file in (ROOT / top).rglob("*.py")]
    assert len(files) > 100
    # selfspec/kernels is a link to kernels/.
    others = [file for file in files if "kernels" not in file.relative_to(ROOT).parts]
    assert not [str(file) for file in others if "kernels.reference" in file.read_text(encoding="utf-8")]
