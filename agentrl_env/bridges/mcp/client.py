"""An MCP server as a task: ``agentrl-env serve 'mcp:COMMAND#reward=module:function&prompt=...'``.

The server is a command, started for each session, or the URL of a streamable HTTP server, with a connection
for each session: ``mcp:http://host/mcp#reward=...``. Its tools are the task's tools. A message without a tool
call is the model's answer, which ends the episode with the reward of the user's function::

    def reward(sample: TaskSample, calls: list[McpCall], answer: str) -> float:
        return float(sample.data["answer"] in answer)

The prompt is that of the options, or ``prompt`` of the sample's data. The option ``samples=module:function``
names a function that returns the samples of a split, as ``Environment.samples`` does.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl

from agentrl_env.bridges.signatures import tools_of
from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.environment import Environment
from agentrl_env.errors import TargetError, ToolError
from agentrl_env.tools import Done
from agentrl_env.types import Message, TaskSample

LOAD_S = 60.0
INSTALL = "this needs the MCP SDK; install the extra: pip install 'agentrl-kit[mcp]'"
_NUMBERS = {"max_turns": int, "tool_timeout": float, "reset_timeout": float}
_FUNCTIONS = ("reward", "samples")
_TEXTS = ("name", "prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpCall:
    """One call of a tool in an episode.

    Args:
        name: the tool.
        arguments: its arguments.
        answer: text of its result.
        is_error: True if the server says that the call failed.
    """

    name: str
    arguments: dict[str, Any]
    answer: str
    is_error: bool


Reward = Callable[[TaskSample, list[McpCall], str], Any]


def load(address: str) -> type[McpTask]:
    """Return the class of the MCP server of a target. Raises TargetError."""
    server, _, fragment = address.rpartition("#")
    options: dict[str, Any] = {}
    for name, text in parse_qsl(fragment if server else ""):
        if name in _FUNCTIONS:
            options[name] = _function(text)
        elif name in _NUMBERS:
            try:
                options[name] = _NUMBERS[name](text)
            except ValueError as error:
                raise TargetError(f"mcp: option {name}: {error}") from error
        elif name in _TEXTS:
            options[name] = text
        else:
            known = ", ".join([*_FUNCTIONS, *_NUMBERS, *_TEXTS])
            raise TargetError(f"mcp: there is no option {name!r}; there are {known}")
    if "reward" not in options:
        raise TargetError("mcp: give the reward as a function: mcp:SERVER#reward=module:function")
    return mcp_task(server, **options)


def mcp_task(
    server: str,
    reward: Reward,
    *,
    samples: Callable[[str], Any] | None = None,
    **attributes: Any,
) -> type[McpTask]:
    """Return a class whose tools are those of an MCP server.

    Args:
        server: a command line, or the URL of a streamable HTTP server.
        reward: called with the sample, the calls and the answer at the end of an episode; may be async.
        samples: returns the samples of a split; by default endless and empty.
        attributes: of the class, such as ``name``, ``prompt`` or ``max_turns``.

    Raises TargetError where the server does not start, or the SDK is not installed.
    """
    if importlib.util.find_spec("mcp") is None:
        raise TargetError(INSTALL)
    loop = LoopThread()
    try:
        name, instructions, specs = loop.run(_describe(server), LOAD_S)
    except (Exception, asyncio.CancelledError) as error:
        raise TargetError(f"{server}: no MCP server answers: {_innermost(error)}") from error
    finally:
        loop.close()
    fields: dict[str, Any] = {
        "__doc__": instructions or "",
        "name": re.sub(r"\W+", "_", name).strip("_").lower() or "mcp",
        "server": server,
        "reward": staticmethod(reward),
        **tools_of(specs, McpTask.play),
        **attributes,
    }
    if samples is not None:
        fields["samples"] = classmethod(lambda cls, split: samples(split))
    return type("McpServer", (McpTask,), fields)


async def _describe(server: str) -> tuple[str, str | None, dict[str, tuple[str, dict[str, Any]]]]:
    connection = Connection(server)
    try:
        session = await connection.open()
        tools, cursor = [], None
        while True:
            page = await session.list_tools(cursor)
            tools += page.tools
            cursor = page.nextCursor
            if cursor is None:
                break
        specs = {tool.name: (tool.description or "", tool.inputSchema) for tool in tools}
        begun = connection.begun
        return begun.serverInfo.name, begun.instructions, specs
    finally:
        await connection.close()


class McpTask(Environment):
    """The episodes of an MCP server; ``mcp_task`` makes a class for each server."""

    server: ClassVar[str] = ""
    reward: ClassVar[Any] = None
    prompt: ClassVar[str] = ""
    """Opening message; that of the sample's data takes precedence."""

    async def reset(self, sample: TaskSample, rng: Any) -> list[Message]:
        """Connect, and return the server's instructions and the prompt."""
        self.sample = sample
        self.calls: list[McpCall] = []
        self.connection = Connection(self.server)
        self.mcp = await self.connection.open()
        instructions = self.connection.begun.instructions
        opening = [Message(role="system", content=instructions)] if instructions else []
        return [*opening, Message(role="user", content=str(sample.data.get("prompt", self.prompt)))]

    async def play(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool of the server."""
        result = await self.mcp.call_tool(name, arguments)
        text = "\n".join(
            block.text if block.type == "text" else f"[{block.type}]" for block in result.content
        )
        failed = bool(result.isError)
        self.calls.append(McpCall(name=name, arguments=arguments, answer=text, is_error=failed))
        if failed:
            raise ToolError(text)
        return text

    async def respond(self, text: str) -> Done:
        """End the episode with the model's answer."""
        reward = type(self).reward(self.sample, self.calls, text)
        return Done(
            "The episode has ended.", reward=float(await reward if inspect.isawaitable(reward) else reward)
        )

    async def close(self) -> None:
        """End the connection, and the server's process."""
        if hasattr(self, "connection"):
            await self.connection.close()


class Connection:
    """A connection to an MCP server, kept by a task of its own, as the SDK requires.

    Args:
        server: a command line, or a URL.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.begun: Any = None
        """Answer of the server to ``initialize``."""

    async def open(self) -> Any:
        """Return the session of the SDK. Raises what the connection does."""
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(opened))
        await asyncio.wait((opened, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            self._task.result()
            raise ConnectionError("the connection ended at once")
        return opened.result()

    async def close(self) -> None:
        """End the connection; idempotent."""
        self._end.set()
        if self._task is not None:
            await asyncio.wait((self._task,))
            if not self._task.cancelled():
                self._task.exception()  # a connection that broke has failed a call already

    async def _keep(self, opened: asyncio.Future[Any]) -> None:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        async with AsyncExitStack() as stack:
            if re.match(r"https?://", self._server):
                streams = await stack.enter_async_context(streamable_http_client(self._server))
            else:
                command, *arguments = shlex.split(self._server)
                parameters = StdioServerParameters(command=command, args=arguments)
                streams = await stack.enter_async_context(stdio_client(parameters))
            session = await stack.enter_async_context(ClientSession(*streams[:2]))
            self.begun = await session.initialize()
            opened.set_result(session)
            await self._end.wait()


def _function(path: str) -> Any:
    """Return the function of a dotted path such as ``module:function``. Raises TargetError."""
    module, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TargetError(f"mcp: {path}: {error}; write module:function") from error


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
