"""Errors for people at a terminal: one line with cause and remedy, and an exit code."""

import contextlib
import sys
from collections.abc import Iterator

from safetensors import SafetensorError

OUT_OF_MEMORY = "out of memory: try a smaller --batch-size, a --dtype of fewer bytes, shorter prompts or another --device"


@contextlib.contextmanager
def reported_failures(debug: bool = False) -> Iterator[None]:
    """End the program with exit code 1 after an error that the user can do something about, or 130 after Ctrl-C.

    Our own bugs keep their traceback; with `debug` every error does.
    """
    # The library reads this file too, and needs no terminal.
    import typer

    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise SystemExit(130) from None
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        message = describe(error)
        if debug or message is None:
            raise
        typer.echo(f"selfspec: {message}", err=True)
        raise SystemExit(1) from None


def describe(error: Exception) -> str | None:
    """One line for an error whose cause lies outside the program; None for our own bugs."""
    if _is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, SafetensorError):
        return f"a weights file is damaged ({error}): fetch it again"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | TypeError | OSError | FloatingPointError):
        return " ".join(str(error).split())
    return None


def first_line(error: object) -> str:
    """The first line of what a library says about an error; the error's type if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch puts a heading above its list of errors, which says only that there are some.
    if len(lines) > 1 and lines[0].startswith("Error(s) in loading state_dict"):
        del lines[0]
    return lines[0].rstrip(" .:") if lines else type(error).__name__


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    # On CPU torch raises a plain RuntimeError.
    return torch is not None and (
        isinstance(error, torch.OutOfMemoryError)
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )
