"""Presets, functions named in a configuration, and rejected combinations."""

import sys
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl_train import advantage, loss
from agentrl_train.algorithm import (
    ANCHORS,
    BASELINES,
    CORRECTIONS,
    CREDITS,
    EXCLUSIONS,
    RATIOS,
    REGIONS,
    SCALES,
    advantage_function,
    objective_function,
    signal_function,
)
from agentrl_train.batch import pack
from agentrl_train.config import AlgorithmSection, RunConfig, TrainSection, load_config
from agentrl_train.config.credit import GaeCredit
from agentrl_train.config.functions import Function, Own, imported, names, with_choice
from agentrl_train.config.loading import PRESETS
from agentrl_train.config.toml import classes, read_toml
from agentrl_train.critics.networks import ValueCritic
from agentrl_train.critics.trainer import critic_trainer
from agentrl_train.critics.values import ESTIMATORS
from agentrl_train.errors import ConfigError
from agentrl_train.learner import Learner
from agentrl_train.telemetry.diagnosis import MANY_CLIPPED, turn_rewards_warning
from agentrl_train.training.compose import learner_options
from tests.train.learner.test_learner import made, qwen
from tests.train.test_credit import rewarded
from tests.train.test_regions import six

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/quickstart/train.toml"
OWN = ROOT / "examples/own-method/train.toml"
NAMES = sorted(path.stem for path in PRESETS.glob("*.toml"))
NEEDED = {"distill": ["algorithm.distill.teachers={'*' = 'org/teacher'}"]}
"""Keys that complete a preset."""
FUNCTIONS = {
    "credit": CREDITS | ESTIMATORS,
    "baseline": BASELINES,
    "scale": SCALES,
    "anchor": ANCHORS,
    "ratio": RATIOS,
    "region": REGIONS,
    "correction": CORRECTIONS,
    "leave_out": EXCLUSIONS,
}
WITHOUT_FUNCTION = {"credit": {"archer", "sweet"}, "baseline": {"value"}, "correction": {"none"}}
"""Choices implemented by a critic or by omitting a correction."""

ESTIMATED = ("algorithm.credit=gae_token",)


def plain_config(*overrides: str, name: str = "mine") -> RunConfig:
    """Return a configuration with only the overrides in ``[algorithm]``."""
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
    loaded = config.algorithm.model_dump(mode="json")
    for key, value in stated.items():
        assert with_choice(loaded[key], value) == loaded[key] or value == names_of(loaded[key])


def names_of(value: object) -> object:
    return value["name"] if isinstance(value, dict) else value


@pytest.mark.parametrize("name", NAMES)
def test_preset_gives_advantages_and_a_finite_gradient(name: str) -> None:
    algorithm = plain_config(f"algorithm.preset={name}", *NEEDED.get(name, [])).algorithm
    groups = [rewarded([0, 1], [0.0], [0, 0]), rewarded([2.0], [0, 1], [1.0], number=1)]
    if algorithm.baseline.name == "greedy":
        groups = [replace(one, greedy=one.trajectories[0]) for one in groups]
    if algorithm.credit.name in ("archer", "sweet"):
        found = [[np.ones(1)]]
    elif isinstance(algorithm.credit, GaeCredit):
        sections = {"settings": algorithm.credit, "algorithm": algorithm, "train": TrainSection()}
        critic = ValueCritic(qwen())
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


RARE = {"sampler": 1e-4, "policy": 0.15}
"""Probabilities of a token that was rare when sampled. The ratio is 1,500."""


@pytest.mark.parametrize("age", [1, 2, 8])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", NAMES)
def test_preset_bounds_the_weight_of_a_token_that_was_rare(name: str, advantage: float, age: int) -> None:
    algorithm = plain_config(f"algorithm.preset={name}", *NEEDED.get(name, [])).algorithm
    now = torch.tensor([RARE["policy"]]).double().log().requires_grad_()
    tokens = loss.Tokens(
        logprobs=now,
        behaviour=torch.tensor([RARE["sampler"]]).double().log(),
        old=now.detach().clone(),
        advantages=torch.tensor([advantage]).double(),
        weights=torch.ones(1).double(),
        ages=torch.tensor([age]),
        sequences=torch.zeros(1, dtype=torch.int64),
        turns=torch.zeros(1, dtype=torch.int64),
    )
    objective_function(algorithm)(tokens)[0].backward()
    assert now.grad is not None
    assert float(now.grad.abs()) <= 20.0


