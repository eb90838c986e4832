"""The command line: puts the commands together, each from the file of its own that reads options, calls, and shows.

torch and transformers take seconds to import, so each command imports what it needs when it runs.
"""

import os

import typer

from selfspec.cli import app as page
from selfspec.cli import bench, bench_runtime, bench_serve, doctor, fetch, generate, plan, serve
from selfspec.cli.data import app as data_app
from selfspec.cli.heads import app as heads_app

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Several tokens per forward pass from a frozen Hugging Face model, with unchanged output."""
    # Read when torch is loaded. Threads that spin while they wait are many times slower where cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Both keep 1024 compiled kernels by default, one for every number of rows that a pass ever had: hundreds of MiB.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "256")


# In the order that `selfspec --help` shows.
for commands in (generate, serve, page, bench, bench_runtime, bench_serve, plan, fetch, doctor):
    commands.register(app)
app.add_typer(data_app, name="data")
app.add_typer(heads_app)
