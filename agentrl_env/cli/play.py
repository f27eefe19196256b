"""Be the agent in a terminal: read tool calls from a person (or a pipe), show what comes back."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.client.formatting import format_call, message_text
from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.errors import AgentRLError, UnknownTask
from agentrl_env.types import (
    FunctionCall,
    FunctionSpec,
    Message,
    SessionStatus,
    StepResult,
    TaskInfo,
    ToolCall,
    ToolSpec,
)

HELP = """\
Call a tool:    name arg=value ...   or   name value ...   or   name {"arg": value}
Say something:  say TEXT
Commands:       /expert shows the expert's next move, /do makes it; /tools  /help  /quit (or Ctrl-D)"""
_STYLES = {"system": "magenta", "user": "cyan", "tool": "green", "assistant": "yellow"}


class UnreadableLine(ValueError):
    """A line is neither a call nor a command; the text says what to type instead."""


def play(
    client: EnvClient,
    lines: Callable[[str], str | None],
    console: Console,
    *,
    task: str | None = None,
    split: str = "train",
    index: int | None = None,
    seed: int | None = None,
) -> StepResult | None:
    """Play one episode and return its last result; None where it was left before its end.

    Args:
        client: where the task is.
        lines: given a prompt, returns the next line of input, None at its end.
        console: where everything is shown.
        task: which task; not needed where there is one only.
        split: of the dataset.
        index: which sample; None picks one.
        seed: of the episode.

    Raises:
        AgentRLError: the session could not be opened or was lost.
    """
    loop = LoopThread("agentrl-env-play")
    try:
        info = _choose(loop.run(client.tasks()), task)
        session = loop.run(client.open(info.name, split=split, index=index, seed=seed))
        _show_task(console, info, session)
        result = _turns(loop, session, info, lines, console)
        loop.run(session.close())
        return result
    finally:
        loop.run(client.aclose())
        loop.stop()


def parse_line(line: str, tools: Sequence[ToolSpec], call_id: str = "call_0") -> Message:
    """Read a line as an assistant message. Raises UnreadableLine.

    Known forms: ``guess n=7``, ``guess 7``, ``guess {"n": 7}``, ``guess(n=7)``, ``say some text``,
    ``{"name": "guess", "arguments": {"n": 7}}``; without tools every line is text.
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
            f"There is no tool {name!r}; tools: {', '.join(functions)}. To send plain text, begin with 'say'."
        )
    arguments = rest if rest.startswith("{") else json.dumps(_arguments(rest, functions[name]))
    call = ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))
    return Message.assistant(None, call)


def signature(function: FunctionSpec) -> str:
    """Return a tool as ``guess(n: integer)``; a parameter that may be left out has a ``?``."""
    required = function.parameters.get("required", ())
    parameters = (
        f"{name}{'' if name in required else '?'}: {_kind(schema)}"
        for name, schema in function.parameters.get("properties", {}).items()
    )
    return f"{function.name}({', '.join(parameters)})"


def _choose(tasks: dict[str, TaskInfo], task: str | None) -> TaskInfo:
    if task is None and len(tasks) == 1:
        return next(iter(tasks.values()))
    if task is None or task not in tasks:
        what = "Several tasks are served" if task is None else f"No task {task!r} is served"
        raise UnknownTask(f"{what}; choose with --task: {', '.join(tasks)}.")
    return tasks[task]


def _turns(
    loop: LoopThread,
    session: ClientSession,
    info: TaskInfo,
    lines: Callable[[str], str | None],
    console: Console,
) -> StepResult | None:
    total = 0.0
    while True:
        line = lines(f"[{session.turn + 1}/{info.max_turns}] > ")
        if line is None or line.strip() == "/quit":
            console.print(f"Left after {_turn_count(session.turn)}.", highlight=False)
            return None
        message = _read(loop, session, line, console)
        if message is None:
            continue
        result = loop.run(session.step(message))
        total += result.reward
        _show_messages(console, result.messages)
        if result.reward:
            console.print(f"reward {result.reward:+g}", style="bold", highlight=False)
        if result.final:
            _show_end(console, result, total)
            return result


def _read(loop: LoopThread, session: ClientSession, line: str, console: Console) -> Message | None:
    """Turn a line into the next message; carry out what is a command instead."""
    line = line.strip()
    try:
        if line == "/help":
            console.print(HELP, highlight=False, markup=False)
        elif line == "/tools":
            _show_tools(console, session.tools)
        elif line == "/expert":
            _show_messages(console, [loop.run(session.expert())])
        elif line == "/do":
            message = loop.run(session.expert())
            _show_messages(console, [message])
            return message
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
            'This is no call; write {"name": "tool", "arguments": {"key": "value"}}.'
        ) from None
    return Message.assistant(None, call)


def _arguments(text: str, function: FunctionSpec) -> dict[str, Any]:
    """Read ``a=1 b=two``, or values in the order of the parameters; a lone string needs no quotes."""
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
    separators = " \t\n"
    if text.startswith("(") and text.endswith(")"):
        text, separators = text[1:-1], ", \t\n"
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = separators, True, ""
    try:
        return list(lexer)
    except ValueError as error:
        raise UnreadableLine(f"The quotes do not match ({error}).") from None


def _value(text: str, schema: dict[str, Any]) -> Any:
    """Read a typed value as JSON; what is no JSON, or wanted as a string, stays text."""
    if schema.get("type") == "string" or "enum" in schema:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _kind(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "any"
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(_kind(option) for option in schema["anyOf"])
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    return str(schema.get("type", "any"))


def _show_task(console: Console, info: TaskInfo, session: ClientSession) -> None:
    sample = session.sample
    title = f"{info.name}, {sample.split}/{sample.index}, seed {sample.seed}"
    console.rule(Text(title), align="left")
    if info.description:
        console.print(info.description, style="italic", highlight=False, markup=False)
    _show_tools(console, session.tools)
    console.print("/help shows how to write calls.\n", style="dim", highlight=False)
    _show_messages(console, session.messages)


def _show_tools(console: Console, tools: Sequence[ToolSpec]) -> None:
    for tool in tools:
        summary = tool.function.description.partition("\n")[0]
        line = Text("  ").append(signature(tool.function), style="bold")
        console.print(line.append(f"  {summary}", style="dim"), soft_wrap=True)


def _show_messages(console: Console, messages: Iterable[Message]) -> None:
    for message in messages:
        text = message_text(message) if message.content else ""
        calls = " ".join(format_call(call) for call in message.tool_calls or ())
        line = Text(f"{message.role}: ", style=f"bold {_STYLES.get(message.role, 'white')}")
        console.print(line.append(f"{text} {calls}".strip(), style="not bold default"))


def _show_end(console: Console, result: StepResult, total: float) -> None:
    error = result.info.get("error")
    if result.status is SessionStatus.FAILED_ENVIRONMENT and isinstance(error, dict):
        console.print(f"The environment broke: {error.get('message')}", style="bold red", markup=False)
    outcome = "success" if result.metrics.get("success") else "no success"
    hidden = ("success", "invalid_calls")
    metrics = "".join(f", {name} {value:g}" for name, value in result.metrics.items() if name not in hidden)
    ending = f"{result.status} after {_turn_count(result.seq)}: {outcome}, reward {total:g}{metrics}"
    console.print(ending, style="bold", highlight=False)


def _turn_count(turns: int) -> str:
    return "1 turn" if turns == 1 else f"{turns} turns"
