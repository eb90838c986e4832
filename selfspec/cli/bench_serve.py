"""`selfspec bench-serve`: the same load on one or several running servers, side by side."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.bench.serve_options import BenchServeOptions
from selfspec.cli.options import command
from selfspec.traffic.prompt_files import PromptRow

if TYPE_CHECKING:
    from rich.table import Table

    from selfspec.bench.serve import Run
    from selfspec.bench.serve_client import Server
    from selfspec.bench.serve_figures import Spread
    from selfspec.bench.serve_work import Prompts

EXPLANATION = """\
Tokens/s: while all streams were busy, and over the whole run.
Accept length: tokens per target pass, bonus token included, by the server.
Times in ms: to the first token; between streamed chunks; for each token after
the first; for the whole answer."""


def register(cli: typer.Typer) -> None:
    """Add the command."""

    @command(cli, options=BenchServeOptions)
    def bench_serve(
        *,
        urls: Annotated[
            list[str], typer.Argument(metavar="URL...", help="addresses of servers, such as http://127.0.0.1:8000")
        ],
        options: BenchServeOptions,
    ) -> None:
        """Measure OpenAI-compatible servers under load over HTTP: tokens per second, latencies, acceptance.

        Example: selfspec bench-serve http://127.0.0.1:8000 http://127.0.0.1:9000 --name ours --name theirs

        Example: selfspec bench-serve http://127.0.0.1:8000 --rate 2,4,8 --output load.json
        """
        from selfspec.bench.serve import measure, save, warnings
        from selfspec.cli import display

        servers, plan, rows = options.servers(urls), options.plan, options.rows()
        runs: list[Run] = []

        def take(run: "Run") -> None:
            runs.append(run)
            if options.output is not None:
                save(options.output, servers, plan, runs)

        prompts: list[Prompts] = []

        async def run_all(advance: Callable[[], None]) -> None:
            for server in servers:
                await server.find_model(options.wait)
            prompts.append(await _sized(servers[0], options, rows))
            await measure(servers, prompts[0], plan, on_run=take, on_answer=advance)

        total = sum(load.num_requests for load in plan.loads) * len(servers)
        try:
            with display.progress("measuring", total) as advance:
                asyncio.run(run_all(advance))
        finally:
            # Also what was measured before an interruption or an error.
            if runs:
                for table in tables(runs):
                    display.stdout.print(table)
                display.stdout.print(EXPLANATION)
                for warning in warnings(runs, prompts[0], servers):
                    display.stdout.print(warning, markup=False)
        if not any(run.figures.num_done for run in runs):
            raise ValueError("no request was answered: the reasons are above")


async def _sized(server: "Server", options: BenchServeOptions, rows: tuple[list[PromptRow], list[PromptRow]]) -> "Prompts":
    """The prompts. How long a text has to be for its tokens is the first server's to say, and is guessed for a cold one."""
    from selfspec.bench.serve_work import CHARS_PER_TOKEN, Prompts, chars_per_token, samples

    ratio = CHARS_PER_TOKEN
    if (options.input_tokens or options.shared_prefix) and not options.cold:
        counts = [(len(text), await server.count_prompt_tokens(text, options.plan.ask)) for text in samples(rows[0])]
        ratio = chars_per_token(*counts)
    return Prompts(*rows, num_tokens=options.input_tokens, num_shared=options.shared_prefix, chars_per_token=ratio)


def tables(runs: Sequence["Run"]) -> "list[Table]":
    """Throughput, and latencies: a row for each load and server, those of one load together."""
    from rich import box
    from rich.table import Table

    def table(*headings: str) -> Table:
        # Two tables, because one would not fit into 80 columns.
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
        made.add_column("load", no_wrap=True)
        made.add_column("server", overflow="fold", min_width=8)
        for heading in headings:
            made.add_column(heading, justify="right", no_wrap=True)
        return made

    rates = table("done", "failed", "tokens/s\nbusy", "tokens/s\nwhole", "requests\n/s", "prompt\ntokens", "accept\nlength")
    times = table(*(f"{what}\n{share}" for what in ("first", "chunks", "token", "whole") for share in ("p50", "p99")))
    for name in dict.fromkeys(run.load.name for run in runs):
        for number, run in enumerate(run for run in runs if run.load.name == name):
            head, figures = ("" if number else name, run.server), run.figures
            rates.add_row(
                *head,
                str(figures.num_done),
                str(figures.num_failed),
                _figure(figures.busy_tokens_per_second),
                _figure(figures.tokens_per_second),
                f"{figures.requests_per_second:.2f}",
                _figure(figures.prompt_tokens),
                "–" if run.acceptance_length is None else f"{run.acceptance_length:.2f}",
            )
            spreads = (figures.first_token, figures.between_chunks, figures.per_token, figures.whole)
            times.add_row(*head, *(cell for spread in spreads for cell in _milliseconds(spread)))
    return [rates, times]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _milliseconds(spread: "Spread | None") -> tuple[str, str]:
    return ("–", "–") if spread is None else (_figure(1000 * spread.p50), _figure(1000 * spread.p99))
