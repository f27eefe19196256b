"""Policies that do not read the task's texts. A task that rewards them can be solved without reading."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any

import numpy as np

from agentrl_env.client.client import ClientSession
from agentrl_env.client.formatting import message_text
from agentrl_env.client.schema_sampler import CannotSample, sample_call
from agentrl_env.json_schema import compiled_schema
from agentrl_env.testing.context import Policy, Rollout, random_policy
from agentrl_env.types import Message, ToolCall, ToolSpec

UNSKILLED = {
    "nothing": ("empty turns", "reward only what the agent does"),
    "random": ("random calls", "ask for more steps, or for values that are hard to guess"),
    "repeat": ("repetitions of one call", "ask for more than one kind of call"),
    "first": ("calls with the first options", "choose samples in which the first option is wrong"),
    "listing": (
        "the listed options in their order",
        "end the episode at a wrong choice, or list more options",
    ),
    "copy": ("copies of the instruction", "ask in other words than those that solve the task"),
    "habit": (
        "the most frequent moves of the expert on other samples",
        "vary the answers and their places, so that each sample must be read",
    ),
}
"""For each policy, a description of its moves and a remedy for a task that it solves."""

_LIST = re.compile(r'\[([^\[\]]+)\]|"([^"]+)"')
_BULLET = re.compile(r"\s*(?:[-*•]|\d+[.)])\s+([^:]+)")
_ASKED = re.compile(r"^(?:instruction|question|mission|task|goal|your task is)\b:?\s*(.+)", re.I | re.M)
_INTEGER = re.compile(r"-?\d{1,9}")
_MAX_LINE = 40
"""Maximum number of characters of a line without punctuation that counts as an option."""


async def do_nothing(session: ClientSession, rollout: Rollout) -> Message:
    """Return a turn without text and without a call."""
    return Message.assistant("")


def draw_calls(index: int) -> Policy:
    """Return a policy that draws valid calls. If none is found, the turn has no call."""
    draw = random_policy(index)

    async def act(session: ClientSession, rollout: Rollout) -> Message | None:
        for _ in range(10):  # another draw might choose another tool
            try:
                return await draw(session, rollout)
            except CannotSample:
                continue
        return Message.assistant("")

    return act


def repeat_call(index: int) -> Policy:
    """Return a policy that draws one valid call and repeats it in every turn."""
    draw = draw_calls(index)

    async def act(session: ClientSession, rollout: Rollout) -> Message | None:
        return rollout.actions[0] if rollout.turns else await draw(session, rollout)

    return act


async def first_options(session: ClientSession, rollout: Rollout) -> Message:
    """Call the tools in their order, each with the first option of every argument."""
    return _call(session.tools, len(rollout.turns), options_in(_last(rollout)))


async def follow_listing(session: ClientSession, rollout: Rollout) -> Message:
    """Call the first tool with an unrestricted argument, with each untried option of the last listing."""
    options, tried = options_in(_last(rollout)), {text for a in rollout.actions for text in _texts(a)}
    rest = [option for option in options if option not in tried] or options
    free = [tool for tool in session.tools if _takes_any_value(tool)] or session.tools
    enums = [
        value
        for tool in free[:1]
        for part in _required_schemas(tool).values()
        for value in part.get("enum", ())
    ]
    turn = len(rollout.turns)
    return _call(free[:1], 0, [str(enums[turn % len(enums)])] if enums else rest)


async def copy_instruction(session: ClientSession, rollout: Rollout) -> Message:
    """Call the tools with text arguments in their order, with the instruction as every text."""
    tools = [tool for tool in session.tools if _takes_any_value(tool, "string")]
    return _call(tools, len(rollout.turns), [instruction(rollout.opening)])


class Habits:
    """The moves that an expert makes most often, for a policy that does not read.

    A move is a tool with a source for each argument: a value, a position in the listing of the last answer or
    of the opening, an option that the instruction names, the instruction itself, or all of its words.

    Args:
        rollouts: Index of a sample -> the expert's episode.
    """

    def __init__(self, rollouts: Mapping[int, Rollout]) -> None:
        made = Counter(text for rollout in rollouts.values() for text in {*map(_made, rollout.actions)})
        usual = {text for text, count in made.items() if count > 1 and 2 * count >= len(rollouts)}
        self._moves = {index: list(_moves(rollout, usual)) for index, rollout in rollouts.items()}
        self._halves = {index: place % 2 for place, index in enumerate(sorted(rollouts))}

    def policy(self, index: int) -> Policy:
        """Return a policy for a sample, with the habits of the half of the samples that does not contain it.

        If only the sample itself were excluded, its correct move would lose every tie for the most frequent.
        """
        own = self._halves.get(index, 0)
        others = [moves for i, moves in self._moves.items() if self._halves[i] != own]
        after, last = Counter[tuple[Any, ...]](), Counter(moves[-1] for moves in others if moves)
        for moves in others:
            after.update(pairwise((None, *moves)))
        made: list[Any] = [None]

        async def act(session: ClientSession, rollout: Rollout) -> Message:
            usual = [move for (before, move), _ in after.most_common() if before == made[-1]]
            for move in (*usual, *(move for move, _ in last.most_common())):
                if (action := _message(move, rollout)) is not None:
                    made.append(move)
                    return action
            return Message.assistant("")

        return act


def instruction(opening: Sequence[Message]) -> str:
    """Return the sentence of the opening with the instruction, or all its text without lists of options."""
    text = message_text(opening[-1]) if opening else ""
    if stated := _ASKED.search(text):
        return stated[1].strip()
    prose = [line for line in text.splitlines() if not any(_options_of(line))]
    return "\n".join(prose or [text]).strip()


def options_in(text: str) -> list[str]:
    """Return the options that a text lists, in order and each once.

    Options are texts in brackets or quotes, items of a list, cells of a table, texts after a colon, or short
    lines of their own.
    """
    return list(dict.fromkeys(option for line in text.splitlines() for option in _options_of(line)))


def _options_of(line: str) -> Iterator[str]:
    if _ASKED.match(line):
        return
    if marked := _LIST.findall(line):
        for listed, quoted in marked:
            yield from _parts(listed or quoted, ",")
    elif bullet := _BULLET.match(line):
        yield bullet[1].strip(" .")
    elif " | " in line:
        yield from _parts(line, "|")
    elif "," in line.partition(":")[2]:
        yield from _parts(line.partition(":")[2], ",")
    elif 0 < len(line.strip()) <= _MAX_LINE and not re.search(r"[:.?!,]\s*$", line):
        yield line.strip()


def _parts(text: str, separator: str) -> Iterator[str]:
    for part in text.split(separator):
        if option := part.strip(" .").removeprefix("and "):
            yield option


def _last(rollout: Rollout) -> str:
    """Return the text of the last answer, or of the opening before the first turn."""
    return _text(rollout.last.messages if rollout.last is not None else rollout.opening)


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(map(message_text, messages))


def _required_schemas(tool: ToolSpec) -> dict[str, Any]:
    """Return the schemas of a tool's required arguments."""
    parameters = tool.function.parameters
    parts = parameters.get("properties", {})
    return {
        name: dict(parts[name])
        for name in parameters.get("required", ())
        if isinstance(parts.get(name), dict)
    }


