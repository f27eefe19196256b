"""A dialogue between the policy and a user, inside an episode."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from agentrl_env.errors import AgentRLError, DefinitionError, ToolError
from agentrl_env.evaluation.chat_model import NO_USAGE, Usage
from agentrl_env.schema import ArgumentError, echo
from agentrl_env.tools import Done, Reply, toolset
from agentrl_env.types import ToolCall, ToolSpec

MAX_MESSAGES = 100
"""Maximum number of messages of both sides, including the user's tool calls, before truncation."""
NOTHING_SAID = "The user has received no text. Write a message to the user, or call a tool."
_NAMES = "think|thinking|thought|thoughts|reasoning|analysis|reflection|scratchpad"
_CLOSED = re.compile(
    rf"<({_NAMES})\b[^<>]*>.*?(?:</\1\s*>|\Z)"
    r"|\[THINK\].*?(?:\[/THINK\]|\Z)"
    r"|◁think▷.*?(?:◁/think▷|\Z)"
    r"|<\|channel\|>\s*analysis\b.*?(?:<\|end\|>|(?=<\|(?:channel|start)\|>)|\Z)",
    re.DOTALL | re.IGNORECASE,
)
"""Thoughts, up to their end or to the end of a truncated text."""
_OPENED_BEFORE = re.compile(rf"\A.*(?:</(?:{_NAMES})\s*>|\[/THINK\]|◁/think▷)", re.DOTALL | re.IGNORECASE)
"""Thoughts that start in the prompt, so that the text contains only their end."""
_CHANNEL = re.compile(r"<\|start\|>\w*|<\|channel\|>\s*\w+|<\|(?:end|message|return)\|>")
"""Markers of messages that are not thoughts."""


class UserFailed(AgentRLError):
    """The user gave no answer. The episode fails and has no reward."""


class BudgetSpent(AgentRLError):
    """The user has reached its own limit. The episode is truncated."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class UserCall(_Frozen):
    """A call of one of the user's own tools and its answer. The policy sees neither."""

    call: ToolCall
    answer: str


class Utterance(_Frozen):
    """One message of a dialogue. The policy sees only its ``text``."""

    text: str
    speaker: Literal["assistant", "user"] = "user"
    ends: bool = False
    """True if the user ends the dialogue with this message."""
    calls: tuple[UserCall, ...] = ()
    """Calls of the user's own tools before the message, in order."""
    thought: str | None = None
    usage: Usage = NO_USAGE
    """Tokens of the model that plays the user, in the requests for this message."""
    seconds: float = 0.0
    """Seconds that the answered requests took. A cached answer has the duration of the original request."""
    requests: int = 0
    repeats: int = 0
    """Number of failed requests before the answered requests."""


class User(Protocol):
    """A participant that answers the policy. Its answer depends only on the dialogue so far."""

    @property
    def instructions(self) -> str:
        """Return the user's instructions, for transcripts. The policy never sees them."""

    async def speak(self, dialogue: Sequence[Utterance]) -> Utterance:
        """Return the user's next message. The dialogue is empty if the user opens it.

        Raises UserFailed if there is no answer.
        """


class OwnTools:
    """The tools of a user: the ``@tool`` methods of an object, such as a phone.

    Args:
        owner: The object. Its tools are declared and validated like those of an Environment.
    """

    def __init__(self, owner: object) -> None:
        self.owner = owner
        kind: type = type(owner)
        self._tools = toolset(kind)
        self.specs: tuple[ToolSpec, ...] = self._tools.specs
        if not self.specs:
            raise DefinitionError(f"{type(owner).__name__} has no tools: put @tool on its methods", owner)

    async def call(self, call: ToolCall) -> UserCall:
        """Return the call with its answer. A call that does not fit its tool is answered with the error."""
        name = call.function.name
        if name not in self._tools.tools:
            known = self._tools.names
            return UserCall(call=call, answer=f"Error: there is no tool {echo(name)}. Tools: {known}.")
        try:
            answer = self._start(call)
            if inspect.isawaitable(answer):
                answer = await answer
        except ArgumentError as error:
            answer = f"Error: {error}."
        except ToolError as error:
            answer = str(error)
        if not isinstance(answer, str):
            raise DefinitionError(f"the user's tool {name}() returned {type(answer).__name__}; return a str")
        return UserCall(call=call, answer=answer)

    def replay(self, dialogue: Sequence[Utterance]) -> None:
        """Repeat the calls of a dialogue, so that a new owner reaches the state after them.

        Raises DefinitionError if one of the tools is async.
        """
        for own in (own for line in dialogue for own in line.calls):
            if own.call.function.name not in self._tools.tools:
                continue
            with suppress(ArgumentError, ToolError):
                if inspect.iscoroutine(answer := self._start(own.call)):
                    answer.close()
                    raise DefinitionError(
                        f"the user's tool {own.call.function.name}() is async and cannot be called again; "
                        "write a plain method",
                        self.owner,
                    )

    def _start(self, call: ToolCall) -> str | Awaitable[str]:
        found = self._tools.tools[call.function.name]
        answer: str | Awaitable[str] = getattr(self.owner, found.attribute)(
            **found.arguments.parse(call.function.arguments)
        )
        return answer


