"""A training run through kills, damage, full disks, bad numbers, several processes and trackers."""

from __future__ import annotations

import json
import logging
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from support import tiny_target
from transformers import Trainer, TrainerState

from selfspec import SamplingParams, Target, generate
from selfspec.drafters import Drafter, MedusaDrafter
from selfspec.drafters.shipped import identity
from selfspec.heads.medusa import MedusaConfig, MedusaHead
from selfspec.loop.batch import Batch
from selfspec.loop.drafter import Proposal
from selfspec.plan.cards import read_figures
from selfspec.train.checkpoints import PARTIAL, last_checkpoint
from selfspec.train.evaluation import EvalPrompt, Evaluator, acceptance
from selfspec.train.module import HeadTraining
from selfspec.tree import chain

pytest.importorskip("accelerate", reason="training needs accelerate: pip install 'selfspec[train]'")

Recipe = Callable[[str], ModuleType]
Flags = Callable[..., list[str]]
Start = Callable[..., subprocess.Popen[str]]

# Sums in another order differ by about ten float32 roundings: of a loss near 30, and of a weight moved by 1e-3 a step.
LOSS_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, as in the processes that the tests start, because sums must be in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(output: Path) -> bytes:
    return (output / "head" / "model.safetensors").read_bytes()


def log_history(output: Path) -> list[dict[str, float]]:
    last = last_checkpoint(output)
    assert last is not None
    return json.loads((last / "trainer_state.json").read_text())["log_history"]


