"""The store of a fleet with several controllers, in Redis."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agentrl_env.errors import ServeError, StateUnavailable, install_extra
from agentrl_env.fleet.store import CLAIM_S

if TYPE_CHECKING:
    from redis.asyncio import Redis

ANSWER_S = 2.0
"""Maximum seconds to wait for an answer from Redis."""
SERVER_S = 24 * 3600
"""Seconds for which the records that a server exists, and that it is lost, are kept."""
_UNCLAIM = "if redis.call('get', KEYS[1]) == ARGV[1] then redis.call('del', KEYS[1]) end"
_WRITE = """
if (redis.call('hget', KEYS[1], 'version') or '') ~= ARGV[1] then return 0 end
if ARGV[2] == '' then redis.call('del', KEYS[1]) return 1 end
redis.call('hset', KEYS[1], 'version', ARGV[2], 'record', ARGV[3])
return redis.call('expire', KEYS[1], ARGV[4])
"""


class RedisStore:
    """A ``FleetStore`` in Redis.

    While Redis is unavailable, open sessions continue because their ids name their servers. New sessions are
    refused, and no server is declared lost.

    Args:
        url: URL of the server, such as ``redis://127.0.0.1:6379/0``.
        fleet: name that separates fleets in one Redis.

    Raises ServeError if the URL is invalid or the extra ``[redis]`` is not installed.
    """

    def __init__(self, url: str, *, fleet: str = "fleet") -> None:
        try:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError:
            raise ServeError(f"a controller with --redis needs: {install_extra('redis')}") from None
        try:
            self._redis: Redis = Redis.from_url(
                url,
                socket_timeout=ANSWER_S,
                socket_connect_timeout=ANSWER_S,
                retry=Retry(NoBackoff(), 1),
                decode_responses=True,
            )
        except ValueError as error:
            raise ServeError(f"--redis {url!r} is not valid: {error}") from error
        self._prefix = f"agentrl:{fleet}:"
        self._closed = False

    async def start(self) -> None:
        """Connect. Raises ServeError if Redis does not answer."""
        try:
            await self._answer(self._redis.ping())
        except StateUnavailable as error:
            raise ServeError(error.message) from error

    async def claim(self, key: str, claim: str) -> str:
        """Claim an idempotency key unless it is already claimed, and return the current claim."""
        name = self._key("claim", key)
        first = await self._answer(self._redis.set(name, claim, nx=True, get=True, ex=int(CLAIM_S)))
        return str(first) if first is not None else claim

    async def unclaim(self, key: str, claim: str) -> None:
        """Drop a claim."""
        await self._answer(self._redis.eval(_UNCLAIM, 1, self._key("claim", key), claim))

    async def claimed(self, key: str) -> str | None:
        """Return the claim of an idempotency key."""
        claim: str | None = await self._answer(self._redis.get(self._key("claim", key)))
        return claim

    async def agent_key(self, key: str) -> str:
        """Store a key for agent tokens unless one is already stored, and return the stored key."""
        first = await self._answer(self._redis.set(self._key("key", "agents"), key, nx=True, get=True))
        return str(first) if first is not None else key

    async def revoke_tokens(self, session_id: str, token_id: str, until: float) -> None:
        """Store the id of a session's only valid agent token until a Unix time."""
        name = self._key("tokens", "revoked")
        await self._answer(self._redis.hset(name, session_id, f"{token_id} {until}"))

    async def revoked_tokens(self, now: float) -> dict[str, tuple[str, float]]:
        """Return the token id and the end of each revocation in force at a Unix time. Remove the others."""
        name, kept, over = self._key("tokens", "revoked"), {}, []
        for session_id, text in (await self._answer(self._redis.hgetall(name))).items():
            with suppress(ValueError):
                token_id, until = text.split(" ")
                if float(until) > now:
                    kept[session_id] = (token_id, float(until))
                    continue
            over.append(session_id)
        if over:
            await self._answer(self._redis.hdel(name, *over))
        return kept

    async def report_alive(self, server_id: str) -> None:
        """Record that this controller received a heartbeat from a server."""
        await self._answer(self._redis.set(self._key("seen", server_id), "1", ex=SERVER_S))

    async def is_alive(self, server_id: str, within_s: float) -> bool:
        """Return True if any controller received a heartbeat within the last seconds, by the Redis clock."""
        left_ms = await self._answer(self._redis.pttl(self._key("seen", server_id)))
        return bool(SERVER_S * 1000 - left_ms < within_s * 1000)  # negative if there is no key

    async def report_lost(self, server_id: str) -> None:
        """Record that a server is lost."""
        await self._answer(self._redis.set(self._key("lost", server_id), "1", ex=SERVER_S))

    async def is_lost(self, server_id: str) -> bool:
        """Return True if a server was declared lost."""
        return bool(await self._answer(self._redis.exists(self._key("lost", server_id))))

    async def knows(self, server_id: str) -> bool:
        """Return True if any controller has ever received a heartbeat from a server."""
        return bool(await self._answer(self._redis.exists(self._key("seen", server_id))))

    async def read(self, session_id: str) -> tuple[bytes | None, str]:
        """Return the record of a session and its version, or ``None, ""`` if there is none."""
        names = ["record", "version"]
        record, version = await self._answer(self._redis.hmget(self._key("session", session_id), names))
        return None if version is None else (record or "").encode(), version or ""

    async def write(self, session_id: str, record: bytes | None, version: str, ttl_s: float) -> bool:
        """Compare and set the record of a session. Return False if its version differs."""
        new = "" if record is None else secrets.token_hex(8)
        values = (version, new, (record or b"").decode(), str(int(ttl_s)))
        return bool(
            await self._answer(self._redis.eval(_WRITE, 1, self._key("session", session_id), *values))
        )

    async def aclose(self) -> None:
        """Disconnect. Calls that are still in progress, or made later, keep no connection."""
        self._closed = True
        await self._redis.aclose()

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}"

    async def _answer(self, call: Awaitable[Any] | Any) -> Any:
        """Wait for an answer from Redis. Raises StateUnavailable."""
        from redis.exceptions import RedisError

        task = asyncio.current_task()
        cancellations = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(2 * ANSWER_S):
                return await call
        except (RedisError, OSError, TimeoutError) as error:
            reason = f"the controller's Redis does not answer ({error or type(error).__name__}); try again"
            raise StateUnavailable(reason, retry_after=1) from error
        finally:
            if self._closed:  # a call in progress might have connected again
                await self._redis.aclose()
            if task and task.cancelling() > cancellations:
                # redis-py uses wait_for, which can lose a cancellation in Python 3.11.
                raise asyncio.CancelledError