def test_bounds_of_weights_change_nothing_near_the_anchor() -> None:
    near, limits = six(2, spread=0.3), {"low": 0.2, "high": 0.2}
    for region, bound in ((loss.divergence, "cap"), (loss.clip, "dual")):
        found, _ = loss.policy_loss(near, region=partial(region, **limits))
        plain, _ = loss.policy_loss(near, region=partial(region, **limits, **{bound: 0.0}))
        assert torch.equal(found, plain)


def test_gspo_clips_nothing_in_a_batch_that_is_one_version_old() -> None:
    """A step moves sequences further than 3e-4, the range meant for steps within an update."""
    objective = objective_function(plain_config("algorithm.preset=gspo").algorithm)
    given = six(4, spread=0.05)
    before = {"old": given.logprobs.detach()}
    tokens = loss.Tokens(**{key: getattr(given, key) for key in loss.Tokens.__slots__} | before)
    assert float(objective(tokens)[1]["clip_fraction"]) == 0.0
    plain = plain_config("algorithm.preset=gspo", "algorithm.anchor=behaviour", "algorithm.correction=none")
    assert float(objective_function(plain.algorithm)(tokens)[1]["clip_fraction"]) > 0.0


@pytest.fixture(scope="module")
def one_version_old() -> loss.Tokens:
    """Return 64 sequences that the version before sampled, as in every step with the default staleness.

    The update between both versions moved each token by 0.02 nats, a large step that gives no warning yet.
    """
    draw, size, kl = torch.Generator().manual_seed(0), (64, 40), 0.02
    now = -torch.empty(size).double().exponential_(2.0, generator=draw)
    moved = torch.empty(size).double().normal_(-kl, (2 * kl) ** 0.5, generator=draw)
    advantages = torch.empty(64, 1).double().normal_(generator=draw).expand(size)
    sequences = torch.arange(64)[:, None].expand(size)
    weights = torch.full(size, 1 / now.numel()).double()
    fields = {"advantages": advantages, "weights": weights, "old": now, "behaviour": now - moved}
    fields |= {"logprobs": now, "sequences": sequences, "ages": torch.ones(size, dtype=torch.int64)}
    turns = sequences * 4 + torch.arange(40) // 10
    return loss.Tokens(**{name: value.flatten() for name, value in fields.items()}, turns=turns.flatten())


def clipped(tokens: loss.Tokens, *overrides: str) -> float:
    """Return the share of clipped tokens in the first update of a step."""
    objective = objective_function(plain_config(*overrides).algorithm)
    return float(objective(tokens)[1]["clip_fraction"]) / len(tokens.logprobs)


@pytest.mark.parametrize("name", NAMES)
def test_preset_clips_few_tokens_of_a_batch_that_is_one_version_old(
    name: str, one_version_old: loss.Tokens
) -> None:
    assert clipped(one_version_old, f"algorithm.preset={name}", *NEEDED.get(name, [])) < MANY_CLIPPED


def test_ratio_of_sequences_to_an_older_sampler_clips_too_many_tokens(one_version_old: loss.Tokens) -> None:
    to_sampler = ("algorithm.anchor=behaviour", "algorithm.correction=none")
    assert clipped(one_version_old, "algorithm.preset=gspo", *to_sampler) > MANY_CLIPPED


def test_key_overrides_its_preset_and_the_recorded_configuration_is_complete(tmp_path: Path) -> None:
    config = plain_config("algorithm.preset=agentrl", "algorithm.region.low=0.1", "rollout.stale.interval=3")
    assert (config.algorithm.region.low, config.algorithm.penalties.incomplete) == (0.1, -0.2)
    assert (config.rollout.stale.fraction, config.rollout.stale.interval) == (0.25, 3)
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "config.toml") == config


def test_preset_of_a_file_can_name_functions_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "best.py").write_text("def best(siblings):\n    return float(siblings.returns.max())\n")
    (tmp_path / "mine.toml").write_text('[algorithm]\nbaseline = "best.py:best"\nnormalization = "none"\n')
    config = plain_config(f"algorithm.preset={tmp_path}/mine.toml", "algorithm.scale=none")
    (found,) = advantage_function(config.algorithm, max_context=512)([rewarded([1.0], [0.0])])
    assert np.concatenate(found).tolist() == [0.0, -1.0]


