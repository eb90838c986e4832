"""The commands, end to end, on the tiny target; and what a person sees when something is wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError
from typer.testing import CliRunner

from selfspec import failures
from selfspec.bench.machine import this_machine
from selfspec.cli import display, doctor
from selfspec.cli.main import app

PROMPTS = [
    {"id": "raw", "prompt": "the cat sat on the mat and the cat sat on"},
    {"id": "chat", "messages": [{"role": "user", "content": "one two three"}]},
    {"id": "turns", "turns": ["the dog", "and the cat"], "category": "animals"},
]
RESULT_KEYS = ["id", "text", "token_ids", "finish_reason", "target_passes", "acceptance_length", "seconds"]


@pytest.fixture
def prompt_file(tmp_path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return file


@pytest.fixture
def run(tiny_target_dir):
    """Runs a command on the tiny target."""

    def run(command: str, *args: object, code: int = 0, stdin: str | None = None):
        target = ["--target", tiny_target_dir]
        result = CliRunner().invoke(app, [command, *map(str, [*target, *args])], input=stdin)
        assert result.exit_code == code, result.output
        return result

    return run


def results(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_generate_writes_one_row_for_each_prompt(run, prompt_file, tmp_path):
    plain, drafted = tmp_path / "plain.jsonl", tmp_path / "drafted.jsonl"
    options = ["--prompt-file", prompt_file, "--max-new-tokens", 12]
    run("generate", *options, "--output", plain, "--drafter", "none")
    report = run("generate", *options, "--output", drafted, "--drafter", "ngram", "--no-cost-guard", "--batch-size", 2)
    assert "3 prompts answered" in report.output
    rows = results(drafted)
    assert [row["id"] for row in rows] == ["raw", "chat", "turns"]
    assert all(list(row) == RESULT_KEYS for row in rows)
    assert all(row["finish_reason"] in ("stop", "length") and len(row["token_ids"]) <= 12 for row in rows)
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in results(plain)]
    assert [row["text"] for row in rows] == [row["text"] for row in results(plain)]


def test_generate_samples_and_logprobs(run, prompt_file, tmp_path):
    output = tmp_path / "out.jsonl"
    options = ["--temperature", 1, "--seed", 3, "--n", 2, "--logprobs", "--max-new-tokens", 6, "--ignore-eos"]
    run("generate", "--prompt-file", prompt_file, "--output", output, *options)
    rows = results(output)
    assert [(row["id"], row["sample"]) for row in rows] == [(p["id"], i) for p in PROMPTS for i in range(2)]
    assert all(len(row["logprobs"]) == len(row["token_ids"]) == 6 for row in rows)
    assert rows[0]["token_ids"] != rows[1]["token_ids"]


def test_generate_may_show_special_tokens(run, tmp_path, tiny_target_dir):
    """At a high temperature the tiny target writes some."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the", "cat", "one two", "seven")))
    texts = []
    for i, flag in enumerate(("--skip-special-tokens", "--no-skip-special-tokens")):
        options = ["--max-new-tokens", 48, "--ignore-eos", "--temperature", 3, "--seed", 1, flag]
        run("generate", "--prompt-file", prompts, "--output", tmp_path / f"{i}.jsonl", *options)
        texts.append([row["text"] for row in results(tmp_path / f"{i}.jsonl")])
    assert "<|im_start|>" in "".join(texts[1]) and "<|im_start|>" not in "".join(texts[0])


def test_generate_all_turns_feeds_each_answer_back(run, prompt_file, tmp_path, tiny_target_dir):
    output = tmp_path / "out.jsonl"
    options = ["--max-new-tokens", 6, "--dtype", "float32"]
    run("generate", "--prompt-file", prompt_file, "--output", output, "--all-turns", *options)
    rows = results(output)
    assert [(row["id"], row["turn"]) for row in rows] == [("raw", 0), ("chat", 0), ("turns", 0), ("turns", 1)]
    conversation = [
        {"role": "user", "content": "the dog"},
        {"role": "assistant", "content": rows[2]["text"]},
        {"role": "user", "content": "and the cat"},
    ]
    second = tmp_path / "second.jsonl"
    second.write_text(json.dumps({"messages": conversation}))
    run("generate", "--prompt-file", second, "--output", tmp_path / "second-out.jsonl", *options)
    assert results(tmp_path / "second-out.jsonl")[0]["token_ids"] == rows[3]["token_ids"]


