"""From raw logs to the data that heads are trained on, in one run:

    python recipes/prepare_data.py logs/ --output-dir data/chat --target PATH_OR_ID --max-new-tokens 512 --batch-size 32

It reads the logs (any form that `selfspec data inspect` shows), lets the target draw more prompts if asked to
(`--self-prompts 5000`), leaves out near-duplicates and evaluation prompts, holds out a part, and has the target write every
answer anew. The output directory then has `train.jsonl`, `heldout.jsonl`, and `report.json` on what was left out. The same
line again continues where an interruption stopped it.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from selfspec import SamplingParams, Target, display
from selfspec.data_cli import BatchSizeOption, SourcesArgument, TemplateOption, load_target, read_excluded, write
from selfspec.drafters import Drafter
from selfspec.options import DraftOptions, TargetOptions, command
from selfspec.prompts import OutputWriter
from selfspec.train.clean import clean, is_held_out
from selfspec.train.conversations import Conversation, Report
from selfspec.train.masking import tokenize_all
from selfspec.train.regenerate import regenerate
from selfspec.train.self_prompts import self_prompts
from selfspec.train.sources import read_conversations

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command(app, target=TargetOptions, draft=DraftOptions, sampling=SamplingParams)
def main(
    *,
    sources: SourcesArgument,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="directory to make, or to go on with")],
    target: TargetOptions,
    drafter: Annotated[str, typer.Option("--drafter", help="what speeds the target up; its words stay the same")] = "ngram",
    draft: DraftOptions,
    sampling: SamplingParams,
    batch_size: BatchSizeOption = 16,
    number_of_self_prompts: Annotated[int, typer.Option("--self-prompts", help="prompts for the target to draw", min=0)] = 0,
    exclude: Annotated[list[str], typer.Option("--exclude", help="prompts never to train on; repeatable")] = [],  # noqa: B006
    held_out: Annotated[float, typer.Option("--held-out", help="share to hold out", min=0, max=1)] = 0.02,
    chat_template: TemplateOption = None,
) -> None:
    """Prepare training data from logs, with the answers written by the target."""
    output_dir.mkdir(parents=True, exist_ok=True)
    settings = {"sources": sources, "exclude": exclude, "held_out": held_out, "target": target.source}
    settings |= {"self_prompts": number_of_self_prompts, "sampling": asdict(sampling)}
    check_settings(output_dir / "config.json", settings)
    excluded = read_excluded(exclude)
    with display.stage(f"loading {target.source}"):
        model = load_target(target, chat_template)
        loaded_drafter = draft.load(drafter, model)
    reports = {name: Report() for name in ("drawing", "reading", "cleaning", "answering", "masking")}

    drawn = output_dir / "self_prompts.jsonl"
    draw_prompts(model, loaded_drafter, number_of_self_prompts, drawn, batch_size, sampling.seed or 0, reports["drawing"])
    raw = chain(read_conversations(sources, reports["reading"]), read_conversations([drawn], reports["reading"]))
    parts: dict[str, list[Conversation]] = {"train": [], "heldout": []}
    for conversation in clean(raw, reports["cleaning"], excluded=excluded):
        parts["heldout" if is_held_out(conversation, held_out) else "train"].append(conversation)

    for name, conversations in parts.items():
        writer = resume(output_dir / f"{name}.jsonl", (conversation.id for conversation in conversations))
        pending = [conversation for conversation in conversations if conversation.id not in writer.finished]
        answered = regenerate(
            model, pending, reports["answering"], sampling=sampling, drafter=loaded_drafter, batch_size=batch_size
        )
        write(writer, answered, f"answering {name}", len(pending))

    samples = tokenize_all(read_conversations([output_dir / "train.jsonl"], Report()), model.tokenizer, reports["masking"])
    num_trained = sum(sum(sample.loss_mask) for sample in samples)
    num_tokens = sum(len(sample.input_ids) for sample in samples)
    typer.echo(f"{output_dir}: {len(samples)} samples, {num_tokens} tokens, {num_trained} of them to train on")
    for report in reports.values():
        display.show_skipped(report)
    save(output_dir / "report.json", {name: report.record() for name, report in reports.items()})


def draw_prompts(
    target: Target, drafter: Drafter | None, count: int, output: Path, batch_size: int, seed: int, report: Report
) -> None:
    """Prompts of the target's own, to a file that an interruption leaves whole."""
    writer = resume(output, (f"self-{number}" for number in range(count)))
    known = [turn for c in read_conversations([output], Report()) for turn in c.user_turns] if writer.finished else []
    numbers = [number for number in range(count) if f"self-{number}" not in writer.finished]
    sampling = SamplingParams(temperature=1.0, seed=seed)
    prompts = self_prompts(target, numbers, report, sampling=sampling, drafter=drafter, batch_size=batch_size, known=known)
    write(writer, prompts if numbers else (), "drawing prompts", len(numbers))


def resume(output: Path, ids: Iterable[str]) -> OutputWriter:
    return OutputWriter(output, dict.fromkeys(ids, 1), resume=True)


def check_settings(file: Path, settings: dict[str, object]) -> None:
    """Rows of two settings in one file would be worse than none."""
    settings = json.loads(json.dumps(settings))
    if not file.exists():
        save(file, settings)
    elif (before := json.loads(file.read_text(encoding="utf-8"))) != settings:
        changed = ", ".join(name for name in settings if before.get(name) != settings[name])
        raise ValueError(f"{file.parent} was begun with another {changed}: choose another --output-dir, or remove it")


def save(file: Path, record: dict[str, object]) -> None:
    file.write_text(json.dumps(record, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
