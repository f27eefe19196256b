"""A task as an MCP server at ``/mcp/TASK``, with streamable HTTP and one session per connection.

The query or the headers of the connection choose the problem: ``/mcp/guess?split=test&index=3&seed=7``, or
``x-agentrl-seed: 7``. The opening messages are the server's instructions and its prompt ``opening``. Each
tool call is one turn. Its structured content holds messages, reward and status.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any
from uuid import uuid4

import anyio
from fastapi import FastAPI
from pydantic_core import from_json
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from agentrl_env.bridges.episode import CHOICE, Episode, task_info
from agentrl_env.bridges.mcp.sdk import make_server, missing_sdk, protocol_error
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
"""Prefix of this project's keys in ``_meta``."""
INVALID_REQUEST, INVALID_PARAMS, SERVER_ERROR = -32600, -32602, -32000

logger = logging.getLogger(__name__)


def mount(app: FastAPI, api: Api) -> None:
    """Add the MCP route for all tasks of ``api``. Its connections end with the application."""
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
        self._connections: dict[str, Connection] = {}
        """Open connections by their MCP session id."""
        self._agents: dict[str, Connection] = {}
        """Connections of agent tokens by session."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request. Raises NotSupported if the SDK is not installed."""
        request = Request(scope, receive)
        if request.method == "GET":  # for server-initiated messages, which this server does not send
            await Response(status_code=405, headers={"allow": "POST, DELETE"})(scope, receive, send)
            return
        held = request.headers.get("mcp-session-id")
        connection = self._connections.get(held or "")
        if connection is not None and connection.agent == caller.get().session_id:
            await connection.transport.handle_request(scope, receive, send)
            return
        if reason := missing_sdk():
            raise NotSupported(f"MCP {reason}")
        if request.method != "POST" or held is not None:
            await _refusal("there is no MCP session with this id", 404)(scope, receive, send)
            return
        body = await request.body()
        self._api.check_values(body, caller.get())
        call = _initialize(body)
        if call is None:
            await _refusal("begin the connection with initialize", 400)(scope, receive, send)
            return
        # The first import takes a second and must not block the event loop.
        await asyncio.to_thread(import_module, "mcp.server.streamable_http")
        try:
            episode = await self._open(request)
        except WireError as error:
            self._api.count(error)
            answer = {"jsonrpc": "2.0", "id": call.get("id"), "error": _error(error)}
            await JSONResponse(answer)(scope, receive, send)
            return
        connection = self._connect(episode)
        await connection.begin(scope, _replay(body, receive), send)

    async def aclose(self) -> None:
        """Close every connection and its session."""
        await asyncio.gather(*(connection.aclose() for connection in list(self._connections.values())))

    async def _open(self, request: Request) -> Episode:
        """Open the session that a request chooses. Raises WireError."""
        task, choice = request.path_params["task"], _choice(request.query_params, request.headers)
        index = choice.get("index")
        if isinstance(index, int):  # or a sample with digits as its name
            described = await task_info(self._api, task)
            choice["index"] = described.parse_index(choice.get("split", "train"), str(index))
        return await Episode.open(self._api, task, choice)

    def _connect(self, episode: Episode) -> Connection:
        """Return a new connection to an episode. An earlier connection of the same agent ends."""
        connection = Connection(episode, caller.get().session_id, at_end=self._forget)
        self._connections[connection.mcp_session_id] = connection
        if agent := connection.agent:
            if before := self._agents.get(agent):
                before.cancel()
            self._agents[agent] = connection
        return connection

    def _forget(self, connection: Connection) -> None:
        del self._connections[connection.mcp_session_id]
        if connection.agent and self._agents.get(connection.agent) is connection:
            del self._agents[connection.agent]


