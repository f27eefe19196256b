"""The configuration of a run: one TOML file, one section a step, nothing unknown accepted.

``load_config(path, overrides)`` reads the file, applies ``--set section.key=value`` overrides, checks
everything and names all problems in one ``ConfigError``. What a run reads (model, environments) is relative
to the configuration file; what it writes (``run.folder``) is relative to the working directory. A loaded
configuration holds absolute paths, so ``to_toml()`` in a run folder can be loaded from anywhere.

This module imports neither torch nor anything that does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl_train.errors import ConfigError
from agentrl_train.runtime.engine_config import EngineSection
from agentrl_train.runtime.placement_config import PlacementSection
from agentrl_train.runtime.section import Count, CountOrOff, Fraction, NonNegative, Positive, Section
from agentrl_train.runtime.toml import apply_override, dump_toml, problems, read_toml


class RunSection(Section):
    """How long, where to, and with which seed."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the folder inside ``folder``; letters, digits, ``.``, ``_`` and ``-``."""
    steps: Count
    """Optimizer batches to train."""
    folder: str = "runs"
    """Where run folders are made; relative to the working directory."""
    seed: CountOrOff = 0
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
    eval_split: str = "test"

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


class AdvantageSection(Section):
    """How rewards become advantages."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What a trajectory is compared with: its group, the others of its group, or nothing."""
    scale: Literal["std", "none"] = "std"
    task_normalization: bool = True
    """Bring the advantages of each task to one scale (AgentRL)."""
    invalid_call_penalty: NonNegative = 0.0
    """Taken off the reward once when any tool call of the episode was invalid."""
    truncation_penalty: NonNegative = 0.0
    """Taken off the reward once when a limit ended the episode."""


class LoraSection(Section):
    """Adapters that are trained in place of the model (``[train.lora]``)."""

    rank: Count
    alpha: Positive
    """Scale of what the adapters add, times ``rank``."""
    targets: tuple[str, ...] = ()
    """Names of linear layers that get one, such as "q_proj"; left out, all but the head."""


