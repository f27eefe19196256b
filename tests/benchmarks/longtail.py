"""Asynchronous and synchronous training on equal samples, with a long-tailed environment latency.

The quick start's policy learns the shop of ``longtail_task``, whose calls wait for Pareto-distributed times.
All runs train the same samples in the same steps. Staleness, loss and seed differ. Synchronous runs wait for
the slowest episode of each step, and asynchronous runs continue to play meanwhile. Runs have one thread each
and run two at a time. They wait most of the time, but more runs would also wait for processors.

*Speed* is trained tokens per second over all steps but the first. The ceiling of the ratio is a loop that
never
waits for an environment: the synchronous run's seconds divided by the working seconds of its engine or its
trainer, whichever is longer, with a processor for each.

*Reward* is the share of successful training episodes over the last quarter of the samples, so that no
evaluation has to wait for the slow environment. Further tables show it by samples and by time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from tests.benchmarks.longtail_task import LONGEST_S, SHORTEST_S

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/quickstart/train.toml"
TASK = Path(__file__).with_name("longtail_task.py")
LOSSES: Mapping[str, Sequence[str]] = {
    "clipped": [],
    "unclipped": ["algorithm.region=none"],
}
GROUPS, AT_A_TIME = 4, 2
SETTINGS = (
    "eval.samples=0",
    "metrics.tensorboard=false",
    "metrics.trajectories=0",
    "metrics.trace=false",
    "checkpoint.every=1000",
    f"rollout.groups_per_step={GROUPS}",
    "rollout.stale.fraction=0.0",
    "train.warmup_steps=3",
    "run.threads=1",
)
Record = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of one kind of run, repeated for every seed."""

    staleness: int
    loss: str

    @property
    def name(self) -> str:
        """The name in tables."""
        return "synchronous" if self.staleness == 0 else f"staleness {self.staleness}"


def train(folder: Path, setting: Setting, *, seed: int, steps: int) -> list[dict[str, float]]:
    """Train one run and return the records of its steps."""
    name = f"{setting.staleness}-{setting.loss}-{seed}"
    options = [
        *SETTINGS,
        *LOSSES[setting.loss],
        f"environments=[{{serve=['{TASK}:LateShop']}}]",
        f"run.folder={folder}",
        f"run.name={name}",
        f"run.steps={steps}",
        f"run.seed={seed}",
        f"rollout.max_staleness={setting.staleness}",
        f"rollout.window={setting.staleness * GROUPS + 1}",
    ]
    command = [sys.executable, "-m", "agentrl_train", "run", str(CONFIG)]
    for option in options:
        command += ["--set", option]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def success(record: Record) -> float:
    """Return a step's share of successful episodes."""
    tasks: Mapping[str, Mapping[str, float]] = record["tasks"]  # type: ignore[assignment]
    return tasks["shop"]["success"]


def seconds(records: Sequence[Record]) -> float:
    """Return the duration of all steps but the first."""
    return sum(record["step_seconds"] for record in records[1:])


def speed(records: Sequence[Record]) -> float:
    """Return trained tokens per second over all steps but the first."""
    return sum(record.get("loss_tokens", 0.0) for record in records[1:]) / seconds(records)


def idle(records: Sequence[Record], who: str) -> float:
    """Return the share of the time that the trainer or the engine was idle."""
    return sum(record[f"{who}_idle"] * record["step_seconds"] for record in records[1:]) / seconds(records)


