"""Clients for the benchmark: our client, our batch call, OpenEnv, AgentRL's worker and the ceilings.

Each client plays a number of turns in all its sessions and returns the duration of every step. Only our
client builds and parses whole messages. The others send prepared bytes and only verify that answers are not
errors.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Protocol, TypeVar

from pydantic_core import to_json
from websockets.asyncio.client import ClientConnection, connect

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.client.client import ClientSession
from tests.benchmarks.http1 import Http1Client

TEXT = "What you hear is what was said. "
MESSAGE = Message.assistant(None, ToolCall.of("echo", text=TEXT))
T = TypeVar("T")
DEADLINE_S = 60.0
OPENING_AT_ONCE = 64


class Player(Protocol):
    """Steps the sessions of one server."""

    name: str
    pid: int
    """Process id of the server."""

    async def open(self, sessions: int) -> None:
        """Open sessions."""

    async def play(self, turns: int) -> list[float]:
        """Step every session ``turns`` times. Return the duration of each step in seconds."""

    async def close(self) -> None:
        """Close the sessions."""


async def play_each(step: list[Callable[[], Awaitable[None]]], turns: int) -> list[float]:
    """Step all sessions concurrently, each as soon as its previous answer arrives."""
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
    """Run ``work`` several times with bounded concurrency."""
    slots = asyncio.Semaphore(OPENING_AT_ONCE)

    async def one() -> T:
        async with slots:
            return await work()

    return await asyncio.gather(*(one() for _ in range(times)))


class Client:
    """Our client with one coroutine per session. It batches concurrent steps automatically."""

    def __init__(self, url: str, pid: int, *, task: str, mode: str) -> None:
        self.name = f"{'WebSocket' if url.startswith('ws') else 'client'}, {mode}"
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
    """Our batch call. Each request steps all sessions."""

    path = "/v1/step"

    def __init__(self, url: str, pid: int, *, task: str, mode: str) -> None:
        self.name = f"batch call, {mode}"
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
            response = await self._transport.request("POST", self.path, body, timeout=DEADLINE_S)
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
        self._transport = Http1Client(url, headers={}, max_connections=1)


class Ceiling(Batch):
    """The bytes of the batch call with a bare application, ``serving_peers.bare``."""

    def __init__(self, url: str, pid: int, *, like: Batch, name: str, path: str) -> None:
        super().__init__(url, pid, task="", mode="")
        self.name, self.path = name, path
        self._like = like

    async def open(self, sessions: int) -> None:
        self._connect(self._url)
        self.parts = self._like.parts
        await self._transport.request("PUT", "/answer", self._like.answer, timeout=DEADLINE_S)

    async def close(self) -> None:
        await self._transport.aclose()


class OpenEnv:
    """One WebSocket per session without compression, with raw JSON."""

    def __init__(self, url: str, pid: int, *, name: str) -> None:
        self.name = name
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


class AgentRLWorker:
    """One raw HTTP request per step, over keep-alive connections."""

    name = "agentrl-worker"

    def __init__(self, url: str, pid: int) -> None:
        self.pid = pid
        self._url = url
        self._message = to_json(MESSAGE)

    async def open(self, sessions: int) -> None:
        self._transport = Http1Client(self._url, headers={}, max_connections=sessions)
        self._ids = [secrets.randbits(40) for _ in range(sessions)]
        numbers = iter(self._ids)

        async def start() -> None:
            await self._post("start_sample", b'{"index":0,"session_id":%d}' % next(numbers))

        await some_at_once(start, sessions)

    async def play(self, turns: int) -> list[float]:
        return await play_each([self._step(number) for number in self._ids], turns)

    async def close(self) -> None:
        for number in self._ids:
            await self._post("cancel", b'{"session_id":%d}' % number)
        await self._transport.aclose()

    def _step(self, number: int) -> Callable[[], Awaitable[None]]:
        body = b'{"session_id":%d,"messages":[%b]}' % (number, self._message)

        async def step() -> None:
            answer = await self._post("interact", body)
            assert b'"finish":false' in answer, answer[:500]

        return step

    async def _post(self, call: str, body: bytes) -> bytes:
        response = await self._transport.request("POST", f"/api/{call}", body, timeout=DEADLINE_S)
        assert response.status == 200, response
        return response.body


def _refuse_error(answer: str | bytes) -> None:
    assert isinstance(answer, str)
    assert answer.startswith('{"type":"observation"'), answer[:500]
