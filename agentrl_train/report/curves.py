"""Charts of the metrics in ``metrics.jsonl`` over the training steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from agentrl_train.report.charts import (
    NUM_COLOURS,
    Point,
    Series,
    line_chart,
    number_label,
    percent_label,
    thin,
)

SMOOTHING = 0.8
"""Share of the old value in the moving average. Raw values are drawn faintly."""

Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One chart: a line per name, or per task if ``of_tasks``."""

    title: str
    unit: str
    names: Mapping[str, str]
    """Name in ``metrics.jsonl`` -> name in the legend."""
    label: Callable[[float], str] = number_label
    of_tasks: bool = False
    smooth: float = SMOOTHING
    bottom: float | None = 0.0
    top: float | None = None


CURVES = (
    Curve(
        title="Success",
        unit="share of training episodes",
        names={"success": "success"},
        label=percent_label,
        of_tasks=True,
        top=1.0,
    ),
    Curve(title="Reward", unit="mean of an episode", names={"reward": "reward"}, of_tasks=True),
    Curve(
        title="Valid calls",
        unit="share of turns without an invalid call",
        names={"valid_calls": "valid calls"},
        label=percent_label,
        of_tasks=True,
        bottom=None,
        top=1.0,
    ),
    Curve(title="Turns", unit="mean of an episode", names={"turns": "turns"}, of_tasks=True),
    Curve(
        title="Staleness",
        unit="steps from admission to training",
        names={"staleness_mean": "mean", "staleness_max": "maximum"},
        smooth=0.0,
    ),
    Curve(
        title="Trained",
        unit="tokens per second",
        names={"trained_tokens_per_s": "trained", "trained_tokens_per_s_ceiling": "without waiting"},
    ),
    Curve(
        title="Sampled",
        unit="tokens per second",
        names={"sampled_tokens_per_s": "sampled", "sampled_tokens_per_s_ceiling": "without idle time"},
    ),
    Curve(
        title="Idle",
        unit="share of a step's time",
        names={"trainer_idle": "trainer", "engine_idle": "engine"},
        label=percent_label,
    ),
    Curve(
        title="Wasted work",
        unit="tokens per step",
        names={"reprefilled_tokens": "prefilled again", "discarded_tokens": "sampled and discarded"},
    ),
    Curve(
        title="Groups with a signal",
        unit="share whose episodes differ in reward",
        names={"groups_with_signal": "share"},
        label=percent_label,
        of_tasks=True,
    ),
    Curve(
        title="Share of tokens",
        unit="of the episodes of each step",
        names={"token_share": "share"},
        label=percent_label,
        of_tasks=True,
    ),
    Curve(title="Level", unit="of the curriculum", names={"level": "level"}, of_tasks=True, smooth=0.0),
    Curve(
        title="Drift",
        unit="largest log-probability difference of engine and trainer",
        names={"logprob_drift": "drift"},
        smooth=0.0,
    ),
    Curve(title="Entropy", unit="nats per token", names={"entropy": "entropy"}),
    Curve(title="KL", unit="nats per token, from the sampling policy", names={"kl": "KL"}),
    Curve(
        title="Clipped",
        unit="share of tokens",
        names={"clip_fraction": "clipped"},
        label=percent_label,
    ),
    Curve(title="Gradient norm", unit="before clipping", names={"grad_norm": "gradient norm"}),
    Curve(
        title="Learning rate", unit="of the optimizer", names={"learning_rate": "learning rate"}, smooth=0.0
    ),
)


AGE = "tokens_of_age_"
AGES_SHOWN = 7
"""Number of ages with their own colour. Older tokens are drawn together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The curves of one run. If a chart has two runs, the second is dashed."""

    name: str
    steps: Sequence[Step]
    """The lines of ``metrics.jsonl``."""
    held_out: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    """Task -> (policy version, success), drawn as rings in the first chart."""


def curves(sources: Sequence[Source], *, tasks: Sequence[str]) -> str:
    """Return all charts that have data, including one for each score of ``[reward]`` and each task metric.

    Args:
        sources: one run, or two to compare.
        tasks: all tasks; the position of a task determines its colour.
    """
    steps = [step for source in sources for step in source.steps]
    named = [
        Curve(
            title=name.removeprefix(f"{kind}."),
            unit=f"mean {kind} of an episode",
            names={name: name},
            of_tasks=True,
            bottom=None,
        )
        for kind in ("score", "metric")
        for name in _names(steps, f"{kind}.")
    ]
    ages = "".join(_ages(source, named=len(sources) > 1) for source in sources)
    return "".join(
        _figure(curve, sources, tasks) + ages * ("staleness_mean" in curve.names)
        for curve in (*CURVES, *named)
    )


