"""Which engine a configuration means."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from transformers import PreTrainedModel

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.pool import EnginePool
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.errors import ConfigError
from agentrl_train.runtime.config import RunConfig
from agentrl_train.runtime.models import copy_of
from agentrl_train.runtime.placement.launcher import Launcher
from agentrl_train.types import Trace
from agentrl_train.weights import Canary, Drift, LogProbs, Publisher

KV_GIB_ON_A_CPU = 1.0
TORCH_SERVING = "agentrl_train.runtime.placement.serving"


def make_engine(
    config: RunConfig,
    *,
    model: PreTrainedModel,
    path: str,
    stop_token_ids: Sequence[int],
    threads: int,
    trace: Trace,
    launcher: Launcher,
) -> TorchEngine | EnginePool:
    """Start the engine of a run.

    Args:
        config: of the run.
        model: the policy as the learner begins with it.
        path: where ``model`` came from: a folder or a name on the hub.
        stop_token_ids: tokens that end a completion.
        threads: of an engine on the CPU.
        trace: of the run.
        launcher: says where an engine's processes run, and on which devices.

    Raises:
        ConfigError: vLLM is asked for and not installed.
    """
    engine = config.engine
    if engine.kind == "vllm" or launcher.engines_apart:
        return _processes(
            config, path=path, stop_token_ids=stop_token_ids, threads=threads, launcher=launcher
        )
    device = launcher.devices.of_the_torch_engine or engine.device
    return TorchEngine(
        {name: copy_of(model, dtype=engine.dtype, device=device) for name in config.policies},
        stop_token_ids=stop_token_ids,
        max_sequences=engine.max_sessions,
        max_context=engine.max_context,
        deadline_s=config.rollout.episode_seconds,
        threads=threads,
        deterministic=engine.deterministic,
        trace=trace,
    )


def _processes(
    config: RunConfig, *, path: str, stop_token_ids: Sequence[int], threads: int, launcher: Launcher
) -> EnginePool:
    """Return engines in processes of their own."""
    engine, vllm = config.engine, config.engine.vllm
    python = sys.executable
    on_cpu = engine.device == "cpu"
    options = ServingOptions(
        model=path,
        stop_token_ids=tuple(stop_token_ids),
        max_sessions=engine.max_sessions,
        max_context=engine.max_context,
        dtype=engine.dtype,
        device="cpu" if on_cpu else "cuda",
        kv_gib=vllm.kv_gib or (KV_GIB_ON_A_CPU if on_cpu else None),
        memory_fraction=vllm.memory_fraction,
        tensor_parallel=vllm.tensor_parallel,
        devices=launcher.devices.engine,
        transfer=vllm.transfer,
        sleeps=config.placement.layout == "colocated" and not on_cpu,
        deterministic=engine.deterministic,
        deadline_s=config.rollout.episode_seconds,
    )
    if engine.kind == "vllm":
        python = vllm.python or python
        require_vllm(python)
        if vllm.transfer != "memory" and find_spec("vllm") is None:
            raise ConfigError(
                f"engine.vllm.transfer = {vllm.transfer!r} needs vLLM in the trainer's own Python as well: "
                "install agentrl-kit[vllm] there, or set it to 'memory'"
            )
    else:
        options = replace(options, module=TORCH_SERVING, threads=threads)
    return EnginePool(
        options,
        policies=config.policies,
        replicas=vllm.replicas,
        deadline_s=config.rollout.episode_seconds,
        start_s=vllm.start_seconds,
        liveness_s=vllm.silent_seconds,
        push=vllm.push,
        python=python,
        spawn=launcher.spawn,
    )


def require_vllm(python: str) -> None:
    """Make sure that an interpreter is there and finds vLLM and this package.

    Raises:
        ConfigError: it is not, or does not.
    """
    question = "from importlib.util import find_spec as f; print(f('vllm') and f('agentrl_train') and 1)"
    try:
        answer = subprocess.run(
            [python, "-c", question], capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine.vllm.python = {python!r} cannot be run: {error}") from error
    if answer != "1":
        raise ConfigError(
            f"engine.kind = 'vllm' needs vLLM and agentrl-kit in {python}: install agentrl-kit[vllm] there, "
            "or run `make vllm` and set engine.vllm.python to .venv-vllm/bin/python"
        )


def make_publisher(
    config: RunConfig,
    engine: TorchEngine | EnginePool,
    *,
    logprobs: LogProbs,
    vocabulary: int,
    tolerance: Drift,
) -> Publisher:
    """Return what puts weights in force; for engines in other processes, it looks whether they really are.

    Args:
        config: of the run.
        engine: where the weights go.
        logprobs: the trainer's log-probabilities of sequences.
        vocabulary: number of tokens.
        tolerance: differences in log-probability that rounding explains.
    """
    canary = None
    if isinstance(engine, EnginePool):
        canary = Canary(
            engine.probe,
            logprobs=logprobs,
            vocabulary=vocabulary,
            temperature=config.engine.temperature,
            tolerance=tolerance,
        )
    cross = config.rollout.stale_fraction > 0
    interval = config.rollout.stale_interval if cross else 0
    return Publisher(engine, stale_interval=interval, canary=canary)
