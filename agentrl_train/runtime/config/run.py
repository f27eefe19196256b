"""Everything a run is told, section by section."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from agentrl_train.runtime.config.engine import EngineSection
from agentrl_train.runtime.config.placement import PlacementSection
from agentrl_train.runtime.config.section import Count, CountOrOff, Fraction, NonNegative, Positive, Section
from agentrl_train.runtime.config.toml import dump_toml
from agentrl_train.runtime.config.train import AdvantageSection, SftSection, TrainSection


class RunSection(Section):
    """How long, where to, and with which seed."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the folder inside ``folder``; letters, digits, ``.``, ``_`` and ``-``."""
    steps: Count
    """Optimizer batches to train."""
    folder: str = "runs"
    """Where run folders are made; relative to the working directory."""
    seed: CountOrOff = 0
    """Of all that is drawn: samples, tokens, their order."""
    minutes: Positive | None = None
    """Stop cleanly after this long, whatever the number of steps."""
    threads: Count | None = None
    """Threads of PyTorch's CPU operations; left out, PyTorch decides."""
    quiet_seconds: Positive = 60.0
    """Time without any movement after which the table of slots is printed."""


class ModelSection(Section):
    """Which policy is trained."""

    path: Annotated[str, Field(min_length=1)]
    """A Hugging Face model folder, or the name of a model on the hub (``org/name``)."""


class EnvironmentSection(Section):
    """Environments of one server: started here (``serve``) or running already (``url``)."""

    serve: tuple[str, ...] = ()
    """Targets to serve from a process of our own: folders, ``file.py:Class`` or ``module:Class``."""
    url: str | None = None
    """Address of a server or controller that runs already."""
    token_env: str | None = None
    """Name of the environment variable that holds the server's token."""
    tasks: dict[str, Positive] = Field(default_factory=dict)
    """Weight of each task; left out, all tasks of the server weigh the same."""
    split: str = "train"
    """What is trained on."""
    eval_split: str = "test"
    """What the policy is judged on."""

    def problems(self) -> list[str]:
        """Return what is wrong between the fields of this section, one sentence each."""
        found = []
        if bool(self.serve) == (self.url is not None):
            found.append("give either serve (targets to start) or url (a running server)")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            found.append(f"url must start with http:// or https://, not {self.url!r}")
        return found


class RolloutSection(Section):
    """How many episodes, and how old they may be when they are trained on."""

    groups_per_step: Count = 8
    """Groups in one optimizer batch, P."""
    group_size: Count = 8
    """Sibling episodes of one sample."""
    balance: Literal["tokens", "groups"] = "tokens"
    """What the weights of tasks share out: tokens trained on, as counted until a checkpoint, or groups."""
    max_staleness: CountOrOff = 1
    """S: (S + 1) P groups may be under way; 0 is synchronous."""
    window: Count = 1
    """W: how far past strict first-in-first-out the trainer may look, in groups; 1 is strict order."""
    episode_seconds: Positive = 120.0
    """Deadline of one episode."""
    environment_retries: CountOrOff = 2
    """Fresh sessions tried after an infrastructure failure before the group is dropped."""
    environment_patience_seconds: NonNegative = 60.0
    """How long an environment may be out of reach before that counts as such a failure."""
    stale_fraction: Fraction = 0.0
    """Cross-policy sampling: probability that a turn is sampled by the stale policy; 0 is off."""
    stale_interval: Count = 10
    """Steps between two refreshes of the stale policy."""

    @property
    def staleness_bound(self) -> int:
        """Most steps between a group's admission and its training: ``S + ceil((W - 1) / P)``."""
        window = min(self.window, self.max_staleness * self.groups_per_step + 1)
        return self.max_staleness + math.ceil((window - 1) / self.groups_per_step)

    def problems(self) -> list[str]:
        """Return what is wrong between the fields of this section, one sentence each."""
        most = self.max_staleness * self.groups_per_step + 1
        if self.max_staleness > 0 and self.window > most:
            return [
                f"window ({self.window}) can be at most max_staleness * groups_per_step + 1 = "
                f"{most}, because no more groups are under way"
            ]
        return []


class CheckpointSection(Section):
    """How often the run is saved."""

    every: Count = 10
    """Steps between two checkpoints."""
    keep: Count = 2
    """Newest checkpoints kept."""
    seconds: Positive = 1800.0
    """Deadline of writing one."""


