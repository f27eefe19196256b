"""Learning rates by the size of a model."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from agentrl_train.config.sections import LoraSection, SftSection, TrainSection
from agentrl_train.learner.learning_rates import BY_SIZE, LORA_FACTOR, defaults_of, learning_rate_of


def model_of(parameters: int) -> nn.Module:
    return nn.Linear(1, parameters, bias=False, device=torch.device("meta"))


def test_larger_models_have_lower_learning_rates() -> None:
    assert BY_SIZE[-1].parameters == float("inf")
    for small, large in pairwise(BY_SIZE):
        assert small.parameters < large.parameters
        assert small.learning_rate > large.learning_rate
        assert small.imitation_rate > large.imitation_rate


def test_adapters_have_ten_times_the_learning_rate() -> None:
    full, lora = (defaults_of(500_000_000, lora=lora) for lora in (False, True))
    assert lora.learning_rate == LORA_FACTOR * full.learning_rate
    assert 2e-4 >= lora.imitation_rate > full.imitation_rate


@pytest.mark.parametrize(
    ("parameters", "rate"), [(500_000, 5e-4), (135_000_000, 2e-5), (494_000_000, 5e-6), (7_000_000_000, 1e-6)]
)
def test_automatic_learning_rate_depends_on_the_size_of_the_model(parameters: int, rate: float) -> None:
    train, model = TrainSection(), model_of(parameters)
    assert learning_rate_of(train, model) == rate
    lora = TrainSection(lora=LoraSection(rank=4, alpha=8.0))
    assert learning_rate_of(lora, model) == LORA_FACTOR * rate


def test_given_learning_rate_is_kept() -> None:
    assert learning_rate_of(TrainSection(learning_rate=3e-3), model_of(10)) == 3e-3


@pytest.mark.parametrize(
    ("section", "field"), [(TrainSection, "learning_rate"), (SftSection, "imitation_rate")]
)
def test_description_of_the_setting_has_the_learning_rates(
    section: type[TrainSection] | type[SftSection], field: str
) -> None:
    text = section.model_fields["learning_rate"].description or ""
    rates = [word.strip(",") for word in text.split() if word[:1].isdigit() and "e-" in word]
    assert [float(rate) for rate in rates] == [getattr(one, field) for one in BY_SIZE]
