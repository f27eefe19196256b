"""Asynchronous and synchronous training on equal samples, with the quick start's configuration.

The same groups are played and trained twice: with ``max_staleness = 0`` and as configured. Trained tokens per
second count sampled tokens in the loss. The ceiling of the ratio is a perfect overlap of the
synchronous run's two phases, ``(T_play + T_train) / max(T_play, T_train)``, with a processor for each
phase.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

CONFIG = Path(__file__).parents[2] / "examples/quickstart/train.toml"


def train(folder: Path, name: str, *, steps: int, settings: list[str]) -> list[dict[str, float]]:
    """Run some steps and return their records except the first, which includes the warm-up."""
    options = [f"run.folder={folder}", f"run.name={name}", f"run.steps={steps}", "eval.samples=0"]
    options += ["metrics.tensorboard=false", "metrics.trajectories=0", *settings]
    command = [sys.executable, "-m", "agentrl_train", "run", str(CONFIG)]
    for option in options:
        command += ["--set", option]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1:]


def total(records: list[dict[str, float]], name: str) -> float:
    """Return the sum of one measurement over all steps."""
    return sum(record.get(name, 0.0) for record in records)


def run(*, quick: bool) -> None:
    """Print the table."""
    steps = 8 if quick else 20
    table = Table(title=f"trained tokens/s over {steps - 1} steps")
    for heading in ("mode", "tokens/s", "seconds", "trainer idle", "engine idle", "staleness"):
        table.add_column(heading, justify="right")
    speeds, ceiling = {}, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for mode, settings in (("synchronous", ["rollout.max_staleness=0"]), ("asynchronous", [])):
            records = train(Path(folder), mode, steps=steps, settings=settings)
            seconds = total(records, "step_seconds")
            speeds[mode] = total(records, "loss_tokens") / seconds
            idle = sum(r["trainer_idle"] * r["step_seconds"] for r in records) / seconds
            engine = sum(r["engine_idle"] * r["step_seconds"] for r in records) / seconds
            if mode == "synchronous":
                ceiling = 1 / max(idle, 1 - idle)
            stale = total(records, "staleness_mean") / len(records)
            table.add_row(
                mode, f"{speeds[mode]:,.0f}", f"{seconds:.1f}", f"{idle:.0%}", f"{engine:.0%}", f"{stale:.2f}"
            )
    console = Console(width=110)
    console.print(table)
    ratio = speeds["asynchronous"] / speeds["synchronous"]
    console.print(f"asynchronous / synchronous: {ratio:.2f}; ceiling of perfect overlap: {ceiling:.2f}")
