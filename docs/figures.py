"""Draw the figures of the algorithm pages with the trainer's functions (``python -m docs.figures``)."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl_train import advantage, loss
from agentrl_train.config.loading import PRESETS
from agentrl_train.critics.gae import gae
from agentrl_train.report.charts import Panel, Series, line_chart, number_label, standalone

FIGURES = Path(__file__).parent / "algorithms/figures"
GROUP = 8
PROBABILITY = 0.2
"""Probability of the token under the sampling policy, in the figure of the trust regions."""


def groups() -> str:
    """Return a success's advantage under each baseline, by the number of successes in its group."""
    methods = {
        "REINFORCE": (advantage.none, advantage.unscaled),
        "RLOO": (advantage.leave_one_out, advantage.unscaled),
        "GRPO": (advantage.mean, advantage.std),
        "Dr. GRPO": (advantage.mean, advantage.unscaled),
    }
    lines = {}
    for name, (baseline, scale) in methods.items():
        lines[name] = [(float(count), _of_success(count, baseline, scale)) for count in range(1, GROUP + 1)]
    return _figure(lines, title=f"Advantage of a success in a group of {GROUP}", x_name="successes")


def _of_success(count: int, baseline: advantage.Baseline, scale: advantage.Scale) -> float:
    returns = np.array([1.0] * count + [0.0] * (GROUP - count))
    siblings = advantage.Siblings(returns=returns, tokens=np.ones(GROUP), batch=returns)
    return float(advantage.compared(siblings, baseline=baseline, scale=scale)[0])


def ratios() -> str:
    """Return the gradient weight of a token with advantage 1 under each trust region."""
    regions: dict[str, Callable[..., Any]] = {"clip": loss.clip, "cap": loss.cap, "soft": loss.soft}
    regions["divergence"] = loss.divergence
    lines = {}
    for name, preset in (("GRPO", "grpo"), ("CISPO", "cispo"), ("SAPO", "sapo"), ("DPPO", "dppo")):
        table = _preset(preset)["region"]
        region = partial(regions[table.pop("name")], **table)
        lines[name] = [(float(x), _gradient(region, float(x))) for x in np.linspace(0.05, 3.0, 119)]
    return _figure(lines, title="Weight of a token's gradient, advantage 1", x_name="ratio")


def _gradient(region: loss.Region, ratio: float) -> float:
    sampled = torch.tensor([PROBABILITY]).log()
    logprobs = (sampled + torch.tensor([ratio]).log()).requires_grad_()
    tokens = loss.Tokens(
        logprobs=logprobs, behaviour=sampled, advantages=torch.ones(1), weights=torch.ones(1)
    )
    value, _ = loss.policy_loss(tokens, region=region)
    (gradient,) = torch.autograd.grad(value, logprobs)
    return -float(gradient)


def staleness() -> str:
    """Return the weight of a token under each correction, by its ratio to the sampler."""
    lines = {}
    for name, preset in (
        ("TIS", "tis"),
        ("MIS", "mis"),
        ("IcePop", "icepop"),
        ("Decoupled PPO", "decoupled_ppo"),
    ):
        table = _preset(preset)["correction"]
        table.pop("name")
        points = np.linspace(0.0, 6.0, 241)[1:]
        tokens = loss.Tokens(
            logprobs=torch.zeros(len(points)),
            behaviour=torch.zeros(len(points)),
            advantages=torch.ones(len(points)),
            weights=torch.ones(len(points)),
        )
        weights = loss.importance_weights(torch.tensor(points).log(), tokens, **table)
        lines[name] = list(zip(points.tolist(), weights.tolist(), strict=True))
    return _figure(lines, title="Weight of a token", x_name="ratio to the sampler")


def credit() -> str:
    """Return the advantages of the turns of one episode with two rewards, under three kinds of credit."""
    rewards, values = np.array([0.0, 0.0, 0.5, 0.0, 0.0, 1.0]), np.full(6, 0.75)
    lines = {
        "trajectory": np.full(6, rewards.sum() - 0.75),
        "rewards to go": advantage.rewards_to_go(rewards) - 0.75,
        "GAE, lambda 0.5": gae(rewards, values, lam=0.5),
    }
    points = {
        name: [(turn + 1.0, float(value)) for turn, value in enumerate(line)] for name, line in lines.items()
    }
    return _figure(points, title="Advantage of each turn", x_name="turn", bottom=None)


def _preset(name: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((PRESETS / f"{name}.toml").read_text())["algorithm"]
    return found


def _figure(
    lines: dict[str, list[tuple[float, float]]], *, title: str, x_name: str, bottom: float | None = 0.0
) -> str:
    series = [
        Series(name=name, points=points, colour=number) for number, (name, points) in enumerate(lines.items())
    ]
    chart = line_chart(series, label=number_label, bottom=bottom, x_name=x_name)
    return standalone([Panel(chart=chart, names=[(line.name, line.colour) for line in series])], title=title)


DRAWINGS = {"groups": groups, "ratios": ratios, "staleness": staleness, "credit": credit}

if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FIGURES / f"{name}.svg").write_text(draw())
