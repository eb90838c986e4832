"""The stages of `selfspec train`: data, training by a recipe, comparison. Each goes on where an interrupted one stopped."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import typer

from selfspec.bench.compare import drafter_run, first_difference, race, transformers_run
from selfspec.bench.prompts import DEMO_PROMPTS
from selfspec.cli import display
from selfspec.cli.data import load
from selfspec.cli.options import quiet_libraries
from selfspec.config import DraftOptions, SamplingParams, TargetOptions
from selfspec.drafters import load_drafter
from selfspec.drafters.names import HEADS
from selfspec.drafters.options import load_target
from selfspec.drafters.shipped import identity, shipped_head
from selfspec.heads.base import find_head, read_config
from selfspec.model.default_target import source_of
from selfspec.traffic.conversations import Report
from selfspec.traffic.preparation import Preparation, Prepared, PrepareOptions
from selfspec.traffic.prepare import CleanOptions, WritingOptions
from selfspec.traffic.progress import clock
from selfspec.traffic.prompt_files import read_prompts
from selfspec.traffic.sources import read_conversations
from selfspec.train.card import Compared, add_comparison
from selfspec.train.choices import KINDS, NUM_MEASURED, Length, Measured, Situation, as_flags
from selfspec.train.identity import HEAD_FOLDER
from selfspec.train.runs import RECORD_NAME
from selfspec.train.settings import CONFIGS

if TYPE_CHECKING:
    from selfspec.drafters import Drafter
    from selfspec.model.target import Target

CHOICES_NAME = "choices.json"
DATA_FOLDER, MEASURED_FOLDER = "data", "measured"
# Conversations to hold out at least, so that there is something to compare with, and the most that this may take of a few.
LEAST_HELD_OUT, MOST_SHARE = 8, 0.2
NEW, BEFORE = "the new head", "the head before"


class Training:
    """One request, from its logs to a head and a comparison."""

    def __init__(
        self, head: str, output: Path, minutes: float, start_from: str, target: TargetOptions, writing: WritingOptions
    ) -> None:
        self.head = head
        self.kind = KINDS[head]
        self.output = output
        self.minutes = minutes
        self.start_from = start_from
        self.target = target
        self.writing = writing
        self.situation: Situation | None = None
        self.start: str | None = None
        quiet_libraries()

    @property
    def record_file(self) -> Path:
        """The training's record, with the comparison once all is done."""
        return self.output / RECORD_NAME

    def record(self) -> dict[str, Any]:
        """What the record says so far."""
        return json.loads(self.record_file.read_text(encoding="utf-8")) if self.record_file.exists() else {}

    def choices(self) -> dict[str, Any] | None:
        """The recipe's settings, once they are chosen: a run that goes on keeps them, however fast the machine is then."""
        file = self.output / CHOICES_NAME
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def started_from(self) -> str | None:
        """The head that the training started from; None if its weights were new."""
        return (self.choices() or {}).get("start")

    def prepare(
        self, sources: Sequence[str], sampling: SamplingParams, cleaning: CleanOptions, options: PrepareOptions
    ) -> Prepared | None:
        """Make the training data; None if that was done before."""
        if self.choices() is not None:
            return None
        if self.start_from not in ("auto", "none"):
            self._check_start(self.start_from)
        say = partial(typer.echo, err=True)
        say(f"1 of 3: the data. Then {self.minutes:g} minutes of training at most, and a comparison of a few minutes")
        directory = self.output / DATA_FOLDER
        preparation = Preparation(
            sources=sources,
            output_dir=directory,
            target=self.target,
            writing=self.writing,
            sampling=sampling,
            cleaning=replace(cleaning, held_out=held_out(sources, cleaning.held_out, directory / "config.json")),
            options=options,
        )
        # The target alone knows them, and it makes room for the training.
        prepared = preparation.run(self._load, say)
        assert self.situation is not None
        self.situation = replace(self.situation, num_tokens=prepared.num_tokens, longest=prepared.longest)
        return prepared

    def train(self) -> None:
        """Train by the recipe, or what is left of it."""
        if self.record().get("compared"):
            return
        choices = self.choices() or self._choose()
        typer.echo(f"2 of 3: {choices['says']}", err=True)
        self._run_recipe(choices["settings"])

    def compare(self) -> None:
        """Decode held-out prompts in every way; show, and write into the record and the card, what came of it."""
        record = self.record()
        if not record.get("compared"):
            typer.echo("3 of 3: the comparison with held-out prompts, one at a time and greedily", err=True)
            record["compared"] = self._compared()
            add_comparison(self.output / HEAD_FOLDER, [Compared(**row) for row in record["compared"]])
            partial_file = self.record_file.with_suffix(".partial")
            partial_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            partial_file.replace(self.record_file)
        show_compared([Compared(**row) for row in record["compared"]])

    def next_lines(self) -> list[str]:
        """What can be done with the head now."""
        head = self.output / HEAD_FOLDER
        lengths = {row["name"]: row["acceptance_length"] for row in self.record()["compared"]}
        worse = []
        if lengths[NEW] <= lengths.get(BEFORE, 0):
            worse = [
                f"the new head drafts no better than the one it started from ({lengths[NEW]:.2f} tokens a pass, not "
                f"{lengths[BEFORE]:.2f}): serve that one, {self.started_from()}, or train on more conversations"
            ]
        flags = "".join(f" --{name} {value}" for name in ("target", "adapter") if (value := getattr(self.target, name)))
        return [
            *worse,
            f"the head, with its card and curves: {head}",
            f"serve it: selfspec serve{flags} --drafter {self.kind.drafter}:{head}",
            f"share it: hf upload YOUR_NAME/{self.output.name} {head}",
        ]

    def _load(self) -> tuple[Target, Drafter | None]:
        """The target that answers; what it is like is kept for the training."""
        target, drafter = load(self.writing, self.target, DraftOptions())
        if self.start_from == "auto":
            with contextlib.suppress(ValueError):
                self.start = str(shipped_head(self.kind.drafter, target))
        elif self.start_from != "none":
            self.start = self.start_from
        start = None
        if self.start is not None:
            start = HEADS[self.kind.head_type].config_class.from_dict(read_config(find_head(self.start)))
            start.target.check(identity(target))
        has_gpu = target.device.type == "cuda"
        self.situation = Situation(has_gpu, target.num_layers, target.context_length, 0, 0, start)
        return target, drafter

    def _check_start(self, source: str) -> None:
        """Refuse a head to start from that is of another kind, before the target is loaded."""
        head_type = read_config(find_head(source), source)["head_type"]
        if head_type != self.kind.head_type:
            raise ValueError(f"--start-from {source} is of type {head_type}: name a head of the kind {self.head}")

    def _choose(self) -> dict[str, Any]:
        """The settings, after a short run of the recipe has shown what a step takes. They are kept for later runs."""
        assert self.situation is not None
        _free_memory()
        settings = self._fixed_settings() | self.situation.settings(self.head)
        directory = self.output / MEASURED_FOLDER
        shutil.rmtree(directory, ignore_errors=True)
        short = {
            "output_dir": directory,
            "max_steps": NUM_MEASURED,
            "warmup_steps": 1,
            "logging_steps": 1,
            "eval_steps": NUM_MEASURED - 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            # Decoded once, in the evaluation that is timed.
            "final_eval_file": None,
        }
        with display.stage("measuring a step of the training"), _silent():
            self._run_recipe(settings | short)
        rows = settings["per_device_train_batch_size"]
        process_gib = psutil.Process().memory_info().rss / 2**30
        measured = Measured.of(directory, rows * settings["row_length"], process_gib)
        length = Length.fitting(measured, rows, self.minutes, goes_on=self.start is not None)
        shutil.rmtree(directory)
        _free_memory()
        begin = "from new weights" if self.start is None else f"from {self.start}"
        says = (
            f"training the {self.head} head {begin}: {length.num_steps} steps read the data {length.num_epochs:.1f} times, "
            f"about {clock(length.seconds)} with {length.num_evaluations} evaluations, in {measured.memory_gib:.1f} GiB"
        )
        choices = {"says": says, "start": self.start, "settings": settings | length.settings()}
        file = self.output / CHOICES_NAME
        partial_file = file.with_suffix(".partial")
        partial_file.write_text(json.dumps(choices, indent=1, default=str) + "\n", encoding="utf-8")
        partial_file.replace(file)
        return choices

    def _fixed_settings(self) -> dict[str, Any]:
        """The recipe's settings that the request decides."""
        data = self.output / DATA_FOLDER
        return {
            "train_file": str(data / "train.jsonl"),
            "held_out_file": str(data / "heldout.jsonl"),
            "output_dir": str(self.output),
            "target": self.target.target,
            "adapter": self.target.adapter,
            "target_dtype": self.target.dtype,
            "chat_template": None if self.writing.chat_template is None else str(self.writing.chat_template),
            "chat_template_kwargs": self.target.chat_template_kwargs,
            "use_cpu": self.target.device == "cpu" or None,
            "init_head": self.start,
        }

    def _run_recipe(self, settings: dict[str, Any]) -> None:
        recipe = importlib.import_module(f"selfspec.recipes.{self.kind.recipe}")
        # What transformers prints of every step is in the record, and the bar or a line now and then says how far it is.
        with contextlib.redirect_stdout(io.StringIO()):
            recipe.main([str(CONFIGS / self.kind.config_file), *as_flags(settings)])

    def _compared(self) -> list[dict[str, Any]]:
        _free_memory()
        with display.stage(f"loading {source_of(self.target)}"):
            target = load_target(self.target)
            has_gpu = target.device.type == "cuda"
            sampling = SamplingParams(max_new_tokens=128 if has_gpu else 48)
            prompts = self._prompts(target, sampling)[: 32 if has_gpu else 6]
            drafters: dict[str, Drafter | None] = {"none": None, "ngram": load_drafter("ngram", target)}
            if start := self.started_from():
                drafters[BEFORE] = load_drafter(f"{self.kind.drafter}:{start}", target)
            drafters[NEW] = load_drafter(f"{self.kind.drafter}:{self.output / HEAD_FOLDER}", target)
            # The guard would stop drafting by the time that passes take, so heads could not be compared.
            settings: dict[str, Any] = {"sampling": sampling, "use_cost_guard": False}
            runs = {name: drafter_run(target, prompts, drafter, **settings) for name, drafter in drafters.items()}
            runs["transformers"] = transformers_run(target, prompts, sampling=sampling, source=source_of(self.target))
        with display.progress("comparing", len(runs) * len(prompts)) as advance:
            plain, *others = modes = race(runs, len(prompts), advance)
        speeds = {mode.name: mode.tokens_per_second for mode in modes}
        return [
            {
                "name": mode.name,
                "tokens_per_second": mode.tokens_per_second,
                "vs_plain": speeds[mode.name] / speeds["none"],
                "vs_transformers": speeds[mode.name] / speeds["transformers"],
                "acceptance_length": mode.acceptance_length,
                "is_identical": first_difference(mode, plain) is None,
                "num_prompts": len(prompts),
                "num_tokens": plain.num_tokens,
            }
            for mode in (plain, *others)
        ]

    def _prompts(self, target: Target, sampling: SamplingParams) -> list[list[int]]:
        """Token ids of the first turns of the held-out conversations; of packaged prompts if none can be decoded."""
        from selfspec.traffic.expectation import first_prompt

        held_out = read_conversations([self.output / DATA_FOLDER / "heldout.jsonl"], Report())
        prompts = [prompt for conversation in held_out if (prompt := first_prompt(target, conversation))]
        fitting = [prompt for prompt in prompts if len(prompt) + sampling.max_new_tokens < target.context_length]
        if not fitting:
            typer.echo("no conversation that can be decoded is held out, so packaged prompts are compared", err=True)
            fitting = [target.encode(row.prompt) for row in read_prompts(DEMO_PROMPTS)]
        return fitting


def held_out(sources: Sequence[str], share: float, begun: Path) -> float:
    """The share to hold out: of few conversations a larger one. A folder that was begun keeps its own."""
    if begun.exists():
        return json.loads(begun.read_text(encoding="utf-8"))["held_out"]
    number = sum(1 for _ in read_conversations(sources, Report()))
    return max(share, min(MOST_SHARE, LEAST_HELD_OUT / max(1, number)))


def show_compared(rows: Sequence[Compared]) -> None:
    """The table of a comparison."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("held-out prompts", no_wrap=True)
    for heading in ("tokens\n/pass", "tokens\n/s", "vs\nplain", "vs\ntransf.", "same\ntokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, *row.figures())
    display.stdout.print(table)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without the log of what is run: it is a measurement."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _free_memory() -> None:
    """Give back what the target of the stage before took."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
