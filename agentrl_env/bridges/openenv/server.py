"""A task as an OpenEnv server at ``/openenv/TASK``, for the clients of ``openenv`` 0.10.

A WebSocket ``/openenv/TASK/ws`` plays one episode after another. ``reset`` opens a session with its keyword
arguments, and closing the socket closes the session. ``POST /openenv/TASK/mcp`` keeps the sessions of
``MCPToolClient``, to which a socket attaches with ``?session_id=``.

An action is ``{"type": "call_tool", "tool_name", "arguments"}``, ``{"type": "list_tools"}``, or
``{"message": {...}}`` with a whole assistant message in OpenAI format.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from typing import Any

from fastapi import FastAPI
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentrl_env.bridges.episode import CHOICE, Episode, offered_tools, task_info
from agentrl_env.errors import (
    Forbidden,
    InternalError,
    InvalidRequest,
    NotSupported,
    ServerDraining,
    ServerFull,
    UnknownSample,
    UnknownSession,
    WireError,
)
from agentrl_env.schema import echo
from agentrl_env.server.api import Api, validate
from agentrl_env.server.auth import caller
from agentrl_env.session.pool import VERSION
from agentrl_env.types import Message, StepResult, ToolSpec

logger = logging.getLogger("agentrl_env")

MAX_SESSIONS = 10_000
"""Maximum number of sessions of ``POST /mcp``. The least recently used session is closed first."""
STATELESS = (
    "OpenEnv's HTTP reset and step make a new environment for each request, which no episode survives; use "
    "its WebSocket clients: GenericEnvClient or MCPToolClient"
)
ACTION = {
    "title": "CallToolAction",
    "type": "object",
    "properties": {
        "type": {"const": "call_tool", "default": "call_tool", "type": "string"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object", "additionalProperties": True},
    },
    "required": ["tool_name"],
}
"""Schema of actions. Clients recognize an environment with tools by the title."""
OBSERVATION = {
    "title": "CallToolObservation",
    "type": "object",
    "properties": {
        "tool_name": {"type": "string"},
        "result": {},
        "error": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "messages": {"type": "array", "items": {"type": "object"}},
    },
}
STATE = {
    "title": "State",
    "type": "object",
    "properties": {
        "episode_id": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "step_count": {"type": "integer"},
        "status": {"type": "string"},
    },
}


def mount(app: FastAPI, api: Api) -> None:
    """Add the routes of all tasks of ``api``."""
    facade = OpenEnvFacade(api)
    root = "/openenv/{task}"
    stateless = [Route(f"{root}/{name}", facade.stateless, methods=["POST"]) for name in ("reset", "step")]
    app.router.routes += [
        WebSocketRoute(f"{root}/ws", facade.socket),
        Route(f"{root}/mcp", facade.mcp, methods=["POST"]),
        Route(f"{root}/health", facade.health),
        Route(f"{root}/metadata", facade.metadata),
        Route(f"{root}/schema", facade.schema),
        Route(f"{root}/state", facade.stateless),
        *stateless,
        Route(f"{root}/list_environments", facade.list_environments),
        Route(f"{root}/{{name}}/splits", facade.splits),
        Route(f"{root}/{{name}}/num_tasks", facade.num_tasks, methods=["POST"]),
        Route(f"{root}/{{name}}/task", facade.task, methods=["POST"]),
    ]


class OpenEnvFacade:
    """The endpoints of one server.

    Args:
        api: answers the calls of the sessions.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._players: OrderedDict[str, Player] = OrderedDict()
        """Players of ``POST /mcp`` by session id."""

    async def health(self, request: Request) -> Response:
        """Report that the server is healthy."""
        await self._info(request)
        return JSONResponse({"status": "healthy"})

    async def metadata(self, request: Request) -> Response:
        """Return the name and description of the task."""
        info = await self._info(request)
        return JSONResponse({"name": info.name, "description": info.description, "version": VERSION})

    async def schema(self, request: Request) -> Response:
        """Return the schemas of actions, observations and states."""
        await self._info(request)
        return JSONResponse({"action": ACTION, "observation": OBSERVATION, "state": STATE})

    async def stateless(self, request: Request) -> Response:
        """Raise NotSupported."""
        raise NotSupported(STATELESS)

    async def list_environments(self, request: Request) -> Response:
        """Return the task's name."""
        return JSONResponse([(await self._info(request)).name])

    async def splits(self, request: Request) -> Response:
        """Return the splits of the task."""
        names = (await self._info(request)).splits
        return JSONResponse([{"name": name, "type": _kind(name)} for name in names])

    async def num_tasks(self, request: Request) -> Response:
        """Return the number of samples of a split. Raises NotSupported if it is endless."""
        _, number = await self._split(request)
        if number is None:
            raise NotSupported("this split is endless; call reset with any index or seed")
        return JSONResponse({"num_tasks": number})

    async def task(self, request: Request) -> Response:
        """Return the arguments of ``reset`` for a sample. Raises UnknownSample."""
        split, number = await self._split(request)
        index = _object(await request.body()).get("index")
        if not isinstance(index, int) or index < 0 or (number is not None and index >= number):
            raise UnknownSample(f"split {split!r} has no index {echo(index)}")
        return JSONResponse({"task": {"split": split, "index": index}})

    async def socket(self, websocket: WebSocket) -> None:
        """Play the episodes of one WebSocket."""
        task = websocket.path_params["task"]
        await websocket.accept()
        kept = websocket.query_params.get("session_id")
        player = Player(self._api, task)
        try:
            await task_info(self._api, task)
            if kept is not None:
                player = self._player(kept, task)
        except WireError as error:
            await websocket.send_text(_frame("error", {"message": error.message, "code": "SESSION_ERROR"}))
            await websocket.close()
            return
        try:
            while True:
                text = await websocket.receive_text()
                answer = await self._answer_frame(player, text)
                if answer is None:
                    await websocket.close()
                    return
                await websocket.send_text(answer)
        except (WebSocketDisconnect, KeyError):  # a binary frame has no text
            return
        finally:
            if kept is None:
                await player.close()

    async def mcp(self, request: Request) -> Response:
        """Answer a JSON-RPC request, always with status 200."""
        body = await request.body()
        self._api.check_values(body, caller.get())
        return JSONResponse(await self._rpc(_json(body), request.path_params["task"]))

    async def _answer_frame(self, player: Player, text: str) -> str | None:
        """Return the answer to a frame, or None if the frame ends the socket."""
        try:
            async with self._api.receiving(text, caller.get()):
                return await self._answer(player, _json(text.encode()))
        except WireError as error:
            self._api.count(error)
            return _frame("error", {"message": error.message, "code": _code(error), "type": error.type})
        except Exception as error:
            logger.exception("a bug in the server")
            bug = InternalError(f"a bug in the server: {type(error).__name__}")
            return _frame("error", {"message": bug.message, "code": _code(bug)})

    async def _answer(self, player: Player, frame: Any) -> str | None:
        if not isinstance(frame, dict):
            return _frame("error", {"message": "a frame is a JSON object", "code": "INVALID_JSON"})
        kind, data = frame.get("type"), frame.get("data") or {}
        if kind == "close":
            return None
        if not isinstance(data, dict):
            raise InvalidRequest("data: must be an object")
        if kind == "reset":
            return _frame("observation", await player.reset(data))
        if kind == "step":
            return _frame("observation", await player.step(data))
        if kind == "state":
            return _frame("state", player.state())
        if kind == "mcp":
            return _frame("mcp", await self._rpc(data, player.task, player))
        return _frame("error", {"message": f"unknown type {echo(kind)}", "code": "UNKNOWN_TYPE"})

    async def _rpc(self, call: Any, task: str, player: Player | None = None) -> dict[str, Any]:
        if not isinstance(call, dict) or not isinstance(call.get("params", {}), dict):
            return _rpc_answer(None, error={"code": -32600, "message": "not a JSON-RPC request"})
        try:
            result = await self._rpc_result(call.get("method"), call.get("params") or {}, task, player)
        except UnknownSession as error:
            return _rpc_answer(call, error={"code": -32602, "message": error.message})
        except WireError as error:
            self._api.count(error)
            code = -32000 if isinstance(error, ServerFull | ServerDraining) else -32603
            return _rpc_answer(call, error={"code": code, "message": error.message})
        if result is None:
            message = f"Method not found: {echo(call.get('method'))}"
            return _rpc_answer(call, error={"code": -32601, "message": message})
        return _rpc_answer(call, result=result)

    async def _rpc_result(
        self, method: object, params: dict[str, Any], task: str, player: Player | None
    ) -> dict[str, Any] | None:
        if method == "tools/list":
            info = await task_info(self._api, task)
            return {"tools": _tools(offered_tools(info, info.tools), "inputSchema")}
        if method == "openenv/session/create":
            created = Player(self._api, task)
            session_id = created.agent or secrets.token_urlsafe(24)
            await created.begun()
            self._players[session_id] = created
            if len(self._players) > MAX_SESSIONS:
                _, oldest = self._players.popitem(last=False)
                await oldest.close()
            return {"session_id": session_id}
        if method == "openenv/session/close":
            session_id = str(params.get("session_id"))
            await self._player(session_id, task).close()
            self._players.pop(session_id, None)
            return {"session_id": session_id, "closed": True}
        if method == "tools/call":
            if player is None:
                if "session_id" not in params:
                    raise InvalidRequest("session_id: missing; create one with openenv/session/create")
                player = self._player(str(params["session_id"]), task)
            observation = await player.call(str(params.get("name")), _arguments(params.get("arguments")))
            return {**observation["observation"]["result"], "reward": observation["reward"]}
        return None

    def _player(self, session_id: str, task: str) -> Player:
        player = self._players.get(session_id)
        if player is None or player.task != task or player.agent != caller.get().session_id:
            raise UnknownSession("no such session; it was closed, or belongs to another process")
        self._players.move_to_end(session_id)
        return player

    async def _info(self, request: Request) -> Any:
        return await task_info(self._api, request.path_params["task"])

    async def _split(self, request: Request) -> tuple[str, int | None]:
        splits = (await self._info(request)).splits
        split = str(_object(await request.body()).get("split"))
        if split not in splits:
            raise UnknownSample(f"there is no split {echo(split)}; splits: {', '.join(splits)}")
        return split, splits[split].num_samples


