"""Does a head fit its target? Measures acceptance at every position, and also with the head misread in likely ways.

A head whose layers, token map or norms are misread loads and serves without an error, but its drafts are rejected. So each
convention on which checkpoints differ is also tried the other way. If more is accepted then, the import was wrong.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from selfspec.api import Prompt, encode
from selfspec.config import SamplingParams
from selfspec.drafters import drafter_of
from selfspec.drafters.shipped import identity
from selfspec.heads.base import DraftHead
from selfspec.heads.eagle import Eagle1Head, EagleHead
from selfspec.heads.medusa import MedusaHead
from selfspec.interop.files import check_tensors
from selfspec.loop.decode import decode
from selfspec.loop.planner import Planner
from selfspec.loop.sequence import Request
from selfspec.model.target import Target
from selfspec.train.unrolled import unrolled_attention

DEPTH = 4
# With fewer drafts, the rate of a position means nothing.
MIN_DRAFTS = 20
AS_IT_IS = "as it is"

# (stage, how much of it is done, how much there is) -> nothing.
Reporter = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Serving:
    """The result of decoding with the head.

    Attributes:
        drafted: for each depth that the head drafts, how often there was a draft after accepted drafts only.
        accepted: for each depth, how often that draft was accepted.
        acceptance_length: tokens emitted per target pass, the bonus token included.
        chance: the share of the answers' most frequent token; a head that always drafts it has this acceptance rate.
    """

    drafted: list[int]
    accepted: list[int]
    acceptance_length: float
    chance: float

    @property
    def rates(self) -> list[float]:
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]


@dataclass(frozen=True)
class Reading:
    """The drafts of the head, read with some conventions, at every token of the answers.

    Attributes:
        hits: [R, D] whether the draft of each of D depths is the answer's token, given the answer's tokens before it.
    """

    name: str
    hits: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """[R] how many drafts in a row would be accepted."""
        return self.hits.int().cumprod(1).sum(1).double()

    def is_better_than(self, other: Reading) -> bool:
        """Whether its drafts are longer than the other's by more than chance explains, and by enough to matter."""
        gain = self.lengths - other.lengths
        is_certain = float(gain.mean()) > 2.5 * float(gain.std()) / math.sqrt(len(gain))
        return is_certain and float(gain.mean()) > 0.02 * (1 + float(other.lengths.mean()))


@dataclass(frozen=True)
class HeadReport:
    """What `verify_head` found.

    Attributes:
        readings: the head as it is, then its misreadings; empty if it has no convention that could be misread.
        problem: what is wrong, in one sentence; None if the head fits.
    """

    serving: Serving
    readings: list[Reading]
    problem: str | None


def verify_head(
    head: DraftHead,
    target: Target,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    report: Reporter = lambda stage, done, total: None,
) -> HeadReport:
    """Check a head against its target, then let it draft the target's greedy answers to some prompts.

    Args:
        report: called with the stage of the work, how much of it is done, and how much there is.

    Raises:
        ValueError: the head was trained for another target, or a weight is damaged.
    """
    head.config.target.check(identity(target))
    check_tensors(f"the {head.config.head_type} head", head.state_dict())
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    prompt_ids = [encode(target, prompt, i) for i, prompt in enumerate(prompts)]
    drafting = f"drafting the answers to {len(prompts)} prompts"
    serving, answers = serving_of(head, target, prompt_ids, sampling, partial(report, drafting))
    heads = {AS_IT_IS: copy.deepcopy(head).to(target.device, target.dtype)}
    heads |= misreadings(heads[AS_IT_IS])
    readings = []
    if len(heads) > 1:
        features = sorted({k for each in heads.values() for k in each.features})
        texts = [Text.of(*text, features, target) for text in zip(prompt_ids, answers, strict=True)]
        for i, (name, each) in enumerate(heads.items(), start=1):
            report(f"reading the head in {len(heads)} ways: {i}, {name}", i - 1, len(heads))
            readings.append(Reading(name, hits(each, target, texts)))
    return HeadReport(serving, readings, _problem(serving, readings))