class Connection:
    """An MCP connection. Its episode is closed when the connection ends.

    Args:
        episode: the episode that it plays.
        agent: session of the agent token that opened the connection, or None for the operator.
        at_end: called once the connection has ended.
    """

    def __init__(self, episode: Episode, agent: str | None, *, at_end: Callable[[Connection], None]) -> None:
        from mcp.server.streamable_http import StreamableHTTPServerTransport

        self.agent = agent
        self.mcp_session_id = uuid4().hex
        # A session ends with its lease. A connection ends after it has been idle for longer than a call can
        # wait.
        self.transport: Any = StreamableHTTPServerTransport(
            self.mcp_session_id, is_json_response_enabled=True, idle_timeout=MAX_WAIT_S
        )
        self._episode = episode
        self._at_end = at_end
        self._ready = asyncio.Event()
        self._until_cancelled = anyio.CancelScope()
        self._serving = asyncio.create_task(self._serve())

    async def begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request that opens the connection. The connection ends if the request fails."""
        status = 500

        async def watched(message: AsgiMessage) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._ready.wait()
            if self._until_cancelled.cancel_called:
                await _refusal("another connection of this agent has begun", 409)(scope, receive, watched)
            else:
                await self.transport.handle_request(scope, receive, watched)
        finally:
            if status >= 400:
                self.cancel()

    def cancel(self) -> None:
        """Request the end of the connection. Idempotent."""
        self._until_cancelled.cancel()

    async def aclose(self) -> None:
        """Close the connection and its session."""
        self.cancel()
        await asyncio.wait((self._serving,))

    async def _serve(self) -> None:
        try:
            with self._until_cancelled:
                server = episode_server(self._episode)
                async with self.transport.connect() as streams:
                    self._ready.set()
                    with self.transport.idle_scope:
                        await server.run(*streams, server.create_initialization_options())
        except Exception:
            logger.exception("the MCP connection of session %s failed", self._episode.session_id)
        finally:
            self._ready.set()
            self._at_end(self)
            await self._episode.close()


def episode_server(episode: Episode) -> Any:
    """Return the MCP server of one episode."""
    opening = episode.info.messages

    async def list_tools(params: Any) -> dict[str, Any]:
        functions = [tool.function for tool in episode.tools]
        return {
            "tools": [
                {"name": one.name, "description": one.description, "inputSchema": _object(one.parameters)}
                for one in functions
            ]
        }

    async def list_prompts(params: Any) -> dict[str, Any]:
        return {"prompts": [{"name": PROMPT, "description": "The opening messages of the episode."}]}

    async def get_prompt(params: Any) -> dict[str, Any]:
        if params.name != PROMPT:
            raise protocol_error(INVALID_PARAMS, f"there is no prompt {echo(params.name)}")
        messages = [
            {"role": "assistant" if message.role == "assistant" else "user", "content": content}
            for message in opening
            for content in _contents(message)
        ]
        session = episode.info.model_dump(mode="json", include={"session_id", "task", "messages"})
        return {"messages": messages, "_meta": {f"{META}session": session}}

    async def call_tool(params: Any) -> dict[str, Any]:
        try:
            result = await episode.call(params.name, params.arguments or {})
        except WireError as error:
            raise protocol_error(**_error(error)) from error
        return {
            "content": [content for message in result.messages for content in _contents(message)],
            "structuredContent": _structured_content(result),
            "isError": bool(result.metrics.get("invalid_calls")),
            "_meta": {f"{META}metrics": result.metrics, f"{META}info": result.info},
        }

    return make_server(
        episode.info.task,
        version=VERSION,
        instructions="\n\n".join(text for text in map(_text, opening) if text) or None,
        answers={
            "tools/list": list_tools,
            "tools/call": call_tool,
            "prompts/list": list_prompts,
            "prompts/get": get_prompt,
        },
    )


def _structured_content(result: StepResult) -> dict[str, Any]:
    fields = {"messages", "reward", "terminated", "truncated", "status"}
    return result.model_dump(mode="json", include=fields)


def _object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **parameters}


def _contents(message: Message) -> list[dict[str, str]]:
    """Return a message as MCP content blocks: text, and images given as data URLs."""
    if not isinstance(message.content, list):
        return [{"type": "text", "text": message.content or ""}]
    blocks: list[dict[str, str]] = []
    for part in message.content:
        url = part["image_url"].get("url", "") if isinstance(part.get("image_url"), dict) else ""
        kind, _, data = url.removeprefix("data:").partition(";base64,")
        if url.startswith("data:image/") and _is_base64(data):
            blocks.append({"type": "image", "data": data, "mimeType": kind})
        else:
            blocks.append({"type": "text", "text": str(part.get("text", json.dumps(part)))})
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
    """Return the JSON-RPC request if a body opens a connection, otherwise None."""
    try:
        call = from_json(body)
    except ValueError:
        return None
    return call if isinstance(call, dict) and call.get("method") == "initialize" else None


def _choice(query: QueryParams, headers: Headers) -> dict[str, Any]:
    """Return the fields that choose the problem. Raises InvalidRequest for an unknown query parameter."""
    unknown = sorted(set(query) - set(CHOICE))
    if unknown:
        raise InvalidRequest(f"unknown query parameter {echo(unknown[0])}; known: {', '.join(CHOICE)}")
    shown = {field: query.get(field, headers.get(f"{HEADER}{field.replace('_', '-')}")) for field in CHOICE}
    return {
        field: value if field == "split" else _value(value)
        for field, value in shown.items()
        if value is not None
    }


def _value(text: str) -> Any:
    """Parse a text as JSON, or return it unchanged: an index can be ``3`` or ``easy-3``."""
    try:
        return from_json(text)
    except ValueError:
        return text


def _error(error: WireError) -> dict[str, Any]:
    code = INVALID_PARAMS if error.status in (404, 422) else SERVER_ERROR
    return {"code": code, "message": error.message, "data": error.wire()["error"]}


def _refusal(reason: str, status: int) -> JSONResponse:
    error = {"code": INVALID_REQUEST, "message": reason}
    return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that replays a body."""
    unread = True

    async def again() -> AsgiMessage:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again
