"""The last turns of a session, to repeat an answer that was lost and to show how it went."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from pydantic_core import PydanticSerializationError

from agentrl_env.errors import InvalidRequest, SeqConflict
from agentrl_env.types import Message, StepResult

KEPT_TURNS = 64
"""How many turns a session keeps."""
# What ``model_dump_json`` calls in the end, without the way through a str.
MESSAGE_JSON: Callable[[Message], bytes] = Message.__pydantic_serializer__.to_json
_RESULT_JSON: Callable[[StepResult], bytes] = StepResult.__pydantic_serializer__.to_json


class History:
    """Turns as JSON text: as small as they get, and nothing for the garbage collector to go through.

    As objects, the turns of thousands of sessions would cost it more time than the steps take.
    """

    def __init__(self) -> None:
        self._turns: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_TURNS)
        self._last: StepResult | None = None

    def add(self, said: bytes, result: StepResult) -> bytes:
        """Keep a turn, and return its answer as it crosses the wire.

        Args:
            said: the assistant message, from ``message_json``.
            result: the environment's answer.
        """
        answer = _result_json(result)
        self._turns.append((said, answer))
        self._last = result
        return answer

    def answer(self, seq: int, turn: int) -> bytes:
        """Return the answer to step ``seq`` of ``turn``. Raises SeqConflict, InvalidRequest."""
        if seq < 1:
            raise InvalidRequest(f"seq counts from 1, got {seq}")
        if turn - seq >= len(self._turns):
            raise SeqConflict(f"the answer to seq {seq} is no longer kept", expected=turn + 1)
        return self._turns[seq - turn - 1][1]

    def result(self, answer: bytes) -> StepResult:
        """Return what an answer of this session says."""
        if self._last is not None and self._turns[-1][1] is answer:
            return self._last
        return StepResult.model_validate_json(answer)

    @property
    def last(self) -> StepResult | None:
        """The answer to the last step."""
        return self._last

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
            history._turns.append((said.encode(), answer.encode()))
            history._last = StepResult.model_validate_json(answer)
        return history

    def copy(self, session_id: str) -> History:
        """Return the same turns as those of another session."""
        twin = History()
        for said, answer in self._turns:
            result = StepResult.model_validate_json(answer)
            twin.add(said, result.model_copy(update={"session_id": session_id}))
        return twin


def message_json(message: Message) -> bytes:
    """Return a message as JSON; what JSON cannot carry in it, such as lone surrogates, is replaced."""
    try:
        return MESSAGE_JSON(message)
    except PydanticSerializationError:
        return _forced(message)


def _result_json(result: StepResult) -> bytes:
    try:
        return _RESULT_JSON(result)
    except PydanticSerializationError:  # it repeats the id of a call that never crossed a wire
        return _forced(result)


def _forced(model: Message | StepResult) -> bytes:
    return json.dumps(model.model_dump(), ensure_ascii=False, default=str).encode("utf-8", "replace")
