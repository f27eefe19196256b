"""Sections of the configuration file as frozen pydantic models."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl_train.config.section import Count, CountOrOff, Fraction, NonNegative, Positive, Section
from agentrl_train.types import Sampling

SLOWEST_TOKENS_PER_S = 5.0
"""Speed of one session below which an engine is not useful; default time limits follow from it."""
SLACK_S = 60.0
"""Added to default time limits."""


class VllmSection(Section):
    """Options of ``engine.kind = "vllm"``."""

    python: str | None = None
    """Python interpreter with vLLM for the engine processes; left out, the trainer's own."""
    replicas: Count = 1
    """Engines of the current policy."""
    stale_replicas: Count | None = None
    """Engines of the stale policy; left out, as many as its share of the turns needs, at least one."""
    evaluation_replicas: Count = 1
    """Engines that hold the weights of a concurrent evaluation (``eval.concurrent``)."""
    push: Literal["in_flight", "drained"] = "in_flight"
    """Update weights in the middle of completions, or after active ones have finished."""
    transfer: Literal["memory", "nccl"] = "memory"
    """Weight transfer: through shared memory, or GPU to GPU by vLLM's NCCL transfer."""
    kv_gib: Positive | None = None
    """KV cache of each engine in GiB; left out, 1 on a CPU and the free memory on a GPU."""
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of a GPU's memory that an engine may fill."""
    tensor_parallel: Count = 1
    """GPUs per engine."""
    start_timeout_s: Positive = 300.0
    """Deadline for an engine process to start."""
    heartbeat_timeout_s: Positive = 60.0
    """Seconds without a heartbeat after which an engine process is killed and restarted."""

    @property
    def on_gpus(self) -> str | None:
        """Return a setting that requires GPUs, if one is set."""
        chosen = {
            f"vllm.transfer = {self.transfer!r}": self.transfer != "memory",
            f"vllm.tensor_parallel = {self.tensor_parallel}": self.tensor_parallel > 1,
        }
        return next((name for name, given in chosen.items() if given), None)


