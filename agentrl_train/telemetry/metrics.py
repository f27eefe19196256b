"""Metrics of a run: ``metrics.jsonl``, evaluations, readable trajectories and the summary.

Files written to the run folder::

    metrics.jsonl        one line per step: {"step", "policy_version", "elapsed_s", <name>: float...,
                         "tasks": {task: {<name>: float}}}
    evaluations.jsonl    one line per task and evaluation: {"name": "before", "task", "success", ...}
    trajectories/        step_000012.jsonl, held_out_before.jsonl, ...: a few episodes, readable, and
                         their tokens in step_000012.tokens.jsonl.gz, ... (``tokens``)
    summary.json         before and after per task, written at the end

The same numbers go to every ``Sink``: TensorBoard, Prometheus, W&B, the counters of the trace.

The progress display and the report use, per step, ``staleness_mean``, ``staleness_max``, ``tokens_of_age_0``
..., ``trained_tokens_per_s``, ``sampled_tokens_per_s`` and the same with the suffix ``_ceiling``,
``trainer_idle``, ``engine_idle`` (shares of the step's time), ``sampled_tokens``, ``prefilled_tokens``,
``reprefilled_tokens``, ``discarded_tokens``, ``logprob_drift``, ``kl``, ``clip_fraction``, ``entropy``,
``grad_norm``, ``learning_rate`` and ``loss``; per task ``success``, ``reward``, ``turns``, ``valid_calls``,
``tolerant_calls`` and ``token_share``, ``score.<name>`` of each score of ``[reward]``, and ``metric.<name>``
of each metric of the environment's ``score()``. Missing names are skipped, and other names are also recorded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Protocol

from agentrl_env.evaluation.statistics import effective_trials, wilson_interval
from agentrl_train.storage.atomic_io import append_lines, run_folder_errors, write_file
from agentrl_train.telemetry.progress import Progress, Tally
from agentrl_train.telemetry.tokens import (
    SUFFIX,
    TurnAdvantages,
    token_record,
    trained_advantages,
    write_tokens,
)
from agentrl_train.types import TokenSequence, Trajectory, TrajectoryGroup, Turn

SHARES = ("before", "after", "before_greedy", "after_greedy")
"""Success rates of a task in the summary."""
COLUMNS = ("step", "policy_version", "elapsed_s", "groups", "tasks")
"""Names in a line of ``metrics.jsonl`` that are not names of metrics."""
_NONE: Mapping[int, TurnAdvantages] = MappingProxyType({})
SHOWN_PER_TASK = 8
"""Number of recorded episodes per task and evaluation. They have the same samples each time."""


class Sink(Protocol):
    """Interface: a receiver of the metrics of each step. Per-task names look like ``success/shop``."""

    def write(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Write the values of one step."""
        ...

    def close(self) -> None:
        """Close the sink; idempotent."""
        ...


