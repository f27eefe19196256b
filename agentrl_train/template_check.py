"""Checks before the first step, with the run's own sessions, that a chat format shows the tools of a task.

A template that drops the tools, the calls or the results renders without an error, and the policy then never
succeeds. Such a format is rejected here with an error that names the setting to change.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_env.client import EnvClient
from agentrl_env.errors import AgentRLError
from agentrl_env.types import FunctionCall, Message, ToolCall, ToolSpec
from agentrl_train.actor import require_room
from agentrl_train.chat import REFUSALS, ChatFormat, Reading, hidden_parts, hidden_parts_warning
from agentrl_train.config import SubAgentSection
from agentrl_train.errors import ConfigError, EngineError
from agentrl_train.sub_agent import views
from agentrl_train.tool_calls import THOUGHT_BEGINS
from agentrl_train.tool_calls.schemas import example_arguments
from agentrl_train.types import Engine, Sampling, SamplingParams, TaskSource

logger = logging.getLogger(__name__)

OPEN_S = 60.0
"""Deadline for opening a session to check."""
COMPLETIONS, COMPLETION_TOKENS = 4, 128
"""Completions sampled per task before the first step, and their maximum number of tokens."""
QUOTED = 200
"""Maximum number of quoted characters of a completion."""

_TASK, _RESULT, _TEXT = "the-task-is-here", "the-result-is-here", "some text"
_THOUGHT = re.compile(rf"{THOUGHT_BEGINS}.*", re.DOTALL)
_IN_PROMPT = "set model.tool_parser = 'prompt' to write tools, calls and results as text"
_TEMPLATE = "model.chat_template to a template that does"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The opening of a task's first sample, and the parameters of a few completions."""

    task: str
    tools: Sequence[ToolSpec]
    token_ids: Sequence[int]
    requests: Sequence[SamplingParams]
    hidden: Sequence[str] = ()
    """Types of the parts of the opening that the policy does not see."""


async def check_sessions(
    chat: ChatFormat,
    clients: Mapping[str, EnvClient],
    *,
    sources: Iterable[TaskSource],
    sampling: Sampling | None = None,
    sub_agent: SubAgentSection | None = None,
) -> list[Prompt]:
    """Open one session of every task and check the format with its opening and its tools.

    With ``sampling``, return a prompt of each task for ``describe_completions``.

    A task whose session cannot be opened now is skipped, because the run itself waits for environments. With
    the ``sampling`` of a run, the opening must leave room for a turn. With its ``sub_agent``, the messages
    and tools of planner and workers are checked.

    Raises:
        ConfigError: the format loses a part of a session, or the sub-agent does not fit its tools.
        EngineError: the context has no room for a turn.
    """
    prompts: dict[str, Prompt] = {}
    for source in sources:
        task = source.task
        try:
            async with asyncio.timeout(OPEN_S):
                session = await clients[task].open(task, split=source.split, index=0)
                await session.close()
        except (AgentRLError, TimeoutError) as error:
            logger.warning("the chat format is not checked with task %s: %s", task, error or "no answer")
            continue
        if hidden := hidden_parts(session.messages):
            logger.warning("%s", hidden_parts_warning(task, hidden))
        asked = sub_agent if sub_agent is not None and sub_agent.serves(task) else None
        for opening, tools in views(asked, session.messages, session.tools):
            check_format(chat, task=task, opening=opening, tools=tools)
            if sampling is not None:
                ids = chat.opening(opening, tools)
                require_room(task, tokens=len(ids), sampling=sampling)
                requests = [
                    sampling.request(ids, seed=seed, limit=COMPLETION_TOKENS) for seed in range(COMPLETIONS)
                ]
                prompt = Prompt(task=task, tools=tools, token_ids=ids, requests=requests, hidden=hidden)
                prompts.setdefault(task, prompt)
    return list(prompts.values())


async def describe_completions(chat: ChatFormat, engine: Engine, prompts: Iterable[Prompt]) -> list[str]:
    """Sample a few completions of each prompt with tools, and return a line per task on how they were parsed.

    A task for which the engine fails is skipped, because the run itself retries.
    """
    lines = []
    for prompt in prompts:
        if not prompt.tools:
            continue
        try:
            lines.append(await _describe(chat, engine, prompt))
        except EngineError as error:
            logger.warning("no completion of task %s is checked: %s", prompt.task, error)
    return lines


async def _describe(chat: ChatFormat, engine: Engine, prompt: Prompt) -> str:
    keys = [f"check-{prompt.task}-{number}" for number, _ in enumerate(prompt.requests)]
    try:
        completions = await asyncio.gather(
            *(
                engine.generate(prompt.token_ids, sampling=request, session_key=key)
                for request, key in zip(prompt.requests, keys, strict=True)
            )
        )
    finally:
        for key in keys:
            engine.release(key)
    readings = [
        chat.parse(one.token_ids, turn=1, tools=prompt.tools, prompt=prompt.token_ids) for one in completions
    ]
    called = [any(call.function.name for call in one.message.tool_calls or ()) for one in readings]
    tolerant = sum(one.tolerant for one in readings)
    text = (
        f"{prompt.task}: of {len(readings)} completions, {sum(called) - tolerant} have a call in the syntax "
        f"{chat.parser.name!r}, {tolerant} another call that was read, and {called.count(False)} none"
    )
    if all(called) and not tolerant:
        return text
    shown = chat.text(completions[0].token_ids)[:QUOTED]
    remedy = (
        "no setting is needed; a short `agentrl-train sft` teaches the syntax"
        if any(called)
        else "see model.tool_parser, or start with `agentrl-train sft`"
    )
    return f"{text} ({remedy}). The first: {shown!r}"


