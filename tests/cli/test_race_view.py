"""The race in the terminal: columns where there is room, else lines; drafted tokens in colour; cuts marked."""

import io
import re
from collections.abc import Iterator

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from selfspec.bench.lanes import Lane, Turn, race_level
from selfspec.cli.race_view import CUT, RaceView
from selfspec.loop.text import TextStream
from selfspec.traffic.prompt_files import PromptRow

NAMES = ("eagle", "transformers", "ngram", "none")


def console_of(width: int, *, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=width, height=30, force_terminal=is_terminal, color_system="standard")


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture
def follow(tiny_tokenizer: PreTrainedTokenizerFast):
    """Shows a race of which the first lane drafts two tokens in three."""

    def follow(console: Console, text: str, *, ends: bool = True) -> list[Lane]:
        ids = tiny_tokenizer.encode(text, add_special_tokens=False)
        end = [tiny_tokenizer.eos_token_id] if ends else []

        def drafted() -> Iterator[Turn]:
            for start in range(0, len(ids), 3):
                piece = ids[start : start + 3]
                yield Turn(piece, len(piece) - 1)
            yield from (Turn([token_id]) for token_id in end)

        def plain() -> Iterator[Turn]:
            yield from (Turn([token_id]) for token_id in [*ids, *end])

        texts = {name: TextStream(tiny_tokenizer) for name in NAMES}
        row = PromptRow("a", [{"role": "user", "content": "Where\n did the cat sit? " + "long " * 40}])
        view = RaceView(console, row, texts, ends=[tiny_tokenizer.eos_token_id], max_tokens=len(ids))
        lanes = view.follow(race_level({name: drafted() if name == "eagle" else plain() for name in NAMES}))
        assert {stream.text for stream in texts.values()} == {text}
        return lanes

    return follow


@pytest.mark.parametrize(("width", "names"), [(80, NAMES[:2]), (120, NAMES[:3]), (200, NAMES)])
def test_answers_stand_side_by_side_as_far_as_the_width_allows(follow, width: int, names: tuple[str, ...]) -> None:
    console = console_of(width, is_terminal=True)
    lanes = follow(console, "the dog sat on the cat")
    assert [lane.name for lane in lanes] == list(NAMES) and all(lane.is_done for lane in lanes)
    last = without_codes(shown(console)).rsplit("╭", len(names))
    assert [re.findall(r"─ (\w+) ─", part)[0] for part in last[1:]] == list(names)
    assert "".join(last[1:]).count("the dog sat on the cat") == len(names)
    # Every lane has a bar and its figures, also without a column.
    frame = without_codes(shown(console))[-2000:]
    assert all(re.search(rf"{name} +━+ +\d+ tokens in +\d+ passes", frame) for name in NAMES)
    assert max(map(len, without_codes(shown(console)).split("\n"))) <= 2 * width


@pytest.mark.parametrize(("width", "is_terminal"), [(60, True), (80, False)])
def test_where_there_is_no_room_the_first_answer_comes_as_plain_lines(follow, width: int, is_terminal: bool) -> None:
    console = console_of(width, is_terminal=is_terminal)
    follow(console, "the cat sat on the mat\nand the dog sat on the cat")
    question, first, second, *figures = without_codes(shown(console)).strip().splitlines()
    assert question.startswith("Where did the cat sit? long") and len(question) <= width and question.endswith("…")
    assert (first, second) == ("the cat sat on the mat", "and the dog sat on the cat")
    assert [line.split()[0] for line in figures] == list(NAMES)
    assert "╭" not in shown(console)


def test_drafted_tokens_alone_are_coloured(follow, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    console = console_of(60, is_terminal=True)
    text = "the cat sat on the mat"
    follow(console, text)
    answer = shown(console).split("\n")[2]
    coloured = re.findall(r"\x1b\[1;36m(.*?)\x1b\[0m", answer)
    ids = tiny_tokenizer.encode(text, add_special_tokens=False)
    drafted = [tiny_tokenizer.decode(token_id) for number, token_id in enumerate(ids) if number % 3 < 2]
    assert "".join(coloured).split() == "".join(drafted).split() and without_codes(answer) == text


def test_an_answer_that_was_cut_says_so(follow) -> None:
    for is_terminal in (True, False):
        console = console_of(80, is_terminal=is_terminal)
        follow(console, "the cat sat on", ends=False)
        assert f"sat on {CUT}" in without_codes(shown(console))
        console = console_of(80, is_terminal=is_terminal)
        follow(console, "the cat sat on", ends=True)
        assert CUT not in without_codes(shown(console))
