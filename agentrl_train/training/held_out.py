"""Held-out evaluations during a run: while training waits, or of checkpoints alongside training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentrl_train.errors import ConfigError, WeightMismatch
from agentrl_train.storage.checkpoint import is_intact
from agentrl_train.storage.checkpoint import steps as checkpoint_steps
from agentrl_train.telemetry.metrics import MetricsLog, evaluation_name
from agentrl_train.training.checkpoints import CheckpointWriter
from agentrl_train.training.evaluation import (
    Evaluation,
    EvaluationJournal,
    Evaluations,
    forget_later,
    step_folder,
)
from agentrl_train.training.step_trainer import TRACK
from agentrl_train.types import UNTRACED, Trace

Evaluator = Callable[..., Awaitable[dict[str, Evaluation]]]
"""Evaluates a policy; a ``journal`` keeps the episodes."""
CheckpointEvaluator = Callable[[Path, int, EvaluationJournal], Awaitable[dict[str, Evaluation]]]
"""Evaluates the model in a folder alongside training, and reports it for a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The evaluators of a run on held-out samples, and their interval."""

    current: Evaluator | None = None
    """Evaluates the current policy while training waits. None disables it."""
    saved: CheckpointEvaluator | None = None
    """Evaluates checkpoints alongside training. ``current`` is then used only at the end of the run."""
    every: int = 0
    """Steps between two evaluations. 0 evaluates only at the start and the end."""
    label: str
    """Digest of everything that affects the results, except the step."""
    on: Callable[..., Evaluator | None]
    """Returns the evaluation on another number of ``samples`` per task."""


class HeldOutEvaluations:
    """Runs the held-out evaluations of a run, records them, and keeps the best model.

    Args:
        held_out: evaluators and their interval.
        folder: folder of the run.
        last_step: step of the checkpoint that the run resumed, or 0. Later evaluations are forgotten.
        is_due: takes a step and an interval; returns True if the interval ends there, before the last step.
        checkpoints: writes the checkpoints to evaluate.
        log: records the results.
        on_recorded: receives each evaluation once it is recorded.
        interrupted: set if the run is stopped.
        trace: records the evaluations.
    """

    def __init__(
        self,
        held_out: HeldOut,
        *,
        folder: Path,
        last_step: int,
        is_due: Callable[[int, int], bool],
        checkpoints: CheckpointWriter,
        log: MetricsLog,
        on_recorded: Callable[[Evaluations], Awaitable[None]],
        interrupted: asyncio.Event,
        trace: Trace = UNTRACED,
    ) -> None:
        self._held_out = held_out
        self._folder = folder / "evaluations"
        self._is_due = is_due
        self._checkpoints = checkpoints
        self._log = log
        self._on_recorded = on_recorded
        self._interrupted = interrupted
        self._trace = trace
        self._evaluating: asyncio.Task[None] | None = None
        forget_later(self._folder, last=last_step)

    async def evaluate_step(self, step: int) -> bool:
        """Evaluate at a step boundary, or start to evaluate alongside training. False if interrupted."""
        if self._held_out.saved is None:
            return await self.evaluate(evaluation_name(step), step=step)
        self._checkpoints.pinned.add(step)
        await self._checkpoints.save(step=step)
        if not await self.finish():  # one at a time
            return False
        self._begin(self._held_out.saved)
        return True

    async def evaluate(self, name: str, *, step: int) -> bool:
        """Evaluate the current policy while training waits; return False if interrupted."""
        if self._held_out.current is None:
            return True
        with self._trace.span(TRACK, f"evaluation {name}"), self._journal(name, step) as journal:
            evaluation = asyncio.ensure_future(self._held_out.current(journal=journal))
            if not await self._unless_interrupted(evaluation):
                return False
        await self._record(name, evaluation.result(), step=step)
        return True

    async def repeat_missing(self, step: int) -> None:
        """Run the missing evaluation of a resumed run's step, or start those of all its checkpoints."""
        folder = self._checkpoints.folder
        missing = [
            one
            for one in ([step] if self._held_out.saved is None else checkpoint_steps(folder))
            if one <= step
            and (one == 0 or self._is_due(one, self._held_out.every))
            and not self._log.has_evaluation(evaluation_name(one))
        ]
        if self._held_out.saved is not None:
            self._checkpoints.pinned = {one for one in missing if is_intact(folder, one)}
            self._begin(self._held_out.saved)
        elif missing:
            await self.evaluate(evaluation_name(step), step=step)

    async def finish(self) -> bool:
        """Wait for the evaluation alongside training. Cancel it and return False if interrupted."""
        return self._evaluating is None or await self._unless_interrupted(self._evaluating)

    def raise_error(self) -> None:
        """Raise the error of an evaluation alongside training that has failed."""
        if self._evaluating is not None and self._evaluating.done():
            self._evaluating.result()

    async def cancel(self) -> None:
        """Cancel the evaluation alongside training. A resumed run repeats it."""
        if self._evaluating is not None:
            self._evaluating.cancel()
            await asyncio.gather(self._evaluating, return_exceptions=True)

    def _begin(self, evaluate: CheckpointEvaluator) -> None:
        work = self._evaluate_checkpoints(evaluate, written=self._checkpoints.writing)
        self._evaluating = asyncio.create_task(work)

    async def _evaluate_checkpoints(
        self, evaluate: CheckpointEvaluator, *, written: asyncio.Task[None] | None
    ) -> None:
        """Evaluate the remaining checkpoints alongside training, once they are ``written``."""
        if written is not None:
            await asyncio.shield(written)
        for step in sorted(self._checkpoints.pinned):
            name = evaluation_name(step)
            with self._trace.span("trainer/evaluations", f"evaluation {name}"):
                model_folder = self._checkpoints.folder / f"step_{step:06d}" / "model"
                with self._journal(name, step) as journal:
                    results = await evaluate(model_folder, step, journal)
            await self._record(name, results, step=step)
            self._checkpoints.pinned.discard(step)

    def _journal(self, name: str, step: int) -> EvaluationJournal:
        """Return the journal of an evaluation, with its episodes so far if it was interrupted."""
        return EvaluationJournal(
            step_folder(self._folder, step),
            model=f"step {step} of {self._held_out.label}",
            replace=True,
            show=partial(self._log.evaluating, name),
        )

    async def _unless_interrupted(self, work: asyncio.Future[Any]) -> bool:
        """Wait for work and raise its error; cancel it and return False if the run is interrupted first."""
        interruption = asyncio.create_task(self._interrupted.wait())
        try:
            await asyncio.wait((work, interruption), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            return work.done()
        finally:
            interruption.cancel()
            work.cancel()
            await asyncio.gather(work, interruption, return_exceptions=True)

    async def _record(self, name: str, results: Mapping[str, Evaluation], *, step: int) -> None:
        """Record an evaluation of the weights of a step, and keep their model if it is the best so far.

        Raises:
            WeightMismatch: the evaluation was sampled with other weights.
        """
        if others := set[int]().union(*(result.versions for result in results.values())) - {step}:
            raise WeightMismatch(f"an evaluation of version {step} was sampled with version {min(others)}")
        # Keep the model before recording: a run that is killed in between evaluates again.
        success = sum(result.success for result in results.values()) / len(results)
        await self._checkpoints.keep_best(success, step=step)
        self._log.log_evaluation(
            name,
            policy_version=step,
            results={task: result.trajectories for task, result in results.items()},
            greedy={task: result.greedy for task, result in results.items()},
        )
        await self._on_recorded(Evaluations(step=step, tasks=results))


def require_evaluator(evaluator: Evaluator | None) -> Evaluator:
    """Return an evaluator.

    Raises:
        ConfigError: there is none, because the number of samples is 0.
    """
    if evaluator is None:
        raise ConfigError("eval.samples is 0, so there is nothing to evaluate: raise it")
    return evaluator
