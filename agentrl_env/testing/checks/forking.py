"""The check of tasks that offer ``snapshot`` and ``restore``: a fork is the same episode, apart."""

from __future__ import annotations

from agentrl_env.client.client import ClientSession
from agentrl_env.errors import ServerFull
from agentrl_env.testing.context import Probe
from agentrl_env.testing.report import Outcome, failed, passed, skipped
from agentrl_env.testing.rollouts import ExpertPolicy, Policy, RandomPolicy, ReplayPolicy, Transcript

ADVICE = (
    "snapshot() must hold all that later turns depend on, the random generator too, and restore() "
    "must put it into the new instance alone."
)


async def fork(probe: Probe) -> Outcome:
    """Do forks play on like the original, and leave it and one another alone?"""
    if "fork" not in probe.task.capabilities:
        return skipped("No fork is offered: the task has no snapshot() and restore().")
    count = 0
    for index in probe.while_time(probe.indices(4), least=1):
        for policy in _players(probe, index):
            whole = await probe.play(policy, index, seed=index + 1)
            for turn in sorted({0, len(whole.turns) // 2, max(len(whole.turns) - 1, 0)}):
                try:
                    problem = await _problem(probe, whole, turn)
                except ServerFull:
                    return skipped("The server has no room for three sessions at the same time.")
                if problem:
                    return failed(f"{whole.name}, forked after turn {turn}: {problem} {ADVICE}")
                count += 2
    return passed(f"{count} forks gave the results of their originals.")


def _players(probe: Probe, seed: int) -> list[Policy]:
    return [RandomPolicy(seed), *([ExpertPolicy()] if probe.has_expert else [])]


async def _problem(probe: Probe, whole: Transcript, turn: int) -> str | None:
    """Replay an episode, fork it twice after a turn, and say what differs afterwards.

    The first fork goes astray before the others go on, so that what they share shows.
    """
    index, seed = whole.sample.index, whole.sample.seed
    original = await probe.open(index, seed)
    seen = Transcript(sample=original.sample, opening=original.messages)
    await _play(probe, original, ReplayPolicy(whole.actions[:turn]), seen)
    stray, twin = await probe.fork(original, 2)
    for other in (stray, twin):
        if (other.turn, other.status, other.messages) != (turn, original.status, original.messages):
            return f"the fork stands at turn {other.turn}, {other.status}."
    await _play(probe, stray, RandomPolicy(seed + turn), _copy(seen))
    for name, session in (("the fork", twin), ("the original", original)):
        played = _copy(seen)
        await _play(probe, session, ReplayPolicy(whole.actions), played)
        await session.close()
        if difference := whole.difference(played):
            return f"{name} differs from the episode without forks in {difference}."
    await stray.close()
    return None


async def _play(probe: Probe, session: ClientSession, policy: Policy, transcript: Transcript) -> None:
    while await probe.advance(session, policy, transcript):
        continue


def _copy(transcript: Transcript) -> Transcript:
    return Transcript(sample=transcript.sample, opening=transcript.opening, turns=list(transcript.turns))
