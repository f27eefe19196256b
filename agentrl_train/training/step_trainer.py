"""Steps 5 to 8 of 9: one training step, groups -> advantages -> batches -> update -> publish.

It connects the steps of the path and collects their metrics.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from agentrl_train.advantage import Values
from agentrl_train.algorithm import advantage_function, shaping_function
from agentrl_train.batch import pack, sequences, towards_teacher, without_high_covariance
from agentrl_train.config import AlgorithmSection
from agentrl_train.critics.trainer import CriticTrainer
from agentrl_train.errors import BadUpdate, LearnerOutOfMemory, ran_out_of_memory
from agentrl_train.learner import Learner
from agentrl_train.models.architecture import glibc
from agentrl_train.reward.scoring import cosine_rise
from agentrl_train.storage.atomic_io import run_folder_errors, write_file
from agentrl_train.storage.checkpoint import CRITIC, InFolder, Part
from agentrl_train.storage.journal import encode_group, frame
from agentrl_train.telemetry.metrics import mean_metrics
from agentrl_train.training.replay import Replay, join, read_replay
from agentrl_train.types import UNTRACED, Sleeper, Step, TokenSequence, Trace, TrajectoryGroup
from agentrl_train.weights import FOREIGN, Drift, DriftCheck, Publisher

logger = logging.getLogger(__name__)

TRACK = "trainer/steps"
"""Trace track of the parts of a step."""
OLDEST = 8
"""Largest age in the staleness histogram; older tokens count as this age."""
RETURN_INTERVAL_S = 20.0
"""Least time between two returns of freed memory to the kernel."""


class StepTrainer:
    """Trains on finished groups and publishes the weights. Blocking: runs in a thread."""

    def __init__(
        self,
        learner: Learner,
        publisher: Publisher,
        *,
        algorithm: AlgorithmSection | None = None,
        max_context: int = 2048,
        critic: CriticTrainer | None = None,
        check: DriftCheck | None = None,
        seed: int = 0,
        bad_batches: Path = Path("bad_batches"),
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
        trace: Trace = UNTRACED,
    ) -> None:
        """Initialize the trainer.

        A ``critic`` computes the advantages instead of ``algorithm``. ``check`` compares the engine with the
        learner before each update. ``bad_batches`` is the folder for the groups of rejected updates. ``turn``
        is the context in which the learner owns the devices that it can share with the engine.
        """
        self.learner = learner
        self.algorithm = algorithm or AlgorithmSection()
        self.replay = Replay()
        """Episodes that may be replayed; a checkpoint must keep them."""
        self.rows: Sequence[TokenSequence] = ()
        """Rows of the last step with their advantages, without replayed rows."""
        self._publisher = publisher
        self._critic = critic
        self._advantages = None if critic else advantage_function(self.algorithm, max_context=max_context)
        self._shaped = shaping_function(self.algorithm, max_context=max_context)
        self._max_context = max_context
        self._constant_tokens = self.algorithm.constant_tokens or max_context
        self._check = check or DriftCheck(learner.logprobs)
        self._seed = seed
        self._bad_batches = bad_batches
        self._freed = FreedMemory()
        self._turn = turn
        self._trace = trace

    def step(self, step: Step) -> dict[str, float]:
        """Apply the update of a step, publish the weights as its ``next_version``, and return metrics.

        Raises:
            WeightMismatch: the engine holds other weights.
            BadUpdate: the update was rejected.
            LearnerOutOfMemory: a micro-batch does not fit beside the model.
            EngineError: the new weights could not be loaded.
        """
        span, number = partial(self._trace.span, TRACK), step.next_version
        with self._turn():
            with span("advantages"), self._memory(number):
                rows, replayed, weight = self._rows(step.groups, step=number)
            rows, taught = self._taught(rows, step=number)
            self.rows = self._apply_clip_cov(rows, number, 0)
            found, metrics = self._learn_from(self.rows, step, replayed=replayed, weight=weight)
        metrics |= taught
        if self.algorithm.replay.weight:
            metrics |= {
                "replay_weight": weight,
                "replayed_sequences": float(len(replayed)),
                "replay_size": float(len(self.replay.episodes)),
            }
        self._freed.return_excess()
        started, weights = time.perf_counter(), self.learner.weights()
        with span("publish", version=number):
            self._publisher.publish(weights, policy_version=number)
        return {
            **metrics,
            **staleness(step.groups, rows, version=step.trained_version),
            "logprob_drift": found.worst,
            "logprob_drift_mean": found.mean,
            "canary_drift": self._publisher.drift.worst,
            "publish_seconds": time.perf_counter() - started,
            "publish_bytes": self._publish_bytes,
        }

    def snapshots(self) -> list[Part]:
        """Return copies of the state of learner, critic and replay buffer, for a checkpoint."""
        parts = [] if self._critic is None else self._critic.parts()
        return [self.learner.snapshot(), *(InFolder(part=part, name=CRITIC) for part in parts), self.replay]

    def load(self, folder: Path) -> None:
        """Restore the learner, the critic and the episodes to replay from a checkpoint."""
        self.learner.load(folder)
        self.replay = read_replay(folder)
        if self._critic is not None:
            self._critic.load(folder / CRITIC)

    def _rows(
        self, groups: Sequence[TrajectoryGroup], *, step: int
    ) -> tuple[list[TokenSequence], list[TokenSequence], float]:
        """Return the rows to train on, the rows of replayed episodes, and the loss weight of the latter."""
        if self._critic is not None:
            return self._critic.rows(groups), [], 0.0
        assert self._advantages is not None
        values = self._advantages(groups)
        return sequences(groups, values), *self._replay(groups, values, step=step)

    def _taught(
        self, rows: list[TokenSequence], *, step: int
    ) -> tuple[list[TokenSequence], dict[str, float]]:
        """Return rows with the advantages of their teachers, and the estimated KL(policy || teacher)."""
        section = self.algorithm.distill
        if not section.weight:
            return rows, {}
        taught, gaps = list(rows), defaultdict[str, list[np.ndarray]](list)
        teachers = {row.task: section.teacher_of(row.task) for row in rows}
        with self._trace.span(TRACK, "teachers"), self._memory(step):
            for name in sorted({one for one in teachers.values() if one is not None}):
                own = [i for i, row in enumerate(rows) if teachers[row.task] == name]
                for i, scores in zip(own, self.learner.logprobs([rows[i] for i in own], name), strict=True):
                    taught[i] = towards_teacher(
                        rows[i], scores, weight=section.weight, keep_rewards=section.keep_rewards
                    )
                    gaps[rows[i].task].append((rows[i].logprobs - scores)[rows[i].loss_mask > 0])
        by_task = {task: np.concatenate(parts) for task, parts in sorted(gaps.items())}
        means = {f"teacher_kl/{task}": float(one.mean()) for task, one in by_task.items()}
        everything = np.concatenate([np.zeros(0), *by_task.values()])
        return taught, {"teacher_kl": float(everything.mean()) if everything.size else 0.0, **means}

    def _apply_clip_cov(self, rows: list[TokenSequence], *seed: int) -> list[TokenSequence]:
        """Return the rows with the tokens that Clip-Cov draws excluded from the loss."""
        chosen = self.algorithm.clip_cov
        if chosen is None:
            return rows
        return without_high_covariance(
            rows, share=chosen.share, low=chosen.low, high=chosen.high, seed=(self._seed, *seed)
        )

    def _replay(
        self, groups: Sequence[TrajectoryGroup], values: Sequence[Sequence[Values | None]], *, step: int
    ) -> tuple[list[TokenSequence], float]:
        """Update the buffer; return the rows of the episodes to replay and the weight of their loss."""
        section = self.algorithm.replay
        if not section.weight:
            return [], 0.0
        returns = [self._shaped(group).returns for group in groups]
        buffer = self.replay.with_returns(groups, returns, length=section.history)
        weight = section.weight * cosine_rise(step - 1, section.warmup_steps)
        drawn, buffer = buffer.draw(
            step=step,
            count=section.episodes if weight else 0,
            max_age=section.max_age,
            quantile=section.quantile,
            seed=(self._seed, step, 1),
        )
        self.replay = buffer.with_episodes(groups, returns, values, step=step, size=section.size)
        again = [[np.full(len(group.trajectories[0].turns), value)] for group, value in drawn]
        return self._apply_clip_cov(sequences([group for group, _ in drawn], again), step, 2), weight

    @cached_property
    def _publish_bytes(self) -> float:
        """Size of all weights in bytes; cached, because reading a sharded model gathers it."""
        return float(sum(one.numel() * one.element_size() for one in self.learner.weights().values()))

    def _learn_from(
        self, rows: Sequence[TokenSequence], step: Step, *, replayed: Sequence[TokenSequence], weight: float
    ) -> tuple[Drift, dict[str, float]]:
        """Apply the update; return the drift measured before it, and its metrics."""
        algorithm, train, span = self.algorithm, self.learner.settings, partial(self._trace.span, TRACK)
        number = step.next_version
        with span("check") as facts, self._memory(number):
            found = self._check.check(rows, version=step.trained_version)
            facts["drift"] = found.worst
        with span("pack"):
            packed = partial(
                pack,
                aggregation=algorithm.aggregation.name,
                max_tokens=train.micro_batch_tokens,
                num_minibatches=train.minibatches,
                seed=self._seed + number,
                packed=self.learner.packs_rows,
                shared=self.learner.shares_prefixes,
                constant_tokens=self._constant_tokens,
                skip_zero_advantages=algorithm.kl.coefficient == 0 and algorithm.entropy_coefficient == 0,
                version=step.trained_version,
            )
            batches = packed(rows)
            if replayed:
                batches = join(batches, packed(replayed), weight=weight)
        # The learning rate depends on the number of steps, including steps without signal or skipped ones.
        # A resumed run can have another number of mini-batches than the steps before.
        due = number * train.minibatches
        self.learner.num_updates = due - train.minibatches
        metrics = {"loss_tokens": 0.0}
        if (critic := self._critic) is not None:
            with span("learn values"), self._memory(number):
                metrics |= self._learn(partial(critic.learn, step=number), step)
            if critic.alone(number):
                batches = []
                metrics["loss_tokens"] = metrics.get("critic_tokens", 0.0)
        with span("learn"), self._memory(number):
            if batches:
                metrics |= self._learn(partial(self.learner.step, batches), step)
        self.learner.num_updates = due
        return found, metrics

    def _learn(self, learn: Callable[[], dict[str, float]], step: Step) -> dict[str, float]:
        try:
            return learn()
        except BadUpdate as error:
            path = self._write_out(step)
            if self.learner.settings.on_bad_update == "stop":
                sentence = f"The groups of step {step.next_version} are in {path}."
                raise type(error)(f"{error} {sentence}") from error
            logger.warning("%s The step is skipped; its groups are in %s.", error, path)
            return {"skipped_steps": 1.0}

    @contextmanager
    def _memory(self, step: int) -> Iterator[None]:
        """Convert out-of-memory errors into ones that name the setting to change."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            raise LearnerOutOfMemory(
                f"step {step} does not fit into memory beside the model: lower train.micro_batch_tokens, "
                f"now {self.learner.settings.micro_batch_tokens}, then continue with --resume"
            ) from error

    def _write_out(self, step: Step) -> Path:
        """Write the groups of a bad update to disk; ``journal.read_groups`` reads them."""
        path = self._bad_batches / f"step_{step.next_version:06d}.bin"
        with run_folder_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, b"".join(frame(encode_group(group)) for group in step.groups))
        return path


def staleness(
    groups: Sequence[TrajectoryGroup], rows: Sequence[TokenSequence], *, version: int
) -> dict[str, float]:
    """Return the age of groups and tokens, in policy versions, when trained at ``version``.

    ``tokens_of_age_0``, ``_1`` ... are a histogram of sampled tokens by age. Tokens of
    ``rollout.stale.model`` have no age and are not counted.
    """
    ages = [version - group.admitted_version for group in groups]
    none = np.zeros(0, dtype=np.int64)
    versions = np.concatenate([none, *(row.versions[row.loss_mask > 0] for row in rows)])
    token_ages = version - versions[versions != FOREIGN]
    counts = np.bincount(token_ages.clip(0, OLDEST), minlength=1)
    return {
        "staleness_mean": float(np.mean(ages)) if ages else 0.0,
        "staleness_max": float(max(ages, default=0)),
        "token_staleness_mean": float(np.mean(token_ages)) if token_ages.size else 0.0,
        **{f"tokens_of_age_{age}": float(number) for age, number in enumerate(counts)},
    }


def by_task(groups: Sequence[TrajectoryGroup]) -> dict[str, Mapping[str, float]]:
    """Return per-task means of the episodes: success, reward, turns, valid calls, tokens, scores, metrics.

    ``token_share`` is the task's share of the tokens trained on.
    """
    tasks: dict[str, Mapping[str, float]] = {}
    total = sum(t.num_sampled_tokens for group in groups for t in group.trajectories)
    for task in sorted({group.task for group in groups}):
        played = [t for group in groups if group.task == task for t in group.trajectories]
        signal = [len({t.reward for t in group.trajectories}) > 1 for group in groups if group.task == task]
        turns = [turn for t in played for turn in t.turns]
        tasks[task] = {
            "episodes": float(len(played)),
            "success": float(np.mean([t.success for t in played])),
            "reward": float(np.mean([t.reward for t in played])),
            "turns": float(np.mean([len(t.turns) for t in played])),
            "valid_calls": float(np.mean([turn.invalid_calls == 0 for turn in turns])),
            "tolerant_calls": float(np.mean([turn.tolerant for turn in turns])),
            "tokens": float(tokens := sum(t.num_sampled_tokens for t in played)),
            "token_share": tokens / max(1, total),
            "groups_with_signal": float(np.mean(signal)),
            **{
                f"score.{name}": float(np.mean([t.scores[name] for t in played]))
                for name in sorted(set.intersection(*({*t.scores} for t in played)))
            },
            **{f"metric.{name}": value for name, value in mean_metrics(played).items()},
        }
    return tasks


@contextmanager
def engine_asleep(engine: Sleeper, *, release: Callable[[], None], trace: Trace) -> Iterator[None]:
    """Put a colocated engine to sleep for the block, so that the learner can use its devices.

    Args:
        engine: engine to put to sleep; after an error it stays asleep, because the run ends.
        release: releases unused device memory of the learner.
        trace: trace of the run.

    Raises:
        EngineError: the engine did not sleep or wake.
    """
    with trace.span(TRACK, "sleep"):
        engine.sleep()
    yield
    with trace.span(TRACK, "wake"):
        release()
        engine.wake()


class FreedMemory:
    """Returns memory that was freed to the kernel, after steps of a run.

    Allocations of changing sizes leave holes, so that a run would take more memory with every step. The step
    after a return takes about a second longer, so at least ``RETURN_INTERVAL_S`` pass between two. Other
    allocators are not changed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._returned_s = -math.inf

    def return_excess(self) -> None:
        """Return freed memory if it exceeds the memory in use."""
        libc, now = glibc(), self._clock()
        if libc is None or not hasattr(libc, "mallinfo2") or now < self._returned_s + RETURN_INTERVAL_S:
            return
        libc.mallinfo2.restype = _Mallinfo2
        sizes = libc.mallinfo2()
        if sizes.fordblks > sizes.uordblks + sizes.hblkhd:
            libc.malloc_trim(0)
            self._returned_s = now


class _Mallinfo2(ctypes.Structure):
    """The result of glibc's ``mallinfo2``, in bytes.

    In use are ``uordblks`` in arenas and ``hblkhd`` outside. ``fordblks`` are kept for reuse.
    """

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )
