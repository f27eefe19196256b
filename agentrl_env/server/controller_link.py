"""Links to controllers: a server dials out, says what it has, and answers calls on the line it opened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel
from pydantic_core import from_json, to_json
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from agentrl_env.errors import InternalError, ServeError, StepPending
from agentrl_env.server.admin import VERSION, place_of
from agentrl_env.server.auth import link_token
from agentrl_env.server.failover import Keeping, LinkSocket
from agentrl_env.server.middleware import MAX_BODY_BYTES
from agentrl_env.server.service import Service
from agentrl_env.server.telemetry.tracing import Tracing
from agentrl_env.server.websocket import CallSocket
from agentrl_env.session.batching import ASK_AGAIN
from agentrl_env.session.pool import SessionPool
from agentrl_env.wire import LINK_PATH, Beat, Hello, SessionRow, Welcome

logger = logging.getLogger("agentrl_env")

_UNIX = "unix:"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0
CONNECT_S = 10.0
PING_S, SILENT_S = 5.0, 10.0
"""How often a controller is asked for a sign of life, and after how long without one it is dialled anew."""
MAX_ANSWER_BYTES = 2 * MAX_BODY_BYTES
"""What a controller takes in one frame; it hangs up on more."""
MAX_CALLS = 100_000
"""Calls of a controller that may be under way: slow ones must not keep others from being read."""

_RESULTS, _BETWEEN, _END = '"result":{"results":[', ",\n", "]}}"
"""What is around and between the answers of a batch; a JSON string holds no line break."""
_ENVELOPE_BYTES = 64
"""What an answer's id and braces take at most."""


class _WelcomeFrame(BaseModel):
    welcome: Welcome | None = None
    lost: bool = False


def _address(url: str) -> str:
    """Return where a controller's link is opened."""
    if url.startswith(_UNIX):
        return f"ws://controller{LINK_PATH}"
    parts = urlsplit(url)
    scheme = "wss" if parts.scheme == "https" else "ws"
    return f"{scheme}://{parts.netloc}{parts.path}{LINK_PATH}"


