"""Evaluation of a policy on held-out samples."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal, Self

from agentrl_env.evaluation.chat_model import Usage
from agentrl_env.evaluation.record import (
    EpisodeRecord,
    EvaluationError,
    EvaluationSettings,
    RunFile,
    TurnRecord,
)
from agentrl_env.evaluation.statistics import pass_at_k, weighted_sum
from agentrl_env.types import TaskSample
from agentrl_train.actor import Actor
from agentrl_train.errors import EnvironmentUnavailable
from agentrl_train.storage.checkpoint import steps
from agentrl_train.telemetry.metrics import mean_metrics, success_interval
from agentrl_train.telemetry.progress import Tally
from agentrl_train.training.admission import sample_seed
from agentrl_train.types import Completion, Episode, EpisodeEnd, TaskSource, Trajectory, Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out result of one task; failed episodes are excluded and reported."""

    task: str
    trajectories: Sequence[Trajectory]
    attempts: int
    """Episodes per sample."""
    greedy: Sequence[Trajectory] = ()
    """Greedily decoded episodes, one per sample, if ``eval.greedy`` is on."""

    @property
    def counted(self) -> list[Trajectory]:
        """Return the episodes without infrastructure failures."""
        return [t for t in self.trajectories if not t.end.failed]

    @property
    def success(self) -> float:
        """Share of successful episodes."""
        return sum(t.success for t in self.counted) / len(self.counted)

    @property
    def greedy_success(self) -> float:
        """Share of successful greedy episodes, without infrastructure failures."""
        return fmean(t.success for t in self.greedy if not t.end.failed)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of ``success``."""
        return success_interval(self.counted)

    def pass_at(self, k: int) -> float:
        """Unbiased pass@k over the samples, each of which has ``attempts`` episodes."""
        values = []
        for start in range(0, len(self.trajectories), self.attempts):
            valid = [t for t in self.trajectories[start : start + self.attempts] if not t.end.failed]
            if len(valid) >= k:
                values.append(pass_at_k(len(valid), sum(t.success for t in valid), k))
        return sum(values) / len(values) if values else float("nan")

    @property
    def versions(self) -> set[int]:
        """Policy versions that sampled the tokens."""
        turns = (turn for t in (*self.counted, *self.greedy) for turn in t.turns)
        return {version for turn in turns for version in turn.completion.versions}

    @property
    def mean_turns(self) -> float:
        """Mean number of turns of an episode."""
        return sum(len(t.turns) for t in self.counted) / len(self.counted)

    @property
    def valid_calls(self) -> float:
        """Share of turns whose calls the environment accepted."""
        turns = [turn for t in self.counted for turn in t.turns]
        return sum(turn.invalid_calls == 0 for turn in turns) / max(1, len(turns))

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the metrics of ``score()``, each over the episodes that have it."""
        return mean_metrics(self.counted)

    @property
    def tolerant_calls(self) -> float:
        """Share of turns with calls that do not follow the syntax of the model's family."""
        turns = [turn for t in self.counted for turn in t.turns]
        return sum(turn.tolerant for turn in turns) / max(1, len(turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Held-out results of a policy, by task."""

    step: int | None
    """Number of steps that the policy was trained for, or None for a model that is not the run's."""
    tasks: Mapping[str, Evaluation]

    @property
    def success(self) -> float:
        """Mean success rate of the tasks."""
        return fmean(result.success for result in self.tasks.values()) if self.tasks else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of ``success``."""
        estimates = [(result.success, *result.interval) for result in self.tasks.values()]
        return weighted_sum(estimates, [1 / len(estimates)] * len(estimates))[1:]

    def __getitem__(self, task: str) -> Evaluation:
        """Return the result of a task."""
        return self.tasks[task]

    def __repr__(self) -> str:
        """Return a line per task."""
        if not self.tasks:
            return "no results: rank 0 evaluates"
        policy = "another policy" if self.step is None else f"policy of step {self.step}"
        lines = [
            f"{task}: success {result.success:.1%} (95 % interval {low:.1%} to {high:.1%}), "
            f"{len(result.counted)} episodes"
            for task, result in self.tasks.items()
            for low, high in [result.interval]
        ]
        if len(lines) > 1:
            low, high = self.interval
            lines.append(f"mean: success {self.success:.1%} (95 % interval {low:.1%} to {high:.1%})")
        return "\n".join([f"{policy} on held-out samples", *(f"  {line}" for line in lines)])


class SessionShare:
    """Limits an actor to ``most`` of the slots that it shares with other actors."""

    def __init__(self, slots: asyncio.Semaphore, *, most: int) -> None:
        self._slots = slots
        self._own = asyncio.Semaphore(most)

    async def __aenter__(self) -> None:
        await self._own.acquire()
        try:
            await self._slots.acquire()
        except BaseException:
            self._own.release()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._slots.release()
        self._own.release()


class EvaluationJournal:
    """The episodes of an evaluation on disk, in the files of ``agentrl-env eval``: a folder for each task.

    Args:
        folder: the folder, which is created.
        model: name of the policy in the files.
        replace: delete an existing evaluation of another policy or with other settings.
        show: called with the tally after each episode.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        replace: bool = False,
        show: Callable[[Tally], None] = lambda tally: None,
    ) -> None:
        self.folder = folder
        self.tally = Tally()
        self._model = model
        self._replace = replace
        self._show = show
        self._files = ExitStack()
        self._greedy: set[Path] = set()

    def open(
        self,
        task: str,
        *,
        split: str,
        indices: tuple[int, ...],
        attempts: int,
        seed: int,
        temperature: float,
        greedy: bool,
    ) -> RunFile:
        """Open the file of a task, or of its greedy episodes, and keep episodes of an interrupted evaluation.

        Raises:
            EvaluationError: the file cannot be written, or has an evaluation with other settings.
        """
        settings = EvaluationSettings(
            task=task,
            split=split,
            model=self._model,
            indices=indices,
            attempts=attempts,
            seed=seed,
            temperature=temperature,
        )
        folder = self.folder / (f"{task}-greedy" if greedy else task)
        try:
            file = self._files.enter_context(RunFile(folder, settings))
        except EvaluationError:
            if not self._replace:
                raise
            shutil.rmtree(folder, ignore_errors=True)
            file = self._files.enter_context(RunFile(folder, settings))
        self._greedy |= {file.path} if greedy else set()
        self._count(file, file.run.counted, total=len(settings.plan()))  # shown with the first episode
        return file

    async def append(self, file: RunFile, episode: EpisodeRecord) -> None:
        """Write an episode; raises ``EvaluationError``."""
        await file.append_async(episode)
        self._count(file, [episode])
        self._show(self.tally)

    def _count(self, file: RunFile, episodes: Sequence[EpisodeRecord], *, total: int = 0) -> None:
        tally = self.tally
        played = [episode for episode in episodes if not episode.failed]
        sampled = [] if file.path in self._greedy else played
        self.tally = Tally(
            total=tally.total + total,
            done=tally.done + len(played),
            sampled=tally.sampled + len(sampled),
            successes=tally.successes + sum(episode.success for episode in sampled),
            failed=tally.failed + len(episodes) - len(played),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()


def step_folder(evaluations: Path, step: int) -> Path:
    """Return the folder of the evaluation of a step of a run."""
    return evaluations / f"step_{step:06d}"


def forget_later(evaluations: Path, *, last: int) -> None:
    """Delete the evaluations of the steps after ``last``, because a resumed run repeats these steps."""
    for step in steps(evaluations):
        if step > last:
            shutil.rmtree(step_folder(evaluations, step), ignore_errors=True)


def to_record(trajectory: Trajectory, *, index: int, attempt: int) -> EpisodeRecord:
    """Return the record of an episode. The turns of all segments follow one another."""
    sides: dict[EpisodeEnd, Literal["model", "environment"]] = {EpisodeEnd.FAILED_ENGINE: "model"}
    started = datetime.now(UTC) - timedelta(seconds=trajectory.seconds)
    if trajectory.started is not None:
        started = datetime.fromtimestamp(trajectory.started, UTC)
    return EpisodeRecord(
        index=index,
        attempt=attempt,
        seed=trajectory.sample.seed,
        opening=tuple(trajectory.opening),
        turns=tuple(
            TurnRecord(
                action=turn.message,
                thought=turn.thought,
                finish_reason=turn.completion.finish_reason,
                usage=Usage(output=len(turn.completion.token_ids)),
                invalid_calls=turn.invalid_calls,
                messages=tuple(turn.reply),
                reward=turn.reward,
            )
            for turn in trajectory.turns
        ),
        end=trajectory.end.value,
        reward=trajectory.reward,
        success=trajectory.success,
        metrics=dict(trajectory.metrics),
        error=trajectory.error,
        failed=sides.get(trajectory.end, "environment") if trajectory.end.failed else None,
        seconds=trajectory.seconds,
        started=started.isoformat(timespec="milliseconds"),
    )


def from_record(record: EpisodeRecord, *, task: str, split: str) -> Trajectory:
    """Return a recorded episode, without its tokens."""
    return Trajectory(
        sample=TaskSample(task=task, split=split, index=record.index, seed=record.seed or 0),
        opening=record.opening,
        turns=[
            Turn(
                prompt_ids=(),
                completion=Completion(
                    token_ids=(), logprobs=(), versions=(), finish_reason=turn.finish_reason or ""
                ),
                message=turn.action,
                reply=turn.messages,
                reward=turn.reward,
                invalid_calls=turn.invalid_calls,
                thought=turn.thought,
            )
            for turn in record.turns
        ],
        end=EpisodeEnd(record.end),
        reward=record.reward,
        success=record.success,
        metrics=record.metrics,
        error=record.error,
        seconds=record.seconds,
        started=datetime.fromisoformat(record.started).timestamp(),
    )


async def evaluate(
    actor: Actor,
    *,
    samples: Mapping[str, Sequence[int]],
    split: Mapping[str, str],
    seed: int,
    attempts: int = 1,
    greedy: Actor | None = None,
    journal: EvaluationJournal | None = None,
) -> dict[str, Evaluation]:
    """Play every sample of every task ``attempts`` times, and once with ``greedy``.

    Args:
        actor: plays the episodes with the current policy.
        samples: task -> indices of the samples.
        split: task -> the held-out split.
        seed: seed of all draws, so that results are reproducible.
        attempts: episodes per sample.
        greedy: plays with the same policy at temperature 0.
        journal: keeps each episode as it ends, and holds the episodes of an interrupted evaluation.

    Raises:
        EvaluationError: the journal cannot be written, or has an evaluation with other settings.
        EnvironmentUnavailable: more than half of a task's episodes failed.
    """

    async def one(task: str) -> Evaluation:
        play = partial(
            _evaluate_task, task=task, indices=samples[task], split=split[task], seed=seed, journal=journal
        )
        if greedy is None:
            return await play(actor, attempts=attempts)
        result, likeliest = await asyncio.gather(
            play(actor, attempts=attempts), play(greedy, attempts=1, greedy=True)
        )
        return replace(result, greedy=likeliest.trajectories)

    return {result.task: result for result in await asyncio.gather(*map(one, samples))}


async def _evaluate_task(
    actor: Actor,
    *,
    task: str,
    indices: Sequence[int],
    split: str,
    seed: int,
    attempts: int,
    journal: EvaluationJournal | None,
    greedy: bool = False,
) -> Evaluation:
    file = None
    if journal is not None:
        file = journal.open(
            task,
            split=split,
            indices=tuple(indices),
            attempts=attempts,
            seed=seed,
            temperature=actor.sampling.temperature,
            greedy=greedy,
        )

    async def play(index: int, attempt: int) -> Trajectory:
        if file is not None and (known := file.run.episodes.get((index, attempt))) and not known.failed:
            return from_record(known, task=task, split=split)
        draw_seed = (seed, sample_seed(task, index))
        episode = Episode(task=task, split=split, index=index, seed=None, draw_seed=draw_seed)
        trajectory = await actor.sibling(episode, number=attempt)
        if journal is not None and file is not None:
            await journal.append(file, to_record(trajectory, index=index, attempt=attempt))
        return trajectory

    plan = [play(index, attempt) for index in indices for attempt in range(attempts)]
    trajectories = await asyncio.gather(*plan)
    failed = [t for t in trajectories if t.end.failed]
    if 2 * len(failed) > len(trajectories):
        raise EnvironmentUnavailable(
            f"{len(failed)} of {len(trajectories)} held-out episodes of {task} failed, "
            f"the last with: {failed[-1].error}"
        )
    return Evaluation(task=task, trajectories=trajectories, attempts=attempts)


def held_out_samples(sources: Mapping[str, TaskSource], count: int) -> dict[str, list[int]]:
    """Return the indices of the evaluation samples: the first ``count`` of each split."""
    for task, source in sources.items():
        if source.num_samples is not None and source.num_samples < count:
            logger.warning(
                "%d held-out samples of %s are configured (eval.samples), but its split %r has %d: all of "
                "them are played",
                count,
                task,
                source.split,
                source.num_samples,
            )
    return {task: list(range(min(count, source.num_samples or count))) for task, source in sources.items()}
