"""Advantages, losses and gradients equal the values recorded before the algorithm was split into pieces.

``recorded_numbers.json`` has the results of the former functions for the groups and tokens below. The former
functions excluded groups without a signal from the standard deviation of a task, which now includes them.
"""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl_env.types import Message, TaskSample
from agentrl_train.advantage import advantages, leave_one_out, mean, none, std, unscaled
from agentrl_train.loss import Tokens, behaviour, clip, importance_weights, old, policy_loss
from agentrl_train.types import Completion, EpisodeEnd, Trajectory, TrajectoryGroup, Turn

RECORDED = json.loads(Path(__file__).with_name("recorded_numbers.json").read_text())
BASELINES = {"mean": mean, "leave_one_out": leave_one_out, "none": none}
SCALES = {"std": std, "none": unscaled}


def recorded_turn(rng: np.random.Generator, number: int, task: str) -> Turn:
    n = int(rng.integers(1, 9))
    size = 100 if task == "b" else 1
    return Turn(
        prompt_ids=[1],
        completion=Completion(
            token_ids=list(range(n)), logprobs=[-1.0] * n, versions=[0] * n, finish_reason="stop"
        ),
        message=Message.assistant("x"),
        reply=[],
        reward=float(rng.integers(0, 4)) * size / 3 if number != 3 else 0.0,
        invalid_calls=int(rng.random() < 0.3),
    )


def recorded_groups() -> list[TrajectoryGroup]:
    rng = np.random.default_rng(12)
    made = []
    for number in range(7):
        task, members = "ab"[number % 2], []
        for _ in range(4):
            turns = [recorded_turn(rng, number, task) for _ in range(int(rng.integers(1, 5)))]
            cut = rng.random() < 0.3
            members.append(
                Trajectory(
                    sample=TaskSample(task=task),
                    opening=[],
                    turns=turns,
                    end=EpisodeEnd.TRUNCATED_TURNS if cut else EpisodeEnd.TERMINATED,
                    reward=sum(turn.reward for turn in turns),
                    success=False,
                )
            )
        made.append(TrajectoryGroup(group_id=number, task=task, trajectories=members, admitted_version=0))
    return made


@pytest.mark.parametrize("case", RECORDED["advantages"])
def test_advantages_equal_those_of_the_former_function(case: dict) -> None:
    found = advantages(
        recorded_groups(),
        baseline=BASELINES[case["baseline"]],
        scale=SCALES[case["scale"]],
        normalization="task" if case["task_normalization"] else "none",
        aggregation=case["aggregation"],
        invalid_call_penalty=case["penalty"],
        truncation_penalty=2 * case["penalty"],
    )
    factors = enlarged(case) if case["task_normalization"] and case["baseline"] != "none" else {}
    for group, per_group, expected in zip(recorded_groups(), found, case["values"], strict=True):
        for turns, value in zip(per_group, expected, strict=True):
            value *= factors.get(group.task, 1.0)
            assert turns == pytest.approx(np.full(len(turns), value), rel=1e-11, abs=1e-11)


def enlarged(case: dict) -> dict[str, float]:
    """Return the growth factor of a task's advantages if its spread includes groups without a signal."""
    by_sequence, by_group = (case["aggregation"] == name for name in ("sequence_mean", "group_mean"))
    factors = {}
    for task in "ab":
        units = {
            one.group_id: sum(1 if by_sequence else t.num_sampled_tokens for t in one.trajectories)
            for one in recorded_groups()
            if one.task == task
        }
        live = [number for number in units if any(case["values"][number])]
        some, every = sum(units[number] for number in live), sum(units.values())
        share = len(live) / len(units) if by_group else some / every
        factors[task] = math.sqrt(some / (some - 1) * (every - 1) / every / share)
    return factors


@pytest.mark.parametrize("case", RECORDED["losses"])
def test_loss_gradient_and_statistics_equal_those_of_the_former_function(case: dict) -> None:
    given = {name: torch.tensor(value, dtype=torch.float64) for name, value in RECORDED["tokens"].items()}
    tokens = Tokens(**given | {"logprobs": given["logprobs"].requires_grad_()})
    decoupled = case["importance_cap"] is not None
    loss, stats = policy_loss(
        tokens,
        anchor=old if decoupled else behaviour,
        region=partial(clip, low=case["clip_low"], high=case["clip_high"], dual=case["dual_clip"]),
        correction=partial(importance_weights, cap=case["importance_cap"], floor=case["importance_floor"])
        if decoupled
        else None,
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-11)
    assert tokens.logprobs.grad.tolist() == pytest.approx(case["gradient"], rel=1e-11, abs=1e-11)
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(case["stats"])
