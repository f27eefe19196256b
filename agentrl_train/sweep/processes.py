"""Starts the runs of a sweep in child processes, a bounded number at a time. Finished runs are kept."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from agentrl_train.errors import ConfigError
from agentrl_train.storage.atomic_io import run_folder_errors, write_file
from agentrl_train.storage.run_dir import CONFIG
from agentrl_train.sweep.plan import PlannedRun, Sweep
from agentrl_train.telemetry.watchdog import die_with_parent, same_python

POLL_INTERVAL_S = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
FREE = ("run.name", "run.folder", "run.threads")
"""Settings of a run that can change."""


@dataclass(slots=True, kw_only=True)
class _Child:
    """A run in progress."""

    run: PlannedRun
    process: subprocess.Popen[bytes]
    started: float


def finished(run: PlannedRun) -> bool:
    """Return True if a run is finished."""
    return (run.folder / "summary.json").exists()


def require_unchanged(sweep: Sweep, *, replace: bool) -> None:
    """Compare the started runs with the sweep's file.

    Args:
        sweep: the sweep.
        replace: discard runs with changed settings instead of raising an error.

    Raises:
        ConfigError: a run was started with other settings.
    """
    found = []
    for run in sweep.runs:
        changed = run.config.changes_since(run.folder / CONFIG)
        found += [(run, name, *values) for name, values in changed.items() if name not in FREE][:1]
    if replace:
        for run, *_ in found:
            with run_folder_errors(run.folder):
                shutil.rmtree(run.folder)
                run.usage.unlink(missing_ok=True)
    elif found:
        run, name, old, new = found[0]
        raise ConfigError(
            f"{len(found)} of the runs in {sweep.folder} were started with other settings than those of "
            f"{sweep.path} ({run.variant}, seed {run.seed}: {name} was {old}, and is {new}): restore the "
            "file, choose another name, or repeat these runs with --replace"
        )


def run_all(
    sweep: Sweep, *, on_start: Callable[[PlannedRun], None], on_end: Callable[[PlannedRun, int], None]
) -> int | None:
    """Start the unfinished runs. A run that fails does not stop the others.

    Args:
        sweep: the sweep. Its runs continue from their checkpoints, if they have any.
        on_start: called when a run starts.
        on_end: called when a run has ended, with its exit status.

    Returns:
        The number of the signal that stopped the sweep, or None. Its runs then end after their steps in
        progress, with checkpoints.
    """
    pending = [run for run in sweep.runs if not finished(run)]
    children: list[_Child] = []
    forwarded = 0
    with _signals() as received:
        try:
            while children or (pending and not received):
                while pending and len(children) < sweep.processes and not received:
                    children.append(_start(run := pending.pop(0)))
                    on_start(run)
                ended = [(child, end) for child in children if (end := _poll(child))]
                for child, (status, processor_s) in ended:
                    children.remove(child)
                    _add_usage(child, processor_s=processor_s)
                    on_end(child.run, status)
                for _ in received[forwarded:]:  # a second signal ends the runs immediately
                    forwarded += 1
                    for child in children:
                        child.process.send_signal(signal.SIGTERM)
                if not ended:
                    time.sleep(POLL_INTERVAL_S)
        finally:
            for child in children:
                child.process.kill()
    return received[0] if received else None


def usage(run: PlannedRun) -> dict[str, float]:
    """Return the wall and processor seconds that the processes of a run took, up to now."""
    try:
        found = json.loads(run.usage.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    return {key: float(found.get(key, 0.0)) for key in ("wall_s", "processor_s")}


def _start(run: PlannedRun) -> _Child:
    with run_folder_errors(run.folder):
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        write_file(run.file, run.config.to_toml().encode())
        resume = ["--resume"] if run.folder.exists() else []
        command = [*same_python(), "-m", "agentrl_train", "run", str(run.file), *resume]
        with open(run.log, "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": str(run.config.run.threads)},
                start_new_session=True,  # a signal of the terminal reaches the runs through the sweep
                preexec_fn=die_with_parent,  # so that another sweep can continue the run
            )
    return _Child(run=run, process=process, started=time.monotonic())


def _poll(child: _Child) -> tuple[int, float] | None:
    """Return the exit status and the processor seconds of an ended run, including its children."""
    number, status, used = os.wait4(child.process.pid, os.WNOHANG)
    if not number:
        return None
    child.process.returncode = os.waitstatus_to_exitcode(status)  # the status is already collected
    return child.process.returncode, used.ru_utime + used.ru_stime


def _add_usage(child: _Child, *, processor_s: float) -> None:
    before = usage(child.run)
    after = {
        "wall_s": round(before["wall_s"] + time.monotonic() - child.started, 3),
        "processor_s": round(before["processor_s"] + processor_s, 3),
    }
    with run_folder_errors(child.run.usage.parent):
        write_file(child.run.usage, json.dumps(after).encode())


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the stop signals that arrive."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> Any:
        received.append(number)

    before = {number: signal.signal(number, receive) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_error(run: PlannedRun, status: int) -> str:
    """Return why a run failed: the signal that killed it, or the last error or line in its log."""
    if status == -signal.SIGKILL:
        return (
            "killed by SIGKILL, as the system does if memory runs out: repeat the sweep with fewer "
            "processes, or lower train.micro_batch_tokens"
        )
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    try:
        text = run.log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    errors = [line for line in lines if line.startswith("agentrl-train: ")]
    return (errors or lines or [f"exit status {status}"])[-1].removeprefix("agentrl-train: ")
