"""AgentRL's protocol at ``/api``, for its evaluation client and trainer.

Every call is made through the ``Api`` of the native protocol, with its authorization, limits and counts. This
module adds integers as session ids and the number of each turn, which AgentRL's clients do not send.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from math import ceil
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl_env.bridges.episode import own_session
from agentrl_env.errors import (
    Forbidden,
    InvalidRequest,
    SeqConflict,
    UnknownSample,
    UnknownSession,
    UnknownTask,
    WireError,
)
from agentrl_env.schema import echo
from agentrl_env.server.api import Api, read, validate
from agentrl_env.server.auth import caller
from agentrl_env.server.embedded import unless_disconnected
from agentrl_env.server.middleware import AGENTRL_PATH
from agentrl_env.types import (
    FleetInfo,
    Message,
    SessionInfo,
    SessionStatus,
    SplitInfo,
    StepResult,
    TaskInfo,
    ToolCall,
)
from agentrl_env.wire import (
    CLOSE,
    DRAIN_SERVER,
    EMPTY,
    FLEET,
    MAX_WAIT_S,
    OPEN,
    STEP,
    TASKS,
    DrainRequest,
    FleetQuery,
    OpenRequest,
    SessionRequest,
    StepRequest,
    TaskList,
)

B = TypeVar("B", bound=BaseModel)

ENDLESS_INDICES = 1000
"""Number of indices listed for an endless split. Clients can also start any other index."""
MAX_SESSIONS = 65_536
"""Maximum number of remembered sessions. The least recently used sessions are forgotten first."""
CUSTOM = -1
"""Index of a custom task."""
KEEP_ALIVE_BURST, KEEP_ALIVE_S = 3, 60.0
"""Maximum number of consecutive empty turns that count as keep-alives, and the maximum pause between them.
AgentRL's client sends one every 180 s. More frequent empty turns come from a model and must count as turns.
"""
STATUS_KEY = "agentrl_status"
"""Key of ``StepResult.info`` with the status that an AgentRL task gave its session."""
_STATUSES = {
    SessionStatus.RUNNING: "running",
    SessionStatus.COMPLETED: "completed",
    SessionStatus.TRUNCATED_TURNS: "task limit reached",
    SessionStatus.TRUNCATED_TIME: "task limit reached",
    SessionStatus.FAILED_ENVIRONMENT: "task error",
}
"""AgentRL's name for each status. All other statuses become ``cancelled``."""
_KNOWN = {"completed", "agent validation failed", "agent invalid action", "task limit reached"}
"""Statuses that AgentRL's client accepts. The client fails on ``agent context limit``."""
_HTTP = {"environment_failed": 500, "internal_error": 500, "session_lost": 500}
_SAME_HTTP = {401, 403, 429, 501, 503}
"""HTTP statuses passed through unchanged. All other client errors become 400, as in AgentRL's protocol."""
_POSITIONS = {"", "0", "call_0"}
"""Ids that are only positions within a message, so they do not identify a call."""


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Start(_Body):
    name: str
    index: int | str = CUSTOM
    custom_task: dict[str, Any] | None = None
    seed: int | None = None
    """Seed of the episode, which AgentRL's own clients do not send."""


class _Interact(_Body):
    messages: list[Message] = Field(min_length=1)


class _Stale(_Body):
    name: str = ""
    worker_id: int
    stale: bool = True


