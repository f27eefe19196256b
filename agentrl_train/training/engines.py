"""Builds engines, their threads, and the publisher of weights."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl_train.chat import ChatFormat
from agentrl_train.config import EngineSection, ModelSection, RolloutSection, TrainSection
from agentrl_train.config.sections import RunSection
from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.pool import EnginePool
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.errors import ConfigError
from agentrl_train.models.adapters import adapter_base, adapter_revision
from agentrl_train.models.architecture import Threads
from agentrl_train.models.checkpoint_names import CheckpointNames
from agentrl_train.models.loading import copy_of, load_policy, with_dtype
from agentrl_train.models.sources import local_model
from agentrl_train.placement.devices import Processes
from agentrl_train.placement.launcher import Launcher
from agentrl_train.storage.checkpoint import is_intact
from agentrl_train.types import RunningEngine, Trace
from agentrl_train.weights import (
    FLOAT32,
    FOREIGN,
    Canary,
    Drift,
    LogProbs,
    Publisher,
    StaleWeights,
    last_refresh,
)

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 2**30
TORCH_SERVING = "agentrl_train.placement.serving"


def threads_each(run: RunSection, rollout: RolloutSection) -> int:
    """Return the thread count of engine and learner each: half of all if both run concurrently."""
    threads = run.threads or os.cpu_count() or 1
    return threads if rollout.max_staleness == 0 else max(1, threads // 2)


def make_threads(run: RunSection, rollout: RolloutSection, *, apart: bool) -> tuple[Threads, Threads]:
    """Return the numbers of CPU threads of the engine and of the learner.

    In an asynchronous run both share one object, so that one can use all threads while the other waits. If
    the engine is ``apart`` in other processes, or the run is synchronous and must be reproducible, the
    numbers are separate and do not change.
    """
    if apart or rollout.max_staleness == 0:
        each = threads_each(run, rollout)
        return Threads(each), Threads(each)
    shared = Threads(run.threads or os.cpu_count() or 1)
    return shared, shared


def make_engine(
    processes: Processes,
    section: ModelSection,
    *,
    model: PreTrainedModel,
    path: str,
    chat: ChatFormat,
    sessions: Mapping[str, int],
    threads: Threads,
    process_threads: int,
    trace: Trace,
    launcher: Launcher,
) -> TorchEngine | EnginePool:
    """Start the engine of a run.

    Args:
        processes: the processes of the run.
        section: settings of the model.
        model: the initial policy, with or without weights.
        path: source of ``model``: a folder or a hub name. If the folder has an adapter, engines in other
            processes start with the base model until weights are published.
        chat: chat format of the policy.
        sessions: sampling policy -> number of its concurrent episodes.
        threads: CPU threads of an engine in this process.
        process_threads: CPU threads of a torch engine in its own process.
        trace: trace of the run.
        launcher: starts the engine processes on its devices.

    Raises:
        ConfigError: vLLM is configured and not installed.
    """
    engine = with_dtype(processes.engine, model)
    processes = replace(processes, engine=engine)
    if engine.kind == "vllm" or launcher.separate_engines:
        options = _serving_options(processes, launcher=launcher, path=path, threads=process_threads)
        revision = adapter_revision(Path(path)) or section.revision
        options = replace(options, revision=revision, stop_token_ids=chat.stop_token_ids)
        return _engine_pool(processes, options, model=model, launcher=launcher)
    device = launcher.devices.torch_engine_device or engine.device
    if any(value.is_meta for value in model.parameters()):
        model, _ = load_policy(path, dtype=section.dtype, revision=section.revision)
    return TorchEngine(
        {name: copy_of(model, dtype=engine.dtype, device=device) for name in processes.replicas},
        stop_token_ids=chat.stop_token_ids,
        tokenizer=chat.tokenizer,
        max_sequences=sessions,
        max_context=engine.max_context,
        deadline_s=engine.completion_deadline_s,
        threads=threads,
        deterministic=engine.deterministic,
        trace=trace,
    )


def _serving_options(processes: Processes, *, launcher: Launcher, path: str, threads: int) -> ServingOptions:
    """Return the options of an engine process, except the options of the model."""
    engine, vllm = processes.engine, processes.engine.vllm
    on_cpu = engine.device == "cpu"
    options = ServingOptions(
        model=adapter_base(Path(path)) or local_model(path),
        stop_token_ids=(),
        max_sessions=engine.max_sessions,
        max_context=engine.max_context,
        dtype=engine.dtype,
        device="cpu" if on_cpu else "cuda",
        args=({"kv_cache_memory_bytes": CPU_KV_BYTES} if on_cpu else {}) | vllm.args,
        devices=launcher.devices.engine,
        transfer=vllm.transfer,
        sleeps=processes.placement.layout == "colocated" and not on_cpu,
        deterministic=engine.deterministic,
        deadline_s=engine.completion_deadline_s,
    )
    return options if engine.kind == "vllm" else replace(options, module=TORCH_SERVING, threads=threads)


def _engine_pool(
    processes: Processes, options: ServingOptions, *, model: PreTrainedModel, launcher: Launcher
) -> EnginePool:
    """Return engines in separate processes."""
    engine, vllm = processes.engine, processes.engine.vllm
    python = sys.executable
    if engine.kind == "vllm":
        python = vllm.python or python
        require_vllm(python)
        if vllm.transfer != "memory" and find_spec("vllm") is None:
            raise ConfigError(
                f"engine.vllm.transfer = {vllm.transfer!r} needs vLLM in the trainer's Python as well: "
                "install agentrl-kit[vllm] there, or set it to 'memory'"
            )
    return EnginePool(
        options,
        policies=tuple(processes.replicas),
        replicas=processes.replicas,
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
    engine: RunningEngine,
    rollout: RolloutSection,
    *,
    dtype: str,
    temperature: float,
    logprobs: LogProbs,
    tokenizer: PreTrainedTokenizerBase,
    tolerance: Drift,
    checkpoints: Path,
) -> Publisher:
    """Return the publisher; for engines in other processes it verifies each push with a canary.

    Args:
        engine: receives the weights.
        rollout: settings of the stale policy.
        dtype: dtype of the weights.
        temperature: sampling temperature of the run.
        logprobs: computes log-probabilities with the trainer's weights.
        tokenizer: tokenizer of the policy.
        tolerance: accepted differences in log-probability, due to rounding.
        checkpoints: the checkpoints of the run. A resumed run takes the weights of the stale policy from
            them.
    """
    canary = None
    if isinstance(engine, EnginePool):
        canary = Canary(
            engine.probe,
            logprobs=logprobs,
            vocabulary=len(tokenizer),
            temperature=temperature,
            tolerance=tolerance,
        )
    chosen = rollout.stale
    if chosen.fraction == 0:
        return Publisher(engine, canary=canary)
    if chosen.model is not None:
        stale = partial(_foreign_weights, chosen.model, dtype=dtype, tokenizer=tokenizer)
        return Publisher(engine, stale=stale, canary=canary)
    saved = partial(saved_weights, checkpoints, interval=chosen.interval, dtype=dtype)
    return Publisher(engine, stale_interval=chosen.interval, stale=saved, canary=canary)


def saved_weights(checkpoints: Path, version: int, *, interval: int, dtype: str) -> StaleWeights | None:
    """Return the weights that the stale policy has at a version, from the checkpoint of its last refresh.

    Return None if the policy is refreshed at this version, or if the checkpoint is missing or damaged. The
    stale policy then has the current weights.
    """
    refresh = last_refresh(version, interval=interval)
    if refresh == version:
        return None
    if not is_intact(checkpoints, refresh):
        logger.warning(
            "the checkpoint of step %d is missing or damaged, so the stale policy samples with the weights "
            "of step %d until its next refresh at step %d",
            refresh,
            version,
            refresh + interval,
        )
        return None
    model, _ = load_policy(str(checkpoints / f"step_{refresh:06d}" / "model"), dtype=dtype)
    return StaleWeights(weights=dict(model.named_parameters()), version=refresh)


def _foreign_weights(
    path: str, _version: int, *, dtype: str, tokenizer: PreTrainedTokenizerBase
) -> StaleWeights:
    """Return the weights of ``rollout.stale.model``. Raises ConfigError if its vocabulary differs."""
    model, own = load_policy(path, dtype=dtype)
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"rollout.stale.model = {path!r} has another vocabulary than the policy, whose contexts it "
            "continues: use a model of the same family"
        )
    return StaleWeights(weights=dict(model.named_parameters()), version=FOREIGN)


def tolerance(
    engine: EngineSection, section: ModelSection, train: TrainSection, *, model: PreTrainedModel
) -> Drift:
    """Return the tolerated difference in log-probability between engine and trainer.

    With less precision than float32, and between different GPU kernels, single tokens differ by up to half a
    nat. In these cases only the mean detects wrong weights.

    Args:
        engine: settings of the engine.
        section: settings of the model.
        train: settings of the learner, with its precision.
        model: the policy, with or without weights.
    """
    if {with_dtype(engine, model).dtype, section.dtype, train.precision} != {"float32"}:
        return Drift(worst=math.inf, mean=0.1)
    if engine.device != "cpu":
        return Drift(worst=math.inf, mean=0.01)
    exact = FLOAT32 if engine.kind == "torch" else Drift(worst=1e-3, mean=1e-3)
    scale = min(1.0, engine.temperature)  # logits are divided by it, and so are their differences
    return Drift(worst=exact.worst / scale, mean=exact.mean / scale) if scale else exact
