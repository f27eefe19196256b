"""Results of a sweep as plain values: curves, final success, areas under curves, differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from agentrl_train.config.toml import flat
from agentrl_train.report.charts import moving_average
from agentrl_train.report.curves import number, task_values
from agentrl_train.report.page import RunRecord, read_run
from agentrl_train.sweep.plan import PlannedRun, Sweep
from agentrl_train.sweep.processes import finished, usage
from agentrl_train.sweep.statistics import INTERVAL, holm, interval, p_value, share_interval

FORMAT = 1
CURVES = {
    "held_out_success": "held-out success, sampled",
    "held_out_greedy": "held-out success, greedy",
    "held_out_reward": "held-out reward, sampled",
    "train_success": "training success, sampled",
    "train_reward": "training reward, sampled",
}
"""Name of a curve -> its title."""
SMOOTHING = 0.7
"""Share of the old value in the moving average of training curves, before the mean over seeds."""
GRID = 41
"""Maximum number of points of a curve."""

Points = Sequence[tuple[float, float]]


def results(sweep: Sweep, *, command: str, failed: Mapping[Path, str]) -> dict[str, Any]:
    """Return the results of the runs that have finished, as JSON values.

    Args:
        sweep: the sweep.
        command: command line that repeats it.
        failed: folder of a failed run -> its error.
    """
    runs = [_run(run, error=failed.get(run.folder)) for run in sweep.runs]
    done = [one for one in runs if one["status"] == "finished"]
    ends = [one["curves"]["held_out_success"][-1:] for one in done]
    span = min((samples for end in ends for _, samples, _ in end), default=0.0)
    names = list(sweep.config.changes)
    variants = [
        _variant(name, sweep, [one for one in runs if one["variant"] == name], span=span) for name in names
    ]
    base = next(one for one in variants if one["name"] == sweep.baseline)
    for one in variants:
        one["difference"] = {
            key: _paired_difference(one["runs"], base["runs"], key) for key in ("success", "greedy", "area")
        }
    _adjust([one["difference"]["area"] for one in variants if one is not base])
    ranked = [one for one in variants if one["final"]["success"] is not None]
    return {
        "format": FORMAT,
        "name": sweep.config.name,
        "command": command,
        "config": sweep.config.config,
        "set": flat(sweep.config.set),
        "seeds": list(sweep.config.seeds),
        "baseline": sweep.baseline,
        "interval": INTERVAL,
        "processes": sweep.processes,
        "area_samples": span,
        "planned": len(runs),
        "finished": len(done),
        "variants": variants,
        "ranking": [one["name"] for one in sorted(ranked, key=_rank)],
    }


def _adjust(differences: Sequence[dict[str, Any] | None]) -> None:
    """Add Holm's adjusted p-value to the differences of a sweep."""
    known = [one for one in differences if one is not None and one["p"] is not None]
    for one, adjusted in zip(known, holm([one["p"] for one in known]), strict=True):
        one["p_holm"] = adjusted


def _rank(variant: Mapping[str, Any]) -> tuple[float, float]:
    success, under = (variant["final"][key] for key in ("success", "area"))
    return -success["mean"], -under["mean"] if under else 0.0


def area(points: Points, span: float) -> float | None:
    """Return the mean height of a curve from 0 to ``span``, or None for fewer than two points."""
    if len(points) < 2 or span <= 0:
        return None
    xs, ys = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    inside = np.union1d(xs[xs < span], [0.0, span])
    return float(np.trapezoid(np.interp(inside, xs, ys), inside) / span)


def _run(run: PlannedRun, *, error: str | None) -> dict[str, Any]:
    """Return one run: its state, final values, and curves as (step, samples, value)."""
    if not finished(run):
        begun = "stopped" if run.folder.exists() else "not started"
        status = "failed" if error is not None else begun
        return {"variant": run.variant, "seed": run.seed, "status": status, "error": error or ""}
    record = read_run(run.folder)
    held_out, samples = _held_out(record), _samples(run, record)
    curves = {
        name: [
            (step, samples[step], value[key]) for step, value in held_out.items() if value[key] is not None
        ]
        for name, key in (
            ("held_out_success", "success"),
            ("held_out_greedy", "greedy"),
            ("held_out_reward", "reward"),
        )
    }
    for name in ("success", "reward"):
        points = [(step["step"], _mean_over_tasks(step, name)) for step in record.steps]
        smooth = moving_average([(x, y) for x, y in points if y is not None], SMOOTHING)
        curves[f"train_{name}"] = [(int(x), samples[int(x)], y) for x, y in smooth]
    last = max(held_out)
    return {
        "variant": run.variant,
        "seed": run.seed,
        "status": "finished",
        "error": "",
        "final": held_out[last],
        "curves": curves,
        "samples": samples[record.steps[-1]["step"]] if record.steps else 0.0,
        "steps": len(record.steps),
        **usage(run),
    }


def _held_out(record: RunRecord) -> dict[int, dict[str, Any]]:
    """Return step -> means over tasks of success, greedy success and reward on held-out samples."""
    found: dict[int, dict[str, Mapping[str, Any]]] = {}
    for line in record.evaluations:
        found.setdefault(int(line["policy_version"]), {})[str(line["task"])] = line
    values = {}
    for step, tasks in sorted(found.items()):
        means = {
            key: _mean(number(line.get(key)) for line in tasks.values())
            for key in ("success", "greedy", "reward")
        }
        by_task = {
            task: {key: line.get(key) for key in ("success", "greedy")} for task, line in tasks.items()
        }
        values[step] = means | {"tasks": by_task}
    return values