def last_quarter(records: Sequence[Record]) -> float:
    """Return the success of the last quarter of the samples."""
    return fmean(success(record) for record in records[-max(1, len(records) // 4) :])


def after(records: Sequence[Record], limit_s: float) -> float | None:
    """Return the success ``limit_s`` seconds after the first step, or None if the run ended earlier."""
    elapsed, near = 0.0, None
    for earlier, record in pairwise(records):
        elapsed += record["step_seconds"]
        if elapsed >= limit_s:
            return near
        near = (success(earlier) + success(record)) / 2
    return None


def spread(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation of values as text."""
    return f"{fmean(values):.1%}" + (f" ± {stdev(values):.1%}" if len(values) > 1 else "")


def run(*, quick: bool) -> None:
    """Print the tables."""
    steps, seeds = (6, 1) if quick else (16, 3)
    settings = [Setting(staleness=0, loss="clipped")]
    settings += [Setting(staleness=s, loss=loss) for s in ((2,) if quick else (1, 4)) for loss in LOSSES]
    with tempfile.TemporaryDirectory() as folder:
        show(collect(Path(folder), settings, seeds=seeds, steps=steps))


def collect(
    folder: Path, settings: Sequence[Setting], *, seeds: int, steps: int
) -> dict[Setting, list[list[dict[str, float]]]]:
    """Train all runs, seed by seed, ``AT_A_TIME`` concurrently."""
    runs: dict[Setting, list[list[dict[str, float]]]] = {setting: [] for setting in settings}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for seed in range(seeds):
            make = partial(train, folder, seed=seed, steps=steps)
            for setting, records in zip(settings, pool.map(make, settings), strict=True):
                runs[setting].append(records)
    return runs


def show(runs: Mapping[Setting, Sequence[Sequence[Record]]]) -> None:
    """Print the tables of some runs."""
    console = Console(width=120)
    console.print(_speeds(runs))
    console.print(_curves(runs))


def _speeds(runs: Mapping[Setting, Sequence[Sequence[Record]]]) -> Table:
    repeats = next(iter(runs.values()))
    table = Table(
        title=f"{len(repeats[0])} steps of {GROUPS * 8} episodes, {len(repeats)} seeds; "
        f"an environment's call waits {SHORTEST_S:g} to {LONGEST_S:g} s"
    )
    headings = "mode", "loss", "tokens/s", "ratio", "ceiling", "trainer idle", "engine idle", "age", "drift"
    for heading in (*headings, "success"):
        table.add_column(heading, justify="right")
    synchronous = runs[Setting(staleness=0, loss="clipped")]
    base = fmean(speed(one) for one in synchronous)
    ceiling = fmean(1 / (1 - min(idle(one, "trainer"), idle(one, "engine"))) for one in synchronous)
    for setting, repeats in runs.items():
        own = fmean(speed(one) for one in repeats)
        table.add_row(
            setting.name,
            setting.loss,
            f"{own:,.0f}",
            f"{own / base:.2f}",
            f"{ceiling:.2f}",
            f"{fmean(idle(one, 'trainer') for one in repeats):.0%}",
            f"{fmean(idle(one, 'engine') for one in repeats):.0%}",
            f"{fmean(record['token_staleness_mean'] for one in repeats for record in one):.2f}",
            f"{max(record['logprob_drift'] for one in repeats for record in one):.0e}",
            spread([last_quarter(one) for one in repeats]),
        )
    return table


def _curves(runs: Mapping[Setting, Sequence[Sequence[Record]]]) -> Table:
    """Compare by samples, per quarter, and by time, at the ends of the quarters of the fastest run."""
    fastest = min(fmean(seconds(one) for one in repeats) for repeats in runs.values())
    marks = [fastest * part / 4 for part in (1, 2, 3, 4)]
    table = Table(title="success of training episodes: by quarter of the samples, and after some seconds")
    for heading in ("mode", "loss", "1st", "2nd", "3rd", "4th", *(f"{mark:.0f} s" for mark in marks), "took"):
        table.add_column(heading, justify="right")
    for setting, repeats in runs.items():
        size = len(repeats[0]) // 4
        quarters = [
            fmean(success(record) for one in repeats for record in one[part * size : (part + 1) * size])
            for part in range(4)
        ]
        # The fastest run can end shortly before the mean of its kind.
        timed = [
            [value for one in repeats if (value := after(one, 0.97 * mark)) is not None] for mark in marks
        ]
        table.add_row(
            setting.name,
            setting.loss,
            *(f"{value:.0%}" for value in quarters),
            *(f"{fmean(values):.0%}" if values else "-" for values in timed),
            f"{fmean(seconds(one) for one in repeats):.0f} s",
        )
    return table
