"""One run: what happens before, during and after the loop."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentrl_env.types import Message
from agentrl_train.engine.chat import ChatFormat
from agentrl_train.errors import EngineError
from agentrl_train.learner import Learner
from agentrl_train.runtime.admission import AdmittedGroup
from agentrl_train.runtime.checkpoint import Checkpoint, InModelFolder, save_checkpoint
from agentrl_train.runtime.disk import run_folder_errors
from agentrl_train.runtime.evaluation import Evaluation
from agentrl_train.runtime.journal import Journal
from agentrl_train.runtime.loop import Loop, Step
from agentrl_train.runtime.report.page import write_report
from agentrl_train.runtime.telemetry.advice import nothing_learned
from agentrl_train.runtime.telemetry.metrics import MetricsLog
from agentrl_train.runtime.telemetry.throughput import Throughput
from agentrl_train.runtime.trainer import TRACK, StepTrainer, by_task
from agentrl_train.runtime.watchdog import in_thread
from agentrl_train.types import UNTRACED, Completion, RunningEngine, SamplingParams, Trace, Trajectory
from agentrl_train.weights import Drift, Publisher, drift, probe_sequence, require_agreement

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PROBES = 3
"""Times that the engine is asked for its first completion."""

Evaluator = Callable[[], Awaitable[dict[str, Evaluation]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The policy, ready to act and to learn."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    learner: Learner
    engine: RunningEngine
    publisher: Publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """What happens how often, in steps, 0 is never; and what must not take longer, in seconds."""

    steps: int
    seed: int
    checkpoint_every: int
    rebalance_after: int
    """In draws from a checkpoint on: when tasks share tokens as counted until then."""
    keep: int
    evaluate_every: int
    temperature: float
    tolerance: Drift
    step_s: float
    checkpoint_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended; ``summary`` is None if it was interrupted, by the signal of that number."""

    folder: Path
    step: int
    summary: Mapping[str, Any] | None
    signal: int | None = None


class Run:
    """Trains, measures, saves. ``loop`` is set right after construction: the two know one another."""

    loop: Loop

    def __init__(
        self,
        *,
        folder: Path,
        policy: Policy,
        trainer: StepTrainer,
        journal: Journal,
        log: MetricsLog,
        evaluate: Evaluator | None,
        cadence: Cadence,
        checkpoint: Checkpoint | None,
        throughput: Throughput,
        trace: Trace = UNTRACED,
    ) -> None:
        self.journal = journal
        self._trace = trace
        self._folder = folder
        self._policy = policy
        self._trainer = trainer
        self._log = log
        self._evaluate_held_out = evaluate
        self._cadence = cadence
        self._fresh = checkpoint is None
        self._signal: int | None = None
        self._interrupted = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        state = checkpoint.loop if checkpoint else {}
        self._seconds_before = float(state.get("seconds", 0.0))
        self._trained_tokens = int(state.get("trained_tokens", 0))
        self._failed_episodes = int(state.get("failed_episodes", 0))
        self._told_failures: set[tuple[str, str]] = set()
        self._idle_steps = 0
        self._started = time.monotonic()
        self._throughput = throughput
        if checkpoint:
            policy.learner.load(checkpoint.folder)

    def interrupt(self, number: int) -> None:
        """End the run after the step under way, with a checkpoint; a second signal ends it at once."""
        self._signal = number
        self._interrupted.set()
        self.loop.stop()
        _leave_signals()

    def count_failed(self, group: AdmittedGroup, failures: Sequence[Trajectory], dropped: bool) -> None:
        """Note the episodes of a group that infrastructure failed to the last, in ``failures.jsonl``.

        What is told there of every group is said aloud once.
        """
        self._failed_episodes += len(failures)
        reason = str(failures[-1].error)
        fate = "it is dropped" if dropped else "it goes on without them"
        level = logging.DEBUG if (group.task, reason) in self._told_failures else logging.WARNING
        self._told_failures.add((group.task, reason))
        logger.log(
            level, "%d episodes of a group of %s failed, %s: %s", len(failures), group.task, fate, reason
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
        with run_folder_errors(self._folder), open(self._folder / "failures.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    async def run(self) -> Outcome:
        """Run to the end, or until a signal to stop."""
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self.interrupt, number)
        try:
            return await self._run()
        finally:
            # Whatever ends the run, a checkpoint that is being written is finished.
            await asyncio.gather(self._written(), return_exceptions=True)
            _leave_signals()
            await self._written()

    async def _run(self) -> Outcome:
        """Check the weights, evaluate, train, evaluate again, and sum up."""
        version = self.loop.policy_version
        publish = partial(
            self._policy.publisher.publish,
            self._policy.learner.weights(),
            policy_version=version,
            everywhere=True,
        )
        await in_thread(publish, within_s=self._cadence.step_s, doing="publishing the first weights")
        await self._probe(version)
        if self._fresh:
            if not await self._evaluate("before"):
                return Outcome(folder=self._folder, step=0, summary=None, signal=self._signal)
            await self._checkpoint(step=0)
        self._throughput.begin()
        await self.loop.run()
        step = self.loop.window.steps
        await self._checkpoint(step=step)
        await self._written()
        summary = None if self._signal else await self._sum_up()
        report = partial(write_report, self._folder)
        await in_thread(report, within_s=self._cadence.checkpoint_s, doing="writing the report")
        return Outcome(folder=self._folder, step=step, summary=summary, signal=self._signal)

    async def _sum_up(self) -> Mapping[str, Any] | None:
        if not await self._evaluate("after"):
            return None
        return self._log.write_summary(
            seconds=self._elapsed(),
            trained_tokens=self._trained_tokens,
            policy_version=self.loop.policy_version,
            seed=self._cadence.seed,
        )

    async def train_step(self, step: Step) -> None:
        """Train one step, record it, and save or evaluate where it is due."""
        number, started = self.loop.window.steps, time.monotonic()
        with self._trace.span(TRACK, f"step {number}", groups=[group.group_id for group in step.groups]):
            train = partial(self._trainer.step, step.groups, policy_version=step.policy_version + 1)
            told = await in_thread(train, within_s=self._cadence.step_s, doing=f"training step {number}")
        self._trained_tokens += int(told.get("loss_tokens", 0))
        self._idle_steps = 0 if told.get("loss_tokens") else self._idle_steps + 1
        if self._idle_steps.bit_count() == 1:  # 1, 2, 4, 8 ... in a row
            logger.warning("%s", nothing_learned(step.groups, steps=self._idle_steps))
        speeds = self._throughput.step(
            told, waited_s=step.waited_s, discarded_tokens=self.loop.discarded_tokens
        )
        metrics = {**told, **speeds}
        metrics["failed_episodes"] = float(self._failed_episodes)
        metrics["dropped_groups"] = float(self.loop.window.dropped)
        metrics["train_seconds"] = time.monotonic() - started
        self._log.log_step(
            number,
            policy_version=step.policy_version + 1,
            elapsed_s=self._elapsed(),
            metrics=metrics,
            tasks=by_task(step.groups),
            groups=step.groups,
        )
        mixer = self.loop.window.mixer
        for group in step.groups:
            mixer.count(group.task, sum(t.num_sampled_tokens for t in group.trajectories))
        if self._due(number, self._cadence.checkpoint_every):
            if self._cadence.rebalance_after:
                mixer.rebalance(after=self._cadence.rebalance_after)
            await self._checkpoint(step=number)
        if self._due(number, self._cadence.evaluate_every):
            await self._evaluate(f"step {number}")
            self._throughput.begin()

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and step % every == 0 and step < self._cadence.steps

    async def _checkpoint(self, *, step: int) -> None:
        """Save everything at this step's boundary; all but the copying happens while the run goes on.

        The journal's cut and the loop's state are taken in one breath; the parameters do not change before,
        because training waits for the copy.
        """
        await self._written()
        copy, doing = self._policy.learner.snapshot, f"copying the parameters of step {step}"
        snapshot = await in_thread(copy, within_s=self._cadence.checkpoint_s, doing=doing)
        self.journal.rotate(step)
        write = partial(
            save_checkpoint,
            self._folder / "checkpoints",
            step=step,
            parts=(snapshot, InModelFolder(pretrained=self._policy.tokenizer)),
            loop={
                "step": step,
                "policy_version": self.loop.policy_version,
                "window": self.loop.window.state(),
                "seconds": self._elapsed(),
                "trained_tokens": self._trained_tokens,
                "failed_episodes": self._failed_episodes,
            },
            groups=self.loop.untrained,
            keep=self._cadence.keep,
        )
        self._writing = asyncio.create_task(self._write(write, step=step))

    async def _write(self, write: Callable[[], int], *, step: int) -> None:
        with self._trace.span("trainer/checkpoints", f"checkpoint {step}"):
            doing = f"writing the checkpoint of step {step}"
            self.journal.prune(await in_thread(write, within_s=self._cadence.checkpoint_s, doing=doing))

    async def _written(self) -> None:
        """Wait until the last checkpoint is on the disk; raises what went wrong with it."""
        if (writing := self._writing) is not None:
            self._writing = None
            await writing

    async def _evaluate(self, name: str) -> bool:
        """Measure held-out success; return False if a signal came first."""
        if self._evaluate_held_out is None:
            return True
        with self._trace.span(TRACK, f"evaluation {name}"):
            evaluation = asyncio.ensure_future(self._evaluate_held_out())
            interruption = asyncio.create_task(self._interrupted.wait())
            try:
                await asyncio.wait((evaluation, interruption), return_when=asyncio.FIRST_COMPLETED)
                if not evaluation.done():
                    return False
                results = evaluation.result()
            finally:
                interruption.cancel()
                evaluation.cancel()
                await asyncio.gather(evaluation, interruption, return_exceptions=True)
        self._log.log_evaluation(
            name,
            policy_version=self.loop.policy_version,
            results={task: result.trajectories for task, result in results.items()},
        )
        return True

    async def _probe(self, version: int) -> None:
        """Compare one short completion of the engine with the trainer before anything is played."""
        context = self._policy.chat.opening([Message(role="user", content="probe")], ())
        completion = await self._complete(
            context, sampling=SamplingParams(max_new_tokens=8, temperature=self._cadence.temperature)
        )
        sequence = probe_sequence(context, completion)
        found = drift(self._policy.learner.logprobs([sequence]), [sequence], version=version)
        require_agreement(found, tolerance=self._cadence.tolerance, version=version)

    async def _complete(self, context: Sequence[int], *, sampling: SamplingParams) -> Completion:
        """Ask the engine for the first completion, again where it dies over it."""
        attempts = PROBES
        while True:
            attempts -= 1
            try:
                return await self._policy.engine.generate(context, sampling=sampling, session_key="probe")
            except EngineError as error:
                if not attempts:
                    raise
                logger.warning("the engine gave no first completion (%s); it is asked again", error)
            finally:
                self._policy.engine.release("probe")

    def _elapsed(self) -> float:
        return self._seconds_before + time.monotonic() - self._started


def _leave_signals() -> None:
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)
