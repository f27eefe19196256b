"""Signs that a run learns little or becomes unstable, with the settings that help."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from agentrl_train.types import TrajectoryGroup

logger = logging.getLogger(__name__)

LOW_ENTROPY = 0.05
"""Nats a token below which siblings hardly differ."""
MOST_AGREE = 0.5
"""Share of groups without a signal above which low entropy is reported."""
SOLVED = 0.5
"""Success from which groups agree because they succeed, and low entropy is not reported."""
HIGH_ENTROPY = 2.0
"""Nats a token above which tool calls are mostly noise."""
HIGH_GRAD_NORM = 100.0
"""Multiple of ``train.max_grad_norm`` above which clipping discards almost the whole update."""
FEW_VALID_CALLS = 0.5
"""Share of turns with valid calls below which a task teaches mainly syntax."""


class Health:
    """Logs a warning the 1st, 2nd, 4th, 8th ... time that a step shows a problem.

    Args:
        max_grad_norm: ``train.max_grad_norm``.
    """

    def __init__(self, *, max_grad_norm: float) -> None:
        self._max_grad_norm = max_grad_norm
        self._counts: Counter[str] = Counter()

    def examine(self, metrics: Mapping[str, float], groups: Sequence[TrajectoryGroup]) -> None:
        """Log the warnings about a trained step."""
        for problem, warning in unhealthy(metrics, groups, max_grad_norm=self._max_grad_norm):
            self._counts[problem] += 1
            if self._counts[problem].bit_count() == 1:
                logger.warning("%s", warning)


def unhealthy(
    metrics: Mapping[str, float], groups: Sequence[TrajectoryGroup], *, max_grad_norm: float
) -> Iterator[tuple[str, str]]:
    """Yield the problem and a warning for each value of a trained step outside its healthy range.

    Args:
        metrics: metrics of the step; missing ones are skipped.
        groups: groups of the step.
        max_grad_norm: ``train.max_grad_norm``.
    """
    entropy, norm = metrics.get("entropy"), metrics.get("grad_norm", 0.0)
    agreeing = sum(len({round(one.reward, 6) for one in group.trajectories}) == 1 for group in groups)
    unsolved = metrics.get("success", 0.0) < SOLVED
    if unsolved and entropy is not None and entropy < LOW_ENTROPY and agreeing > MOST_AGREE * len(groups):
        yield (
            "low entropy",
            f"the entropy of the policy is {entropy:.2g} nats a token, and in {agreeing} of {len(groups)} "
            "groups all episodes have the same reward, so there is little to learn from: raise "
            "engine.temperature (1.2), raise rollout.group_size (16), set algorithm.dynamic_sampling = 2, or "
            "imitate experts for fewer updates (sft.steps)",
        )
    if entropy is not None and entropy > HIGH_ENTROPY:
        yield (
            "high entropy",
            f"the entropy of the policy is {entropy:.2g} nats a token, close to random text: lower "
            "algorithm.entropy_coefficient, engine.temperature or train.learning_rate",
        )
    if norm > HIGH_GRAD_NORM * max_grad_norm:
        yield (
            "large gradient",
            f"the norm of the gradient is {norm:.3g}, {norm / max_grad_norm:.0f} times train.max_grad_norm: "
            "lower train.learning_rate, or set train.spike_factor = 10 with train.on_bad_update = 'skip'",
        )
    for task in sorted({group.task for group in groups}):
        episodes = [one for group in groups if group.task == task for one in group.trajectories]
        turns = [turn for one in episodes for turn in one.turns]
        valid = sum(turn.invalid_calls == 0 for turn in turns)
        if valid < FEW_VALID_CALLS * len(turns):
            yield (
                f"invalid calls of {task}",
                f"the environment accepted the calls of {valid} of {len(turns)} turns of {task}: see how the "
                "model writes them with `agentrl-train show RUN --failed`, set model.tool_parser, or imitate "
                "experts first with `agentrl-train sft`",
            )
