"""Quality of a task: scores of unskilled policies, the expert and a model, and the cost of an episode.

``measure_quality`` plays the episodes; ``score``, ``score_groups`` and ``findings`` are pure functions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from agentrl_env.client.client import ClientSession
from agentrl_env.client.formatting import format_message
from agentrl_env.errors import AgentRLError
from agentrl_env.evaluation.chat_model import ChatModel
from agentrl_env.testing.context import (
    CheckContext,
    Policy,
    Rollout,
    RolloutTurn,
    describe,
    expert_policy,
)
from agentrl_env.testing.report import readable
from agentrl_env.testing.unskilled import (
    UNSKILLED,
    Habits,
    copy_instruction,
    do_nothing,
    draw_calls,
    first_options,
    follow_listing,
    repeat_call,
)
from agentrl_env.types import Message

CONCURRENT = 16
"""Episodes that are played at the same time."""
GROUP_SIZE = 8
REPLAYED = 5
"""Episodes that are played twice."""
EASY = 0.2
"""Success rate of an unskilled policy at which a task counts as too easy."""
WAIT_S = 60.0
"""Seconds to wait for a place on a full server."""
START_S = 300.0
"""Maximum seconds for a task or its server to start."""
CUT_OFF = 2
"""Episodes that have not ended after this many times the deadline of a policy are cut off."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class PolicyScore(_Frozen):
    """Result of a policy on a split. Means are over the episodes that did not fail."""

    episodes: int
    failed: int
    """Number of failed episodes, which count neither as successes nor as rewards."""
    failure: str | None
    """Reason of the first failure."""
    success: float | None
    reward: float | None
    best: float | None
    """Highest reward of an episode."""
    best_episode: str | None
    terminated: float | None
    """Share of the episodes that were ended by the task rather than by a limit."""
    turns: float | None
    characters: float | None
    tokens: float | None
    """Tokens that the model wrote in an episode, as its endpoint counts them. None for other policies."""

    @property
    def whole(self) -> int:
        """Number of episodes that did not fail. The means are over these."""
        return self.episodes - self.failed


class GroupScore(_Frozen):
    """Result of a model's groups, each of several episodes of one sample."""

    groups: int
    size: int
    pass_1: float | None
    pass_k: float | None
    """Share of the groups with a success."""
    signal: float | None
    """Share of the groups whose rewards differ, so that a policy can learn from them."""


class SplitQuality(_Frozen):
    """Scores of the policies on one split, by their names."""

    samples: int | None
    """Number of samples. None for an endless split."""
    asked: int
    """Number of samples that each policy should play."""
    played: int
    """Number of samples played without a failure by the expert, or by empty turns if there is no expert."""
    distinct: int | None
    """Number of different problems among the played samples. None without data and without an expert."""
    policies: dict[str, PolicyScore]
    groups: GroupScore | None = None


class Load(_Frozen):
    """Load of the task on this machine."""

    start_s: float
    """Seconds from the start of the process until its first session is open."""
    sessions: int
    """Number of sessions held open."""
    asked: int
    """Number of sessions that were requested."""
    mb_per_session: float | None
    """Memory of the server and its child processes per session. None if it is unknown."""
    episodes_per_s: float | None
    steps_per_s: float | None
    """Like ``episodes_per_s``, None if no step ended in time."""