@pytest.mark.parametrize("key", FUNCTIONS)
def test_every_value_of_a_choice_has_a_function_with_its_parameters(key: str) -> None:
    found = set()
    for model in classes(AlgorithmSection.model_fields[key].annotation):
        assert issubclass(model, Function)
        for name in () if model is Own else set(names(model)) - WITHOUT_FUNCTION.get(key, set()):
            function = FUNCTIONS[key][name]
            found.add(name)
            assert model(name=name).parameters.keys() <= signature(function).parameters.keys()
    assert found == FUNCTIONS[key].keys()
    with pytest.raises(ConfigError, match="is none of"):
        plain_config(f"algorithm.{key}={['anything'] if key == 'leave_out' else 'anything'}")


def test_functions_of_a_file_get_keyword_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def top(siblings, *, share):\n    return share * max(siblings.returns)\n"
    )
    table = f"{{name = '{tmp_path}/mine.py:top', share = 0.5}}"
    config = plain_config(
        f"algorithm.baseline={table}", "algorithm.scale=none", "algorithm.normalization=none"
    )
    (found,) = advantage_function(config.algorithm, max_context=512)([rewarded([1.0], [0.0])])
    assert np.concatenate(found).tolist() == [0.5, -0.5]
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "config.toml") == config


def lowest(siblings: advantage.Siblings) -> float:
    return float(siblings.returns.min())


def test_function_given_in_python_is_used_and_written_by_its_name(tmp_path: Path) -> None:
    chosen = {"baseline": lowest, "scale": {"name": "none"}, "normalization": "none"}
    algorithm = AlgorithmSection(**chosen, region=partial(loss.clip, low=0.1))
    (found,) = advantage_function(algorithm, max_context=512)([rewarded([1.0], [0.0])])
    assert np.concatenate(found).tolist() == [1.0, 0.0]
    assert objective_function(algorithm).keywords["region"] is algorithm.region.name
    config = plain_config().model_copy(update={"algorithm": AlgorithmSection(**chosen)})
    assert 'baseline = "tests.train.test_algorithm:lowest"' in config.to_toml()
    (tmp_path / "config.toml").write_text(config.to_toml())
    again = load_config(tmp_path / "config.toml").algorithm
    assert again.baseline.called is lowest


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["rollout.group_size=1"], "compares siblings"),
        (
            ["algorithm.preset=a3po", "rollout.stale={fraction = 0.25, model = 'org/other'}"],
            "which tokens of rollout.stale.model do not have",
        ),
        (["rollout.group_size=1", "algorithm.baseline=none"], "needs the spread of siblings"),
        (["rollout.group_size=1", "algorithm.keep_groups=0.5"], "by the spread of their rewards"),
        (["algorithm.credit=gae"], "is none of trajectory, turn, state, gae_token"),
        (["algorithm.credit=gae_turn", "algorithm.baseline=mean"], "has the critic's values as its baseline"),
        (["algorithm.baseline=value"], "has the critic's values as its baseline"),
        ([*ESTIMATED, "algorithm.scale=std"], "and no scale"),
        ([*ESTIMATED, "algorithm.ratio=sequence"], "use ratio = 'sequence_token'"),
        ([*ESTIMATED, "algorithm.dynamic_sampling=2"], "use a baseline of the group"),
        (["algorithm.credit=sweet", "rollout.group_size=1"], "learns from pairs of siblings"),
        ([*ESTIMATED, "algorithm.credit.replay=8"], "unknown key algorithm.credit.replay; valid here"),
        (["algorithm.credit={name = 'turn', pairs = 4}"], "unknown key algorithm.credit.pairs; valid here"),
        (["algorithm.preset=sweet", "algorithm.credit.pairs=4"], "set both, or neither"),
        (["algorithm.preset=sweet", "rollout.alternatives=4"], "set both, or neither"),
        (["algorithm.preset=sweet_dpo", "algorithm.aggregation=sequence_mean"], "weighs all pairs equally"),
        (["rollout.alternatives=4"], "set both, or neither"),
        ([*ESTIMATED, "algorithm.credit.model=./none"], "algorithm.credit.model: there is no"),
        (["algorithm.baseline=greedy", "algorithm.credit=turn"], "cannot be compared with single turns"),
        (["algorithm.baseline=batch_mean", "algorithm.normalization=batch"], "both centre the batch"),
        (["algorithm.baseline=none", "algorithm.dynamic_sampling=2"], "use a baseline of the group"),
        (["algorithm.anchor=old"], "takes the recomputed policy for the sampler"),
        (["algorithm.correction=truncate"], "which is the anchor"),
        (["algorithm.anchor=interpolated"], "nothing weighs the difference"),
        (["algorithm.ratio=geometric"], "bound it twice"),
        (["algorithm.ratio=sequence", "algorithm.credit=turn"], "use ratio = 'sequence_token'"),
        (["algorithm.region=divergence", "algorithm.ratio=turn"], "compares the probabilities of tokens"),
        (["algorithm.ratio=sequence", "train.sequence_parallel=2"], "needs whole sequences on a rank"),
        (
            ["algorithm.preset=agentrl", "algorithm.penalties.truncation=0.2"],
            "penalties.incomplete = -0.2 replaces the rewards",
        ),
        (["algorithm.penalties.overlong.buffer=9999"], "must be below engine.max_context"),
        (["algorithm.region.dual=1.1"], "must be above 1 + high"),
        (
            ["algorithm.anchor=old", "algorithm.correction=mask", "algorithm.correction.floor=3"],
            "must be below cap",
        ),
        (["engine.top_p=0.9"], "from another distribution"),
        (["algorithm.preset=gsp"], "did you mean gspo?"),
        (["algorithm.region=none.py:gate"], "there is no"),
        (["advantage.scale=none"], "it was renamed to algorithm"),
        (["train.keep_groups=0.1"], "did you mean algorithm.keep_groups"),
    ],
)
def test_nonsense_is_rejected_with_the_reason(overrides: list[str], reason: str) -> None:
    assert reason in refusal(*overrides)


