"""`selfspec doctor`: what this installation can run, what it cannot, and why."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from selfspec.cli.options import command
from selfspec.config import TargetOptions
from selfspec.files import cache_folder, shipped_heads
from selfspec.model.default_target import default_target

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf")
# Package -> what needs it, and the extra that installs it (None: torch's CUDA build does).
OPTIONAL = {
    "triton": ("compiled GPU kernels; plain torch runs in their place", None),
    "accelerate": ("training", "train"),
    "datasets": ("training", "train"),
    "matplotlib": ("pictures of benchmarks", "plots"),
    "datasketch": ("selfspec data clean", "train"),
    "peft": ("--adapter, and training of early-exit heads", "lora"),
    "fastapi": ("selfspec serve", "serve"),
    "llguidance": ("answers that follow a schema or grammar", "serve"),
    "presidio-analyzer": ("--capture-redact of selfspec serve", "redact"),
    "gradio": ("the app", "app"),
    "torchao": ("draft models in int8", "quant"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    state: Literal["ok", "note", "missing"]
    subject: str
    detail: str


def register(cli: typer.Typer) -> None:
    """Add the command."""

    @command(cli)
    def doctor(
        *,
        memory: Annotated[
            bool,
            typer.Option("--memory", help="measure the memory of an answer by the default target with its EAGLE head"),
        ] = False,
        speed: Annotated[
            bool, typer.Option("--speed", help="load the default target, and time its passes against this machine's memory")
        ] = False,
    ) -> None:
        """Show versions, devices and settings, and what will not run here and why.

        Example: selfspec doctor --speed

        Example: selfspec doctor --memory
        """
        from selfspec.cli import display

        display.show_findings(examine())
        if speed:
            with display.stage("timing passes of the default target"):
                findings = list(_speed())
            display.show_findings(findings)
        if memory:
            display.show_findings([_peak()])


def examine() -> list[Finding]:
    """The whole report, in reading order."""
    return [*_packages(), *_devices(), *_environment(), *_target(), *_heads()]


def _packages() -> Iterator[Finding]:
    yield Finding("ok", "selfspec", _version("selfspec") or "not installed: running from a checkout")
    yield Finding("ok", "python", platform.python_version())
    for package in REQUIRED:
        version = _version(package)
        yield Finding("ok", package, version) if version else Finding("missing", package, f"pip install {package}")
    for package, (purpose, extra) in OPTIONAL.items():
        version = _version(package)
        if version:
            yield Finding("ok", package, version)
        else:
            remedy = f': pip install "selfspec[{extra}]"' if extra else ""
            yield Finding("note", package, f"not installed; needed for {purpose}{remedy}")


def _devices() -> Iterator[Finding]:
    # Torch takes seconds to import.
    import torch

    from selfspec.bench.machine import read_bandwidth, this_machine

    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            yield Finding("ok", f"cuda:{i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU"
        yield Finding("note", "cuda", f"{reason}: everything runs on the CPU, without the GPU kernels")
    machine = this_machine()
    yield Finding("ok", "cpu", f"{machine.cpu}, {machine.instruction_set}")
    yield Finding("ok", "threads", f"{machine.num_threads} for {machine.num_cores} cores")
    yield Finding("ok", "bandwidth", f"memory reads {read_bandwidth() / 1e9:.1f} GB/s, measured now")


def _environment() -> Iterator[Finding]:
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        yield Finding("ok", "OMP_WAIT_POLICY", "passive")
    else:
        yield Finding("note", "OMP_WAIT_POLICY", "not passive: where cores are shared, passive is many times faster")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield Finding("note", "HF_HUB_OFFLINE", "set: targets come from directories and the local cache only")


def _target() -> Iterator[Finding]:
    try:
        yield Finding("ok", "default target", str(default_target()))
    except ValueError as error:
        yield Finding("note", "default target", str(error))
    folder = cache_folder()
    # A link counts as itself: what it points to is kept elsewhere.
    num_bytes = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
    yield Finding("ok", "cache", f"{folder}, {num_bytes / 1e6:.0f} MB")


def _heads() -> Iterator[Finding]:
    for folder in shipped_heads():
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["head_type"]
        yield Finding("ok", f"{kind} head", str(folder))


def _speed() -> Iterator[Finding]:
    """How long passes of the default target take here."""
    try:
        source = str(default_target())
    except ValueError as error:
        yield Finding("note", "speed", str(error))
        return
    from selfspec.bench.machine import cheap_nodes, measure
    from selfspec.cli.loading import load_quietly

    target = load_quietly(TargetOptions(target=source))
    measured = measure(target)
    ceiling, times = measured.ceiling, measured.times
    num_cheap = cheap_nodes(times)
    yield Finding(
        "ok", "a pass", f"{1000 * times[1]:.1f} ms of the default target on {target.device}, {str(target.dtype)[6:]}"
    )
    yield Finding("ok", "its floor", f"{1000 * ceiling.seconds:.1f} ms: {ceiling.bytes_per_token / 1e6:.0f} MB of weights")
    yield Finding("ok", "drafts", f"a pass over {num_cheap} nodes takes {1000 * times[num_cheap]:.1f} ms")


def _peak() -> Finding:
    """The most memory that a process takes to answer with the default target, measured in a process of its own."""
    try:
        source = str(default_target())
    except ValueError as error:
        return Finding("note", "memory", str(error))
    command = [sys.executable, "-m", "selfspec.bench.memory", "--target", source, "--drafter", "eagle"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return Finding("note", "memory", (result.stderr.strip() or "no reason given").splitlines()[-1])
    peak = json.loads(result.stdout.splitlines()[-1])["peak_mib"]
    return Finding("ok", "memory", f"{peak} MiB at the peak of one answer by the default target with its EAGLE head")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
