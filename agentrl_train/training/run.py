"""One run: evaluation, training steps, checkpoints, metrics and the report."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from agentrl_env.types import Message
from agentrl_train.chat import ChatFormat
from agentrl_train.config.sections import CheckpointSection, MetricsSection, RunSection
from agentrl_train.critics.networks import Critic
from agentrl_train.errors import EngineError
from agentrl_train.learner import Learner
from agentrl_train.report.page import write_report
from agentrl_train.storage.atomic_io import append_lines, run_folder_errors
from agentrl_train.storage.checkpoint import Checkpoint
from agentrl_train.telemetry.diagnosis import Diagnosis
from agentrl_train.telemetry.metrics import MetricsLog
from agentrl_train.telemetry.progress import Progress
from agentrl_train.telemetry.sinks import open_sinks
from agentrl_train.telemetry.throughput import Throughput, copy_bytes_per_s
from agentrl_train.telemetry.watchdog import in_thread
from agentrl_train.template_check import Prompt, describe_completions
from agentrl_train.training.admission import AdmittedGroup
from agentrl_train.training.checkpoints import WRITE_TIMEOUT_S, CheckpointWriter
from agentrl_train.training.curriculum import Curriculum
from agentrl_train.training.evaluation import Evaluations
from agentrl_train.training.held_out import HeldOut, HeldOutEvaluations, require_evaluator
from agentrl_train.training.loop import Loop
from agentrl_train.training.observer import Observer
from agentrl_train.training.step_trainer import TRACK, StepTrainer, by_task
from agentrl_train.types import UNTRACED, Completion, RunningEngine, SamplingParams, Step, Trace, Trajectory
from agentrl_train.weights import DriftCheck, Publisher

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 30.0
"""Time for a run to end after a rank is lost."""
PROBES = 3
"""Attempts to get the first completion of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """A loaded policy with its engine."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    engine: RunningEngine
    prompts: Sequence[Prompt]
    """A prompt of each task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(ServedPolicy):
    """A policy in training."""

    learner: Learner
    publisher: Publisher
    check: DriftCheck
    critic: Critic | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a run; ``summary`` is None if the run was stopped before its last step."""

    folder: Path
    step: int
    summary: Mapping[str, Any] | None


class FailureLog:
    """Counts the episodes that infrastructure failed, and records them in ``failures.jsonl``."""

    def __init__(self, folder: Path, *, episodes: int = 0) -> None:
        self.episodes = episodes
        """Failed episodes so far, including those before a resume."""
        self._folder = folder
        self._logged: set[tuple[str, str]] = set()

    def __call__(self, group: AdmittedGroup, failures: Sequence[Trajectory], dropped: bool) -> None:
        """Record the failed episodes of a group; each task and reason is logged as a warning once."""
        self.episodes += len(failures)
        reason = str(failures[-1].error)
        outcome = "the group is dropped" if dropped else "the group continues without them"
        level = logging.DEBUG if (group.task, reason) in self._logged else logging.WARNING
        self._logged.add((group.task, reason))
        logger.log(
            level, "%d episodes of a group of %s failed, %s: %s", len(failures), group.task, outcome, reason
        )
        line = {
            "group_id": group.group_id,
            "task": group.task,
            "index": group.index,
            "episodes": len(failures),
            "dropped": dropped,
            "end": failures[-1].end.value,
            "error": reason,
        }
        with run_folder_errors(self._folder):
            append_lines(self._folder / "failures.jsonl", [json.dumps(line)])


class Run:
    """Consumes the steps of a loop: trains, evaluates, and writes checkpoints, metrics and the report."""

    def __init__(
        self,
        run: RunSection,
        *,
        loop: Loop,
        policy: Policy,
        trainer: StepTrainer,
        curriculum: Curriculum,
        log: MetricsLog,
        failures: FailureLog,
        held_out: HeldOut,
        checkpoints: CheckpointSection,
        resumed: Checkpoint | None,
        observer: Observer,
        trace: Trace = UNTRACED,
    ) -> None:
        self._run_section = run
        self._observer = observer
        self._folder = run.path
        self._loop = loop
        self._trace = trace
        self._policy = policy
        self._trainer = trainer
        self._step_timeout_s = policy.learner.settings.step_timeout_s
        self._log = log
        self._failures = failures
        self._curriculum = curriculum
        self._held_out = held_out
        self._checkpoints_every = checkpoints.every
        self._fresh = resumed is None
        self._interrupted = asyncio.Event()
        self._weights = asyncio.Lock()  # callbacks of concurrent evaluations can evaluate and save
        self._trained = loop.window.steps
        state = resumed.loop if resumed else {}
        self._seconds_before = float(state.get("seconds", 0.0))
        self._trained_tokens = int(state.get("trained_tokens", 0))
        self._diagnosis = Diagnosis(
            policy.chat,
            algorithm=trainer.algorithm,
            train=policy.learner.settings,
            without_tools={prompt.task for prompt in policy.prompts if not prompt.tools},
            hidden={prompt.task for prompt in policy.prompts if prompt.hidden},
        )
        self._started = time.monotonic()
        self._checkpoints = CheckpointWriter(
            checkpoints,
            folder=run.path,
            loop=loop,
            trainer=trainer,
            tokenizer=policy.tokenizer,
            publisher=policy.publisher,
            state=self._state,
            last=resumed.step if resumed else None,
            trace=trace,
        )
        self._evaluations = HeldOutEvaluations(
            held_out,
            folder=run.path,
            last_step=resumed.step if resumed else 0,
            is_due=self._due,
            checkpoints=self._checkpoints,
            log=log,
            on_recorded=self._receive_evaluation,
            interrupted=self._interrupted,
            trace=trace,
        )
        device = str(policy.learner.device)
        self._throughput = Throughput(policy.engine.statistics, copy_bytes_per_s=copy_bytes_per_s(device))
        if resumed:
            trainer.load(resumed.folder)
            if "curriculum" in state:
                self._curriculum.restore(state["curriculum"])

    def stop(self) -> None:
        """End the run after the step in progress, with a checkpoint and without a final evaluation."""
        self._interrupted.set()
        self._loop.stop()

    async def evaluate(self, samples: int | None = None) -> Evaluations:
        """Evaluate the current policy between two steps; by default on ``eval.samples`` samples per task.

        Raises:
            ConfigError: ``eval.samples`` is 0.
        """
        evaluator = require_evaluator(self._held_out.on(samples=samples))
        return Evaluations(step=self._trained, tasks=await evaluator())

    async def save(self, folder: Path) -> None:
        """Write the current policy between two steps, as the folder ``model`` of a checkpoint."""
        await self._checkpoints.export(self._policy.learner, folder)

    async def run(self) -> Outcome:
        """Run to the end, or until ``stop`` is called."""
        self._observer.started(self)
        try:
            return await self._run()
        finally:
            await self._evaluations.cancel()
            # A checkpoint in progress is finished in any case.
            await asyncio.gather(self._checkpoints.wait(), return_exceptions=True)
            await self._checkpoints.wait()

    async def _run(self) -> Outcome:
        """Verify the weights, evaluate, train, evaluate again, and write summary and report."""
        version, policy = self._loop.trained_version, self._policy
        weights = policy.learner.weights()
        publish = partial(policy.publisher.publish, weights, policy_version=version, everywhere=True)
        await in_thread(publish, within_s=self._step_timeout_s, doing="publishing the first weights")
        await self._probe(version)
        if self._fresh:
            for line in await describe_completions(policy.chat, policy.engine, policy.prompts):
                self._log.note(line)
            if not await self._evaluations.evaluate_step(0):
                return Outcome(folder=self._folder, step=0, summary=None)
            await self._checkpoints.save(step=0)
            await self._checkpoints.wait()  # no group can be resumed without it
        else:
            await self._evaluations.repeat_missing(self._loop.window.steps)
        self._throughput.begin()
        async with aclosing(self._loop.steps()) as steps:
            async for taken in steps:
                await self._train_step(taken)
        step = self._loop.window.steps
        await self._checkpoints.save(step=step)
        await self._checkpoints.wait()
        summary = None if self._interrupted.is_set() else await self._summarize()
        report = partial(write_report, self._folder)
        await in_thread(report, within_s=WRITE_TIMEOUT_S, doing="writing the report")
        return Outcome(folder=self._folder, step=step, summary=summary)

    async def _summarize(self) -> Mapping[str, Any] | None:
        if not await self._evaluations.finish():
            return None
        if not await self._evaluations.evaluate("after", step=self._loop.window.steps):
            return None
        return self._log.write_summary(
            seconds=self._elapsed(),
            trained_tokens=self._trained_tokens,
            policy_version=self._loop.trained_version,
            seed=self._run_section.seed,
        )

    async def _train_step(self, step: Step) -> None:
        """Train one step, log it, and run a checkpoint or evaluation if due."""
        number, started = step.next_version, time.monotonic()
        self._evaluations.raise_error()
        with self._trace.span(TRACK, f"step {number}", groups=[group.group_id for group in step.groups]):
            train = partial(self._trainer.step, step)
            async with self._weights:
                trained = await in_thread(
                    train, within_s=self._step_timeout_s, doing=f"training step {number}"
                )
                self._trained = number
        for raised in self._curriculum.trained(number, step.groups):
            self._log.note(raised)
        self._loop.admit()
        self._trained_tokens += int(trained.get("loss_tokens", 0))
        discarded = self._loop.discarded_tokens
        throughput = self._throughput.step(trained, waited_s=step.waited_s, discarded_tokens=discarded)
        metrics = {**trained, **throughput}
        self._diagnosis.examine(step, metrics)
        metrics["failed_episodes"] = float(self._failures.episodes)
        metrics["dropped_groups"] = float(self._loop.window.dropped)
        levels = self._curriculum.metrics()
        metrics["train_seconds"] = time.monotonic() - started
        tasks = {task: {**values, **levels.get(task, {})} for task, values in by_task(step.groups).items()}
        step = _with_metrics(step, metrics, tasks)
        more = await self._observer.trained(step)
        step = replace(step, metrics={**step.metrics, **more})
        self._log.log_step(
            number,
            policy_version=step.next_version,
            elapsed_s=self._elapsed(),
            metrics={**metrics, **more},
            tasks=tasks,
            groups=step.groups,
            rows=self._trainer.rows,
        )
        mixer = self._loop.window.mixer
        for group in step.groups:
            mixer.count(group.task, sum(t.num_sampled_tokens for t in group.trajectories))
        if self._due(number, self._checkpoints_every):
            # The state must be on disk before the draws that depend on it. That is the case once the next
            # checkpoint begins, and at most two intervals of groups are drawn until then.
            mixer.rebalance(after=2 * self._checkpoints_every * len(step.groups))
            await self._checkpoints.save(step=number)
        if self._policy.publisher.is_refresh(number):
            await self._checkpoints.save(step=number)  # has the weights of the stale policy
        if self._due(number, self._held_out.every):
            await self._evaluations.evaluate_step(number)
            self._throughput.begin()
        await self._observer.finished(step)

    def _due(self, step: int, every: int) -> bool:
        """Return True if an interval of ``every`` steps ends at a step before the last."""
        return every > 0 and step % every == 0 and step < self._run_section.steps

    def _state(self) -> Mapping[str, Any]:
        """Return the state of the run for a checkpoint, except the window."""
        return {
            "policy_version": self._loop.trained_version,
            "seconds": self._elapsed(),
            "trained_tokens": self._trained_tokens,
            "failed_episodes": self._failures.episodes,
            "curriculum": self._curriculum.state(),
        }

    async def _receive_evaluation(self, evaluations: Evaluations) -> None:
        tasks = evaluations.tasks.items()
        self._diagnosis.compare({task: (one.success, *one.interval) for task, one in tasks})
        async with self._weights:
            await self._observer.evaluated(evaluations)

    async def _probe(self, version: int) -> None:
        """Compare one short completion of the engine with the trainer before the first episode."""
        context = self._policy.chat.opening([Message(role="user", content="probe")], ())
        completion = await self._complete(
            context, sampling=SamplingParams(max_new_tokens=8, temperature=self._policy.learner.temperature)
        )
        self._policy.check.check_probe(context, completion, version=version)

    async def _complete(self, context: Sequence[int], *, sampling: SamplingParams) -> Completion:
        """Request the first completion, with retries after engine failures."""
        attempts = PROBES
        while True:
            attempts -= 1
            try:
                return await self._policy.engine.generate(context, sampling=sampling, session_key="probe")
            except EngineError as error:
                if not attempts:
                    raise
                logger.warning("the first completion of the engine failed (%s) and is retried", error)
            finally:
                self._policy.engine.release("probe")

    def _elapsed(self) -> float:
        return self._seconds_before + time.monotonic() - self._started


async def run_until_rank_lost(run: Coroutine[Any, Any, Outcome], lost: Coroutine[Any, Any, None]) -> Outcome:
    """Return the outcome of a run; raises if a rank of the learner is lost before it ends."""
    running, losing = asyncio.create_task(run), asyncio.create_task(lost)
    try:
        await asyncio.wait((running, losing), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            losing.result()
        return await running
    finally:  # also if this is cancelled: the run must end before the caller closes its engines
        losing.cancel()
        running.cancel()
        await asyncio.wait((running,), timeout=SHUTDOWN_TIMEOUT_S)


def resumption(checkpoint: Checkpoint, *, steps: int, finished: int, changed: Sequence[str]) -> str:
    """Return the message printed when a run resumes."""
    text = f"resuming after step {checkpoint.step}, with {finished} finished groups that are not trained yet"
    if checkpoint.step >= steps:
        text = f"{checkpoint.step} steps are trained already, and run.steps = {steps}: raise it to train more"
    return "; ".join([text, *changed])


def _with_metrics(step: Step, metrics: Mapping[str, float], tasks: Mapping[str, Mapping[str, float]]) -> Step:
    """Return a trained step with its metrics."""
    episodes = [episode for group in step.groups for episode in group.trajectories]
    means = {
        "reward": fmean(episode.reward for episode in episodes),
        "success": fmean(episode.success for episode in episodes),
    }
    return replace(step, metrics={**metrics, **means}, tasks=tasks)


def make_log(
    run: RunSection,
    metrics: MetricsSection,
    *,
    settings: Mapping[str, Any],
    checkpoint: Checkpoint | None,
    trace: Trace,
    silent: bool,
) -> MetricsLog:
    """Return the metrics log, continued from the checkpoint if there is one."""
    step = checkpoint.step if checkpoint else 0
    elapsed_s = float(checkpoint.loop["seconds"]) if checkpoint else 0.0
    console = Console(quiet=silent)
    progress = Progress(total_steps=run.steps, console=console, first_step=step, elapsed_s=elapsed_s)
    log = MetricsLog(
        run.path,
        first_step=step,
        trajectories=metrics.trajectories,
        sinks=open_sinks(metrics, run, trace, settings=settings, notify=progress.note),
        progress=progress,
    )
    if checkpoint and step < run.steps:
        log.reopen()
    return log
