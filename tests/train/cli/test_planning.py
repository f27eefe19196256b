"""The command ``agentrl-train plan``."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from agentrl_train.cli import planning
from agentrl_train.cli.planning import Plan, fit_into_memory, make_plan, plan
from agentrl_train.config import RunConfig, load_config
from agentrl_train.planning.measure import Rates, measure
from agentrl_train.planning.memory import REMEDY, size_of
from agentrl_train.planning.tokens import StepTokens
from tests.tiny_models import make_model, make_tokenizer

BOXES = Path(__file__).parents[3] / "examples/boxes"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    make_model().save_pretrained(tmp_path / "policy")
    make_tokenizer().save_pretrained(tmp_path / "policy")
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
        run = {{name = "one", steps = 4, threads = 1}}
        model = {{path = "policy", tool_parser = "hermes"}}
        environments = [{{serve = ["{BOXES}"]}}]
        engine = {{max_sessions = 4, max_context = 1024, max_new_tokens = 64}}
        rollout = {{groups_per_step = 2, group_size = 4}}
        train = {{micro_batch_tokens = 1024}}
        """
    )
    return load_config(file)


def test_plan_prints_memory_tokens_and_seconds(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(config, measured=True) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == [
        "model", "engine", "learner", "memory", "task", "step", "speed", "time",
    ]  # fmt: skip
    assert printed[3].endswith("fits")
    assert "the expert takes 4.0 turns" in printed[4]
    assert printed[5].split()[1:3] == ["8", "episodes:"]


def test_run_that_does_not_fit_is_not_measured_and_names_the_settings_to_change(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"micro_batch_tokens": 65_536})}
    )
    available = 0.6e9
    monkeypatch.setattr(planning, "available_memory", lambda device: available)
    assert plan(config, measured=True) == 1
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    assert "change   set train.micro_batch_tokens = " in printed
    assert "speed" not in printed


def test_suggested_changes_suffice_and_all_are_necessary(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = size_of(make_model(), REMEDY)
    assert fit_into_memory(config, size) == (config, [])
    large = config.model_copy(
        update={"train": config.train.model_copy(update={"micro_batch_tokens": 65_536})}
    )
    monkeypatch.setattr(planning, "available_memory", lambda device: 0.6e9)
    assert not planning.fits(planning.memory_needs(large, size))
    changed = fit_into_memory(large, size)
    assert changed is not None
    smaller, settings = changed
    assert settings == [f"train.micro_batch_tokens = {smaller.train.micro_batch_tokens}"]
    assert planning.fits(planning.memory_needs(smaller, size))
    monkeypatch.setattr(planning, "available_memory", lambda device: 1e3)
    assert fit_into_memory(large, size) is None


def test_plan_without_a_measurement_has_no_speed(config: RunConfig) -> None:
    found: Plan = make_plan(config, measured=False)
    assert found.rates is None
    assert found.step.sampled > 0


def test_measurement_uses_at_most_the_requested_sessions(config: RunConfig) -> None:
    rates = measure(
        make_model(), engine=config.engine, train=config.train, sessions=3, context=100, budget_s=1.0
    )
    assert rates.sessions <= 3
    assert min(rates.prefill, rates.decode, rates.update) > 0


@pytest.mark.parametrize(("limit", "context"), [(160, 150), (64, 5000)])
def test_measurement_stays_within_the_context_of_the_model(
    config: RunConfig, limit: int, context: int
) -> None:
    model = make_model()
    model.config.max_position_embeddings = limit
    rates = measure(
        model, engine=config.engine, train=config.train, sessions=2, context=context, budget_s=1.0
    )
    assert min(rates.prefill, rates.decode, rates.update) > 0


def test_plan_of_a_model_without_layers_for_adapters_names_other_settings(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 261, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(config.model.path)
    assert make_plan(config, measured=False).changes == []
    monkeypatch.setattr(planning, "available_memory", lambda device: 1e3)
    size = size_of(GPT2LMHeadModel(GPT2Config(**sizes)), remedy=REMEDY)
    offered: list[str] = []
    monkeypatch.setattr(
        planning, "memory_needs", lambda config, size: offered.append(str(config.train.lora)) or []
    )
    fit_into_memory(config, size)
    assert set(offered) == {"None"}


def test_seconds_of_a_step_follow_from_rates_and_tokens() -> None:
    rates = Rates(prefill=100, decode=10, sessions=4, update=50, update_s=2.0, seconds=1.0)
    step = StepTokens(episodes=4, sampled=40, prefilled=200, trained=250)
    assert rates.engine_s(step) == 6.0
    assert rates.learner_s(step, updates=2) == 9.0
