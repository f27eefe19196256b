"""The state of a fleet with several controllers, in Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl_env.errors import ServeError, StateUnavailable
from agentrl_env.fleet.store import CLAIM_S, STANDING_S, KeptSession, home
from agentrl_env.server.failover import ANSWERS, MAX_TURNS_BYTES
from agentrl_env.session.history import KEPT_TURNS

if TYPE_CHECKING:
    from redis.asyncio import Redis

T = TypeVar("T")
ANSWER_S = 2.0
"""How long Redis may take to answer."""
KEPT_S = 24 * 3600
"""How long it is remembered that a server was there, and that it is lost."""
_KEEP = """
local holder = redis.call('hget', KEYS[1], 'holder')
if holder and holder ~= ARGV[1] then return 0 end
local new = tonumber(ARGV[2]) - tonumber(redis.call('hget', KEYS[1], 'seq') or -1)
if new < 0 then return 1 end
local told, bytes = #ARGV - 7, tonumber(redis.call('hget', KEYS[1], 'bytes') or 0)
if new > told then
  new, bytes = told, 0
  redis.call('del', KEYS[2])
end
local number = redis.call('llen', KEYS[2])
for i = #ARGV - new + 1, #ARGV do
  number, bytes = redis.call('rpush', KEYS[2], ARGV[i]), bytes + #ARGV[i]
end
while number > tonumber(ARGV[5]) or (bytes > tonumber(ARGV[6]) and number > tonumber(ARGV[7])) do
  number, bytes = number - 1, bytes - #redis.call('lpop', KEYS[2])
