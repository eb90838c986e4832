"""A sign of life while slow libraries are imported: a spinner for each, whichever command or file imports it first.

Commands import torch and the like when they run, often deep within our own modules. So the spinner begins where Python finds
the library, and no command has to think of it.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from rich.errors import LiveError

from selfspec.cli import display

# Module -> the library's name. Most of transformers is not imported before its models are.
SLOW = {name: name for name in ("torch", "transformers", "huggingface_hub", "gradio", "fastapi", "datasets")}
SLOW["transformers.modeling_utils"] = "transformers"


class SlowImports(MetaPathFinder):
    """Finds the slow libraries where they are, and shows a spinner while their code runs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in SLOW else None
        if spec is not None and (loader := spec.loader) is not None:
            execute = loader.exec_module

            def show(module: ModuleType) -> None:
                # Without the method set below, the loader is as it was.
                del loader.exec_module
                with ExitStack() as spinner:
                    # Older versions of rich have one spinner at a time.
                    with suppress(LiveError):
                        spinner.enter_context(display.stage(f"importing {SLOW[fullname]}"))
                    execute(module)

            loader.exec_module = show  # type: ignore[method-assign]
        return spec


def show_slow_imports() -> None:
    """Show spinners from now on, in a terminal."""
    if display.stderr.is_terminal:
        sys.meta_path.insert(0, SlowImports())
