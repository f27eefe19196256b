"""Sections of the configuration file as frozen pydantic models."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from agentrl_train.config.functions import Choice, Function, as_table
from agentrl_train.config.paths import (
    FUNCTION,
    AnyPath,
    FilePath,
    ModelPath,
    OutputPath,
    ProgramPath,
    TargetPath,
)
from agentrl_train.config.section import (
    Count,
    CountOrOff,
    Fraction,
    NonNegative,
    Positive,
    Section,
    Table,
)
from agentrl_train.types import Sampling

SLOWEST_TOKENS_PER_S = 5.0
"""Lowest useful speed of one session. Default time limits follow from it."""
SLACK_S = 60.0
"""Added to default time limits."""
SET_BY_TRAINER = {
    "model": "model.path",
    "revision": "model.revision",
    "dtype": "engine.dtype",
    "seed": "run.seed",
    "max_model_len": "engine.max_context",
    "max_num_seqs": "engine.max_sessions",
    "enable_sleep_mode": "placement.layout",
    "weight_transfer_config": "engine.vllm.transfer",
    "worker_extension_cls": "",
    "skip_tokenizer_init": "",
    "generation_config": "",
    "logprobs_mode": "",
}
"""Arguments of vLLM that are set by a setting, or that the trainer needs unchanged."""


class VllmSection(Section):
    """Options of ``engine.kind = "vllm"``."""

    python: AnyPath | None = None
    """Python interpreter with vLLM for the engine processes. By default the trainer's."""
    replicas: Count = 1
    """Engines of the current policy."""
    push: Literal["in_flight", "drained"] = "in_flight"
    """Update weights in the middle of completions, or after active completions have finished."""
    transfer: Literal["memory", "nccl"] = "memory"
    """Weight transfer: through shared memory, or GPU to GPU by vLLM's NCCL transfer."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of vLLM's engine, such as ``{gpu_memory_utilization = 0.5, tensor_parallel_size =
    2, kv_cache_memory_bytes = 1073741824, quantization = "fp8"}``."""
    start_timeout_s: Positive = 300.0
    """Deadline for an engine process to start."""

    @property
    def memory_fraction(self) -> float:
        """Return the share of a GPU's memory that an engine can fill."""
        return float(self.args.get("gpu_memory_utilization", 0.9))

    @property
    def tensor_parallel(self) -> int:
        """Return the number of GPUs per engine."""
        return int(self.args.get("tensor_parallel_size", 1))

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        return [
            f"args.{name} is set by the trainer: " + (f"set {key} instead" if key else "leave it out")
            for name, key in SET_BY_TRAINER.items()
            if name in self.args
        ]

    @property
    def on_gpus(self) -> str | None:
        """Return a setting that requires GPUs, if one is set."""
        chosen = {
            f"vllm.transfer = {self.transfer!r}": self.transfer != "memory",
            f"vllm.args.tensor_parallel_size = {self.tensor_parallel}": self.tensor_parallel > 1,
        }
        return next((name for name, given in chosen.items() if given), None)


