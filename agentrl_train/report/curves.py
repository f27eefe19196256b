"""Charts of the metrics in ``metrics.jsonl`` over the training steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from agentrl_train.report.charts import Point, Series, line_chart, number_label, percent_label

SMOOTHING = 0.8
"""Share of the old value in the moving average; raw values are drawn faintly."""

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


def curves(steps: Sequence[Step], *, tasks: Sequence[str], held_out: Mapping[str, Sequence[Point]]) -> str:
    """Return all charts that have data, one for each score of ``[reward]`` and metric of a task among them.

    Args:
        steps: the lines of ``metrics.jsonl``.
        tasks: all tasks; the position of a task determines its colour.
        held_out: task -> (policy version, success), drawn as rings in the first chart.
    """
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
    return "".join(_figure(curve, steps, tasks, held_out) for curve in (*CURVES, *named))


def _names(steps: Sequence[Step], prefix: str) -> list[str]:
    """Return the names of the per-task values of all steps that start with a prefix."""
    values = [of_task for step in steps for of_task in task_values(step).values()]
    names = {str(name) for one in values if isinstance(one, Mapping) for name in one}
    return sorted(name for name in names if name.startswith(prefix))


def _figure(
    curve: Curve, steps: Sequence[Step], tasks: Sequence[str], held_out: Mapping[str, Sequence[Point]]
) -> str:
    rings = held_out if "success" in curve.names else {}
    series = _task_series(curve, steps, tasks, rings) if curve.of_tasks else _plain_series(curve, steps)
    chart = line_chart(series, label=curve.label, bottom=curve.bottom, top=curve.top)
    if not chart or not any(one.points for one in series):
        return ""
    keys = [f'<span class="key c{one.colour}"><i></i>{escape(one.name)}</span>' for one in series]
    if any(one.marks for one in series):
        keys.append('<span class="key"><i class="ring"></i>held-out</span>')
    legend = f'<div class="legend">{"".join(keys)}</div>' if len(keys) > 1 else ""
    return (
        f'<figure class="card"><figcaption><b>{escape(curve.title)}</b>'
        f'<span class="unit">{escape(curve.unit)}</span></figcaption>{legend}{chart}</figure>'
    )


def _plain_series(curve: Curve, steps: Sequence[Step]) -> list[Series]:
    found = [
        Series(name=legend, points=_points(steps, name), colour=colour, smooth=curve.smooth)
        for colour, (name, legend) in enumerate(curve.names.items())
    ]
    return [one for one in found if one.points]


def _task_series(
    curve: Curve, steps: Sequence[Step], tasks: Sequence[str], rings: Mapping[str, Sequence[Point]]
) -> list[Series]:
    (name,) = curve.names
    found = [
        Series(
            name=task,
            points=_points(steps, name, task),
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
