"""Records the calls of an agent program as the segments of one rollout. Pure: no clocks, no tasks.

A chat API is stateless: each call contains the whole conversation as messages. The recorder finds the
recorded conversation that a call continues, and appends to its tokens. Sampled tokens are never rendered or
tokenized again. Depending on its messages, a call

- *continues* a conversation whose messages it repeats up to an answer: its prompt is the recorded tokens and
  ``ChatFormat.reply`` of the messages after that answer.
- *forks* a conversation that has continued since, or waits for an answer: the same tokens in a new segment.
- *rewrites* a history: it shares the first message, or an answer, and no recorded prefix up to an answer.
  The messages are rendered as the opening of a new segment.
- *opens* the conversation of a sub-agent: it shares neither.
- *repeats* a call whose answer the program never received, for example after a timeout: the same answer.

Messages are equal if they have the same role and the same text without surrounding blanks. Assistant messages
are equal if they have the same text, ignoring thoughts and all blanks, and calls with the same names and
argument values. Ids of calls are not compared. "developer" is another name for "system".
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from uuid import uuid4

from agentrl_env.types import Message, ToolSpec
from agentrl_train.chat import ChatFormat
from agentrl_train.types import Completion, Segment, Turn

Key = tuple[Hashable, ...]
"""Key of a message. Two messages are equal if their keys are."""


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """One call of the model, which becomes a turn when it is answered."""

    number: int
    """Number of the call in its session, from 1."""
    uid: str = field(default_factory=lambda: uuid4().hex)
    """Part of the ids that clients see."""
    conversation: Conversation
    new: Sequence[Message]
    """Messages since the previous answer, or the opening."""
    prompt_ids: Sequence[int]
    """Tokens that the turn adds before its completion."""
    context: Sequence[int]
    """The whole prompt."""
    request: Hashable
    """Identity of the request. Equal for two calls with the same request."""
    completion: Completion | None = None
    message: Message = field(default_factory=Message.assistant)
    thought: str | None = None
    invalid_calls: int = 0
    tolerant: bool = False
    reward: float = 0.0
    asked: float = 0.0
    sampled: float = 0.0
    cut: bool = False
    """True if the token limit ended the answer."""
    end: int = 0
    """Messages of the conversation up to and including the answer."""
    text_only: bool = False
    """True if calls were forbidden, so JSON in the text is never read as a call."""
    lost: bool = False
    """True if the program stopped waiting for the answer."""

    @property
    def settled(self) -> bool:
        """Return True if the program has received the answer."""
        return self.completion is not None and not self.lost

    @property
    def tokens(self) -> list[int]:
        """Return the prompt and the completion."""
        return [*self.context, *(self.completion.token_ids if self.completion else ())]


@dataclass(slots=True, eq=False, kw_only=True)
class Conversation:
    """A context that is only ever extended: a segment of the rollout."""

    number: int
    """Unique in its session."""
    parent: Conversation | None
    after: Call | None
    reason: Literal["root", "rewritten", "sub_agent"]
    agent: str
    tools: Sequence[ToolSpec]
    keys: list[Key]
    """Keys of its messages, including the messages of a call in progress."""
    opening: Sequence[Message]
    calls: list[Call] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Return True if the program is waiting for a call in progress."""
        return bool(self.calls) and self.calls[-1].completion is None and not self.calls[-1].lost

    @property
    def settled(self) -> list[Call]:
        """Return the calls that were answered."""
        return [call for call in self.calls if call.settled]