class MetricsLog:
    """Writes the metrics of a run.

    Args:
        folder: the run folder.
        first_step: steps trained before this process. Later lines of an interrupted run are dropped.
        trajectories: number of episodes to record in each step.
        sinks: receive every metric. They are closed with the log.
        progress: terminal display; None disables it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        first_step: int = 0,
        trajectories: int = 4,
        sinks: Sequence[Sink] = (),
        progress: Progress | None = None,
    ) -> None:
        """Open the files. Raises ``RunFolderError`` if the folder cannot be written."""
        self._folder = folder
        self._num_trajectories = trajectories
        self._progress = progress
        self._sinks = sinks
        with run_folder_errors(folder):
            (folder / "trajectories").mkdir(parents=True, exist_ok=True)
            _drop_later_lines(folder / "metrics.jsonl", after="step", last=first_step)
            _drop_later_lines(folder / "evaluations.jsonl", after="policy_version", last=first_step)

    def log_step(
        self,
        step: int,
        *,
        policy_version: int,
        elapsed_s: float,
        metrics: Mapping[str, float],
        tasks: Mapping[str, Mapping[str, float]],
        groups: Sequence[TrajectoryGroup] = (),
        rows: Sequence[TokenSequence] = (),
    ) -> None:
        """Record one trained step, and a few episodes of ``groups``.

        ``rows`` have the advantages that the step was trained with. They are recorded with these episodes.

        Raises ``RunFolderError``.
        """
        record = {
            "step": step,
            "policy_version": policy_version,
            "elapsed_s": round(elapsed_s, 3),
            **metrics,
            "groups": [group.group_id for group in groups],
            "tasks": {task: dict(values) for task, values in tasks.items()},
        }
        _append(self._folder / "metrics.jsonl", [record])
        chosen = _one_of_each(groups, self._num_trajectories)
        if chosen:
            self._write_trajectories(f"step_{step:06d}", chosen, trained_advantages(groups, rows))
        self._write_scalars(dict(_flat(metrics, tasks)), step=step)
        if self._progress is not None:
            self._progress.step(step, elapsed_s=elapsed_s, metrics=metrics, tasks=tasks)

    def note(self, text: str) -> None:
        """Show a message in the progress display."""
        if self._progress is not None:
            self._progress.note(text)

    def evaluating(self, name: str, tally: Tally) -> None:
        """Show the progress of an evaluation."""
        if self._progress is not None:
            self._progress.evaluating(name, tally)

    def log_evaluation(
        self,
        name: str,
        *,
        policy_version: int,
        results: Mapping[str, Sequence[Trajectory]],
        greedy: Mapping[str, Sequence[Trajectory]] = MappingProxyType({}),
    ) -> None:
        """Record an evaluation named "before", "after" or, for example, "step 20".

        Episodes that infrastructure failed are counted separately. Raises ``RunFolderError``.
        """
        lines = [
            _evaluation(name, policy_version, task, episodes, greedy=greedy.get(task, ()))
            for task, episodes in results.items()
        ]
        _append(self._folder / "evaluations.jsonl", lines)
        self._write_trajectories(
            f"held_out_{_file_name(name)}",
            [_Shown(trajectory=one) for episodes in results.values() for one in episodes[:SHOWN_PER_TASK]],
        )
        shares = {f"held_out_success/{line['task']}": line["success"] for line in lines}
        shares |= {f"held_out_greedy_success/{line['task']}": line["greedy"] for line in lines}
        shares |= {
            f"held_out_metric.{metric}/{line['task']}": value
            for line in lines
            for metric, value in line["metrics"].items()
        }
        known = {name: share for name, share in shares.items() if share is not None}
        self._write_scalars(known, step=policy_version)
        if self._progress is not None:
            self._progress.evaluation(name, {line["task"]: line["success"] for line in lines})

    def reopen(self) -> None:
        """Continue a run that had ended: "after" is now the evaluation of a step, and there is no summary."""
        path = self._folder / "evaluations.jsonl"
        lines = read_jsonl(path)
        with run_folder_errors(self._folder):
            (self._folder / "summary.json").unlink(missing_ok=True)
            for line in reversed(lines):  # the files are of the last evaluation
                if line["name"] == "after":
                    line["name"] = evaluation_name(line["policy_version"])
                    for file in (self._folder / "trajectories").glob("held_out_after.*"):
                        file.replace(file.with_name(file.name.replace("after", _file_name(line["name"]))))
            if lines:
                write_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def has_evaluation(self, name: str) -> bool:
        """Return True if an evaluation is recorded."""
        return any(line["name"] == name for line in read_jsonl(self._folder / "evaluations.jsonl"))

    def write_summary(
        self, *, seconds: float, trained_tokens: int, policy_version: int, seed: int
    ) -> dict[str, Any]:
        """Write ``summary.json`` from the evaluations "before" and "after", and return it.

        A missing evaluation of a task is null. Raises ``RunFolderError``.
        """
        tasks: dict[str, dict[str, Any]] = {}
        for line in read_jsonl(self._folder / "evaluations.jsonl"):
            if line["name"] in ("before", "after"):
                task = tasks.setdefault(line["task"], dict.fromkeys(SHARES) | {"episodes": 0})
                task[line["name"]] = line["success"]
                task[f"{line['name']}_greedy"] = line.get("greedy")
                task[f"{line['name']}_interval"] = [line["low"], line["high"]]
                task[f"{line['name']}_greedy_interval"] = line.get("greedy_interval")
                task["episodes"] = line["episodes"]
        summary = {
            "tasks": tasks,
            "seconds": round(seconds, 3),
            "trained_tokens": trained_tokens,
            "policy_version": policy_version,
            "seed": seed,
        }
        with run_folder_errors(self._folder):
            write_file(self._folder / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
        return summary

    def close(self) -> None:
        """Close the files and the display; idempotent."""
        for sink in self._sinks:
            sink.close()
        if self._progress is not None:
            self._progress.close()

    def _write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        for sink in self._sinks:
            sink.write(scalars, step=step)

    def _write_trajectories(
        self, name: str, episodes: Sequence[_Shown], advantages: Mapping[int, TurnAdvantages] = _NONE
    ) -> None:
        """Write episodes and their tokens. ``advantages`` has them by the trajectory's number in the step."""
        lines = [readable(one.trajectory, one.group) for one in episodes]
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        tokens = [token_record(one.trajectory, advantages.get(one.number)) for one in episodes]
        folder = self._folder / "trajectories"
        with run_folder_errors(self._folder):
            write_tokens(folder / f"{name}{SUFFIX}", tokens)
            (folder / f"{name}.jsonl").write_text(content, encoding="utf-8", errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """A recorded episode."""

    trajectory: Trajectory
    group: TrajectoryGroup | None = None
    number: int = -1
    """Number of the trajectory in its step, or -1 outside of training."""


def evaluation_name(step: int) -> str:
    """Return the name of the evaluation of a step that is not the last one."""
    return f"step {step}" if step else "before"


def _file_name(evaluation: str) -> str:
    return evaluation.replace(" ", "_")


def readable(trajectory: Trajectory, group: TrajectoryGroup | None = None) -> dict[str, Any]:
    """Return an episode as readable JSON: messages, with version, tokens and reward of each turn.

    If it has several segments, each message names its segment. A segment follows the turn after which it was
    opened. The segment of a sub-agent comes before the reply to that turn, which has its report.
    """
    sample = trajectory.sample
    messages = _conversation(trajectory, 0)
    return {
        "task": sample.task,
        "split": sample.split,
        "index": sample.index,
        "seed": sample.seed,
        "group_id": None if group is None else group.group_id,
        "sibling": None if group is None else _position(trajectory, group),
        "admitted_version": None if group is None else group.admitted_version,
        "end": trajectory.end.value,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "metrics": dict(trajectory.metrics),
        "scores": dict(trajectory.scores),
        "error": trajectory.error,
        "seconds": round(trajectory.seconds, 3),
        **({} if trajectory.started is None else {"started": round(trajectory.started, 3)}),
        "messages": messages,
        **({"segments": segments} if len(segments := _segments(trajectory)) > 1 else {}),
    }


def _position(trajectory: Trajectory, group: TrajectoryGroup) -> int | None:
    """Return the number of a trajectory among its siblings, or None for the greedy episode."""
    return next((i for i, one in enumerate(group.trajectories) if one is trajectory), None)


def _segments(trajectory: Trajectory) -> list[dict[str, Any]]:
    names = ("parent", "after_turn", "reason", "agent")
    return [{name: getattr(one, name) for name in names} for one in trajectory.segments]


def _conversation(trajectory: Trajectory, number: int) -> list[dict[str, Any]]:
    """Return the messages of a segment, including the segments that were opened from it."""
    label = {"segment": number} if len(trajectory.segments) > 1 else {}
    opening = trajectory.segments[number].opening if number else trajectory.opening
    messages = [message.wire() | label for message in opening]
    context = 0
    for index, turn in enumerate(trajectory.turns):
        if turn.segment != number:
            continue
        context += len(turn.prompt_ids)
        facts = {"number": index, **_turn(turn, context)}
        messages.append(turn.message.wire() | {"turn": facts} | label)
        context += len(turn.completion.token_ids)
        reply = [message.wire() | label for message in turn.reply]
        opened = [(n, one) for n, one in enumerate(trajectory.segments) if one.after_turn == index]
        for child, one in opened:
            if one.reason == "rewritten":
                messages, reply = [*messages, *reply], []
            messages += _conversation(trajectory, child)
        messages += reply
    return messages


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSONL file. Skip a truncated line. Empty if the file does not exist."""
    if not path.exists():
        return []
    return parse_jsonl(path.read_text(encoding="utf-8", errors="replace"))


def parse_jsonl(text: str) -> list[dict[str, Any]]:
    """Return the objects of JSON lines. Skip lines that are not objects."""
    # Not ``splitlines``, which also splits at other characters that model output can contain.
    lines = [line for line in text.split("\n") if line]
    try:
        # Objects that are decoded together share their keys, which saves half of the memory of a long run.
        return [record for record in json.loads(f"[{','.join(lines)}]") if isinstance(record, dict)]
    except ValueError:
        return _parse_each(lines)


def _parse_each(lines: Sequence[str]) -> list[dict[str, Any]]:
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _turn(turn: Turn, context: int) -> dict[str, Any]:
    """Return the data of a turn. ``context`` is the number of tokens before its completion."""
    completion = turn.completion
    return {
        **({"context": context} if context else {}),  # a restored evaluation has no tokens
        "tokens": len(completion.token_ids),
        "versions": [min(completion.versions, default=0), max(completion.versions, default=0)],
        "policy": completion.policy,
        "finish_reason": completion.finish_reason,
        "reward": turn.reward,
        "invalid_calls": turn.invalid_calls,
        **({"times": list(turn.times)} if turn.times else {}),
        **({"tolerant": True} if turn.tolerant else {}),
        **({"thought": turn.thought} if turn.thought else {}),
    }


def _evaluation(
    name: str, version: int, task: str, episodes: Sequence[Trajectory], *, greedy: Sequence[Trajectory]
) -> dict[str, Any]:
    counted, likeliest = _counted_episodes(episodes), _counted_episodes(greedy)
    low, high = success_interval(counted)
    return {
        "name": name,
        "policy_version": version,
        "task": task,
        "episodes": len(counted),
        "failed": len(episodes) - len(counted),
        "successes": sum(one.success for one in counted),
        "success": _success(counted),
        "low": low,
        "high": high,
        "reward": fmean(one.reward for one in counted) if counted else None,
        "turns": fmean(len(one.turns) for one in counted) if counted else None,
        "metrics": mean_metrics(counted),
        "greedy": _success(likeliest),
        "greedy_interval": success_interval(likeliest) if likeliest else None,
    }


def success_interval(episodes: Sequence[Trajectory]) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a success rate. Attempts at a sample are not independent."""
    samples: dict[Any, list[bool]] = {}
    for one in episodes:
        samples.setdefault(one.sample.index, []).append(one.success)
    trials = effective_trials(list(samples.values()))
    return wilson_interval((_success(episodes) or 0.0) * trials, trials)


def mean_metrics(episodes: Iterable[Trajectory]) -> dict[str, float]:
    """Return the means of the metrics of ``score()``, each over the episodes that have it.

    ``success`` and ``invalid_calls`` are omitted, because every task has them as ``success`` and
    ``valid_calls``.
    """
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            if name not in ("success", "invalid_calls"):
                values.setdefault(name, []).append(value)
    return {name: fmean(values[name]) for name in sorted(values)}


def _counted_episodes(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    return [one for one in episodes if not one.end.failed]


def _success(episodes: Sequence[Trajectory]) -> float | None:
    return fmean(one.success for one in episodes) if episodes else None


def _one_of_each(groups: Sequence[TrajectoryGroup], most: int) -> list[_Shown]:
    """Return up to ``most`` episodes, tasks round-robin: the best and the worst sibling of each group."""
    by_task: dict[str, list[_Shown]] = {}
    numbers = count()
    for group in groups:
        shown = [_Shown(trajectory=one, group=group, number=next(numbers)) for one in group.trajectories]
        ranked = sorted(shown, key=lambda one: -one.trajectory.reward)
        by_task.setdefault(group.task, []).extend(ranked[:1] if len(ranked) < 2 else [ranked[0], ranked[-1]])
    rounds = zip_longest(*by_task.values())
    return [one for turn in rounds for one in turn if one is not None][:most]


def _flat(
    metrics: Mapping[str, float], tasks: Mapping[str, Mapping[str, float]]
) -> Iterator[tuple[str, float]]:
    yield from metrics.items()
    for task, values in tasks.items():
        for name, value in values.items():
            yield f"{name}/{task}", value


def _append(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append lines. Non-finite numbers are written as null."""
    with run_folder_errors(path.parent):
        append_lines(path, [json.dumps(_finite(record)) for record in records])


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _drop_later_lines(path: Path, *, after: str, last: int) -> None:
    """Drop lines of steps lost in an interrupted run, and a truncated last line."""
    if path.exists():
        kept = [line for line in read_jsonl(path) if after in line and line[after] <= last]
        write_file(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
