"""The command ``eval``: the folder of its episodes, its progress, and its table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl_train.storage.atomic_io import run_folder_errors, write_file
from agentrl_train.telemetry.progress import Counter, Tally
from agentrl_train.training.evaluation import Evaluation, EvaluationJournal, Evaluations
from agentrl_train.training.trainer import Trainer

RESULT = "result.json"
"""File of a finished evaluation."""


def evaluate_and_record(trainer: Trainer, *, path: str, output: Path | None) -> Evaluations:
    """Evaluate a model with progress on standard error, and keep each episode as it ends.

    Args:
        trainer: trainer of the run.
        path: a model folder, or a model on the hub.
        output: folder of the episodes; None for ``evaluations/`` of the run, in which an interrupted
            evaluation with the same settings and weights is continued.
    """
    digest = trainer.config.evaluation_digest(path)
    name = f"{_name(path)}-{digest}"
    folder = output or _unfinished_folder(trainer.folder / "evaluations", name)
    Console().print(f"episodes: {folder}; the same command continues if it is interrupted", soft_wrap=True)
    with closing(Counter("episodes")) as counter:

        def show(tally: Tally) -> None:
            counter.show(tally.done + tally.failed, tally.total, *tally.facts)

        with EvaluationJournal(folder, model=f"{path}@{digest}", show=show) as journal:
            results = trainer.evaluate(model=path, journal=journal)
    with run_folder_errors(folder, option="run.folder" if output is None else "--output"):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / RESULT, json.dumps(_result(results.tasks), indent=2).encode() + b"\n")
    return results


def _name(path: str) -> str:
    """Return a short name of a model: the step of a checkpoint, or the last part of its path."""
    parts = Path(path).resolve().parts if Path(path).is_dir() else Path(path).parts
    of_checkpoint = len(parts) > 1 and parts[-1] == "model" and parts[-2].startswith("step_")
    return parts[-2] if of_checkpoint else parts[-1]


def _unfinished_folder(parent: Path, name: str) -> Path:
    """Return the folder of an evaluation that is not finished: an interrupted one, or a new one."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(folder for folder in map(parent.joinpath, names) if not (folder / RESULT).exists())


def _result(results: Mapping[str, Evaluation]) -> dict[str, Any]:
    return {
        task: {
            "episodes": len(result.counted),
            "success": result.success,
            "interval": list(result.interval),
            "greedy": result.greedy_success if result.greedy else None,
            "valid_calls": result.valid_calls,
            "tolerant_calls": result.tolerant_calls,
            "turns": result.mean_turns,
            "metrics": result.metrics,
        }
        for task, result in results.items()
    }


def evaluation_table(results: Mapping[str, Evaluation]) -> Table:
    """Return a table of the results, one row per task."""
    attempts = next(iter(results.values())).attempts
    table = Table(title="held-out samples")
    headings = ["task", "episodes", "success", "95 % interval", "valid calls", "turns"]
    headings += [f"pass@{attempts}"] * (attempts > 1)
    greedy = all(result.greedy for result in results.values())
    headings += ["greedy"] * greedy
    tolerant = any(result.tolerant_calls for result in results.values())
    headings += ["read tolerantly"] * tolerant
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for task, result in results.items():
        low, high = result.interval
        cells = [task, str(len(result.counted)), f"{result.success:.1%}", f"{low:.1%} – {high:.1%}"]
        cells += [f"{result.valid_calls:.1%}", f"{result.mean_turns:.1f}"]
        cells += [f"{result.pass_at(attempts):.1%}"] if attempts > 1 else []
        cells += [f"{result.greedy_success:.1%}"] if greedy else []
        cells += [f"{result.tolerant_calls:.1%}"] if tolerant else []
        table.add_row(*cells)
    return table
