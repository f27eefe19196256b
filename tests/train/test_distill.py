"""On-policy distillation: the gradient of the reverse KL, and teachers by task."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_env.types import Message, TaskSample
from agentrl_train.batch import towards_teacher
from agentrl_train.config import DistillTable
from agentrl_train.learner import Learner
from agentrl_train.loss import Tokens, policy_loss, unbounded
from agentrl_train.training.step_trainer import StepTrainer
from agentrl_train.types import Completion, EpisodeEnd, Step, TokenSequence, Trajectory, TrajectoryGroup, Turn
from tests.train.learner.test_learner import VOCABULARY, learner, made, qwen
from tests.train.test_algorithm import NEEDED, plain_config, refusal
from tests.train.training.test_replay import NoEngine

PROMPTS = {"a": [3, 4], "b": [5, 6, 7]}
"""Prompt of each task. An answer is one token."""


def enumerated(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the loss over all actions, each weighted by its probability."""
    student = logits.log_softmax(-1)
    return policy_loss(
        Tokens(
            logprobs=student,
            behaviour=student.detach(),
            advantages=(teacher.log() - student).detach(),
            weights=student.detach().exp(),
        ),
        region=unbounded,
    )[0]


def test_expected_gradient_has_the_published_values() -> None:
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    enumerated(logits, torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)).backward()
    assert (-logits.grad).tolist() == pytest.approx([0.355408, -0.062180, -0.293229], abs=1e-6)


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=2, max_size=6))
def test_expected_gradient_matches_the_reverse_kl(pairs: list[tuple[float, float]]) -> None:
    start, other = torch.tensor(pairs, dtype=torch.float64).T
    teacher = other.softmax(-1)
    logits = start.clone().requires_grad_()
    enumerated(logits, teacher).backward()

    def divergence(values: torch.Tensor) -> float:
        student = values.log_softmax(-1)
        return float((student.exp() * (student - teacher.log())).sum())

    for i in range(len(pairs)):  # by finite differences
        up, down = start.clone(), start.clone()
        up[i], down[i] = up[i] + 1e-6, down[i] - 1e-6
        slope = (divergence(up) - divergence(down)) / 2e-6
        assert slope == pytest.approx(float(logits.grad[i]), abs=1e-6)


def test_advantage_of_a_token_is_the_gap_to_the_teacher() -> None:
    (row,) = made(1)
    scores = np.linspace(-3.0, 0.0, len(row), dtype=np.float32)
    found = towards_teacher(row, scores, weight=0.5)
    assert found.advantages == pytest.approx(row.loss_mask * 0.5 * (scores - row.logprobs))
    assert towards_teacher(row, scores, weight=0.0, keep_rewards=True).advantages == pytest.approx(
        row.advantages
    )
    both = towards_teacher(row, scores, weight=0.5, keep_rewards=True)
    assert both.advantages == pytest.approx(row.advantages + found.advantages)
    same = towards_teacher(row, row.logprobs)
    assert not same.advantages.any()


def test_teacher_scores_like_a_separate_learner() -> None:
    rows = made(6)
    other = qwen()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    alone = learner(other).logprobs(rows)
    student = learner(teachers={"other": (other, None)})
    for found, expected, own in zip(
        student.logprobs(rows, "other"), alone, student.logprobs(rows), strict=True
    ):
        assert found == pytest.approx(expected, abs=1e-6)
        assert np.abs(found - own).max() > 1e-3


def specialist(seed: int) -> torch.nn.Module:
    model = qwen()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def distribution(one: Learner, task: str, teacher: str | None = None) -> np.ndarray:
    """Return the log-probabilities of all tokens as the answer to a task."""
    prompt = PROMPTS[task]
    rows = [
        TokenSequence(
            token_ids=np.array([*prompt, token]),
            loss_mask=np.array([0.0] * len(prompt) + [1.0], dtype=np.float32),
            logprobs=np.zeros(len(prompt) + 1, dtype=np.float32),
            versions=np.zeros(len(prompt) + 1, dtype=np.int64),
            advantages=np.zeros(len(prompt) + 1, dtype=np.float32),
            task=task,
            group_id=0,
        )
        for token in range(VOCABULARY)
    ]
    return np.array([scores[-1] for scores in one.logprobs(rows, teacher)], dtype=np.float64)


