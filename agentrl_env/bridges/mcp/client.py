"""An MCP server as a task: ``agentrl-env serve 'mcp:COMMAND#reward=module:function&prompt=...'``.

The server is a command, started once per session, or the URL of a streamable HTTP server, with one connection
per session: ``mcp:http://host/mcp#reward=...``. The server's tools become the task's tools. A message without
a tool call is the model's answer. It ends the episode with the reward that your function returns::

    def reward(sample: TaskSample, calls: list[McpCall], answer: str) -> float:
        return float(sample.data["answer"] in answer)

The prompt comes from the option ``prompt`` or from ``prompt`` in the sample's data. The option
``samples=module:function`` names a function that returns the samples of a split, like
``Environment.samples``. ``env=NAME=VALUE`` sets an environment variable of a command, and
``header=NAME: VALUE`` a header of a URL. ``${NAME}`` in a value is replaced from the environment of this
process.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import json
import os
import re
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import parse_qsl

from agentrl_env.author_code import search_working_directory
from agentrl_env.bridges.foreign_tools import ForeignTool, tools_of
from agentrl_env.bridges.mcp.sdk import Request, connected, error_type, missing_sdk
from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.environment import Environment
from agentrl_env.errors import DefinitionError, TargetError, ToolError
from agentrl_env.tools import Done
from agentrl_env.types import Message, TaskSample

LOAD_S = 60.0
_NUMBERS = {"max_turns": int, "tool_timeout": float, "reset_timeout": float}
_FUNCTIONS = ("reward", "samples")
_TEXTS = ("name", "prompt")
_PAIRS = {"env": ("env", "="), "header": ("headers", ":")}
"""Repeatable options: the argument of ``mcp_task``, and the separator of name and value."""
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_BROKEN = {-32700, -32600, -32601, -32000, 408}
"""Error codes for unreadable requests, unanswered requests and closed connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpCall:
    """One tool call in an episode.

    Args:
        name: name of the tool.
        arguments: arguments of the call.
        answer: text of its result.
        is_error: True if the server reported an error.
    """

    name: str
    arguments: dict[str, Any]
    answer: str
    is_error: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An MCP server: its command or address, and its environment variables or HTTP headers."""

    address: str
    env: Mapping[str, str] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)


Reward = Callable[[TaskSample, list[McpCall], str], Any]


def load(address: str) -> type[McpTask]:
    """Return the class for the MCP server of a target. Raises TargetError."""
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
        elif name in _PAIRS:
            argument, separator = _PAIRS[name]
            key, found, value = text.partition(separator)
            if not found or not key.strip():
                raise TargetError(f"mcp: write {name}=NAME{separator}VALUE, not {name}={text}")
            options.setdefault(argument, {})[key.strip()] = _VARIABLE.sub(_variable, value.strip())
        else:
            known = ", ".join([*_FUNCTIONS, *_NUMBERS, *_TEXTS, *_PAIRS])
            raise TargetError(f"mcp: there is no option {name!r}; there are {known}")
    if "reward" not in options:
        raise TargetError("mcp: give the reward as a function: mcp:SERVER#reward=module:function")
    return mcp_task(server, **options)


def mcp_task(
    server: str,
    reward: Reward,
    *,
    samples: Callable[[str], Any] | None = None,
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    **attributes: Any,
) -> type[McpTask]:
    """Return a task class with the tools of an MCP server.

    Args:
        server: a command line, or the URL of a streamable HTTP server.
        reward: called with the sample, the calls and the answer at the end of an episode. Can be async.
        samples: returns the samples of a split. By default a split is endless, and its samples have no data.
        env: environment variables for a command, in addition to the inherited ones such as ``PATH``.
        headers: HTTP headers for a URL, such as ``Authorization``.
        attributes: attributes of the class, such as ``name``, ``prompt`` or ``max_turns``.

    Raises TargetError if the server does not start or the SDK is not installed.
    """
    if headers and not _is_url(server):
        raise TargetError(f"{server}: headers require a URL; use environment variables for a command")
    if env and _is_url(server):
        raise TargetError(f"{server}: environment variables require a command; use headers for a URL")
    endpoint = Endpoint(address=server, env=env or {}, headers=headers or {})
    if reason := missing_sdk():
        raise TargetError(f"{server} {reason}")
    loop = LoopThread()
    try:
        name, instructions, tools = loop.run(_describe(endpoint), LOAD_S)
    except (Exception, asyncio.CancelledError) as error:
        raise TargetError(f"{server}: cannot connect to the MCP server: {_innermost(error)}") from error
    finally:
        loop.close()
    fields: dict[str, Any] = {
        "__doc__": instructions or "",
        "name": re.sub(r"\W+", "_", name).strip("_").lower() or "mcp",
        "endpoint": endpoint,
        "reward": staticmethod(reward),
        **tools_of(server, tools, McpTask.play),
        **attributes,
    }
    if samples is not None:
        fields["samples"] = classmethod(lambda cls, split: samples(split))
    return type("McpServer", (McpTask,), fields)


async def _describe(endpoint: Endpoint) -> tuple[str, str | None, list[ForeignTool]]:
    connection = Connection(endpoint)
    try:
        request = await connection.open()
        tools = [tool async for tool in _list_tools(request)]
        return connection.begun["serverInfo"]["name"], connection.begun.get("instructions"), tools
    finally:
        await connection.close()


async def _list_tools(request: Request) -> AsyncIterator[ForeignTool]:
    """Yield a server's own descriptions of its tools."""
    parameters: dict[str, Any] = {}
    while True:
        page = await request("tools/list", parameters)
        for given in page.get("tools") or ():
            tool = given if isinstance(given, dict) else {}
            name, description = str(tool.get("name") or ""), str(tool.get("description") or "")
            yield ForeignTool(name=name, description=description, schema=tool.get("inputSchema"))
        if page.get("nextCursor") is None:
            return
        parameters = {"cursor": page["nextCursor"]}