def check_format(
    chat: ChatFormat, *, task: str, opening: Sequence[Message], tools: Sequence[ToolSpec]
) -> None:
    """Check that a session with this opening and these tools can be played.

    Raises:
        ConfigError: the format loses a part of the session; the message names it and the setting to change.
    """
    try:
        _check_opening(chat, opening, tools)
        if not tools:
            _check_text(chat)
        for tool in tools:
            _check_call(chat, opening, tools, tool)
    except ConfigError as error:
        raise ConfigError(f"task {task} cannot be played with {chat.name}: {error}") from error
    except REFUSALS as error:
        raise ConfigError(
            f"task {task} cannot be played with {chat.name}: the chat template refuses its messages "
            f"({error}); {_IN_PROMPT}, or {_TEMPLATE} not"
        ) from error


def _check_opening(chat: ChatFormat, opening: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
    """Check that the opening shows every message and every tool."""
    shown = chat.render(opening, tools)
    for tool in tools:
        name = tool.function.name
        renamed = [_rename(tool) if one is tool else one for one in tools]
        if shown.count(name) <= chat.render(opening, renamed).count(name):
            raise ConfigError(
                f"the chat template does not show the tool {name!r}; {_IN_PROMPT}, or {_TEMPLATE}"
            )
    for message in opening:
        if message.role != "assistant" and message.content:
            marked = [message.model_copy(update={"content": _TASK}) if m is message else m for m in opening]
            if _TASK not in chat.render(marked, tools):
                raise ConfigError(
                    f"the chat template does not show the opening's {message.role} message; set {_TEMPLATE}"
                )


def _check_text(chat: ChatFormat) -> None:
    """Check one turn of text, and the environment's answer to it."""
    message = Message.assistant(_TEXT)
    read = chat.parse(chat.completion(message), turn=1).message
    if read.tool_calls or read.content != _TEXT:
        raise ConfigError("a turn of text is not read back as it was written; set model.tool_parser")
    if _RESULT not in chat.reply_text([Message(role="user", content=_RESULT)], after=message):
        raise ConfigError(f"the chat template does not show the answer to a turn of text; set {_TEMPLATE}")


def _check_call(
    chat: ChatFormat, opening: Sequence[Message], tools: Sequence[ToolSpec], tool: ToolSpec
) -> None:
    """Check one call in the model's own syntax, its result, and the conversation that the template writes."""
    name, syntax = tool.function.name, chat.parser.name
    arguments = example_arguments(tool, text=_TEXT)
    call = ToolCall(
        id=chat.parser.call_id(1, 0, name),
        function=FunctionCall(name=name, arguments=json.dumps(arguments)),
    )
    message = Message.assistant(None, call)
    prompt = chat.opening(opening, tools)
    parsed = chat.parse(chat.completion(message, prompt=prompt), turn=1, tools=tools, prompt=prompt)
    if not _same(parsed, name, arguments):
        raise ConfigError(
            f"a call of {name!r} in the syntax {syntax!r} is not read back as it was written; "
            "set model.tool_parser to another syntax, or to 'prompt'"
        )
    result = Message(role="tool", content=_RESULT, tool_call_id=call.id)
    reply = chat.reply_text([result], after=message, tools=tools)
    if _RESULT not in reply:
        raise ConfigError(
            f"the chat template does not show the result of {name!r}; {_IN_PROMPT}, or {_TEMPLATE}"
        )
    before = chat.render(opening, tools, generation_prompt=False).rstrip()
    header = _THOUGHT.sub("", chat.render(opening, tools)[len(before) :]).strip()
    whole = chat.render([*opening, message, result], tools)
    if not whole.endswith(reply):
        raise ConfigError(
            "the chat template writes a result differently within a longer conversation, so turns cannot be "
            f"appended; {_IN_PROMPT}, or {_TEMPLATE} not"
        )
    if not whole.startswith(before):
        logger.info("the chat template rewrites the opening later; episodes keep the first rendering")
        return
    written = whole[len(before) : len(whole) - len(reply)].strip().removeprefix(header)
    if name not in written:
        return  # it writes no calls: the syntax is known from elsewhere
    if not _same(chat.parse_text(written, turn=1, tools=tools), name, arguments):
        problem = f"the chat template writes calls in another syntax than {syntax!r}"
        if not chat.chosen:
            raise ConfigError(f"{problem}; set model.tool_parser to the one that it writes, or to 'prompt'")
        logger.warning("%s, which model.tool_parser chooses", problem)


def _rename(tool: ToolSpec) -> ToolSpec:
    return tool.model_copy(update={"function": tool.function.model_copy(update={"name": "?"})})


def _same(parsed: Reading, name: str, arguments: Mapping[str, Any]) -> bool:
    """Return True if exactly this call was read, in the syntax of the family."""
    calls = parsed.message.tool_calls
    if parsed.tolerant or calls is None or len(calls) != 1:
        return False
    return calls[0].function.name == name and json.loads(calls[0].function.arguments) == arguments
