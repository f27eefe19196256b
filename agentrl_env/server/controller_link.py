"""Links to controllers: the server connects, introduces itself, and answers calls on the WebSocket."""

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
from pydantic_core import to_json
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from agentrl_env.errors import InternalError, ServeError, StepPending
from agentrl_env.server.api import Api
from agentrl_env.server.auth import link_token
from agentrl_env.server.failover import FailoverApi, FailoverSocket
from agentrl_env.server.middleware import MAX_BODY_BYTES
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.server.telemetry.tracing import Tracing
from agentrl_env.server.websocket import CallSocket
from agentrl_env.session.pool import STEP_PENDING, VERSION, SessionPool, place_of
from agentrl_env.types import Counts
from agentrl_env.wire import LINK_PATH, Beat, Hello, SessionRow, Welcome

logger = logging.getLogger("agentrl_env")

_UNIX = "unix:"
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 3.0
"""Shortest and longest pause between attempts to connect. Each pause is twice as long as the previous one."""
CONNECT_S = 10.0
PING_S, SILENT_S = 5.0, 10.0
"""Seconds between pings, and seconds without a pong after which the link is reopened."""
MAX_ANSWER_BYTES = 2 * MAX_BODY_BYTES
"""Maximum size of a frame. A controller closes the link if it receives a larger one."""
MAX_CALLS = 100_000
"""Maximum number of a controller's calls in progress, so high that slow calls do not block others."""

_RESULTS, _SEPARATOR, _END = '"result":{"results":[', ",\n", "]}}"
"""Parts of a batch's answer. No JSON string contains a line break."""
_ENVELOPE_BYTES = 64
"""Upper bound on the size of an answer's id and braces."""


class _WelcomeFrame(BaseModel):
    welcome: Welcome | None = None
    lost: bool = False


class ControllerLinks:
    """Keeps a link to every controller of a fleet while the server runs.

    Args:
        pool: the sessions.
        metrics: counts calls and errors.
        urls: URLs of the controllers, or ``unix:PATH`` for a socket in the file system. The server presents
            the token to no other address.
        token: operator token or link token. In both cases the link token is presented.
        tracing: makes OpenTelemetry spans of the controllers' calls, as children of their spans.

    Raises ServeError if a URL is not a controller's.
    """

    def __init__(
        self,
        pool: SessionPool,
        metrics: Metrics,
        urls: Sequence[str],
        token: str | None,
        tracing: Tracing | None = None,
    ) -> None:
        for url in urls:
            if not _is_http(url) and not url.startswith(_UNIX):
                raise ServeError(f"{url!r} is not the http:// or https:// address of a controller")
        self._pool = pool
        self._metrics = metrics
        self._tracing = tracing
        self._urls = [url.rstrip("/") for url in urls]
        self._token = link_token(token) if token else None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The task that keeps the link to each URL."""
        self._open: set[_Link] = set()
        self._joined = asyncio.Event()
        self._abandoning: asyncio.Task[None] | None = None
        self._warned: set[str] = set()
        """Names of tasks without failover for which a warning was logged."""

    async def start(self) -> None:
        """Start to connect, and return once one controller has accepted the server."""
        self._tasks = {url: asyncio.create_task(self._keep(url)) for url in self._urls}
        await self._joined.wait()

    async def announce_drain(self) -> None:
        """Report to the controllers that the server accepts no new session."""
        for link in list(self._open):
            with contextlib.suppress(ConnectionClosed):
                await link.beat()

    async def hand_over(self) -> None:
        """Let other servers continue the open sessions, if a controller has their checkpoints."""
        if any(link.has_failover for link in self._open):
            await self._leave(finish=False)

    async def stop(self) -> None:
        """Answer the calls in progress and disconnect. The pool must have no sessions left."""
        await self._leave(finish=True)

    async def abort(self) -> None:
        """Disconnect immediately, without answering the calls in progress."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _leave(self, *, finish: bool) -> None:
        await asyncio.gather(*(link.leave(finish=finish) for link in list(self._open)))
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _keep(self, url: str) -> None:
        """Keep one link and reopen it whenever it breaks."""
        if self._tracing is not None:
            self._tracing.activate()
        pause, warned = MIN_PAUSE_S, False
        while True:
            try:
                await self._serve(url)
                pause, warned = MIN_PAUSE_S, False
            except (OSError, InvalidHandshake, ConnectionClosed, TimeoutError, ValueError) as error:
                if not warned:
                    logger.warning("no link to the controller at %s: %s; retrying", url, _reason(error))
                    warned = True
            await asyncio.sleep(pause * random.SystemRandom().uniform(0.5, 1.0))
            pause = min(2 * pause, MAX_PAUSE_S)

    async def _serve(self, url: str) -> None:
        """Connect once, and answer calls until the link breaks."""
        if self._abandoning is not None:
            await self._abandoning
        unix: Any = {"unix": True, "path": url.removeprefix(_UNIX)} if url.startswith(_UNIX) else {}
        async with connect(
            _link_url(url),
            **unix,
            additional_headers={"authorization": f"Bearer {self._token}"} if self._token else {},
            compression=None,
            open_timeout=CONNECT_S,
            ping_interval=PING_S,
            ping_timeout=SILENT_S,
            max_size=4 * MAX_BODY_BYTES,
            proxy=None,
        ) as websocket:
            link = _Link(websocket, self._pool, self._metrics)
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
                    link.calls = self._calls(link, welcome)
                    await link.calls.serve()
                finally:
                    beating.cancel()
            finally:
                self._open.discard(link)
                self._pool.unwatch(link)

    def _calls(self, link: _Link, welcome: Welcome) -> CallSocket:
        """Return the socket that answers a link's calls. Failover needs a token to seal checkpoints."""
        if welcome.keep and self._token:
            api = FailoverApi(self._pool, self._metrics, link, self._token, self._warned)
            return FailoverSocket(api, link, 2 * MAX_BODY_BYTES, MAX_CALLS)
        return CallSocket(Api(self._pool, self._metrics), link, 2 * MAX_BODY_BYTES, MAX_CALLS)

    async def _greet(self, websocket: ClientConnection, rows: tuple[SessionRow, ...]) -> Welcome | None:
        """Introduce the server. Return None if its sessions were declared lost."""
        hello = Hello(
            server_id=self._pool.server_id,
            server_key=self._pool.server_key,
            tasks=(await self._pool.tasks()).tasks,
            capacity=int(self._pool.gauges()["agentrl_sessions_capacity"]),
            sessions=rows,
            draining=not self._pool.accepts_sessions,
            place=place_of(os.getpid()),
            version=VERSION,
        )
        await websocket.send('{"hello":' + hello.model_dump_json() + "}")
        async with asyncio.timeout(CONNECT_S):
            return _WelcomeFrame.model_validate_json(await websocket.recv()).welcome

    def _abandon(self) -> None:
        """End all sessions once, and connect again everywhere under a new id."""
        if self._abandoning is None or self._abandoning.done():
            logger.warning("this server was away for too long; its sessions are declared lost and end now")
            self._abandoning = asyncio.create_task(self._pool.abandon())
            for link in list(self._open):
                link.websocket.transport.abort()