class Dialer:
    """Keeps a link to every controller of a fleet, as long as the server runs.

    Args:
        pool: the sessions, whose openings and ends are reported.
        service: what answers the controllers' calls.
        urls: controllers, or ``unix:PATH`` for one behind a socket in the file system; these and no others
            are dialled and shown the token.
        token: the operator's, or the fleet's that is derived from it; the fleet's is shown.
        tracing: makes OpenTelemetry spans of what controllers ask, under theirs.
    """

    def __init__(
        self,
        pool: SessionPool,
        service: Service,
        urls: Sequence[str],
        token: str | None,
        tracing: Tracing | None = None,
    ) -> None:
        for url in urls:
            known = urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname
            if not known and not url.startswith(_UNIX):
                raise ServeError(f"{url!r} is not the http:// or https:// address of a controller")
        self._pool = pool
        self._service = service
        self._tracing = tracing
        self._urls = [url.rstrip("/") for url in urls]
        self._token = link_token(token) if token else None
        self._headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        self._links: dict[str, asyncio.Task[None]] = {}
        self._open: set[_Link] = set()
        self._joined = asyncio.Event()
        self._abandoning: asyncio.Task[None] | None = None
        self._unkept: set[str] = set()
        """Tasks of which the log has said that their sessions cannot be kept."""

    async def start(self) -> None:
        """Begin to dial; return once a controller has answered. It goes on trying until one does."""
        self._links = {url: asyncio.create_task(self._keep(url)) for url in self._urls}
        await self._joined.wait()

    async def say_draining(self) -> None:
        """Tell the controllers at once that no session is to be placed here."""
        for link in list(self._open):
            with contextlib.suppress(ConnectionClosed):
                await link.beat()

    async def hand_over(self) -> None:
        """Leave the sessions that are open to other servers, where a controller has kept where they stand."""
        if any(link.keeps for link in self._open):
            await self._leave(answered=False)

    async def stop(self) -> None:
        """Say good-bye and hang up; the pool has no session left."""
        await self._leave(answered=True)

    async def _leave(self, *, answered: bool) -> None:
        await asyncio.gather(*(link.leave(answered=answered) for link in list(self._open)))
        for task in self._links.values():
            task.cancel()
        await asyncio.gather(*self._links.values(), return_exceptions=True)

    async def _keep(self, url: str) -> None:
        """Hold one link, opening it again whenever it breaks."""
        if self._tracing is not None:
            self._tracing.activate()
        pause, complained = FIRST_PAUSE_S, False
        while True:
            try:
                await self._serve(url)
                pause, complained = FIRST_PAUSE_S, False
            except (OSError, InvalidHandshake, ConnectionClosed, TimeoutError, ValueError) as error:
                if not complained:
                    logger.warning("no link to the controller at %s: %s; trying on", url, _reason(error))
                    complained = True
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _serve(self, url: str) -> None:
        """Dial once, and answer calls until the line breaks."""
        if self._abandoning is not None:
            await self._abandoning
        behind: Any = {"unix": True, "path": url.removeprefix(_UNIX)} if url.startswith(_UNIX) else {}
        async with connect(
            _address(url),
            **behind,
            additional_headers=self._headers,
            compression=None,
            open_timeout=CONNECT_S,
            ping_interval=PING_S,
            ping_timeout=SILENT_S,
            max_size=4 * MAX_BODY_BYTES,
            proxy=None,
        ) as websocket:
            link = _Link(websocket, self._pool)
            rows = self._pool.watch(link)
            self._open.add(link)
            try:
                welcome = await self._greet(websocket, rows)
                if welcome is None:
                    self._abandon()
                    return
                self._joined.set()
                beating = asyncio.create_task(link.keep_beating(welcome.beat_s))
                try:
                    await link.serve(self._service, self._keeping(welcome, link))
                finally:
                    beating.cancel()
            finally:
                self._open.discard(link)
                self._pool.unwatch(link)

    def _keeping(self, welcome: Welcome, link: _Link) -> Keeping | None:
        """Return what tells a controller that keeps where sessions stand; it takes a token to trust it."""
        if not welcome.keep or not self._token:
            return None
        return Keeping(self._pool, link.tell, self._token, self._unkept)

    async def _greet(self, websocket: ClientConnection, rows: tuple[SessionRow, ...]) -> Welcome | None:
        """Say who this is; None where its sessions were reported lost meanwhile."""
        gauges = self._pool.gauges()
        hello = Hello(
            server_id=self._pool.server_id,
            tasks=await self._pool.tasks(),
            capacity=int(gauges["agentrl_sessions_capacity"]),
            sessions=rows,
            draining=self._pool.draining,
            place=place_of(os.getpid()),
            version=VERSION,
        )
        await websocket.send('{"hello":' + hello.model_dump_json() + "}")
        async with asyncio.timeout(CONNECT_S):
            answer = _WelcomeFrame.model_validate(from_json(await websocket.recv()))
        return answer.welcome

    def _abandon(self) -> None:
        """End all sessions once, and dial anew everywhere under the new id."""
        if self._abandoning is None or self._abandoning.done():
            logger.warning("this server was away for too long; its sessions were reported lost and end now")
            self._abandoning = asyncio.create_task(self._pool.abandon())
            for link in list(self._open):
                link.websocket.transport.abort()


