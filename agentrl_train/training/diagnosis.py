"""Warnings about a run that learns nothing or too fast, with likely causes and the setting to change."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from agentrl_train.chat import ChatFormat
from agentrl_train.types import EpisodeEnd, Step, TrajectoryGroup

logger = logging.getLogger(__name__)

FEW_VALID_CALLS = 0.1
"""Share of turns with valid calls below which the warning of a run that learns nothing names it."""
MANY_CUT_TURNS = 0.25
"""Share of turns of a task that the token limit ends above which a warning names the limit."""
LARGE_KL = 0.1
"""KL divergence from the sampling policy, in nats a token, above which a step is said to be large."""
QUOTED = 300
"""Characters of a completion quoted in a warning, at most."""


class Diagnosis:
    """Logs a warning the 1st, 2nd, 4th, 8th ... time that a step shows a problem.

    Args:
        chat: chat format of the policy.
        by_turn: True if credit is given by turn.
    """

    def __init__(self, chat: ChatFormat, *, by_turn: bool) -> None:
        self._chat = chat
        self._by_turn = by_turn
        self._counts: Counter[str] = Counter()
        self._cut: set[str] = set()
        """Tasks with a warning about cut turns."""

    def examine(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Log the warnings about a trained step."""
        groups, idle = step.groups, self._counts["idle"] + 1
        self._warn("idle", None if metrics.get("loss_tokens") else no_signal_warning(groups, steps=idle))
        self._warn("no calls", no_calls_warning(groups, chat=self._chat))
        for task, warning in cut_turns_warnings(groups).items():
            if task not in self._cut:
                self._cut.add(task)
                logger.warning("%s", warning)
        self._warn("large", large_step_warning(metrics), in_a_row=False)
        if self._by_turn and step.next_version == 1:
            self._warn("turns", turn_rewards_warning(groups))

    def _warn(self, problem: str, warning: str | None, *, in_a_row: bool = True) -> None:
        if warning is None:
            self._counts[problem] *= not in_a_row
            return
        self._counts[problem] += 1
        if self._counts[problem].bit_count() == 1:
            logger.warning("%s", warning)


def no_signal_warning(groups: Sequence[TrajectoryGroup], *, steps: int) -> str:
    """Return a warning about consecutive steps without a learning signal, with likely causes."""
    episodes = [episode for group in groups for episode in group.trajectories]
    rewards = {round(episode.reward, 6) for episode in episodes}
    values = f"all are {min(rewards):g}" if len(rewards) == 1 else f"{len(rewards)} different values"
    when = "this step" if steps == 1 else f"{steps} consecutive steps"
    sentences = [
        f"no learning signal in {when}: within each group all episodes have the same reward ({values})",
    ]
    full = sum(episode.end is EpisodeEnd.TRUNCATED_LENGTH for episode in episodes) / max(1, len(episodes))
    if full:
        sentences.append(f"{full:.0%} of the episodes were cut off by engine.max_context: raise it")
    turns = [turn for episode in episodes for turn in episode.turns]
    valid = sum(turn.invalid_calls == 0 for turn in turns) / max(1, len(turns))
    if valid < FEW_VALID_CALLS:
        sentences.append(
            f"valid_calls is {valid:g}, the share of turns whose calls the environment accepted: look into "
            "trajectories/ for how the model writes its calls"
        )
    sentences.append(
        "try easier or harder samples, a larger rollout.group_size, or a warm start with `agentrl-train sft`"
    )
    return "; ".join(sentences)


def large_step_warning(metrics: Mapping[str, float]) -> str | None:
    """Return a warning if the policy that is trained is far from the one that was sampled."""
    kl = metrics.get("kl", 0.0)
    if kl <= LARGE_KL:
        return None
    return (
        f"the policy is {kl:.2g} nats a token from the one that sampled these episodes (kl): such large "
        "steps can unlearn what it knew; lower train.learning_rate, or raise train.warmup_steps"
    )


def cut_turns_warnings(groups: Sequence[TrajectoryGroup]) -> dict[str, str]:
    """Return a warning for each task with many turns that ``engine.max_new_tokens`` cut off.

    The last turn of an episode that fills the context is cut by ``engine.max_context``, and does not count.
    """
    cut: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for group in groups:
        for episode in group.trajectories:
            full = episode.end is EpisodeEnd.TRUNCATED_LENGTH
            turns = episode.turns[:-1] if full else episode.turns
            total[group.task] += len(turns)
            cut[group.task] += sum(turn.completion.finish_reason == "length" for turn in turns)
    return {
        task: f"{number / total[task]:.0%} of the turns of {task} were cut off by engine.max_new_tokens, and "
        "a call that is cut cannot be read: raise it, or let the task's opening ask for short answers"
        for task, number in cut.items()
        if number > MANY_CUT_TURNS * total[task]
    }


def turn_rewards_warning(groups: Sequence[TrajectoryGroup]) -> str | None:
    """Return a warning about credit by turn if no turn before the last has a reward."""
    turns = [turn for group in groups for one in group.trajectories for turn in one.turns[:-1]]
    if not turns or any(turn.reward for turn in turns):
        return None
    return (
        f"algorithm.credit = 'turn' uses the rewards of turns, but none of {len(turns)} turns before the "
        "last of an episode has one: unless algorithm.credit.gamma is below 1, use 'trajectory'"
    )


def no_calls_warning(groups: Sequence[TrajectoryGroup], *, chat: ChatFormat) -> str | None:
    """Return a warning if no completion of a step was read as a tool call; it quotes one of them."""
    turns = [(group.task, turn) for group in groups for one in group.trajectories for turn in one.turns]
    calls = (call for _, turn in turns for call in turn.message.tool_calls or ())
    if not turns or any(call.function.name for call in calls):
        return None
    task, turn = turns[0]
    text = chat.text(turn.completion.token_ids)[:QUOTED]
    return (
        f"none of {len(turns)} completions was read as a tool call in the syntax {chat.parser.name!r}, so "
        f"tasks that need one teach nothing; see model.tool_parser. The first, of task {task}: {text!r}"
    )