class EngineSection(Section):
    """Sampling of completions."""

    kind: Literal["torch", "vllm"] = "torch"
    """PyTorch in the trainer's process, or vLLM in separate processes."""
    device: str = "cpu"
    """PyTorch device of engine and learner: "cpu" or "cuda"."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the sampling weights. The trainer keeps float32. "auto" is bfloat16 for models of at least 50
    million parameters on a CPU or GPU with instructions for it, and otherwise float32."""
    max_sessions: Count = 64
    """Concurrent episodes."""
    max_context: Annotated[int, Field(ge=16)] = 2048
    """Token limit of one episode, prompt and replies included."""
    max_new_tokens: Count = 256
    """Token limit of one turn. The last turn of a full context is shorter."""
    completion_timeout_s: Positive | None = None
    """Waiting completions fail after this many seconds without progress of the engine. A slow engine that
    still makes progress never fails. The default is a minute more than ``max_new_tokens`` take at 5
    tokens/s."""
    temperature: NonNegative = 1.0
    """Temperature, which divides the logits in sampling and in the loss."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the most probable tokens with this total probability. 1 means all tokens."""
    top_k: CountOrOff = 0
    """Sample from this many of the most probable tokens. 0 means all tokens."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Sample from tokens whose probability is at least this share of the most probable token's. 0 means
    all."""
    deterministic: bool = False
    """Make synchronous runs reproducible bit for bit on one machine, even after a kill and resume. The run
    uses one CPU thread, which makes it slower."""
    vllm: VllmSection = VllmSection()

    @property
    def truncates(self) -> bool:
        """Return True if improbable tokens are never sampled."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def sampling(self) -> Sampling:
        """Return the sampling parameters and limits of a turn."""
        shared = {one.name for one in fields(Sampling)}
        return Sampling(**self.model_dump(include=shared))

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


class LocalLauncher(Function):
    """Local processes, or learner ranks started by torchrun on one node or many."""

    name: Literal["local", "torchrun"] = "local"


class RayLauncher(Function):
    """Ray places all processes."""

    name: Literal["ray"] = "ray"
    address: str | None = None
    """Address of the cluster. By default ``RAY_ADDRESS``, or else a local cluster for this run."""
    timeout_s: Positive = 300.0
    """Deadline for the cluster to allocate the resources of the run."""


class PlacementSection(Section):
    """Placement of the processes of a run."""

    layout: Literal["separated", "colocated", "shared"] = "separated"
    """Separate GPUs for learner and engine, or the same GPUs: in turns ("colocated": the engine sleeps while
    the learner works), or at the same time ("shared": vLLM fills the share ``gpu_memory_utilization`` of
    ``engine.vllm.args`` of each GPU, and the learner can use the rest minus a twentieth)."""
    launcher: Annotated[LocalLauncher | RayLauncher, Choice("local")] = LocalLauncher()
    """Local processes, learner ranks started by torchrun on one node or many, or all processes placed by
    Ray."""
    learner: tuple[int, ...] = ()
    """GPUs of the learner, one per process on a node. By default the first GPUs."""
    engine: tuple[int, ...] = ()
    """GPUs of the engine, ``tensor_parallel_size`` per replica. By default the GPUs after the learner's, or
    the learner's GPUs if they are not separated."""

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
        if self.launcher.name == "ray" and (self.learner or self.engine):
            found.append("Ray assigns the GPUs: leave learner and engine out, or use another launcher")
        return found

    def problems_with(self, *, device: str, processes: int, max_staleness: int, transfer: str) -> list[str]:
        """Return violated constraints between this section and others, one sentence each."""
        found = []
        if transfer == "nccl" and (self.layout != "separated" or self.launcher.name == "ray"):
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
        if self.launcher.name == "torchrun" and processes > 1:
            found.append(
                "with placement.launcher = 'torchrun', --nproc-per-node sets the number of processes: leave "
                "train.processes out"
            )
        return found


class LoraSection(Table):
    """LoRA adapters, trained instead of the model (``[train.lora]``)."""

    rank: Count
    """Rank of each adapter."""
    alpha: Positive
    """Adapter outputs are scaled by ``alpha / rank``."""
    targets: tuple[str, ...] = ()
    """Names of the adapted linear layers, such as "q_proj". By default all except the head."""


class Decay(Function):
    """Shape of the decay of the learning rate."""

    name: Literal["linear", "cosine"] = "linear"
    to: Fraction = 1.0
    """The learning rate decays to this share of its peak at the end of the run."""
    over: Fraction = 1.0
    """The learning rate decays over this last share of the steps after the warm-up."""


