"""Warnings about a run that learns nothing, too fast or unstably, with causes and the setting to change."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean

from agentrl_env.evaluation.statistics import effective_trials, weighted_sum, wilson_interval
from agentrl_env.types import Message
from agentrl_train.chat import ChatFormat, hidden_parts, hidden_parts_warning
from agentrl_train.config.algorithm import AlgorithmSection
from agentrl_train.config.sections import TrainSection
from agentrl_train.types import EpisodeEnd, Step, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

NO_VALID_CALLS = 0.1
"""If fewer turns have valid calls, the warning about a run that learns nothing includes this share."""
MANY_CUT_TURNS = 0.25
"""A warning names the token limit if it ends more than this share of a task's turns."""
LARGE_KL = 0.1
"""KL divergence from the sampling policy above which a step is reported as large, in nats per token."""
MANY_CLIPPED = 0.3
"""Share of clipped tokens above which a step is reported.

It is twice the share that GSPO reports for healthy training (0.15, arXiv 2507.18071), which is a hundred
times the share of GRPO. Token ratios with a KL divergence of ``LARGE_KL`` reach it with a clip of 0.2.
"""
LOW_ENTROPY = 0.05
"""Entropy below which siblings hardly differ, in nats per token."""
MOST_AGREE = 0.5
"""Low entropy is reported above this share of groups without a signal."""
SOLVED = 0.5
"""Low entropy is not reported from this success on, because groups agree when they succeed."""
HIGH_ENTROPY = 2.0
"""Entropy above which tool calls are mostly noise, in nats per token."""
HIGH_GRAD_NORM = 100.0
"""Multiple of ``train.max_grad_norm`` above which clipping discards almost the whole update."""
FEW_VALID_CALLS = 0.5
"""Share of turns with valid calls below which a task teaches mainly syntax."""
RECENT = 10
"""Number of training steps to compare held-out success with."""
LONG_WAIT = 1 / 3
"""Idle share of trainer and engine, over the last steps, above which they wait for single long episodes."""
LARGE_GAP = 0.1
"""Smallest reported difference between success in training and on held-out samples."""
QUOTED = 300
"""Maximum number of quoted characters of a completion in a warning."""


