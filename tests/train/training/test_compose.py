"""Factories of engines, learners and critics, and conflicts between their settings."""

import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_train.config import EngineSection, RunConfig, TrainSection, load_config
from agentrl_train.critics.networks import Critic, PrivilegedCritic, TwinCritic, ValueCritic
from agentrl_train.errors import ConfigError
from agentrl_train.learner import Learner
from agentrl_train.loss import policy_loss
from agentrl_train.models.loading import load_policy, open_policy
from agentrl_train.training.compose import learner_options, processes
from agentrl_train.training.engines import require_vllm
from agentrl_train.training.learners import make_critic, make_learner
from tests.architectures import LONGROPE, tiny
from tests.tiny_models import make_model, make_tokenizer

CONFIG = Path(__file__).parents[3] / "examples/quickstart/train.toml"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["engine.vllm.push=drained"], "the settings of [engine.vllm] need kind = 'vllm'"),
        (["engine.kind=vllm", "engine.deterministic=true"], "deterministic needs kind = 'torch'"),
        (["engine.kind=vllm", "engine.vllm.transfer=nccl"], "vllm.transfer = 'nccl' needs device = 'cuda'"),
        (["engine.kind=vllm", "engine.vllm.replicas=0"], "engine.vllm.replicas"),
        (
            ["model.attention=flash_attention_2", "train.sequence_parallel=2"],
            "model.attention = 'flash_attention_2' has no effect with train.sequence_parallel = 2",
        ),
        (["engine.kind=vllm", "engine.vllm.pull=x"], "engine.vllm.pull"),
        (["algorithm.aggregation.tokens=100"], "unknown key algorithm.aggregation.tokens"),
        (["model.template_kwargs={tools='x'}"], "template_kwargs sets 'tools', which a run sets itself"),
        (["eval.concurrent.max_sessions=200"], "leaves no session to training: set it below"),
        (
            ["eval.concurrent=true", "placement.layout=colocated", "rollout.max_staleness=0"],
            "eval.concurrent needs engines that are never asleep",
        ),
        (
            ["eval.concurrent=true", "engine.kind=vllm", "engine.device=cuda", "engine.vllm.transfer=nccl"],
            "set engine.vllm.transfer = 'memory', or eval.concurrent = false",
        ),
    ],
)
def test_conflicting_settings_are_rejected(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(CONFIG, overrides)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "engines"),
    [
        (["rollout.stale.fraction=0"], {"current": 4}),
        (["rollout.stale.fraction=0.1"], {"current": 4, "stale": 1}),
        (["rollout.stale.fraction=0.25"], {"current": 4, "stale": 2}),
        (["rollout.stale.fraction=1"], {"current": 4, "stale": 4}),
        (["rollout.stale.fraction=0", "eval.concurrent=true"], {"current": 4, "evaluation": 1}),
        (["rollout.stale.fraction=0", "eval.concurrent=true", "eval.samples=0"], {"current": 4}),
    ],
)
def test_stale_policy_has_engines_for_its_share_of_the_turns(
    overrides: list[str], engines: dict[str, int]
) -> None:
    chosen = ["engine.kind=vllm", "engine.vllm.replicas=4", "engine.vllm.args.tensor_parallel_size=2"]
    config = load_config(CONFIG, [*chosen, "engine.device=cuda", *overrides])
    assert config.replicas == engines
    assert processes(config).engine_gpus == 2 * sum(engines.values())


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("train.decay.over", 0.5, lambda options: options["train"].decay.over),
        ("algorithm.entropy_coefficient", 0.5, lambda options: options["loss"].entropy_coefficient),
        ("model.attention", "eager", lambda options: options["attention"]),
    ],
)
def test_settings_reach_the_learner(key: str, value: object, read: Callable[[Any], object]) -> None:
    assert read(learner_options(load_config(CONFIG, [f"{key}={value}"]), model=make_model())) == value


