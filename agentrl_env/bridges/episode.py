"""One session of the native protocol that a connection of another protocol plays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from agentrl_env.errors import EnvironmentFailed, Forbidden, UnknownTask, WireError
from agentrl_env.server.api import Api, read, validate
from agentrl_env.server.auth import caller
from agentrl_env.types import (
    FunctionCall,
    FunctionSpec,
    Message,
    SessionInfo,
    SessionStatus,
    StepResult,
    TaskInfo,
    ToolCall,
    ToolSpec,
)
from agentrl_env.wire import (
    CLOSE,
    EMPTY,
    INFO,
    OPEN,
    STEP,
    TASKS,
    OpenRequest,
    SessionRequest,
    StepRequest,
    TaskList,
)

CHOICE = ("split", "index", "seed", "sample", "wait_s")
"""Fields of ``OpenRequest`` that choose the problem of a connection."""
RESPOND = ToolSpec(
    function=FunctionSpec(
        name="respond",
        description="Answer with text, without calling another tool.",
        parameters={
            "type": "object",
            "properties": {"text": {"type": "string", "description": "The answer."}},
            "required": ["text"],
            "additionalProperties": False,
        },
    )
)
"""Tool for assistant messages without a tool call, because other protocols support only tool calls."""


async def own_session(api: Api) -> SessionInfo | None:
    """Return the session of the caller's agent token, or None for the operator. Raises WireError."""
    who = caller.get()
    if who.session_id is None:
        return None
    answer = await api.answer(INFO, SessionRequest(session_id=who.session_id), who)
    return SessionInfo.model_validate_json(answer)


async def task_info(api: Api, task: str) -> TaskInfo:
    """Return the description of a task. Raises UnknownTask, or Forbidden for an agent of another task."""
    own = await own_session(api)
    if own is None:
        served = read(TaskList, await api.answer(TASKS, EMPTY, caller.get()))
    elif own.task != task:
        raise Forbidden(f"this agent token belongs to a session of the task {own.task}")
    else:
        listed = await api.service.tasks(EMPTY)
        served = listed if isinstance(listed, TaskList) else read(TaskList, listed)
    for info in served.tasks:
        if info.name == task:
            return info
    names = ", ".join(info.name for info in served.tasks) or "none"
    raise UnknownTask(f"no task {task!r} here; tasks: {names}")


def offered_tools(task: TaskInfo, tools: tuple[ToolSpec, ...]) -> tuple[ToolSpec, ...]:
    """Return the tools of a session, including ``respond`` if the task answers messages without a call."""
    named = {tool.function.name for tool in tools}
    missing = "respond" in task.capabilities and RESPOND.function.name not in named
    return (*tools, RESPOND) if missing else tools


class Episode:
    """A session with the number of its next step. Its calls are authorized, limited and counted by ``Api``.

    Args:
        api: answers the calls, as the caller of the running task.
        info: the session.
        tools: the tools that the connection offers.
    """

    def __init__(self, api: Api, info: SessionInfo, tools: tuple[ToolSpec, ...]) -> None:
        self.info = info
        self.tools = tools
        self.status = info.status
        self.turn: int | None = info.turn
        """Number of steps taken. None if the last answer was lost."""
        self._api = api
        self._calls = 0
        self._playing = asyncio.Lock()

    @classmethod
    async def open(cls, api: Api, task: str, choice: Mapping[str, Any]) -> Episode:
        """Open a session. With an agent token, continue the session of the token.

        Args:
            api: answers the calls.
            task: name of the task.
            choice: fields of ``CHOICE``.

        Raises WireError.
        """
        described = await task_info(api, task)
        own = await own_session(api)
        if own is not None:
            if choice:
                raise Forbidden(
                    f"{next(iter(choice))}: the operator has already chosen the session of this agent token"
                )
            return cls(api, own, offered_tools(described, own.tools))
        request = validate(OpenRequest, {**choice, "task": task})
        info = SessionInfo.model_validate_json(await api.answer(OPEN, request, caller.get()))
        return cls(api, info, offered_tools(described, info.tools))

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.info.session_id

    async def call(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Call one tool as a separate turn. Raises WireError."""
        if name == RESPOND.function.name and RESPOND in self.tools:
            return await self.step(Message.assistant(str(arguments.get("text", ""))))
        self._calls += 1
        function = FunctionCall(name=name, arguments=json.dumps(arguments))
        return await self.step(Message.assistant(None, ToolCall(id=f"call_{self._calls}", function=function)))

    async def step(self, message: Message) -> StepResult:
        """Play one assistant message.

        Raises WireError. A failure of the environment raises EnvironmentFailed, because the reward is then
        meaningless.
        """
        async with self._playing:
            if self.turn is None:
                self.turn = await self._recorded_turn()
            seq, self.turn = self.turn + 1, None
            try:
                request = StepRequest(session_id=self.session_id, seq=seq, message=message)
                result = StepResult.model_validate_json(await self._api.answer(STEP, request, caller.get()))
            except asyncio.CancelledError:
                raise
            except Exception:
                self.turn = seq - 1
                raise
            self.turn, self.status = result.seq, result.status
        if result.status is SessionStatus.FAILED_ENVIRONMENT:
            reason = result.info.get("error", {}).get("message", "the environment failed")
            raise EnvironmentFailed(f"the episode has no reward: {reason}")
        return result

    async def close(self) -> None:
        """End the session. Idempotent. If the call is refused, the session ends with its lease."""
        with suppress(WireError):
            await self._api.answer(CLOSE, SessionRequest(session_id=self.session_id), caller.get())

    async def _recorded_turn(self) -> int:
        answer = await self._api.answer(INFO, SessionRequest(session_id=self.session_id), caller.get())
        return SessionInfo.model_validate_json(answer).turn