class Diagnosis:
    """Logs a warning the 1st, 2nd, 4th, 8th ... time that a step shows a problem.

    Args:
        chat: chat format of the policy.
        algorithm: settings of the algorithm.
        train: settings of the learner.
        without_tools: tasks in which a policy answers only with text.
        hidden: tasks for which a warning about hidden parts of the opening was already logged.
    """

    def __init__(
        self,
        chat: ChatFormat,
        *,
        algorithm: AlgorithmSection,
        train: TrainSection,
        without_tools: Collection[str] = (),
        hidden: Collection[str] = (),
    ) -> None:
        self._chat = chat
        self._without_tools = without_tools
        self._hidden = set(hidden)
        """Tasks with a logged warning about parts of messages that the policy does not see."""
        self._algorithm = algorithm
        self._train = train
        self._counts: Counter[str] = Counter()
        self._recent: deque[Sequence[TrajectoryGroup]] = deque(maxlen=RECENT)
        self._metrics: deque[Mapping[str, float]] = deque(maxlen=RECENT)
        self._cut: set[str] = set()
        """Tasks with a logged warning about truncated turns."""

    def examine(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Log the warnings about a trained step."""
        groups, idle = step.groups, self._counts["idle"] + 1
        self._recent.append(groups)
        self._metrics.append(metrics)
        learned = metrics.get("loss_tokens") or metrics.get("skipped_steps")  # a skipped step has its own
        self._warn("idle", None if learned else no_signal_warning(groups, steps=idle))
        with_tools = [group for group in groups if group.task not in self._without_tools]
        self._warn("no calls", no_calls_warning(with_tools, chat=self._chat))
        for task, warning in cut_turns_warnings(groups).items():
            if task not in self._cut:
                self._cut.add(task)
                logger.warning("%s", warning)
        for group in groups:
            if group.task not in self._hidden and (hidden := hidden_parts(_messages(group))):
                self._hidden.add(group.task)
                logger.warning("%s", hidden_parts_warning(group.task, hidden))
        self._warn("large", large_step_warning(metrics), in_a_row=False)
        clipped = clipping_warning(metrics, algorithm=self._algorithm, train=self._train)
        self._warn("clipped", clipped, in_a_row=False)
        self._warn("waits", waiting_warning(self._metrics) if len(self._metrics) == RECENT else None)
        if self._algorithm.credit.name == "turn" and step.next_version == 1:
            self._warn("turns", turn_rewards_warning(groups))
        for problem, warning in unhealthy(metrics, groups, max_grad_norm=self._train.max_grad_norm):
            self._warn(problem, warning)

    def compare(self, held_out: Mapping[str, tuple[float, float, float]]) -> None:
        """Log a warning if the tasks succeed less on held-out samples than in the last training steps.

        Args:
            held_out: success rate of each task, and the bounds of its 95 % interval.
        """
        groups = [group for step in self._recent for group in step]
        for task, estimate in held_out.items():
            played = [group.trajectories for group in groups if group.task == task]
            self._warn(f"gap of {task}", gap_warning(task, played, estimate), in_a_row=False)

    def _warn(self, problem: str, warning: str | None, *, in_a_row: bool = True) -> None:
        if warning is None:
            self._counts[problem] *= not in_a_row
            return
        self._counts[problem] += 1
        if self._counts[problem].bit_count() == 1:
            logger.warning("%s", warning)


def _messages(group: TrajectoryGroup) -> Iterator[Message]:
    for one in group.trajectories:
        yield from one.opening
        yield from chain.from_iterable(turn.reply for turn in one.turns)


def no_signal_warning(groups: Sequence[TrajectoryGroup], *, steps: int) -> str:
    """Return a warning about consecutive steps without a learning signal, with likely causes."""
    episodes = [episode for group in groups for episode in group.trajectories]
    rewards = {round(episode.reward, 6) for episode in episodes}
    values = f"all are {min(rewards):g}" if len(rewards) == 1 else f"{len(rewards)} different values"
    when = "this step" if steps == 1 else f"{steps} consecutive steps"
    if any(len({one.reward for one in group.trajectories}) > 1 for group in groups):
        return (
            f"no learning signal in {when}, although rewards differ within groups: algorithm.leave_out omits "
            "the episodes, or algorithm.penalties or functions of your own make their advantages equal"
        )
    sentences = [
        f"no learning signal in {when}: within each group all episodes have the same reward ({values})",
    ]
    full = sum(episode.end is EpisodeEnd.TRUNCATED_LENGTH for episode in episodes) / max(1, len(episodes))
    if full:
        sentences.append(f"{full:.0%} of the episodes were cut off by engine.max_context: raise it")
    turns = [turn for episode in episodes for turn in episode.turns]
    valid = sum(turn.invalid_calls == 0 for turn in turns) / max(1, len(turns))
    if valid < NO_VALID_CALLS:
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
        f"the policy is {kl:.2g} nats per token from the one that sampled these episodes (kl): such large "
        "steps can unlearn earlier skills; lower train.learning_rate, or raise train.warmup_steps"
    )


def clipping_warning(
    metrics: Mapping[str, float], *, algorithm: AlgorithmSection, train: TrainSection
) -> str | None:
    """Return a warning if the region of the loss limits many tokens of a step, with the settings that help.

    Args:
        metrics: metrics of the step.
        algorithm: settings of the algorithm. The anchor decides which settings help.
        train: settings of the learner.
    """
    fraction, age = metrics.get("clip_fraction", 0.0), metrics.get("token_staleness_mean", 0.0)
    if fraction <= MANY_CLIPPED:
        return None
    anchor, remedies = "before the update", ["lower train.learning_rate"]
    if train.minibatches > 1:
        remedies.append(f"lower train.minibatches ({train.minibatches})")
    if algorithm.anchor.name != "old":
        anchor = f"that sampled them, on average {age:.2g} versions earlier"
        if age:
            remedies.append("lower rollout.max_staleness or rollout.stale.interval")
            remedies.append("set algorithm.anchor = 'old' with algorithm.correction = 'truncate'")
    return (
        f"algorithm.region limited {fraction:.0%} of the trained tokens (clip_fraction), because the policy "
        f"moved far from the policy {anchor}: {', or '.join(remedies)}"
    )


def waiting_warning(steps: Collection[Mapping[str, float]]) -> str | None:
    """Return a warning if trainer and engine of an asynchronous run both wait for long episodes.

    Args:
        steps: metrics of the last steps. A synchronous run has no stale groups and waits by design.
    """
    trainer, engine = (fmean(one.get(f"{name}_idle", 0.0) for one in steps) for name in ("trainer", "engine"))
    synchronous = not any(one.get("staleness_max") for one in steps)
    if synchronous or min(trainer, engine) <= LONG_WAIT:
        return None
    return (
        f"in the last {len(steps)} steps the trainer waited for episodes {trainer:.0%} of the time, and the "
        f"engine was idle {engine:.0%} of the time: to train on other groups while long episodes end, raise "
        "rollout.max_staleness and rollout.window together"
    )


def gap_warning(
    task: str, groups: Sequence[Sequence[Trajectory]], held_out: tuple[float, float, float]
) -> str | None:
    """Return a warning if success on held-out samples is significantly below that of training groups."""
    successes = [[one.success for one in group] for group in groups if group]
    if not successes:
        return None
    trained = fmean(chain.from_iterable(successes))
    trials = effective_trials(successes)
    estimates = [held_out, (trained, *wilson_interval(trained * trials, trials))]
    gap, low, high = weighted_sum(estimates, (-1, 1))
    if low <= LARGE_GAP:
        return None
    return (
        f"{task} succeeds in {trained:.0%} of the last training episodes and in "
        f"{held_out[0]:.0%} of the held-out ones, {100 * gap:.0f} points less (95 % interval "
        f"{100 * low:.0f} to {100 * high:.0f}): the policy may have memorized its training samples, or the "
        "held-out split is harder; train on more samples or for fewer steps, and compare the splits with "
        "`agentrl-env check --quality`"
    )


def cut_turns_warnings(groups: Sequence[TrajectoryGroup]) -> dict[str, str]:
    """Return a warning for each task with many turns that ``engine.max_new_tokens`` cut off.

    The last turn of an episode with a full context does not count, because ``engine.max_context`` cut it off.
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
        "a cut call cannot be parsed: raise it, or request short answers in the task's opening"
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
    """Return a warning that quotes a completion if no completion of a step was parsed as a tool call."""
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
            f"the entropy of the policy is {entropy:.2g} nats per token, and in {agreeing} of {len(groups)} "
            "groups all episodes have the same reward, so there is little to learn from: raise "
            "engine.temperature (1.2), raise rollout.group_size (16), set algorithm.dynamic_sampling = 2, or "
            "imitate experts for fewer updates (sft.steps)",
        )
    if entropy is not None and entropy > HIGH_ENTROPY:
        yield (
            "high entropy",
            f"the entropy of the policy is {entropy:.2g} nats per token, close to random text: lower "
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
