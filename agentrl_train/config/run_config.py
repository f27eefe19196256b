"""The configuration of a run: its sections, and the constraints between them."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from agentrl_train.config.algorithm import AlgorithmSection, algorithm_notes, algorithm_problems
from agentrl_train.config.credit import CriticCredit
from agentrl_train.config.reward import RewardSection
from agentrl_train.config.rollout import RolloutSection, Stale
from agentrl_train.config.section import Section
from agentrl_train.config.sections import (
    SLACK_S,
    CheckpointSection,
    EngineSection,
    EnvironmentSection,
    EvalSection,
    MetricsSection,
    ModelSection,
    PlacementSection,
    RunSection,
    SftSection,
    TrainSection,
)
from agentrl_train.config.toml import dumps, flat, read_toml
from agentrl_train.config.toml import problems as table_problems
from agentrl_train.types import Sampling

FIXED = ("train.lora", "model.path", "model.revision")
"""Settings that must not change on resume, because they define a checkpoint's parameters and reference."""
CRITIC = "algorithm.credit.name"
"""Setting that must not select another critic on resume, because checkpoints hold the critic of the run."""
EVALUATED = ("model", "environments", "engine", "rollout", "eval")
"""Sections on which the results of an evaluation depend."""
CONTEXTS_FRACTION = 0.05
"""Share of a GPU for CUDA contexts and libraries, to which the limits of both processes do not apply."""


