"""Personal data is replaced, look-alikes stay, and the target answers what is left."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from selfspec import SamplingParams, Target, generate
from selfspec.cli.main import app
from selfspec.traffic.clean import clean
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.prepare import CleanOptions

pytest.importorskip("presidio_analyzer", reason="redacting needs Presidio: pip install 'selfspec[redact]'")
from selfspec.traffic.redact import Redactor

ROOT = Path(__file__).parents[2]


def module_at(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def patterns() -> Redactor:
    return Redactor()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail bob@example.com, or jörg@münchen.de!", "mail <EMAIL_ADDRESS>, or <EMAIL_ADDRESS>!"),
        ("```py\nsend('a.b+c@exa-mple.co.uk', n=3)  # é\n```", "```py\nsend('<EMAIL_ADDRESS>', n=3)  # é\n```"),
        ("👩‍💻 Größe 10 𝄞 bob@example.com 😀 你好", "👩‍💻 Größe 10 𝄞 <EMAIL_ADDRESS> 😀 你好"),
        ("你好，我的邮箱 bob@example.com。", "你好，我的邮箱 <EMAIL_ADDRESS>。"),
        ("GET /p?to=bob@example.com&n=1", "GET /<EMAIL_ADDRESS>&n=1"),
        ("4111 1111 1111 1111 or 4111-1111-1111-1111", "<CREDIT_CARD> or <CREDIT_CARD>"),
        ("DE89 3704 0044 0532 0130 00", "<IBAN_CODE>"),
        ("+49 30 901820 or (212) 555-0123", "<PHONE_NUMBER> or <PHONE_NUMBER>"),
        ("ssn 536-22-1234; my ssn is 536221234", "ssn <US_SSN>; my ssn is <US_SSN>"),
        ("from 93.184.216.34 ([2a00:1450:4001:80e::200e])", "from <IP_ADDRESS> ([<IP_ADDRESS>])"),
        ("::ffff:93.184.216.34 00:1B:44:11:3A:B7", "<IP_ADDRESS> <MAC_ADDRESS>"),
        ("1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa", "<CRYPTO>"),
        # Two kinds of data in one place.
        ("my bank account, or my passport, is 945456787", "my bank account, or my passport, is <US_BANK_NUMBER>"),
    ],
)
def test_personal_data_is_replaced(patterns: Redactor, text: str, expected: str) -> None:
    patterns.counts.clear()
    assert patterns.text(text) == expected
    assert patterns.counts.total() == expected.count("<")


@pytest.mark.parametrize(
    "text",
    [
        "",
        # The last digit is wrong.
        "4111 1111 1111 1112, 1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNb, DE89 3704 0044 0532 0130 01",
        "x[1::2], x[::2], std::vector<a::b>, abc::def(), ::1",
        "ping 127.0.0.1, 192.168.0.1, 10.0.0.7, fe80::1, 2001:db8::1",
        "return x@y.T  # user@localhost, @property",
        "536221234 rows, order 945456787, click 901820",
        "1 2024-01-02 3 from 2024-01-02 10:30 to 06-04-2020, in 1648",
        "pi is 3.14159265358979323846, and 12345678901234567890 is long",
        "see https://example.com/a?b=c and 123e4567-e89b-12d3-a456-426614174000",
        "Ada Lovelace lived in London",
    ],
)
def test_what_only_looks_like_it_stays(patterns: Redactor, text: str) -> None:
    patterns.counts.clear()
    assert patterns.text(text) == text
    assert not patterns.counts


def test_benchmark_prompts_raise_no_false_alarm(patterns: Redactor) -> None:
    """667,000 characters of questions, news and code, with one address, in an article."""
    patterns.counts.clear()
    for name in ("spec_bench", "humaneval"):
        for line in (ROOT / "selfspec" / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            for text in row.get("turns") or [row["prompt"]]:
                patterns.text(text)
    assert patterns.counts == {"EMAIL_ADDRESS": 1}


def test_no_list_of_domains_is_fetched(monkeypatch) -> None:
    monkeypatch.setattr("requests.Session.send", lambda *args, **kwargs: pytest.fail("the network was asked"))
    # What was read once is kept as long as the module is.
    fresh = module_at(ROOT / "selfspec" / "traffic" / "redact.py")
    assert fresh.Redactor().text("bob@example.com") == "<EMAIL_ADDRESS>"


def test_names_are_found_by_a_model(tmp_path: Path, caplog) -> None:
    spacy = pytest.importorskip("spacy")
    model = spacy.blank("en")
    ruler = model.add_pipe("entity_ruler")
    names = {"PERSON": "Ada Lovelace", "GPE": "London", "ORG": "ACME", "DATE": "today", "PRODUCT": "Engine"}
    ruler.add_patterns([{"label": label, "pattern": text} for label, text in names.items()])
    model.to_disk(tmp_path / "model")
    redactor = Redactor(str(tmp_path / "model"))
    text = "today Ada Lovelace (ada@example.com) sold the Engine to ACME in London; ssn 536221234"
    expected = "today <PERSON> (<EMAIL_ADDRESS>) sold the Engine to ACME in <LOCATION>; ssn <US_SSN>"
    assert redactor.text(text) == expected
    # Of labels that it does not know, or of languages that it is not asked for.
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert redactor.counts == {"PERSON": 1, "EMAIL_ADDRESS": 1, "LOCATION": 1, "US_SSN": 1}
    with pytest.raises(ValueError, match="python -m spacy download no_such_model"):
        Redactor("no_such_model")


def test_roles_ids_and_the_form_of_calls_stay(patterns: Redactor) -> None:
    mail, number = "bob@example.com", 4111111111111111
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You serve {mail}."},
        {"role": "user", "content": f"Pay {number}"},
        {
            "role": "assistant",
            "content": "",
            "weight": 0,
            "tool_calls": [
                {
                    "id": mail,
                    "type": "function",
                    "function": {"name": "pay", "arguments": f'{{"card": {number}, "to": ["{mail}", null], "n": 3.50}}'},
                },
                {"name": "note", "arguments": {"to": {"mail": mail}, "ok": True, "n": 7}},
                {"name": "note", "arguments": '{ "n":1.50 }'},
                {"name": "note", "arguments": f"mail {mail}"},
            ],
        },
        {"role": "tool", "tool_call_id": mail, "name": "pay", "content": f"sent to {mail}"},
        {"role": "assistant", "content": f"Done, {mail}"},
    ]
    before = json.dumps(messages)
    redacted = patterns(Conversation("bob", messages, category="c", finish_reason="stop"))
    assert json.dumps(messages) == before
    assert (redacted.id, redacted.category, redacted.finish_reason) == ("bob", "c", "stop")
    placeholder = "<EMAIL_ADDRESS>"
    function = {"name": "pay", "arguments": f'{{"card": "<CREDIT_CARD>", "to": ["{placeholder}", null], "n": 3.5}}'}
    assert redacted.messages == [
        {"role": "system", "content": f"You serve {placeholder}."},
        {"role": "user", "content": "Pay <CREDIT_CARD>"},
        {
            **messages[2],
            "tool_calls": [
                {"id": mail, "type": "function", "function": function},
                {"name": "note", "arguments": {"to": {"mail": placeholder}, "ok": True, "n": 7}},
                {"name": "note", "arguments": '{ "n":1.50 }'},
                {"name": "note", "arguments": f"mail {placeholder}"},
            ],
        },
        {**messages[3], "content": f"sent to {placeholder}"},
        {"role": "assistant", "content": f"Done, {placeholder}"},
    ]


def asking(name: str, text: str) -> Conversation:
    return Conversation(name, [{"role": "user", "content": text}])


def test_evaluation_prompts_are_known_unredacted_and_duplicates_redacted(patterns: Redactor) -> None:
    pytest.importorskip("datasketch")
    asked = [asking(str(i), f"Who owns {mail}?") for i, mail in enumerate(["a@b.org", "c@d.org", "e@f.org"])]
    report = Report()
    kept = list(clean(asked, report, excluded=asked[:1], redact=patterns))
    assert kept == [asking("1", "Who owns <EMAIL_ADDRESS>?")]
    assert report.skipped == {"excluded": 1, "near-duplicate": 1}
    assert len(list(clean(asked, Report()))) == 3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    words = ["cat", "dog", "hat", "mat", "rat"]
    rows = [asking(str(i), f"tell user{i}@example.com about {word}") for i, word in enumerate(words)]
    file.write_text("".join(json.dumps(row.record()) + "\n" for row in rows) + "broken, of bob@example.com\n")
    return file


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_clean_command_redacts_and_counts(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasketch")
    command = ["data", "clean", str(source), "--output-dir", str(tmp_path / "out"), "--held-out", "0.5"]
    result = CliRunner().invoke(app, [*command, "--redact"])
    assert result.exit_code == 0, result.output
    assert "redacted: 5 EMAIL_ADDRESS" in result.output
    rows = lines(tmp_path / "out" / "train.jsonl") + lines(tmp_path / "out" / "heldout.jsonl")
    assert Counter(row["messages"][0]["content"].split(" about ")[0] for row in rows) == {"tell <EMAIL_ADDRESS>": 5}
    # The report does not quote it either; without --redact it quotes what could not be read.
    report = (tmp_path / "out" / "report.json").read_text()
    assert "example.com" not in report + result.output
    assert json.loads(report)["redacted"] == {"EMAIL_ADDRESS": 5}
    assert json.loads(report)["reading"]["examples"] == {"not JSON": ["chats.jsonl:6"]}
    result = CliRunner().invoke(app, [*command, "--overwrite"])
    assert "redacted" not in json.loads((tmp_path / "out" / "report.json").read_text())
    assert "bob@example.com" in (tmp_path / "out" / "report.json").read_text()


def test_the_target_answers_what_is_left(source: Path, tmp_path: Path, tiny_target_dir: Path) -> None:
    pytest.importorskip("datasketch")
    recipe = module_at(ROOT / "recipes" / "prepare_data.py")
    output_dir = tmp_path / "data"
    command = [str(source), "--output-dir", str(output_dir), "--target", str(tiny_target_dir), "--max-new-tokens", "8"]
    recipe.main([*command, "--held-out", "0.3", "--redact"])
    target = Target.from_pretrained(tiny_target_dir)
    rows = lines(output_dir / "train.jsonl") + lines(output_dir / "heldout.jsonl")
    assert len(rows) == 5
    for row in rows:
        question, answer = row["messages"]
        assert question["content"].startswith("tell <EMAIL_ADDRESS> about")
        [expected] = generate(target, [[question]], sampling=SamplingParams(max_new_tokens=8))
        assert answer["content"] == expected.text
    assert json.loads((output_dir / "report.json").read_text())["redacted"] == {"EMAIL_ADDRESS": 5}
    with pytest.raises(ValueError, match="was begun with another redact: choose another --output-dir"):
        recipe.main([*command, "--held-out", "0.3"])


def test_options(monkeypatch, tmp_path: Path) -> None:
    assert CleanOptions().redactor() is None
    # A model alone asks for redaction, because it serves nothing else.
    with pytest.raises(ValueError, match="no installed spaCy model"):
        CleanOptions(redact_model=str(tmp_path / "none")).redactor()
    monkeypatch.setitem(sys.modules, "selfspec.traffic.redact", None)
    with pytest.raises(ValueError, match=r"needs Presidio: pip install 'selfspec\[redact\]'"):
        CleanOptions(redact=True).redactor()
