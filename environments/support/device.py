"""A device of the customer, such as a phone, which only the customer sees and changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from agentrl_env import ToolCall, ToolError
from agentrl_env.users import OwnTools, UserCall, Utterance

Use = tuple[str, dict[str, Any]]
"""The name of a tool of the device, and its arguments."""


class Device(ABC):
    """A device of the customer.

    Its ``@tool`` methods are the customer's possible actions. Their answers are sentences that the customer
    can repeat to the desk. The dialogue records the calls, and they alone determine the state of the device,
    so that forks and restored episodes have the same state.
    """

    name: ClassVar[str]
    """Name of the metric that is 1 if the device is in the right state."""
    test: ClassVar[str]
    """Name of the tool, without arguments, that tests if the device works."""

    @abstractmethod
    def hear(self, messages: Sequence[str]) -> list[Use]:
        """Return the uses that the last message of the desk requests, in order."""

    @abstractmethod
    def works(self, answer: str) -> bool:
        """Return True if an answer of ``test`` means that the device works."""

    @abstractmethod
    def right(self) -> bool:
        """Return True if all faults are fixed and nothing else has changed."""

    def after(self, dialogue: Sequence[Utterance]) -> Self:
        """Repeat the calls of a dialogue, and return the device."""
        OwnTools(self).replay(dialogue)
        return self

    def use(self, tool: str, given: dict[str, Any], number: int) -> UserCall:
        """Call a tool, as the call with this number in a message."""
        try:
            answer = getattr(self, tool)(**given)
        except ToolError as error:
            answer = str(error)
        return UserCall(call=ToolCall.of(tool, call_id=f"call_{number}", **given), answer=answer)
