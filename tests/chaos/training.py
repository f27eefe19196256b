"""The training half: a run during which environments, engine, controller and trainer are killed."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, variance

from tests.chaos.site import left_processes
from tests.chaos.trained import TrainedAccount, rewards, settle_training
from tests.chaos.training_site import GROUP_SIZE, SERVERS, Trainer, TrainingSite

ENGINES = ("scripted", "torch")
HANG_S = 75.0
"""Maximum time without a step, including the starts of the trainer and the longest pause."""
CALM_STEPS = 3
"""Minimum number of steps after the last fault, and between two faults of the trainer."""
COMPARED = 75
"""Maximum number of steps of the undisturbed runs. Their last third is compared."""
NOISE = 6.0
"""Maximum difference of two mean rewards in standard errors, estimated from only three runs."""
WEIGHTS = {
    "kill server": 5,
    "pause server": 3,
    "kill controller": 3,
    "pause controller": 2,
    "kill own server": 4,
    "kill engine": 6,
    "kill trainer": 4,
    "stop trainer": 2,
    "pause trainer": 1,
}


@dataclass(slots=True)
class TrainingReport:
    """The result of a run with one engine."""

    engine: str
    seconds: float = 0.0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    """Exit reasons of the trainer's processes."""
    hangs: list[str] = field(default_factory=list)
    account: TrainedAccount = field(default_factory=TrainedAccount)
    disturbed: float = math.nan
    undisturbed: float = math.nan
    error: float = math.nan
    """Standard error of the difference."""
    compared: int = 0
    same: int = 0

    @property
    def kills(self) -> int:
        """Number of processes and engines killed."""
        return sum(number for name, number in self.faults.items() if name.startswith("kill"))

    @property
    def failed(self) -> bool:
        """True if there was any finding or hang."""
        return bool(self.account.notes or self.hangs)

    def rows(self) -> list[tuple[str, object]]:
        """Return the rows of the report."""
        account = self.account
        return [
            ("faults", dict(sorted(self.faults.items()))),
            ("ends of the trainer", dict(self.ends)),
            ("steps", f"{self.steps} in {self.seconds:.0f} s"),
            ("episodes begun, trained on", f"{account.played}, {account.samples}"),
            ("groups reported failed, still waiting", f"{account.dropped}, {account.unfinished}"),
            ("trained twice, lost silently", f"{account.trained_twice}, {account.lost_silently}"),
            (
                "reward, undisturbed, standard error",
                f"{self.disturbed:.3f}, {self.undisturbed:.3f}, {self.error:.3f}",
            ),
            ("groups compared, with the very same rewards", f"{self.compared}, {self.same}"),
            ("hangs", len(self.hangs)),
        ]


async def run(engine: str, seed: int, seconds: float, folder: Path) -> TrainingReport:
    """Inject faults into a run for the given seconds, let it finish, and account for every sample."""
    report, site = TrainingReport(engine=engine), TrainingSite(engine, folder)
    begin = time.monotonic()
    try:
        await site.start()
        await _train_under_faults(site, report, seed, seconds)
        report.seconds = time.monotonic() - begin
        report.account = settle_training(site.trainer.run, site.ledgers, group_size=GROUP_SIZE)
        await _train_undisturbed(site, report)
    finally:
        for trainer in (site.trainer, *site.references):
            trainer.send(signal.SIGKILL)
        unstoppable = await site.stop()
    report.steps = site.trainer.steps()
    notes = report.account.notes
    notes += [f"{name} had to be killed at the end" for name in unstoppable]
    notes += await _left(site.mark)
    log = site.trainer.log.read_text(errors="replace")
    notes += [f"the trainer's log has a bug: {text}" for text in bugs(log)]
    _compare(site, report)
    return report


def bugs(log: str) -> list[str]:
    """Return the last lines of tracebacks, except for injected engine failures."""
    found = []
    for block in log.split("Traceback (most recent call last):\n")[1:]:
        last = next((line for line in block.splitlines() if re.match(r"[^\s|+]", line)), "")
        if "the device is lost" not in last:
            found.append(last)
    return found


async def _train_under_faults(site: TrainingSite, report: TrainingReport, seed: int, seconds: float) -> None:
    trainer, faults = site.trainer, draw(seed, seconds)
    await trainer.start()
    watch = Watch(trainer)
    begin, due = time.monotonic(), next(faults, None)
    calm_from: int | None = None
    while True:
        await asyncio.sleep(0.1)
        now = time.monotonic() - begin
        if trainer.pid is None:
            report.ends[_end(trainer)] += 1
            await trainer.start()
            watch.moved = 0
        if watch.hangs():
            report.hangs.append(f"no step for {HANG_S:g} s after step {trainer.steps()}: see {trainer.log}")
            trainer.send(signal.SIGKILL)
        if due is not None and now >= due[0]:
            # The trainer must make some progress between its faults.
            needed = {"trainer": CALM_STEPS, "engine": 1}.get(due[1].partition(" ")[2], 0)
            if watch.moved >= needed:
                report.faults[due[1]] += 1
                await _break(site, report, *due[1:])
            due = next(faults, None)
        elif due is None and now >= seconds:
            calm_from = trainer.steps() if calm_from is None else calm_from
            if trainer.steps() >= max(calm_from + CALM_STEPS, 1) or len(report.hangs) > 2:
                break
    trainer.send(signal.SIGTERM)
    if not await trainer.ended(HANG_S):
        report.hangs.append("the trainer did not exit on SIGTERM")
        trainer.send(signal.SIGKILL)
        await trainer.ended(HANG_S)
    report.ends[_end(trainer)] += 1


