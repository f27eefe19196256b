"""The configuration of a run: its sections, and the constraints between them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Self

from agentrl_train.config.algorithm import AlgorithmSection, algorithm_problems
from agentrl_train.config.objectives import DistillSection, ReplaySection, RewardSection
from agentrl_train.config.section import Section
from agentrl_train.config.sections import (
    SLACK_S,
    CheckpointSection,
    CriticSection,
    CurriculumSection,
    EngineSection,
    EnvironmentSection,
    EvalSection,
    MetricsSection,
    ModelSection,
    PlacementSection,
    RolloutSection,
    RunSection,
    SftSection,
    TrainSection,
)
from agentrl_train.config.toml import dump_toml, flat, read_toml
from agentrl_train.config.toml import problems as table_problems
from agentrl_train.types import Sampling

CONTEXTS_FRACTION = 0.05
"""Share of a GPU for CUDA contexts and libraries, which are outside the limits of both processes."""


class RunConfig(Section):
    """The configuration of a run."""

    run: RunSection
    model: ModelSection
    environments: tuple[EnvironmentSection, ...]
    placement: PlacementSection = PlacementSection()
    engine: EngineSection = EngineSection()
    rollout: RolloutSection = RolloutSection()
    curriculum: CurriculumSection = CurriculumSection()
    reward: RewardSection = RewardSection()
    replay: ReplaySection = ReplaySection()
    distill: DistillSection = DistillSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    critic: CriticSection | None = None
    train: TrainSection = TrainSection()
    sft: SftSection = SftSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    metrics: MetricsSection = MetricsSection()

    @property
    def run_folder(self) -> Path:
        """Return the folder of this run, ``<run.folder>/<run.name>``."""
        return self.run.path

    @property
    def stall_timeout_s(self) -> float:
        """Return the longest time without a finished group: one episode with all its retries and waits.

        An attempt opens a session, plays until its limit, and ends the turn in progress. A full server has
        one free once another episode has ended.
        """
        rollout, engine = self.rollout, self.engine
        episode_s = rollout.episode_limit_s(max_context=engine.max_context)
        sampled_s = (1 + rollout.alternatives) * engine.completion_deadline_s
        turn_s = sampled_s + rollout.environment_timeout_s
        attempt_s = 2 * rollout.environment_timeout_s + episode_s + turn_s
        waits_s = episode_s + rollout.environment_wait_timeout_s
        if self.reward.functions:
            waits_s += self.reward.timeout_s
        return (rollout.environment_retries + 1) * attempt_s + waits_s + SLACK_S

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the names of the sampling policies."""
        stale, evaluation = self.rollout.stale_fraction > 0, self.eval.concurrent and self.eval.samples > 0
        return ("current", *["stale"] * stale, *["evaluation"] * evaluation)

    @property
    def sessions(self) -> dict[str, int]:
        """Return the number of concurrent episodes of each sampling policy."""
        most = self.engine.max_sessions
        evaluation = self.eval.max_sessions or math.ceil(most / 4)
        return {policy: evaluation if policy == "evaluation" else most for policy in self.policies}

    @property
    def without_training(self) -> Self:
        """Return the configuration of an evaluation by itself, which needs the current policy only."""
        alone = {"concurrent": False, "max_sessions": None}
        return self.model_copy(
            update={
                "rollout": self.rollout.model_copy(update={"stale_fraction": 0.0, "alternatives": 0}),
                "eval": self.eval.model_copy(update=alone),
            }
        )

    @property
    def evaluation_sampling(self) -> Sampling:
        """Return the sampling of evaluations."""
        sampling = self.engine.sampling
        return sampling if self.eval.temperature is None else sampling.at(self.eval.temperature)

    @property
    def learner_memory_fraction(self) -> float | None:
        """Return the share of a GPU's memory that a learner process may fill; None if it has no limit."""
        if self.placement.layout != "shared" or self.engine.device != "cuda" or self.engine.kind != "vllm":
            return None
        return 1.0 - self.engine.vllm.memory_fraction - CONTEXTS_FRACTION

    @property
    def replicas(self) -> dict[str, int]:
        """Return the number of engines of each sampling policy."""
        vllm, stale = self.engine.vllm, self.rollout.stale_fraction
        share = math.ceil(vllm.replicas * stale / (1.0 - stale)) if stale < 1.0 else vllm.replicas
        chosen = {
            "current": vllm.replicas,
            "stale": vllm.stale_replicas or min(share, vllm.replicas),
            "evaluation": vllm.evaluation_replicas,
        }
        return {policy: chosen[policy] for policy in self.policies}

    def problems(self) -> list[str]:
        """Return violated constraints between sections, one sentence each."""
        found = self.placement.problems_with(
            device=self.engine.device,
            processes=self.train.processes,
            max_staleness=self.rollout.max_staleness,
            transfer=self.engine.vllm.transfer,
        )
        if not self.environments:
            found.append("environments is empty: give at least one [[environments]] table")
        found += [
            f"environments.{number}.eval_samples is missing: give held-out samples, or set eval.samples = 0"
            for number, one in enumerate(self.environments)
            if one.samples is not None and one.eval_samples is None and self.eval.samples
        ]
        rollout = self.rollout
        found += algorithm_problems(self)
        if self.engine.temperature == 0.0:
            found.append(
                "engine.temperature = 0 makes all siblings of a group equal, which gives no learning signal: "
                "use a temperature above 0; eval.temperature = 0 evaluates greedily"
            )
        if (share := self.learner_memory_fraction) is not None and share < CONTEXTS_FRACTION:
            found.append(
                f"engine.vllm.memory_fraction = {self.engine.vllm.memory_fraction:g} leaves nothing of a GPU "
                "that placement.layout = 'shared' gives to the learner as well: set it to 0.5, for example"
            )
        if self.model.dtype == "bfloat16" and self.train.lora is None:
            found.append(
                "model.dtype = 'bfloat16' rounds small updates of trained parameters away: train adapters "
                "(train.lora), or set it to 'float32'"
            )
        if self.engine.deterministic and rollout.max_staleness > 0:
            found.append(
                "engine.deterministic needs a synchronous run: set rollout.max_staleness to 0, not "
                f"{rollout.max_staleness}"
            )
        if rollout.stale_model is not None and not rollout.stale_fraction:
            found.append(
                "rollout.stale_model samples nothing with rollout.stale_fraction = 0: set that to its share "
                "of the turns, such as 0.25"
            )
        if self.engine.deterministic and rollout.stale_fraction > 0 and rollout.stale_model is None:
            found.append(
                "engine.deterministic excludes the stale policy, whose weights are not in checkpoints: set "
                "rollout.stale_fraction to 0"
            )
        if self.train.sequence_parallel > 1 and self.model.attention != "sdpa":
            found.append(
                f"model.attention = {self.model.attention!r} has no effect with train.sequence_parallel = "
                f"{self.train.sequence_parallel}, which uses PyTorch's attention: set it to 'sdpa'"
            )
        if "evaluation" in self.policies:
            found += self._problems_of_concurrent_evaluation()
        episodes = rollout.groups_per_step * rollout.group_size
        if self.train.minibatches > episodes:
            found.append(
                f"train.minibatches ({self.train.minibatches}) is more than the {episodes} episodes of a step"
            )
        if self.train.warmup_steps >= self.run.steps > 1:
            found.append(
                f"train.warmup_steps ({self.train.warmup_steps}) must be below run.steps "
                f"({self.run.steps}) to reach the learning rate"
            )
        return found

    def _problems_of_concurrent_evaluation(self) -> list[str]:
        found = []
        if self.sessions["evaluation"] >= self.engine.max_sessions:
            found.append(
                f"eval.max_sessions leaves no session to training: set it below engine.max_sessions, "
                f"{self.engine.max_sessions}, or eval.concurrent = false"
            )
        if self.placement.layout == "colocated":
            found.append(
                "eval.concurrent needs engines that are never asleep: set placement.layout = 'separated', or "
                "eval.concurrent = false"
            )
        if self.engine.vllm.transfer != "memory":
            found.append(
                "eval.concurrent reads weights from checkpoints: set engine.vllm.transfer = 'memory', or "
                "eval.concurrent = false"
            )
        return found

    def to_toml(self) -> str:
        """Return the whole configuration as TOML, defaults included."""
        return dump_toml(self.model_dump(mode="json", exclude_none=True))

    def changes_since(self, path: Path) -> dict[str, tuple[Any, Any]]:
        """Return setting -> (old, new) for settings that differ from the configuration in a file.

        Settings that did not exist yet when the file was written had their defaults.
        """
        table = read_toml(path) if path.exists() else {}
        if not table_problems(table, RunConfig):
            table = RunConfig.model_validate(table).model_dump(mode="json", exclude_none=True)
        before, now = flat(table), flat(self.model_dump(mode="json", exclude_none=True))
        differing = [name for name in before | now if before.get(name) != now.get(name)] if before else []
        return {name: (before.get(name, "not set"), now.get(name, "not set")) for name in differing}