def _takes_any_value(tool: ToolSpec, kind: str | None = None) -> bool:
    """Return True if a tool has an argument (of this type, if given) that is not limited to listed values."""
    free = (part for part in _required_schemas(tool).values() if "enum" not in part and "const" not in part)
    return any(kind in (None, part.get("type")) for part in free)


def _call(tools: Sequence[ToolSpec], turn: int, options: Sequence[str]) -> Message:
    """Return a call of the tool of this turn with the first options that fit, or text without tools."""
    if not tools:
        return Message.assistant(options[turn % len(options)] if options else "")
    tool = tools[turn % len(tools)]
    arguments = {name: _first(part, options) for name, part in _required_schemas(tool).items()}
    if compiled_schema(tool.function.parameters).is_valid(arguments):
        return Message.assistant(None, ToolCall.of(tool.function.name, **arguments))
    try:
        return Message.assistant(None, sample_call([tool], np.random.default_rng(0), words=options))
    except CannotSample:
        return Message.assistant("")


def _first(schema: Mapping[str, Any], options: Sequence[str]) -> Any:
    """Return the first option that a schema allows. The caller validates it."""
    allowed = schema.get("enum", ())
    if allowed:
        return next((value for value in allowed if str(value) in options), allowed[0])
    if schema.get("type") in ("integer", "number"):
        numbers = [int(option) for option in options if _INTEGER.fullmatch(option)]
        return numbers[0] if numbers else schema.get("minimum", 1)
    if schema.get("type") == "boolean":
        return True
    return options[0] if options else "x"