async def _break(site: TrainingSite, report: TrainingReport, kind: str, which: int, pause_s: float) -> None:
    what, _, whom = kind.partition(" ")
    trainer = site.trainer
    if what == "stop":
        trainer.send(signal.SIGTERM)
        if not await trainer.ended(HANG_S):
            report.hangs.append("the trainer did not exit on SIGTERM")
            trainer.send(signal.SIGKILL)
    elif whom == "engine" and report.engine == "torch":
        trainer.send(signal.SIGUSR1)
    elif pid := _pid(site, whom, which):
        if what == "kill":
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(pause_s)
        os.kill(pid, signal.SIGCONT)


def _pid(site: TrainingSite, whom: str, which: int) -> int | None:
    match whom:
        case "server":
            return site.servers[which % SERVERS].pid
        case "controller":
            return site.controller.pid
        case "own server":
            return next(iter(site.trainer.children("agentrl_env serve")), None)
        case "engine":
            return next(iter(site.trainer.children("tests.chaos.scripted")), None)
        case _:
            return site.trainer.pid


class Watch:
    """Detects a trainer without progress."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.begin()

    def begin(self) -> None:
        """Reset the watch."""
        self._at, self._since, self.moved = self._trainer.steps(), time.monotonic(), 0

    def hangs(self) -> bool:
        """Return True and reset the watch if there was no step for too long."""
        steps = self._trainer.steps()
        if steps != self._at:
            self.moved += max(0, steps - self._at)
            self._at, self._since = steps, time.monotonic()
        if late := time.monotonic() - self._since > HANG_S:
            self.begin()
        return late


def draw(seed: int, seconds: float) -> Iterator[tuple[float, str, int, float]]:
    """Yield the faults of a run: time in seconds, kind, target number and length of a pause."""
    rng, at = random.Random(seed), 8.0
    while at < seconds:
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        yield at, kind, rng.randrange(1000), rng.choice([0.5, 2.0, 6.0])
        at += rng.uniform(0.5, 5.0)


def _end(trainer: Trainer) -> str:
    status = trainer.status or 0
    if status == 1:
        last = [line for line in trainer.log.read_text(errors="replace").splitlines() if line.strip()][-1]
        return f"gave up: {last}"
    names = {143: "stopped in order", -9: "killed"}
    return names.get(status, f"exit status {status}")


async def _train_undisturbed(site: TrainingSite, report: TrainingReport) -> None:
    for reference in site.references:
        await reference.start(steps=min(COMPARED, site.trainer.steps()))
    if not all(await asyncio.gather(*(one.ended(4 * HANG_S) for one in site.references))):
        report.hangs.append("an undisturbed run did not end")


def _compare(site: TrainingSite, report: TrainingReport) -> None:
    """Compare the rewards of the disturbed and the undisturbed runs at the same steps."""
    last = min(report.steps, *(one.steps() for one in site.references))
    # Completions of the scripted engine do not depend on the step.
    first = 1 if report.engine == "scripted" else max(1, last - last // 3)
    ours, *theirs = (rewards(one.run, first, last) for one in (site.trainer, *site.references))
    both = ours.keys() & theirs[0].keys()
    report.compared, report.same = len(both), sum(ours[i] == theirs[0][i] for i in both)
    if len(both) < 2:
        report.account.notes.append("there are too few groups to compare")
        return
    if report.engine == "scripted":  # only common groups, because the last groups of the runs can differ
        ours, theirs = {i: ours[i] for i in both}, [{i: theirs[0][i] for i in both}]
    means = [fmean(map(fmean, one.values())) for one in (ours, *theirs)]
    report.disturbed, report.undisturbed = means[0], fmean(means[1:])
    within = variance(map(fmean, ours.values())) / len(ours)
    between = variance(means[1:]) * (1 + 1 / len(theirs)) if len(theirs) > 1 else within
    report.error = math.sqrt(within + between)
    if abs(report.disturbed - report.undisturbed) > NOISE * report.error:
        report.account.notes.append(
            f"the reward of steps {first} to {last} is {report.disturbed:.3f}, and {report.undisturbed:.3f} "
            f"undisturbed: more than {NOISE:g} standard errors ({report.error:.3f}) apart"
        )


async def _left(mark: str) -> list[str]:
    """Return a note for each process of a run that is alive after a grace period."""
    end = time.monotonic() + 10
    while (pids := left_processes(mark)) and time.monotonic() < end:  # noqa: ASYNC110 (others' processes)
        await asyncio.sleep(0.2)
    return [f"process {pid} was left" for pid in pids]


def run_training(engine: str, seed: int, seconds: float) -> TrainingReport:
    """Run in a temporary folder, which is kept if the run fails."""
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{engine}-"))
    report = asyncio.run(run(engine, seed, seconds, folder))
    if report.failed:
        print(f"logs, ledgers and the run are in {folder}")
    else:
        shutil.rmtree(folder)
    return report
