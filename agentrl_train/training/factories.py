"""Builds the engine, the publisher and the learner that a configuration describes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl_train.algorithm import objective_function
from agentrl_train.config import RunConfig
from agentrl_train.config.credit import Archer, GaeCredit
from agentrl_train.critics.networks import Critic, PrivilegedCritic, TwinCritic, ValueCritic
from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.pool import EnginePool
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.errors import ConfigError
from agentrl_train.learner import Learner, Lora
from agentrl_train.loss import value_loss
from agentrl_train.models.adapters import adapter_base
from agentrl_train.models.architecture import CheckpointNames
from agentrl_train.models.loading import copy_of, load_policy, open_policy, open_teacher
from agentrl_train.models.stored import StoredModel
from agentrl_train.placement.launcher import Launcher
from agentrl_train.placement.ranks import (
    LeadLearner,
    Ranks,
    execute_commands,
    process_group,
    world_size,
)
from agentrl_train.telemetry.watchdog import die_with_parent
from agentrl_train.types import UNTRACED, RunningEngine, Threads, Trace
from agentrl_train.weights import Canary, Drift, LogProbs, Publisher

CPU_KV_BYTES = 2**30
CRITIC_GRAD_NORM = 1.0
TORCH_SERVING = "agentrl_train.placement.serving"


def threads_each(config: RunConfig) -> int:
    """Return the thread count of engine and learner each: half of all if both run concurrently."""
    threads = config.run.threads or os.cpu_count() or 1
    return threads if config.rollout.max_staleness == 0 else max(1, threads // 2)


def make_threads(config: RunConfig, *, launcher: Launcher) -> tuple[Threads, Threads]:
    """Return the CPU threads of the engine and those of the learner.

    They are the same, so that one takes all while the other waits, unless the engine is in other processes.
    In a synchronous run, which is reproducible, neither changes.
    """
    apart = config.engine.kind == "vllm" or launcher.separate_engines
    if apart or config.rollout.max_staleness == 0:
        each = threads_each(config)
        return Threads(each), Threads(each)
    shared = Threads(config.run.threads or os.cpu_count() or 1)
    return shared, shared


def make_engine(
    config: RunConfig,
    *,
    model: PreTrainedModel,
    path: str,
    stop_token_ids: Sequence[int],
    threads: Threads,
    trace: Trace,
    launcher: Launcher,
) -> TorchEngine | EnginePool:
    """Start the engine of a run.

    Args:
        config: configuration of the run.
        model: the initial policy, with or without weights.
        path: source of ``model``: a folder or a hub name. Of a folder with an adapter, engines in other
            processes start with the base model until weights are published.
        stop_token_ids: tokens that end a completion.
        threads: CPU threads of an engine in this process.
        trace: trace of the run.
        launcher: starts the engine processes on its devices.

    Raises:
        ConfigError: vLLM is configured and not installed.
    """
    engine = config.engine
    if engine.kind == "vllm" or launcher.separate_engines:
        return _engine_pool(config, model=model, path=path, stop_token_ids=stop_token_ids, launcher=launcher)
    device = launcher.devices.torch_engine_device or engine.device
    if any(value.is_meta for value in model.parameters()):
        model, _ = load_policy(path, dtype=config.model.dtype, revision=config.model.revision)
    return TorchEngine(
        {name: copy_of(model, dtype=engine.dtype, device=device) for name in config.policies},
        stop_token_ids=stop_token_ids,
        max_sequences=config.sessions,
        max_context=engine.max_context,
        deadline_s=engine.completion_deadline_s,
        threads=threads,
        deterministic=engine.deterministic,
        trace=trace,
    )


def _engine_pool(
    config: RunConfig,
    *,
    model: PreTrainedModel,
    path: str,
    stop_token_ids: Sequence[int],
    launcher: Launcher,
) -> EnginePool:
    """Return engines in separate processes."""
    engine, vllm = config.engine, config.engine.vllm
    python = sys.executable
    on_cpu = engine.device == "cpu"
    options = ServingOptions(
        model=adapter_base(Path(path)) or path,
        revision=config.model.revision,
        stop_token_ids=tuple(stop_token_ids),
        max_sessions=engine.max_sessions,
        max_context=engine.max_context,
        dtype=engine.dtype,
        device="cpu" if on_cpu else "cuda",
        args=({"kv_cache_memory_bytes": CPU_KV_BYTES} if on_cpu else {}) | vllm.args,
        devices=launcher.devices.engine,
        transfer=vllm.transfer,
        sleeps=config.placement.layout == "colocated" and not on_cpu,
        deterministic=engine.deterministic,
        deadline_s=engine.completion_deadline_s,
    )
    if engine.kind == "vllm":
        python = vllm.python or python
        require_vllm(python)
        if vllm.transfer != "memory" and find_spec("vllm") is None:
            raise ConfigError(
                f"engine.vllm.transfer = {vllm.transfer!r} needs vLLM in the trainer's Python as well: "
                "install agentrl-kit[vllm] there, or set it to 'memory'"
            )
    else:
        options = replace(options, module=TORCH_SERVING, threads=threads_each(config))
    return EnginePool(
        options,
        policies=config.policies,
        replicas=config.replicas,
        deadline_s=engine.completion_deadline_s,
        start_s=vllm.start_timeout_s,
        push=vllm.push,
        python=python,
        spawn=launcher.spawn,
        names=CheckpointNames(model) if engine.kind == "vllm" else None,
    )


def require_vllm(python: str) -> None:
    """Check that an interpreter runs and can import vLLM and this package.

    Raises:
        ConfigError: the interpreter does not run, or lacks one of them.
    """
    code = "from importlib.util import find_spec as f; print(f('vllm') and f('agentrl_train') and 1)"
    try:
        output = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine.vllm.python = {python!r} cannot be run: {error}") from error
    if output != "1":
        raise ConfigError(
            f"engine.kind = 'vllm' needs vLLM and agentrl-kit in {python}: install agentrl-kit[vllm] there, "
            "or run `make vllm` and set engine.vllm.python to .venv-vllm/bin/python"
        )


def make_publisher(
    config: RunConfig,
    engine: RunningEngine,
    *,
    logprobs: LogProbs,
    tokenizer: PreTrainedTokenizerBase,
    tolerance: Drift,
) -> Publisher:
    """Return the publisher; for engines in other processes it verifies each push with a canary.

    Args:
        config: configuration of the run.
        engine: receives the weights.
        logprobs: computes log-probabilities with the trainer's weights.
        tokenizer: that of the policy.
        tolerance: accepted differences in log-probability, due to rounding.
    """
    canary = None
    if isinstance(engine, EnginePool):
        canary = Canary(
            engine.probe,
            logprobs=logprobs,
            vocabulary=len(tokenizer),
            temperature=config.engine.temperature,
            tolerance=tolerance,
        )
    chosen = config.rollout.stale
    if chosen.model is not None:
        stale = partial(_stale_weights, chosen.model, dtype=config.model.dtype, tokenizer=tokenizer)
        return Publisher(engine, stale=stale, canary=canary)
    interval = chosen.interval if chosen.fraction > 0 else 0
    return Publisher(engine, stale_interval=interval, canary=canary)


def _stale_weights(
    path: str, *, dtype: str, tokenizer: PreTrainedTokenizerBase
) -> Mapping[str, torch.Tensor]:
    """Return the weights of ``rollout.stale.model``. Raises ConfigError where its vocabulary is another."""
    model, own = load_policy(path, dtype=dtype)
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"rollout.stale.model = {path!r} has another vocabulary than the policy, whose contexts it "
            "continues: use a model of the same family"
        )
    return dict(model.named_parameters())


@contextmanager
def join_ranks(config: RunConfig) -> Iterator[Ranks | None]:
    """Join the learner processes, this one as rank 0; yields None for a single process.

    Raises:
        ConfigError: ``train.sequence_parallel`` does not divide the number of processes.
        RanksLost: the rendezvous failed.
    """
    if world_size() == 1:
        yield None
        return
    with _process_group(config) as ranks:
        yield ranks


@contextmanager
def make_learner(
    config: RunConfig,
    *,
    model: PreTrainedModel,
    stored: StoredModel | None = None,
    ranks: Ranks | None,
    threads: Threads | None = None,
    trace: Trace = UNTRACED,
) -> Iterator[Learner]:
    """Yield the learner of a run, which trains ``model``; the other ranks stop on exit.

    ``stored`` has the weights of a model on the meta device.

    Raises:
        ConfigError: the model does not support the configuration.
    """
    limit_memory(config)
    options = learner_options(config, model=model) | {"stored": stored, "threads": threads, "trace": trace}
    if ranks is None:
        with _as_config_errors():
            learner = Learner(model, device=config.engine.device, **options)
        yield learner
    else:
        with _as_config_errors():
            lead = LeadLearner(model, ranks=ranks, **options)
        with closing(lead):
            yield lead


def make_critic(
    config: RunConfig,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks | None = None,
    threads: Threads | None = None,
) -> Critic | None:
    """Return the critic of a run, or None without credit by a critic. It is on rank 0 alone.

    Args:
        config: configuration of the run.
        model: the initial policy, before it is given adapters; the critic begins as a copy of it.
        tokenizer: tokenizer of the policy.
        ranks: the learner processes, whose first one has the critic.
        threads: CPU threads of the learner.

    Raises:
        ConfigError: the model of the critic cannot be loaded, or has another vocabulary.
    """
    settings, train = config.critic, config.train
    if settings is None:
        return None
    device = config.engine.device if ranks is None else str(ranks.device)
    if settings.model is None and any(value.is_meta for value in model.parameters()):
        model, _ = load_policy(config.model.path, dtype=config.model.dtype, revision=config.model.revision)
    if settings.model is not None:
        model, own = load_policy(settings.model, device=device)
        if own.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"algorithm.credit.model = {settings.model!r} has another vocabulary than the policy, "
                "whose tokens it reads: use a model of the same family, or leave it out"
            )
    kind: Callable[..., Critic] = partial(PrivilegedCritic, temperature=config.engine.temperature)
    if isinstance(settings, GaeCredit):
        kind = partial(ValueCritic, objective=partial(value_loss, clip=settings.clip or None))
    elif isinstance(settings, Archer):
        kind = partial(TwinCritic, target_rate=settings.target_rate)
    with _as_config_errors():
        return kind(
            copy_of(model),
            learning_rate=settings.learning_rate,
            betas=train.betas,
            weight_decay=train.weight_decay,
            max_grad_norm=CRITIC_GRAD_NORM,
            spike_factor=train.spike_factor,
            precision=train.precision,
            device=device,
            activation_checkpointing=train.activation_checkpointing,
            offload_optimizer=train.offload_optimizer,
            attention=config.model.attention,
            threads=threads,
        )


def limit_memory(config: RunConfig) -> None:
    """Limit what this learner process allocates on its GPU, if an engine works there at the same time."""
    share = config.learner_memory_fraction
    if share is not None:
        torch.cuda.set_per_process_memory_fraction(share)


@contextmanager
def _as_config_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def run_follower(config: RunConfig) -> None:
    """Run a rank other than 0 until rank 0 finishes.

    Raises:
        RanksLost: rank 0 or another rank failed or exited.
    """
    die_with_parent()
    torch.set_num_threads(config.run.threads or 1)
    with _process_group(config) as ranks:
        limit_memory(config)
        model, _, stored = open_policy(
            config.model.path, dtype=config.model.dtype, revision=config.model.revision
        )
        options = learner_options(config, model=model) | {"stored": stored}
        with _as_config_errors():
            learner = Learner(
                model, mesh=ranks.mesh, device=ranks.device, storage_group=ranks.storage, **options
            )
        execute_commands(learner, ranks)


def learner_options(config: RunConfig, *, model: PreTrainedModel) -> dict[str, Any]:
    """Return the arguments of ``Learner`` that are equal on every rank."""
    algorithm, train = config.algorithm, config.train
    teacher = partial(
        open_teacher,
        policy=config.model.path,
        revision=config.model.revision,
        dtype=config.model.dtype,
    )
    return {
        "teachers": {path: teacher(path) for path in sorted(set(config.algorithm.distill.teachers.values()))},
        "objective": objective_function(algorithm),
        "recompute": algorithm.recomputes,
        "learning_rate": train.learning_rate,
        "betas": train.betas,
        "weight_decay": train.weight_decay,
        "warmup_steps": config.warmup_steps * train.minibatches,
        "total_steps": config.run.steps * train.minibatches,
        "final_lr_fraction": train.decay.to,
        "decay_fraction": train.decay.over,
        "lr_decay": train.decay.name,
        "max_grad_norm": train.max_grad_norm,
        "spike_factor": train.spike_factor,
        "temperature": config.engine.temperature,
        "precision": train.precision,
        "activation_checkpointing": train.activation_checkpointing,
        "attention": config.model.attention,
        "offload_optimizer": train.offload_optimizer,
        "lora": Lora(**train.lora.model_dump()) if train.lora else None,
        "entropy_coefficient": algorithm.entropy_coefficient,
        "reference": copy_of(model) if algorithm.kl.coefficient and train.lora is None else None,
        "kl_coefficient": algorithm.kl.coefficient,
        "kl_estimator": algorithm.kl.estimator,
    }


def _process_group(config: RunConfig) -> AbstractContextManager[Ranks]:
    return process_group(
        device=config.engine.device,
        sequence_parallel=config.train.sequence_parallel,
        timeout_s=config.train.rank_timeout_s,
    )
