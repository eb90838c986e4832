"""Records of a race: plain numbers and text of every verify step, so that the page and its pictures need no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """A node of a candidate tree. `probability` is the drafter's estimate that the whole path to it is accepted."""

    token_id: int
    text: str
    parent: int
    depth: int
    probability: float | None


@dataclass(frozen=True)
class StepRecord:
    """One verify step of one answer.

    Attributes:
        at: seconds from the start of the answer, prefill included, to the end of this step.
        draft_seconds, verify_seconds, commit_seconds, host_seconds: parts of the step; host is the loop's time between them.
        nodes: the candidate tree without padding, the root first.
        path: the accepted nodes, the root first.
        chosen: the target's own token at each node of the path, as text: the accepted drafts, then the bonus token.
        token_ids: the emitted tokens; fewer than `chosen` if the answer ended within the step.
        pieces: the text that each emitted token completes. Joined over all steps, they are the answer.
    """

    at: float
    draft_seconds: float
    verify_seconds: float
    commit_seconds: float
    host_seconds: float
    nodes: list[Node]
    path: list[int]
    chosen: list[str]
    token_ids: list[int]
    pieces: list[str]

    @property
    def num_accepted(self) -> int:
        return len(self.path) - 1

    @property
    def max_depth(self) -> int:
        return max(node.depth for node in self.nodes)

    @property
    def has_refused(self) -> bool:
        return len(self.nodes) > len(self.path)


@dataclass(frozen=True)
class Tick:
    """A step as a race shows it: its tokens, how many of them were drafted, and whether anything was drafted at all."""

    num_tokens: int
    num_drafted: int
    is_drafting: bool


@dataclass(frozen=True)
class Figures:
    """Speed and acceptance so far.

    Attributes:
        num_target_passes: verify passes; prefill is not one.
        seconds: by the column's own clock, prefill included.
        first_tokens, first_seconds: tokens and clock at the first step's end.
    """

    num_tokens: int
    num_target_passes: int
    seconds: float
    first_tokens: int
    first_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """With prefill."""
        return self.num_tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Without prefill: of the steps after the first one. None before there is one."""
        if self.num_tokens == self.first_tokens:
            return None
        return (self.num_tokens - self.first_tokens) / (self.seconds - self.first_seconds)

    @property
    def passes_saved(self) -> float:
        """The share of passes that plain decoding would have needed more, at one token a pass."""
        return 1 - self.num_target_passes / self.num_tokens

    @property
    def acceptance_length(self) -> float:
        """Tokens per target pass, bonus token included."""
        return self.num_tokens / self.num_target_passes


@dataclass
class Column:
    """One drafter's answer so far. `finish_reason` is None while it runs, and stays None if it was stopped."""

    name: str
    label: str
    steps: list[StepRecord] = field(default_factory=list)
    prefill_seconds: float = 0.0
    finish_reason: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for step in self.steps for token_id in step.token_ids]

    @property
    def text(self) -> str:
        return "".join(piece for step in self.steps for piece in step.pieces)

    @property
    def seconds(self) -> float:
        """What its own clock shows."""
        return self.steps[-1].at if self.steps else 0.0

    @property
    def times(self) -> list[float]:
        """When its steps ended."""
        return [step.at for step in self.steps]

    def until(self, seconds: float) -> Column:
        """The column as it stood at `seconds` of its own clock."""
        steps = [step for step in self.steps if step.at <= seconds]
        is_whole = len(steps) == len(self.steps)
        return Column(self.name, self.label, steps, self.prefill_seconds, self.finish_reason if is_whole else None)

    def figures(self) -> Figures | None:
        """None before the first step."""
        if not self.steps:
            return None
        first = self.steps[0]
        return Figures(len(self.token_ids), len(self.steps), self.seconds, len(first.token_ids), first.at)

    def ticks(self) -> list[Tick]:
        """Its steps at a glance. The drafts of a step come first, and the answer may end within them."""
        return [
            Tick(len(step.token_ids), min(step.num_accepted, len(step.token_ids)), len(step.nodes) > 1)
            for step in self.steps
        ]


@dataclass(frozen=True)
class Parting:
    """Where a column first differs from the reference: position, both tokens, and the gap between the target's logits."""

    position: int
    text: str
    expected_text: str
    logit_gap: float