def test_recomputed_anchor_is_accepted_in_a_synchronous_run() -> None:
    config = plain_config("algorithm.anchor=old", "rollout.max_staleness=0")
    assert learner_options(config, model=qwen())["loss"].recompute


def test_function_of_a_module_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scores_of_mine.py").write_text("def halved(trajectory): return trajectory.reward / 2\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert imported("scores_of_mine:halved").__name__ == "halved"


def test_function_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def going(): ...\n")
    with pytest.raises(ConfigError, match=r"mine\.py has no function 'gone'; did you mean going\?$"):
        imported(f"{tmp_path}/mine.py:gone")
    with pytest.raises(ConfigError, match=r"mine\.py has no function 'xyz'; it has going$"):
        imported(f"{tmp_path}/mine.py:xyz")
    with pytest.raises(ConfigError, match="cannot be imported"):
        imported("no_such_module:gone")
    (tmp_path / "broken.py").write_text("x = 1\n1 / 0\n")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: division by zero \(.*broken\.py:2"):
        imported(f"{tmp_path}/broken.py:gone")


COMPARE = """from agentrl_train.advantage import Comparison
def compared(*fields): return Comparison(**dict(zip(("returns", "trajectories", "turns"), fields)))
def own(group, shaped): return [compared("""
LEAKY = "return -ratios * tokens.advantages"


@pytest.mark.parametrize(
    ("key", "code", "reason"),
    [
        (
            "region",
            f"def own(ratios, tokens): {LEAKY}",
            r"must return \(losses, bounded\), .* returned Tensor of shape",
        ),
        ("region", f"def own(ratios, tokens): {LEAKY}, ratios", "a boolean tensor .* returned tuple"),
        ("region", f"def own(ratios): {LEAKY}", r"failed: TypeError: own\(\) takes 1 .*mine\.py:1\)"),
        (
            "ratio",
            "def own(log_ratios, tokens): return log_ratios.mean()",
            r"a ratio for each token; .* shape \[\]",
        ),
        ("anchor", "def own(tokens):\n    return tokens.gone", r"AttributeError: .*mine\.py:2, in own\)"),
        (
            "baseline",
            "def own(siblings): return 'high'",
            "must return a finite number, .* returned str: high",
        ),
        ("baseline", "def own(siblings): return siblings.returns[:1]", r"ndarray of shape \[1\]"),
        ("baseline", "def own(siblings): raise SystemExit(3)", r"failed: SystemExit: 3 \(.*mine\.py:1"),
        ("scale", "def own(siblings): return 0.0", "must return a number above 0; it returned float: 0.0"),
        ("credit", "def own(group, shaped): return shaped", "a list of Comparison, .* it returned Shaped"),
        ("credit", f"{COMPARE}shaped.returns, range(3), [9] * 3)]", "existing turns .* returned list"),
        ("credit", f"{COMPARE}shaped.returns, range(1, 4), [0] * 3)]", "its trajectories; it returned list"),
        ("credit", f"{COMPARE}shaped.returns, [0], [slice(None)])]", "its trajectories; it returned list"),
        ("credit", f"{COMPARE}shaped.returns * float('nan'), range(3), [0] * 3)]", "a finite return .* list"),
    ],
)
def test_wrong_user_function_is_named_with_the_required_return_value(
    tmp_path: Path, key: str, code: str, reason: str
) -> None:
    (tmp_path / "mine.py").write_text(f"{code}\n")
    algorithm = plain_config(f"algorithm.{key}={tmp_path}/mine.py:own", "rollout.max_staleness=0").algorithm
    advantages = partial(advantage_function(algorithm, max_context=512), [rewarded([1.0], [0.0], [0.0])])
    given = six(4, spread=0.05)
    tokens = {name: getattr(given, name) for name in loss.Tokens.__slots__}
    objective = partial(
        objective_function(algorithm), loss.Tokens(**tokens | {"old": given.logprobs.detach()})
    )
    call = advantages if key in ("credit", "baseline", "scale") else objective
    with pytest.raises(ConfigError, match=rf"algorithm\.{key} = '.*mine\.py:own' .*{reason}"):
        call()


def test_signal_of_a_group_includes_penalties() -> None:
    flat, varied = rewarded([1.0], [1.0]), rewarded([1.0], [0.0])
    has_signal = signal_function(AlgorithmSection(), max_context=512)
    assert (has_signal(flat), has_signal(varied)) == (False, True)
    longer = rewarded([0.0, 0.0, 1.0], [1.0])
    soft = signal_function(AlgorithmSection(penalties={"overlong": {"buffer": 5}}), max_context=8)
    assert (has_signal(longer), soft(longer)) == (False, True)


def test_episodes_selected_by_a_function_are_omitted_after_counting_in_the_baseline(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def long(trajectory):\n    return len(trajectory.turns) > 1\n")
    config = plain_config(
        f'algorithm.leave_out=["void", "{tmp_path}/mine.py:long"]',
        "algorithm.scale=none",
        "algorithm.normalization=none",
    )
    (found,) = advantage_function(config.algorithm, max_context=512)([rewarded([3.0], [0.0, 0.0], [0.0])])
    assert [None if turns is None else turns.tolist() for turns in found] == [[2.0], None, [-1.0]]
    assert "is none of truncated, void, repetitive" in refusal('algorithm.leave_out=["boring"]')
    assert "algorithm.leave_out.0: there is no" in refusal('algorithm.leave_out=["gone.py:boring"]')


@pytest.mark.parametrize("value", ["'no'", "None", "[True]"])
def test_function_that_omits_episodes_must_return_true_or_false(tmp_path: Path, value: str) -> None:
    (tmp_path / "mine.py").write_text(f"def own(trajectory): return {value}\n")
    algorithm = plain_config(f'algorithm.leave_out=["{tmp_path}/mine.py:own"]').algorithm
    with pytest.raises(ConfigError, match=r"mine\.py:own' must return true or false; it returned"):
        advantage_function(algorithm, max_context=512)([rewarded([1.0], [0.0])])


def test_user_method_takes_less_than_30_lines_and_trains() -> None:
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


def test_credit_by_turn_without_turn_rewards_gives_a_warning() -> None:
    warning = turn_rewards_warning([rewarded([0.0, 1.0], [0.0, 0.0])])
    assert warning is not None
    assert "none of 2 turns before the last" in warning
    assert turn_rewards_warning([rewarded([0.5, 1.0], [0.0])]) is None
    assert turn_rewards_warning([rewarded([1.0], [0.0])]) is None
