"""Bad options, prompts and files on the command line: exit code 1 or 2, one line that names the cause, nothing written."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfspec.cli.main import app

# Options, and a part of the line that is printed.
Case = tuple[list[str], str]

SAMPLING: dict[str, Case] = {
    "no tokens": (["--max-new-tokens", "0"], "max_new_tokens=0 is not allowed"),
    "fewer than no tokens": (["--max-new-tokens", "-1"], "max_new_tokens=-1 is not allowed"),
    "minimum above maximum": (["--min-new-tokens", "300"], "min_new_tokens=300 is not allowed"),
    "temperature negative": (["--temperature", "-1"], "temperature=-1.0 is not allowed"),
    "temperature is NaN": (["--temperature", "nan"], "temperature=nan is not allowed"),
    "temperature infinite": (["--temperature", "inf"], "temperature=inf is not allowed"),
    "top_k negative": (["--top-k", "-1"], "top_k=-1 is not allowed"),
    "top_p is 0": (["--top-p", "0"], "top_p=0.0 is not allowed"),
    "top_p is NaN": (["--top-p", "nan"], "top_p=nan is not allowed"),
    "min_p above 1": (["--min-p", "2"], "min_p=2.0 is not allowed"),
    "repetition_penalty is 0": (["--repetition-penalty", "0"], "repetition_penalty=0.0 is not allowed"),
    "presence_penalty infinite": (["--presence-penalty", "inf"], "presence_penalty=inf is not allowed"),
    "frequency_penalty is NaN": (["--frequency-penalty", "nan"], "frequency_penalty=nan is not allowed"),
    "seed out of range": (["--seed", str(2**63)], "seed="),
    "stop empty": (["--stop", ""], "stop=[''] is not allowed"),
    "stop id negative": (["--stop-id", "-1"], "stop_token_ids=[-1] is not allowed"),
    "stop id unknown": (["--stop-id", "9999"], "stop_token_ids has token id 9999"),
    "no samples": (["--n", "0"], "n=0 is not allowed"),
}
DRAFTERS: dict[str, Case] = {
    "unknown drafter": (["oracle"], "drafter 'oracle' is not known: use none"),
    "empty drafter": ([":"], "is not known"),
    "argument where none goes": (["none:x"], "takes no argument"),
    "no number": (["ngram:x"], "needs a whole number"),
    "number out of range": (["ngram:0"], "is out of range"),
    "too many layers": (["truncated:99"], "truncated:99 is out of range"),
    "no shipped head": (["eagle"], "no shipped eagle head fits"),
    "nowhere": (["medusa:nowhere/at-all"], "nowhere/at-all: no such folder"),
    "no draft model": (["draft_model:nowhere/at-all"], "nowhere/at-all: no such folder"),
    "no head": (["early_exit:/"], "holds no head"),
    "no drafts": (["ngram", "--num-draft-tokens", "0"], "num_draft_tokens=0 is not allowed"),
    "too many drafts": (["ngram", "--num-draft-tokens", "1000"], "num_draft_tokens=1000 is not allowed"),
    "no nodes": (["truncated:1", "--num-nodes", "0"], "num_nodes=0 is not allowed"),
    "no width": (["truncated:1", "--width", "0"], "width=0 is not allowed"),
}
TARGETS: dict[str, Case] = {
    "no target": (["--target", "nowhere/at-all"], "nowhere/at-all: no such folder"),
    "a folder that is no model": (["--target", "/"], "not a Hugging Face model folder"),
    "unknown dtype": (["--dtype", "float12"], "float12"),
    "unknown device": (["--device", "abacus"], "abacus"),
    "a card that is not there": (["--device", "cuda:99"], "cuda"),
    "no adapter": (["--adapter", "nowhere/at-all"], "nowhere/at-all"),
}
COMMANDS = {
    "generate": (SAMPLING, "--drafter"),
    # It has no --n.
    "chat": ({name: case for name, case in SAMPLING.items() if name != "no samples"}, "--drafter"),
    "compare": (SAMPLING, "--drafters"),
    "bench": ({}, "--drafters"),
    "bench-engine": ({}, "--drafter"),
}
# Command -> what it needs, and the extra that brings it.
EXTRAS = {"serve": ("fastapi", "serve"), "app": ("gradio", "app")}
TABLE = [
    (command, name, case)
    for command, (sampling, drafter) in COMMANDS.items()
    for name, case in {
        **sampling,
        **{name: ([drafter, *args], message) for name, (args, message) in DRAFTERS.items()},
        **TARGETS,
    }.items()
]


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"id": "a", "prompt": "the cat", "category": "animals"}) + "\n")
    return file


@pytest.fixture
def refuse(tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a command, which must fail, and returns its one line."""
    monkeypatch.chdir(tmp_path)

    def refuse(command: str, *args: object, code: int = 1) -> str:
        # Without its extra a command says so before it looks at anything else.
        if command in EXTRAS and code == 1:
            package, extra = EXTRAS[command]
            pytest.importorskip(package, reason=f"{command} needs {package}: pip install 'selfspec[{extra}]'")
        if "--adapter" in args:
            pytest.importorskip("peft", reason="adapters need peft: pip install 'selfspec[lora]'")
        before = sorted(tmp_path.rglob("*"))
        target = [] if command in ("fetch", "doctor") else ["--target", tiny_target_dir]
        result = CliRunner().invoke(app, [command, *map(str, [*target, *args])], input="the cat\n")
        assert result.exit_code == code, (result.output, result.exception)
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        if code == 2:
            # Typer's own box.
            return " ".join(result.stderr.split())
        assert result.stderr.startswith("selfspec: ") and len(result.stderr.splitlines()) == 1
        return result.stderr

    return refuse