def test_generate_resumes(run, prompt_file, tmp_path):
    output = tmp_path / "out.jsonl"
    options = ["--prompt-file", prompt_file, "--output", output, "--max-new-tokens", 4]
    run("generate", *options)
    complete = output.read_text()
    assert "holds results already" in run("generate", *options, code=1).stderr
    first, second, _ = complete.splitlines(keepends=True)
    output.write_text(first + second[:20])
    assert "2 prompts answered" in run("generate", *options, "--resume").output
    assert output.read_text().startswith(first)
    rows = [json.loads(line) for line in complete.splitlines()]
    assert [row["token_ids"] for row in results(output)] == [row["token_ids"] for row in rows]


def test_generate_answers_one_question(run):
    """The text alone on standard output, and the figures on standard error."""
    result = run("generate", "one two three", "--max-new-tokens", 5, "--ignore-eos")
    [line] = result.stderr.splitlines()
    assert re.fullmatch(
        r"5 tokens in \d target passes: [\d.]+ tokens/s, acceptance length [\d.]+, drafter ngram; "
        r"cut off at --max-new-tokens 5",
        line,
    )
    rows = run("generate", "one two three", "--max-new-tokens", 5, "--ignore-eos", "--output", "-")
    [row] = map(json.loads, rows.stdout.splitlines())
    assert row["text"] + "\n" == result.stdout
    assert rows.stderr.startswith("1 prompt answered, 5 tokens in ")
    piped = run("generate", "-", "--max-new-tokens", 5, "--ignore-eos", stdin="one two three")
    assert piped.stdout == result.stdout


def test_a_question_is_a_message_or_text_to_go_on_with(tiny_target_dir, prompt_file, tmp_path):
    """As the target has a chat template, or has none."""
    bare = tmp_path / "bare"
    shutil.copytree(tiny_target_dir, bare, ignore=shutil.ignore_patterns("chat_template*"))
    settings = bare / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": None}))
    forms = {tiny_target_dir: {"messages": [{"role": "user", "content": "the dog"}]}, bare: {"prompt": "the dog"}}
    for target, form in forms.items():
        prompt_file.write_text(json.dumps(form))
        options = ["-m", str(target), "--max-new-tokens", "8", "--output", "-"]
        answers = [
            json.loads(CliRunner().invoke(app, ["generate", *args, *options]).stdout)["token_ids"]
            for args in (["the dog"], ["--prompt-file", str(prompt_file)])
        ]
        assert answers[0] == answers[1]


def test_generate_reads_and_writes_pipes(run, prompt_file, tmp_path):
    options = ["--max-new-tokens", 4, "--drafter", "none"]
    run("generate", "--prompt-file", prompt_file, "--output", tmp_path / "out.jsonl", *options)
    piped = run("generate", "--prompt-file", "-", "--output", "-", *options, stdin=prompt_file.read_text())
    texts = [
        [row["text"] for row in map(json.loads, lines.splitlines())]
        for lines in (piped.stdout, (tmp_path / "out.jsonl").read_text())
    ]
    assert texts[0] == texts[1]
    assert not Path("-").exists()
    again = ["--output", tmp_path / "out.jsonl", "--overwrite", *options]
    run("generate", "--prompt-file", "-", *again, stdin=prompt_file.read_text())
    assert [row["text"] for row in results(tmp_path / "out.jsonl")] == texts[0]
    assert "-, line 1" in run("generate", "--prompt-file", "-", "--output", "-", stdin="{", code=1).stderr


def test_generate_says_at_the_end_how_fast_it_was(run, prompt_file, tmp_path):
    options = ["--prompt-file", prompt_file, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 4, "--ignore-eos"]
    line = run("generate", *options).stdout
    assert re.search(r"out.jsonl: 3 prompts answered, 12 tokens in \d+ target passes: [\d.]+ tokens/s, acceptance", line)
    (tmp_path / "out.jsonl").write_text("\n".join((tmp_path / "out.jsonl").read_text().splitlines()[:2]) + "\n")
    assert "1 prompt answered, 4 tokens in" in run("generate", *options, "--resume").stdout


def test_the_target_may_be_the_argument(tiny_target_dir, monkeypatch):
    monkeypatch.setattr("selfspec.model.default_target.default_target", lambda: tiny_target_dir)
    plans = [
        CliRunner().invoke(app, ["plan", *target, "--gpu", "h100", "--json"]).stdout
        for target in (["-m", str(tiny_target_dir)], [str(tiny_target_dir)], ["smollm2"])
    ]
    read = [json.loads(plan) for plan in plans]
    assert read[0] == read[1] and read[0]["memory"] == read[2]["memory"]


def test_compare_says_whether_the_outputs_agree(run, prompt_file):
    options = ["--prompt-file", prompt_file, "--drafters", "ngram,none", "--max-new-tokens", 8, "--ignore-eos"]
    output = run("compare", *options, "--no-cost-guard").output
    assert "transformers is left out" in " ".join(output.split())
    assert output.count("identical") == 1
    assert output.index("none") < output.index("ngram")
    sampled = run("compare", *options, "--temperature", 1).output
    assert sampled.count("identical") == 1


