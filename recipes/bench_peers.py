"""This project's engine beside vLLM on the same work: speed by streams, first tokens, and whether answers are equal.

    python recipes/bench_peers.py work work/
    python recipes/bench_peers.py ours work/
    python recipes/bench_peers.py vllm work/
    python recipes/bench_peers.py vllm work/ --drafter eagle:3
    python recipes/bench_peers.py compare work/

Each line is a process of its own, so each engine has the card to itself and the environment that it needs: only `vllm` needs
vLLM, and it needs no more of this project than the files themselves. `work` expands the target (docs/benchmark.md says how)
and its EAGLE head, writes both for both engines, and makes the prompts. Records, one for each engine and mode, are JSON
files in the same folder, rewritten after each run, so an interrupted one keeps what it has.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.bench.peers_suite import PLAIN, ROOM, WORK_FILE, Opener, Suite, Work, measure
from selfspec.failures import reported_failures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfspec.drafters import Drafter

logger = logging.getLogger("selfspec.recipes")

TARGET, HEAD, VLLM_HEAD = "target", "eagle", "eagle_vllm"
RESULTS = "peers"
TEXTS_OF_A_LENGTH = 3


@dataclass(frozen=True, kw_only=True)
class WorkArgs:
    """What the engines serve."""

    target: str | None = field(default=None, metadata={"help": "folder or Hub id; the default target without it"})
    head: str | None = field(
        default=None, metadata={"help": "folder or Hub id of its EAGLE head; the shipped one without it"}
    )
    expand: str = field(default="8b", metadata={"help": "shape to expand both to, or none to leave them as they are"})
    most_prompt_tokens: int | None = field(
        default=None, metadata={"help": "leave longer prompts out; by default those that do not fit the target"}
    )
    dtype: str = field(default="bfloat16", metadata={"help": "of the weights"})
    device: str = field(default="auto", metadata={"help": "where they are expanded"})


@dataclass(frozen=True, kw_only=True)
class OursArgs:
    """How this project's engine runs."""

    drafters: list[str] = field(
        default_factory=lambda: ["none", "eagle"],
        metadata={"help": "eagle is the folder's head; others as in `selfspec serve`"},
    )
    label: str = field(default="selfspec", metadata={"help": "what to call it, for versions beside each other"})
    dtype: str = field(default="bfloat16", metadata={"help": "float32, bfloat16 or float16"})
    device: str = field(default="auto", metadata={"help": "cpu, cuda or auto"})


@dataclass(frozen=True, kw_only=True)
class VllmArgs:
    """How vLLM runs."""

    drafter: str = field(default=PLAIN, metadata={"help": "none, or eagle:K for the folder's head and chains of K tokens"})
    label: str = field(default="vllm", metadata={"help": "what to call it, for runs with other environment variables"})
    dtype: str = field(default="bfloat16", metadata={"help": "float32, bfloat16 or float16"})

    def __post_init__(self) -> None:
        name, _, number = self.drafter.partition(":")
        if self.drafter != PLAIN and (name != "eagle" or not number.isdecimal() or not int(number)):
            raise ValueError(f"drafter={self.drafter!r} is not known: use none, or eagle:3 for chains of three")

    @property
    def num_draft_tokens(self) -> int:
        return int(self.drafter.partition(":")[2] or 0)


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    mode, folder, *settings = parsed(sys.argv[1:] if arguments is None else arguments)
    mode(folder, *settings)


def parsed(words: Sequence[str]) -> list[Any]:
    """The mode that the first word names, its folder, and its settings."""
    if not words or words[0] not in MODES:
        sys.stdout.write(f"{__doc__}\nThe first word is one of {', '.join(MODES)}; each has a --help of its own.\n")
        raise SystemExit(0 if words and words[0] in ("-h", "--help") else 2)

    from transformers import HfArgumentParser

    mode, *kinds = MODES[words[0]]
    parser = HfArgumentParser(kinds, prog=f"bench_peers.py {words[0]}", description=mode.__doc__)
    parser.add_argument("folder", type=Path, help="where the work and the records are")
    *settings, given = parser.parse_args_into_dataclasses(args=list(words[1:]))
    return [mode, given.folder, *settings]


def work(folder: Path, args: WorkArgs, suite: Suite) -> None:
    """Write the target and its head for both engines, and the token ids that both get."""
    from transformers import AutoModelForCausalLM

    from selfspec.bench.expand import ExpandedShape, expand, expand_head
    from selfspec.drafters.shipped import load_head
    from selfspec.interop.eagle3 import write_eagle3
    from selfspec.model.default_target import default_target
    from selfspec.model.target import Target

    shape = None if args.expand == "none" else ExpandedShape.parse(args.expand)
    source = args.target or str(default_target())
    options: dict[str, Any] = {"dtype": args.dtype, "device": args.device, "use_packing": False}
    small = Target.from_pretrained(source, **options)
    head: Any = load_head(args.head, small, drafter="eagle")
    context = small.context_length if shape is None else max(shape.context_length, small.context_length)
    if max(suite.lengths) + ROOM > context:
        raise ValueError(f"lengths={suite.lengths} do not fit the target's context of {context} tokens: use shorter ones")
    limit = min(args.most_prompt_tokens or context, context - suite.max_tokens - ROOM)
    assert small.tokenizer is not None
    made = make_work(small.tokenizer, suite, limit)

    folder.mkdir(parents=True, exist_ok=True)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=small.dtype)
    if shape is not None:
        model = expand(model.to(small.device), shape)
    model.save_pretrained(folder / TARGET)
    small.tokenizer.save_pretrained(folder / TARGET)
    large = Target.from_pretrained(folder / TARGET, **options)
    if shape is not None:
        head = expand_head(head, large)
    head.save_pretrained(folder / HEAD)
    write_eagle3(head, large, "vllm", str(folder / VLLM_HEAD)).save(folder / VLLM_HEAD)
    made.save(folder)
    mean = sum(map(len, made.prompts)) / len(made.prompts)
    logger.info("%s: %d prompts of %.0f tokens on average", folder, len(made.prompts), mean)


