"""The last turns of a session, for repeated requests and transcripts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from agentrl_env.errors import IdempotencyConflict, InvalidRequest, SeqConflict
from agentrl_env.fast_wire import AssistantMessage, encode
from agentrl_env.types import Message, StepResult

MAX_TURNS = 64
"""Number of turns that a session keeps."""


MAX_BYTES = 8 * 1024 * 1024
"""Size of the turns that a session keeps by default; the last ``MIN_TURNS`` are kept in any case."""
MIN_TURNS = 2
_LARGE_BYTES = 64 * 1024
"""Turns of at most this size are bounded by their number alone."""


class History:
    """Turns as JSON text: compact, and opaque to the garbage collector.

    As objects, the turns of thousands of sessions would take it longer than the steps themselves.

    Args:
        max_bytes: size of the turns that are kept.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._turns: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_TURNS)
        self._max_bytes = max_bytes

    def add(self, message: bytes, result: bytes) -> None:
        """Append a turn: the assistant message and the StepResult."""
        self._turns.append((message, result))
        if len(message) + len(result) > _LARGE_BYTES:
            size = sum(len(message) + len(result) for message, result in self._turns)
            while size > self._max_bytes and len(self._turns) > MIN_TURNS:
                size -= sum(map(len, self._turns.popleft()))

    def result(self, seq: int, turn: int, message: AssistantMessage) -> bytes:
        """Return the result of step ``seq``, played with ``message``; ``turn`` is the last.

        Raises SeqConflict, InvalidRequest, IdempotencyConflict where it was played with another message.
        """
        if seq < 1:
            raise InvalidRequest(f"seq counts from 1, got {seq}")
        if turn - seq >= len(self._turns):
            raise SeqConflict(f"the answer to seq {seq} is no longer kept", expected=turn + 1)
        played, result = self._turns[seq - turn - 1]
        again = encode(message)
        if again != played and _parsed(again) != _parsed(played):  # one message has several spellings
            raise IdempotencyConflict(f"seq {seq} was played with another message; the next is {turn + 1}")
        return result

    @property
    def last(self) -> StepResult | None:
        """Result of the last step."""
        return StepResult.model_validate_json(self._turns[-1][1]) if self._turns else None

    def __iter__(self) -> Iterator[tuple[Message, StepResult]]:
        for message, result in self._turns:
            yield Message.model_validate_json(message), StepResult.model_validate_json(result)

    def tail(self, number: int = MAX_TURNS) -> tuple[tuple[str, str], ...]:
        """Return at most the last ``number`` turns as JSON text."""
        turns = list(self._turns)[-number:]
        return tuple((message.decode(), result.decode()) for message, result in turns)

    @classmethod
    def of(cls, turns: Iterable[tuple[str, str]]) -> History:
        """Return the history that ``tail`` was taken of."""
        history = cls()
        for message, result in turns:
            history.add(message.encode(), result.encode())
        return history

    def copy(self, session_id: str) -> History:
        """Return the same turns under the id of another session."""
        copied = History(self._max_bytes)
        for message, result in self._turns:
            renamed = StepResult.model_validate_json(result).model_copy(update={"session_id": session_id})
            copied.add(message, renamed.model_dump_json().encode())
        return copied


def _parsed(message: bytes) -> Message | bytes:
    try:
        return Message.model_validate_json(message)
    except ValueError:
        return message
