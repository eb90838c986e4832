"""A command that dies as a machine does that loses its power, for tests of what goes on afterwards."""

from pathlib import Path

ROOT = Path(__file__).parents[1]

# Dies by SIGKILL after the second call of a function: the module, the function, then the words of the command.
KILLER = """
import importlib, os, signal, sys
module, name, *arguments = sys.argv[1:]
module = importlib.import_module(module)
owner, _, method = name.rpartition(".")
owner = getattr(module, owner) if owner else module
original, calls = getattr(owner, method), []
def dying(*args, **kwargs):
    result = original(*args, **kwargs)
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, method, dying)
sys.argv = ["selfspec", *arguments]
from selfspec.cli.main import app
app()
"""
