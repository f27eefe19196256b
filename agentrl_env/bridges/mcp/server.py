"""A task as an MCP server at ``/mcp/TASK``: streamable HTTP, one session for each connection.

The query or the headers of the connection choose the problem: ``/mcp/guess?split=test&index=3&seed=7``, or
``x-agentrl-seed: 7``. The opening messages are the server's instructions and its prompt ``opening``. Each
call of a tool is one turn; its result carries messages, reward and status as structured content.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, cast

import anyio
from fastapi import FastAPI
from pydantic_core import from_json
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from agentrl_env.bridges.episode import CHOICE, Episode
from agentrl_env.bridges.mcp.sdk import missing_sdk
from agentrl_env.errors import InvalidRequest, NotSupported, WireError
from agentrl_env.schema import echo
from agentrl_env.server.api import Api
from agentrl_env.server.app import call_at_end
from agentrl_env.server.auth import caller
from agentrl_env.session.pool import VERSION
from agentrl_env.types import Message, StepResult
from agentrl_env.wire import MAX_WAIT_S

HEADER = "x-agentrl-"
"""Prefix of the headers that choose the problem."""
PROMPT = "opening"
"""Name of the prompt with the opening messages."""
META = "agentrl-env/"
"""Prefix of our keys in ``_meta``."""
INVALID_REQUEST, INVALID_PARAMS, SERVER_ERROR = -32600, -32602, -32000
_opened: ContextVar[Episode] = ContextVar("agentrl_mcp_episode")
"""The episode of the connection that is being made, for the task that serves it."""


def mount(app: FastAPI, api: Api) -> None:
    """Add the route of all tasks of ``api``; its connections end with the application."""
    endpoint = McpEndpoint(api)
    app.router.routes.append(Route("/mcp/{task}", endpoint))
    call_at_end(app, endpoint.aclose)


class McpEndpoint:
    """The ASGI application of ``/mcp/{task}``. The SDK is imported by the first connection.

    Args:
        api: answers the calls of the sessions.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._manager: Any = None
        self._starting = asyncio.Lock()
        self._serving: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request. Raises NotSupported where the SDK is not installed."""
        request = Request(scope, receive)
        if request.method == "GET":  # a stream of messages that the server begins, of which there are none
            await Response(status_code=405, headers={"allow": "POST, DELETE"})(scope, receive, send)
            return
        manager = await self._started()
        if agent := caller.get().session_id:
            scope["user"] = _identity(agent)
        if request.method != "POST" or "mcp-session-id" in request.headers:
            await manager.handle_request(scope, receive, send)
            return
        body = await request.body()
        self._api.check_values(body, caller.get())
        call = _initialize(body)
        if call is None:
            refusal = {"code": INVALID_REQUEST, "message": "begin the connection with initialize"}
            await JSONResponse({"jsonrpc": "2.0", "id": None, "error": refusal}, 400)(scope, receive, send)
            return
        try:
            choice = _choice(request.query_params, request.headers)
            episode = await Episode.open(self._api, request.path_params["task"], choice)
        except WireError as error:
            self._api.count(error)
            answer = {"jsonrpc": "2.0", "id": call.get("id"), "error": _rpc_error(error)}
            await JSONResponse(answer)(scope, receive, send)
            return
        token = _opened.set(episode)
        try:
            await manager.handle_request(scope, _replay(body, receive), send)
        finally:
            _opened.reset(token)
            if not episode.joined:
                await episode.close()

    async def aclose(self) -> None:
        """End every connection and its session."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait((self._serving,))

    async def _started(self) -> Any:
        async with self._starting:
            if self._manager is None:
                if reason := missing_sdk():
                    raise NotSupported(f"MCP {reason}")
                self._manager = await asyncio.to_thread(_manager)
                ready = asyncio.Event()
                self._serving = asyncio.create_task(_serve(self._manager, ready))
                await ready.wait()
        return self._manager


async def _serve(manager: Any, ready: asyncio.Event) -> None:
    async with manager.run():
        ready.set()
        await asyncio.Event().wait()


def _manager() -> Any:
    from mcp.server.lowlevel import Server
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    agents: dict[str, anyio.CancelScope] = {}
    """Connections of agent tokens by session."""

    class Connections(Server[Any, Any]):
        """Serves each connection with the server of its episode; an agent's ends its connection before."""

        async def run(self, read_stream: Any, write_stream: Any, *args: Any, **options: Any) -> None:
            episode = _opened.get()
            episode.joined = True
            server = episode_server(episode)
            with anyio.CancelScope() as scope:
                if agent := caller.get().session_id:
                    if agent in agents:
                        agents[agent].cancel()
                    agents[agent] = scope
                try:
                    begin = server.create_initialization_options()
                    await server.run(read_stream, write_stream, begin, **options)
                finally:
                    if agent and agents[agent] is scope:
                        del agents[agent]
                    with anyio.CancelScope(shield=True):
                        await episode.close()

    # A session ends by its lease; a connection that nobody uses for longer than any call may wait goes too.
    return StreamableHTTPSessionManager(
        Connections("agentrl-env"),
        json_response=True,
        session_idle_timeout=MAX_WAIT_S,
        max_sessions=None,
        max_request_body_size=2**31,  # the access middleware limits bodies
    )