class Player:
    """Plays the episodes of one OpenEnv client, one after another.

    Args:
        api: answers the calls.
        task: name of the task.
    """

    def __init__(self, api: Api, task: str) -> None:
        self.task = task
        self.agent = caller.get().session_id
        """Session of the player's agent token. None for the operator token."""
        self._api = api
        self._episode: Episode | None = None
        self._episode_id: str | None = None

    async def reset(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Start an episode and return its opening. Raises WireError."""
        given = {name: value for name, value in choice.items() if value is not None}
        episode_id = given.pop("episode_id", None)
        unknown = sorted(set(given) - set(CHOICE))
        if unknown:
            raise InvalidRequest(f"{unknown[0]}: reset takes {', '.join(CHOICE)}, episode_id")
        await self.close()
        self._episode = await Episode.open(self._api, self.task, given)
        self._episode_id = episode_id or self._episode.session_id
        info = self._episode.info
        if info.turn:
            raise Forbidden("the only session of this agent token has begun; continue with step")
        metadata = {"session_id": info.session_id, "split": info.sample.split, "index": info.sample.index}
        if self.agent is None:
            metadata["seed"] = info.sample.seed
        return _observation({"messages": [one.wire() for one in info.messages]}, 0.0, False, metadata)

    async def begun(self) -> Episode:
        """Return the episode, and start it on the first call. Raises WireError."""
        if self._episode is None:
            self._episode = await Episode.open(self._api, self.task, {})
            self._episode_id = self._episode.session_id
        return self._episode

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Play one action. Raises WireError."""
        if "message" in action:
            message = validate(Message, action["message"])
            return _step_observation(await (await self.begun()).step(message), {})
        if action.get("type") == "list_tools":
            info = await task_info(self._api, self.task)
            tools = _tools(offered_tools(info, info.tools), "input_schema")
            return _observation({"tools": tools}, None, False, {})
        if not isinstance(action.get("tool_name"), str):
            raise InvalidRequest("an action needs tool_name and arguments, or message")
        return await self.call(action["tool_name"], _arguments(action.get("arguments")))

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call one tool. Raises WireError."""
        result = await (await self.begun()).call(name, arguments)
        text = "\n".join(str(one.content) for one in result.messages if one.content)
        invalid = bool(result.metrics.get("invalid_calls"))
        answer = {
            "content": [{"type": "text", "text": text}],
            "structured_content": {"result": text},
            "data": text,
            "is_error": invalid,
            "meta": None,
        }
        return _step_observation(result, {"tool_name": name, "result": answer, "error": None})

    def state(self) -> dict[str, Any]:
        """Return the state of the episode."""
        episode = self._episode
        if episode is None:
            return {"episode_id": None, "step_count": 0}
        return {"episode_id": self._episode_id, "step_count": episode.turn or 0, "status": episode.status}

    async def close(self) -> None:
        """End the episode. Idempotent."""
        episode, self._episode = self._episode, None
        if episode is not None:
            await episode.close()


def _step_observation(result: StepResult, fields: dict[str, Any]) -> dict[str, Any]:
    outcome = result.model_dump(mode="json", include={"terminated", "truncated", "status", "metrics", "info"})
    messages = [message.wire() for message in result.messages]
    return _observation({**fields, "messages": messages}, result.reward, result.done, outcome)


def _observation(
    fields: dict[str, Any], reward: float | None, done: bool, metadata: dict[str, Any]
) -> dict[str, Any]:
    inner = {**fields, "metadata": metadata}
    return {"observation": inner, "reward": reward, "done": done, "metadata": metadata}


def _tools(tools: tuple[ToolSpec, ...], schema: str) -> list[dict[str, Any]]:
    functions = [tool.function for tool in tools]
    return [
        {"name": one.name, "description": one.description, schema: {"type": "object", **one.parameters}}
        for one in functions
    ]


def _arguments(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest("arguments: must be an object")
    return value


def _code(error: WireError) -> str:
    if isinstance(error, ServerFull | ServerDraining):
        return "CAPACITY_REACHED"
    return "VALIDATION_ERROR" if isinstance(error, InvalidRequest) else "EXECUTION_ERROR"


def _kind(split: str) -> str:
    known = ("train", "validation", "test")
    return next((name for name in known if split.startswith(name)), "train")


def _frame(kind: str, data: object) -> str:
    return to_json({"type": kind, "data": data}).decode()


def _rpc_answer(call: dict[str, Any] | None, **outcome: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": call.get("id") if call else None, **outcome}


def _json(body: bytes) -> Any:
    try:
        return from_json(body)
    except ValueError:
        return None


def _object(body: bytes) -> dict[str, Any]:
    value = _json(body)
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value
