"""The rows to train on and the prompts to evaluate with, from files. Whatever is left out is counted and shown."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from selfspec.model.target import FINAL, Target
from selfspec.traffic.conversations import Conversation, Report
from selfspec.traffic.masking import tokenize_all
from selfspec.traffic.prepare import check_some_left
from selfspec.traffic.prompt_files import read_prompts
from selfspec.traffic.sources import read_conversations
from selfspec.train.evaluation import EvalPrompt, EvalPrompts
from selfspec.train.rows import PackedRows, pack
from selfspec.train.settings import DataArgs

logger = logging.getLogger(__name__)

# How far a text's hidden states in a shared row may be from those of the text alone: by rounding, in either precision.
MOST_GAP = {torch.float32: 1e-3}
MOST_GAP_LOW = 0.05


@dataclass
class LeftOut:
    """What a run does not use, by file and reason: rows, samples, tokens or prompts."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, file: str, reason: str, count: int, more: str = "") -> None:
        """Count and show what is left out for one reason; nothing if `count` is 0."""
        if count:
            self.counts.setdefault(Path(file).name, Counter())[reason] += count
            logger.warning("%s: %d left out: %s%s", file, count, reason, f" ({more})" if more else "")

    def add_report(self, file: str, *reports: Report) -> None:
        """Count and show all that reports skipped."""
        for report in reports:
            for reason, count in report.skipped.most_common():
                self.add(file, reason, count, f"such as {report.examples[reason][0]}")


@dataclass(frozen=True)
class TrainingData:
    """What a run reads: rows, prompts, and what of the files is in neither."""

    rows: PackedRows
    eval_prompts: EvalPrompts
    left_out: LeftOut


def load_data(data: DataArgs, target: Target) -> TrainingData:
    """The rows and prompts that the settings name.

    Raises:
        ValueError: there is nothing to train on, a conversation is longer than the target's context, or a file of prompts
            has none that can be decoded.
    """
    left_out = LeftOut()
    return TrainingData(load_rows(data, target, left_out), load_eval_prompts(data, target, left_out), left_out)


def load_rows(data: DataArgs, target: Target, left_out: LeftOut) -> PackedRows:
    """The packed training rows.

    Raises:
        ValueError: there is nothing to train on, or a conversation is longer than the target's context.
    """
    reading, masking = Report(), Report()
    conversations = list(read_conversations([data.train_file], reading))
    check_some_left(conversations, reading)
    _adopt_arguments(target, conversations)
    samples = tokenize_all(conversations, target.tokenizer, masking, chat_template_kwargs=target.chat_template_kwargs)
    left_out.add_report(data.train_file, reading, masking)
    rows = pack(samples, data.row_length)
    longest = max(len(sample.input_ids) for sample in samples)
    advice = f"--row_length {min(longest, target.context_length)}"
    if not len(rows):
        raise ValueError(f"no answer begins within row_length={data.row_length} tokens: use longer rows ({advice})")
    if min(longest, data.row_length) > target.context_length:
        raise ValueError(
            f"{data.train_file} has a conversation of {min(longest, data.row_length)} tokens, longer than the target's "
            f"context of {target.context_length} tokens: use row_length={target.context_length}, which cuts it"
        )
    beyond = f"row_length={data.row_length}"
    left_out.add(data.train_file, f"samples whose answers begin after {beyond} tokens", rows.num_left_out_samples)
    left_out.add(data.train_file, f"ends of samples longer than {beyond} tokens", rows.num_cut_samples)
    left_out.add(data.train_file, f"tokens beyond {beyond}", rows.num_lost_tokens, f"{advice} keeps these")
    if not keeps_texts_apart(target, rows):
        logger.warning(
            "%s: texts that share a row change each other's hidden states, so every row holds one text",
            target.model.config.model_type,
        )
        rows = pack(samples, data.row_length, is_shared=False)
    logger.info("%d rows of %d tokens, %.1f %% full", len(rows), data.row_length, 100 * rows.fill_rate)
    return rows


def _adopt_arguments(target: Target, conversations: Sequence[Conversation]) -> None:
    """Give the target the template's arguments that all conversations have, so that evaluations and the head's config do.

    Raises:
        ValueError: the target's template does not read them.
    """
    kinds = {json.dumps(each.chat_template_kwargs or {}, sort_keys=True) for each in conversations}
    if not target.chat_template_kwargs and len(kinds) == 1:
        target.set_chat_template_kwargs(json.loads(kinds.pop()))


