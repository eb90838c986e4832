"""What the pages say: their code runs, and every link, file, module and function that they name exists."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from support import random_prompts, tiny_target

from selfspec import SamplingParams, Target, generate
from selfspec.engine import SpecEngine
from selfspec.loop.drafter import Drafter
from selfspec.loop.sequence import Request

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("selfspec", "heads", "kernels", "app", "recipes", "tests", "docs")
# What a page has in place of a name of the reader's own.
PLACEHOLDER = "NAME"
PATHS_TO_A_MODEL = ("path-or-hub-id", "path/to/model", "smollm2")

REPETITIVE = [[5, 6, 7, 8] * 8, [9, 10, 11] * 7, [20, 21] * 9]
SETTINGS = {
    "greedy": SamplingParams(max_new_tokens=48),
    "sampled": SamplingParams(max_new_tokens=48, temperature=0.8, seed=4),
}


def each_page(pages: list[Path] = PAGES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.name)


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    links = {*re.findall(r"\]\(([^()\s]+)\)", text), *re.findall(r'(?:src|srcset|href)="([^"]+)"', text)}
    dead = set()
    for link in links:
        name, _, anchor = link.partition("#")
        if name.startswith(("http://", "https://")):
            continue
        file = page.parent / name if name else page
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            dead.add(link)
    return dead


def missing_paths(text: str) -> set[str]:
    """Files and folders of the project that a text names, in prose and in commands, and that do not exist."""
    folders = "|".join(FOLDERS)
    endings = "py|md|yaml|jsonl|json|toml|txt|css|png"
    whole = re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/.-]*(?:\.(?:{endings})\b|/(?=`)))", text)
    missing = {path for path in whole if PLACEHOLDER not in path and not (ROOT / path).exists()}
    bare = set(re.findall(r"`([a-z]\w*\.py)`", text))
    return missing | {name for name in bare if not any(any((ROOT / folder).rglob(name)) for folder in FOLDERS)}


def missing_modules(text: str) -> set[str]:
    """Dotted names from `selfspec` on that are no module, nor anything in one."""
    return {name for name in re.findall(r"(?<![\w/.@-])selfspec(?:\.[A-Za-z_]\w*)+", text) if not is_there(name)}


def is_there(name: str) -> bool:
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("selfspec"):
                # It is there, and needs a package that is optional.
                return True
            continue
        for attribute in parts[size:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@each_page()
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == set()


@each_page()
def test_files_and_modules_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert missing_paths(text) == set()
    assert missing_modules(text) == set()


def test_the_checks_see_what_is_missing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n[here](#a-page) [gone](#no-page) [file](gone.md) [web](https://example.org)\n")
    assert dead_links(page) == {"#no-page", "gone.md"}
    text = "`selfspec/loop/decode.py`, `selfspec/decode.py`, `python tests/gone.py`, `tests/gone/`, `step.py`, `stage.py`"
    assert missing_paths(text) == {"selfspec/decode.py", "tests/gone.py", "tests/gone/", "stage.py"}
    text = "`selfspec.loop.step.launch` `selfspec.loop.step.gone` `selfspec.gone`"
    assert missing_modules(text) == {"selfspec.loop.step.gone", "selfspec.gone"}


def test_every_page_can_be_reached() -> None:
    """From the site's menu, and the site's first page from the README."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    for page in PAGES[1:]:
        assert f"- {page.name}\n" in menu, page.name
    assert "(docs/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@each_page([ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("tutorial", "decoding", "new_drafter"))])