class Recorder:
    """Records the calls of one rollout.

    Args:
        chat: chat format of the policy.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._conversations: list[Conversation] = []
        self._answered: list[Call] = []
        self._count = 0
        self._numbers = itertools.count()
        self._first: Sequence[Message] = ()

    def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        options: Hashable = None,
        retried: bool = False,
        agent: str | None = None,
        elapsed: float = 0.0,
    ) -> tuple[Call, bool]:
        """Return the call for a request, and True if it repeats an earlier call and gets its answer.

        Args:
            messages: the whole conversation; content is text.
            tools: the tools of the request.
            options: other values that distinguish two requests.
            retried: True if the client reports that it repeats a request.
            agent: name of the calling agent.
            elapsed: seconds since the start of the rollout.

        Raises:
            Exception: the template refuses the messages, mostly with one of ``chat.REFUSALS``.
        """
        keys = [self._key(message) for message in messages]
        shown = tuple(tool.model_dump_json() for tool in tools)
        request = (tuple(keys), shown, options, agent)
        for last in [one.calls[-1] for one in self._conversations if one.calls]:
            if last.request == request and (last.lost or retried):
                last.lost = False
                return last, True
        before = self._last_answer(keys, tools, agent)
        if before is None:
            conversation, new = self._open_conversation(messages, keys, tools, agent), messages
            prompt = context = self._chat.opening(messages, tools)
        else:
            new = _with_ids(messages, before)[before.end :]
            prompt = self._reply(new, before)
            context = [*before.tokens, *prompt]
            conversation = before.conversation
            if conversation.settled[-1] is before and not conversation.busy:
                del conversation.calls[conversation.calls.index(before) + 1 :]  # an answer that was lost
                conversation.keys = keys
            else:
                conversation = self._fork(before, messages, keys)
                prompt = context
        if conversation not in self._conversations:
            self._conversations.append(conversation)
        self._first = self._first or tuple(messages)
        self._count += 1
        call = Call(
            number=self._count,
            conversation=conversation,
            new=new,
            prompt_ids=prompt,
            context=context,
            request=request,
            asked=elapsed,
        )
        conversation.calls.append(call)
        return call, False

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Return the number of tokens before the answer to these messages.

        Raises:
            Exception: the template refuses the messages, mostly with one of ``chat.REFUSALS``.
        """
        before = self._last_answer([self._key(message) for message in messages], tools, None)
        if before is None:
            return len(self._chat.opening(messages, tools))
        return len(before.tokens) + len(self._reply(_with_ids(messages, before)[before.end :], before))

    def finish(
        self, call: Call, completion: Completion, *, stop: Sequence[str] = (), elapsed: float = 0.0
    ) -> None:
        """Record the completion of a call, cut before the first of the texts in ``stop``.

        ``elapsed`` is in seconds since the start of the rollout.
        """
        if call not in call.conversation.calls:
            return  # the call was lost, and the conversation continued without it
        call.sampled = elapsed
        call.cut = completion.finish_reason == "length"
        completion, text = self._cut(completion, stop)
        call.cut = call.cut and text is None
        tools = () if call.text_only else call.conversation.tools
        if text is None:
            ids = completion.token_ids
            parsed = self._chat.parse(ids, turn=call.number, tools=tools, prompt=call.context)
        else:
            in_thought = self._chat.in_thought(call.context)
            parsed = self._chat.parse_text(text, turn=call.number, tools=tools, in_thought=in_thought)
        names = {tool.function.name for tool in call.conversation.tools}
        call.invalid_calls = sum(one.function.name not in names for one in parsed.message.tool_calls or ())
        call.completion, call.message, call.thought = completion, _readable(parsed.message), parsed.thought
        call.tolerant = parsed.tolerant
        conversation = call.conversation
        conversation.keys = [*conversation.keys, self._key(call.message)]
        call.end = len(conversation.keys)
        self._answered.append(call)

    def fail(self, call: Call) -> None:
        """Remove a call that has no answer."""
        conversation = call.conversation
        if call in conversation.calls:
            conversation.calls.remove(call)
        if not conversation.calls and conversation in self._conversations:
            self._conversations.remove(conversation)

    def reward(self, value: float) -> None:
        """Add to the reward of the newest turn.

        Raises:
            ValueError: there is no turn yet.
        """
        turns = [call for call in self._answered if call.settled]
        if not turns:
            raise ValueError("a reward came before the first answer of the model")
        turns[-1].reward += value

    @property
    def opening(self) -> Sequence[Message]:
        """Return the messages before the first turn, or of the first call if no call was answered."""
        kept = [one for one in self._conversations if one.settled]
        return kept[0].opening if kept else self._first

    def rollout(self) -> tuple[list[Turn], list[Segment]]:
        """Return the turns in sampling order, and their segments."""
        calls = [call for call in self._answered if call.settled and call in call.conversation.calls]
        kept = [conversation for conversation in self._conversations if conversation.settled]
        segments = [self._segment(one, number, kept, calls) for number, one in enumerate(kept)]
        turns = []
        for call in calls:
            assert call.completion is not None
            later = call.conversation.calls[call.conversation.calls.index(call) + 1 :]
            turns.append(
                Turn(
                    prompt_ids=call.prompt_ids,
                    completion=call.completion,
                    message=call.message,
                    reply=later[0].new if later else (),
                    reward=call.reward,
                    invalid_calls=call.invalid_calls,
                    tolerant=call.tolerant,
                    thought=call.thought,
                    segment=kept.index(call.conversation),
                    times=(call.asked, call.sampled, *(one.asked for one in later[:1])),
                )
            )
        return turns, segments or [Segment(parent=None, after_turn=None, reason="root")]

    def _segment(
        self, one: Conversation, number: int, kept: Sequence[Conversation], calls: Sequence[Call]
    ) -> Segment:
        if number == 0:
            return Segment(parent=None, after_turn=None, reason="root", agent=one.agent)
        parent = one.parent if one.parent is not None and one.parent in kept else kept[0]
        # Conversations can start concurrently. Then the first turn of the parent stands for its opening.
        after = one.after if one.after and one.after in parent.settled else parent.settled[0]
        return Segment(
            parent=kept.index(parent),
            after_turn=calls.index(after),
            reason="rewritten" if one.reason == "root" else one.reason,
            agent=one.agent,
            opening=one.opening,
        )

    def _last_answer(self, keys: Sequence[Key], tools: Sequence[ToolSpec], agent: str | None) -> Call | None:
        """Return the last answer in the longest recorded beginning of these messages, if there is one."""
        found: Call | None = None
        for conversation in self._conversations:
            if conversation.tools != tuple(tools) or agent not in (None, conversation.agent):
                continue
            shared = _shared_length(conversation.keys, keys)
            for call in conversation.settled:
                if call.end <= shared and (found is None or call.end > found.end):
                    found = call
        return found

    def _open_conversation(
        self,
        messages: Sequence[Message],
        keys: list[Key],
        tools: Sequence[ToolSpec],
        agent: str | None,
    ) -> Conversation:
        """Return a new conversation that begins with these messages."""
        number = next(self._numbers)
        new = Conversation(
            number=number,
            parent=None,
            after=None,
            reason="root",
            agent=agent or "main",
            tools=tuple(tools),
            keys=keys,
            opening=tuple(messages),
        )
        if not self._conversations:
            return new
        answers = {call.conversation.keys[call.end - 1] for call in self._answered if call.settled}
        related = [
            one for one in self._conversations if one.keys[0] == keys[0] and agent in (None, one.agent)
        ]
        rewritten = bool(related) or bool(agent is None and answers & set(keys))
        newest = next((call.conversation for call in reversed(self._answered) if call.settled), None)
        new.parent = newest or self._conversations[0]
        if related and newest not in related:
            new.parent = max(related, key=lambda one: _shared_length(one.keys, keys))
        new.reason = "rewritten" if rewritten else "sub_agent"
        new.after = next(reversed(new.parent.settled), None)
        new.agent = agent or (new.parent.agent if rewritten else f"agent_{number}")
        return new

    def _fork(self, before: Call, messages: Sequence[Message], keys: list[Key]) -> Conversation:
        """Return a new conversation that continues another one after an earlier answer."""
        return replace(
            before.conversation,
            number=next(self._numbers),
            parent=before.conversation,
            after=before,
            reason="rewritten",
            keys=keys,
            opening=tuple(messages),
            calls=[],
        )

    def _reply(self, new: Sequence[Message], before: Call) -> list[int]:
        assert before.completion is not None
        ids, stopped = before.completion.token_ids, before.completion.finish_reason == "stop"
        tools = before.conversation.tools
        return self._chat.reply(new, after=before.message, tools=tools, stop=ids[-1] if stopped else None)

    def _cut(self, completion: Completion, stop: Sequence[str]) -> tuple[Completion, str | None]:
        """Return the tokens up to a stop text and the text before it, or None if there is no stop text.

        The shorter completion is equal to one of an engine that stops there, with the same log-probabilities.
        The stop token is not searched, because it ends the answer without a cut.
        """
        stopped = completion.finish_reason == "stop"
        ids = list(completion.token_ids[:-1] if stopped else completion.token_ids)
        if not any(text in self._chat.text(ids) for text in stop):
            return completion, None
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            found = any(text in self._chat.text(ids[:middle]) for text in stop)
            low, high = (low, middle) if found else (middle + 1, high)
        whole = self._chat.text(ids[:low])
        cut = replace(
            completion,
            token_ids=ids[:low],
            logprobs=list(completion.logprobs[:low]),
            versions=list(completion.versions[:low]),
            finish_reason="length",
            allowed=completion.allowed.first(low) if completion.allowed else None,
        )
        return cut, whole[: min(at for text in stop if (at := whole.find(text)) >= 0)]

    def _key(self, message: Message) -> Key:
        text = message.content if isinstance(message.content, str) else ""
        role = "system" if message.role == "developer" else message.role
        if role != "assistant":
            return role, text.strip()
        parsed = self._chat.parser.parse(text)
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        calls = calls or [(call.name, call.arguments) for call in parsed.calls]
        return role, " ".join((parsed.content or "").split()), *((n, _value(a)) for n, a in calls)


