"""Which engine a configuration means."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from transformers import PreTrainedModel

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.engine.vllm import VllmEngine
from agentrl_train.errors import ConfigError
from agentrl_train.runtime.config import RunConfig
from agentrl_train.runtime.models import copy_of
from agentrl_train.types import Trace
from agentrl_train.weights import Canary, LogProbs, Publisher

KV_GIB_ON_A_CPU = 1.0


def make_engine(
    config: RunConfig,
    *,
    model: PreTrainedModel,
    path: str,
    stop_token_ids: Sequence[int],
    threads: int,
    trace: Trace,
) -> TorchEngine | VllmEngine:
    """Start the engine of a run.

    Args:
        config: of the run.
        model: the policy as the learner begins with it.
        path: where ``model`` came from: a folder or a name on the hub.
        stop_token_ids: tokens that end a completion.
        threads: of an engine on the CPU.
        trace: of the run.

    Raises:
        ConfigError: vLLM is asked for and not installed.
    """
    engine = config.engine
    if engine.kind == "vllm":
        return _vllm(config, path=path, stop_token_ids=stop_token_ids)
    return TorchEngine(
        {name: copy_of(model, dtype=engine.dtype) for name in policies(config)},
        stop_token_ids=stop_token_ids,
        max_sequences=engine.max_sessions,
        max_context=engine.max_context,
        deadline_s=config.rollout.episode_seconds,
        threads=threads,
        deterministic=engine.deterministic,
        trace=trace,
    )


def policies(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the policies that act."""
    return ("current", "stale") if config.rollout.stale_fraction > 0 else ("current",)


def _vllm(config: RunConfig, *, path: str, stop_token_ids: Sequence[int]) -> VllmEngine:
    engine, vllm = config.engine, config.engine.vllm
    python = vllm.python or sys.executable
    require_vllm(python)
    on_cpu = engine.device == "cpu"
    return VllmEngine(
        ServingOptions(
            model=path,
            stop_token_ids=tuple(stop_token_ids),
            max_sessions=engine.max_sessions,
            max_context=engine.max_context,
            dtype=engine.dtype,
            device="cpu" if on_cpu else "cuda",
            kv_gib=vllm.kv_gib or (KV_GIB_ON_A_CPU if on_cpu else None),
            memory_fraction=vllm.memory_fraction,
            tensor_parallel=vllm.tensor_parallel,
            devices=vllm.devices,
            transfer=vllm.transfer,
        ),
        policies=policies(config),
        replicas=vllm.replicas,
        deadline_s=config.rollout.episode_seconds,
        start_s=vllm.start_seconds,
        liveness_s=vllm.silent_seconds,
        push=vllm.push,
        python=python,
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
    engine: TorchEngine | VllmEngine,
    *,
    logprobs: LogProbs,
    context: Sequence[int],
    tolerance: float,
) -> Publisher:
    """Return what puts weights in force; for engines in other processes, it looks whether they really are.

    Args:
        config: of the run.
        engine: where the weights go.
        logprobs: the trainer's log-probabilities of sequences.
        context: what a completion is asked after.
        tolerance: largest difference in log-probability.
    """
    canary = None
    if isinstance(engine, VllmEngine):
        canary = Canary(
            engine.probe,
            logprobs=logprobs,
            context=context,
            temperature=config.engine.temperature,
            tolerance=tolerance,
        )
    cross = config.rollout.stale_fraction > 0
    interval = config.rollout.stale_interval if cross else 0
    return Publisher(engine, stale_interval=interval, canary=canary)
