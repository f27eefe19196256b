"""A user that a language model plays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl_env.client.formatting import message_text
from agentrl_env.errors import DefinitionError
from agentrl_env.evaluation.chat_model import Completion, ModelFailed, Usage
from agentrl_env.tools import toolset
from agentrl_env.types import Message
from agentrl_env.users.dialogue import (
    BudgetSpent,
    OwnTools,
    UserCall,
    UserFailed,
    Utterance,
    visible_text,
)
from agentrl_env.users.endpoint import Endpoint

STOP = "[END]"
MAX_CALLS = 10
OPENING = "(The assistant is ready. Write your first message to it.)"
RULES = """\
You play a user who talks to an assistant. The messages that you receive are the assistant's. Write only \
what the user would say, in the first person, one short message at a time. Do not write the assistant's \
part, and do not describe these instructions.
- Say what the instructions below ask for. Do not invent facts. If you are asked for something that they \
do not contain, say that you do not know.
- Do not tell everything at once. Give a detail when the assistant needs it.
- When your request is settled, or the assistant has made clear that it cannot be, write {stop} at the end \
of your last message. Nothing else ends the conversation."""


class ModelUser:
    """A user that a model plays, behind an OpenAI-compatible endpoint.

    The model sees its instructions, its own messages and tool calls, and the policy's text without thoughts.
    It ends the dialogue with the stop word in its own text. The stop word in a thought, or in the policy's
    text, has no effect.

    Args:
        instructions: The person, the request and the facts that the user knows.
        endpoint: The endpoint of the model.
        tools: An object with ``@tool`` methods that the user can call, such as its phone. The policy sees
            neither the calls nor their answers. If the calls change the object, pass a function that creates
            it. The user calls the function for each message and repeats the calls of the dialogue, so that
            forks and restored episodes have their own object in the right state.
        seed: Seed of the requests. Pass a seed of the episode, so that dialogues are reproducible even with a
            temperature above 0.
        max_calls: Maximum number of tool calls before a message. More calls fail the episode.
        max_tokens: Number of tokens of the model after which the episode is truncated. None sets no limit.
        stop: The word, or words, that end the dialogue.
        rules: General rules before the instructions, with ``{stop}`` for the first stop word.
    """

    def __init__(
        self,
        instructions: str,
        endpoint: Endpoint,
        *,
        tools: object | Callable[[], object] | None = None,
        seed: int = 0,
        max_calls: int = MAX_CALLS,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = STOP,
        rules: str = RULES,
    ) -> None:
        self.stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not self.stops or not all(word.strip() for word in self.stops):
            raise DefinitionError("stop is empty, so that every message would end the dialogue; give a word")
        self.instructions, self.endpoint, self.seed = instructions, endpoint, seed
        self._make_tools: Callable[[], object] | None = None
        kind: type = type(tools)
        if callable(tools) and not toolset(kind).tools:
            self._make_tools, tools = tools, tools()
        self.tools = OwnTools(tools) if tools is not None else None
        self.max_calls, self.max_tokens = max_calls, max_tokens
        self._system = f"{rules.replace('{stop}', self.stops[0])}\n\n{instructions}"

    async def speak(self, dialogue: Sequence[Utterance]) -> Utterance:
        """Return the model's next message, after its tool calls.

        Raises UserFailed if the endpoint does not answer or the model writes no message.
        """
        written = sum(line.usage.output or 0 for line in dialogue)
        if self.max_tokens is not None and written >= self.max_tokens:
            raise BudgetSpent(f"the user has written {written} tokens, of at most {self.max_tokens}")
        messages, calls = self._messages(dialogue), list[UserCall]()
        answers: list[Completion] = []
        tools = self._tools_after(dialogue)
        specs = tools.specs if tools is not None else ()
        while True:
            try:
                answers.append(await self.endpoint.complete(messages, specs, seed=self.seed))
            except ModelFailed as error:
                raise UserFailed(f"the model that plays the user failed: {error}") from error
            asked = answers[-1].message.tool_calls or ()
            if not asked or tools is None:
                return self._said(answers, calls)
            if len(calls) + len(asked) > self.max_calls:
                raise UserFailed(f"the user made more than {self.max_calls} tool calls without a message")
            made = [await tools.call(call) for call in asked]
            calls += made
            messages += [Message(role="assistant", content=None, tool_calls=tuple(asked))]
            messages += [_tool_answer(own) for own in made]

    def _tools_after(self, dialogue: Sequence[Utterance]) -> OwnTools | None:
        if self._make_tools is None:
            return self.tools
        tools = OwnTools(self._make_tools())
        tools.replay(dialogue)
        return tools

    def _said(self, answers: Sequence[Completion], calls: Sequence[UserCall]) -> Utterance:
        whole = message_text(answers[-1].message)
        text = visible_text(whole)
        said = self._without_stops(text)
        ends, text = said != text, said.strip()
        if not text and not ends:
            raise UserFailed(f"the model that plays the user wrote no message, but {whole[:200]!r}")
        thoughts = [answer.thought for answer in answers if answer.thought]
        thoughts += [whole] if visible_text(whole) != whole.strip() else []
        return Utterance(
            text=text,
            ends=ends,
            calls=tuple(calls),
            thought="\n".join(thoughts) or None,
            usage=_total([answer.usage for answer in answers]),
            seconds=sum(answer.seconds for answer in answers),
            requests=len(answers),
            repeats=sum(answer.repeats for answer in answers),
        )

    def _without_stops(self, text: str) -> str:
        for word in self.stops:
            text = text.replace(word, "")
        return text

    def _messages(self, dialogue: Sequence[Utterance]) -> list[Message]:
        """Return the dialogue from the user's side: the model is the assistant, the policy is the user."""
        messages = [Message(role="system", content=self._system)]
        if not dialogue or dialogue[0].speaker == "user":
            messages.append(Message(role="user", content=OPENING))
        for line in dialogue:
            if line.speaker == "assistant":
                messages.append(Message(role="user", content=self._without_stops(line.text)))
                continue
            for own in line.calls:
                messages += [Message(role="assistant", tool_calls=(own.call,)), _tool_answer(own)]
            messages.append(Message(role="assistant", content=line.text))
        return messages


def _tool_answer(own: UserCall) -> Message:
    return Message(role="tool", tool_call_id=own.call.id, content=own.answer)


def _total(usages: Sequence[Usage]) -> Usage:
    """Return the sums of the endpoint's token counts."""
    sums: dict[str, int | None] = {}
    for name in Usage.model_fields:
        counts = [count for usage in usages if (count := getattr(usage, name)) is not None]
        sums[name] = sum(counts) if counts else None
    return Usage(**sums)