class Dialogue:
    """The messages between the policy and a user, in one episode.

    The user reads the policy's text without its thoughts. The policy reads the user's text. Only the user or
    the environment ends the dialogue.

    Example::

        class Desk(Environment):
            async def reset(self, sample, rng):
                self.dialogue = Dialogue(ScriptedUser(["Where is my parcel?", "It is W17.", "Thank you."]))
                return await self.dialogue.open()

            async def respond(self, text):
                return await self.dialogue.answer(text, grade=self.grade)

    A dialogue can be copied for a fork. For sessions that continue on another server, store ``state()`` and
    pass it to a new dialogue.

    Args:
        user: The user.
        max_messages: Number of messages of both sides, including the user's tool calls, after which the
            episode is truncated.
        state: The messages of an earlier dialogue, from ``state()``.
    """

    def __init__(
        self, user: User, *, max_messages: int = MAX_MESSAGES, state: Sequence[dict[str, Any]] = ()
    ) -> None:
        if max_messages < 2:
            raise DefinitionError(
                f"max_messages={max_messages} leaves no room for an answer; give at least 2"
            )
        self.user, self.max_messages = user, max_messages
        self.lines = [Utterance.model_validate(line) for line in state]
        self._shown = len(self.lines)
        """Number of messages whose hidden part was already added to the info of a result."""

    async def open(self) -> str:
        """Let the user speak first and return its text, for ``reset``. Raises UserFailed."""
        self.lines.append(await self.user.speak(()))
        return self.lines[-1].text

    async def answer(self, text: str, *, grade: Callable[[], float] | None = None) -> Reply:
        """Pass the policy's text to the user and return the user's answer, for ``respond``.

        Args:
            text: The policy's text. Its thoughts are removed.
            grade: Returns the reward of the episode. Called if the user ends the dialogue.

        Returns:
            The user's text, with metrics and hidden parts in ``info``. It is a ``Done`` if the user has ended
            the dialogue or a limit was reached.

        Raises:
            UserFailed: The user gave no answer.
        """
        heard = visible_text(text)
        if not heard:
            return Reply(NOTHING_SAID, metrics={"invalid_calls": 1.0, **self.metrics()})
        self.lines.append(Utterance(speaker="assistant", text=heard))
        if self.messages >= self.max_messages:
            return self._truncate()
        try:
            said = await self.user.speak(tuple(self.lines))
        except BudgetSpent:
            return self._truncate()
        self.lines.append(said)
        if said.ends:
            reward = float(grade()) if grade is not None else 0.0
            return Done(said.text, reward=reward, metrics=self.metrics(), info=self._hidden_messages())
        if self.messages >= self.max_messages:
            return self._truncate(said.text)
        return Reply(said.text, metrics=self.metrics(), info=self._hidden_messages())

    @property
    def messages(self) -> int:
        """Number of messages of both sides so far, including the user's tool calls."""
        return sum(1 + len(line.calls) for line in self.lines)

    @property
    def told(self) -> list[str]:
        """The texts that the policy has sent to the user."""
        return [line.text for line in self.lines if line.speaker == "assistant"]

    def metrics(self) -> dict[str, float]:
        """Return totals of the dialogue for ``score``, including those of a model that made a request."""
        own = [line for line in self.lines if line.speaker == "user"]
        totals = {"user_messages": float(len(own)), "user_calls": float(sum(len(o.calls) for o in own))}
        if requests := sum(line.requests for line in own):
            totals |= {
                "user_requests": float(requests),
                "user_repeats": float(sum(line.repeats for line in own)),
                "user_tokens_in": float(sum(line.usage.input or 0 for line in own)),
                "user_tokens_out": float(sum(line.usage.output or 0 for line in own)),
                "user_seconds": sum(line.seconds for line in own),
            }
        return totals

    def state(self) -> list[dict[str, Any]]:
        """Return the messages as plain data."""
        return [line.model_dump(mode="json") for line in self.lines]

    def transcript(self) -> str:
        """Return both sides as text, with the user's instructions, thoughts and own tool calls."""
        parts = [f"(instructions: {self.user.instructions})"] if self.user.instructions else []
        for line in self.lines:
            parts += [f"(user thinks: {line.thought})"] if line.thought else []
            for own in line.calls:
                function = own.call.function
                parts.append(f"(user calls {function.name}({function.arguments}): {own.answer})")
            parts.append(f"{line.speaker}: {line.text}")
        return "\n".join(parts)

    def _truncate(self, text: str = "") -> Done:
        return Done(text, truncated=True, metrics=self.metrics(), info=self._hidden_messages())

    def _hidden_messages(self) -> dict[str, Any]:
        """Return the parts of the messages since the last result that the policy does not see."""
        fresh = [line for line in self.lines[self._shown :] if line.speaker == "user"]
        hidden: dict[str, Any] = {"messages": [_hidden_part(line) for line in fresh]}
        if not self._shown and self.user.instructions:
            hidden["instructions"] = self.user.instructions
        self._shown = len(self.lines)
        return {"user": hidden}


def _hidden_part(line: Utterance) -> dict[str, Any]:
    part = line.model_dump(mode="json", exclude={"speaker", "calls"}, exclude_defaults=True)
    calls = [{"call": own.call.function.model_dump(), "answer": own.answer} for own in line.calls]
    return {**part, "text": line.text, **({"calls": calls} if calls else {})}


def visible_text(text: str) -> str:
    """Return a text without its thoughts, which no other participant reads.

    A thought without an end extends to the end of the text. A thought that starts in the prompt extends from
    the start of the text.
    """
    rest = _OPENED_BEFORE.sub("", _CLOSED.sub("", text))
    return _CHANNEL.sub("", rest).strip()
