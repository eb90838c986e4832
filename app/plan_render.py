"""A prediction as HTML: the best draft, the chosen one, memory, and curves over draft size and batch for one card or two."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from selfspec.app import charts
from selfspec.app.charts import Axes, Series
from selfspec.app.render import facts, note
from selfspec.app.words import count
from selfspec.model.passes import MAX_ROWS
from selfspec.plan.predict import Choice, Plan, Speed

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def plan(prediction: Plan, chosen: Choice) -> str:
    """The best draft in one line, the figures of the chosen one, and whether it all fits."""
    return _headline(prediction) + facts(_figures(prediction, chosen)) + _fit(prediction)


def _headline(prediction: Plan) -> str:
    source = f'<p class="hint">{escape(prediction.acceptance[:1].upper() + prediction.acceptance[1:])}.</p>'
    if prediction.host_decides:
        return _refusal(prediction) + source
    best = prediction.best
    if best.depth == 0:
        return f'<p class="headline"><b>1.00×</b> plain decoding is fastest at this batch</p>{source}'
    return (
        f'<p class="headline"><b>{best.speedup:.2f}×</b> with {count(best.depth, "draft token")} a step, '
        f"the best here, on {escape(prediction.card.name)}</p>{source}"
    )


def _refusal(prediction: Plan) -> str:
    sentence = (
        "Too small to predict: host time decides. A plain pass would read and compute for "
        f"{1000 * prediction.roofline_seconds:.2f} ms, and launching it takes about "
        f"{1000 * prediction.launch_seconds:.2f} ms. Measure with `selfspec bench`."
    )
    return note(sentence)


def _figures(prediction: Plan, chosen: Choice) -> dict[str, object]:
    """The figures of the chosen draft size, in order of weight."""
    tokens = {"tokens per target pass": f"{chosen.expected_tokens:.2f}"}
    size = {"draft tokens": chosen.depth}
    if prediction.host_decides:
        return {**tokens, **size}
    return {
        "speed-up": f"{chosen.speedup:.2f}×",
        "tokens/s at most": f"{chosen.tokens_per_second:,.0f}",
        **tokens,
        **size,
        "draft cost": f"{chosen.draft_cost:.2f} plain passes",
        "verify cost": f"{chosen.verify_cost:.2f} plain passes",
    }


def _fit(prediction: Plan) -> str:
    total = f"{prediction.total_bytes / 1e9:.2f} of {prediction.card.memory / 1e9:.0f} GB"
    sentence = (
        f"{'It fits' if prediction.fits else 'It does not fit'}: {total}. Largest batch at this context: "
        f"{prediction.largest_batch:,}. Largest context at this batch: {prediction.largest_context:,}."
    )
    return note(sentence, "good" if prediction.fits else "error")


def pictures(prediction: Plan, chosen: Choice, others: Sequence[Plan], batches: Sequence[Sequence[Speed]]) -> str:
    """Speed-up by draft size and by batch, and memory.

    Args:
        others: the same plan on other cards.
        batches: for each plan, this one first, its speeds at growing batches.
    """
    plans = [prediction, *others]
    curves = _by_depth(plans, chosen) + _by_batch(plans, batches)
    memory = "".join(_memory(each) for each in plans)
    return f'{_comparison(plans) if others else ""}<div class="plots">{curves}</div><div class="plots">{memory}</div>'


def _by_depth(plans: Sequence[Plan], chosen: Choice) -> str:
    first = plans[0]
    if first.host_decides:
        points = [(choice.depth, choice.expected_tokens) for choice in first.choices]
        at = first.choices.index(chosen)
        axes = Axes("draft tokens a step", "tokens per target pass")
        return charts.curves("Tokens per pass by draft size", axes.y, [Series("any card", points, chosen=at)], axes)
    series = [
        Series(
            each.card.name,
            [(choice.depth, choice.speedup) for choice in each.choices],
            best=each.choices.index(each.best),
            chosen=each.choices.index(chosen) if each is first else None,
        )
        for each in plans
        if not each.host_decides
    ]
    axes = Axes("draft tokens a step", "speed-up", unit="×", floor=(1.0, "plain decoding"))
    hint = f"at batch {first.batch_size}, where a pass has room for trees of {MAX_ROWS // first.batch_size} nodes"
    return charts.curves("Speed-up by draft size", hint, series, axes)


def _by_batch(plans: Sequence[Plan], batches: Sequence[Sequence[Speed]]) -> str:
    series = []
    for each, speeds in zip(plans, batches, strict=True):
        points = [(speed.batch_size, speed.best.speedup) for speed in speeds if not speed.host_decides]
        if points:
            best = max(range(len(points)), key=lambda i: points[i][1])
            series.append(Series(each.card.name, points, best=best))
    if not series:
        return ""
    axes = Axes("sequences together", "speed-up", unit="×", is_log=True, floor=(1.0, "plain decoding"))
    hint = "each batch with its best draft size; batches that launching decides are left out"
    return charts.curves("Speed-up by batch", hint, series, axes)


def _memory(prediction: Plan) -> str:
    parts = [(name, size / 1e9) for name, size in prediction.memory.items() if size]
    capacity = prediction.card.memory / 1e9
    hint = f"{prediction.total_bytes / 1e9:.2f} of the {capacity:.0f} GB of the {prediction.card.name}"
    return charts.stacked("Memory", hint, parts, capacity, "GB")


def _comparison(plans: Sequence[Plan]) -> str:
    rows = "".join(
        f"<tr><td>{escape(each.card.name)}</td><td>{'–' if each.host_decides else f'{each.best.speedup:.2f}×'}</td>"
        f"<td>{'–' if each.host_decides else f'{each.best.tokens_per_second:,.0f}'}</td>"
        f"<td>{'yes' if each.fits else 'no'}</td><td>{each.largest_batch:,}</td></tr>"
        for each in plans
    )
    heads = "".join(f"<th>{name}</th>" for name in ("card", "best speed-up", "tokens/s at most", "fits", "largest batch"))
    return f'<table class="outcomes compared"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