class _Link:
    """One link: a ``Channel`` for calls, and the heartbeats of the server."""

    def __init__(self, websocket: ClientConnection, pool: SessionPool, metrics: Metrics) -> None:
        self.websocket = websocket
        self.calls: CallSocket | None = None
        self._pool = pool
        self._metrics = metrics
        self._reported: Counts | None = None
        """Counts in the last heartbeat that contained counts."""
        self._opened: list[SessionRow] = []
        self._ended: list[str] = []

    @property
    def has_failover(self) -> bool:
        """True if the controller keeps checkpoints."""
        return isinstance(self.calls, FailoverSocket)

    async def leave(self, *, finish: bool) -> None:
        """Announce the shutdown and disconnect. If ``finish`` is true, first answer the calls in progress."""
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                if finish and self.calls is not None:
                    await self.calls.finish()
                await self.beat(leaving=True, counts=self._metrics.counts())
                await self.websocket.close()

    def opened(self, row: SessionRow) -> None:
        """Report an opened session with the next heartbeat."""
        self._opened.append(row)

    def ended(self, session_id: str) -> None:
        """Report an ended session with the next heartbeat."""
        self._ended.append(session_id)

    async def receive(self) -> dict[str, Any]:
        """Return the next call, as ASGI does."""
        try:
            frame = await self.websocket.recv()
        except ConnectionClosed:
            return {"type": "websocket.disconnect"}
        return {"type": "websocket.receive", "text" if isinstance(frame, str) else "bytes": frame}

    async def send(self, message: Any) -> None:
        """Send a heartbeat with the changes that the call made, then the answer."""
        try:
            if self._opened or self._ended:
                await self.beat()
            await self.websocket.send(_fit(message["text"]))
        except ConnectionClosed as error:
            raise RuntimeError("the link is closed") from error

    async def send_frame(self, frame: str) -> None:
        """Send a frame that is not an answer. On a closed link, ``receive`` reports the disconnect."""
        with contextlib.suppress(ConnectionClosed):
            await self.websocket.send(frame)

    async def beat(self, *, leaving: bool = False, counts: Counts | None = None) -> None:
        """Send a heartbeat, with the counts if they have changed."""
        if counts == self._reported:
            counts = None
        elif counts is not None:
            self._reported = counts
        opened, self._opened = self._opened, []
        ended, self._ended = self._ended, []
        beat = Beat(
            opened=tuple(opened),
            ended=tuple(ended),
            draining=not self._pool.accepts_sessions,
            leaving=leaving,
            counts=counts,
        )
        await self.websocket.send('{"beat":' + beat.model_dump_json() + "}")

    async def keep_beating(self, every_s: float) -> None:
        """Send heartbeats until the link is closed."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.beat(counts=self._metrics.counts())
                await asyncio.sleep(every_s)


def _is_http(url: str) -> bool:
    """Return True if this is an http:// or https:// address with a host and a valid port, if any."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _link_url(url: str) -> str:
    if url.startswith(_UNIX):
        return f"ws://controller{LINK_PATH}"
    parts = urlsplit(url)
    scheme = "wss" if parts.scheme == "https" else "ws"
    return f"{scheme}://{parts.netloc}{parts.path}{LINK_PATH}"


def _fit(answer: str) -> str:
    """Return an answer within the size limit: the answer, a part of a batch's results, or an error."""
    size = _size(answer)
    if size <= MAX_ANSWER_BYTES:
        return answer
    head, _, rest = answer.partition(",")
    if rest.startswith(_RESULTS):
        items = _fit_batch(rest[len(_RESULTS) : -len(_END)].split(_SEPARATOR))
        shorter = f"{head},{_RESULTS}{_SEPARATOR.join(items)}{_END}"
        if _size(shorter) <= MAX_ANSWER_BYTES:
            return shorter
    return f"{head},{to_json(_too_large(size).wire())[1:].decode()}"


def _fit_batch(items: list[str]) -> list[str]:
    """Return the results of a batch that fit, and ``step_pending`` for the others, to be requested again."""
    pending = to_json(StepPending(STEP_PENDING).wire()).decode()
    room = MAX_ANSWER_BYTES - _ENVELOPE_BYTES - len(items) * (len(pending) + len(_SEPARATOR))
    fitting = []
    for item in items:
        size = _size(item)
        if size > MAX_ANSWER_BYTES - _ENVELOPE_BYTES:  # it is too large even alone
            item = to_json(_too_large(size).wire()).decode()
        elif size > room:
            item = pending
        room -= max(_size(item) - len(pending), 0)
        fitting.append(item)
    return fitting


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _too_large(size: int) -> InternalError:
    return InternalError(f"the answer has {size} bytes; a controller accepts at most {MAX_ANSWER_BYTES}")


def _reason(error: Exception) -> str:
    if isinstance(error, InvalidStatus) and error.response.status_code == 401:
        return "it does not accept this server's token"
    return str(error) or type(error).__name__