class TaskQuality(_Frozen):
    """The quality of one task."""

    task: str
    splits: dict[str, SplitQuality]
    replayed: int
    """Number of episodes played twice with the same sample, seed and actions."""
    repeated: int
    """Number of replayed episodes that were equal."""
    difference: str | None = None
    load: Load | None = None
    findings: tuple[str, ...] = ()

    def mean(self, policy: str, figure: str) -> float | None:
        """Return the mean of a policy's figure, such as ``success``, over the splits, or None without any."""
        scores = [split.policies[policy] for split in self.splits.values() if policy in split.policies]
        return mean(getattr(own, figure) for own in scores)

    def best_unskilled(self) -> PolicyScore | None:
        """Return the unskilled policy with the highest reward in an episode."""
        scores = [split.policies.get(name) for split in self.splits.values() for name in UNSKILLED]
        earned = [own for own in scores if own is not None and own.best is not None]
        return max(earned, key=lambda own: own.best or 0.0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode of a policy."""

    rollout: Rollout | None = None
    error: str | None = None
    """Why there is no result, if the environment, the server or the model failed."""
    tokens: int | None = None

    @property
    def reward(self) -> float:
        """The sum of the rewards."""
        return sum(turn.result.reward for turn in self.rollout.turns) if self.rollout else 0.0

    @property
    def characters(self) -> int:
        """The length of the opening, the actions and the answers."""
        if self.rollout is None:
            return 0
        answers = [message for turn in self.rollout.turns for message in turn.result.messages]
        return sum(len(format_message(m)) for m in (*self.rollout.opening, *self.rollout.actions, *answers))


def score(episodes: Sequence[Episode]) -> PolicyScore:
    """Return the score of a policy from its episodes."""
    whole = [(episode, episode.rollout) for episode in episodes if episode.rollout and not episode.error]
    errors = [episode.error for episode in episodes if episode.error]
    best = max(whole, key=lambda pair: pair[0].reward, default=None)
    return PolicyScore(
        episodes=len(episodes),
        failed=len(errors),
        failure=errors[0] if errors else None,
        success=mean(rollout.success for _, rollout in whole),
        reward=mean(episode.reward for episode, _ in whole),
        best=best[0].reward if best else None,
        best_episode=_summary(best[1]) if best else None,
        terminated=mean(bool(rollout.last and rollout.last.terminated) for _, rollout in whole),
        turns=mean(len(rollout.turns) for _, rollout in whole),
        characters=mean(episode.characters for episode, _ in whole),
        tokens=mean(episode.tokens for episode, _ in whole),
    )


def score_groups(groups: Sequence[Sequence[Episode]]) -> GroupScore:
    """Return the score of groups of episodes of one sample each. Groups with only failures do not count."""
    whole = [[episode for episode in group if episode.rollout and not episode.error] for group in groups]
    whole = [group for group in whole if group]
    wins = [[bool(episode.rollout and episode.rollout.success) for episode in group] for group in whole]
    return GroupScore(
        groups=len(whole),
        size=max(map(len, groups), default=0),
        pass_1=mean(fmean(group) for group in wins),
        pass_k=mean(any(group) for group in wins),
        signal=mean(len({episode.reward for episode in group}) > 1 for group in whole),
    )


def findings(quality: TaskQuality) -> list[str]:
    """Return a sentence for each property that makes a task less useful for training."""
    found = []
    if quality.repeated < quality.replayed:
        different = f"{quality.replayed - quality.repeated} of {quality.replayed} episodes"
        found.append(f"{different} differ when they are played again: {quality.difference}")
    for name, split in quality.splits.items():
        found += [f"{name}: {sentence}" for sentence in _of_split(split)]
    return found


def _of_split(split: SplitQuality) -> Iterator[str]:
    expert = split.policies.get("expert")
    for policy, (words, remedy) in UNSKILLED.items():
        own = split.policies.get(policy)
        if own is None or own.success is None or own.best is None:
            continue
        if policy == "nothing" and own.best > 0:
            yield f"doing nothing earns a reward of {own.reward:.3g} on average, and up to {own.best:.3g}"
        elif own.success >= EASY:
            yield f"{words} solve {own.success:.0%}, such as {own.best_episode}. Remedy: {remedy}"
        if expert and expert.best is not None and own.best > expert.best:
            yield f"{words} earn {own.best:.3g} and the expert {expert.best:.3g}: {own.best_episode}"
    if expert and expert.success is not None and expert.success < 1.0:
        yield f"the expert solves only {expert.success:.0%}"
    if split.distinct is not None and split.distinct < split.played:
        yield f"only {split.distinct} of {split.played} samples differ, in data or expert episodes"
    for policy, own in split.policies.items():
        if own.failed:
            yield f"{own.failed} of {own.episodes} episodes of {policy} failed: {own.failure}"
    if split.groups and split.groups.signal == 0.0:
        yield "the rewards within each group of the model are equal, so it learns nothing"


def time_limit(deadline: float, splits: Iterable[int]) -> float:
    """Return the maximum seconds to measure tasks with these numbers of splits, if no call blocks."""
    policies = len(UNSKILLED) + 2  # the expert and the model
    return sum((CUT_OFF * policies * count + 1) * deadline + START_S for count in splits)


async def measure_quality(
    context: CheckContext,
    *,
    samples: int,
    splits: Sequence[str] = (),
    model: ChatModel | None = None,
    group_size: int = GROUP_SIZE,
) -> TaskQuality:
    """Play every policy on every split and return the results.

    Args:
        context: The task. Episodes of one policy on one split can start within its deadline.
        samples: Number of samples of each split.
        splits: Names of splits. By default all splits are played.
        model: A model that plays groups of episodes as well.
        group_size: Number of episodes of a group.
    """
    measured: dict[str, SplitQuality] = {}
    for split in splits or context.task.splits:
        indices = context.indices(samples, split)
        makers: dict[str, Callable[[int], Policy]] = {
            "nothing": lambda index: do_nothing,
            "random": draw_calls,
            "repeat": repeat_call,
            "first": lambda index: first_options,
            "listing": lambda index: follow_listing,
            "copy": lambda index: copy_instruction,
        }
        if context.offers_expert:
            makers["expert"] = lambda index: expert_policy
        played = {name: await play_all(context, split, indices, make) for name, make in makers.items()}
        if "expert" in played:
            played["habit"] = await play_all(context, split, indices, _habits(played["expert"]).policy)
        typical = _typical(played)
        groups = None
        if model is not None:
            attempts = [index for index in indices for _ in range(group_size)]
            episodes = await play_all(context, split, attempts, lambda index: ChatPolicy(model))
            played["model"] = episodes
            groups = [[episode for i, episode in episodes if i == index] for index in indices]
        measured[split] = SplitQuality(
            samples=context.size(split),
            asked=len(indices),
            played=len(typical),
            distinct=_distinct(typical, whole="expert" in played),
            policies={name: score([episode for _, episode in found]) for name, found in played.items()},
            groups=score_groups([group for group in groups if group]) if groups is not None else None,
        )
    replayed, repeated, difference = await _replays(context, next(iter(measured)))
    quality = TaskQuality(
        task=context.task.name,
        splits=measured,
        replayed=replayed,
        repeated=repeated,
        difference=difference,
    )
    return quality.model_copy(update={"findings": tuple(findings(quality))})


class ChatPolicy:
    """Plays one episode with a model and counts the tokens that the model writes."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self.tokens: int | None = None

    async def __call__(self, session: ClientSession, rollout: Rollout) -> Message:
        """Return the model's next message."""
        messages = list(rollout.opening)
        for turn in rollout.turns:
            messages += [turn.action, *turn.result.messages]
        completion = await self._model.complete(messages, session.tools)
        if completion.usage.output is not None:
            self.tokens = (self.tokens or 0) + completion.usage.output
        return completion.message


async def play_all(
    context: CheckContext, split: str, indices: Sequence[int], make: Callable[[int], Policy]
) -> list[tuple[int, Episode]]:
    """Play an episode of each sample, some at a time, and return the played episodes.

    No episode starts after the deadline. An episode that has not ended after ``CUT_OFF`` times the deadline
    fails.
    """
    begin, pending = context.clock(), list(reversed(indices))
    played: list[tuple[int, Episode]] = []

    async def play_some() -> None:
        while pending and (context.clock() < begin + context.deadline or not played):
            index = pending.pop()
            left = begin + CUT_OFF * context.deadline - context.clock()
            played.append((index, await _play_until(context, split, index, make(index), left)))

    await asyncio.gather(*(play_some() for _ in range(min(CONCURRENT, len(indices)))))
    return sorted(played, key=lambda pair: pair[0])


async def _play_until(
    context: CheckContext, split: str, index: int, policy: Policy, seconds: float
) -> Episode:
    """Play an episode and cut it off after some seconds, without waiting for its current call."""
    playing = asyncio.ensure_future(_play(context, split, index, policy))
    await asyncio.wait((playing,), timeout=max(seconds, 0.0))
    if playing.done():
        return playing.result()
    playing.cancel()
    return Episode(error=f"cut off, as it had not ended at {CUT_OFF} times the deadline")


async def _play(context: CheckContext, split: str, index: int, policy: Policy) -> Episode:
    rollout, error = None, None
    try:
        async with await context.client.open(
            context.task.name, split=split, index=index, wait=WAIT_S
        ) as session:
            rollout = Rollout(sample=session.sample, opening=session.messages)
            while not session.status.final:
                action = await policy(session, rollout)
                if action is None:
                    break
                rollout.turns.append(RolloutTurn(action=action, result=await session.step(action)))
    except AgentRLError as failure:
        error = f"{type(failure).__name__}: {failure}"
    if error is None and rollout is not None:
        error = rollout.reason
    return Episode(rollout=rollout, error=error, tokens=getattr(policy, "tokens", None))


async def _replays(context: CheckContext, split: str) -> tuple[int, int, str | None]:
    """Play random episodes twice. Return their number, how many were equal, and the first difference.

    Episodes that fail or have not ended at the deadline do not count.
    """
    differences: list[str | None] = []

    async def play_twice() -> None:
        for index in context.indices(REPLAYED, split):
            with contextlib.suppress(AgentRLError):
                first = await context.play(draw_calls(index), index, split=split)
                if not first.reason:
                    difference = first.difference(await context.replay(first))
                    differences.append(difference and f"{first.name}, {difference}")

    playing = asyncio.ensure_future(play_twice())
    await asyncio.wait((playing,), timeout=context.deadline)
    if not playing.done():
        playing.cancel()
    else:
        playing.result()
    await context.close_all()
    found = [difference for difference in differences if difference]
    return len(differences), len(differences) - len(found), found[0] if found else None


def _habits(episodes: Sequence[tuple[int, Episode]]) -> Habits:
    """Return the habits of an expert in the episodes that it solved."""
    solved = {index: episode.rollout for index, episode in episodes if episode.rollout and not episode.error}
    return Habits({index: rollout for index, rollout in solved.items() if rollout.success})


def _typical(played: Mapping[str, Sequence[tuple[int, Episode]]]) -> list[Rollout]:
    """Return the expert's episodes that did not fail, or those of empty turns without an expert."""
    name = "expert" if "expert" in played else "nothing"
    return [episode.rollout for _, episode in played[name] if episode.rollout and not episode.error]


def _distinct(rollouts: Sequence[Rollout], *, whole: bool) -> int | None:
    """Count different problems by the texts of the expert's whole episodes, else by data and opening."""
    if not whole and not all(rollout.sample.data for rollout in rollouts):
        return None
    return len({readable([r.sample.data, *_texts(r, whole)]) for r in rollouts})


def _texts(rollout: Rollout, whole: bool) -> list[str]:
    answers = [m for turn in rollout.turns for m in turn.result.messages] if whole else []
    actions = rollout.actions if whole else []
    return [format_message(message) for message in (*rollout.opening, *actions, *answers)]


def _summary(rollout: Rollout) -> str:
    calls = [describe(action) for action in rollout.actions[-3:]]
    skipped = "... " if len(rollout.actions) > 3 else ""
    return f"{rollout.name}: {skipped}{', '.join(calls)}"


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None without any."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