def finish(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return errors


# A process that dies in the middle of its 25th step.
KILLED = """
import os, runpy, signal, sys
from selfspec.train.module import HeadTraining
forward = HeadTraining.forward
num_steps = 0
def dying(self, **batch):
    global num_steps
    num_steps += 1
    if num_steps == 25:
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(self, **batch)
HeadTraining.forward = dying
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_killed_in_the_middle_goes_on_bit_for_bit(recipe: Recipe, flags: Flags, start: Start, tmp_path: Path) -> None:
    # EAGLE-1 draws noise at every step, so the random numbers must continue where they were, too.
    changes = {"max_steps": 120, "save_steps": 10, "eval_steps": 40, "logging_steps": 10, "version": 1}
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    process = start("eagle", flags(tmp_path / "killed", **changes), script=script)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, errors
    assert last_checkpoint(tmp_path / "killed") == tmp_path / "killed" / "checkpoint-20"
    assert not (tmp_path / "killed" / "head").exists()
    for output in ("killed", "whole"):
        recipe("eagle").main(flags(tmp_path / output, **changes))
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    histories = [json.loads((tmp_path / output / "run.json").read_text())["history"] for output in ("killed", "whole")]
    assert histories[0] == histories[1] and [entry["step"] for entry in histories[0]] == [40, 80, 120]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "has no optimizer": lambda checkpoint: (checkpoint / "optimizer.pt").unlink(),
    "has no rng_state": lambda checkpoint: (checkpoint / "rng_state.pth").unlink(),
    "has no .*model": lambda checkpoint: [file.unlink() for file in checkpoint.iterdir()],
    "optimizer.pt is cut off": lambda checkpoint: cut(checkpoint / "optimizer.pt"),
    "model.safetensors is cut off": lambda checkpoint: cut(checkpoint / "model.safetensors"),
    "trainer_state.json is cut off": lambda checkpoint: cut(checkpoint / "trainer_state.json"),
}


def test_a_damaged_checkpoint_is_passed_over(
    recipe: Recipe, flags: Flags, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "run"
    recipe("medusa").main(flags(output))
    assert last_checkpoint(output) == output / "checkpoint-4"
    for sentence, damage in DAMAGES.items():
        copy = tmp_path / "copy"
        shutil.copytree(output, copy)
        damage(copy / "checkpoint-4")
        caplog.clear()
        assert last_checkpoint(copy) == copy / "checkpoint-2", sentence
        assert caplog.records[0].levelno == logging.WARNING
        assert re.search(f"checkpoint-4 is passed over: .*{sentence}", caplog.text)
        shutil.rmtree(copy)
    before = weights(output)
    DAMAGES["has no optimizer"](output / "checkpoint-4")
    (output / "head" / "model.safetensors").unlink()
    recipe("medusa").main(flags(output))
    assert weights(output) == before and last_checkpoint(output) == output / "checkpoint-4"


def test_a_checkpoint_has_its_name_only_when_it_is_whole(
    recipe: Recipe, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Trainer._save_rng_state

    def interrupted(trainer: Trainer, folder: str) -> None:
        if trainer.state.global_step == 4:
            raise KeyboardInterrupt
        save(trainer, folder)

    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_rng_state", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recipe("medusa").main(flags(output))
    assert (output / PARTIAL / "checkpoint-4" / "optimizer.pt").exists()
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]
    recipe("medusa").main(flags(output, save_total_limit=1))
    recipe("medusa").main(flags(tmp_path / "whole"))
    assert weights(output) == weights(tmp_path / "whole")
    assert not list((output / PARTIAL).iterdir())
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-4"]


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, cls: type, method: str) -> None:
    """At step 4, `method` gets the operating system's error for a file that is too large."""
    write = getattr(cls, method)

    def limited(self: Any, *args: Any, **kwargs: Any) -> None:
        is_full = getattr(self, "state", self).global_step == 4
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024 if is_full else soft, hard))
        try:
            write(self, *args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(cls, method, limited)


# Written by safetensors, torch and Python.
WRITERS = [(Trainer, "save_model"), (Trainer, "_save_optimizer_and_scheduler"), (TrainerState, "save_to_json")]


@pytest.mark.parametrize(("cls", "method"), WRITERS)
def test_a_full_disk_ends_with_one_sentence(
    cls: type, method: str, recipe: Recipe, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        fill_the_disk(patch, cls, method)
        with pytest.raises(OSError, match=r"checkpoint-4 could not be written \(.*GiB free\): .* from checkpoint-2$"):
            recipe("medusa").main(flags(output))
    assert last_checkpoint(output) == output / "checkpoint-2" and not (output / PARTIAL).exists()
    recipe("medusa").main(flags(output))
    assert last_checkpoint(output) == output / "checkpoint-4"


def test_a_folder_of_another_head_or_target_is_refused(
    recipe: Recipe, flags: Flags, tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, other = tmp_path / "run", tmp_path / "other-target"
    recipe("medusa").main(flags(output))
    shutil.copytree(tiny_target_dir, other)
    model = Target.from_pretrained(other, use_packing=False).model
    model.get_input_embeddings().weight.data += 1
    model.save_pretrained(other)

    monkeypatch.setattr(HeadTraining, "forward", None)
    with pytest.raises(ValueError, match=r"was begun with num_heads 4, not 2: choose another --output_dir"):
        recipe("medusa").main([*flags(output), "--num_heads=2"])
    with pytest.raises(ValueError, match=r"was begun for a medusa head, not a eagle head"):
        recipe("eagle").main([*flags(output), "--feature_layers", "0", "1", "--draft_vocab_size=64"])
    with pytest.raises(ValueError, match=r"was begun for another target .*embedding weights differ from those of other-t"):
        recipe("medusa").main(flags(output, target=other))
    (output / "identity.json").unlink()
    with pytest.raises(ValueError, match="holds checkpoints of an unknown head"):
        recipe("medusa").main(flags(output))


def test_a_loss_that_is_not_finite_stops_with_its_batch(recipe: Recipe, flags: Flags, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with pytest.raises(FloatingPointError, match=r"the loss is (nan|inf) at step 1: its batch is in .*bad_batch_0\.pt"):
        recipe("medusa").main(flags(output, learning_rate=1e38))
    batch = torch.load(output / "bad_batch_0.pt", weights_only=True)
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(
        ("input_ids", "loss_mask", "position_ids"), (2, 64)
    )
    assert bool(batch["loss_mask"].any()) and int(batch["position_ids"].max()) < 64
    assert not (output / "head").exists()


# Rank 1's first loss is NaN, rank 0's is not.
NAN_ON_RANK_1 = """
import os, runpy, sys
from selfspec.train.module import HeadTraining
forward = HeadTraining.forward
def broken(self, **batch):
    factor = float("nan") if os.environ["RANK"] == "1" else 1.0
    return {"loss": forward(self, **batch)["loss"] * factor}
HeadTraining.forward = broken
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_all_processes_stop_at_one_processs_bad_loss(flags: Flags, start: Start, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(NAN_ON_RANK_1)
    process = start("medusa", flags(tmp_path / "run"), num_processes=2, script=script)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert errors.count("selfspec: the loss is nan at step 0: its batch is in") == 2
    assert [path.name for path in (tmp_path / "run").glob("bad_batch*")] == ["bad_batch_1.pt"]


@pytest.mark.parametrize(("kind", "is_sharded"), [("eagle", False), ("medusa", True)])
def test_two_processes_and_batches_in_parts_train_like_one(
    kind: str, is_sharded: bool, recipe: Recipe, flags: Flags, start: Start, tmp_path: Path
) -> None:
    shape = ["--feature_layers", "0", "1", "2", "--draft_vocab_size=64"] if kind == "eagle" else []
    changes = {"max_steps": 10, "logging_steps": 1, "save_steps": 10, "eval_steps": 5}
    two = [*flags(tmp_path / "two", **changes, per_device_train_batch_size=2, shard_target=is_sharded), *shape]
    process = start(kind, two, num_processes=2)
    recipe(kind).main([*flags(tmp_path / "one", **changes, per_device_train_batch_size=4), *shape])
    parts = flags(tmp_path / "parts", **changes, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    recipe(kind).main([*parts, *shape])
    finish(process)

    logs = {name: log_history(tmp_path / name) for name in ("one", "two", "parts")}
    losses = {name: [entry["loss"] for entry in log if "loss" in entry] for name, log in logs.items()}
    assert len(losses["one"]) == 10
    expected = load_file(tmp_path / "one" / "checkpoint-10" / "model.safetensors")
    for name in ("two", "parts"):
        assert losses[name] == pytest.approx(losses["one"], abs=LOSS_TOLERANCE)
        trained = load_file(tmp_path / name / "checkpoint-10" / "model.safetensors")
        for key, value in expected.items():
            torch.testing.assert_close(trained[key], value, rtol=0, atol=WEIGHT_TOLERANCE)
        evaluations = [entry["step"] for entry in logs[name] if "eval_acceptance_length" in entry]
        assert evaluations == [5, 10]


class HalfRight(Drafter):
    """Drafts the right next token, and then a wrong one."""

    name = "half-right"
    num_draft_tokens = 2

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        drafts = []
        for sequence in batch.sequences:
            right, wrong = (*self.answers[tuple(sequence.request.prompt_ids)][len(sequence.token_ids) :], 0, 0)[:2]
            drafts.append([right, (wrong + 1) % 50])
        return Proposal(chain(batch.roots, torch.tensor(drafts)))


def test_acceptance_is_counted_per_depth_and_task() -> None:
    target = tiny_target()
    target.eos_token_ids = ()
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    answers = [completion.token_ids for completion in generate(target, prompts, sampling=SamplingParams(max_new_tokens=8))]
    drafter = HalfRight({tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)})
    tasks = ["a", "b", "a"]
    report = acceptance(target, drafter, [EvalPrompt(p, t) for p, t in zip(prompts, tasks, strict=True)], 8)
    # Two tokens a pass, four passes a prompt; in the last of them only one token may still be drafted.
    assert report.length == 2.0 and report.lengths == {"a": 2.0, "b": 2.0}
    assert report.rates == [1.0, 0.0] and (report.num_prompts, report.num_tokens) == (3, 24)
    one = acceptance(target, drafter, [EvalPrompt(prompts[0])], 3)
    # The second pass has one token left and drafts none: it does not count against depth 1.
    assert one.rates == [1.0, 0.0] and one.length == 1.5 and one.lengths == {}


def test_evaluation_leaves_the_head_in_training_as_it_was() -> None:
    target = tiny_target()
    head = MedusaHead(MedusaConfig(target=identity(target), num_heads=2)).train()
    training = HeadTraining(head, target)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    random_state = torch.get_rng_state()
    evaluator = Evaluator(head, target, lambda twin: MedusaDrafter(target, twin.bfloat16(), num_nodes=4), 8)
    report = evaluator([EvalPrompt([5, 6, 7])])
    assert report is not None and report.length >= 1
    assert training.training and all(module.training for module in head.modules())
    assert all(parameter.requires_grad for parameter in head.parameters())
    for name, value in head.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, before[name])
    assert torch.equal(torch.get_rng_state(), random_state)


FIGURES = {"loss", "accuracy_1", "accuracy_4", "learning_rate", "grad_norm", "tokens_per_second"}


def test_every_logged_step_has_its_figures(
    recipe: Recipe, flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a step takes a second, and an evaluation, which must not count, a thousand."""
    seconds = 0.0

    def taking(duration: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal seconds
            seconds += duration
            return function(*args, **kwargs)

        return timed

    monkeypatch.setattr("selfspec.train.loop.time", SimpleNamespace(perf_counter=lambda: seconds))
    monkeypatch.setattr(HeadTraining, "forward", taking(1.0, HeadTraining.forward))
    monkeypatch.setattr(Evaluator, "__call__", taking(1000.0, Evaluator.__call__))
    recipe("medusa").main(flags(tmp_path / "run", logging_steps=1, eval_steps=2))
    entries = [entry for entry in log_history(tmp_path / "run") if "loss" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4]
    assert all(entry.keys() >= FIGURES for entry in entries)
    # 2 rows of 64 tokens a step.
    assert [entry["tokens_per_second"] for entry in entries] == [128.0] * 4


def test_tensorboard_has_the_curves(recipe: Recipe, flags: Flags, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'selfspec[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe("medusa").main(flags(tmp_path / "run", report_to="tensorboard"))
    [folder] = (tmp_path / "run" / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= {f"train/{name}" for name in FIGURES} | {"eval/acceptance_length"}
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4]
    assert [event.step for event in events.Scalars("eval/acceptance_length")] == [2, 4]


def test_trackio_has_the_curves(flags: Flags, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="pip install 'selfspec[trackio]'")
    # In a process of its own: trackio reads its folder when it is imported.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    finish(start("medusa", flags(tmp_path / "run", report_to="trackio", project="heads")))
    [database] = (tmp_path / "trackio").glob("heads*.db")
    with sqlite3.connect(database) as connection:
        rows = [json.loads(metrics) for (metrics,) in connection.execute("SELECT metrics FROM metrics ORDER BY step")]
    logged = set().union(*rows)
    assert logged >= {f"train/{name}" for name in FIGURES} | {"eval/acceptance_length"}


def test_the_card_says_what_the_head_is_worth(
    recipe: Recipe,
    flags: Flags,
    tmp_path: Path,
    tiny_target_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(i), "category": ("math", "qa")[i % 2], "prompt": f"the cat {i}"} for i in range(4)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "run"
    arguments = flags(output, final_eval_file=prompts)
    monkeypatch.setattr(
        sys, "argv", ["/somewhere/recipes/train_medusa.py", *arguments, "--hub_token=hf_a", "--hub-token", "hf_b"]
    )
    with caplog.at_level(logging.INFO, "selfspec"):
        final = recipe("medusa").main(arguments)
    assert f"serve it: selfspec generate --target {tiny_target_dir} --drafter medusa:{output / 'head'}" in caplog.text

    card = ModelCard.load(output / "head" / "README.md")
    figures = read_figures(card.content)
    assert figures.length == pytest.approx(final["acceptance_length"], abs=1e-4)
    assert figures.rates[0] == pytest.approx(final["acceptance_rate_1"], abs=1e-4)
    metadata = card.data.to_dict()
    assert len(metadata.pop("model-index")[0]["results"]) == 3
    assert metadata == {
        "library_name": "selfspec",
        "base_model": tiny_target_dir.name,
        "base_model_relation": "adapter",
        "tags": ["selfspec", "speculative-decoding", "medusa"],
    }
    assert "4 prompts of prompts.jsonl" in card.text and "tokens emitted per target pass" in card.text
    for name, key in {"all": "acceptance_length", "math": "acceptance_length_math", "qa": "acceptance_length_qa"}.items():
        assert f"| {name} | {final[key]:.2f} |" in card.text
    assert f"| acceptance rate | {final['acceptance_rate_1']:.2f} |" in card.text
    assert "    train_medusa.py --target=tiny-target0 --train_file=train.jsonl" in card.text
    assert f"torch {torch.__version__}" in card.text
    # Others read a card: it shows neither where it was made nor an access token.
    assert "hf_a" not in card.content + (output / "run.json").read_text()
    assert "hf_b" not in card.content + (output / "run.json").read_text()
    assert str(tmp_path) not in card.content and str(tiny_target_dir.parent) not in card.content