class TrainSection(Section):
    """The optimizer, and the memory and processes of the learner."""

    learning_rate: Positive | Literal["auto"] = "auto"
    """Peak learning rate of AdamW. "auto" depends on the size of the model: 5e-4 up to 10 million parameters,
    2e-5 up to 200 million, 5e-6 up to 1 billion, 2e-6 up to 3 billion, 1e-6 above, and ten times as much for
    adapters."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    """Betas of AdamW."""
    weight_decay: NonNegative = 0.0
    """Weight decay of AdamW, for matrices."""
    warmup_steps: CountOrOff = 0
    """Warm-up updates of the learning rate."""
    decay: Annotated[Decay, BeforeValidator(as_table)] = Decay()
    """Decay of the learning rate. By default it is constant."""
    max_grad_norm: Positive = 1.0
    """Gradient clipping norm."""
    minibatches: Count = 1
    """Optimizer steps per batch."""
    micro_batch_tokens: Count = 8192
    """Token budget of one micro-batch."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of the learner. Parameters stay in float32. "auto" is bfloat16 for models of at least 50
    million parameters on a CPU or GPU with instructions for it, and otherwise float32."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    offload_optimizer: bool = False
    """Keep the optimizer's moments, and a copy of the parameters that it updates, in host memory."""
    lora: LoraSection | None = None
    """Train adapters instead of the whole model. Off by default."""
    processes: Count = 1
    """Learner processes on this machine, started by ``agentrl-train run``."""
    sequence_parallel: Count = 1
    """Ranks per row of tokens, for long contexts. Must divide the numbers of processes and attention
    heads."""
    rank_timeout_s: Positive = 600.0
    """Deadline of collective operations between the learner processes."""
    on_bad_update: Literal["stop", "skip"] = "stop"
    """Reaction to a non-finite loss or gradient, or a gradient spike. The groups are written to disk."""
    spike_factor: NonNegative = 0.0
    """A gradient norm above this multiple of the median of the last 50 is a bad update. 0 disables it."""
    step_timeout_s: Positive = 3600.0
    """Deadline of one training step, including weight publishing."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        found = []
        if 1.0 in self.betas:
            found.append("betas must be below 1")
        return found


class SftSection(Section):
    """Supervised fine-tuning on expert episodes (``agentrl-train sft``).

    ``[model]``, ``[train.lora]``, ``train.precision`` and the memory settings of ``[train]`` also apply.
    """

    traces: Count = 500
    """Expert episodes per task."""
    steps: Count = 30
    """Number of updates. A pretrained model of 135 million parameters needs 5 to 30, an untrained one
    thousands."""
    batch_size: Count = 16
    """Episodes per optimizer step."""
    learning_rate: Positive | Literal["auto"] = "auto"
    """Peak learning rate of AdamW. "auto" depends on the size of the model: 1e-3 up to 10 million parameters,
    1e-4 up to 200 million, 5e-5 up to 1 billion, 2e-5 up to 3 billion, 1e-5 above."""


class RunSection(Section):
    """Length, name, folder and seed of the run."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the folder inside ``folder``, from letters, digits, ``.``, ``_`` and ``-``."""
    steps: Count
    """Optimizer batches to train."""
    folder: OutputPath = Field("runs", validate_default=True)
    """Parent of the run folders, relative to the working directory."""
    seed: CountOrOff = 0
    """Seed of all random draws: samples, tokens, order."""
    run_timeout_s: Positive | None = None
    """Time limit of the run. It stops after the current step, even before ``steps``, and can be resumed."""
    threads: Count | None = None
    """CPU threads of PyTorch, shared by engine and learner. By default one for each core."""

    @property
    def path(self) -> Path:
        """Return the folder of the run, ``<folder>/<name>``."""
        return Path(self.folder) / self.name


class ModelSection(Section):
    """The policy to train."""

    path: ModelPath
    """A Hugging Face model folder, a name on the hub (``org/name``), a .gguf file, ``package:NAME`` for
    weights in a Python package, or the name of a model from ``agentrl-train fetch``."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. By default its default branch."""
    chat_template: FilePath | None = None
    """File with a Jinja chat template. By default the tokenizer's template."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as ``{enable_thinking = false}``."""
    tool_parser: str | None = None
    """Syntax of tool calls. "prompt" and "prompt_python" describe tools in the system prompt, with calls in
    JSON or, with less than half of the tokens, in Python. By default the syntax that an earlier run stored
    with the model, or else the syntax of the chat template."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Stop tokens, as text, in addition to the generation configuration's and the tokenizer's."""
    system_prompt: str | None = None
    """Text in front of every opening, as a system message."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the learner's parameters. With ``train.lora``, "bfloat16" halves the memory of the frozen
    weights. Adapters stay in float32."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """The learner's attention: PyTorch's attention if the model supports it ("sdpa"), the plain attention of
    transformers with one sequence in a row ("eager"), or an installed flash-attn (CUDA)."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        own = sorted(self.template_kwargs.keys() & {"messages", "tools", "add_generation_prompt"})
        return [f"template_kwargs sets {name!r}, which a run sets itself: remove it" for name in own]


def _command(value: Any) -> Any:
    """Return the table of a program that is given as only its command."""
    return {"run": value} if isinstance(value, str) else value


_QUESTION = {"input", "instructions", "messages", "stream", "system", "tools"}
"""Parameters of a request that cannot be ignored, because they define the request."""


