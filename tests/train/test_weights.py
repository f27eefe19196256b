"""Compare log-probabilities of engine and trainer."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from agentrl_train.config import EngineSection, ModelSection, TrainSection
from agentrl_train.engine.transfer import SharedWeights
from agentrl_train.errors import ConfigError, WeightMismatch
from agentrl_train.learner.sharding import GatheredWeights
from agentrl_train.storage.checkpoint import InModelFolder, save_checkpoint
from agentrl_train.training.engines import saved_weights, tolerance
from agentrl_train.types import Completion
from agentrl_train.weights import (
    FLOAT32,
    Canary,
    Drift,
    Publisher,
    drift,
    probe_sequence,
    require_agreement,
    require_same_parameters,
)
from tests.tiny_models import make_model, make_tokenizer


def sampled(logprobs: list[float], versions: list[int]):
    completion = Completion(
        token_ids=[5] * len(logprobs), logprobs=logprobs, versions=versions, finish_reason="length"
    )
    return probe_sequence([1, 2], completion)


def test_drift_compares_only_tokens_of_version() -> None:
    sequence = sampled([-1.0, -2.0, -3.0], [1, 2, 2])
    trainer = np.array([9.0, 9.0, 9.0, -2.5, -3.1])
    found = drift([trainer], [sequence], version=2)
    assert (found.worst, found.mean) == (pytest.approx(0.5), pytest.approx(0.3))
    assert drift([trainer], [sequence], version=3) == Drift()


def test_drift_of_truncated_sampling_counts_only_less_probable_tokens_in_the_engine() -> None:
    sequence = sampled([-1.0, -2.0, -3.0], [2, 2, 2])
    trainer = np.array([9.0, 9.0, -1.7, -2.4, -2.9])
    found = drift([trainer], [sequence], version=2, truncated=True)
    assert (found.worst, found.mean) == (pytest.approx(0.1), pytest.approx(0.1 / 3))


def test_single_outliers_are_accepted_if_mean_is_within_tolerance() -> None:
    coarse = Drift(worst=math.inf, mean=0.1)
    require_agreement(Drift(worst=0.6, mean=0.04), tolerance=coarse, version=1)
    with pytest.raises(WeightMismatch, match=r"on average by 2\.00e-01 .* version 1 \(tolerance 0\.1\)"):
        require_agreement(Drift(worst=0.6, mean=0.2), tolerance=coarse, version=1)
    with pytest.raises(WeightMismatch, match=r"differ by 6\.00e-01"):
        require_agreement(Drift(worst=0.6, mean=1e-5), tolerance=FLOAT32, version=1)


@pytest.mark.parametrize(("temperature", "factor"), [(0.0, 1), (0.5, 2), (1.0, 1), (2.0, 1)])
def test_tolerance_for_rounding_grows_as_the_temperature_falls_below_1(
    temperature: float, factor: int
) -> None:
    engine = EngineSection(temperature=temperature, dtype="float32")
    accepted = tolerance(
        engine,
        ModelSection(path="any"),
        TrainSection(learning_rate=1e-5, precision="float32"),
        model=torch.nn.Linear(1, 1),
    )
    assert (accepted.worst, accepted.mean) == (factor * FLOAT32.worst, factor * FLOAT32.mean)


def test_nan_in_the_engine_is_a_mismatch() -> None:
    found = drift([np.array([0.0, 0.0, -1.0])], [sampled([math.nan], [1])], version=1)
    with pytest.raises(WeightMismatch, match="the engine does not hold the trainer's weights"):
        require_agreement(found, tolerance=Drift(worst=math.inf, mean=0.1), version=1)


@pytest.mark.parametrize("engine", [math.nan, -1.0])
@pytest.mark.parametrize("trainer", [math.nan, -math.inf])
def test_nan_in_the_trainer_is_attributed_to_the_weights_and_not_the_engine(
    engine: float, trainer: float
) -> None:
    with pytest.raises(WeightMismatch, match=r"the weights contain NaN .* check the files of model\.path"):
        drift([np.array([0.0, 0.0, trainer])], [sampled([engine], [1])], version=1)


@pytest.mark.parametrize("other", [{"a": (2, 3)}, {"a": (2, 3), "b": (5,)}, {"a": (2, 3), "c": (4,)}])
def test_model_of_another_architecture_cannot_be_the_stale_policy(other: dict[str, tuple[int, ...]]) -> None:
    policy = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    require_same_parameters({name: one + 1 for name, one in policy.items()}, policy)
    with pytest.raises(ConfigError, match=r"another architecture .* differ, such as [bc]; use a model"):
        require_same_parameters({name: torch.zeros(shape) for name, shape in other.items()}, policy)


class Pushes:
    """Records the version of each policy, and a parameter of its weights."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[int, torch.Tensor]] = {}

    def publish(
        self, state: Mapping[str, torch.Tensor], *, policy_version: int, policies: Sequence[str]
    ) -> None:
        self.held |= dict.fromkeys(policies, (policy_version, next(iter(state.values()))))


@pytest.mark.parametrize(
    ("version", "stale", "logged"), [(6, 4, False), (4, 4, False), (9, 9, True), (12, 12, False)]
)
def test_stale_policy_of_a_resumed_run_has_the_weights_of_its_last_refresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int, stale: int, logged: bool
) -> None:
    parts = [InModelFolder(pretrained=one) for one in (make_model(seed=4), make_tokenizer())]
    save_checkpoint(tmp_path, step=4, parts=parts, loop={})
    pushes, saved = Pushes(), partial(saved_weights, tmp_path, interval=4, dtype="float32")
    weights = dict(make_model(seed=version).named_parameters())
    publisher = Publisher(pushes, stale_interval=4, stale=saved)
    publisher.publish(weights, policy_version=version, everywhere=True)
    assert pushes.held["current"][0] == version
    assert pushes.held["stale"][0] == stale
    assert torch.equal(pushes.held["stale"][1], next(make_model(seed=stale).parameters()))
    assert ("the checkpoint of step 8 is missing or damaged" in caplog.text) == logged
    publisher.publish(weights, policy_version=version + 1)
    assert pushes.held["stale"][0] == stale


def test_checkpoints_to_keep_for_the_stale_policy_are_its_refreshes() -> None:
    assert Publisher(Pushes(), stale_interval=4).refreshes([7, 8, 9, 13]) == {4, 8, 12}
    assert Publisher(Pushes()).refreshes([7, 8]) == set()


def canary(noise: Callable[[np.random.Generator, int], np.ndarray]) -> Canary:
    """Return a canary with noise between trainer and engine."""
    draws = np.random.default_rng(0)

    def probe(token_ids, *, sampling, policies):
        size = sampling.max_new_tokens
        return [
            Completion(
                token_ids=[5] * size,
                logprobs=[-2.0] * size,
                versions=[sampling.seed] * size,
                finish_reason="length",
            )
        ]

    return Canary(
        probe,
        logprobs=lambda rows: [row.logprobs + noise(draws, len(row)) for row in rows],
        vocabulary=100,
        temperature=1.0,
        tolerance=Drift(worst=math.inf, mean=0.1),
    )


def rounding(draws: np.random.Generator, size: int) -> np.ndarray:
    """Return differences typical of bfloat16: small values, and occasionally a nat."""
    return np.where(draws.random(size) < 0.01, 1.0, 0.02)


def test_canary_accepts_rounding_and_rejects_other_weights() -> None:
    one = canary(rounding)
    found = [one.check(["current"], version=version) for version in range(300)]
    assert max(drift.mean for drift in found) <= 0.1
    with pytest.raises(WeightMismatch, match="on average by"):
        canary(lambda draws, size: np.full(size, 0.3)).check(["current"], version=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_model_is_gathered_once_per_push(dtype: torch.dtype) -> None:
    whole = {f"layers.{n}.größe": torch.randn(3, n + 1, 5) for n in range(4)} | {"scale": torch.tensor(2.0)}
    asked: list[str] = []

    def gather(names):
        asked.extend(names)
        return {name: whole[name] for name in names}

    weights = SharedWeights(
        GatheredWeights([[name] for name in whole], gather), dtype=dtype, policy_version=1
    )
    with safe_open(weights.path, framework="pt") as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    weights.close()
    assert asked == list(whole)
    assert read.keys() == whole.keys()
    assert all(torch.equal(read[name], whole[name].to(dtype)) for name in whole)