def serving_of(
    head: DraftHead,
    target: Target,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Serving, list[list[int]]]:
    """Decode with chains of drafts. Also returns the answers.

    Args:
        report: called with the number of tokens that are there, and the most that there will be.
    """
    most = len(prompts) * sampling.max_new_tokens
    report(0, most)
    # A copy, because drafters change the layout of a head's weights.
    drafter = drafter_of(copy.deepcopy(head), target, width=1, num_nodes=DEPTH + 1, num_draft_tokens=DEPTH)
    requests = [Request(prompt, sampling, index) for index, prompt in enumerate(prompts)]
    answers: list[list[int]] = [[] for _ in prompts]
    depths = num_depths(head)
    drafted, accepted, num_passes = [0] * depths, [0] * depths, 0
    planner = Planner(is_active=False)
    for step in decode(target, requests, drafter=drafter, max_batch=len(prompts), planner=planner):
        reached = torch.stack([step.tree.depths.amax(1), step.acceptance.num_accepted], dim=1).tolist()
        for sequence, emitted, (depth, num_accepted) in zip(step.sequences, step.emitted, reached, strict=True):
            answers[sequence.request.index] += emitted
            num_passes += 1
            for d in range(min(depth, num_accepted + 1)):
                drafted[d] += 1
                accepted[d] += d < num_accepted
        report(sum(map(len, answers)), most)
    counts = Counter(token for answer in answers for token in answer)
    chance = counts.most_common(1)[0][1] / counts.total()
    return Serving(drafted, accepted, counts.total() / num_passes, chance), answers


@dataclass(frozen=True)
class Text:
    """A prompt with its answer, and what the target computes for it.

    Attributes:
        ids, positions: [1, L].
        roots: [R] the positions from the prompt's last token on, with at least one token before and DEPTH tokens after them.
        states: the target's hidden states, each [1, L, E].
    """

    ids: torch.Tensor
    positions: torch.Tensor
    roots: torch.Tensor
    states: dict[int, torch.Tensor]

    @classmethod
    def of(cls, prompt: list[int], answer: list[int], features: Sequence[int], target: Target) -> Text:
        ids = torch.tensor([prompt + answer], device=target.device)
        positions = torch.arange(ids.shape[1], device=target.device)[None]
        roots = torch.arange(max(1, len(prompt) - 1), ids.shape[1] - DEPTH, device=target.device)
        return cls(ids, positions, roots, target.hidden_states(ids, positions, features))


def num_depths(head: DraftHead) -> int:
    """How many of the depths that are checked the head drafts."""
    return min(DEPTH, head.config.num_heads) if isinstance(head, MedusaHead) else DEPTH


@torch.inference_mode()
def hits(head: DraftHead, target: Target, texts: Sequence[Text]) -> torch.Tensor:
    """[R, D] whether the head's drafts are the texts' tokens, for every root in all texts."""
    rows = []
    for text in texts:
        drafts = _drafts(head, target, text)
        wanted = text.ids[0, text.roots[:, None] + 1 + torch.arange(drafts.shape[1], device=target.device)]
        rows.append(drafts == wanted)
    return torch.cat(rows).cpu()


def _drafts(head: DraftHead, target: Target, text: Text) -> torch.Tensor:
    """[R, D] tokens drafted from each root, at each depth after the text's own tokens."""
    embed, lm_head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    features = [text.states[k] for k in head.features]
    # A draft from a root reads the feature of the token before the root.
    before = text.roots - 1
    if isinstance(head, MedusaHead):
        logits = head(features[0][0, before], embed(text.ids[0, text.roots]), lm_head, num_depths(head))
        return logits.argmax(-1)
    if not isinstance(head, EagleHead | Eagle1Head):
        raise ValueError(f"{head.config.head_type} heads cannot be verified: Medusa and EAGLE heads can")
    attend = unrolled_attention(text.positions, head.config.head_dim**-0.5, DEPTH)
    hidden, drafts = head.fuse(features), []
    for d in range(DEPTH):
        normed, hidden = head(hidden, embed(text.ids.roll(-1 - d, dims=1)), text.positions + d, attend)
        drafts.append(head.draft_ids[head.output_layer(lm_head)(normed[0, before]).argmax(-1)])
    return torch.stack(drafts, dim=1)