def keeps_texts_apart(target: Target, rows: PackedRows) -> bool:
    """Whether the target's last hidden states of a row's second text are those of the text alone."""
    starts = (rows.position_ids == 0).cumsum(1)
    shared = ((starts == 2) & rows.loss_mask).any(1).nonzero()
    if not len(shared):
        return True
    index = int(shared[0])
    second = starts[index] == 2

    def states(chosen: torch.Tensor) -> torch.Tensor:
        ids, positions = (values[index, chosen][None].to(target.device) for values in (rows.input_ids, rows.position_ids))
        return target.hidden_states(ids, positions, (FINAL,))[FINAL][0].float()

    alone, packed = states(second), states(starts[index] <= 2)[-int(second.sum()) :]
    # The median, because experts may switch at a few positions in low precision.
    gap = ((packed - alone).norm(dim=-1) / alone.norm(dim=-1).clamp(min=1e-12)).median()
    return bool(gap < MOST_GAP.get(target.dtype, MOST_GAP_LOW))


def load_eval_prompts(data: DataArgs, target: Target, left_out: LeftOut) -> EvalPrompts:
    """The prompts to decode at evaluations.

    Raises:
        ValueError: a file has prompts and none of them can be decoded.
    """
    held_out: list[EvalPrompt] = []
    if data.held_out_file is not None:
        report = Report()
        conversations = list(read_conversations([data.held_out_file], report))
        left_out.add_report(data.held_out_file, report)
        if conversations or report.skipped:
            firsts = (([m for m in c.messages[:2] if m["role"] in ("system", "user")], c.category) for c in conversations)
            held_out = _decodable(data.held_out_file, firsts, data, target, left_out)
        else:
            logger.warning(
                "held_out_file=%s is empty, so nothing is evaluated on it: hold out more with `--held-out` of the recipe "
                "prepare_data or of `selfspec data clean`",
                data.held_out_file,
            )
    step = max(1, len(held_out) // max(1, data.num_eval_prompts))
    chosen = held_out[::step][: data.num_eval_prompts]
    if data.held_out_file is not None:
        unused = f"prompts beyond num_eval_prompts={data.num_eval_prompts}"
        left_out.add(data.held_out_file, unused, len(held_out) - len(chosen))
    final = chosen
    if data.final_eval_file is not None:
        rows = read_prompts(Path(data.final_eval_file))
        prompts = ((row.prompt, row.category) for row in rows)
        final = _decodable(data.final_eval_file, prompts, data, target, left_out)
    return EvalPrompts(chosen, final)


def _decodable(
    file: str,
    prompts: Iterable[tuple[str | list[dict[str, Any]], str | None]],
    data: DataArgs,
    target: Target,
    left_out: LeftOut,
) -> list[EvalPrompt]:
    """Those of a file's prompts, each with its task, that can be decoded."""
    usable, num_left_out = [], 0
    for prompt, category in prompts:
        try:
            token_ids = target.encode(prompt)
        except TemplateError:
            token_ids = []
        if token_ids and len(token_ids) + data.num_eval_tokens < target.context_length:
            usable.append(EvalPrompt(token_ids, category))
        else:
            num_left_out += 1
    if not usable:
        raise ValueError(
            f"{file} has no prompt to decode: each must leave room for num_eval_tokens={data.num_eval_tokens} in the "
            f"target's context of {target.context_length} tokens, and the chat template must take it"
        )
    left_out.add(file, "prompts too long, or refused by the chat template", num_left_out)
    return usable


def frequent_tokens(rows: PackedRows, size: int, vocab_size: int) -> torch.Tensor:
    """[size] ascending ids of the tokens that answers use most; if too few are used, also the lowest unused ids."""
    counts = torch.bincount(rows.input_ids[rows.loss_mask], minlength=vocab_size)
    chosen = counts.sort(descending=True, stable=True).indices[:size]
    share = float(counts[chosen].sum() / counts.sum())
    logger.info("the draft vocabulary of %d tokens covers %.2f %% of the answers", size, 100 * share)
    return chosen.sort().values
