"""The scheduler of a controller: chooses the server of a session and the client that is served next."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256

from agentrl_env.errors import (
    ServerDraining,
    ServerFull,
    SessionLost,
    StateUnavailable,
    UnknownSession,
    WireError,
)
from agentrl_env.fleet.registry import Registry, close_session, home
from agentrl_env.fleet.remote_server import RemoteServer, decrement
from agentrl_env.fleet.store import FleetStore
from agentrl_env.session.single_flight import check_digest
from agentrl_env.types import SessionInfo
from agentrl_env.wire import OpenRequest

Group = tuple[str, str]
"""Task and client. The openings of one group are served in order."""
RETRY_S = 0.1
_OPENED = "opened "
"""Prefix of the store's keys for the sessions that a request opened."""


def least_loaded(servers: Iterable[RemoteServer], task: str) -> RemoteServer | None:
    """Return the server with the lowest load among the servers with room.

    A server whose heartbeats are late is the last choice.
    """
    able = [server for server in servers if server.has_room(task)]

    def rank(server: RemoteServer) -> tuple[bool, float, int, str]:
        return server.silent, server.load, -server.capacity, server.server_id

    return min(able, key=rank, default=None)


class Placement:
    """Reserves places on servers. Openings without a place wait in a queue that is fair between clients.

    Args:
        servers: the servers by id.
        task_limits: maximum number of sessions of a task in the whole fleet.
        client_limit: maximum number of sessions of one client.
    """

    def __init__(
        self,
        servers: Mapping[str, RemoteServer],
        *,
        task_limits: Mapping[str, int],
        client_limit: int | None = None,
    ) -> None:
        self._servers = servers
        self._task_limits = task_limits
        self._client_limit = client_limit
        self._waiting: OrderedDict[Group, deque[asyncio.Future[RemoteServer | None]]] = OrderedDict()
        self._reserved: Counter[Group] = Counter()

    @property
    def waiting(self) -> int:
        """Number of openings that wait."""
        return sum(map(len, self._waiting.values()))

    async def take(self, task: str, client: str, wait_s: float) -> RemoteServer | None:
        """Reserve a place until ``release``. Return its server, or None if no place was free in time."""
        group = (task, client)
        if not self._waiting.get(group) and (server := self._try(group)) is not None:
            return server
        if wait_s <= 0:
            return None
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[RemoteServer | None] = loop.create_future()
        self._waiting.setdefault(group, deque()).append(waiter)
        timer = loop.call_later(wait_s, _time_out, waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and (server := waiter.result()) is not None:
                self.release(group, server)
            raise
        finally:
            timer.cancel()
            self._remove(group, waiter)

    def release(self, group: Group, server: RemoteServer) -> None:
        """Release a reserved place after its session is open and counted, or its opening has failed."""
        server.opening -= 1
        decrement(self._reserved, group)
        self.serve()

    def serve(self) -> None:
        """Give free places to waiting openings. Clients take turns."""
        blocked: set[Group] = set()
        while len(blocked) < len(self._waiting):
            group, waiters = self._waiting.popitem(last=False)
            self._waiting[group] = waiters  # move it to the back, so that another client is next
            while waiters and waiters[0].done():
                waiters.popleft()
            if not waiters:
                del self._waiting[group]
            elif group not in blocked:
                server = self._try(group)
                if server is None:
                    blocked.add(group)
                else:
                    waiters.popleft().set_result(server)

    def fail_waiting(self, error: Callable[[], Exception]) -> None:
        """Fail all waiting openings, each with a new error."""
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(error())

    def _try(self, group: Group) -> RemoteServer | None:
        task, client = group
        if task in self._task_limits and self._count(task=task) >= self._task_limits[task]:
            return None
        if self._client_limit is not None and self._count(client=client) >= self._client_limit:
            return None
        server = least_loaded(self._servers.values(), task)
        if server is not None:
            server.opening += 1
            self._reserved[group] += 1
        return server

    def _count(self, *, task: str | None = None, client: str | None = None) -> int:
        """Return the number of sessions, open or with a reserved place, of a task or a client."""
        counts = [server.held for server in self._servers.values()] + [self._reserved]
        return sum(
            number
            for held in counts
            for (its_task, its_client), number in held.items()
            if task in (None, its_task) and client in (None, its_client)
        )

    def _remove(self, group: Group, waiter: asyncio.Future[RemoteServer | None]) -> None:
        waiters = self._waiting.get(group)
        if waiters is not None and waiter in waiters:
            waiters.remove(waiter)
        if waiters is not None and not waiters:
            del self._waiting[group]


def _time_out(waiter: asyncio.Future[RemoteServer | None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Opener:
    """Opens sessions exactly once for each idempotency key.

    The store assigns the key to a server before the server is called, so a repeated opening returns the same
    session, at this controller or another.

    The claim includes the digest of the request. If sessions survive their server, the store also keeps the
    ids of the opened sessions.

    Args:
        registry: the servers.
        info: returns the state of sessions, or None if one of them is lost.
        placement: reserves places.
        store: keeps the claims.
        clock: returns the monotonic time in seconds.
    """

    def __init__(
        self,
        registry: Registry,
        info: Callable[[Sequence[str]], Awaitable[list[bytes] | None]],
        placement: Placement,
        store: FleetStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self.seal_key = b""
        """Key that the controllers of the fleet share: the operator token."""
        self._info = info
        self._placement = placement
        self._store = store
        self._clock = clock
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self, request: OpenRequest, key: str, wait_s: float) -> bytes:
        """Open a session and return its ``SessionInfo`` as JSON.

        Raises ServerFull if no place was free in time, IdempotencyConflict if the key was claimed for
        another request, StateUnavailable, and errors of the server.
        """
        end = self._clock() + wait_s
        while True:
            try:
                opened = await self._try(request, key, end)
            except StateUnavailable:
                if self._clock() >= end:
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            if opened is not None:
                return opened
            if self._clock() >= end:
                raise _full(request)

    async def remember(self, key: str, digest: str, session_ids: Sequence[str]) -> None:
        """Store the sessions that a request opened, so that a repeated request finds them on any server."""
        text = " ".join((digest, *session_ids))
        await self._store.claim(f"{_OPENED}{key}", f"{text} {self._seal(key, text)}")

    async def recall(self, key: str, digest: str) -> list[bytes] | None:
        """Return the state of the sessions that a request opened, or None if they no longer exist.

        Raises IdempotencyConflict if the key was used for another request.
        """
        kept = await self._store.claimed(f"{_OPENED}{key}")
        if kept is None:
            return None
        text, _, seal = kept.rpartition(" ")
        known = None
        if hmac.compare_digest(seal.encode(), self._seal(key, text).encode()):
            first, *session_ids = text.split(" ")
            check_digest(digest, first)
            known = await self._info(session_ids)
        if known is None:
            await self._store.unclaim(f"{_OPENED}{key}", kept)
        return known

    def _seal(self, key: str, text: str) -> str:
        """Return a MAC, so that writing to the store cannot redirect a caller to another caller's session."""
        return hmac.digest(self.seal_key, f"opened\0{key}\0{text}".encode(), sha256).hex()

    async def _try(self, request: OpenRequest, key: str, end: float) -> bytes | None:
        """Open the session on the claimed server, else on a server with room. Return None to try again."""
        claim = await self._store.claimed(key)
        if claim is not None:
            return await self._open_at(claim, request, key)
        server = await self._placement.take(request.task, request.client, end - self._clock())
        if server is None:
            raise _full(request)
        try:
            claim = await self._store.claim(key, f"{server.server_id} {request.digest}")
            return await self._open_at(claim, request, key)
        finally:
            self._placement.release((request.task, request.client), server)

    async def _open_at(self, claim: str, request: OpenRequest, key: str) -> bytes | None:
        """Open the session on the claimed server. If that fails, find the session or drop the claim."""
        server_id, _, digest = claim.partition(" ")
        check_digest(request.digest, digest)
        with suppress(SessionLost, UnknownSession):
            server = await self._registry.find(server_id)
            try:
                opened = await self._ask(server, request, key)
                await self._registry.checked(server, opened, partial(_check_opened, server.server_id))
                return opened
            except ServerFull:
                server.full = True
            except ServerDraining:
                server.draining = True
        known = await self.recall(key, request.digest)
        if known is not None:
            return known[0]
        await self._store.unclaim(key, claim)
        return None

    async def _ask(self, server: RemoteServer, request: OpenRequest, key: str) -> bytes:
        # Openings wait only in the fleet's queue. In a server's queue, no other server could take them.
        named = request.model_copy(update={"wait_s": 0.0, "request_id": key})
        opening = asyncio.ensure_future(server.call("open", named.model_dump_json().encode()))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if request.request_id is not None:
                opening.cancel()  # the caller can repeat it, otherwise the lease ends the session
            else:
                opening.add_done_callback(lambda opened: self._close(server, opened))
            raise

    def _close(self, server: RemoteServer, opening: asyncio.Future[bytes]) -> None:
        """End a session whose caller gave up before it was open."""
        if opening.cancelled() or opening.exception() is not None:
            return
        session_id = SessionInfo.model_validate_json(opening.result()).session_id
        closing = asyncio.create_task(ignore_errors(close_session(server, session_id)))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _check_opened(server_id: str, answer: bytes) -> None:
    """Raise ValueError if the opened session has another server's id."""
    if home(SessionInfo.model_validate_json(answer).session_id) != server_id:
        raise ValueError("the session belongs to another server")


def _full(request: OpenRequest) -> ServerFull:
    reason = f"no server has room for a session of {request.task!r}, or a limit is reached"
    return ServerFull(reason, retry_after=1)


async def ignore_errors(call: Awaitable[None]) -> None:
    """Await a call and ignore its errors."""
    with suppress(WireError):
        await call
