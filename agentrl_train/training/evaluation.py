"""Evaluation of a policy on held-out samples."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from agentrl_env.evaluation.statistics import pass_at_k, wilson_interval
from agentrl_train.actor import Actor
from agentrl_train.errors import EnvironmentUnavailable
from agentrl_train.training.admission import sample_seed
from agentrl_train.types import Episode, TaskSource, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out result of one task; failed episodes are excluded and reported."""

    task: str
    trajectories: Sequence[Trajectory]
    attempts: int
    """Episodes per sample."""
    greedy: Sequence[Trajectory] = ()
    """Greedily decoded episodes, one per sample, if asked for."""

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
        return wilson_interval(sum(t.success for t in self.counted), len(self.counted))

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
        """Policy versions that sampled its tokens."""
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
    def tolerant_calls(self) -> float:
        """Share of turns with calls outside of the syntax of the model's family."""
        turns = [turn for t in self.counted for turn in t.turns]
        return sum(turn.tolerant for turn in turns) / max(1, len(turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Held-out results of a policy, by task."""

    step: int | None
    """Steps that the policy was trained, None for another model than the run's."""
    tasks: Mapping[str, Evaluation]

    @property
    def success(self) -> float:
        """Mean success rate of the tasks."""
        return fmean(result.success for result in self.tasks.values()) if self.tasks else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the success of all episodes."""
        counted = [episode for result in self.tasks.values() for episode in result.counted]
        return wilson_interval(sum(episode.success for episode in counted), len(counted))

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
    """The slots of an actor that has at most ``most`` of those that it shares with others."""

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


async def evaluate(
    actor: Actor,
    *,
    samples: Mapping[str, Sequence[int]],
    split: Mapping[str, str],
    seed: int,
    attempts: int = 1,
    greedy: Actor | None = None,
) -> dict[str, Evaluation]:
    """Play every sample of every task ``attempts`` times, and once with ``greedy``.

    Args:
        actor: plays the episodes with the current policy.
        samples: task -> indices of the samples.
        split: task -> the held-out split.
        seed: seed of all draws, so that results are reproducible.
        attempts: episodes per sample.
        greedy: plays with the same policy at temperature 0.

    Raises:
        EnvironmentUnavailable: more than half of a task's episodes failed.
    """

    async def one(task: str) -> Evaluation:
        play = partial(_evaluate_task, task=task, indices=samples[task], split=split[task], seed=seed)
        if greedy is None:
            return await play(actor, attempts=attempts)
        result, likeliest = await asyncio.gather(play(actor, attempts=attempts), play(greedy, attempts=1))
        return replace(result, greedy=likeliest.trajectories)

    return {result.task: result for result in await asyncio.gather(*map(one, samples))}


async def _evaluate_task(
    actor: Actor, *, task: str, indices: Sequence[int], split: str, seed: int, attempts: int
) -> Evaluation:
    trajectories = await asyncio.gather(
        *(
            actor.sibling(
                Episode(
                    task=task,
                    split=split,
                    index=index,
                    seed=None,
                    draw_seed=(seed, sample_seed(task, index)),
                ),
                number=attempt,
            )
            for index in indices
            for attempt in range(attempts)
        )
    )
    failed = [t for t in trajectories if t.end.failed]
    if 2 * len(failed) > len(trajectories):
        raise EnvironmentUnavailable(
            f"{len(failed)} of {len(trajectories)} held-out episodes of {task} failed, "
            f"the last with: {failed[-1].error}"
        )
    return Evaluation(task=task, trajectories=trajectories, attempts=attempts)


def held_out_samples(sources: Mapping[str, TaskSource], count: int) -> dict[str, list[int]]:
    """Return the indices of the evaluation samples: the first ``count`` of each split."""
    return {task: list(range(min(count, source.num_samples or count))) for task, source in sources.items()}
