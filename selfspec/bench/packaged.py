"""Prompt files that come with the package. torch is not imported here, because options of commands name these files."""

from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
# The benchmarks, each a file NAME.jsonl.
BENCHMARKS = ("spec_bench", "humaneval")
DEMO_PROMPTS = DATA / "demo_prompts.jsonl"
