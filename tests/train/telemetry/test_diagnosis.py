"""Warnings about a run outside the healthy range."""

import pytest

from agentrl_env.types import Message, TaskSample
from agentrl_train.chat import ChatFormat
from agentrl_train.telemetry.diagnosis import Diagnosis, unhealthy
from agentrl_train.types import Completion, EpisodeEnd, Step, Trajectory, TrajectoryGroup, Turn
from tests.tiny_models import make_tokenizer


def group(*rewards: float, invalid_calls: int = 0) -> TrajectoryGroup:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), versions=(0,), finish_reason="stop")
    turn = Turn(
        prompt_ids=(),
        completion=completion,
        message=Message.assistant("x"),
        reply=(),
        reward=0.0,
        invalid_calls=invalid_calls,
    )
    trajectories = [
        Trajectory(
            sample=TaskSample(task="shop"),
            opening=(),
            turns=(turn,),
            end=EpisodeEnd.TERMINATED,
            reward=reward,
            success=reward > 0,
        )
        for reward in rewards
    ]
    return TrajectoryGroup(group_id=0, task="shop", trajectories=trajectories, admitted_version=0)


AGREE, DIFFER = group(1.0, 1.0), group(0.0, 1.0)


@pytest.mark.parametrize(
    ("metrics", "groups", "problems"),
    [
        ({"entropy": 0.02}, [AGREE, AGREE, DIFFER], ["low entropy"]),
        ({"entropy": 0.02, "success": 0.8}, [AGREE, AGREE, DIFFER], []),
        ({"entropy": 0.02}, [AGREE, DIFFER], []),
        ({"entropy": 0.06}, [AGREE, AGREE], []),
        ({"entropy": 2.5}, [DIFFER], ["high entropy"]),
        ({"grad_norm": 150.0}, [DIFFER], ["large gradient"]),
        ({"grad_norm": 99.0}, [DIFFER], []),
        ({}, [group(0.0, 1.0, invalid_calls=1)], ["invalid calls of shop"]),
        ({}, [], []),
    ],
)
def test_values_outside_the_healthy_range_are_named(
    metrics: dict[str, float], groups: list[TrajectoryGroup], problems: list[str]
) -> None:
    assert [problem for problem, _ in unhealthy(metrics, groups, max_grad_norm=1.0)] == problems


def test_low_entropy_without_signal_names_the_settings_that_help() -> None:
    ((_, warning),) = unhealthy({"entropy": 0.02}, [AGREE, AGREE, DIFFER], max_grad_norm=1.0)
    assert "0.02 nats per token, and in 2 of 3 groups" in warning
    for setting in ("engine.temperature", "rollout.group_size", "algorithm.dynamic_sampling"):
        assert setting in warning


def test_repeated_problem_is_logged_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    diagnosis = Diagnosis(ChatFormat(make_tokenizer()), by_turn=False, max_grad_norm=1.0)
    for _ in range(9):
        diagnosis.examine(Step(groups=[]), {"entropy": 3.0, "loss_tokens": 1.0})
    assert len(caplog.records) == 4