class _Session:
    """A session of the native protocol that an AgentRL client plays.

    Args:
        info: the session.
        start: the request that opened it.
    """

    def __init__(self, info: SessionInfo, start: _Start) -> None:
        self.session_id = info.session_id
        self.integer = secrets.randbits(53)
        """Integer id of the session. It is random, so that a restart does not reuse it."""
        self.start = start
        self.opening = [message.wire() for message in info.messages]
        self.tools = [tool.model_dump() for tool in info.tools]
        self.began = self.called = time.time()
        self.ended = False
        self.reward = 0.0
        """Sum of the rewards so far."""
        self.seq = 0
        """Number of the last turn."""
        self.playing = 0
        """Number of requests that wait for the result of the last turn."""
        self.delivered = True
        """False if the caller disconnected before it received the result."""
        self.message: Message | None = None
        """Assistant message of the last turn."""
        self._rewarded = 0
        self._call_ids: set[str] = set()
        self._ids_identify = True
        """False if different messages have used the same tool call id."""
        self._empty = 0
        self._emptied = 0.0

    def started(self) -> dict[str, Any]:
        """Return the answer of ``start_sample``."""
        answer: dict[str, Any] = {"finish": False, "status": "running", "reward": self.reward, "metrics": {}}
        return {**answer, "messages": self.opening, "tools": self.tools or None}

    def is_keep_alive(self, message: Message) -> bool:
        """Return True if a message is empty and only keeps the session alive."""
        if message.content or message.tool_calls:
            self._empty = 0
            return False
        now = time.monotonic()
        self._empty = self._empty + 1 if now - self._emptied < KEEP_ALIVE_S else 1
        self._emptied = now
        if self._empty <= KEEP_ALIVE_BURST:
            return True
        self._empty = 0
        return False

    def number(self, message: Message) -> int:
        """Return the turn number of a message. A repeated message gets the number of the last turn.

        The protocol has neither turn numbers nor idempotency keys. A message counts as repeated if it equals
        the last message and one of these holds: the last message is still being played, its caller
        disconnected before the result, or the tool call ids are the same (models create new ids for each
        call).

        Raises InvalidRequest if another message is being played.
        """
        calls = [call.id for call in message.tool_calls or ()]
        if message == self.message:
            identified = bool(calls) and calls[0] not in _POSITIONS and self._ids_identify
            if self.playing or not self.delivered or identified:
                return self.seq
        if self.playing:
            raise InvalidRequest("the session is still processing another message; wait for its answer")
        return self.seq + 1

    def note_ids(self, message: Message) -> None:
        """Remember the tool call ids of a played turn."""
        ids = {call.id for call in message.tool_calls or ()}
        self._ids_identify = self._ids_identify and not ids & self._call_ids
        self._call_ids |= ids

    def earn(self, result: StepResult) -> None:
        """Add the reward of a turn, once."""
        if result.seq > self._rewarded:
            self._rewarded = result.seq
            self.reward += result.reward
            self.ended = result.final


