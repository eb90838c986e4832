"""What a process holds after each stage of answering with a drafter, as lines of JSON. `selfspec doctor --memory` runs it.

    python -m selfspec.bench.memory --target PATH_OR_ID --drafter eagle --num-answers 100

It is a process of its own, because the peak is the whole process's, and memory that was ever used may not be given back.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from selfspec.model.memory import Memory

PROMPT = "Once upon a time"


def stages(source: str, drafter: str, num_answers: int) -> Iterator[str]:
    """Import, load and answer; yields the name of every stage when it is done. Answers are made one at a time."""
    yield "python"
    # Imported here, because importing is a stage.
    from selfspec import SamplingParams, Target, generate, load_drafter

    yield "imports"
    target = Target.from_pretrained(source, device="cpu")
    yield "target"
    loaded = load_drafter(drafter, target)
    yield "drafter"
    sampling = SamplingParams(max_new_tokens=32, ignore_eos=True)
    for number in range(1, num_answers + 1):
        # Another length each time, because each number of rows has kernels of its own.
        prompt = target.encode(PROMPT * (1 + number % 25))
        list(generate(target, [prompt], drafter=loaded, sampling=sampling))
        if number in (1, 10, num_answers):
            yield f"answer {number}"


def main() -> None:
    """Print one line for each stage: its name, and MiB."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True, help="folder or Hub id of the target")
    parser.add_argument("--drafter", default="eagle", help="as for `selfspec generate`")
    parser.add_argument("--num-answers", type=int, default=1, help="answers of 32 tokens, one after the other")
    options = parser.parse_args()
    for stage in stages(options.target, options.drafter, options.num_answers):
        sizes = {f"{name}_mib": size >> 20 for name, size in asdict(Memory.now()).items()}
        sys.stdout.write(json.dumps({"stage": stage, **sizes}) + "\n")


if __name__ == "__main__":
    main()