def test_examples_run(page: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "\n".join(python_blocks(page))
    assert any(path in code for path in PATHS_TO_A_MODEL)
    for path in PATHS_TO_A_MODEL:
        code = code.replace(path, str(tiny_target_dir))
    names: dict[str, Any] = {}
    try:
        exec(compile(code, page.name, "exec"), names)
    finally:
        if "engine" in names:
            names["engine"].close()
    assert capsys.readouterr().out


@pytest.fixture(scope="module")
def drafter_class() -> type[Drafter]:
    """The drafter of docs/new_drafter.md."""
    names: dict[str, Any] = {}
    exec(compile(python_blocks(ROOT / "docs" / "new_drafter.md")[0], "new_drafter.md", "exec"), names)
    return names["SuccessorDrafter"]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def test_the_example_is_short() -> None:
    lines = python_blocks(ROOT / "docs" / "new_drafter.md")[0].splitlines()
    assert len(lines) < 80
    assert max(map(len, lines)) <= 125


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_example_is_exact(drafter_class: type[Drafter], target: Target, name: str, batch_size: int) -> None:
    sampling = SETTINGS[name]
    prompts = [*random_prompts(4, (1, 40), seed=3), *REPETITIVE]
    expected = [answer.token_ids for answer in generate(target, prompts, sampling=sampling)]
    drafter = drafter_class()
    for use_guard in (False, True):
        answers = generate(
            target, prompts, drafter=drafter, sampling=sampling, batch_size=batch_size, use_cost_guard=use_guard
        )
        assert [answer.token_ids for answer in answers] == expected
    assert not drafter._num_learnt, "a sequence that has ended leaves nothing"


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_example_drafts_well_where_text_repeats(
    drafter_class: type[Drafter], target: Target, name: str, batch_size: int
) -> None:
    drafter = drafter_class()
    for _ in range(2):
        # What it learnt the first time it drafts the second time.
        answers = generate(
            target, REPETITIVE, drafter=drafter, sampling=SETTINGS[name], batch_size=batch_size, use_cost_guard=False
        )
    assert all(answer.acceptance_length > 1.2 for answer in answers), [answer.acceptance_length for answer in answers]
    drafter.forget()
    assert not drafter._successors


def test_the_example_keeps_the_invariants_of_a_tree(drafter_class: type[Drafter], target: Target) -> None:
    class Checked(drafter_class):  # type: ignore[misc, valid-type]
        def propose(self, batch, num_draft_tokens):
            proposal = super().propose(batch, num_draft_tokens)
            tree = proposal.tree
            assert tree.max_depth <= num_draft_tokens and tree.num_nodes <= self.num_nodes
            assert tree.tokens[:, 0].tolist() == batch.roots.tolist()
            if tree.scores is not None:
                for row, parents in enumerate(tree.parents.tolist()):
                    for node, parent in enumerate(parents):
                        assert parent < 0 or tree.scores[row, node] <= tree.scores[row, parent]
            seen.append(tree.num_nodes)
            return proposal

    seen: list[int] = []
    generate(target, REPETITIVE, drafter=Checked(depth=3, width=3, num_nodes=9), batch_size=3, use_cost_guard=False)
    assert max(seen) > 4
    with pytest.raises(ValueError, match="width of at most 4"):
        drafter_class(width=5)


def test_the_example_serves_many_callers(drafter_class: type[Drafter], target: Target) -> None:
    sampling = SETTINGS["greedy"]
    expected = [answer.token_ids for answer in generate(target, REPETITIVE, sampling=sampling)]
    engine = SpecEngine(target, [drafter_class()], use_cost_guard=False)
    try:
        for prompt, tokens in zip(REPETITIVE, expected, strict=True):
            *_, last = engine.stream([Request(prompt, sampling)], drafter="successors")
            assert last.completion is not None and last.completion.token_ids == tokens
        assert not engine.problems
    finally:
        engine.close()


def test_the_walk_of_a_token_names_what_is_there() -> None:
    """On every line of the table in docs/decoding.md: a file, and a function or method in it."""
    page = (ROOT / "docs" / "decoding.md").read_text(encoding="utf-8")
    section = page.partition("## Follow a token")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(lines) > 12
    for line in lines:
        found = re.match(r"\| `(selfspec/[\w/]+)\.py` \| `([\w.]+)` \|", line)
        assert found and is_there(f"{found[1].replace('/', '.')}.{found[2]}"), line