class EvalSection(Section):
    """Held-out evaluation at the start and the end."""

    samples: CountOrOff = 200
    """Held-out samples a task; 0 is off."""
    attempts: Count = 1
    """Episodes a sample; more than one gives pass@k."""
    every: CountOrOff = 0
    """Steps between two evaluations; 0 is only at the start and the end."""


class MetricsSection(Section):
    """What is written beside ``metrics.jsonl``."""

    tensorboard: bool = True
    """Write ``tensorboard/``."""
    trajectories: CountOrOff = 4
    """Trajectories written out readably each step."""
    trace: bool = True
    """Write ``trace.json``: what happened when, for https://ui.perfetto.dev."""
    trace_megabytes: Annotated[float, Field(ge=1.0)] = 64.0
    """Most that the trace takes; of a longer run the newest half or more is kept."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Serve the numbers to Prometheus at this port; 0 takes a free one. Left out, it is off."""
    prometheus_host: str = "127.0.0.1"
    """Where Prometheus may ask from."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Project of Weights & Biases that the numbers are sent to (extra ``[wandb]``). Left out, it is off."""


class RunConfig(Section):
    """Everything a run is told."""

    run: RunSection
    model: ModelSection
    environments: tuple[EnvironmentSection, ...]
    placement: PlacementSection = PlacementSection()
    engine: EngineSection = EngineSection()
    rollout: RolloutSection = RolloutSection()
    advantage: AdvantageSection = AdvantageSection()
    train: TrainSection = TrainSection()
    sft: SftSection = SftSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    metrics: MetricsSection = MetricsSection()

    @property
    def run_folder(self) -> Path:
        """Return the folder of this run, ``<run.folder>/<run.name>``."""
        return Path(self.run.folder) / self.run.name

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the names of the policies that act."""
        return ("current", "stale") if self.rollout.stale_fraction > 0 else ("current",)

    @property
    def engine_gpus(self) -> int:
        """Return how many GPUs the engine takes, where it runs on GPUs."""
        vllm = self.engine.vllm
        return 1 if self.engine.kind == "torch" else len(self.policies) * vllm.replicas * vllm.tensor_parallel

    def problems(self) -> list[str]:
        """Return what is wrong between sections, one sentence each."""
        found = self.placement.problems_with(
            device=self.engine.device,
            processes=self.train.processes,
            max_staleness=self.rollout.max_staleness,
            transfer=self.engine.vllm.transfer,
            engine_gpus=self.engine_gpus,
        )
        if not self.environments:
            found.append("environments is empty: give at least one [[environments]] table")
        rollout, advantage = self.rollout, self.advantage
        if rollout.group_size == 1 and advantage.baseline != "none":
            found.append(
                f"advantage.baseline = {advantage.baseline!r} compares siblings, but "
                "rollout.group_size is 1: use a larger group or baseline = 'none'"
            )
        if rollout.group_size == 1 and advantage.scale != "none":
            found.append(
                "advantage.scale = 'std' needs the spread of siblings, but rollout.group_size "
                "is 1: use a larger group or scale = 'none'"
            )
        if self.engine.temperature == 0.0:
            found.append(
                "engine.temperature = 0 makes all siblings of a group equal, so nothing can be "
                "learned: use a temperature above 0"
            )
        if self.engine.deterministic and rollout.max_staleness > 0:
            found.append(
                "engine.deterministic repeats synchronous runs, and with rollout.max_staleness = "
                f"{rollout.max_staleness} the time decides what is trained when: set it to 0"
            )
        if self.engine.deterministic and rollout.stale_fraction > 0:
            found.append(
                "engine.deterministic repeats resumed runs too, and no checkpoint holds the stale policy's "
                "weights: set rollout.stale_fraction to 0"
            )
        episodes = rollout.groups_per_step * rollout.group_size
        if self.train.minibatches > episodes:
            found.append(
                f"train.minibatches ({self.train.minibatches}) is more than the {episodes} episodes of a step"
            )
        if self.train.warmup_steps >= self.run.steps > 1:
            found.append(
                f"train.warmup_steps ({self.train.warmup_steps}) must be below run.steps "
                f"({self.run.steps}), or the learning rate is never reached"
            )
        return found

    def to_toml(self) -> str:
        """Return the whole configuration as TOML, defaults included."""
        return dump_toml(self.model_dump(mode="json", exclude_none=True))
