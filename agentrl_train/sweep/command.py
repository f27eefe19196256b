"""``agentrl-train sweep``: runs the unfinished runs, and writes ``results.json`` and ``report.html``."""

from __future__ import annotations

import fcntl
import json
import shlex
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl_train.errors import ConfigError
from agentrl_train.storage.atomic_io import run_folder_errors, write_file
from agentrl_train.sweep.page import render
from agentrl_train.sweep.plan import PlannedRun, Sweep, load_sweep
from agentrl_train.sweep.processes import finished, last_error, require_unchanged, run_all
from agentrl_train.sweep.results import results

FAILED_EXIT = 1
SIGNAL_EXIT = 128
"""Exit status of a sweep stopped by a signal, plus the number of the signal (SIGTERM: 143)."""


def sweep(path: Path, *, cores: int, processes: int | None, replace: bool) -> int:
    """Run a sweep and write its report after every run. Return the exit status.

    Args:
        path: file of the sweep.
        cores: processor cores, which the runs share.
        processes: number of concurrent runs; None uses the number in the file.
        replace: repeat runs with changed settings.

    Raises:
        ConfigError: the file is invalid, or a run was started with other settings.
    """
    plan = load_sweep(path, cores=cores, processes=processes)
    console = Console()
    command = f"agentrl-train sweep {shlex.quote(str(path))}"
    failed: dict[Path, str] = {}
    with _claimed(plan.folder):
        require_unchanged(plan, replace=replace)
        for note in plan.notes:
            console.print(note, markup=False, soft_wrap=True)
        kept = sum(map(finished, plan.runs))
        if kept:
            console.print(f"{kept} of {len(plan.runs)} runs are finished already")

        def ended(run: PlannedRun, status: int) -> None:
            if finished(run):
                console.print(f"{_title(run)}: finished")
                if not plan.config.keep_checkpoints:
                    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
            elif status in (SIGNAL_EXIT + signal.SIGINT, SIGNAL_EXIT + signal.SIGTERM):
                console.print(f"{_title(run)}: stopped, with a checkpoint")
            else:
                failed[run.folder] = last_error(run, status)
                console.print(f"{_title(run)}: failed: {failed[run.folder]}", markup=False, soft_wrap=True)
            write(plan, results(plan, command=command, failed=failed))

        stopped_by = run_all(plan, on_start=lambda run: console.print(f"{_title(run)}: begins"), on_end=ended)
        found = results(plan, command=command, failed=failed)
        write(plan, found)
    if found["ranking"]:
        console.print(ranking_table(found))
    console.print(f"report: {plan.folder / 'report.html'}", soft_wrap=True)
    if stopped_by is not None:
        console.print(f"Stopped; continue with: {command}", soft_wrap=True)
        return SIGNAL_EXIT + stopped_by
    return FAILED_EXIT if found["finished"] < found["planned"] else 0


def write(plan: Sweep, found: dict[str, Any]) -> None:
    """Write ``results.json`` and ``report.html``; raises ``RunFolderError``."""
    with run_folder_errors(plan.folder):
        write_file(plan.folder / "results.json", json.dumps(found, indent=1).encode() + b"\n")
        write_file(plan.folder / "report.html", render(found).encode("utf-8", errors="replace"))


def ranking_table(found: dict[str, Any]) -> Table:
    """Return the ranking as a table of the terminal."""
    table = Table(title=f"held-out success, {found['interval']}")
    for heading in ("variant", "sampled", "interval", "greedy", "difference", "runs"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    by_name = {one["name"]: one for one in found["variants"]}
    for name in found["ranking"]:
        final, difference = by_name[name]["final"], by_name[name]["difference"]["success"]
        success, greedy = final["success"], final["greedy"]
        ends = "-" if success["low"] is None else f"{success['low']:.1%} – {success['high']:.1%}"
        change = "-" if difference is None else f"{100 * difference['mean']:+.1f}"
        table.add_row(
            name,
            f"{success['mean']:.1%}",
            ends,
            "-" if greedy is None else f"{greedy['mean']:.1%}",
            "baseline" if name == found["baseline"] else change,
            str(success["n"]),
        )
    return table


def _title(run: PlannedRun) -> str:
    return f"{run.variant}, seed {run.seed}"


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Create the folder of a sweep and lock it; raises ``ConfigError`` if another process runs it."""
    with run_folder_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 (held until the sweep ends)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process runs the sweep in {folder}: wait for it, or stop it"
            ) from None
        yield