end
redis.call('hset', KEYS[1], 'holder', ARGV[1], 'seq', ARGV[2], 'kept', ARGV[3], 'deaths', 0, 'bytes', bytes)
redis.call('expire', KEYS[2], ARGV[4])
return redis.call('expire', KEYS[1], ARGV[4])
"""
_MOVE = """
if redis.call('hget', KEYS[1], 'holder') ~= ARGV[1] then return 0 end
redis.call('hset', KEYS[1], 'holder', ARGV[2])
redis.call('hincrby', KEYS[1], 'deaths', ARGV[3])
redis.call('expire', KEYS[2], ARGV[4])
return redis.call('expire', KEYS[1], ARGV[4])
"""
_FORGET = """
if redis.call('hget', KEYS[1], 'holder') ~= ARGV[1] then return 0 end
redis.call('del', KEYS[2])
if ARGV[2] == '0' then return redis.call('del', KEYS[1]) end
redis.call('hdel', KEYS[1], 'kept', 'bytes')
return redis.call('expire', KEYS[1], ARGV[2])
"""
_UNCLAIM = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"


class RedisState:
    """A ``FleetState`` that the controllers of a fleet share.

    Redis may be away for a while: sessions that are open go on, since their ids tell where they live;
    new ones are refused meanwhile, and nobody is declared dead.

    Args:
        url: such as ``redis://127.0.0.1:6379/0``.
        fleet: sets several fleets in one Redis apart.

    Raises ServeError where the extra ``[redis]`` is not installed.
    """

    def __init__(self, url: str, *, fleet: str = "fleet") -> None:
        try:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError:
            raise ServeError("a controller with --redis needs: pip install 'agentrl-kit[redis]'") from None
        self._redis: Redis = Redis.from_url(
            url,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            retry=Retry(NoBackoff(), 1),
            decode_responses=True,
        )
        self._prefix = f"agentrl:{fleet}:"

    async def start(self) -> None:
        """Connect to Redis. Raises ServeError where it does not answer."""
        try:
            await _answer(self._redis.ping())
        except StateUnavailable as error:
            raise ServeError(error.message) from error

    async def claim(self, request_id: str, server_id: str) -> str:
        """Give an opening to a server, unless another has it already; return who has it."""
        key = f"{self._prefix}claim:{request_id}"
        owner = await _answer(self._redis.set(key, server_id, nx=True, get=True, ex=int(CLAIM_S)))
        return str(owner) if owner is not None else server_id

    async def unclaim(self, request_id: str, server_id: str) -> None:
        """Take an opening back from a server that could not serve it."""
        await _answer(self._redis.eval(_UNCLAIM, 1, f"{self._prefix}claim:{request_id}", server_id))

    async def claimed(self, request_id: str) -> str | None:
        """Return the server that an opening was given to."""
        owner: str | None = await _answer(self._redis.get(f"{self._prefix}claim:{request_id}"))
        return owner

    async def saw(self, server_id: str) -> None:
        """Note that a server gave a sign of life to this controller."""
        await _answer(self._redis.set(f"{self._prefix}seen:{server_id}", f"{time.time():.3f}", ex=KEPT_S))

    async def seen(self, server_id: str, within_s: float) -> bool:
        """Return whether any controller had a sign of life of a server lately."""
        last = await _answer(self._redis.get(f"{self._prefix}seen:{server_id}"))
        return last is not None and time.time() - float(last) < within_s

    async def lose(self, server_id: str) -> None:
        """Note that a server's sessions are lost; for every controller, and for good."""
        await _answer(self._redis.set(f"{self._prefix}lost:{server_id}", "1", ex=KEPT_S))

    async def is_lost(self, server_id: str) -> bool:
        """Return whether a server's sessions were declared lost."""
        return bool(await _answer(self._redis.exists(f"{self._prefix}lost:{server_id}")))

    async def knows(self, server_id: str) -> bool:
        """Return whether any controller has ever seen a server."""
        return bool(await _answer(self._redis.exists(f"{self._prefix}seen:{server_id}")))

    async def keep(
        self, session_id: str, server_id: str, seq: int, kept: bytes, turns: Sequence[bytes] = ()
    ) -> bool:
        """Keep where a session stands after step ``seq``, unless a later one is kept.

        ``turns`` are the last up to that step; those that are known already change nothing.
        False where another server is its holder.
        """
        bounds = (int(STANDING_S), KEPT_TURNS, MAX_TURNS_BYTES, ANSWERS)
        told = [turn.decode() for turn in turns]
        return await self._on_session(_KEEP, session_id, server_id, seq, kept.decode(), *bounds, *told)

    async def kept(self, session_id: str) -> KeptSession | None:
        """Return what is kept of a session."""
        key, turns_key = self._session(session_id)
        async with self._redis.pipeline() as pipe:
            pipe.hmget(key, ["holder", "seq", "kept", "deaths"])
            pipe.lrange(turns_key, 0, -1)
            (holder, seq, kept, deaths), told = await _answer(pipe.execute())
        if holder is None:
            return None
        last, turns = None if kept is None else kept.encode(), tuple(turn.encode() for turn in told)
        try:
            return KeptSession(holder=holder, seq=int(seq), kept=last, deaths=int(deaths), turns=turns)
        except (TypeError, ValueError):  # not what a controller has written
            return KeptSession(holder=holder, seq=0, kept=b"")

    async def move(self, session_id: str, holder: str, server_id: str, *, died: bool) -> bool:
        """Give a session from its holder, which has ``died`` or has no room; False where another has it."""
        return await self._on_session(_MOVE, session_id, holder, server_id, int(died), int(STANDING_S))

    async def forget_kept(self, session_id: str, holder: str) -> None:
        """Forget where a session stands: it has ended, says its holder. Where it went is still known."""
        known_s = 0 if holder == home(session_id) else int(CLAIM_S)
        await self._on_session(_FORGET, session_id, holder, known_s)

    async def aclose(self) -> None:
        """Disconnect from Redis."""
        await self._redis.aclose()

    def _session(self, session_id: str) -> tuple[str, str]:
        """Return the keys of what is kept of a session, and of its turns."""
        return f"{self._prefix}session:{session_id}", f"{self._prefix}turns:{session_id}"

    async def _on_session(self, script: str, session_id: str, *arguments: str | int) -> bool:
        return bool(await _answer(self._redis.eval(script, 2, *self._session(session_id), *arguments)))


async def _answer(asking: Awaitable[Any] | Any) -> Any:
    """Return what Redis answers. Raises StateUnavailable."""
    from redis.exceptions import RedisError

    try:
        async with asyncio.timeout(2 * ANSWER_S):
            return await asking
    except (RedisError, OSError, TimeoutError) as error:
        words = f"the controller's Redis does not answer ({error or type(error).__name__}); try again"
        raise StateUnavailable(words, retry_after=1) from error
