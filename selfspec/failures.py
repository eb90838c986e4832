"""What a person at a terminal sees of an error: one line with cause and remedy, and an exit code."""

import contextlib
import sys
from collections.abc import Iterator

import typer
from safetensors import SafetensorError

OUT_OF_MEMORY = "out of memory: try a smaller --batch-size, a --dtype of fewer bytes, shorter prompts or another --device"


@contextlib.contextmanager
def reported_failures(debug: bool = False) -> Iterator[None]:
    """Ends the program with exit code 1, or 130 when interrupted, on an error that the user can do something about.

    Our own bugs keep their traceback; with `debug` every error does.
    """
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
    """One line for an error with a cause outside the program; None for any other."""
    if _is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, SafetensorError):
        return f"a weights file is damaged ({error}): fetch it again"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | TypeError | OSError | FloatingPointError):
        return " ".join(str(error).split())
    return None


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    # On CPU torch raises a plain RuntimeError.
    return torch is not None and (
        isinstance(error, torch.OutOfMemoryError)
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )
