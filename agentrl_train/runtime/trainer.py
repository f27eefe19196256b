"""One training step, steps 5 to 8 of the path: groups -> advantages -> batches -> update -> publish.

This is where the pure steps meet; it also takes the measurements that a step's record holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from agentrl_train.advantage import Baseline, Scale, advantages
from agentrl_train.batch import Aggregation, pack, sequences
from agentrl_train.errors import BadUpdate, LearnerOutOfMemory, ran_out_of_memory
from agentrl_train.learner import Learner
from agentrl_train.runtime.disk import run_folder_errors, write_file
from agentrl_train.runtime.journal import encode_group, frame
from agentrl_train.types import UNTRACED, Batch, TokenSequence, Trace, TrajectoryGroup
from agentrl_train.weights import FLOAT32, Drift, Publisher, drift, require_agreement

logger = logging.getLogger(__name__)

TRACK = "trainer/steps"
"""Track of the trace that the parts of a step are on."""
OLDEST = 8
"""Ages that the histogram of staleness keeps apart; all beyond count as this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The choices between trajectories and an update."""

    baseline: Baseline = "mean"
    scale: Scale = "std"
    task_normalization: bool = True
    invalid_call_penalty: float = 0.0
    truncation_penalty: float = 0.0
    aggregation: Aggregation = "sequence_mean"
    minibatches: int = 1
    micro_batch_tokens: int = 8192
    constant_tokens: int | None = None
    """Denominator of the "constant" aggregation."""
    skip_zero_advantages: bool = True
    """Leave sequences without a signal out of the computation; they stay in the denominators."""
    tolerance: Drift = FLOAT32
    """Difference allowed between the engine's and the trainer's log-probabilities of the same tokens."""
    skip_bad_updates: bool = False
    """Leave out a step whose update would spoil the parameters, instead of ending the run."""
    seed: int = 0


class StepTrainer:
    """Trains on finished groups and publishes the result. Blocking: the loop calls it in a thread."""

    def __init__(
        self,
        *,
        learner: Learner,
        publisher: Publisher,
        recipe: Recipe,
        bad_batches: Path,
        inherited: Collection[int] = frozenset(),
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
        trace: Trace = UNTRACED,
    ) -> None:
        """Take what a step needs.

        ``bad_batches`` is the folder for the groups of updates that would have spoiled the parameters.
        ``inherited`` are the groups that a resumed run brings along: the versions they name may be of weights
        that were lost, so their log-probabilities cannot be compared. Within ``turn`` the learner has its
        devices, which it may share with the engine.
        """
        self.learner = learner
        self._publisher = publisher
        self._recipe = recipe
        self._bad_batches = bad_batches
        self._inherited = inherited
        self._turn = turn
        self._trace = trace
        self._checked_all = False

    def step(self, groups: Sequence[TrajectoryGroup], *, policy_version: int) -> dict[str, float]:
        """Make the update that leads from the weights in force to ``policy_version``, and publish it.

        Raises:
            WeightMismatch: the engine does not hold the weights it should.
            BadUpdate: it would spoil the parameters and was not made.
            LearnerOutOfMemory: a micro-batch does not fit beside the model.
            EngineError: the new weights could not be put in force.
        """
        span = partial(self._trace.span, TRACK)
        with span("advantages"):
            rows = sequences(groups, self._advantages(groups))
        with self._turn():
            found, metrics = self._learn_from(rows, groups, policy_version=policy_version)
        started, weights = time.perf_counter(), self.learner.weights()
        with span("publish", version=policy_version):
            self._publisher.publish(weights, policy_version=policy_version)
        return {
            **metrics,
            **staleness(groups, rows, version=policy_version - 1),
            "logprob_drift": found.worst,
            "logprob_drift_mean": found.mean,
            "canary_drift": self._publisher.drift.worst,
            "publish_seconds": time.perf_counter() - started,
            "publish_bytes": self._publish_bytes,
        }

    @cached_property
    def _publish_bytes(self) -> float:
        """Bytes of all weights, which stay as many: of a sharded model, reading them gathers them."""
        return float(sum(one.numel() * one.element_size() for one in self.learner.weights().values()))

    def _learn_from(
        self, rows: Sequence[TokenSequence], groups: Sequence[TrajectoryGroup], *, policy_version: int
    ) -> tuple[Drift, dict[str, float]]:
        """Make the update; return how far engine and trainer differed before it, and its metrics."""
        recipe, span = self._recipe, partial(self._trace.span, TRACK)
        with span("check") as told, self._memory(policy_version):
            found = self._check(rows, version=policy_version - 1)
            told["drift"] = found.worst
        with span("pack"):
            batches = pack(
                rows,
                aggregation=recipe.aggregation,
                max_tokens=recipe.micro_batch_tokens,
                num_minibatches=recipe.minibatches,
                seed=recipe.seed + policy_version,
                packed=self.learner.packs_rows,
                constant_tokens=recipe.constant_tokens,
                skip_zero_advantages=recipe.skip_zero_advantages,
            )
        # The learning rate follows steps: one with nothing to learn from, or left out, counts as well.
        due = self.learner.num_updates + recipe.minibatches
        with span("learn"), self._memory(policy_version):
            metrics = self._learn(batches, groups, step=policy_version)
        self.learner.num_updates = due
        return found, metrics

    def _learn(
        self, batches: Sequence[Batch], groups: Sequence[TrajectoryGroup], *, step: int
    ) -> dict[str, float]:
        if not batches:
            return {}
        try:
            return self.learner.step(batches)
        except BadUpdate as error:
            place = self._write_out(groups, step=step)
            if not self._recipe.skip_bad_updates:
                raise type(error)(f"{error} The groups of step {step} are in {place}.") from error
            logger.warning("%s The step is left out; its groups are in %s.", error, place)
            return {"skipped_steps": 1.0}

    @contextmanager
    def _memory(self, step: int) -> Iterator[None]:
        """Say which setting helps where memory runs out."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            raise LearnerOutOfMemory(
                f"step {step} does not fit into memory beside the model: lower train.micro_batch_tokens, "
                f"now {self._recipe.micro_batch_tokens}, and go on with --resume"
            ) from error

    def _write_out(self, groups: Sequence[TrajectoryGroup], *, step: int) -> Path:
        """Keep the groups of a bad update; ``journal.read_groups`` reads them."""
        place = self._bad_batches / f"step_{step:06d}.bin"
        with run_folder_errors(place.parent):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_file(place, b"".join(frame(encode_group(group)) for group in groups))
        return place

    def _advantages(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        return advantages(
            groups,
            baseline=self._recipe.baseline,
            scale=self._recipe.scale,
            task_normalization=self._recipe.task_normalization,
            invalid_call_penalty=self._recipe.invalid_call_penalty,
            truncation_penalty=self._recipe.truncation_penalty,
        )

    def _check(self, rows: Sequence[TokenSequence], *, version: int) -> Drift:
        """Compare log-probabilities, at the first step all of them; return how far off the freshest is."""
        own = [row for row in rows if row.group_id not in self._inherited]
        fresh = [(int((row.versions == version).sum()), row) for row in own]
        fresh = [(count, row) for count, row in fresh if count]
        if not fresh:
            return Drift()
        chosen = [row for _, row in sorted(fresh, key=lambda pair: -pair[0])]
        if self._checked_all:
            chosen = chosen[:1]
        self._checked_all = True
        ours = self.learner.logprobs(chosen)
        found = drift(ours, chosen, version=version)
        require_agreement(found, tolerance=self._recipe.tolerance, version=version)
        return drift(ours[:1], chosen[:1], version=version)


def staleness(
    groups: Sequence[TrajectoryGroup], rows: Sequence[TokenSequence], *, version: int
) -> dict[str, float]:
    """Return how old the groups and their tokens are, in policy versions, when trained at ``version``.

    ``tokens_of_age_0``, ``_1`` ... are a histogram: sampled tokens by the age of what sampled them.
    """
    ages = [version - group.admitted_version for group in groups]
    none = np.zeros(0, dtype=np.int64)
    token_ages = version - np.concatenate([none, *(row.versions[row.loss_mask > 0] for row in rows)])
    counts = np.bincount(token_ages.clip(0, OLDEST), minlength=1)
    return {
        "staleness_mean": float(np.mean(ages)) if ages else 0.0,
        "staleness_max": float(max(ages, default=0)),
        "token_staleness_mean": float(np.mean(token_ages)) if token_ages.size else 0.0,
        **{f"tokens_of_age_{age}": float(number) for age, number in enumerate(counts)},
    }


def by_task(groups: Sequence[TrajectoryGroup]) -> dict[str, Mapping[str, float]]:
    """Return per task what its episodes came to: success, reward, turns, invalid calls, tokens.

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
            "tokens": float(tokens := sum(t.num_sampled_tokens for t in played)),
            "token_share": tokens / max(1, total),
            "groups_with_signal": float(np.mean(signal)),
        }
    return tasks
