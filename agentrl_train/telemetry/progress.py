"""Progress displays: a live table or a bar in a terminal, and lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SMOOTHING = 0.8
"""Share of the old value in the displayed moving averages."""
LINE_EVERY_S = 10.0
"""Seconds between two lines of ``Counter`` if the output is not a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Progress of an evaluation."""

    total: int = 0
    """Number of episodes of the evaluation, including greedy ones."""
    done: int = 0
    """Number of episodes with a result."""
    sampled: int = 0
    """Number of sampled episodes with a result, without greedy ones."""
    successes: int = 0
    """Number of successful sampled episodes."""
    failed: int = 0
    """Number of episodes without a result, because infrastructure failed."""

    @property
    def facts(self) -> list[str]:
        """Return success so far, and the number of failed episodes."""
        facts = [f"success {_percent(self.successes / self.sampled)}"] if self.sampled else []
        return facts + [f"{self.failed} failed"] * (self.failed > 0)


@dataclass(slots=True)
class _TaskLine:
    """The displayed values of one task."""

    before: float | None = None
    success: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)


class Progress:
    """Shows each step: success and reward, loss, KL, entropy, tokens per second, staleness, time left.

    Args:
        total_steps: steps of the run.
        console: output. A terminal shows a live table, other outputs get plain lines.
        first_step: steps trained before this process.
        elapsed_s: time those steps took, which the estimate of the time left excludes.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        console: Console | None = None,
        first_step: int = 0,
        elapsed_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._console = console or Console()
        self._pace_s: float | None = None
        self._step = first_step
        self._elapsed_s = elapsed_s
        self._metrics: Mapping[str, float] = {}
        self._tasks: dict[str, _TaskLine] = {}
        self._clock = clock
        self._held_out: Pace | None = None
        self._next_line = 0.0
        self._held_out_line = ""
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def step(
        self,
        step: int,
        *,
        elapsed_s: float,
        metrics: Mapping[str, float],
        tasks: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Show a trained step."""
        # The elapsed time also includes evaluations.
        step_s = metrics.get("step_seconds", self._step_seconds(step, elapsed_s))
        self._pace_s = self._smooth(self._pace_s, step_s)
        self._step, self._elapsed_s, self._metrics = step, elapsed_s, metrics
        for task, values in tasks.items():
            line = self._tasks.setdefault(task, _TaskLine())
            line.values = values
            if (success := values.get("success")) is not None:
                line.success = self._smooth(line.success, success)
        if self._live is None:
            self._console.print(self._plain_line(), highlight=False, soft_wrap=True)
        else:
            self._live.start()
            self._live.update(self._render(), refresh=True)

    def evaluating(self, name: str, tally: Tally) -> None:
        """Show the progress of an evaluation."""
        if self._held_out is None:
            self._held_out = Pace(f"held-out episodes, {name}", clock=self._clock)
            self._next_line = self._clock() + LINE_EVERY_S
        self._held_out_line = self._held_out.line(tally.done + tally.failed, tally.total, *tally.facts)
        if self._live is not None:
            self._live.start()
            self._live.update(self._render(), refresh=True)
        elif self._clock() >= self._next_line:
            self._next_line = self._clock() + LINE_EVERY_S
            self.note(self._held_out_line)

    def evaluation(self, name: str, success: Mapping[str, float | None]) -> None:
        """Show held-out success, task by task."""
        self._held_out, self._held_out_line = None, ""
        if name == "before":
            for task, value in success.items():
                self._tasks.setdefault(task, _TaskLine()).before = value
        shares = ", ".join(f"{task} {_percent(value)}" for task, value in success.items())
        self.note(f"held-out success, {name}: {shares}")

    def note(self, text: str) -> None:
        """Print a message."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the live display and keep its last state; idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated time left, or None before the first step."""
        return None if self._pace_s is None else self._pace_s * max(0, self._total - self._step)

    def _step_seconds(self, step: int, elapsed_s: float) -> float:
        return max(0.0, elapsed_s - self._elapsed_s) / max(1, step - self._step)

    @staticmethod
    def _smooth(old: float | None, new: float) -> float:
        return new if old is None else SMOOTHING * old + (1.0 - SMOOTHING) * new

    def _plain_line(self) -> str:
        tasks = ", ".join(f"{task} {_percent(line.success)}" for task, line in self._tasks.items())
        facts = "  ".join(f"{name} {value}" for name, value in self._short_facts() if value is not None)
        return f"step {self._step}/{self._total}  success (smoothed) {tasks}  {facts}"

    def _short_facts(self) -> Iterator[tuple[str, str | None]]:
        """Yield the parts of a line: learning metrics and speed."""
        get = self._metrics.get
        rewards = [line.values["reward"] for line in self._tasks.values() if "reward" in line.values]
        yield "reward", _number(fmean(rewards)) if rewards else None
        yield from self._learning_fields()
        yield "tok/s", _count(get("trained_tokens_per_s"))
        yield "left", _duration(self.seconds_left)

    def _learning_fields(self) -> Iterator[tuple[str, str | None]]:
        for name, key in (("loss", "loss"), ("KL", "kl"), ("entropy", "entropy")):
            value = self._metrics.get(key)
            yield name, None if value is None else f"{value:.2g}"

    def _facts(self) -> list[tuple[str, str]]:
        get = self._metrics.get
        facts: list[tuple[str, str | None]] = [
            *self._learning_fields(),
            ("trained tok/s", _of(get("trained_tokens_per_s"), get("trained_tokens_per_s_ceiling"))),
            ("sampled tok/s", _of(get("sampled_tokens_per_s"), get("sampled_tokens_per_s_ceiling"))),
            ("staleness", _pair(get("staleness_mean"), get("staleness_max"))),
            ("trainer idle", _share(get("trainer_idle"))),
            ("engine idle", _share(get("engine_idle"))),
            ("left", _duration(self.seconds_left)),
        ]
        return [(name, value) for name, value in facts if value is not None]

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {self._step}/{self._total}", style="bold"),
            ProgressBar(total=self._total, completed=self._step, width=32),
            Text(f"{_duration(self._elapsed_s)} elapsed, {_duration(self.seconds_left)} left", style="dim"),
        )
        facts = Text("  ").join(
            Text.assemble((f"{name} ", "dim"), value) for name, value in self._facts() if name != "left"
        )
        evaluation = [Text(self._held_out_line, style="dim")] if self._held_out_line else []
        return Group(head, self._task_table(), facts, *evaluation)

    def _task_table(self) -> Table:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        table.add_column("task")
        for name in ("held-out before", "success (smoothed)", "reward", "turns", "valid calls"):
            table.add_column(name, justify="right")
        for task, line in self._tasks.items():
            values = line.values
            table.add_row(
                task,
                _percent(line.before),
                Text(_percent(line.success), style="bold green"),
                _number(values.get("reward")),
                _number(values.get("turns")),
                _percent(values.get("valid_calls")),
            )
        return table


class Pace:
    """Describes the finished work and the remaining time.

    Args:
        unit: plural of the unit, such as "episodes".
        clock: seconds.
    """

    def __init__(self, unit: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._unit = unit
        self._clock = clock
        self._start: tuple[int, float] | None = None

    def line(self, done: int, total: int, *facts: str) -> str:
        """Return a line. Units that were done at the first call do not affect the remaining time."""
        now = self._clock()
        if self._start is None:
            self._start = done, now
        before, since = self._start
        left = (now - since) / (done - before) * (total - done) if done > before else None
        return ", ".join([f"{done}/{total} {self._unit}", *facts, f"{_duration(left)} left"])


class Counter:
    """Shows the finished units of work and the remaining time, as a bar in a terminal or as occasional lines.

    Args:
        unit: plural of the unit, such as "episodes".
        console: output, by default standard error.
        clock: seconds.
    """

    def __init__(
        self, unit: str, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._pace = Pace(unit, clock=clock)
        self._next_line = clock()
        columns = (BarColumn(), TextColumn("{task.description}"))
        self._bars = Bars(
            *columns, console=self._console, auto_refresh=False, disable=not self._console.is_terminal
        )
        self._bar = self._bars.add_task("")

    def show(self, done: int, total: int, *facts: str) -> None:
        """Show the progress. Units that were done at the first call do not affect the remaining time."""
        now, line = self._clock(), self._pace.line(done, total, *facts)
        if self._console.is_terminal:
            self._bars.start()
            self._bars.update(self._bar, total=total, completed=done, description=line, refresh=True)
        elif now >= self._next_line or done == total:
            self._next_line = now + LINE_EVERY_S
            self._console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the live display and keep its last state; idempotent."""
        self._bars.stop()


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _share(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.0f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _count(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def _of(value: float | None, ceiling: float | None) -> str | None:
    text = _count(value)
    return text if text is None or not ceiling else f"{text} of {_count(ceiling)}"


def _pair(mean: float | None, most: float | None) -> str | None:
    return None if mean is None or most is None else f"{mean:.1f} (max {most:.0f})"


def _duration(seconds: float | None) -> str:
    """Return ``m:ss`` or ``h:mm:ss``."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
