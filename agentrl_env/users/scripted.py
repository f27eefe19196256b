"""Users without a model: a script and a function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

from agentrl_env.errors import DefinitionError
from agentrl_env.users.dialogue import UserFailed, Utterance

Speak = Callable[[Sequence[Utterance]], "str | Utterance | Awaitable[str | Utterance]"]
"""Returns the next message of a user from the dialogue so far."""


class ScriptedUser:
    """A user that sends its lines one after another and ends the dialogue with the last line.

    Args:
        lines: The user's messages. The first opens the dialogue if ``Dialogue.open`` is called, else it
            answers the policy's first message.
        replies: Answers by regular expression. The first answer whose expression matches the policy's text
            replaces the next line. Case is ignored.
        instructions: A description of the user, for transcripts.
    """

    def __init__(
        self, lines: Sequence[str], *, replies: Mapping[str, str] | None = None, instructions: str = ""
    ) -> None:
        if not lines or isinstance(lines, str):
            raise DefinitionError("ScriptedUser takes a list of at least one line, such as ['Where is it?']")
        self.lines, self.replies, self.instructions = tuple(lines), dict(replies or {}), instructions

    async def speak(self, dialogue: Sequence[Utterance]) -> Utterance:
        """Return the reply that matches the last message, else the next line."""
        heard = [line.text for line in dialogue if line.speaker == "assistant"]
        if heard and (reply := self._reply(heard[-1])) is not None:
            return Utterance(text=reply)
        answered = sum(self._reply(text) is None for text in heard[:-1])
        opened = bool(dialogue) and dialogue[0].speaker == "user"
        number = answered + opened
        return Utterance(text=self.lines[number], ends=number == len(self.lines) - 1)

    def _reply(self, text: str) -> str | None:
        found = (reply for pattern, reply in self.replies.items() if re.search(pattern, text, re.IGNORECASE))
        return next(found, None)


class FunctionUser:
    """A user that a function plays.

    Args:
        function: Returns the next message from the dialogue so far, plain or ``async``. A text continues the
            dialogue. ``Utterance(text=..., ends=True)`` ends it. A fork copies the dialogue but not the state
            of the function, so the answer must depend only on the argument.
        instructions: A description of the user, for transcripts.
    """

    def __init__(self, function: Speak, *, instructions: str = "") -> None:
        self.function, self.instructions = function, instructions

    async def speak(self, dialogue: Sequence[Utterance]) -> Utterance:
        """Return the function's answer."""
        said = self.function(dialogue)
        if inspect.isawaitable(said):
            said = await said
        if isinstance(said, str):
            return Utterance(text=said)
        if not isinstance(said, Utterance):
            raise UserFailed(f"the user's function returned {type(said).__name__}; return a str or Utterance")
        return said
