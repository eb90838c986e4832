"""Imports point one way: a room knows the rooms below it, and none above."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the ground up. A room may import from those on lower floors alone: neighbours on one floor do not know each other.
FLOORS = (
    ("config", "failures", "files", "kernels"),
    ("tree",),
    ("cache",),
    ("model",),
    ("heads", "loop"),
    ("drafters",),
    ("api",),
    ("engine",),
    ("traffic", "plan"),
    ("train", "bench", "serve"),
    ("interop", "app"),
    ("cli",),
)
# The package's front door names what is behind it, for types and at first use; entry points start what is above them.
FRONT_DOOR = "selfspec"
ENTRIES = ("selfspec/__main__.py", "app/__main__.py")
# Not of the house: scripts that people run, and copy.
RECIPES_MAY_NOT_KNOW = ("cli", "app", "serve", "engine")


def sources() -> Iterator[tuple[str, Path]]:
    """Every file of the package with its room: a folder, or a file beside them."""
    for top in ("selfspec", "heads", "kernels", "app"):
        for file in (ROOT / top).rglob("*.py"):
            relative = file.relative_to(ROOT)
            # The links within selfspec/ lead to folders that have their own turn.
            if top == "selfspec" and relative.parts[1] in ("heads", "kernels", "app", "recipes"):
                continue
            if str(relative) in ENTRIES:
                continue
            if top != "selfspec":
                yield top, file
            elif relative.name == "__init__.py" and len(relative.parts) == 2:
                yield FRONT_DOOR, file
            else:
                yield relative.parts[1].removesuffix(".py"), file


ROOMS = {name for name, _ in sources()} - {FRONT_DOOR}
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def rooms_imported(file: Path) -> set[str]:
    """The rooms that a file imports from, within functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file.relative_to(ROOT)}:{node.lineno}: imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "selfspec" and (room := rest.partition(".")[0]) in ROOMS:
                found.add(room)
    return found


def test_every_room_has_its_floor():
    assert ROOMS == set(FLOOR), "a new room gets its place in FLOORS"


@pytest.mark.parametrize("room", sorted(FLOOR))
def test_imports_point_down(room):
    strays = {
        f"{file.relative_to(ROOT)} imports {other}"
        for name, file in sources()
        if name == room
        for other in rooms_imported(file)
        if other != room and FLOOR[other] >= FLOOR[room]
    }
    assert not strays


def test_the_walk_sees_imports_that_run_back_up(tmp_path):
    file = tmp_path / "tree.py"
    file.write_text("def f():\n    from selfspec import engine\n    from selfspec.loop.accept import accept\n")
    assert rooms_imported(file) == {"engine", "loop"}


def test_recipes_know_the_library_and_not_each_other():
    recipes = list((ROOT / "recipes").glob("*.py"))
    names = {file.stem for file in recipes}
    for file in recipes:
        assert not rooms_imported(file) & set(RECIPES_MAY_NOT_KNOW), file.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in names, file.name
