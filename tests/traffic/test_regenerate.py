"""The target's own answers: turn by turn, the same in any batch and after any interruption."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfspec import SamplingParams, Target, generate
from selfspec.cli.main import app
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.masking import tokenize
from selfspec.traffic.prompt_files import OutputWriter
from selfspec.traffic.regenerate import regenerate, turns_to_answer
from selfspec.traffic.self_prompts import self_prompts
from selfspec.traffic.sources import read_conversations

ROOT = Path(__file__).parents[2]
TEXT = "the cat sat on the mat and the dog sat on the cat one two three four five six seven"
GREEDY = SamplingParams(max_new_tokens=40)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.0, seed=1)


def message(kind: str, content: str = "x") -> dict:
    return {"role": {"s": "system", "u": "user", "a": "assistant", "t": "tool"}[kind], "content": content}


def conversations(count: int, num_turns: int = 3) -> list[Conversation]:
    """Conversations of one, two, ... user turns in turn, with answers that will be replaced."""
    words, rows = TEXT.split(), []
    for i in range(count):
        texts = [" ".join(words[(i * 3 + turn) % 13 :][: 4 + i % 5]) for turn in range(1 + i % num_turns)]
        messages = [said for text in texts for said in (message("u", text), message("a", "OLD"))]
        rows.append(Conversation(f"c{i}", messages, category="test"))
    return rows


@pytest.fixture(scope="module")
def target(tiny_target_dir) -> Target:
    return Target.from_pretrained(tiny_target_dir)


@pytest.mark.parametrize(
    ("kinds", "expected", "expected_last"),
    [
        ("u", ["u"], ["u"]),
        ("ua", ["u"], ["u"]),
        ("suaua", ["su", "u"], ["suAu"]),
        ("uu", ["u", "u"], ["uu"]),
        ("uatau", ["uAt", "u"], ["uAtAu"]),
        ("uattaua", ["uAtt", "u"], ["uAttAu"]),
        ("uatata", ["uAtAt"], ["uAtAt"]),
    ],
)
def test_which_answers_are_written_and_which_are_kept(kinds, expected, expected_last):
    """A: an answer that is kept, with weight 0."""
    messages = [message(kind) for kind in kinds]
    for last_only, wanted in (False, expected), (True, expected_last):
        turns = turns_to_answer(messages, last_only=last_only)
        found = ["".join(m["role"][0].upper() if m.get("weight") == 0 else m["role"][0] for m in turn) for turn in turns]
        assert found == wanted


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_answer_stands_on_those_before_it(target, sampling):
    rows = conversations(7)
    report = Report()
    results = {c.id: c for c in regenerate(target, rows, report, sampling=sampling, batch_size=3)}
    assert set(results) == {c.id for c in rows}
    assert report.num_kept == len(rows)
    num_stopped = 0
    for row in rows:
        result = results[row.id]
        said = result.messages
        assert [m["role"] for m in said] == [m["role"] for m in row.messages][: len(said)]
        assert [m["content"] for m in said[::2]] == row.user_turns[: len(said) // 2]
        assert len(said) == len(row.messages) or result.finish_reason == "length"
        num_stopped += result.finish_reason == "stop"
        if sampling.is_greedy:
            for i in range(1, len(said), 2):
                [expected] = generate(target, [said[:i]], sampling=sampling)
                assert said[i]["content"] == expected.text
        assert (result.category, "OLD" in str(said)) == ("test", False)
    assert num_stopped, "some answers end by themselves"
    alone = [c for row in rows for c in regenerate(target, [row], Report(), sampling=sampling)]
    assert alone == [results[row.id] for row in rows]


def test_one_seed_draws_other_numbers_for_every_conversation(target):
    same = [Conversation(f"c{i}", [message("u", "the cat")]) for i in range(3)]
    results = list(regenerate(target, same, Report(), sampling=SAMPLED, batch_size=2))
    assert len({c.messages[1]["content"] for c in results}) == 3


def test_a_cut_answer_ends_the_conversation_and_says_so(target):
    row = Conversation("a", [message("u", "the cat"), message("u", "the dog")])
    report = Report()
    [result] = regenerate(target, [row], report, sampling=SamplingParams(max_new_tokens=2))
    assert (len(result.messages), result.finish_reason) == (2, "length")
    assert report.examples == {"later turns after an answer that max_new_tokens cut": ["a"]}
    assert result.record()["finish_reason"] == "length"


def test_last_turn_only_trains_on_nothing_else(target):
    row = Conversation("a", [message("u", "one"), message("a", "OLD"), message("u", "two"), message("a", "OLD")])
    [result] = regenerate(target, [row], Report(), sampling=GREEDY, last_turn_only=True)
    assert result.messages[:3] == [message("u", "one"), {**message("a", "OLD"), "weight": 0}, message("u", "two")]
    [sample] = tokenize(result, target.tokenizer)
    trained = [token for token, is_trained in zip(sample.input_ids, sample.loss_mask, strict=True) if is_trained]
    text = target.tokenizer.decode(trained)
    assert text.removesuffix("<|im_end|>") == result.messages[3]["content"]
    assert text.endswith("<|im_end|>") == (result.finish_reason == "stop")


def test_what_the_target_cannot_take_is_reported(target):
    long = "xyz" * 5000
    rows = [Conversation("long", [message("u", long)]), Conversation("later", [message("u"), message("u", long)])]
    report = Report()
    results = list(regenerate(target, rows, report, sampling=SAMPLED.with_(min_new_tokens=0, max_new_tokens=400)))
    assert [(c.id, len(c.messages)) for c in results] == [("later", 2)]
    assert "longer than the target's context" in report.skipped
    assert sum(report.skipped.values()) == 2


@pytest.mark.parametrize("change", [{"n": 2}, {"stop": ("x",)}, {"stop_token_ids": (5,)}, {"ignore_eos": True}])
def test_settings_that_would_spoil_the_data_are_refused(target, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        next(regenerate(target, [], Report(), sampling=GREEDY.with_(**change)))


def test_self_prompts(target):
    sampling = SamplingParams(max_new_tokens=60, temperature=1.0, seed=3)
    report = Report()
    drawn = list(self_prompts(target, range(30), report, sampling=sampling, batch_size=8))
    assert len(drawn) == report.num_kept > 0
    assert report.num_kept + sum(report.skipped.values()) == 30
    texts = {c.id: c.user_turns[0] for c in drawn}
    assert len(set(texts.values())) == len(texts)
    some = list(self_prompts(target, [int(drawn[-1].id.removeprefix("self-"))], Report(), sampling=sampling))
    assert some == drawn[-1:], "a prompt depends on its number alone"
    repeated = Report()
    assert not list(self_prompts(target, range(30), repeated, sampling=sampling, known=texts.values()))
    assert repeated.skipped["repeated"] >= len(texts)
    with pytest.raises(ValueError, match="--temperature"):
        next(self_prompts(target, [0], Report(), sampling=GREEDY))


@pytest.fixture
def run(tiny_target_dir):
    def run(*args: object, code: int = 0):
        result = CliRunner().invoke(app, ["data", *map(str, args)])
        assert result.exit_code == code, result.output
        return result

    return run


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def source(tmp_path) -> Path:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(c.record()) + "\n" for c in conversations(8)) + "broken\n")
    return file


def test_interrupted_anywhere_it_goes_on(run, source, tmp_path, tiny_target_dir, monkeypatch):
    options = ["--target", tiny_target_dir, "--temperature", 1, "--seed", 5, "--max-new-tokens", 20, "--batch-size", 3]
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    output = run("regenerate", source, "--output", whole, *options).output
    assert "8 conversations answered, 0 were there before" in output
    assert "not JSON" in output
    expected = {row["id"]: row for row in lines(whole)}
    assert len(expected) == 8

    content = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for kept in (0, ends[0] - 1, ends[2], ends[4] + 9, len(content)):
        parts.write_bytes(content[:kept])
        run("regenerate", source, "--output", parts, "--resume", *options)
        assert parts.read_bytes().startswith(content[: max([0, *(end for end in ends if end <= kept)])])
        assert len(lines(parts)) == 8
        assert {row["id"]: row for row in lines(parts)} == expected

    # Interrupted between two rows: the finished ones are on disk.
    write = OutputWriter.write

    def interrupted(self, rows):
        write(self, rows)
        if len(lines(self.path)) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(OutputWriter, "write", interrupted)
    run("regenerate", source, "--output", parts, "--overwrite", *options, code=130)
    monkeypatch.undo()
    assert len(lines(parts)) == 3
    assert (
        "5 conversations answered, 3 were there before"
        in run("regenerate", source, "--output", parts, "--resume", *options).output
    )
    assert {row["id"]: row for row in lines(parts)} == expected


def test_existing_answers_are_not_overwritten_unasked(run, source, tmp_path, tiny_target_dir):
    output = tmp_path / "out.jsonl"
    output.write_text('{"id": "other"}\n')
    options = ["regenerate", source, "--output", output, "--target", tiny_target_dir]
    assert "holds results already" in run(*options, code=1).stderr
    assert "cannot be resumed" in run(*options, "--resume", code=1).stderr


def test_prompts_command_resumes(run, tmp_path, tiny_target_dir):
    output = tmp_path / "prompts.jsonl"
    options = ["--output", output, "--target", tiny_target_dir, "--temperature", 1, "--seed", 3, "--max-new-tokens", 60]
    run("prompts", "--number", 12, *options)
    expected = output.read_text()
    assert expected
    output.write_text(expected[: len(expected) // 2])
    run("prompts", "--number", 12, *options, "--resume")
    assert output.read_text() == expected


def test_inspect_counts_forms_turns_and_bad_rows(run, source):
    output = run("inspect", source).output
    assert "8 conversations (8 as messages)" in output
    assert "turns: 15 user, 15 assistant" in output
    assert "not JSON" in output


def test_clean_splits_and_keeps_the_benchmarks_out(run, source, tmp_path):
    pytest.importorskip("datasketch")
    benchmark = ROOT / "selfspec" / "data" / "humaneval.jsonl"
    output_dir, exclude = tmp_path / "clean", tmp_path / "exclude.jsonl"
    exclude.write_text(json.dumps({"prompt": conversations(8)[0].user_turns[0]}) + "\n")
    output = run("clean", source, benchmark, "--output-dir", output_dir, "--held-out", 0.5, "--exclude", exclude).output
    train, held_out = (list(read_conversations([output_dir / f"{name}.jsonl"], Report())) for name in ("train", "heldout"))
    report = json.loads((output_dir / "report.json").read_text())
    assert f"{len(train)} conversations to train on, {len(held_out)} held out" in output
    assert report["cleaning"]["skipped"]["excluded"] == 165
    assert report["cleaning"]["kept"] == len(train) + len(held_out) == 7
    assert report["reading"]["skipped"] == {"not JSON": 1}
    exclude.write_text("broken\n")
    options = ["clean", source, "--output-dir", output_dir, "--overwrite", "--exclude", exclude]
    assert "a prompt to exclude cannot be read (not JSON)" in run(*options, code=1).stderr


def test_the_whole_route_in_one_script(source, tmp_path, tiny_target_dir):
    pytest.importorskip("datasketch")
    spec = importlib.util.spec_from_file_location("prepare_data", ROOT / "recipes" / "prepare_data.py")
    recipe = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up there.
    sys.modules[spec.name] = recipe
    spec.loader.exec_module(recipe)
    output_dir = tmp_path / "data"
    command = [source, "--output-dir", output_dir, "--target", tiny_target_dir]
    command += ["--max-new-tokens", 20, "--batch-size", 4, "--self-prompts", 4, "--held-out", 0.3]

    def run(*more: object):
        recipe.main([str(part) for part in (*command, *more)])

    run()
    parts = {name: output_dir / f"{name}.jsonl" for name in ("train", "heldout")}
    contents = {name: file.read_text() for name, file in parts.items()}
    assert all(contents.values())
    assert "OLD" not in "".join(contents.values())
    report = json.loads((output_dir / "report.json").read_text())
    assert report["reading"]["skipped"] == {"not JSON": 1}
    assert report["cleaning"]["kept"] == report["answering"]["kept"] == sum(map(len, map(lines, parts.values())))
    parts["train"].write_text(contents["train"][: len(contents["train"]) // 2])
    run()
    assert {name: file.read_text() for name, file in parts.items()} == contents
    with pytest.raises(ValueError, match="was begun with another sampling"):
        run("--temperature", 1)
