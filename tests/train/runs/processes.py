"""Start runs as processes, with a tiny policy and a served test task."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny_models import make_model, make_tokenizer

CONFIG = """
[run]
name = "run"
folder = "{folder}"
steps = 8
threads = 1
[model]
path = "model"
[[environments]]
serve = ["{target}"]
[engine]
max_sessions = 8
max_context = 512
max_new_tokens = 12
[rollout]
groups_per_step = 3
group_size = 3
max_staleness = 0
[train]
learning_rate = 1e-3
[checkpoint]
every = 3
[eval]
samples = 0
"""


def write_config(folder: Path, *, target: str = "babble.py:Babble") -> Path:
    """Write a tiny model and its configuration. Return the path of the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model().save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    config = folder / "train.toml"
    config.write_text(CONFIG.format(folder=folder, target=Path(__file__).with_name(target)))
    return config


def command(config: Path, *overrides: str, resume: bool = False) -> list[str]:
    """Return the command line of a run."""
    options = [part for override in overrides for part in ("--set", override)]
    return [sys.executable, "-m", "agentrl_train", "run", str(config), *options, *["--resume"] * resume]


def begin(
    config: Path, *overrides: str, resume: bool = False, limit_bytes: int | None = None
) -> subprocess.Popen[str]:
    """Start a run. ``limit_bytes`` limits the size of its files, like a full disk."""
    line = command(config, *overrides, resume=resume)
    if limit_bytes is not None:
        line = ["prlimit", f"--fsize={limit_bytes}", *line]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(config: Path, *overrides: str, resume: bool = False) -> subprocess.CompletedProcess[str]:
    """Run until the end."""
    line = command(config, *overrides, resume=resume)
    return subprocess.run(line, capture_output=True, text=True, timeout=600)


def steps(run: Path) -> list[dict[str, Any]]:
    """Return the recorded steps of a run, except an incomplete last step."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def until(process: subprocess.Popen[str], true: Callable[[], bool]) -> None:
    """Wait until a condition holds or the process has exited."""
    deadline = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline and not true():
        time.sleep(0.002)


def until_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Wait until a step is recorded or the process has exited."""
    until(process, lambda: any(line["step"] >= step for line in steps(run)[-1:]))


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a run in progress."""
    process.send_signal(signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, output + errors