class EngineSection(Section):
    """Sampling of completions."""

    kind: Literal["torch", "vllm"] = "torch"
    """PyTorch in the trainer's process, or vLLM in separate processes."""
    device: str = "cpu"
    """PyTorch device of engine and learner: "cpu" or "cuda"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the sampling weights; the trainer keeps float32."""
    max_sessions: Count = 64
    """Concurrent episodes."""
    max_context: Annotated[int, Field(ge=16)] = 2048
    """Token limit of one episode, prompt and replies included."""
    max_new_tokens: Count = 256
    """Token limit of one turn; the last turn of a full context is shorter."""
    completion_timeout_s: Positive | None = None
    """Deadline of one completion, after which the engine counts as failed; left out, a minute more than
    ``max_new_tokens`` take at 5 tokens/s."""
    temperature: NonNegative = 1.0
    """Divides the logits, at sampling and in the loss."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the most probable tokens that hold this share of the probability; 1 is all."""
    top_k: CountOrOff = 0
    """Sample from this many of the most probable tokens; 0 is all."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Sample from the tokens at least this share as probable as the most probable one; 0 is all."""
    deterministic: bool = False
    """Make synchronous runs reproducible bit for bit on one machine, also across kill and resume; slower."""
    vllm: VllmSection = VllmSection()

    @property
    def truncates(self) -> bool:
        """Return whether improbable tokens are never sampled."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def sampling(self) -> Sampling:
        """Return the sampling parameters and limits of a turn."""
        shared = {one.name for one in fields(Sampling)}
        return Sampling(deadline_s=self.completion_deadline_s, **self.model_dump(include=shared))

    @property
    def completion_deadline_s(self) -> float:
        """Return ``completion_timeout_s``, or its default."""
        return self.completion_timeout_s or SLACK_S + self.max_new_tokens / SLOWEST_TOKENS_PER_S

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        found = []
        if self.max_new_tokens >= self.max_context:
            found.append(
                f"max_new_tokens ({self.max_new_tokens}) must be below max_context "
                f"({self.max_context}) to leave room for the prompt"
            )
        if self.kind == "torch" and self.vllm != VllmSection():
            found.append("the settings of [engine.vllm] need kind = 'vllm'")
        if self.kind == "vllm" and self.deterministic:
            found.append("deterministic needs kind = 'torch': results of vLLM depend on the batch")
        if self.device == "cpu" and self.vllm.on_gpus:
            found.append(f"{self.vllm.on_gpus} needs device = 'cuda'")
        return found


class PlacementSection(Section):
    """Placement of the processes of a run."""

    layout: Literal["separated", "colocated", "shared"] = "separated"
    """Separate GPUs for learner and engine, or the same ones: in turns ("colocated": the engine sleeps while
    the learner works), or at the same time ("shared": vLLM fills ``engine.vllm.memory_fraction`` of each, the
    learner at most the rest less a twentieth)."""
    launcher: Literal["local", "torchrun", "ray"] = "local"
    """Local processes; learner ranks started by torchrun, on one node or many; or all placed by Ray."""
    learner: tuple[int, ...] = ()
    """GPUs of the learner, one per process on a node; left out, the first ones."""
    engine: tuple[int, ...] = ()
    """GPUs of the engine, ``tensor_parallel`` per replica; left out, those after the learner's, or the
    learner's if they are not separated."""
    ray_address: str | None = None
    """Address of a Ray cluster; left out, ``RAY_ADDRESS``, else a local cluster for this run."""
    ray_timeout_s: Positive = 300.0
    """Deadline for the Ray cluster to allocate the resources of the run."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        found = []
        for name, gpus in (("learner", self.learner), ("engine", self.engine)):
            if len(set(gpus)) < len(gpus) or any(gpu < 0 for gpu in gpus):
                found.append(f"{name} = {list(gpus)} must list different GPUs, numbered from 0")
        if self.layout == "separated" and (shared := set(self.learner) & set(self.engine)):
            found.append(
                f"GPU {min(shared)} is assigned to both learner and engine: use different GPUs, or "
                "layout = 'colocated' or 'shared'"
            )
        if self.launcher == "ray" and (self.learner or self.engine):
            found.append("Ray assigns the GPUs: leave learner and engine out, or use another launcher")
        if self.launcher != "ray" and self.ray_address is not None:
            found.append("ray_address needs launcher = 'ray'")
        return found

    def problems_with(self, *, device: str, processes: int, max_staleness: int, transfer: str) -> list[str]:
        """Return violated constraints between this section and others, one sentence each."""
        found = []
        if transfer == "nccl" and (self.layout != "separated" or self.launcher == "ray"):
            found.append(
                "engine.vllm.transfer = 'nccl' needs separate GPUs for the engine on this machine: use "
                "placement.layout = 'separated' and a launcher other than Ray, or transfer = 'memory'"
            )
        if (self.learner or self.engine) and device != "cuda":
            found.append(
                "placement.learner and placement.engine list GPUs, but engine.device is "
                f"{device!r}: set it to 'cuda'"
            )
        if self.layout == "colocated" and max_staleness > 0:
            found.append(
                "placement.layout = 'colocated' makes learner and engine take turns, so no episode is played "
                f"while the learner works: set rollout.max_staleness to 0, not {max_staleness}"
            )
        if self.launcher == "torchrun" and processes > 1:
            found.append(
                "with placement.launcher = 'torchrun', --nproc-per-node sets the number of processes: leave "
                "train.processes out"
            )
        return found


class LoraSection(Section):
    """LoRA adapters, trained instead of the model (``[train.lora]``)."""

    rank: Count
    """Rank of each adapter."""
    alpha: Positive
    """Adapter outputs are scaled by ``alpha / rank``."""
    targets: tuple[str, ...] = ()
    """Names of the adapted linear layers, such as "q_proj"; left out, all but the head."""


class TrainSection(Section):
    """The optimizer, and the memory and processes of the learner."""

    learning_rate: Positive = 1e-5
    """Peak learning rate of AdamW."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    """Betas of AdamW."""
    weight_decay: NonNegative = 0.0
    """Weight decay of AdamW, for matrices."""
    warmup_steps: CountOrOff = 0
    """Warm-up updates of the learning rate."""
    final_lr_fraction: Fraction = 1.0
    """The learning rate decays to this share of its peak over the run."""
    decay_fraction: Fraction = 1.0
    """Share of the steps after the warm-up, at the end, over which the learning rate decays."""
    lr_decay: Literal["linear", "cosine"] = "linear"
    """Shape of that decay."""
    max_grad_norm: Positive = 1.0
    """Gradient clipping norm."""
    minibatches: Count = 1
    """Optimizer steps per batch."""
    micro_batch_tokens: Count = 8192
    """Token budget of one micro-batch."""
    max_logits: Count = 2**26
    """Entries of the logits that are held at a time, tokens times vocabulary; more are computed in chunks."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of the learner; parameters stay in float32."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    offload_optimizer: bool = False
    """Keep the optimizer's moments, and a copy of the parameters that it updates, in host memory."""
    lora: LoraSection | None = None
    """Train adapters instead of the whole model; left out, it is off."""
    processes: Count = 1
    """Learner processes on this machine, started by ``agentrl-train run``."""
    sequence_parallel: Count = 1
    """Ranks per row of tokens, for long contexts; must divide processes and attention heads."""
    rank_timeout_s: Positive = 600.0
    """Deadline of collective operations between the learner processes."""
    on_bad_update: Literal["stop", "skip"] = "stop"
    """Reaction to a non-finite loss or gradient, or a gradient spike; the groups are written to disk."""
    spike_factor: NonNegative = 0.0
    """A gradient norm above this multiple of the median of the last 50 is a bad update; 0 is off."""
    step_timeout_s: Positive = 3600.0
    """Deadline of one training step, weight publishing included."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        found = []
        if 1.0 in self.betas:
            found.append("betas must be below 1")
        return found


class CriticSection(Section):
    """A model of the values of states, where credit is by a critic (``[critic]``)."""

    model: str | None = None
    """A Hugging Face model folder, or a name on the hub, whose head is replaced; left out, the policy."""
    learning_rate: Positive = 1e-5
    """Learning rate of AdamW, constant."""
    warmup_steps: CountOrOff = 0
    """First steps, in which only the critic learns."""
    passes: Count = 1
    """Passes over the episodes of each step."""
    clip: NonNegative = 0.2
    """A value moves at most this far in an update of "gae_token" and its like; 0 is without a bound."""
    replay: CountOrOff = 0
    """Groups of earlier steps that turns are learned from again, for credit "archer"; 0 is off."""
    beta: Positive = 0.1
    """Steepness of preferences, for credit "sweet"."""
    pairs: CountOrOff = 0
    """Pairs of completions of each turn from which the policy learns by DPO, for credit "sweet"; 0 is off."""
    likelihood: NonNegative = 0.01
    """Weight of the log-likelihood of the better completion of a pair, by token."""
    target_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Share of the difference by which target networks follow in an update, for credit "archer"."""
    max_grad_norm: Positive = 1.0
    """Gradient clipping norm."""


