"""A terminal playground: read tool calls from the keyboard or a pipe and print the answers."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl_env.client.client import EnvClient
from agentrl_env.client.formatting import format_call, message_text
from agentrl_env.client.sync import SyncClientSession, SyncEnvClient
from agentrl_env.errors import AgentRLError
from agentrl_env.types import (
    TRUNCATED,
    FunctionCall,
    FunctionSpec,
    Message,
    SessionStatus,
    StepResult,
    TaskInfo,
    ToolCall,
    ToolSpec,
)
from agentrl_env.wire import choose_task

HELP = """\
Call a tool:  name arg=value ...   or   name value ...   or   name {"arg": value}
Values:       7, true, word, "several words", [1, 2], {"field": value}
Send text:    say TEXT
Commands:     /expert shows the expert's next move, /do plays it; /tools  /help  /quit (or Ctrl-D)"""
MAX_DEPTH = 4
"""Maximum number of nested levels of fields that are shown."""
_STYLES = {"system": "magenta", "user": "cyan", "tool": "green", "assistant": "yellow"}


class UnreadableLine(ValueError):
    """The line is neither a call nor a command. The message says what to type instead."""


def play(
    client: EnvClient,
    lines: Callable[[str], str | None],
    console: Console,
    *,
    task: str | None = None,
    split: str = "train",
    index: str | None = None,
    seed: int | None = None,
    expert: bool = False,
) -> StepResult | None:
    """Play one episode and return its last result, or None if the player left before its end.

    ``client`` must be unused and is closed at the end. ``lines`` takes a prompt and returns the next line, or
    None at the end of input. Raises AgentRLError if the session could not be opened or was lost, or if
    ``expert`` is True and the task offers no expert.
    """
    with SyncEnvClient(client) as sync:
        tasks = sync.tasks()
        info = tasks[choose_task(task, tasks)]
        if expert and "expert" not in info.capabilities:
            raise AgentRLError(
                f"task {info.name!r} offers no expert: define expert(rng), and serve it with --oracle"
            )
        chosen = None if index is None else info.parse_index(split, index)
        session = sync.open(info.name, split=split, index=chosen, seed=seed)
        _print_task(console, info, session)
        result = _play_turns(session, info, lines, console)
        session.close()
        return result


def parse_line(line: str, tools: Sequence[ToolSpec], call_id: str = "call_0") -> Message:
    """Parse a line as an assistant message.

    Accepted forms: ``guess n=7``, ``guess 7``, ``guess {"n": 7}``, ``guess(n=7)``, ``say some text``,
    ``{"name": "guess", "arguments": {"n": 7}}``. Values can be JSON: ``refund line={"order_id": 1}``.
    Without tools, every line is text.

    Raises UnreadableLine if the line has none of these forms.
    """
    line = line.strip()
    if line.startswith("say ") or not tools:
        return Message.assistant(line.removeprefix("say ").strip())
    if line.startswith("{"):
        return _from_json(line, call_id)
    found = re.match(r"([\w-]+)\s*(.*)$", line, flags=re.DOTALL)
    name, rest = found.groups() if found else (line, "")
    functions = {tool.function.name: tool.function for tool in tools}
    if name not in functions:
        raise UnreadableLine(
            f"There is no tool {name!r}; tools: {', '.join(functions)}. To send plain text, start with 'say'."
        )
    whole = rest.startswith("{") and _json_end(rest, 0) in (None, len(rest))
    arguments = rest if whole else json.dumps(_arguments(rest, functions[name]))
    call = ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))
    return Message.assistant(None, call)


def signature(function: FunctionSpec) -> str:
    """Return a tool as ``guess(n: integer)``, with ``?`` after optional parameters and fields."""
    return f"{function.name}({_fields(function.parameters, function.parameters, 0)})"


def _play_turns(
    session: SyncClientSession, info: TaskInfo, lines: Callable[[str], str | None], console: Console
) -> StepResult | None:
    total = 0.0
    while True:
        line = lines(f"[{session.turn + 1}/{info.max_turns}] > ")
        if line is None or line.strip() == "/quit":
            console.print(f"Left after {_count_turns(session.turn)}.", highlight=False)
            return None
        message = _read_message(session, line.strip(), console)
        if message is None:
            continue
        result = session.step(message)
        total += result.reward
        _print_messages(console, result.messages)
        if result.reward:
            console.print(f"reward {result.reward:+g}", style="bold", highlight=False)
        if result.final:
            _print_end(console, result, total)
            return result


def _read_message(session: SyncClientSession, line: str, console: Console) -> Message | None:
    """Return the message that a line describes, or execute the command in the line and return None."""
    try:
        if line == "/help":
            console.print(HELP, highlight=False, markup=False)
        elif line == "/tools":
            _print_tools(console, session.tools)
        elif line in ("/expert", "/do"):
            message = session.expert()
            _print_messages(console, [message])
            return message if line == "/do" else None
        elif line.startswith("/"):
            raise UnreadableLine(f"There is no command {line.split()[0]!r}; try /help.")
        elif line:
            return parse_line(line, session.tools, call_id=f"call_{session.turn}")
    except (UnreadableLine, AgentRLError) as error:
        console.print(str(error), style="red", highlight=False, markup=False)
    return None


def _from_json(line: str, call_id: str) -> Message:
    try:
        data = json.loads(line)
        if data.get("role") == "assistant":
            return Message.model_validate(data)
        arguments = data.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        call = ToolCall(id=call_id, function=FunctionCall(name=data["name"], arguments=text))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UnreadableLine(
            'Not a tool call; write {"name": "tool", "arguments": {"key": "value"}}.'
        ) from None
    return Message.assistant(None, call)