def misreadings(head: DraftHead) -> dict[str, DraftHead]:
    """Copies of the head, each with one convention the other way, by a name for it. They share the weights."""
    if isinstance(head, EagleHead):
        return _eagle3_misreadings(head)
    if isinstance(head, Eagle1Head):
        embedded, hidden = head.fc.weight.chunk(2, dim=1)
        return {"fc with the hidden state first": _twin(head, {"fc.weight": torch.cat([hidden, embedded], dim=1)})}
    if isinstance(head, MedusaHead) and head.config.num_heads > 1:
        later = copy.deepcopy(head)
        later.config = replace(head.config, num_heads=head.config.num_heads - 1)
        later.heads, later.outputs = head.heads[1:], head.outputs[1:]
        return {"heads one position on: the first repeats the LM head": later}
    return {}


def _eagle3_misreadings(head: EagleHead) -> dict[str, DraftHead]:
    config, last = head.config, head.config.target.num_layers
    others: dict[str, DraftHead] = {}
    for name, shift in (("lower", -1), ("higher", 1)):
        features = tuple(k + shift for k in config.feature_layers)
        if 0 <= min(features) and max(features) <= last:
            others[f"feature layers one {name}: {','.join(map(str, features))}"] = _twin(head, feature_layers=features)
    others["norm_before_residual the other way"] = _twin(head, norm_before_residual=not config.norm_before_residual)
    others["the other of normed and plain output fed back"] = _twin(head, feeds_normed=not config.feeds_normed)
    counting = torch.arange(len(head.d2t), device=head.d2t.device)
    for name, ids in (("left out", counting), ("taken for target ids", head.d2t)):
        is_map = int(ids.min()) >= 0 and int(ids.max()) < config.target.vocab_size and len(ids.unique()) == len(ids)
        if is_map and not torch.equal(ids, head.draft_ids):
            others[f"d2t {name}"] = _twin(head, {"d2t": ids - counting})
    return others


def _twin(head: EagleHead | Eagle1Head, weights: dict[str, torch.Tensor] | None = None, **changes: object) -> DraftHead:
    twin = type(head)(replace(head.config, **changes))  # type: ignore[arg-type]
    twin.load_state_dict({**head.state_dict(), **(weights or {})}, assign=True)
    return twin.eval().requires_grad_(False)


def _problem(serving: Serving, readings: list[Reading]) -> str | None:
    if serving.drafted[0] < MIN_DRAFTS:
        return f"only {serving.drafted[0]} drafts were made, too few to judge the head: give more prompts or longer answers"
    if readings:
        own, *others = readings
        best = max(others, key=lambda reading: float(reading.lengths.mean()))
        if best.is_better_than(own):
            return (
                f"the head drafts better when it is read another way ({best.name}: {1 + best.lengths.mean():.2f} tokens per "
                f"target pass, not {1 + own.lengths.mean():.2f}): import it again with that convention"
            )
    # Deeper positions have few drafts, so only the first must exceed chance by a margin.
    margin = 2 * math.sqrt(serving.chance * (1 - serving.chance) / serving.drafted[0])
    for depth, (rate, count) in enumerate(zip(serving.rates, serving.drafted, strict=True), start=1):
        if count >= MIN_DRAFTS and rate <= serving.chance + (margin if depth == 1 else 0.0):
            return (
                f"position {depth} has {rate:.0%} of its drafts accepted, no more than the answers' most frequent token "
                f"would have ({serving.chance:.0%}): the head was not trained for this target, or was not read correctly"
            )
    return None