def _value(arguments: str) -> str:
    """Return the canonical text of arguments, which is the same for equal values.

    All numbers are floats, because clients in JavaScript return 1.0 as 1 and round large integers.
    """
    try:
        return json.dumps(json.loads(arguments, parse_int=float), sort_keys=True)
    except (ValueError, RecursionError):
        return " ".join(arguments.split())


def _readable(message: Message) -> Message:
    """Return an answer with unreadable calls as text, as clients of the API expect."""
    calls = message.tool_calls or ()
    if all(call.function.name for call in calls):
        return message
    texts = [message.content, *(call.function.arguments for call in calls if not call.function.name)]
    text = "\n".join(str(one) for one in texts if one)
    return Message.assistant(text, *(call for call in calls if call.function.name))


def _with_ids(messages: Sequence[Message], before: Call) -> list[Message]:
    """Return the messages with the recorded ids of calls, even if the client has changed the ids."""
    given, recorded = messages[before.end - 1].tool_calls or (), before.message.tool_calls or ()
    ids = {one.id: other.id for one, other in zip(given, recorded, strict=False)}
    return [
        message.model_copy(update={"tool_call_id": ids.get(message.tool_call_id, message.tool_call_id)})
        if message.tool_call_id
        else message
        for message in messages
    ]


def _shared_length(one: Sequence[Key], other: Sequence[Key]) -> int:
    """Return the length of the common beginning of two sequences."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