class Program(Table):
    """An agent program that plays episodes."""

    run: ProgramPath
    """A command, ``file.py:function``, or the name of a coding agent, such as "claude-code"."""
    folder: AnyPath = Field(".", validate_default=True)
    """Working directory of a command."""
    ignore: tuple[str, ...] = ()
    """Parameters to ignore in the requests of the program, such as ``["temperature", "tool_choice"]``. Any
    other unsupported parameter that would change the answer is an error."""
    samples: FilePath | None = None
    """File of samples, one JSON object per line, instead of a server. Its name is the name of the task."""
    eval_samples: FilePath | None = None
    """File of samples for evaluation."""

    @property
    def is_function(self) -> bool:
        """Return True if the program is a function, and False if it is a command."""
        return FUNCTION.fullmatch(self.run) is not None

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this table, one sentence each."""
        lacking = self.eval_samples is not None and self.samples is None
        found = ["eval_samples need samples: set both"] * lacking
        asked = sorted(_QUESTION.intersection(self.ignore))
        return found + [f"ignore lists {name!r}, which defines a request: remove it" for name in asked]


def _in_list(value: Any) -> Any:
    """Return a list of a single target, which needs no brackets."""
    return [value] if isinstance(value, str) else value


class EnvironmentSection(Section):
    """Environments of a server that the run starts or that already runs, or samples of an agent program."""

    serve: Annotated[tuple[TargetPath, ...], BeforeValidator(_in_list)] = ()
    """Targets to serve from a child process: folders, ``file.py:Class``, ``module:Class``, or task names."""
    start_timeout_s: Positive = 600.0
    """Deadline for the server of ``serve`` to start."""
    url: str | None = None
    """Address of a running server or controller."""
    program: Annotated[Program | None, BeforeValidator(_command)] = None
    """Agent program that plays the episodes: a command, ``file.py:function``, the name of a coding agent such
    as "mini-swe-agent", or a table with more settings. It calls the policy through the gateway, and returns
    or posts the reward. By default, the run plays with the tools of the tasks."""
    token_env: str | None = None
    """Environment variable with the token of the server. Without it no token is sent."""
    tasks: dict[str, Positive] = Field(default_factory=dict)
    """Weight of each task. By default all tasks of the server have the same weight."""
    split: str = "train"
    """Split for training."""
    eval_split: str = "test"
    """Split for evaluation."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        found = []
        samples = self.program is not None and self.program.samples is not None
        if [bool(self.serve), self.url is not None, samples].count(True) != 1:
            found.append(
                "give either serve (targets to start) or url (a running server), or samples of a program"
            )
        if samples and self.tasks:
            found.append("tasks selects tasks of a server, but samples are one task: leave tasks out")
        if samples and self.split == self.eval_split:
            found.append("split and eval_split are the same: give them different names")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            found.append(f"url must start with http:// or https://, not {self.url!r}")
        return found


class CheckpointSection(Section):
    """Frequency and retention of checkpoints."""

    every: Count = 10
    """Steps between checkpoints."""
    keep: Count = 2
    """Number of checkpoints to keep. Only the newest keeps the state of the optimizer."""
    best: bool = True
    """Keep the model with the best evaluation so far in ``best/`` of the run folder."""


class Concurrent(Table):
    """Evaluation alongside training."""

    max_sessions: Count | None = None
    """Number of concurrent episodes. By default a quarter of ``engine.max_sessions``."""


def _concurrent(value: Any) -> Any:
    """Return the table of a concurrent evaluation that is switched on or off."""
    return None if value is False else as_table(value)


class EvalSection(Section):
    """Held-out evaluation at the start, at the end and during the run."""

    samples: CountOrOff = 200
    """Held-out samples per task. 0 disables it."""
    attempts: Count = 1
    """Episodes per sample. With more than one, evaluations report pass@k."""
    every: CountOrOff = 0
    """Steps between two evaluations. 0 evaluates only at the start and the end."""
    temperature: NonNegative | None = None
    """Temperature of evaluations. 0 is greedy. By default, evaluations sample in the same way as training."""
    concurrent: Annotated[Concurrent | None, BeforeValidator(_concurrent)] = None
    """Continue to train while an evaluation plays (``true``). A second set of weights holds the evaluated
    checkpoint. The evaluation at the end runs alone. Off by default."""
    greedy: bool = False
    """Play every sample once more at temperature 0, and also report this success."""


class Prometheus(Table):
    """Endpoint for Prometheus."""

    port: Annotated[int, Field(ge=0, le=65535)]
    """Port. 0 picks a free port."""
    host: str = "127.0.0.1"
    """Address that the endpoint listens on."""


class MetricsSection(Section):
    """Outputs in addition to ``metrics.jsonl``."""

    tensorboard: bool = True
    """Write ``tensorboard/``."""
    trajectories: CountOrOff = 4
    """Number of readable trajectories to write per step."""
    trace: bool = True
    """Write ``trace.json``, a timeline for https://ui.perfetto.dev."""
    prometheus: Prometheus | None = None
    """Prometheus endpoint, such as ``{port = 9100}``. Off by default."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Weights & Biases project that receives the metrics (extra ``[wandb]``). Off by default."""