class AgentRLBridge:
    """Answers AgentRL's calls for one application.

    Args:
        api: the calls of the native protocol.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        self._workers: dict[str, int] = {}
        """Numbers of the servers, by id."""
        self._numbers = itertools.count(1)

    async def get_indices(self, request: Request) -> object:
        """Return the indices of a task: sample names or numbers."""
        task, split = await self._task(request.query_params.get("name", ""))
        return _indices(task.splits[split])

    async def start_sample(self, request: Request) -> Response:
        """Open a session, or start an agent token's session. Wait for room if the server is full."""
        start = await self._read(_Start, request)
        own = await own_session(self._api)
        if own is not None:
            begun = _begun(own, start)
            known = (one for one in self._sessions.values() if one.session_id == begun.session_id)
            return await self._register(next(known, None) or _Session(begun, start))
        task, split = await self._task(start.name)
        choice = _choice(start, task.splits[split])
        fields = {"task": task.name, "split": split, "wait_s": MAX_WAIT_S, **choice}
        opening = validate(OpenRequest, fields)
        opened = await unless_disconnected(request, self._api.answer(OPEN, opening, caller.get()))
        return await self._register(_Session(SessionInfo.model_validate_json(opened), start))

    async def interact(self, request: Request) -> object:
        """Play the assistant messages of one turn."""
        session = self._session(request)
        message = _join((await self._read(_Interact, request)).messages)
        if session.is_keep_alive(message):
            return await self._keep_alive(session)
        answer = await self._turn(session, message)
        session.delivered = not await request.is_disconnected()
        return answer

    async def cancel(self, request: Request) -> None:
        """End a session."""
        await self._cancel(self._session(request))

    async def cancel_all(self, request: Request) -> None:
        """End the sessions of a task, or of all tasks with ``force=true``."""
        name = request.query_params.get("name")
        everything = name is None and request.query_params.get("force") != "true"
        if everything and len((await self._tasks()).tasks) > 1:
            raise Forbidden("this server has several tasks: give name=TASK or force=true")
        for session in list(self._sessions.values()):
            if not session.ended and name in (None, session.start.name):
                await self._cancel(session)

    async def list_workers(self, request: Request) -> object:
        """Return the servers by task."""
        fleet = FleetInfo.model_validate_json(await self._api.answer(FLEET, FleetQuery(), caller.get()))
        listed: dict[str, Any] = {}
        for task in (await self._tasks()).tasks:
            servers = [server for server in fleet.servers if task.name in server.tasks]
            indices = [_indices(split) for split in task.splits.values()]
            listed[task.name] = {
                "indices": indices[0] if indices else [],
                "workers": {
                    str(self._worker(server.server_id)): {
                        "id": self._worker(server.server_id),
                        "address": server.place,
                        "capacity": server.capacity,
                        "current": server.open,
                        "last_visit": _utc(time.time() - server.heard_s),
                        "status": "ALIVE",
                        "stale": server.stale or server.draining,
                        "locked": False,
                    }
                    for server in servers
                },
            }
        return listed

    async def list_sessions(self, request: Request) -> object:
        """Return the running sessions opened through this protocol."""
        return {
            str(session_id): {
                "name": session.start.name,
                "index": session.start.index,
                "custom_task": session.start.custom_task,
                "start": _utc(session.began),
                "last_update": _utc(session.called),
                "worker_id": self._worker(session.session_id.partition(".")[0]),
                "locked": bool(session.playing),
                "cancelling": False,
            }
            for session_id, session in self._sessions.items()
            if not session.ended
        }

    async def mark_stale(self, request: Request) -> None:
        """Stop or resume opening new sessions on a server."""
        body = await self._read(_Stale, request)
        fleet = FleetInfo.model_validate_json(await self._api.answer(FLEET, FleetQuery(), caller.get()))
        ids = [one.server_id for one in fleet.servers if self._worker(one.server_id) == body.worker_id]
        if not ids:
            raise InvalidRequest(f"no worker {body.worker_id}; list_workers lists the workers")
        drain = DrainRequest(server_id=ids[0], draining=body.stale)
        await self._api.answer(DRAIN_SERVER, drain, caller.get())

    async def clean(self, request: Request) -> None:
        """Do nothing, because servers and sessions are removed as soon as they end."""

    async def version(self, request: Request) -> object:
        """Return the protocol version in the field that AgentRL's dashboard expects."""
        return {"variant": "nova", "version": 1}

    async def _register(self, session: _Session) -> Response:
        """Remember a session and return its opening."""
        self._sessions[session.integer] = session
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        answer = session.started()
        if not session.opening:  # the task ended immediately, so there are no messages
            answer = await self._turn(session, Message.assistant(""))
        return _json(answer, headers={"session_id": str(session.integer)})

    async def _turn(self, session: _Session, message: Message) -> dict[str, Any]:
        """Play a message as the next turn, or return the last answer if the message is repeated."""
        seq = session.number(message)
        before = session.seq, session.message, session.delivered
        session.seq, session.message, session.delivered = seq, message, False
        session.playing += 1
        try:
            answer = await self._play(session, message, seq)
        except WireError:
            if session.playing == 1:  # the client can repeat the message or send another one
                session.seq, session.message, session.delivered = before
            raise
        finally:
            session.playing -= 1
        if seq > before[0]:
            session.note_ids(message)
        return answer

    async def _play(self, session: _Session, message: Message, seq: int) -> dict[str, Any]:
        step = StepRequest(session_id=session.session_id, seq=seq, message=message)
        result = StepResult.model_validate_json(await self._api.answer(STEP, step, caller.get()))
        session.earn(result)
        return self._answer(session, result)

    async def _keep_alive(self, session: _Session) -> dict[str, Any]:
        """Renew the lease of a session. Return the last messages, because an empty answer is invalid."""
        if session.message is not None:
            return await self._play(session, session.message, session.seq)
        with suppress(SeqConflict):  # every step renews the lease, even a step with a gap in its number
            await self._play(session, Message.assistant(""), 2)
        return session.started()

    def _answer(self, session: _Session, result: StepResult) -> dict[str, Any]:
        """Return a result in the form of AgentRL's protocol. A failed environment has no reward."""
        failed = result.status is SessionStatus.FAILED_ENVIRONMENT
        metrics: dict[str, Any] = dict(result.metrics)
        if result.final and not failed:
            metrics.setdefault("score", metrics.get("success", session.reward))
        status = result.info.get(STATUS_KEY)
        return {
            "finish": result.final,
            "status": status if status in _KNOWN else _STATUSES.get(result.status, "cancelled"),
            "reward": None if failed else session.reward,
            "messages": [message.wire() for message in result.messages],
            "metrics": metrics,
            "tools": session.tools or None,
            "result": dict(result.info) or None,
        }

    async def _cancel(self, session: _Session) -> None:
        await self._api.answer(CLOSE, SessionRequest(session_id=session.session_id), caller.get())
        session.ended = True

    async def _tasks(self) -> TaskList:
        return TaskList.model_validate_json(await self._api.answer(TASKS, EMPTY, caller.get()))

    async def _task(self, name: str) -> tuple[TaskInfo, str]:
        """Return the task and split of a name ``TASK`` or ``TASK-SPLIT``. Raises UnknownTask."""
        tasks = {task.name: task for task in (await self._tasks()).tasks}
        if name in tasks:
            splits = tasks[name].splits
            return tasks[name], "train" if "train" in splits else next(iter(splits))
        named = {f"{task.name}-{split}": (task, split) for task in tasks.values() for split in task.splits}
        if name not in named:
            raise UnknownTask(f"no task {echo(name)} here; tasks: {', '.join(tasks)}, or one with -SPLIT")
        return named[name]

    def _session(self, request: Request) -> _Session:
        """Return the session named in a request's header. Raises UnknownSession."""
        text = request.headers.get("session_id", "")
        session_id = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
        session = self._sessions.get(session_id)
        own = caller.get().session_id
        if session is None or own not in (None, session.session_id):
            raise UnknownSession(f"no session {echo(text)}; give the session_id header of start_sample")
        self._sessions.move_to_end(session_id)
        session.called = time.time()
        return session

    def _worker(self, server_id: str) -> int:
        if server_id not in self._workers:
            self._workers[server_id] = next(self._numbers)
        return self._workers[server_id]

    async def _read(self, model: type[B], request: Request) -> B:
        body = await request.body()
        self._api.check_values(body, caller.get())
        return read(model, body)


