"""Warnings about a run outside the healthy range."""

import pytest

from agentrl_env.types import Message, TaskSample
from agentrl_train.chat import ChatFormat
from agentrl_train.config import AlgorithmSection, TrainSection
from agentrl_train.telemetry.diagnosis import RECENT, Diagnosis, clipping_warning, unhealthy, waiting_warning
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
    diagnosis = Diagnosis(ChatFormat(make_tokenizer()), algorithm=AlgorithmSection(), train=TrainSection())
    for _ in range(9):
        diagnosis.examine(Step(groups=[]), {"entropy": 3.0, "loss_tokens": 1.0})
    assert len(caplog.records) == 4


def test_skipped_step_is_not_reported_as_a_step_without_signal(caplog: pytest.LogCaptureFixture) -> None:
    diagnosis = Diagnosis(
        ChatFormat(make_tokenizer()),
        algorithm=AlgorithmSection(),
        train=TrainSection(),
        without_tools={"shop"},
    )
    diagnosis.examine(Step(groups=[DIFFER]), {"skipped_steps": 1.0})
    assert not caplog.records
    diagnosis.examine(Step(groups=[DIFFER]), {})
    assert "no learning signal" in caplog.text


@pytest.mark.parametrize(
    ("algorithm", "train", "age", "words"),
    [
        (
            {},
            {"minibatches": 4},
            1.25,
            "the policy that sampled them, on average 1.2 versions earlier: lower train.learning_rate, or "
            "lower train.minibatches (4), or lower rollout.max_staleness or rollout.stale.interval, or set "
            "algorithm.anchor = 'old' with algorithm.correction = 'truncate'",
        ),
        ({}, {}, 0.0, "on average 0 versions earlier: lower train.learning_rate"),
        (
            {"anchor": {"name": "old"}, "correction": {"name": "truncate"}},
            {"minibatches": 2},
            1.0,
            "the policy before the update: lower train.learning_rate, or lower train.minibatches (2)",
        ),
    ],
)
def test_many_clipped_tokens_give_a_warning_with_the_settings_that_help(
    algorithm: dict[str, object], train: dict[str, int], age: float, words: str
) -> None:
    sections = {"algorithm": AlgorithmSection(**algorithm), "train": TrainSection(**train)}
    metrics = {"clip_fraction": 0.3, "token_staleness_mean": age}
    assert clipping_warning(metrics, **sections) is None
    warning = clipping_warning(metrics | {"clip_fraction": 0.436}, **sections)
    assert warning is not None
    assert warning.startswith("algorithm.region limited 44% of the trained tokens (clip_fraction)")
    assert warning.endswith(words)


WAITS = {"trainer_idle": 0.5, "engine_idle": 0.4, "staleness_max": 1.0}


@pytest.mark.parametrize("busy", [{"trainer_idle": 0.3}, {"engine_idle": 0.3}, {"staleness_max": 0.0}])
def test_run_that_does_not_wait_for_long_episodes_has_no_hint(busy: dict[str, float]) -> None:
    assert waiting_warning([WAITS | busy] * RECENT) is None


def test_run_that_waits_for_long_episodes_has_a_hint_after_10_steps(caplog: pytest.LogCaptureFixture) -> None:
    diagnosis = Diagnosis(ChatFormat(make_tokenizer()), algorithm=AlgorithmSection(), train=TrainSection())
    for _ in range(RECENT - 1):
        diagnosis.examine(Step(groups=[]), {"loss_tokens": 1.0, **WAITS})
    assert not caplog.records
    for _ in range(3):
        diagnosis.examine(Step(groups=[]), {"loss_tokens": 1.0, "clip_fraction": 0.5, **WAITS})
    assert caplog.text.count("in the last 10 steps the trainer waited for episodes 50% of the time") == 2
    assert "raise rollout.max_staleness and rollout.window together" in caplog.text
    assert caplog.text.count("algorithm.region limited 50%") == 2
