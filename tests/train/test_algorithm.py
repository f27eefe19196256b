"""Presets, functions named in a configuration, and combinations that are rejected."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl_train import advantage, loss
from agentrl_train.algorithm import advantage_function, objective_function, signal_function
from agentrl_train.batch import pack
from agentrl_train.config import AlgorithmSection, RunConfig, TrainSection, load_config
from agentrl_train.config.algorithm import GAE
from agentrl_train.config.functions import imported
from agentrl_train.config.loading import PRESETS
from agentrl_train.config.sections import CriticSection
from agentrl_train.config.toml import read_toml
from agentrl_train.critics.networks import ValueCritic
from agentrl_train.critics.trainer import critic_trainer
from agentrl_train.errors import ConfigError
from agentrl_train.learner import Learner
from agentrl_train.training.compose import learner_options
from agentrl_train.training.diagnosis import turn_rewards_warning
from tests.train.learner.test_learner import made, qwen
from tests.train.test_credit import rewarded
from tests.train.test_regions import six

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/quickstart/train.toml"
OWN = ROOT / "examples/own-method/train.toml"
NAMES = sorted(path.stem for path in PRESETS.glob("*.toml"))
NEEDED = {"distill": ["distill.teachers={'*' = 'org/teacher'}"]}
"""Keys without which a preset is not complete."""
ONE_OF = {
    "credit": ("trajectory", "turn", "state"),
    "baseline": ("mean", "leave_one_out", "length_weighted", "greedy", "batch_mean", "none"),
    "scale": ("std", "batch_std", "mean", "none"),
    "anchor": ("behaviour", "old", "interpolated"),
    "ratio": ("token", "turn", "sequence", "sequence_token", "geometric"),
    "region": ("clip", "cap", "soft", "divergence", "band", "none"),
}

ESTIMATED = ("algorithm.credit=gae_token", "algorithm.baseline=value", "algorithm.scale=none")


def plain_config(*overrides: str, name: str = "mine") -> RunConfig:
    """Return a configuration whose ``[algorithm]`` is empty but for the overrides."""
    return load_config(OWN, [f"run.name={name}", "algorithm={}", *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        plain_config(*overrides)
    return str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_preset_loads_and_states_every_choice_of_advantage_and_loss(name: str) -> None:
    config = plain_config(f"algorithm.preset={name}", *NEEDED.get(name, []))
    stated = read_toml(PRESETS / f"{name}.toml")["algorithm"]
    needed = {"credit", "baseline", "scale", "normalization", "anchor", "ratio", "region", "aggregation"}
    assert stated.keys() >= needed
    for key, value in stated.items():
        assert getattr(config.algorithm, key) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("name", NAMES)
def test_preset_gives_advantages_and_a_finite_gradient(name: str) -> None:
    algorithm = plain_config(f"algorithm.preset={name}", *NEEDED.get(name, [])).algorithm
    groups = [rewarded([0, 1], [0.0], [0, 0]), rewarded([2.0], [0, 1], [1.0], number=1)]
    if algorithm.baseline == "greedy":
        groups = [replace(one, greedy=one.trajectories[0]) for one in groups]
    if algorithm.credit in ("archer", "sweet"):
        found = [[np.ones(1)]]
    elif algorithm.credit in GAE:
        sections = {"settings": CriticSection(), "algorithm": algorithm, "train": TrainSection()}
        critic = ValueCritic(qwen(), learning_rate=1e-3)
        trainer = critic_trainer(critic, **sections, max_context=512, encode=str.encode)
        found = [[row.advantages for row in trainer.rows(groups)]]
    else:
        found = advantage_function(algorithm, max_context=512)(groups)
    assert any(turns is not None and turns.any() for one in found for turns in one)
    given = six(1)
    given = loss.Tokens(
        **{key: getattr(given, key) for key in loss.Tokens.__slots__}
        | {"old": given.behaviour + 0.1, "ages": torch.tensor([0, 1, 2, 3, 0, 1])}
    )
    value, _ = objective_function(algorithm)(given)
    value.backward()
    assert given.logprobs.grad.isfinite().all()
    assert given.logprobs.grad.any()


def test_key_overrides_its_preset_and_the_recorded_configuration_is_complete(tmp_path: Path) -> None:
    config = plain_config("algorithm.preset=agentrl", "algorithm.clip_low=0.1", "rollout.stale_interval=3")
    assert (config.algorithm.clip_low, config.algorithm.truncation_penalty) == (0.1, 0.2)
    assert (config.rollout.stale_fraction, config.rollout.stale_interval) == (0.25, 3)
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "config.toml") == config


def test_preset_of_a_file_may_name_functions_beside_it(tmp_path: Path) -> None:
    (tmp_path / "best.py").write_text("def best(siblings):\n    return float(siblings.returns.max())\n")
    (tmp_path / "mine.toml").write_text('[algorithm]\nbaseline = "best.py:best"\nnormalization = "none"\n')
    config = plain_config(f"algorithm.preset={tmp_path}/mine.toml", "algorithm.scale=none")
    (found,) = advantage_function(config.algorithm, max_context=512)([rewarded([1.0], [0.0])])
    assert np.concatenate(found).tolist() == [0.0, -1.0]


@pytest.mark.parametrize(("key", "name"), [(key, name) for key, names in ONE_OF.items() for name in names])
def test_every_value_of_a_choice_has_a_function(key: str, name: str) -> None:
    section = AlgorithmSection.model_construct(**AlgorithmSection().model_dump() | {key: name})
    pieces = advantage_function(section, max_context=512).keywords
    pieces = pieces | objective_function(section).keywords
    chosen = pieces[key].func if isinstance(pieces[key], partial) else pieces[key]
    assert chosen.__module__ in (advantage.__name__, loss.__name__)
    with pytest.raises(ConfigError, match="is none of"):
        plain_config(f"algorithm.{key}=anything")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["rollout.group_size=1"], "compares siblings"),
        (["rollout.group_size=1", "algorithm.baseline=none"], "needs the spread of siblings"),
        (["rollout.group_size=1", "algorithm.keep_groups=0.5"], "by the spread of their rewards"),
        (["algorithm.credit=gae"], "say what an action is: 'gae_token'"),
        ([*ESTIMATED], "add a section [critic]"),
        (["critic.clip=0.2"], "does not use: set it to one of gae_token"),
        (["critic.clip=0.2", "algorithm.credit=gae_turn"], "has the critic's values as its baseline"),
        (["algorithm.baseline=value"], "has the critic's values as its baseline"),
        ([*ESTIMATED, "critic.clip=0.2", "algorithm.scale=std"], "and no scale"),
        ([*ESTIMATED, "critic.warmup_steps=20"], "must be below run.steps (20)"),
        ([*ESTIMATED, "critic.clip=0.2", "algorithm.ratio=sequence"], "use ratio = 'sequence_token'"),
        ([*ESTIMATED, "critic.clip=0.2", "algorithm.dynamic_sampling=2"], "use a baseline of the group"),
        (
            [*ESTIMATED, "algorithm.credit=sweet", "critic.beta=0.1", "rollout.group_size=1"],
            "learns from pairs of siblings",
        ),
        ([*ESTIMATED, "critic.replay=8"], "is of credit 'archer'"),
        ([*ESTIMATED, "critic.pairs=4"], "ranked by the critic of credit 'sweet'"),
        (["algorithm.preset=sweet", "critic.pairs=4"], "set both, or neither"),
        (["algorithm.preset=sweet", "rollout.alternatives=4"], "set both, or neither"),
        (["algorithm.preset=sweet_dpo", "algorithm.aggregation=sequence_mean"], "weighs all pairs equally"),
        (["rollout.alternatives=4"], "are for critic.pairs of credit 'sweet' alone"),
        ([*ESTIMATED, "critic.model=./none"], "critic.model: there is no folder"),
        (["algorithm.baseline=greedy", "algorithm.credit=turn"], "no single turn can be compared"),
        (["algorithm.baseline=batch_mean", "algorithm.normalization=batch"], "both centre the batch"),
        (["algorithm.baseline=none", "algorithm.dynamic_sampling=2"], "use a baseline of the group"),
        (["algorithm.anchor=old"], "takes the recomputed policy for the sampler"),
        (["algorithm.correction=truncate"], "which is the anchor"),
        (["algorithm.anchor=interpolated"], "nothing weighs the difference"),
        (["algorithm.ratio=geometric"], "bound it twice"),
        (["algorithm.ratio=sequence", "algorithm.credit=turn"], "use ratio = 'sequence_token'"),
        (["algorithm.region=divergence", "algorithm.ratio=turn"], "compares the probabilities of tokens"),
        (["algorithm.ratio=sequence", "train.sequence_parallel=2"], "needs whole sequences on a rank"),
        (["algorithm.overlong_buffer=9999"], "must be below engine.max_context"),
        (["algorithm.dual_clip=1.1"], "must be above 1 + clip_high"),
        (
            ["algorithm.anchor=old", "algorithm.correction=mask", "algorithm.importance_floor=3"],
            "must be below importance_cap",
        ),
        (["engine.top_p=0.9"], "from another distribution"),
        (["algorithm.preset=gsp"], "is none of a3po, agentrl"),
        (["algorithm.region=none.py:gate"], "there is no"),
        (["advantage.scale=none"], "its keys are in algorithm now"),
        (["train.clip_low=0.1"], "did you mean algorithm.clip_low"),
    ],
)
def test_nonsense_is_rejected_with_the_reason(overrides: list[str], reason: str) -> None:
    assert reason in refusal(*overrides)


def test_recomputed_anchor_is_accepted_in_a_synchronous_run() -> None:
    config = plain_config("algorithm.anchor=old", "rollout.max_staleness=0")
    assert learner_options(config, model=qwen())["loss"].recompute


def test_function_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(ConfigError, match="has no attribute 'gone'"):
        imported(f"{tmp_path}/mine.py:gone")
    with pytest.raises(ConfigError, match="cannot be imported"):
        imported("no_such_module:gone")


def test_signal_of_a_group_includes_penalties() -> None:
    flat, varied = rewarded([1.0], [1.0]), rewarded([1.0], [0.0])
    has_signal = signal_function(AlgorithmSection(), max_context=512)
    assert (has_signal(flat), has_signal(varied)) == (False, True)
    longer = rewarded([0.0, 0.0, 1.0], [1.0])
    soft = signal_function(AlgorithmSection(overlong_buffer=5), max_context=8)
    assert (has_signal(longer), soft(longer)) == (False, True)


def test_episodes_that_a_function_names_are_left_out_after_counting_in_the_baseline(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def long(trajectory):\n    return len(trajectory.turns) > 1\n")
    config = plain_config(
        f'algorithm.leave_out=["void", "{tmp_path}/mine.py:long"]',
        "algorithm.scale=none",
        "algorithm.normalization=none",
    )
    (found,) = advantage_function(config.algorithm, max_context=512)([rewarded([3.0], [0.0, 0.0], [0.0])])
    assert [None if turns is None else turns.tolist() for turns in found] == [[2.0], None, [-1.0]]
    assert "is none of void, repetitive" in refusal('algorithm.leave_out=["boring"]')
    assert "algorithm.leave_out: there is no" in refusal('algorithm.leave_out=["gone.py:boring"]')


def test_method_of_a_user_takes_less_than_30_lines_and_trains() -> None:
    lines = (OWN.parent / "bounded.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 30
    config = load_config(OWN)
    (found,) = advantage_function(config.algorithm, max_context=512)([rewarded([9.0], [1.0], [0.0])])
    assert [float(np.sign(turns[0])) for turns in found] == [1.0, 0.0, -1.0]
    learner = Learner(qwen(), **learner_options(config, model=qwen()))
    before = {name: value.clone() for name, value in learner.weights().items()}
    metrics = learner.step(pack(made()))
    assert 0.0 < metrics["clip_fraction"] <= 1.0
    assert any(not torch.equal(value, before[name]) for name, value in learner.weights().items())


def test_credit_by_turn_without_rewards_of_turns_is_warned_of() -> None:
    warning = turn_rewards_warning([rewarded([0.0, 1.0], [0.0, 0.0])])
    assert warning is not None
    assert "none of 2 turns before the last" in warning
    assert turn_rewards_warning([rewarded([0.5, 1.0], [0.0])]) is None
    assert turn_rewards_warning([rewarded([1.0], [0.0])]) is None