def mount(app: FastAPI, api: Api) -> None:
    """Add the routes of AgentRL's protocol to an application."""
    bridge = AgentRLBridge(api)
    calls: dict[str, tuple[str, Callable[[Request], Awaitable[object]]]] = {
        "get_indices": ("GET", bridge.get_indices),
        "start_sample": ("POST", bridge.start_sample),
        "interact": ("POST", bridge.interact),
        "cancel": ("POST", bridge.cancel),
        "cancel_all": ("POST", bridge.cancel_all),
        "list_workers": ("GET", bridge.list_workers),
        "list_sessions": ("GET", bridge.list_sessions),
        "mark_stale": ("POST", bridge.mark_stale),
        "clean_worker": ("POST", bridge.clean),
        "clean_session": ("POST", bridge.clean),
        "sync_all": ("POST", bridge.clean),
        "version": ("GET", bridge.version),
    }
    for name, (method, call) in calls.items():
        app.router.routes.append(Route(f"{AGENTRL_PATH}{name}", endpoint_of(api, call), methods=[method]))


def endpoint_of(
    api: Api, call: Callable[[Request], Awaitable[object]]
) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of a call of AgentRL's protocol, including its error answers."""

    async def endpoint(request: Request) -> Response:
        try:
            answer = await call(request)
        except WireError as error:
            api.count(error)
            status = _HTTP.get(error.type, error.status if error.status in _SAME_HTTP else 400)
            wait = error.details.get("retry_after")
            headers = {} if wait is None else {"retry-after": str(ceil(wait))}
            return _json({"message": error.message, "type": error.type}, status, headers)
        except ClientDisconnect:
            return Response(status_code=400)  # the client has disconnected
        return answer if isinstance(answer, Response) else _json(answer)

    return endpoint


def _json(answer: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(answer), status, headers=headers, media_type="application/json")


def _indices(split: SplitInfo) -> list[int | str]:
    """Return the indices of a split. Numeric names become integers, as AgentRL's protocol expects."""
    if split.ids is not None:
        return [int(name) if _is_number(name) else name for name in split.ids]
    return list(range(ENDLESS_INDICES if split.num_samples is None else split.num_samples))


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name


def _choice(start: _Start, split: SplitInfo) -> dict[str, Any]:
    """Return the fields of an open request that select the sample. Raises UnknownSample."""
    index: int | str | None = start.index
    sample = None
    if start.index == CUSTOM:
        if start.custom_task is None:
            raise UnknownSample("index -1 selects a custom task: give custom_task")
        sample = {key: value for key, value in start.custom_task.items() if key != "index"}
        index = start.custom_task.get("index")
        if not isinstance(index, int | str | None):
            raise InvalidRequest("custom_task.index: give a number or a text")
        if not sample and index is not None:
            sample = None  # a sample of the dataset
    if isinstance(index, int) and split.ids is not None and str(index) in split.ids:
        index = str(index)
    return {"index": index, "sample": sample, "seed": start.seed}


def _begun(own: SessionInfo, start: _Start) -> SessionInfo:
    """Return the session of an agent token if ``start`` can start it. Raises Forbidden."""
    if start.name not in (own.task, f"{own.task}-{own.sample.split}"):
        raise Forbidden(f"this agent token belongs to a session of the task {own.task}")
    if start.index not in (CUSTOM, own.sample.index) or start.custom_task or start.seed is not None:
        raise Forbidden("the operator has chosen the session of this agent token; omit index or set it to -1")
    if own.turn:
        raise Forbidden("the only session of this agent token has begun; start_sample cannot start another")
    return own


def _join(messages: list[Message]) -> Message:
    """Join the messages of one turn. Raises InvalidRequest if a message is not from the assistant."""
    if any(message.role != "assistant" for message in messages):
        raise InvalidRequest("messages: a turn can contain only assistant messages")
    if len(messages) == 1:
        return messages[0]
    calls: list[ToolCall] = [call for message in messages for call in message.tool_calls or ()]
    contents = [message.content for message in messages if message.content]
    if all(isinstance(content, str) for content in contents):
        return Message.assistant("\n".join(map(str, contents)) or None, *calls)
    parts: list[dict[str, Any]] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return Message(role="assistant", content=parts, tool_calls=tuple(calls) or None)


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