@pytest.mark.parametrize(("command", "name", "case"), TABLE, ids=[f"{command}: {name}" for command, name, _ in TABLE])
def test_every_mistake_takes_one_line(refuse, prompt_file, command, name, case):
    args, message = case
    files = {
        "generate": ["--prompt-file", prompt_file, "--output", "out.jsonl"],
        "chat": [],
        "compare": ["--prompt-file", prompt_file],
        "bench": ["--prompts", prompt_file, "--output", "out.json", "--no-baseline"],
        "bench-engine": ["--prompts", prompt_file, "--output", "out.json"],
    }
    assert message in refuse(command, *files[command], *args)


PROMPTS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "prompts.jsonl"),
    "not JSON": (b"{bad\n", "prompts.jsonl"),
    "a list": (b"[1, 2]\n", "prompts.jsonl"),
    "not text": (b'{"id": 1, "prompt": "\xff"}\n', "prompts.jsonl"),
    "no prompt": (b'{"id": "a"}\n', "prompts.jsonl"),
    "two forms": (b'{"id": "a", "prompt": "x", "turns": ["y"]}\n', "prompts.jsonl"),
    "prompt empty": (b'{"id": "a", "prompt": ""}\n', "prompt"),
    "prompt is a number": (b'{"id": "a", "prompt": 5}\n', "prompts.jsonl"),
    "no messages": (b'{"id": "a", "messages": []}\n', "prompts.jsonl"),
    "messages are text": (b'{"id": "a", "messages": ["x"]}\n', "prompts.jsonl"),
    "no turns": (b'{"id": "a", "turns": []}\n', "prompts.jsonl"),
    "turn is a number": (b'{"id": "a", "turns": [5]}\n', "prompts.jsonl"),
    "one id twice": (b'{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n', "prompts.jsonl"),
    "as long as the context": (json.dumps({"id": "a", "prompt": "xyz" * 2000}).encode(), "4096"),
}


@pytest.mark.parametrize("command", ["generate", "compare"])
@pytest.mark.parametrize("name", PROMPTS)
def test_bad_prompt_files_take_one_line(refuse, tmp_path, command, name):
    content, message = PROMPTS[name]
    (tmp_path / "prompts.jsonl").write_bytes(content)
    output = ["--output", "out.jsonl"] if command == "generate" else []
    assert message in refuse(command, "--prompt-file", "prompts.jsonl", *output)


@pytest.mark.parametrize("path", ["absent.jsonl", "/", ""])
def test_prompt_files_that_cannot_be_read_take_one_line(refuse, path):
    refuse("compare", "--prompt-file", path)


@pytest.mark.parametrize("path", ["/", "/nowhere/at/all.jsonl"])
def test_an_output_that_cannot_be_written_takes_one_line(refuse, prompt_file, path):
    refuse("generate", "--prompt-file", prompt_file, "--output", path)