def divergence(one: Learner, task: str, teacher: str) -> float:
    own = distribution(one, task)
    return float((np.exp(own) * (own - distribution(one, task, teacher))).sum())


def played(one: Learner, task: str, *, rng: np.random.Generator, version: int) -> TrajectoryGroup:
    """Return episodes of one sampled token each."""
    logprobs = distribution(one, task)
    chances = np.exp(logprobs)
    drawn = rng.choice(VOCABULARY, size=64, p=chances / chances.sum())
    episodes = []
    for token in drawn.tolist():
        completion = Completion(
            token_ids=[token], logprobs=[float(logprobs[token])], versions=[version], finish_reason="stop"
        )
        turn = Turn(
            prompt_ids=PROMPTS[task],
            completion=completion,
            message=Message.assistant("x"),
            reply=[],
            reward=0.0,
        )
        episodes.append(
            Trajectory(
                sample=TaskSample(task=task),
                opening=[],
                turns=[turn],
                end=EpisodeEnd.TERMINATED,
                reward=0.0,
                success=False,
            )
        )
    return TrajectoryGroup(group_id=version, task=task, trajectories=episodes, admitted_version=version)


@pytest.mark.extended
@pytest.mark.slow
def test_policy_approaches_the_teacher_of_each_task_without_any_reward(tmp_path: Path) -> None:
    teachers = {"first": (specialist(1), None), "second": (specialist(2), None)}
    one = learner(teachers=teachers, learning_rate=3e-3)
    trainer = StepTrainer(
        one,
        NoEngine(),
        algorithm=plain_config("algorithm.preset=distill", *NEEDED["distill"]).algorithm.model_copy(
            update={"distill": DistillTable(weight=1.0, teachers={"a": "first", "*": "second"})}
        ),
        max_context=64,
        bad_batches=tmp_path,
    )
    rng = np.random.default_rng(0)
    pairs = (("a", "first"), ("b", "second"))
    before = [divergence(one, *pair) for pair in pairs]
    metrics = []
    for version in range(40):
        groups = [played(one, task, rng=rng, version=version) for task in PROMPTS]
        metrics.append(trainer.step(Step(groups=groups, trained_version=version)))
    after = [divergence(one, *pair) for pair in pairs]
    assert all(late < 0.25 * early for early, late in zip(before, after, strict=True)), (before, after)
    assert metrics[0]["teacher_kl"] == pytest.approx(np.mean(before), rel=0.5)
    assert metrics[0].keys() >= {"teacher_kl/a", "teacher_kl/b"}
    assert metrics[-1]["teacher_kl"] < 0.5 * metrics[0]["teacher_kl"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["algorithm.distill.weight=1.0"], "give teachers, such as"),
        (["algorithm.distill.teachers={shop = 'a/b'}"], "give a weight above 0"),
        (
            ["algorithm.distill.teachers={'*' = './gone'}", "algorithm.distill.weight=1.0"],
            "algorithm.distill.teachers.*: there is no",
        ),
        (
            [
                "algorithm.distill.teachers={'*' = 'a/b'}",
                "algorithm.distill.weight=1.0",
                "algorithm.keep_groups=0.5",
            ],
            "select episodes by rewards",
        ),
        (
            ["algorithm.distill.teachers={'*' = 'a/b'}", "algorithm.distill.weight=1.0", "engine.top_p=0.9"],
            "compares with the teacher's",
        ),
    ],
)
def test_invalid_distillation_is_rejected(overrides: list[str], reason: str) -> None:
    assert reason in refusal(*overrides)


def test_star_names_the_teacher_of_all_other_tasks() -> None:
    section = DistillTable(weight=1.0, teachers={"a": "x", "*": "y"})
    assert [section.teacher_of(task) for task in "ab"] == ["x", "y"]
    assert DistillTable(weight=1.0, teachers={"a": "x"}).teacher_of("b") is None