class SftSection(Section):
    """Supervised fine-tuning on expert episodes (``agentrl-train sft``)."""

    traces: Count = 1000
    """Expert episodes per task."""
    steps: Count = 500
    """Updates."""
    batch_size: Count = 16
    """Episodes per optimizer step."""
    learning_rate: Positive = 1e-5
    """Peak learning rate of AdamW."""
    weight_decay: NonNegative = 0.01
    """Weight decay of AdamW, for matrices."""
    warmup_steps: CountOrOff = 20
    """Warm-up updates of the learning rate."""
    decay_fraction: Fraction = 0.4
    """Share of the steps, at the end, over which the learning rate decays."""
    final_lr_fraction: Fraction = 0.05
    """The learning rate decays to this share of its peak."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    """Betas of AdamW."""
    max_grad_norm: Positive = 1.0
    """Gradient clipping norm."""


class RunSection(Section):
    """Length, name, folder and seed of the run."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the folder inside ``folder``; letters, digits, ``.``, ``_`` and ``-``."""
    steps: Count
    """Optimizer batches to train."""
    folder: str = "runs"
    """Parent of the run folders; relative to the working directory."""
    seed: CountOrOff = 0
    """Seed of all random draws: samples, tokens, order."""
    run_timeout_s: Positive | None = None
    """Time limit of the run: it stops cleanly after the current step, resumable, whatever ``steps`` says."""
    threads: Count | None = None
    """CPU threads of PyTorch, shared by engine and learner; left out, one for each core."""
    idle_report_timeout_s: Positive = 60.0
    """Seconds without progress after which the watchdog prints the state of every slot."""

    @property
    def path(self) -> Path:
        """Return the folder of the run, ``<folder>/<name>``."""
        return Path(self.folder) / self.name