@pytest.mark.parametrize(
    ("command", "args", "message"),
    [
        ("generate", ["--batch-size", "0"], "--batch-size"),
        ("generate", ["--batch-size", "many"], "--batch-size"),
        ("generate", ["--temperature", "hot"], "--temperature"),
        ("generate", ["--seed", "1.5"], "--seed"),
        ("generate", ["--unknown"], "--unknown"),
        ("generate", ["extra"], "extra"),
        ("chat", ["--n", "0"], "--n"),
        ("demo", ["--max-new-tokens", "0"], "--max-new-tokens"),
        ("bench", ["--per-task", "-1"], "--per-task"),
        ("bench-engine", ["--repeats", "0"], "--repeats"),
        ("serve", ["--port", "99999"], "--port"),
        ("app", ["--port", "0"], "--port"),
        ("fetch", ["extra"], "extra"),
        ("doctor", ["--unknown"], "--unknown"),
    ],
)
def test_wrong_usage_names_the_option(refuse, prompt_file, command, args, message):
    files = ["--prompt-file", prompt_file, "--output", "out.jsonl"] if command == "generate" else []
    assert message in refuse(command, *files, *args, code=2)


@pytest.mark.parametrize(
    ("command", "args", "message"),
    [
        ("compare", ["other/target"], "other/target and --target"),
        ("chat", ["other/target"], "other/target looks like a target"),
        ("generate", ["hello", "--n", "2"], "--n and --logprobs need JSON lines"),
        ("generate", ["hello", "--logprobs"], "--n and --logprobs need JSON lines"),
        ("generate", ["hello", "--resume"], "--overwrite and --resume are about a file"),
        ("generate", [" "], "the prompt is empty"),
        ("generate", ["hello", "--output", "/nowhere/at/all.jsonl"], "cannot write to /nowhere/at/all.jsonl"),
        ("generate", ["hello", "--stop-id", "9999"], "stop_token_ids has token id 9999"),
        ("generate", ["xyz" * 2000], "4096"),
        ("app", ["--server", "not-a-url"], "server 'not-a-url' is not an address"),
        ("export", ["heads/mine", "--output", "out", "--format", "gguf"], "format 'gguf' is not known: use vllm"),
        ("demo", ["--drafters", "oracle"], "drafter 'oracle' is not known"),
        ("compare", ["--baseline", "vllm"], "--baseline 'vllm' is not known: use transformers"),
        ("bench", ["--prompts", "nothing"], "nothing"),
        ("bench-engine", ["--streams", "0"], "--streams '0' is not a list of whole numbers"),
        ("bench-engine", ["--streams", "1,,2"], "is not a list of whole numbers"),
        ("bench-engine", ["--drafter", "none"], "is not one drafter to compare with"),
        ("bench-engine", ["--max-new-tokens", "5000"], "--max-new-tokens"),
        ("serve", ["--port", "0", "--drafter", "oracle"], "drafter 'oracle' is not known"),
        ("serve", ["--port", "0", "--max-batch", "0"], "max_batch=0 is not allowed"),
        ("serve", ["--port", "0", "--max-waiting", "-1"], "max_waiting=-1 is not allowed"),
        ("serve", ["--port", "0", "--cache-tokens", "0"], "cache_tokens=0 is not allowed"),
        ("serve", ["--port", "0", "--prefill-tokens", "0"], "prefill_tokens=0 is not allowed"),
        ("serve", ["--port", "0", "--drain-seconds", "nan"], "drain_seconds=nan is not allowed"),
        ("serve", ["--port", "0", "--drain-seconds", "-1"], "drain_seconds=-1.0 is not allowed"),
        ("serve", ["--port", "0", "--api-key", " "], "an api_key is empty"),
        ("serve", ["--port", "0", "--capture", "log", "--capture-share", "nan"], "share=nan is not allowed"),
        ("serve", ["--port", "0", "--capture", "log", "--capture-megabytes", "0"], "is not allowed"),
        ("serve", ["--port", "0", "--host", "nowhere.invalid", "--api-key", "key"], "cannot listen on nowhere.invalid"),
        ("serve", ["--port", "0", "--host", ""], "--host"),
        ("serve", ["--port", "0", "--served-name", ""], "served_name"),
        ("serve", ["--port", "0", "--cors-origin", ""], "cors_origin"),
        ("app", ["--host", ""], "--host is empty"),
        ("app", ["--server", "http://127.0.0.1:8000"], "exclude each other"),
        ("fetch", ["--output", "made", "--gguf", "absent.gguf"], "absent.gguf"),
    ],
)
def test_mistakes_of_one_command_take_one_line(refuse, command, args, message):
    assert message in refuse(command, *args)