class RunConfig(Section):
    """The configuration of a run."""

    trains: ClassVar[bool] = True
    """False if the samples of the engine are not trained on."""

    run: RunSection
    model: ModelSection
    environments: tuple[EnvironmentSection, ...]
    placement: PlacementSection = PlacementSection()
    engine: EngineSection = EngineSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection = TrainSection()
    sft: SftSection = SftSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    metrics: MetricsSection = MetricsSection()

    @model_validator(mode="before")
    @classmethod
    def _one_thread(cls, table: Any) -> Any:
        """Set one thread for a deterministic run without a number of threads."""
        if not isinstance(table, dict):
            return table
        run, engine = table.get("run"), table.get("engine")
        if not (isinstance(run, dict) and isinstance(engine, dict) and engine.get("deterministic") is True):
            return table
        return {**table, "run": {"threads": 1, **run}}

    @property
    def run_folder(self) -> Path:
        """Return the folder of this run, ``<run.folder>/<run.name>``."""
        return self.run.path

    @property
    def critic(self) -> CriticCredit | None:
        """Return the settings of the critic, if there is one. Its warm-up is shorter than the run."""
        critic = self.algorithm.critic
        if critic is None:
            return None
        return critic.model_copy(update={"warmup_steps": min(critic.warmup_steps, self.run.steps - 1)})

    @property
    def warmup_steps(self) -> int:
        """Return the number of warm-up steps, at most one less than the steps of the run."""
        return min(self.train.warmup_steps, self.run.steps - 1)

    @property
    def notes(self) -> list[str]:
        """Return sentences about the settings that are printed when the run starts."""
        steps = [("train", self.warmup_steps, self.train.warmup_steps)]
        if (critic := self.critic) is not None and (given := self.algorithm.critic) is not None:
            steps.append(("algorithm.credit", critic.warmup_steps, given.warmup_steps))
        shortened = [
            f"{section}.warmup_steps is {used} instead of {given}: the run has run.steps = {self.run.steps}"
            for section, used, given in steps
            if used != given
        ]
        return shortened + algorithm_notes(self)

    @property
    def stall_timeout_s(self) -> float:
        """Return the longest time without a finished group: one episode with all its retries and waits.

        An attempt opens a session, plays until its limit, and ends the turn in progress. A full server has a
        free session once another episode has ended.
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
        stale = self.rollout.stale.fraction > 0
        evaluation = self.eval.concurrent is not None and self.eval.samples > 0
        return ("current", *["stale"] * stale, *["evaluation"] * evaluation)

    @property
    def sessions(self) -> dict[str, int]:
        """Return the number of concurrent episodes of each sampling policy."""
        most = self.engine.max_sessions
        concurrent = self.eval.concurrent
        evaluation = (concurrent and concurrent.max_sessions) or math.ceil(most / 4)
        return {policy: evaluation if policy == "evaluation" else most for policy in self.policies}

    @property
    def without_training(self) -> Self:
        """Return the configuration of an evaluation without a run, which needs only the current policy."""
        return self.model_copy(
            update={
                "rollout": self.rollout.model_copy(update={"stale": Stale(), "alternatives": 0}),
                "eval": self.eval.model_copy(update={"concurrent": None}),
            }
        )

    @property
    def evaluation_sampling(self) -> Sampling:
        """Return the sampling of evaluations."""
        sampling = self.engine.sampling
        return sampling if self.eval.temperature is None else sampling.at(self.eval.temperature)

    def evaluation_digest(self, path: str) -> str:
        """Return a digest of the settings of an evaluation, and of the files of the model in ``path``."""
        settings = self.model_dump(mode="json", include=set(EVALUATED))
        files = sorted(Path(path).glob("*")) if Path(path).is_dir() else []
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return hashlib.sha256(json.dumps([settings, path, stats]).encode()).hexdigest()[:8]

    @property
    def learner_memory_fraction(self) -> float | None:
        """Return the share of a GPU's memory that a learner process can fill, or None for no limit."""
        if self.placement.layout != "shared" or self.engine.device != "cuda" or self.engine.kind != "vllm":
            return None
        return 1.0 - self.engine.vllm.memory_fraction - CONTEXTS_FRACTION

    @property
    def replicas(self) -> dict[str, int]:
        """Return the number of engines of each sampling policy."""
        vllm, stale = self.engine.vllm, self.rollout.stale.fraction
        share = math.ceil(vllm.replicas * stale / (1.0 - stale)) if stale < 1.0 else vllm.replicas
        chosen = {
            "current": vllm.replicas,
            "stale": min(share, vllm.replicas),
            "evaluation": 1,
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
            f"environments.{number}.program.eval_samples is missing: give held-out samples, or set "
            "eval.samples = 0"
            for number, one in enumerate(self.environments)
            if self.eval.samples and one.program and one.program.samples and not one.program.eval_samples
        ]
        rollout = self.rollout
        found += algorithm_problems(self)
        if self.trains and self.engine.temperature == 0.0:
            found.append(
                "engine.temperature = 0 makes all siblings of a group equal, which gives no learning signal: "
                "use a temperature above 0; eval.temperature = 0 evaluates greedily"
            )
        if (share := self.learner_memory_fraction) is not None and share < CONTEXTS_FRACTION:
            found.append(
                f"engine.vllm.args.gpu_memory_utilization = {self.engine.vllm.memory_fraction:g} leaves "
                "nothing of a GPU that placement.layout = 'shared' also gives to the learner: set it to "
                "0.5, for example"
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
        if self.engine.deterministic and self.run.threads != 1:
            found.append(
                "engine.deterministic needs one thread, because sums of several threads depend on how they "
                f"share the cores: set run.threads to 1, not {self.run.threads}"
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
        return found

    def _problems_of_concurrent_evaluation(self) -> list[str]:
        found = []
        if self.sessions["evaluation"] >= self.engine.max_sessions:
            found.append(
                "eval.concurrent.max_sessions leaves no session to training: set it below "
                f"engine.max_sessions, {self.engine.max_sessions}, or eval.concurrent = false"
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
        return dumps(self.model_dump(mode="json", exclude_none=True))

    def changes_since(self, path: Path) -> dict[str, tuple[Any, Any]]:
        """Return setting -> (old, new) for settings that differ from the configuration in a file.

        Settings that did not exist when the file was written count as defaults. If the file has former
        spellings, only common settings and settings that must not change are compared.
        """
        table = read_toml(path) if path.exists() else {}
        if not table:
            return {}
        former = table_problems(table, RunConfig)
        if not former:
            table = RunConfig.model_validate(table).model_dump(mode="json", exclude_none=True)
        before, now = flat(table), flat(self.model_dump(mode="json", exclude_none=True))
        names = [name for name in before | now if before.get(name) != now.get(name)]
        if former:
            names = [name for name in names if (name in before and name in now) or name.startswith(FIXED)]
        return {name: (before.get(name, "not set"), now.get(name, "not set")) for name in names}


class GatewayConfig(RunConfig):
    """The configuration of a gateway without a run. It can answer greedily."""

    trains = False