def test_learner_of_a_model_with_shorter_contexts_is_refused() -> None:
    model, engine = tiny("Phi-3 long", **LONGROPE), EngineSection(max_context=64, max_new_tokens=16)
    making = make_learner(model, ranks=None, engine=engine, train=TrainSection())
    with pytest.raises(ConfigError, match=r"at most 32 tokens .* engine.max_context is 64: lower it"), making:
        pass
    with make_learner(model, ranks=None, engine=engine.model_copy(update={"max_context": 32})):
        pass


def test_every_option_of_learner_and_loss_has_a_setting() -> None:
    options = learner_options(load_config(CONFIG), model=make_model())
    placement = {"model", "stored", "place", "threads", "trace"}
    assert signature(Learner).parameters.keys() - options.keys() <= placement
    assert signature(policy_loss).parameters.keys() - options["loss"].objective.keywords.keys() == {"tokens"}


def test_standalone_evaluation_needs_only_the_current_policy() -> None:
    options = ["eval.concurrent=true", "rollout.stale.fraction=0.1", "engine.max_sessions=64"]
    config = load_config(CONFIG, options)
    assert config.sessions == {"current": 64, "stale": 64, "evaluation": 16}
    assert config.without_training.policies == ("current",)


def test_vllm_configuration_round_trips(tmp_path: Path) -> None:
    chosen = ["engine.kind=vllm", "engine.vllm.replicas=2", "engine.vllm.push=drained"]
    config = load_config(CONFIG, chosen)
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "config.toml") == config


def test_interpreter_without_vllm_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make vllm"):
        require_vllm(sys.executable)
    with pytest.raises(ConfigError, match="cannot be run"):
        require_vllm(str(tmp_path / "python"))


def critic_of(config: RunConfig, **policy: Any) -> Critic | None:
    return make_critic(
        config.critic,
        train=config.train,
        source=config.model,
        temperature=config.engine.temperature,
        device="cpu",
        **policy,
    )


@pytest.mark.parametrize(
    ("credit", "kind"),
    [("gae_turn", ValueCritic), ("archer", TwinCritic), ("sweet", PrivilegedCritic)],
)
@pytest.mark.parametrize("own", [False, True])
def test_credit_creates_its_critic_from_the_policy_or_another_model(
    credit: str, kind: type, own: bool
) -> None:
    chosen = [f"algorithm.credit={credit}", "algorithm.baseline=value", "algorithm.scale=none"]
    chosen += [
        "algorithm.credit.learning_rate=0.25",
        *[f"algorithm.credit.model={CONFIG.parent}/starter"] * own,
    ]
    config = load_config(CONFIG, chosen)
    policy, tokenizer = load_policy(config.model.path)
    before = {name: value.clone() for name, value in policy.named_parameters()}
    critic = critic_of(config, model=policy, tokenizer=tokenizer)
    assert type(critic) is kind
    assert critic._optimizer.param_groups[0]["lr"] == 0.25
    for name, value in critic.model.base_model.named_parameters():
        assert torch.equal(value, policy.base_model.get_parameter(name))
        assert value.data_ptr() != policy.base_model.get_parameter(name).data_ptr()
    assert all(torch.equal(value, before[name]) for name, value in policy.named_parameters())


def test_critic_with_another_vocabulary_is_rejected() -> None:
    chosen = ["algorithm.preset=ppo", f"algorithm.credit.model={CONFIG.parent}/starter"]
    with pytest.raises(ConfigError, match="another vocabulary than the policy"):
        critic_of(load_config(CONFIG, chosen), model=make_model(), tokenizer=make_tokenizer())


def test_critic_of_a_policy_without_loaded_weights_is_read_from_its_files() -> None:
    config = load_config(CONFIG, ["algorithm.preset=ppo"])
    model, tokenizer, _ = open_policy(config.model.path)
    assert all(value.is_meta for value in model.parameters())
    critic = critic_of(config, model=model, tokenizer=tokenizer)
    assert critic is not None
    whole, _ = load_policy(config.model.path)
    for name, value in critic.model.base_model.named_parameters():
        assert torch.equal(value, whole.base_model.get_parameter(name))


def test_run_without_a_critic_setting_has_no_critic() -> None:
    assert critic_of(load_config(CONFIG), model=make_model(), tokenizer=make_tokenizer()) is None
