"""No evaluation prompt, no near-duplicate, and a held-out part that does not depend on the answers."""

import sys

import pytest

from selfspec.traffic.clean import Exclusion, NearDuplicates, clean, is_held_out
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.prepare import CleanOptions, WritingOptions

TEN = "one two three four five six seven eight nine ten"
LONG = " ".join(f"word{i}" for i in range(60))


def asking(*turns: str, name: str = "a", answer: str = "yes") -> Conversation:
    messages = [message for turn in turns for message in (user(turn), {"role": "assistant", "content": answer})]
    return Conversation(name, messages)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("turn", "is_excluded"),
    [
        (f"Zero, {TEN} eleven", True),
        ("ONE two\nthree, four-five six: seven eight nine -- ten!", True),
        (TEN.removesuffix(" ten"), False),
        (TEN.replace("five", "5"), False),
        ("who are you", True),
        ("Who are you?", True),
        ("Who are you today?", False),
        ("你好，世界", True),
        ("世界，你好", False),
    ],
)
def test_exclusion_by_ten_words_or_the_whole_turn(turn, is_excluded):
    exclusion = Exclusion([asking("Who are you?", f"Count. {TEN}, and so on"), asking("你好，世界")])
    assert (asking(turn) in exclusion) == is_excluded
    assert (asking("Something else.", turn) in exclusion) == is_excluded, "in any turn"


def test_what_the_assistant_says_excludes_nothing():
    assert asking("Hi", answer=TEN) not in Exclusion([asking(TEN)])


def test_near_duplicates():
    pytest.importorskip("datasketch")
    duplicates = NearDuplicates()
    assert duplicates.find(asking(LONG, name="first")) is None
    assert duplicates.find(asking(LONG.upper() + "!", answer="no")) == "first"
    assert duplicates.find(asking(LONG.replace("word30", "other"))) == "first"
    assert duplicates.find(asking(" ".join(LONG.split()[:30]))) is None, "half of it is another"
    assert duplicates.find(asking("What is 2 + 3?", name="sum")) is None
    assert duplicates.find(asking("What is 2 + 4?")) is None
    assert duplicates.find(asking("what is 2+3")) == "sum"


def test_clean_reports_what_it_leaves_out():
    pytest.importorskip("datasketch")
    conversations = [asking(LONG, name="a"), asking(TEN, name="b"), asking(LONG, name="c")]
    report = Report()
    assert list(clean(conversations, report, excluded=[asking(TEN)])) == conversations[:1]
    assert report.examples == {"excluded": [f"b: {TEN}"], "near-duplicate": ["c of a"]}
    assert report.num_kept == 1


def test_held_out_part_is_the_same_whatever_the_answers_and_the_share():
    conversations = [asking(f"question {i}", name=str(i)) for i in range(2000)]
    held_out = [c.id for c in conversations if is_held_out(c, 0.1)]
    assert 150 < len(held_out) < 250
    assert held_out == [c.id for c in conversations if is_held_out(asking(*c.user_turns, name=c.id, answer="no"), 0.1)]
    assert set(held_out) < {c.id for c in conversations if is_held_out(c, 0.2)}
    assert not any(is_held_out(c, 0) for c in conversations)
    assert all(is_held_out(c, 1) for c in conversations)


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match="similarity=0"):
        NearDuplicates(0)
    with pytest.raises(ValueError, match=r"held_out=1\.5 is not allowed"):
        CleanOptions(held_out=1.5)
    with pytest.raises(ValueError, match="batch_size=0 is not allowed"):
        WritingOptions(batch_size=0)
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ValueError, match=r"pip install 'selfspec\[train\]'"):
        NearDuplicates()


def test_every_similarity_that_is_allowed_can_be_asked_for() -> None:
    pytest.importorskip("datasketch", reason="finding near-duplicates needs datasketch: pip install 'selfspec[train]'")
    asked = [Conversation(str(i), [{"role": "user", "content": text}]) for i, text in enumerate(["a b c", "a b c", "d e f"])]
    for similarity in (0.01, 0.5, 0.97, 0.999, 1.0):
        assert [each.id for each in clean(asked, Report(), similarity=similarity)] == ["0", "2"]