def episode_server(episode: Episode) -> Any:
    """Return the MCP server of one episode."""
    from mcp import McpError, types
    from mcp.server.lowlevel import Server

    opening = episode.info.messages
    server: Any = Server(
        episode.info.task, VERSION, "\n\n".join(text for text in map(_text, opening) if text) or None
    )

    @server.list_tools()  # type: ignore[untyped-decorator]
    async def list_tools() -> list[types.Tool]:
        functions = [tool.function for tool in episode.tools]
        return [
            types.Tool(name=one.name, description=one.description, inputSchema=_object(one.parameters))
            for one in functions
        ]

    @server.list_prompts()  # type: ignore[untyped-decorator]
    async def list_prompts() -> list[types.Prompt]:
        return [types.Prompt(name=PROMPT, description="The opening messages of the episode.")]

    @server.get_prompt()  # type: ignore[untyped-decorator]
    async def get_prompt(name: str, arguments: dict[str, str] | None) -> types.GetPromptResult:
        if name != PROMPT:
            raise McpError(types.ErrorData(code=INVALID_PARAMS, message=f"there is no prompt {echo(name)}"))
        messages = [
            types.PromptMessage(
                role="assistant" if message.role == "assistant" else "user", content=cast(Any, content)
            )
            for message in opening
            for content in _contents(message)
        ]
        session = episode.info.model_dump(mode="json", include={"session_id", "task", "messages"})
        return types.GetPromptResult(messages=messages, _meta={f"{META}session": session})

    async def call_tool(request: types.CallToolRequest) -> types.ServerResult:
        # Not by the decorator: it answers invalid calls itself, and errors of the server as if the model
        # had made them.
        try:
            result = await episode.call(request.params.name, request.params.arguments or {})
        except WireError as error:
            raise McpError(types.ErrorData(**_rpc_error(error))) from error
        return types.ServerResult(
            types.CallToolResult(
                content=[content for message in result.messages for content in _contents(message)],
                structuredContent=_structured(result),
                isError=bool(result.metrics.get("invalid_calls")),
                _meta={f"{META}metrics": result.metrics, f"{META}info": result.info},
            )
        )

    server.request_handlers[types.CallToolRequest] = call_tool
    return server


def _identity(session_id: str) -> Any:
    """Return the identity of an agent, to which the SDK binds the connection that it makes."""
    from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
    from mcp.server.auth.provider import AccessToken

    return AuthenticatedUser(AccessToken(token="", client_id=session_id, scopes=[]))


def _structured(result: StepResult) -> dict[str, Any]:
    fields = {"messages", "reward", "terminated", "truncated", "status"}
    return result.model_dump(mode="json", include=fields)


def _object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **parameters}


def _contents(message: Message) -> list[Any]:
    """Return a message as content blocks of MCP: text, and images that are data URLs."""
    from mcp import types

    if not isinstance(message.content, list):
        return [types.TextContent(type="text", text=message.content or "")]
    blocks: list[Any] = []
    for part in message.content:
        url = part["image_url"].get("url", "") if isinstance(part.get("image_url"), dict) else ""
        kind, _, data = url.removeprefix("data:").partition(";base64,")
        if url.startswith("data:image/") and _is_base64(data):
            blocks.append(types.ImageContent(type="image", data=data, mimeType=kind))
        else:
            blocks.append(types.TextContent(type="text", text=str(part.get("text", json.dumps(part)))))
    return blocks


def _text(message: Message) -> str:
    if isinstance(message.content, list):
        return "".join(str(part.get("text", f"[{part.get('type')}]")) for part in message.content)
    return message.content or ""


def _is_base64(text: str) -> bool:
    try:
        return bool(base64.b64decode(text, validate=True))
    except ValueError:
        return False


def _initialize(body: bytes) -> dict[str, Any] | None:
    """Return the JSON-RPC request of a body that begins a connection; None for any other."""
    try:
        call = from_json(body)
    except ValueError:
        return None
    return call if isinstance(call, dict) and call.get("method") == "initialize" else None


def _choice(query: QueryParams, headers: Headers) -> dict[str, Any]:
    """Return the fields that choose the problem. Raises InvalidRequest for an unknown one."""
    unknown = sorted(set(query) - set(CHOICE))
    if unknown:
        raise InvalidRequest(f"there is no query parameter {echo(unknown[0])}; there are {', '.join(CHOICE)}")
    shown = {field: query.get(field, headers.get(f"{HEADER}{field.replace('_', '-')}")) for field in CHOICE}
    return {
        field: value if field == "split" else _value(value)
        for field, value in shown.items()
        if value is not None
    }


def _value(text: str) -> Any:
    """Return the JSON value that a text is, else the text: an index may be ``3`` or ``easy-3``."""
    try:
        return from_json(text)
    except ValueError:
        return text


def _rpc_error(error: WireError) -> dict[str, Any]:
    code = INVALID_PARAMS if error.status in (404, 422) else SERVER_ERROR
    return {"code": code, "message": error.message, "data": error.wire()["error"]}


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives a body which was read already."""
    unread = True

    async def again() -> AsgiMessage:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again