def test_compare_with_transformers(run, prompt_file):
    options = ["--prompt-file", prompt_file, "--baseline", "transformers", "--max-new-tokens", 8]
    assert run("compare", *options).output.count("identical") == 2
    by_default = ["--prompt-file", prompt_file, "--max-new-tokens", 8]
    assert run("compare", *by_default).output.count("identical") == 2
    assert run("compare", *by_default, "--baseline", "none").output.count("identical") == 1
    assert "is greedy only" in run("compare", *options, "--temperature", 1, code=1).stderr
    assert "is not known" in run("compare", "--baseline", "vllm", code=1).stderr


def test_demo_shows_text_and_figures(run, tmp_path):
    output = run("demo", "--max-new-tokens", 2, "--full").output
    assert "business etiquette" in output
    assert "identical" in output
    picture = tmp_path / "demo.svg"
    short = run("demo", "--max-new-tokens", 2, "--picture", picture).output
    drawn = picture.read_text()
    assert drawn.startswith("<svg") and "identical" in drawn and "palindrome" in drawn and "ngram" in drawn
    assert "ends in .svg" in run("demo", "--picture", tmp_path / "demo.gif", code=1).stderr
    assert "palindrome" in short and short.count("[cut here]") == 3
    assert short.index("ngram") < short.index("transformers") < short.index("none")
    # The tiny model's warning is about the default target.
    assert "tiny model" not in short


def test_chat_reads_a_pipe(run):
    messages = "the cat\n\n/reset\nthe cat\n/quit\nnot read\n"
    output = run("chat", "--max-new-tokens", 5, "--ignore-eos", stdin=messages).output
    [first, second] = [line for line in output.splitlines() if "acceptance length" in line]
    assert "[5 tokens" in first
    answers = output.replace(first, "|").replace(second, "|").split("|")
    assert answers[0].strip() == answers[1].strip(), "after /reset the conversation is the same"


def test_chat_goes_on_after_a_message_that_is_too_long(run):
    result = run("chat", "--max-new-tokens", 2, stdin="the cat " * 3000 + "\nthe cat\n")
    assert "/reset starts a new conversation" in result.stderr
    assert result.stdout.count("acceptance length") == 1


def test_doctor_names_versions_and_gaps(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert torch.__version__ in result.output
    assert "selfspec fetch" in " ".join(result.output.split())


def test_doctor_names_the_processor_the_heads_and_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "costs").mkdir(parents=True)
    (tmp_path / "cache" / "costs" / "one").write_bytes(bytes(3_000_000))
    found = {finding.subject: finding.detail for finding in doctor.examine()}
    machine = this_machine()
    assert found["cpu"] == f"{machine.cpu}, {machine.instruction_set}"
    assert re.fullmatch(r"memory reads [\d.]+ GB/s, measured now", found["bandwidth"])
    assert found["cache"] == f"{tmp_path / 'cache'}, 3 MB"
    assert {f"{name} head" for name in ("eagle", "medusa", "early_exit")} <= set(found)
    assert all((Path(found[name]) / "config.json").is_file() for name in found if name.endswith(" head"))
    assert "datasketch" in found
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    missing = {finding.subject: finding.detail for finding in doctor._packages()}
    assert missing["datasketch"] == 'not installed; needed for selfspec data clean: pip install "selfspec[train]"'