class ModelSection(Section):
    """The policy to train."""

    path: Annotated[str, Field(min_length=1)]
    """A Hugging Face model folder, or the name of a model on the hub (``org/name``)."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub; left out, its default branch."""
    chat_template: str | None = None
    """File with a Jinja chat template; left out, the tokenizer's own."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as ``{enable_thinking = false}``."""
    tool_parser: str | None = None
    """Syntax of tool calls, or "prompt" to describe tools and calls in the system prompt; left out, chosen by
    the chat template."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Stop tokens, as text, beside those of the generation configuration and the tokenizer."""
    system_prompt: str | None = None
    """Text in front of every opening, as a system message."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the learner's parameters. With ``train.lora``, "bfloat16" halves the memory of the frozen
    weights; adapters stay in float32."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """The learner's attention: PyTorch's, where the model has it, the plain one of transformers, with one
    sequence in a row, or flash-attn where it is installed (CUDA)."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        own = sorted(self.template_kwargs.keys() & {"messages", "tools", "add_generation_prompt"})
        return [f"template_kwargs sets {name!r}, which a run sets itself: remove it" for name in own]


class EnvironmentSection(Section):
    """Environments of one server, started by the run or running already, or samples of an agent program."""

    serve: tuple[str, ...] = ()
    """Targets to serve from a child process: folders, ``file.py:Class`` or ``module:Class``."""
    start_timeout_s: Positive = 600.0
    """Deadline for the server of ``serve`` to start."""
    url: str | None = None
    """Address of a running server or controller."""
    samples: str | None = None
    """File of samples for ``program``, one JSON object per line; its name is that of the task."""
    eval_samples: str | None = None
    """File of samples for evaluation, beside ``samples``."""
    program: str | None = None
    """Agent program that plays the episodes: a command, or ``file.py:function``. It calls the policy through
    the gateway, and returns or posts the reward. Left out, the run plays with the tools of the tasks."""
    program_folder: str = "."
    """Working directory of a command."""
    ignore_sampling: bool = False
    """Ignore temperature, top_p, top_k and min_p in the requests of a program, where they differ from the
    run's; else such a request is an error."""
    token_env: str | None = None
    """Environment variable with the token of the server; without it no token is sent."""
    tasks: dict[str, Positive] = Field(default_factory=dict)
    """Weight of each task; left out, all tasks of the server weigh the same."""
    split: str = "train"
    """Split for training."""
    eval_split: str = "test"
    """Split for evaluation."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        found = []
        if [bool(self.serve), self.url is not None, self.samples is not None].count(True) != 1:
            found.append(
                "give either serve (targets to start) or url (a running server), or samples for a program"
            )
        if self.samples is not None and self.program is None:
            found.append("samples need a program that plays them: set program")
        if self.samples is not None and self.tasks:
            found.append("tasks are those of a server: leave them out, samples are one task")
        if self.eval_samples is not None and self.samples is None:
            found.append("eval_samples need samples: set both")
        if self.samples is not None and self.split == self.eval_split:
            found.append("split and eval_split are the same: give them different names")
        if self.program is not None and not self.program.strip():
            found.append("program is empty: give a command or file.py:function")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            found.append(f"url must start with http:// or https://, not {self.url!r}")
        return found


def is_function(program: str) -> bool:
    """Return whether a program is ``file.py:function`` or ``module:function``, and not a command."""
    return re.fullmatch(r"\S+:[A-Za-z_]\w*", program) is not None


class SubAgentSection(Section):
    """A sub-agent that the policy may call as a tool (``[rollout.sub_agent]``, MATPO).

    The caller is the planner; a call is played by a worker, which is the same policy in a context of its own.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")] = "delegate"
    """Name of the tool, and of the agent in the recorded segments."""
    description: str = (
        "Give a task to another agent. It knows nothing but the text of the task, works on it by itself and "
        "returns a report."
    )
    """Description of the tool."""
    system_prompt: Annotated[str, Field(min_length=1)] = (
        "You work on a task for another agent. Use your tools; when you are done, answer with a short report "
        "of what you found, without calling a tool."
    )
    """System message of workers."""
    max_turns: Count = 8
    """Turns of one call. The last one is for the report; its tool calls are not executed."""
    planner_tools: tuple[str, ...] | None = None
    """Tools of the environment that the planner sees; left out, all."""
    worker_tools: tuple[str, ...] | None = None
    """Tools of the environment that workers see; left out, all."""
    tasks: tuple[str, ...] = ()
    """Tasks in which the sub-agent can be called; left out, all."""

    def serves(self, task: str) -> bool:
        """Return whether the sub-agent can be called in a task."""
        return not self.tasks or task in self.tasks

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        found = []
        if self.planner_tools == () and self.worker_tools == ():
            found.append(
                "planner_tools and worker_tools are both empty, so no agent can act: leave one out, or list "
                "tools of the environment"
            )
        if self.max_turns == 1 and self.worker_tools:
            found.append(
                "max_turns = 1 leaves a worker one turn, which is for its report: raise it, or set "
                "worker_tools = []"
            )
        return found