def make_work(tokenizer: PreTrainedTokenizerBase, suite: Suite, limit: int) -> Work:
    """Spec-Bench's prompts to measure, HumanEval's to warm up with, and long texts of both.

    Prompts are numbered in their text. So there are as many different ones as are wanted, and none begins as another does,
    except for what the chat template puts before.
    """
    from selfspec.bench.prompts import mixed, read_benchmark
    from selfspec.bench.serve_work import text_of

    def encode(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        return list(ids["input_ids"])

    texts = {name: [text_of(row) for row in mixed(read_benchmark(name))] for name in ("spec_bench", "humaneval")}
    # With room for the number.
    short = {name: [text for text in of if len(encode(f"(99999) {text}")) <= limit] for name, of in texts.items()}
    if not all(short.values()):
        raise ValueError(f"no prompt of {limit} tokens or fewer: use a larger --most_prompt_tokens, or another target")
    numbered = enumerate(islice(cycle(short["spec_bench"]), suite.num_requests), 1)
    prompts = [encode(f"({number}) {text}") for number, text in numbered]
    joined = [token for name in texts for token in tokenizer("\n".join(texts[name]), add_special_tokens=False)["input_ids"]]
    # Each text begins where no other does, so no cache of prompts has a part of it.
    stride = len(joined) // (TEXTS_OF_A_LENGTH * len(suite.lengths))
    long: dict[int, list[list[int]]] = {}
    for place, length in enumerate(suite.lengths):
        starts = [stride * (TEXTS_OF_A_LENGTH * place + text) for text in range(TEXTS_OF_A_LENGTH)]
        around = joined * (2 + length // len(joined))
        long[length] = [around[start : start + length] for start in starts]
    return Work(prompts, [encode(text) for text in short["humaneval"]], long)


def ours(folder: Path, args: OursArgs, suite: Suite) -> None:
    """Measure this project's engine with one drafter after the other."""
    made = Work.read(folder, suite)

    from selfspec.bench.peers_engine import EnginePeer
    from selfspec.bench.tasks import environment
    from selfspec.drafters import load_drafter
    from selfspec.model.target import Target

    target = Target.from_pretrained(folder / TARGET, dtype=args.dtype, device=args.device)
    for name in dict.fromkeys(args.drafters):
        drafter = load_drafter(f"eagle:{folder / HEAD}" if name == "eagle" else name, target)

        def open_peer(places: int, longest: int, drafter: Drafter | None = drafter) -> EnginePeer:
            return EnginePeer(target, drafter, places=places, longest=longest)

        record = {"engine": args.label, "is_ours": True, "mode": name, "environment": environment(target)}
        measure_to(folder, record, open_peer, made, suite)


def vllm(folder: Path, args: VllmArgs, suite: Suite) -> None:
    """Measure vLLM in one mode; it takes a minute or more to load."""
    made = Work.read(folder, suite)

    from selfspec.bench.peers_vllm import VllmPeer

    peer = VllmPeer(
        folder / TARGET,
        head=folder / VLLM_HEAD if args.num_draft_tokens else None,
        num_draft_tokens=args.num_draft_tokens,
        places=suite.most_streams,
        longest=max(made.longest + suite.max_tokens, *suite.lengths) + ROOM,
        dtype=args.dtype,
    )
    record = {"engine": args.label, "is_ours": False, "mode": args.drafter, "environment": peer.environment}
    measure_to(folder, record, lambda places, longest: peer, made, suite)


def compare(folder: Path) -> None:
    """Print the tables of all records in the folder, and write them there as peers.md and peers.json."""
    from selfspec.bench import peers_table

    files = [file for file in sorted(folder.glob("*.json")) if file.name not in (WORK_FILE, f"{RESULTS}.json")]
    if not files:
        raise ValueError(f"{folder} has no records: measure an engine on it first (ours or vllm)")
    tables, figures = peers_table.compare([json.loads(file.read_text()) for file in files])
    text = "\n".join(table.markdown() for table in tables)
    (folder / f"{RESULTS}.md").write_text(text)
    (folder / f"{RESULTS}.json").write_text(json.dumps(figures, indent=1) + "\n")
    sys.stdout.write(text)


def measure_to(folder: Path, record: dict[str, Any], open_peer: Opener, made: Work, suite: Suite) -> None:
    """Measure, and write the record after each step, so a run that is cut keeps what it has."""
    name = re.sub(r"\W", "-", f"{record['engine']}-{record['mode']}")
    file = folder / f"{name}.json"

    def on_part(line: str) -> None:
        file.write_text(json.dumps(record))
        logger.info("%s, %s: %s", record["engine"], record["mode"], line)

    measure(open_peer, made, suite, record, is_plain=record["mode"] == PLAIN, on_part=on_part)


MODES: dict[str, tuple[Any, ...]] = {
    "work": (work, WorkArgs, Suite),
    "ours": (ours, OursArgs, Suite),
    "vllm": (vllm, VllmArgs, Suite),
    "compare": (compare,),
}


if __name__ == "__main__":
    with reported_failures():
        main()
