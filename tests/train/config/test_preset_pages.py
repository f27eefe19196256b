"""Each difference between a preset and its paper is on the page of the preset, and in the preset."""

import re
from functools import reduce
from pathlib import Path

import pytest

from agentrl_train.config import RunConfig
from tests.train.test_algorithm import plain_config

DOCS = Path(__file__).parents[3] / "docs" / "algorithms"
INDEX = (DOCS / "index.md").read_text()
NO_KL = {"kl.coefficient": 0.0}

DIFFERENCES = [
    (
        "grpo",
        NO_KL,
        "The KL penalty of the paper is not part of the preset.",
        ["algorithm.kl = {coefficient = 0.04}"],
    ),
    ("rloo", NO_KL, "The preset has no KL penalty, and `algorithm.kl` adds one to the loss.", []),
    ("remax", NO_KL, "The preset has no KL penalty, and `algorithm.kl` adds one to the loss.", []),
    (
        "starpo",
        NO_KL,
        "the KL penalty of its StarPO (`algorithm.kl = {coefficient = 0.001}`) are not part of the presets.",
        ["algorithm.kl = {coefficient = 0.001}"],
    ),
    (
        "starpo_s",
        NO_KL | {"credit.name": "trajectory", "baseline.name": "mean"},
        "The critic of the paper's StarPO-S and the KL penalty of its StarPO",
        [],
    ),
    (
        "gigpo",
        NO_KL | {"penalties.invalid_call": 0.0},
        "The preset omits two parts of the paper: the KL penalty (`algorithm.kl = {coefficient = 0.01}`) and "
        "the penalty for invalid actions (`algorithm.penalties.invalid_call = 0.1`).",
        ["algorithm.kl = {coefficient = 0.01}", "algorithm.penalties.invalid_call = 0.1"],
    ),
    (
        "ppo_turn",
        {"ratio.name": "token", "credit.gamma": 1.0, "credit.lam": 0.95},
        "The preset clips the ratio of tokens, as `ppo` does, with gamma 1 and lambda 0.95.",
        ['algorithm.ratio = "turn"', "algorithm.credit = {gamma = 0.99, lam = 0.9}"],
    ),
    (
        "archer",
        {"credit.passes": 10},
        "The critics make 10 passes over a step instead of 50 (`algorithm.credit.passes`).",
        ["algorithm.credit.passes = 50"],
    ),
    (
        "agentrl",
        {"normalization": "task"},
        "The advantages of groups without a signal stay 0.",
        ['algorithm.normalization = "task_exact"'],
    ),
    (
        "sapo",
        {"aggregation.name": "sequence_mean"},
        "Episodes have equal weight, as in GRPO.",
        [],
    ),
    (
        "gspo",
        {"anchor.name": "old", "correction.name": "truncate"},
        "The preset therefore recomputes the policy before the update and takes the ratio to this policy.",
        ['algorithm.anchor = "behaviour"', 'algorithm.correction = "none"'],
    ),
    (
        "decoupled_ppo",
        {"correction.cap": 5.0},
        "The paper has no cap.",
        ["algorithm.correction.cap = 0"],
    ),
    (
        "reinforce_pp",
        {"kl.estimator": "k2", "credit.name": "turn"},
        "The KL penalty is in the loss (k2 estimate) and not in the rewards. Returns are computed for turns "
        "instead of tokens.",
        [],
    ),
    (
        "practitioner",
        {"kl.estimator": "k2", "normalization": "task"},
        "The KL penalty is in the loss (k2 estimate) and not in the rewards. The advantages are normalized "
        "by task",
        [],
    ),
    (
        "lightning",
        {"aggregation.name": "rollout_mean"},
        "Agent Lightning divides by the number of rows, and this preset by the number of episodes.",
        [],
    ),
]
"""Preset, its values under ``algorithm``, the sentence on its page, and settings for the paper's values."""


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def section(preset: str) -> str:
    """Return the text of a preset, which the table of presets links."""
    page, anchor = re.findall(rf"^\| `{preset}` \|.*\]\((\w+\.md)#(\w+)\) \|$", INDEX, re.MULTILINE)[0]
    text = (DOCS / page).read_text().partition(f'<a id="{anchor}"></a>')[2]
    return on_one_line(text.partition("<a id=")[0])


def value(config: RunConfig, key: str) -> object:
    return reduce(getattr, key.split("."), config.algorithm)


@pytest.mark.parametrize(
    ("preset", "values", "sentence", "paper"), DIFFERENCES, ids=[row[0] for row in DIFFERENCES]
)
def test_preset_and_its_page_agree_on_the_difference_from_the_paper(
    preset: str, values: dict[str, object], sentence: str, paper: list[str]
) -> None:
    chosen = plain_config(f"algorithm.preset={preset}")
    assert {key: value(chosen, key) for key in values} == values
    assert sentence in section(preset)
    for setting in paper:
        assert f"`{setting}`" in section(preset) + INDEX
    if paper:
        exact = (setting.replace(" = ", "=", 1) for setting in paper)
        changed = plain_config(f"algorithm.preset={preset}", *exact)
        assert all(value(changed, key) != value(chosen, key) for key in values)


def test_every_preset_in_the_table_of_differences_is_tested_here() -> None:
    table = INDEX.partition("| presets | difference from the paper |")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert "ppo_turn" in listed
    assert listed <= {row[0] for row in DIFFERENCES}