def _arguments(text: str, function: FunctionSpec) -> dict[str, Any]:
    """Parse ``a=1 b=two``, or values in the order of the parameters. A single string needs no quotes."""
    schemas = function.parameters.get("properties", {})
    if len(schemas) == 1 and text:
        name, schema = next(iter(schemas.items()))
        if schema.get("type") == "string" and not text.startswith((f"{name}=", "(", '"', "'")):
            return {name: text}
    free = [name for name in schemas if not re.search(rf"(?<![\w-]){re.escape(name)}=", text)]
    arguments: dict[str, Any] = {}
    for word in _split(text):
        name, equals, value = word.partition("=")
        if not (equals and re.fullmatch(r"\w+", name)):
            if not free:
                raise UnreadableLine(f"Too many values; write {signature(function)}.")
            name, value = free.pop(0), word
        arguments[name] = _value(value, schemas.get(name, {}))
    return arguments


def _split(text: str) -> Iterable[str]:
    whitespace = " \t\n"
    if text.startswith("(") and text.endswith(")"):
        text, whitespace = text[1:-1], ", \t\n"
    lexer = shlex.shlex(_quote_json(text), posix=True)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = whitespace, True, ""
    try:
        return list(lexer)
    except ValueError as error:
        raise UnreadableLine(f"The quotes do not match ({error}).") from None


def _quote_json(text: str) -> str:
    """Quote the JSON objects and arrays at the start of values, so that each is one word."""
    words, at, quote = [], 0, ""
    while at < len(text):
        char = text[at]
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "{[" and (at == 0 or text[at - 1] in " \t\n,=") and (end := _json_end(text, at)):
            words.append(shlex.quote(text[at:end]))
            at = end
            continue
        words.append(char)
        at += 1
    return "".join(words)


def _json_end(text: str, begin: int) -> int | None:
    """Return the end of the JSON value at a position, or None if there is no JSON value."""
    try:
        return json.JSONDecoder().raw_decode(text, begin)[1]
    except (ValueError, RecursionError):
        return None


def _value(text: str, schema: dict[str, Any]) -> Any:
    """Parse a value as JSON, unless it is not JSON or the schema requires a string."""
    if schema.get("type") == "string" or "enum" in schema:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _fields(schema: dict[str, Any], root: dict[str, Any], depth: int) -> str:
    """Return the properties of an object schema with their types."""
    required = schema.get("required", ())
    fields = (
        f"{name}{'' if name in required else '?'}: {_type_name(part, root, depth)}"
        for name, part in schema.get("properties", {}).items()
    )
    return ", ".join(fields)


def _type_name(schema: Any, root: dict[str, Any], depth: int) -> str:
    """Return the type of a schema with the fields of objects. References in ``root`` are resolved."""
    if not isinstance(schema, dict):
        return "any"
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(_type_name(option, root, depth) for option in schema["anyOf"])
    if "$ref" in schema:
        name = str(schema["$ref"]).rsplit("/", 1)[-1]
        found = root.get("$defs", {}).get(name)
        return name if found is None or depth == MAX_DEPTH else _type_name(found, root, depth)
    if schema.get("properties") and depth < MAX_DEPTH:
        return f"{{{_fields(schema, root, depth + 1)}}}"
    if schema.get("type") == "array" and "items" in schema and depth < MAX_DEPTH:
        return f"[{_type_name(schema['items'], root, depth + 1)}, ...]"
    return str(schema.get("type", "any"))


def _print_task(console: Console, info: TaskInfo, session: SyncClientSession) -> None:
    sample = session.sample
    title = f"{info.name}, {sample.split}/{sample.index}, seed {sample.seed}"
    console.rule(Text(title), align="left")
    if info.description:
        console.print(info.description, style="italic", highlight=False, markup=False)
    _print_tools(console, session.tools)
    console.print("/help shows how to write calls.\n", style="dim", highlight=False)
    _print_messages(console, session.messages)


def _print_tools(console: Console, tools: Sequence[ToolSpec]) -> None:
    for tool in tools:
        summary = tool.function.description.partition("\n")[0]
        line = Text("  ").append(signature(tool.function), style="bold")
        console.print(line.append(f"  {summary}", style="dim"), soft_wrap=True)


def _print_messages(console: Console, messages: Iterable[Message]) -> None:
    for message in messages:
        text = message_text(message) if message.content else ""
        calls = " ".join(format_call(call) for call in message.tool_calls or ())
        line = Text(f"{message.role}: ", style=f"bold {_STYLES.get(message.role, 'white')}")
        console.print(line.append(f"{text} {calls}".strip(), style="not bold default"))


def _print_end(console: Console, result: StepResult, total: float) -> None:
    if result.status is not SessionStatus.COMPLETED and result.status not in TRUNCATED:
        error = result.info.get("error")
        reason = error.get("message") if isinstance(error, dict) else "no reason given"
        console.print(f"The environment failed: {reason}", style="bold red", markup=False)
        ending = f"{result.status} after {_count_turns(result.seq)}: no result, which is not a reward of 0"
        console.print(ending, style="bold", highlight=False)
        return
    outcome = "success" if result.metrics.get("success") else "no success"
    hidden = ("success", "invalid_calls")
    metrics = "".join(f", {name} {value:g}" for name, value in result.metrics.items() if name not in hidden)
    ending = f"{result.status} after {_count_turns(result.seq)}: {outcome}, reward {total:g}{metrics}"
    console.print(ending, style="bold", highlight=False)


def _count_turns(turns: int) -> str:
    return "1 turn" if turns == 1 else f"{turns} turns"