class RolloutSection(Section):
    """Number of episodes, and their maximum staleness."""

    groups_per_step: Count = 8
    """Groups in one optimizer batch, P."""
    group_size: Count = 8
    """Sibling episodes of one sample."""
    balance: Literal["tokens", "groups"] = "tokens"
    """Unit of task weights: trained tokens, as counted until each checkpoint, or groups."""
    max_staleness: CountOrOff = 1
    """S: (S + 1) P groups may be in flight; 0 is synchronous."""
    window: Count = 1
    """W: look-ahead of the trainer beyond strict FIFO order, in groups; 1 is strict order."""
    episode_timeout_s: Positive | None = None
    """Time limit of one episode, waiting for a free session not included. The turn in progress ends, then the
    episode is truncated: it keeps its turns and its reward and is trained on. Left out, a minute more than
    ``engine.max_context`` tokens take at 5 tokens/s, for each of a turn's completions."""
    environment_timeout_s: Positive = 120.0
    """Deadline of one answer of an environment, after which the episode counts as failed."""
    environment_retries: CountOrOff = 2
    """Retries of an episode in fresh sessions after infrastructure failures."""
    environment_wait_timeout_s: NonNegative = 60.0
    """Seconds an environment may be unreachable before that counts as such a failure."""
    stale_fraction: Fraction = 0.0
    """Cross-policy sampling: probability that a turn is sampled by the stale policy; 0 is off."""
    stale_interval: Count = 10
    """Steps between two refreshes of the stale policy."""
    stale_model: str | None = None
    """A Hugging Face model folder, or a name on the hub, whose weights the stale policy keeps in place of
    older weights of the policy. It has the architecture and the tokenizer of ``model.path``."""
    max_turns: dict[str, Count] = Field(default_factory=dict)
    """Turn limit of the episodes of a task, where it is to be lower than the environment's own."""
    horizon: tuple[Count, ...] = ()
    """Turn limits of training episodes in stages of ``horizon_steps`` steps (ScalingInter-RL); the last one
    stays. Left out, it is off."""
    horizon_steps: Count = 100
    """Steps of one stage of ``horizon``."""
    sub_agent: SubAgentSection | None = None
    """A sub-agent as a tool; left out, it is off."""
    alternatives: CountOrOff = 0
    """Further completions of each turn of a training episode, which are not played, for ``critic.pairs``."""

    def episode_limit_s(self, *, max_context: int) -> float:
        """Return ``episode_timeout_s``, or its default for a context of this length."""
        tokens = (1 + self.alternatives) * max_context
        return self.episode_timeout_s or SLACK_S + tokens / SLOWEST_TOKENS_PER_S

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        most = self.max_staleness * self.groups_per_step + 1
        if self.max_staleness > 0 and self.window > most:
            return [
                f"window ({self.window}) can be at most max_staleness * groups_per_step + 1 = "
                f"{most}, the number of groups in flight"
            ]
        return []