class TrainSection(Section):
    """The optimizer and the loss."""

    learning_rate: Positive = 1e-5
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    weight_decay: NonNegative = 0.0
    warmup_steps: CountOrOff = 0
    final_lr_fraction: Fraction = 1.0
    """The learning rate falls linearly to this share of itself over the run."""
    max_grad_norm: Positive = 1.0
    minibatches: Count = 1
    """Optimizer steps that one batch is split into."""
    aggregation: Literal["token_mean", "sequence_mean", "group_mean", "task_mean", "constant"] = (
        "sequence_mean"
    )
    """What shares the loss equally: tokens, sequences, groups, tasks, or a constant number of tokens."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    clip_high: Positive = 0.28
    dual_clip: NonNegative = 3.0
    """Bound on the ratio of tokens with a negative advantage; 0 is off."""
    micro_batch_tokens: Count = 8192
    """Tokens that go through the model together."""
    precision: Literal["float32", "bfloat16"] = "float32"
    kl_coef: NonNegative = 0.0
    """Weight of the divergence from the starting policy; 0 is off."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it computed."""
    attention: Literal["sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """PyTorch's attention, or flash-attn where it is installed (CUDA): rows without padding or mask."""
    offload_optimizer: bool = False
    """Keep the optimizer's moments, and a copy of the parameters that it updates, in host memory."""
    lora: LoraSection | None = None
    """Train adapters instead of the whole model; left out, it is off."""
    processes: Count = 1
    """Processes on this machine that share the learner, started by ``agentrl-train run`` itself."""
    sequence_parallel: Count = 1
    """Ranks that share each row of tokens, for long contexts; divides the processes and attention heads."""
    rank_seconds: Positive = 600.0
    """Longest that one process of the learner waits for another."""
    on_bad_update: Literal["stop", "skip"] = "stop"
    """What happens to a step whose loss or gradient is no number, or spikes; its groups are written out."""
    spike_factor: NonNegative = 0.0
    """A gradient norm over this many times the median of the last 50 makes a bad update; 0 is off."""
    step_seconds: Positive = 3600.0
    """Deadline of one training step, its publishing included."""

    def problems(self) -> list[str]:
        """Return what is wrong between the fields of this section, one sentence each."""
        found = []
        if 0.0 < self.dual_clip <= 1.0 + self.clip_high:
            found.append(
                f"dual_clip ({self.dual_clip}) must be above 1 + clip_high "
                f"({1.0 + self.clip_high:g}), or 0 to leave it out"
            )
        if 1.0 in self.betas:
            found.append("betas must be below 1, or the optimizer never forgets")
        return found


class SftSection(Section):
    """The warm start on expert traces (``agentrl-train sft``)."""

    traces: Count = 1000
    """Expert episodes of each task."""
    steps: Count = 500
    batch_size: Count = 16
    """Episodes of one optimizer step."""
    learning_rate: Positive = 1e-5
    weight_decay: NonNegative = 0.01
    warmup_steps: CountOrOff = 20
    decay_fraction: Fraction = 0.4
    """The learning rate falls over this last share of the steps."""


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
    trajectories: CountOrOff = 4
    """Trajectories written out readably each step."""
    trace: bool = True
    """Write ``trace.json``: what happened when, for https://ui.perfetto.dev."""
    trace_megabytes: Annotated[float, Field(ge=1.0)] = 64.0
    """Most that the trace takes; of a longer run the newest half or more is kept."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Serve the numbers to Prometheus at this port; 0 takes a free one. Left out, it is off."""
    prometheus_host: str = "127.0.0.1"
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


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file, apply ``section.key=value`` overrides and check everything.

    Raises ``ConfigError`` with all problems in one message.
    """
    path = Path(path)
    table = read_toml(path)
    for override in overrides:
        apply_override(table, override)
    missing = _resolve_paths(table, path.resolve().parent)
    if found := [*problems(table, RunConfig), *missing]:
        lines = "\n".join(f"  - {problem}" for problem in found)
        raise ConfigError(f"{path} cannot be used; please correct:\n{lines}")
    return RunConfig.model_validate(table)


def _resolve_paths(table: dict[str, Any], base: Path) -> list[str]:
    """Make the paths of a raw table absolute and return what is not there; odd types are left alone."""
    problems = []
    run, model, environments = (table.get(key) for key in ("run", "model", "environments"))
    engine = table.get("engine")
    vllm = engine.get("vllm") if isinstance(engine, dict) else None
    if isinstance(vllm, dict) and isinstance(vllm.get("python"), str):
        vllm["python"] = str((base / Path(vllm["python"]).expanduser()).absolute())
    if isinstance(run, dict):
        folder = run.get("folder", "runs")
        if isinstance(folder, str):
            run["folder"] = str(Path(folder).expanduser().absolute())
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        model["path"], problem = _resolve_model(model["path"], base)
        problems += problem
    for number, section in enumerate(environments if isinstance(environments, list) else ()):
        targets = section.get("serve") if isinstance(section, dict) else None
        if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
            resolved = [_resolve_target(target, base) for target in targets]
            section["serve"] = [target for target, _ in resolved]
            problems += [
                f"environments.{number}.serve: there is no {file}"
                for _, file in resolved
                if file is not None and not file.exists()
            ]
    return problems


def _resolve_model(path: str, base: Path) -> tuple[str, list[str]]:
    """Return a model's absolute path, or a hub name (``org/name`` that is no folder here) as it is."""
    folder = (base / Path(path).expanduser()).absolute()
    if folder.exists():
        return str(folder.resolve()), []
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        return path, []
    return str(folder), [f"model.path: there is no folder {folder}; give a Hugging Face model folder"]


def _resolve_target(target: str, base: Path) -> tuple[str, Path | None]:
    """Return a target with its path made absolute, and that path; a ``module:Class`` has none."""
    place, colon, name = target.rpartition(":") if ":" in target else (target, "", "")
    if colon and not place.endswith(".py") and "/" not in place:
        return target, None
    path = (base / Path(place).expanduser()).resolve()
    return f"{path}{colon}{name}", path
