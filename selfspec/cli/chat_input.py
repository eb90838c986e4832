"""What a person types in a chat, or a pipe says: one line, or several between triple quotes."""

import contextlib
import importlib
import sys

import typer

QUOTES = '"""'
HINT = "Ctrl-C again ends the conversation, and so do Ctrl-D and /quit."


class Reader:
    """Reads messages from stdin until it ends.

    Attributes:
        is_interactive: there is a person at a terminal, who is shown prompts.
    """

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if self.is_interactive:
            # It gives `input` a history, and keys that move about in the line. Windows has its own.
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")

    def read(self) -> str | None:
        """The next message; None at the end of the input, or when Ctrl-C was pressed twice."""
        was_interrupted = False
        while True:
            try:
                return self._message()
            except EOFError:
                if self.is_interactive:
                    typer.echo()
                return None
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise
                typer.echo()
                if was_interrupted:
                    return None
                was_interrupted = True
                typer.secho(HINT, dim=True)

    def _message(self) -> str:
        line = self._line("> ")
        if not line.lstrip().startswith(QUOTES):
            return line
        # What is between quotes is a message and no command, even if it begins with /.
        lines = ["", line.lstrip().removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(self._line(". "))
            except EOFError:
                # A message without an end is whole where the input ends.
                return "\n".join(lines)
        return "\n".join([*lines[:-1], lines[-1].rstrip().removesuffix(QUOTES)])

    def _line(self, prompt: str) -> str:
        return input(prompt if self.is_interactive else "")