def _texts(action: Message) -> Iterator[str]:
    """Yield the arguments of an action as text."""
    for call in action.tool_calls or ():
        yield from map(str, _arguments(call).values())


def _arguments(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call, or none if they are not an object."""
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _made(action: Message) -> str:
    """Return an action as text: its call, or its text if it has no call."""
    calls = action.tool_calls
    return calls[0].function.model_dump_json() if calls else message_text(action)


def _moves(rollout: Rollout, usual: Set[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the moves of an episode, each as a tuple that can be compared with those of other episodes.

    Args:
        rollout: The episode.
        usual: Actions whose values are better predictors than their positions in a listing.
    """
    seen = Rollout(sample=rollout.sample, opening=rollout.opening)
    for turn in rollout.turns:
        calls, source = turn.action.tool_calls, _constant if _made(turn.action) in usual else _source
        if calls:
            arguments = _arguments(calls[0]).items()
            yield (calls[0].function.name, *((name, source(value, seen)) for name, value in arguments))
        else:
            yield ("", ("text", source(message_text(turn.action), seen)))
        seen.turns.append(turn)


def _constant(value: Any, rollout: Rollout) -> tuple[Any, ...]:
    return "value", json.dumps(value, sort_keys=True)


def _source(value: Any, rollout: Rollout) -> tuple[Any, ...]:
    """Return the source of an argument, among the sources that a policy without reading can use."""
    text, asked = str(value), instruction(rollout.opening)
    listed = options_in(_last(rollout))
    if text in listed:
        named = _names(asked, text)
        return ("named" if named else "listed", listed.index(text) * (not named), isinstance(value, int))
    opening = options_in(_text(rollout.opening))
    if text in opening:
        return "opening", opening.index(text), isinstance(value, int)
    words = _words(text)
    if len(words) > 1 and set(words) <= set(_words(asked)):
        return "copy", text == asked
    return _constant(value, rollout)


def _message(move: tuple[Any, ...], rollout: Rollout) -> Message | None:
    """Return the message of a move in this episode, or None if it needs an option that is not listed."""
    name, *sources = move
    values = {argument: _value(source, rollout) for argument, source in sources}
    if None in values.values():
        return None
    if name:
        return Message.assistant(None, ToolCall.of(name, **values))
    return Message.assistant(str(values["text"]))


def _value(source: tuple[Any, ...], rollout: Rollout) -> Any:
    kind, *place = source
    if kind == "value":
        return json.loads(place[0])
    asked = instruction(rollout.opening)
    if kind == "copy":
        return asked if place[0] else " ".join(_words(asked))
    options = options_in(_text(rollout.opening) if kind == "opening" else _last(rollout))
    if kind == "named":
        tried = {text for action in rollout.actions for text in _texts(action)}
        options = [option for option in options if _names(asked, option) and option not in tried]
    number, is_integer = place
    option = options[number] if number < len(options) else None
    if option is None or not is_integer:
        return option
    return int(option) if _INTEGER.fullmatch(option) else None


def _names(asked: str, option: str) -> bool:
    """Return True if the instruction contains the option as words."""
    return bool(re.search(rf"(?<!\w){re.escape(option)}(?!\w)", asked, re.IGNORECASE))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())
