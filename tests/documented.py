"""Runs every command that the README and the docs show, as a reader would, and prints what came of each.

    python tests/documented.py                    # all pages
    python tests/documented.py tutorial cli       # these pages
    python tests/documented.py --list             # what would run, and what would not and why

Run it in an environment with all extras. Commands run in a scratch folder with a prompt file and logs in it, and the names
that stand for a reader's own (`PATH_OR_ID`, `FILE`) become the default target and these files. Long ones are shortened by
options of their own, which the output shows. What needs a GPU, the network or another engine is listed with that reason. A
server is started for the commands that talk to one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("selfspec", "python", "accelerate", "torchrun", "curl", "pytest", "mkdocs")
TIME_LIMIT = 1200
PORT = 8000

# Why a command is left out, by a pattern in it.
LEFT_OUT = {
    r"--device cuda|--gpu-|fsdp\.yaml|ddp\.yaml|--dtype (fp8|int4|int8)|--expand|bench_peers": "needs a GPU",
    r"meta-llama/|yuhuili/|HUB_ID|push_to_hub|Qwen/|--adapter": "needs a model from the Hub",
    r"vllm|sglang|nproc_per_node": "needs another engine or more processes",
    r"localhost:9000|127\.0\.0\.1:9000": "needs a second server",
    r"^pytest|tests/documented": "is a test of its own",
    r"^mkdocs serve": "runs until it is stopped",
    r"OLD|…|\.\.\.": "is a pattern and no command",
}
# Options that make a long command short, by a pattern in it.
SHORTENED = {
    r"^selfspec demo": "--max-new-tokens 16",
    r"^selfspec (generate|compare)\b": "--max-new-tokens 16",
    r"^selfspec bench(?= |$)": "--per-task 1 --max-new-tokens 8",
    r"^selfspec bench-engine": "--streams 2,1 --rounds 1 --max-new-tokens 8",
    r"^selfspec bench-runtime": "--num-prompts 1 --max-new-tokens 8 --repeats 2 --contexts 64 --nodes 1,8",
    r"^selfspec bench-serve": "--num-prompts 4 --max-tokens 8",
    r"^accelerate launch .*recipes": "--max_steps 2 --eval_prompts 2",
    # The port may be another server's.
    r"^selfspec serve": "--port 0",
    r"^selfspec data prompts": "--number 4 --max-new-tokens 32",
}
# Commands that run until they are stopped, and what they say when they are ready.
LASTING = r"^selfspec (serve|app)|^python app"
READY = "(Ctrl-C ends it)"
TALKS_TO_A_SERVER = r"127\.0\.0\.1:8000"


@dataclass(frozen=True)
class Documented:
    """One command of a page."""

    page: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why it is left out; None where it runs."""
        return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, self.text)), None)

    def line(self, work: Path) -> str:
        """What is run: placeholders filled in, and shortened."""
        line = self.text
        for name, value in stand_ins(work).items():
            line = re.sub(rf"(?<![\w/]){re.escape(name)}(?![\w])", value, line)
        for pattern, options in SHORTENED.items():
            if re.search(pattern, line):
                line += " " + options
        return line


def stand_ins(work: Path) -> dict[str, str]:
    """Names in the docs that stand for a reader's own, and what is there in the scratch folder."""
    return {
        "eagle:PATH_OR_ID": "eagle",
        "medusa:PATH_OR_ID": "medusa",
        "draft_model:PATH_OR_ID": "draft_model",
        "PATH_OR_ID": "smollm2",
        "MODEL": "smollm2",
        '"model": "NAME"': '"model": "smollm2-135m-instruct"',
        "FILE": str(work / "prompts.jsonl"),
        "SECRET": "secret",
        "DIR": "out",
    }


def commands(page: Path) -> list[Documented]:
    """The commands in a page's blocks, continued lines joined, without the comments after them."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"(?:^    .*\n)+", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    found = []
    for block in blocks:
        joined = re.sub(r"\\\n\s*", " ", re.sub(r"^    ", "", block, flags=re.MULTILINE))
        lines: list[str] = []
        for line in joined.splitlines():
            # A quoted body may go over several lines.
            if lines and lines[-1].count("'") % 2:
                lines[-1] += "\n" + line
            else:
                lines.append(line)
        for line in lines:
            line = re.sub(r"\s{2,}#.*$", "", line).strip()
            # Installing is what has been done when this runs.
            line = line.split("&&")[-1].strip() if line.startswith("pip install") else line
            if line.split(" ")[0] in PROGRAMS:
                found.append(Documented(page.stem, line))
    return found


@contextlib.contextmanager
def server(work: Path) -> Iterator[None]:
    """`selfspec serve` with the default target, until the block ends."""
    with (work / "serve.log").open("w") as log:
        process = subprocess.Popen(
            ["selfspec", "serve", "--port", str(PORT)], cwd=work, stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_until_ready(process, f"http://127.0.0.1:{PORT}/health")
            yield
        finally:
            stop(process)


def wait_until_ready(process: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(address, timeout=5).status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server at {address} did not become ready: see its log")


def stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def run(command: Documented, work: Path) -> str:
    """`ok`, or why not."""
    line = command.line(work)
    lasting = re.search(LASTING, line) is not None
    log = work / "command.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", line], cwd=work, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        deadline = time.monotonic() + TIME_LIMIT
        while process.poll() is None and time.monotonic() < deadline:
            if lasting and READY in log.read_text(errors="replace"):
                stop(process)
                return "ok"
            time.sleep(0.2)
        if process.poll() is None:
            stop(process)
            return f"ran for more than {TIME_LIMIT} s"
    if process.returncode == 0 and not lasting:
        return "ok"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit {process.returncode}: {said[-1] if said else 'nothing said'}"


def prepare(work: Path) -> None:
    """A prompt file, logs, and the folders of the checkout that commands name."""
    for name in ("recipes", "app", "tests", "selfspec", "constraints.txt", "docs", "mkdocs.yml"):
        (work / name).symlink_to(ROOT / name)
    rows = (ROOT / "selfspec" / "data" / "demo_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    (work / "prompts.jsonl").write_text("\n".join(rows[:4]) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="names of pages, without .md")
    parser.add_argument("--list", action="store_true", help="show what would run")
    parser.add_argument("--keep", type=Path, help="folder for logs and results; a temporary one by default")
    options = parser.parse_args()
    pages = [page for page in PAGES if not options.pages or page.stem in options.pages]
    seen: set[str] = set()
    found = [each for page in pages for each in commands(page) if not (each.text in seen or seen.add(each.text))]
    work = options.keep or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    if not options.list:
        prepare(work)
    with contextlib.ExitStack() as stack:
        if not options.list and any(re.search(TALKS_TO_A_SERVER, c.text) and not c.reason for c in found):
            stack.enter_context(server(work))
        for command in found:
            start = time.monotonic()
            outcome = f"left out: {command.reason}" if command.reason else "runs" if options.list else run(command, work)
            num_failed += outcome.startswith(("exit", "ran for"))
            shown = command.line(work).replace("\n", " ")
            sys.stdout.write(f"{command.page:16} {time.monotonic() - start:6.1f} s  {outcome}\n{'':27}{shown}\n")
            sys.stdout.flush()
    if not options.keep:
        shutil.rmtree(work)
    sys.stdout.write(f"{len(found)} commands, {num_failed} failed\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