def test_doctor_starts_without_the_models_library(tmp_path):
    """Its report needs torch, and not transformers, whose import takes three times as long."""
    script = (
        "import sys\nfrom selfspec.cli.main import app\n"
        "try: app(['doctor'])\nexcept SystemExit: pass\n"
        "print([name for name in ('transformers', 'gradio', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_doctor_times_a_pass_or_says_why_not(monkeypatch, tiny_target_dir, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    [finding] = doctor._speed()
    assert finding.state == "note" and "selfspec fetch" in finding.detail
    monkeypatch.setattr(doctor, "default_target", lambda: tiny_target_dir)
    found = {finding.subject: finding.detail for finding in doctor._speed()}
    assert "ms of the default target on cpu, float32" in found["a pass"]
    assert list(found) == ["a pass", "its floor", "drafts"]


def test_doctor_measures_an_answer_or_says_why_not(monkeypatch, tiny_target_dir, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    assert "selfspec fetch" in doctor._peak().detail
    monkeypatch.setattr(doctor, "default_target", lambda: tiny_target_dir)
    # No head is shipped for the tiny target.
    finding = doctor._peak()
    assert (finding.state, finding.subject) == ("note", "memory") and "no shipped eagle head" in finding.detail
    lines = '{"stage": "target", "peak_mib": 9}\n{"stage": "answer 1", "peak_mib": 12}\n'
    done = subprocess.CompletedProcess([], 0, lines, "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    assert doctor._peak().detail.startswith("12 MiB at the peak")


def test_fetch_prints_where_the_target_is(monkeypatch, tmp_path):
    monkeypatch.setattr("selfspec.cli.loading.fetch_default_target", lambda directory, **_: directory)
    result = CliRunner().invoke(app, ["fetch", "--output", str(tmp_path)])
    assert result.output.strip() == str(tmp_path)


@pytest.mark.parametrize(("is_there", "said"), [(True, "every file is as it was made"), (False, "It was made anew")])
def test_fetch_tells_a_person_what_it_did(monkeypatch, tmp_path, capsys, is_there, said):
    monkeypatch.setattr("selfspec.cli.loading.fetch_default_target", lambda directory, **_: directory)
    monkeypatch.setattr("selfspec.cli.fetch.is_made", lambda directory: is_there)
    monkeypatch.setattr(display, "stderr", Console(stderr=True, force_terminal=True))
    result = CliRunner().invoke(app, ["fetch", "--output", str(tmp_path)])
    assert result.stdout.strip() == str(tmp_path) and said in result.stderr


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--prompt-file", "absent.jsonl"], "cannot read absent.jsonl"),
        (["--target", "absent/target"], "absent/target"),
        (["--drafter", "oracle"], "oracle"),
        (["--drafter", "truncated:99"], "99"),
        (["--dtype", "float12"], "float12"),
        (["--temperature", "-1"], "temperature"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--n", "2", "--all-turns"], "--all-turns"),
        (["--overwrite", "--resume"], "overwrite and resume exclude each other"),
    ],
)
def test_mistakes_take_one_line(run, prompt_file, tmp_path, args, problem):
    options = ["--prompt-file", prompt_file, "--output", tmp_path / "out.jsonl", *args]
    result = run("generate", *options, code=1)
    assert problem in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("selfspec: ")
    assert not (tmp_path / "out.jsonl").exists()


def test_wrong_usage_has_its_own_code(run, prompt_file, tmp_path):
    run("generate", "--prompt-file", prompt_file, code=2)
    run("generate", "--prompt-file", prompt_file, "--output", tmp_path / "o", "--top-k", "many", code=2)


def test_output_must_not_be_the_prompt_file(run, prompt_file):
    before = prompt_file.read_text()
    stderr = run("generate", "--prompt-file", prompt_file, "--output", prompt_file, "--overwrite", code=1).stderr
    assert "is the prompt file" in stderr
    assert prompt_file.read_text() == before


def test_prompt_longer_than_the_context_is_named(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "endless", "prompt": "xyz" * 2000}))
    stderr = run("generate", "--prompt-file", prompts, "--output", tmp_path / "out.jsonl", code=1).stderr
    assert "id 'endless'" in stderr
    assert "4096" in stderr


def test_damaged_weights_are_one_line(run, prompt_file, tmp_path, tiny_target_dir):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in tiny_target_dir.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes()[: 100 if file.suffix == ".safetensors" else None])
    options = ["--prompt-file", prompt_file, "--output", tmp_path / "out.jsonl"]
    stderr = run("generate", *options, "--target", damaged, code=1).stderr
    assert len(stderr.splitlines()) == 1
    assert "damaged" in stderr


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "out of memory: try a smaller --batch-size"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (MemoryError(), "out of memory"),
        (SafetensorError("header too large"), "a weights file is damaged (header too large)"),
        (ValueError("two\n  lines"), "two lines"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), "No such file or directory: x.json"),
    ],
)
def test_errors_from_outside_get_a_sentence(capsys, error, sentence):
    with pytest.raises(SystemExit) as caught, failures.reported_failures():
        raise error
    assert caught.value.code == 1
    assert sentence in capsys.readouterr().err
    with pytest.raises(type(error)), failures.reported_failures(debug=True):
        raise error


def test_our_own_bugs_keep_their_traceback():
    with pytest.raises(AssertionError), failures.reported_failures():
        raise AssertionError("a shape")


def test_interrupt_has_its_own_code(capsys):
    with pytest.raises(SystemExit) as caught, failures.reported_failures():
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_nothing_but_results_in_a_pipe(prompt_file, tmp_path, tiny_target_dir):
    command = [sys.executable, "-m", "selfspec", "generate", "--target", str(tiny_target_dir), "--max-new-tokens", "4"]
    command += ["--prompt-file", str(prompt_file), "--output", str(tmp_path / "out.jsonl")]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
