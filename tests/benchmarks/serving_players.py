"""Who steps the sessions: our client, our batch call, OpenEnv's WebSockets, and the ceiling.

Each plays a number of turns in all its sessions and returns the seconds that every single step took. Only
our client builds and reads whole messages. The others send bytes made beforehand and look at the answers
just closely enough to see that they are no errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Protocol, TypeVar

from pydantic_core import to_json
from websockets.asyncio.client import ClientConnection, connect

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.client.client import ClientSession
from agentrl_env.client.transport import Http1Transport

TEXT = "What you hear is what was said. "
MESSAGE = Message.assistant(None, ToolCall.of("echo", text=TEXT))
T = TypeVar("T")
DEADLINE_S = 60.0
OPENING_AT_ONCE = 64


class Player(Protocol):
    """Steps the sessions of one server."""

    pid: int
    """The server's process."""

    async def open(self, sessions: int) -> None:
        """Open sessions."""

    async def play(self, turns: int) -> list[float]:
        """Step every session so many times; return each step's seconds."""

    async def close(self) -> None:
        """Close the sessions."""


async def play_each(step: list[Callable[[], Awaitable[None]]], turns: int) -> list[float]:
    """Step sessions independently of one another, each its next turn when it has its answer."""
    seconds: list[float] = []

    async def play(once: Callable[[], Awaitable[None]]) -> None:
        for _ in range(turns):
            begin = perf_counter()
            await once()
            seconds.append(perf_counter() - begin)

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        for once in step:
            group.create_task(play(once))
    return seconds


async def some_at_once(work: Callable[[], Awaitable[T]], times: int) -> list[T]:
    """Do something many times, not all at once."""
    slots = asyncio.Semaphore(OPENING_AT_ONCE)

    async def one() -> T:
        async with slots:
            return await work()

    return await asyncio.gather(*(one() for _ in range(times)))


class Client:
    """Our client, one coroutine a session; it gathers the steps of a moment in requests by itself."""

    def __init__(self, url: str, pid: int, *, task: str) -> None:
        self.pid = pid
        self._url, self._task = url, task

    async def open(self, sessions: int) -> None:
        self._client = EnvClient.connect(self._url)
        self._sessions = await some_at_once(lambda: self._client.open(self._task), sessions)

    async def play(self, turns: int) -> list[float]:
        return await play_each([self._step(session) for session in self._sessions], turns)

    async def close(self) -> None:
        async with self._client:
            await asyncio.gather(*(session.close() for session in self._sessions))

    def _step(self, session: ClientSession) -> Callable[[], Awaitable[None]]:
        async def step() -> None:
            result = await session.step(MESSAGE)
            assert result.messages[0].content == TEXT, result

        return step


class Batch:
    """Our batch call: one request steps all sessions, and the next follows its answer."""

    def __init__(self, url: str, pid: int, *, task: str) -> None:
        self.pid = pid
        self._url, self._task = url, task
        self.answer = b""

    async def open(self, sessions: int) -> None:
        self._client = EnvClient.connect(self._url)
        self._sessions = await some_at_once(lambda: self._client.open(self._task), sessions)
        self.parts = [
            (b'{"session_id":%b,"seq":' % to_json(session.session_id), b',"message":%b}' % to_json(MESSAGE))
            for session in self._sessions
        ]
        self._connect(self._url)

    async def play(self, turns: int) -> list[float]:
        seconds: list[float] = []
        for _ in range(turns):
            begin = perf_counter()
            self._turn += 1
            number = b"%d" % self._turn
            steps = b",".join(head + number + tail for head, tail in self.parts)
            body = b'{"steps":[%b]}' % steps
            response = await self._transport.request("POST", "/v1/step", body, timeout=DEADLINE_S)
            assert response.body.count(b'"status":"running"') == len(self.parts), response.body[:500]
            seconds += [perf_counter() - begin] * len(self.parts)
        self.answer = response.body
        return seconds

    async def close(self) -> None:
        await self._transport.aclose()
        async with self._client:
            await asyncio.gather(*(session.close() for session in self._sessions))

    def _connect(self, url: str) -> None:
        self._turn = 0
        self._transport = Http1Transport(url, headers={}, max_connections=1)


class Ceiling(Batch):
    """The batch call's bytes, both ways, against an application that looks at none of them."""

    def __init__(self, url: str, pid: int, *, like: Batch) -> None:
        super().__init__(url, pid, task="")
        self._like = like

    async def open(self, sessions: int) -> None:
        self._connect(self._url)
        self.parts = self._like.parts
        await self._transport.request("PUT", "/answer", self._like.answer, timeout=DEADLINE_S)

    async def close(self) -> None:
        await self._transport.aclose()


class OpenEnv:
    """One WebSocket a session, without compression, driven with bare JSON."""

    def __init__(self, url: str, pid: int) -> None:
        self.pid = pid
        self._url = url.replace("http", "ws", 1) + "/ws"
        self._message = to_json({"type": "step", "data": {"text": TEXT}}).decode()

    async def open(self, sessions: int) -> None:
        self._sockets = await some_at_once(self._open_one, sessions)

    async def play(self, turns: int) -> list[float]:
        return await play_each([self._step(socket) for socket in self._sockets], turns)

    async def close(self) -> None:
        await asyncio.gather(*(socket.close() for socket in self._sockets))

    async def _open_one(self) -> ClientConnection:
        socket = await connect(self._url, compression=None, proxy=None, open_timeout=DEADLINE_S)
        await socket.send('{"type":"reset","data":{}}')
        _refuse_error(await socket.recv())
        return socket

    def _step(self, socket: ClientConnection) -> Callable[[], Awaitable[None]]:
        async def step() -> None:
            await socket.send(self._message)
            _refuse_error(await socket.recv())

        return step


def _refuse_error(answer: str | bytes) -> None:
    assert isinstance(answer, str)
    assert answer.startswith('{"type":"observation"'), answer[:500]