async def _call(request: Request, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """Call a tool. Return the text of its result, and True if the call failed.

    If a tool raises an exception, the TypeScript SDK sends a protocol error and the Python SDK a result with
    ``isError``. Both count as a failed call.
    """
    try:
        result = await request("tools/call", {"name": name, "arguments": arguments})
    except error_type() as error:
        if error.error.code in _BROKEN:
            raise
        return error.error.message, True
    lines = [_text(block) for block in result.get("content") or ()]
    structured = result.get("structuredContent")
    if not any(lines) and structured is not None:
        lines = [json.dumps(structured, ensure_ascii=False)]
    return "\n".join(lines), bool(result.get("isError"))


def _text(block: Any) -> str:
    """Return an MCP content block as text for the model."""
    kind = block.get("type") if isinstance(block, dict) else None
    match kind:
        case "text":
            return str(block.get("text", ""))
        case "resource":
            resource = block.get("resource")
            if not isinstance(resource, dict):
                return json.dumps(block, ensure_ascii=False)
            return f"{resource.get('uri', '')}\n{_resource_text(resource)}"
        case "resource_link":
            parts = (block.get(key) for key in ("uri", "title", "name", "description", "mimeType"))
            return ", ".join(dict.fromkeys(str(part) for part in parts if part))
        case "image" | "audio":
            return f"[{kind}, {block.get('mimeType', 'of unknown type')}]"
    return json.dumps(block, ensure_ascii=False)


def _resource_text(resource: Mapping[str, Any]) -> str:
    if "text" in resource:
        return str(resource["text"])
    kind = str(resource.get("mimeType") or "application/octet-stream")
    try:
        data = base64.b64decode(str(resource.get("blob", "")))
        if kind.startswith("text/") or kind.partition(";")[0].endswith(("json", "xml")):
            return data.decode()
    except ValueError:
        return f"[{kind}, which cannot be decoded]"
    return f"[{kind}, {len(data)} bytes]"


class McpTask(Environment):
    """The episodes of an MCP server. ``mcp_task`` creates a class for each server."""

    endpoint: ClassVar[Endpoint]
    reward: ClassVar[Any] = None
    prompt: ClassVar[str] = ""
    """Opening message. ``prompt`` in the sample's data takes precedence."""

    async def reset(self, sample: TaskSample, rng: Any) -> list[Message]:
        """Connect to the server, and return its instructions and the prompt."""
        self.sample = sample
        self.calls: list[McpCall] = []
        self.connection = Connection(self.endpoint)
        self.request = await self.connection.open()
        instructions = self.connection.begun.get("instructions")
        opening = [Message(role="system", content=instructions)] if instructions else []
        return [*opening, Message(role="user", content=str(sample.data.get("prompt", self.prompt)))]

    async def play(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool of the server."""
        text, failed = await _call(self.request, name, arguments)
        self.calls.append(McpCall(name=name, arguments=arguments, answer=text, is_error=failed))
        if failed:
            raise ToolError(text)
        return text

    async def respond(self, text: str) -> Done:
        """End the episode with the model's answer."""
        reward = type(self).reward(self.sample, self.calls, text)
        if inspect.isawaitable(reward):
            reward = await reward
        try:
            return Done("The episode has ended.", reward=float(reward))
        except (TypeError, ValueError) as error:
            raise DefinitionError(
                f"the reward function returned {reward!r}; it must return a number"
            ) from error

    async def close(self) -> None:
        """Close the connection and end the server's process."""
        if hasattr(self, "connection"):
            await self.connection.close()


class Connection:
    """A connection to an MCP server. It runs in its own asyncio task, as the SDK requires.

    Args:
        endpoint: the server.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.begun: dict[str, Any] = {}
        """The server's JSON result of ``initialize``."""

    async def open(self) -> Request:
        """Connect, and return a function that sends requests. Raises any error of the connection."""
        opened: asyncio.Future[Request] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(opened))
        await asyncio.wait((opened, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            self._task.result()
            raise ConnectionError("the connection ended immediately")
        return opened.result()

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        self._end.set()
        if self._task is not None:
            await asyncio.wait((self._task,))
            if not self._task.cancelled():
                self._task.exception()  # a broken connection has already failed a call

    async def _keep(self, opened: asyncio.Future[Request]) -> None:
        from mcp.client.stdio import StdioServerParameters, get_default_environment, stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        endpoint = self._endpoint
        async with AsyncExitStack() as stack:
            if _is_url(endpoint.address):
                http = await stack.enter_async_context(create_mcp_http_client(dict(endpoint.headers)))
                client = streamable_http_client(endpoint.address, http_client=http)
                streams = await stack.enter_async_context(client)
            else:
                command, *arguments = shlex.split(endpoint.address)
                variables = {**get_default_environment(), **endpoint.env}
                parameters = StdioServerParameters(command=command, args=arguments, env=variables)
                streams = await stack.enter_async_context(stdio_client(parameters))
            self.begun, request = await connected(streams, stack)
            opened.set_result(request)
            await self._end.wait()


def _is_url(server: str) -> bool:
    return re.match(r"https?://", server) is not None


def _variable(found: re.Match[str]) -> str:
    """Return the value of an environment variable. Raises TargetError if it is not set."""
    if found[1] not in os.environ:
        raise TargetError(f"mcp: the environment variable {found[1]} is not set")
    return os.environ[found[1]]


def _function(path: str) -> Any:
    """Import the function at a path such as ``module:function``. Raises TargetError."""
    module, _, name = path.partition(":")
    search_working_directory()
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TargetError(f"mcp: {path}: {error}; write module:function") from error


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