class CurriculumSection(Section):
    """Difficulty and mixture of the tasks by the success of their training episodes."""

    levels: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Splits of a task from easy to hard, in place of ``environments.split``."""
    raise_at: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Success rate over ``window`` groups of a level from which on the next one is drawn."""
    window: Annotated[int, Field(ge=2)] = 16
    """Trained groups of a task over which its success is averaged."""
    mix: Literal["fixed", "progress"] = "fixed"
    """Weights of the tasks: those of ``environments.tasks``, or by learning progress, the change of success
    between the halves of ``window`` (arXiv 1707.00183)."""
    fixed_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Part of the draws that keeps the fixed weights with ``mix = "progress"``, so that no task is lost."""
    every: Count = 5
    """Steps between two changes of the mixture."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        found = []
        for task, splits in self.levels.items():
            if not splits or len(set(splits)) < len(splits):
                found.append(f"levels.{task} = {list(splits)} must list different splits, from easy to hard")
        return found


class CheckpointSection(Section):
    """Frequency and retention of checkpoints."""

    every: Count = 10
    """Steps between checkpoints."""
    keep: Count = 2
    """Number of checkpoints to keep."""
    best: bool = True
    """Keep the model with the best evaluation so far in ``best/`` of the run folder."""
    write_timeout_s: Positive = 1800.0
    """Deadline for writing one checkpoint."""


class EvalSection(Section):
    """Held-out evaluation at the start, the end and between."""

    samples: CountOrOff = 200
    """Held-out samples per task; 0 is off."""
    attempts: Count = 1
    """Episodes per sample; more than one gives pass@k."""
    every: CountOrOff = 0
    """Steps between two evaluations; 0 is only at the start and the end."""
    temperature: NonNegative | None = None
    """Temperature of evaluations, 0 is greedy; left out, that of training with its truncation."""
    concurrent: bool = False
    """Train on while an evaluation plays: a second set of weights holds the checkpoint that it evaluates. The
    evaluation at the end has nothing beside it."""
    max_sessions: Count | None = None
    """Episodes of a concurrent evaluation at a time; left out, a quarter of ``engine.max_sessions``."""
    greedy: bool = False
    """Play every sample once more at temperature 0, and report that success beside the other."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        if self.max_sessions is not None and not self.concurrent:
            return ["max_sessions needs concurrent = true: without it an evaluation has all sessions"]
        return []


class MetricsSection(Section):
    """Outputs beside ``metrics.jsonl``."""

    tensorboard: bool = True
    """Write ``tensorboard/``."""
    trajectories: CountOrOff = 4
    """Readable trajectories written per step."""
    trace: bool = True
    """Write ``trace.json``, a timeline for https://ui.perfetto.dev."""
    trace_megabytes: Annotated[float, Field(ge=1.0)] = 64.0
    """Size limit of the trace; a longer run keeps the newest half or more."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of the Prometheus endpoint; 0 picks a free one. Left out, it is off."""
    prometheus_host: str = "127.0.0.1"
    """Address that the Prometheus endpoint listens on."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Weights & Biases project that receives the metrics (extra ``[wandb]``). Left out, it is off."""