def _samples(run: PlannedRun, record: RunRecord) -> dict[int, float]:
    """Return step -> episodes played so far: trained on, in dropped groups, or greedy."""
    size, greedy = run.config.rollout.group_size, run.config.algorithm.baseline.name == "greedy"
    total, found = 0.0, {0: 0.0}
    for step in record.steps:
        tasks = task_values(step).values()
        trained = sum(number(task.get("episodes")) or 0.0 for task in tasks)
        total += trained * (1 + greedy / size)
        dropped = (number(step.get("dropped_groups")) or 0.0) * size
        found[int(step["step"])] = total + dropped
    return found


def _variant(name: str, sweep: Sweep, runs: Sequence[dict[str, Any]], *, span: float) -> dict[str, Any]:
    """Return the aggregate of the runs of a variant. Also add the area of each run to it."""
    done = [one for one in runs if one["status"] == "finished"]
    for one in done:
        points = [(samples, value) for _, samples, value in one["curves"]["held_out_success"]]
        one["final"]["area"] = area(points, span)
    tasks = list(dict.fromkeys(task for one in done for task in one["final"]["tasks"]))
    samples = next(run.config.eval.samples for run in sweep.runs if run.variant == name)
    episodes = samples * max(1, len(tasks))
    return {
        "name": name,
        "changes": flat(sweep.config.changes[name]),
        "final": {
            "reward": interval(_finals(done, "reward")),
            **{
                key: share_interval(_finals(done, key), episodes=episodes)
                for key in ("success", "greedy", "area")
            },
        },
        "tasks": {
            task: {
                key: share_interval(
                    [
                        value
                        for one in done
                        if (value := one["final"]["tasks"].get(task, {}).get(key)) is not None
                    ],
                    episodes=samples,
                )
                for key in ("success", "greedy")
            }
            for task in tasks
        },
        "samples": _mean(one["samples"] for one in done),
        "wall_s": _mean(one["wall_s"] for one in done),
        "processor_s": _mean(one["processor_s"] for one in done),
        "curves": {
            curve: {
                axis: _band(
                    [[(point[i], point[2]) for point in one["curves"][curve]] for one in done],
                    episodes=None if curve.endswith("reward") else episodes,
                )
                for i, axis in enumerate(("steps", "samples"))
            }
            for curve in CURVES
        },
        "runs": [{key: value for key, value in one.items() if key != "curves"} for one in runs],
    }


def _band(curves: Sequence[Points], *, episodes: float | None) -> list[list[float | None]]:
    """Return rows (x, mean, low, high) over the part of the axis that all curves have.

    ``episodes`` is the number of episodes that a share is measured with, and None for rewards. The band has
    no height if all runs agree.
    """
    curves = [curve for curve in curves if curve]
    if not curves:
        return []
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    xs = sorted({x for curve in curves for x, _ in curve if first <= x <= last} | {first, last})
    if len(xs) > GRID:
        xs = list(np.linspace(first, last, GRID))
    rows: list[list[float | None]] = []
    for x in xs:
        values = [_at(x, curve) for curve in curves]
        if episodes is None or len(set(values)) == 1:
            found = interval(values) or {}
        else:
            found = share_interval(values, episodes=episodes) or {}
        rows.append([_round(x), *(_round(found[key]) for key in ("mean", "low", "high"))])
    return rows


def _at(x: float, curve: Points) -> float:
    """Return the height of a curve at ``x``, linearly between its points."""
    return float(np.interp(x, [point[0] for point in curve], [point[1] for point in curve]))


def _paired_difference(
    runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], key: str
) -> dict[str, Any] | None:
    """Return the mean difference to the baseline at equal seeds, its interval and p-value, and ``above``.

    ``above`` counts the seeds with a positive difference.

    Only common tasks are compared, because a run of one task also differs from the mean over several tasks by
    their difficulty. Areas cover all tasks, so they are comparable only if the tasks are equal.
    """
    before = {one["seed"]: one["final"] for one in base if one["status"] == "finished"}
    pairs = []
    for one in runs:
        if one["status"] == "finished" and one["seed"] in before:
            ours, theirs = one["final"], before[one["seed"]]
            if ours["tasks"].keys() == theirs["tasks"].keys():
                values = [final[key] for final in (ours, theirs)]
            else:
                tasks = ours["tasks"].keys() & theirs["tasks"].keys()
                values = [_mean(final["tasks"][task].get(key) for task in tasks) for final in (ours, theirs)]
            if None not in values:
                pairs.append(values[0] - values[1])
    found = interval(pairs)
    return None if found is None else found | {"above": sum(pair > 0 for pair in pairs), "p": p_value(pairs)}


def _finals(runs: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [one["final"][key] for one in runs if one["final"][key] is not None]


def _mean_over_tasks(step: Mapping[str, Any], name: str) -> float | None:
    return _mean(number(task.get(name)) for task in task_values(step).values())


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