def _names(steps: Sequence[Step], prefix: str) -> list[str]:
    """Return the names of the per-task values of all steps that start with a prefix."""
    values = [of_task for step in steps for of_task in task_values(step).values()]
    names = {str(name) for one in values if isinstance(one, Mapping) for name in one}
    return sorted(name for name in names if name.startswith(prefix))


def _figure(curve: Curve, sources: Sequence[Source], tasks: Sequence[str]) -> str:
    series = [
        replace(one, name=f"{source.name}, {one.name}" if number else one.name, dashed=number > 0)
        for number, source in enumerate(sources)
        for one in (_task_series(curve, source, tasks) if curve.of_tasks else _plain_series(curve, source))
    ]
    chart = line_chart(series, label=curve.label, bottom=curve.bottom, top=curve.top)
    if not chart or not any(one.points for one in series):
        return ""
    legend = tasks if curve.of_tasks else list(curve.names.values())
    colours = sorted({one.colour for one in series})
    keys = [f'<span class="key c{i % NUM_COLOURS}"><i></i>{escape(legend[i])}</span>' for i in colours]
    if any(one.marks for one in series):
        keys.append('<span class="key"><i class="ring"></i>held-out</span>')
    return figure(curve.title, curve.unit, chart, keys=keys if len(keys) > 1 else ())


def figure(title: str, unit: str, chart: str, *, keys: Sequence[str] = ()) -> str:
    """Return a chart as a card with its title, its unit and the keys of its legend."""
    legend = f'<div class="legend">{"".join(keys)}</div>' if keys else ""
    return (
        f'<figure class="card"><figcaption><b>{escape(title)}</b>'
        f'<span class="unit">{escape(unit)}</span></figcaption>{legend}{chart}</figure>'
    )


def _ages(source: Source, *, named: bool) -> str:
    """Return the shares of the trained tokens by age over the steps, one band for each age."""
    counts: list[tuple[float, dict[int, float]]] = []
    for step in source.steps:
        ages: dict[int, float] = {}
        for name, given in step.items():
            digits = name.removeprefix(AGE)
            if name.startswith(AGE) and digits.isdecimal() and (value := number(given)) is not None:
                age = min(int(digits), AGES_SHOWN)
                ages[age] = ages.get(age, 0.0) + value
        if total := sum(ages.values()):
            counts.append((float(step["step"]), {age: value / total for age, value in ages.items()}))
    shown = sorted({age for _, shares in counts for age, share in shares.items() if share})
    if len(counts) < 2 or len(shown) < 2:
        return ""
    lines = [thin([(x, shares.get(age, 0.0)) for x, shares in counts]) for age in shown]
    below = [0.0] * len(lines[0])
    series, keys = [], []
    for age, line in zip(shown, lines, strict=True):
        above = [low + share for low, (_, share) in zip(below, line, strict=True)]
        band = [(x, low, high) for (x, _), low, high in zip(line, below, above, strict=True)]
        words = f"{age} or more" if age == AGES_SHOWN else f"{age}"
        series.append(Series(name=words, points=(), colour=age, band=band))
        keys.append(f'<span class="key c{age}"><i></i>{words}</span>')
        below = above
    unit = "share of the trained tokens, in policy versions" + f", {source.name}" * named
    return figure("Age of tokens", unit, line_chart(series, label=percent_label, top=1.0), keys=keys)


def _plain_series(curve: Curve, source: Source) -> list[Series]:
    found = [
        Series(name=legend, points=_points(source.steps, name), colour=colour, smooth=curve.smooth)
        for colour, (name, legend) in enumerate(curve.names.items())
    ]
    return [one for one in found if one.points]


def _task_series(curve: Curve, source: Source, tasks: Sequence[str]) -> list[Series]:
    (name,) = curve.names
    rings = source.held_out if "success" in curve.names else {}
    found = [
        Series(
            name=task,
            points=_points(source.steps, name, task),
            colour=colour,
            smooth=curve.smooth,
            marks=rings.get(task, ()),
        )
        for colour, task in enumerate(tasks)
    ]
    return [one for one in found if one.points or one.marks]


def _points(steps: Sequence[Step], name: str, task: str | None = None) -> list[Point]:
    """Return the finite values of one name over the steps."""
    sources = [(step["step"], step if task is None else task_values(step).get(task, {})) for step in steps]
    values = [(x, number(source.get(name))) for x, source in sources if isinstance(source, Mapping)]
    return [(float(x), value) for x, value in values if value is not None]


def task_values(step: Step) -> Mapping[str, Any]:
    """Return the per-task part of a line of ``metrics.jsonl``."""
    tasks = step.get("tasks")
    return tasks if isinstance(tasks, Mapping) else {}


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
