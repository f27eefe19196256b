"""The share of a learner step spent on advantages, batches and the loss's bookkeeping.

2,048 trajectories of 8 turns, each with 16 sampled and 16 other tokens, in groups of 8. The step itself is
measured on every 32nd group with a small model, in the same process and on one thread, and multiplied by 32.
The share is smaller with a larger model.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from agentrl_env.types import Message, TaskSample
from agentrl_train.algorithm import advantage_function, objective_function
from agentrl_train.batch import pack, sequences
from agentrl_train.config import AlgorithmSection, TrainSection
from agentrl_train.learner import Learner
from agentrl_train.loss import Tokens
from agentrl_train.types import Completion, EpisodeEnd, Trajectory, TrajectoryGroup, Turn
from tests.benchmarks.shapes import make_model

GROUPS, SIBLINGS, TURNS, SAMPLED, OTHERS = 256, 8, 8, 16, 16
SHARE = 32
VOCABULARY = 512
CHOICES = {
    "default": AlgorithmSection(),
    "credit by turn": AlgorithmSection(credit="turn"),
    "credit by state": AlgorithmSection(credit="state"),
    "ratio by sequence": AlgorithmSection(ratio="sequence"),
}


def groups(count: int) -> list[TrajectoryGroup]:
    """Return groups of random trajectories with rewards at every turn."""
    rng = np.random.default_rng(0)

    def turn() -> Turn:
        drawn = rng.integers(0, VOCABULARY, SAMPLED + OTHERS).tolist()
        completion = Completion(
            token_ids=drawn[:SAMPLED],
            logprobs=[-float(np.log(VOCABULARY))] * SAMPLED,
            versions=[0] * SAMPLED,
            finish_reason="stop",
        )
        reply = [Message(role="user", content=str(rng.integers(20)))]
        message = Message.assistant("x")
        reward = float(rng.normal())
        return Turn(
            prompt_ids=drawn[SAMPLED:], completion=completion, message=message, reply=reply, reward=reward
        )

    def trajectory() -> Trajectory:
        turns = [turn() for _ in range(TURNS)]
        return Trajectory(
            sample=TaskSample(task="random"),
            opening=[],
            turns=turns,
            end=EpisodeEnd.TERMINATED,
            reward=sum(one.reward for one in turns),
            success=False,
        )

    return [
        TrajectoryGroup(
            group_id=number,
            task="random",
            trajectories=[trajectory() for _ in range(SIBLINGS)],
            admitted_version=0,
        )
        for number in range(count)
    ]


def seconds(work: Callable[[], object], *, repeats: int) -> float:
    """Return the CPU time of the fastest of several calls, which hardly depends on other processes."""
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def loss_tokens() -> Tokens:
    """Return as many loss tokens as all trajectories sample."""
    count = GROUPS * SIBLINGS * TURNS * SAMPLED
    return Tokens(
        logprobs=torch.full((count,), -6.0, requires_grad=True),
        behaviour=torch.full((count,), -6.1),
        advantages=torch.randn(count),
        weights=torch.full((count,), 1.0 / count),
        ages=torch.ones(count, dtype=torch.int64),
        sequences=torch.arange(count) // (TURNS * SAMPLED),
        turns=torch.arange(count) // SAMPLED,
    )


def run(*, quick: bool = False) -> None:
    """Print the time of each part and of a step."""
    torch.set_num_threads(1)
    repeats = 1 if quick else 3
    made, tokens = groups(GROUPS), loss_tokens()
    learner = Learner(make_model("tiny", device="cpu"), TrainSection(learning_rate=1e-6))
    default = advantage_function(CHOICES["default"], max_context=512)
    few = made[::SHARE]
    part = pack(sequences(few, default(few)))
    step = SHARE * seconds(lambda: learner.step(part), repeats=repeats)
    title = f"bookkeeping of {GROUPS * SIBLINGS} trajectories of {TURNS} turns; a step takes {step:.1f} s"
    table = Table(title=title)
    for heading in ("algorithm", "advantages, s", "batch, s", "loss, s", "of a step"):
        table.add_column(heading, justify="left" if heading == "algorithm" else "right")
    for name, section in CHOICES.items():
        advantages = advantage_function(section, max_context=512)
        objective = objective_function(section)
        found = advantages(made)
        parts = [
            seconds(lambda advantages=advantages: advantages(made), repeats=repeats),
            seconds(lambda found=found: pack(sequences(made, found)), repeats=repeats),
            seconds(lambda objective=objective: objective(tokens)[0].backward(), repeats=repeats),
        ]
        table.add_row(name, *(f"{one:.3f}" for one in parts), f"{sum(parts) / step:.1%}")
    Console(width=110).print(table)


if __name__ == "__main__":
    run()
