"""Play episodes with a task's expert."""

from typing import NamedTuple


class Played(NamedTuple):
    """The messages of both sides, the total reward and the metrics of the last turn."""

    transcript: list[str]
    reward: float
    metrics: dict[str, float]


async def play(session):
    """Let the expert play a session to its end. Every call must be valid."""
    transcript, reward, metrics = [str(message.content) for message in session.messages], 0.0, {}
    while not session.status.final:
        move = await session.expert()
        result = await session.step(move)
        transcript += [move.model_dump_json(), *(str(message.content) for message in result.messages)]
        reward += result.reward
        metrics = result.metrics
        assert metrics.get("invalid_calls", 0.0) == 0.0, transcript
    return Played(transcript, reward, metrics)