class _Link:
    """One line to a controller, in the form that a ``CallSocket`` reads and writes."""

    def __init__(self, websocket: ClientConnection, pool: SessionPool) -> None:
        self.websocket = websocket
        self._pool = pool
        self._calls: CallSocket | None = None
        self._keeping: Keeping | None = None
        self._opened: list[SessionRow] = []
        self._ended: list[str] = []

    async def serve(self, service: Service, keeping: Keeping | None) -> None:
        """Answer calls until the line breaks."""
        self._keeping = keeping
        if keeping is None:
            self._calls = CallSocket(service, self, 2 * MAX_BODY_BYTES, MAX_CALLS)
        else:
            self._calls = LinkSocket(keeping, self, 2 * MAX_BODY_BYTES, MAX_CALLS)
        await self._calls.serve()

    @property
    def keeps(self) -> bool:
        """Whether the controller keeps where sessions stand."""
        return self._keeping is not None

    async def leave(self, *, answered: bool) -> None:
        """Say good-bye and hang up, once what is under way is ``answered``, where that is wanted."""
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                if answered and self._calls is not None:
                    await self._calls.finish()
                await self.beat(leaving=True)
                await self.websocket.close()

    def opened(self, row: SessionRow) -> None:
        """Note a session to be told of."""
        self._opened.append(row)

    def ended(self, session_id: str) -> None:
        """Note an end to be told of."""
        self._ended.append(session_id)
        if self._keeping is not None:
            self._keeping.forget(session_id)

    async def receive(self) -> dict[str, Any]:
        """Return the next call, as ASGI would."""
        try:
            frame = await self.websocket.recv()
        except ConnectionClosed:
            return {"type": "websocket.disconnect"}
        return {"type": "websocket.receive", "text" if isinstance(frame, str) else "bytes": frame}

    async def send(self, message: Any) -> None:
        """Send an answer; what has changed is told before what it led to."""
        try:
            if self._opened or self._ended:
                await self.beat()
            await self.websocket.send(_bounded(message["text"]))
        except ConnectionClosed as error:
            raise RuntimeError("the line is closed") from error

    async def tell(self, frame: str) -> None:
        """Send what is no answer; of a line that is closed the reader hears."""
        with contextlib.suppress(ConnectionClosed):
            await self.websocket.send(frame)

    async def beat(self, *, leaving: bool = False) -> None:
        """Give a sign of life, and tell what has changed."""
        opened, self._opened = self._opened, []
        ended, self._ended = self._ended, []
        beat = Beat(opened=tuple(opened), ended=tuple(ended), draining=self._pool.draining, leaving=leaving)
        await self.websocket.send('{"beat":' + beat.model_dump_json() + "}")

    async def keep_beating(self, every_s: float) -> None:
        """Give a sign of life again and again."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.beat()
                await asyncio.sleep(every_s)


def _bounded(answer: str) -> str:
    """Return an answer that a controller takes: itself, a part of a batch's, or an error."""
    size = _size(answer)
    if size <= MAX_ANSWER_BYTES:
        return answer
    head, _, rest = answer.partition(",")
    if rest.startswith(_RESULTS):
        items = _fitting(rest[len(_RESULTS) : -len(_END)].split(_BETWEEN))
        shorter = f"{head},{_RESULTS}{_BETWEEN.join(items)}{_END}"
        if _size(shorter) <= MAX_ANSWER_BYTES:
            return shorter
    return f"{head},{to_json(_too_large(size).wire())[1:].decode()}"


def _fitting(items: list[str]) -> list[str]:
    """Return a batch's answers; those for which there is no room are to be asked for alone."""
    pending = to_json(StepPending(ASK_AGAIN).wire()).decode()
    room = MAX_ANSWER_BYTES - _ENVELOPE_BYTES - len(items) * (len(pending) + len(_BETWEEN))
    fitting = []
    for item in items:
        size = _size(item)
        if size > MAX_ANSWER_BYTES - _ENVELOPE_BYTES:  # it would not fit alone either
            item = to_json(_too_large(size).wire()).decode()
        elif size > room:
            item = pending
        room -= max(_size(item) - len(pending), 0)
        fitting.append(item)
    return fitting


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _too_large(size: int) -> InternalError:
    return InternalError(f"the answer has {size} bytes; a controller takes {MAX_ANSWER_BYTES}")


def _reason(error: Exception) -> str:
    if isinstance(error, InvalidStatus) and error.response.status_code == 401:
        return "it does not accept this server's token"
    return str(error) or type(error).__name__
