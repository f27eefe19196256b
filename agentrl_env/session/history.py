"""The last turns of a session, to repeat an answer that was lost and to show how it went."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from agentrl_env.errors import InvalidRequest, SeqConflict
from agentrl_env.types import Message, StepResult

KEPT_TURNS = 64
"""How many turns a session keeps."""


class History:
    """Turns as JSON text: as small as they get, and nothing for the garbage collector to go through.

    As objects, the turns of thousands of sessions would cost it more time than the steps take.
    """

    def __init__(self) -> None:
        self._turns: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_TURNS)

    def add(self, said: bytes, answer: bytes) -> None:
        """Keep a turn: the assistant's message and the StepResult."""
        self._turns.append((said, answer))

    def answer(self, seq: int, turn: int) -> bytes:
        """Return the answer to step ``seq`` of ``turn``. Raises SeqConflict, InvalidRequest."""
        if seq < 1:
            raise InvalidRequest(f"seq counts from 1, got {seq}")
        if turn - seq >= len(self._turns):
            raise SeqConflict(f"the answer to seq {seq} is no longer kept", expected=turn + 1)
        return self._turns[seq - turn - 1][1]

    @property
    def last(self) -> StepResult | None:
        """The answer to the last step."""
        return StepResult.model_validate_json(self._turns[-1][1]) if self._turns else None

    def __iter__(self) -> Iterator[tuple[Message, StepResult]]:
        for said, answer in self._turns:
            yield Message.model_validate_json(said), StepResult.model_validate_json(answer)

    def tail(self, number: int) -> tuple[tuple[str, str], ...]:
        """Return the last turns, at most so many, as JSON text."""
        turns = list(self._turns)[-number:]
        return tuple((said.decode(), answer.decode()) for said, answer in turns)

    @classmethod
    def of(cls, turns: Iterable[tuple[str, str]]) -> History:
        """Return what ``tail`` was taken of, as far as it is in there."""
        history = cls()
        for said, answer in turns:
            history.add(said.encode(), answer.encode())
        return history

    def copy(self, session_id: str) -> History:
        """Return the same turns as those of another session."""
        twin = History()
        for said, answer in self._turns:
            result = StepResult.model_validate_json(answer).model_copy(update={"session_id": session_id})
            twin.add(said, result.model_dump_json().encode())
        return twin
