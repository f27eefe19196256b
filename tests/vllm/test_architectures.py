"""Log-probabilities of mixtures of experts and models with attention windows on vLLM after weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from agentrl_train.batch import pack
from agentrl_train.config import TrainSection
from agentrl_train.engine.pool import EnginePool
from agentrl_train.learner import Learner
from agentrl_train.models.checkpoint_names import CheckpointNames
from agentrl_train.types import SamplingParams, TokenSequence
from agentrl_train.weights import drift, probe_sequence
from tests.architectures import VOCABULARY, WINDOW, tiny

pytestmark = [pytest.mark.vllm, pytest.mark.extended]

TOLERANCE = 1e-3
SERVABLE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 64}
"""Model sizes that the kernels of vLLM support."""


def played(engine: EnginePool, *, version: int) -> list[TokenSequence]:
    """Sample sequences longer than the attention window."""
    rng = np.random.default_rng(version)
    contexts = [rng.integers(3, VOCABULARY, size=size).tolist() for size in (2 * WINDOW, 3 * WINDOW, 5)]

    async def sampled() -> list[TokenSequence]:
        sampling = SamplingParams(max_new_tokens=2 * WINDOW, temperature=1.0, seed=version)
        return [
            probe_sequence(
                context, await engine.generate(context, sampling=sampling, session_key=str(number))
            )
            for number, context in enumerate(contexts)
        ]

    return asyncio.run(sampled())


def different(learner: Learner, engine: EnginePool, *, version: int) -> float:
    """Return the largest log-probability difference between learner and engine."""
    sequences = played(engine, version=version)
    return drift(learner.logprobs(sequences), sequences, version=version).worst


def improve(learner: Learner, engine: EnginePool, *, version: int) -> None:
    """Train on the engine's sequences, so that all weights change."""
    sequences = played(engine, version=version)
    for one in sequences:
        one.advantages[:] = one.loss_mask
    before = {name: value.clone() for name, value in learner.weights().items()}
    learner.step(pack(sequences, max_tokens=200))
    assert any(not torch.equal(before[name], value) for name, value in learner.weights().items())


@pytest.mark.parametrize("name", ["Qwen3-MoE", "OLMoE", "GLM-4.5", "Mistral-v0.1", "Gemma-3", "OLMo-3"])
def test_vllm_agrees_with_learner_before_and_after_pushes(
    name: str, start_engine: Callable[..., EnginePool], tmp_path: Path
) -> None:
    model: PreTrainedModel = tiny(name, **SERVABLE)
    names = CheckpointNames(model)
    learner = Learner(model, TrainSection(learning_rate=0.02))
    learner.snapshot().write(tmp_path)
    engine = start_engine(model=tmp_path / "model", max_context=96, names=names)
    try:
        found = [different(learner, engine, version=0)]
        for version in (1, 2):
            improve(learner, engine, version=version - 1)
            engine.publish(learner.weights(), policy_version=version)
            found.append(different(learner, engine, version=version))
    finally:
        asyncio.run(engine.close())
    print(f"{name}: {', '.join(f'{one:.1e}' for one in found)}")
    assert max(found) < TOLERANCE
