"""The state that the controllers of one fleet share: its interface, and the store in memory."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

CLAIM_S = 900.0
"""Seconds for which the claim of an idempotency key is kept."""


class FleetStore(Protocol):
    """State that the controllers of a fleet share. It contains no sessions, because their ids name servers.

    Methods raise StateUnavailable while the store does not answer.
    """

    async def start(self) -> None:
        """Connect. Raises ServeError if the store does not answer."""

    async def claim(self, key: str, claim: str) -> str:
        """Claim an idempotency key unless it is already claimed, and return the current claim."""

    async def unclaim(self, key: str, claim: str) -> None:
        """Drop a claim."""

    async def claimed(self, key: str) -> str | None:
        """Return the claim of an idempotency key."""

    async def agent_key(self, key: str) -> str:
        """Store a key for agent tokens unless one is already stored, and return the stored key."""

    async def revoke_tokens(self, session_id: str, token_id: str, until: float) -> None:
        """Store the id of a session's only valid agent token until a Unix time."""

    async def revoked_tokens(self, now: float) -> dict[str, tuple[str, float]]:
        """Return the token id and the end of each revocation in force at a Unix time."""

    async def report_alive(self, server_id: str) -> None:
        """Record that this controller received a heartbeat from a server."""

    async def is_alive(self, server_id: str, within_s: float) -> bool:
        """Return True if any controller received a heartbeat within the last seconds."""

    async def report_lost(self, server_id: str) -> None:
        """Record that a server is lost."""

    async def is_lost(self, server_id: str) -> bool:
        """Return True if a server was declared lost."""

    async def knows(self, server_id: str) -> bool:
        """Return True if any controller has ever received a heartbeat from a server."""

    async def read(self, session_id: str) -> tuple[bytes | None, str]:
        """Return the record of a session and its version, or ``None, ""`` if there is none."""

    async def write(self, session_id: str, record: bytes | None, version: str, ttl_s: float) -> bool:
        """Compare and set the record of a session.

        Args:
            session_id: the session.
            record: new record; None removes it.
            version: version of the replaced record, as returned by ``read``.
            ttl_s: seconds for which the new record is kept.

        Returns False if the version of the record has changed.
        """

    async def aclose(self) -> None:
        """Disconnect."""


class MemoryStore:
    """The store of a fleet with one controller.

    Args:
        clock: returns the monotonic time in seconds.
        size: maximum number of entries of each kind. The oldest are dropped.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, size: int = 100_000) -> None:
        self._clock = clock
        self._size = size
        self._claims: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._alive: OrderedDict[str, float] = OrderedDict()
        self._lost: OrderedDict[str, None] = OrderedDict()
        self._records: OrderedDict[str, tuple[bytes, str, float]] = OrderedDict()
        """Record, version and expiry of each session, in the order of the last write."""
        self._versions = itertools.count(1)

    async def start(self) -> None:
        """Do nothing."""

    async def claim(self, key: str, claim: str) -> str:
        """Claim an idempotency key unless it is already claimed, and return the current claim."""
        horizon = self._clock() - CLAIM_S
        while self._claims and next(iter(self._claims.values()))[1] < horizon:
            self._claims.popitem(last=False)
        first = self._claims.setdefault(key, (claim, self._clock()))[0]
        self._trim(self._claims)
        return first

    async def unclaim(self, key: str, claim: str) -> None:
        """Drop a claim."""
        if await self.claimed(key) == claim:
            del self._claims[key]

    async def claimed(self, key: str) -> str | None:
        """Return the claim of an idempotency key."""
        claim = self._claims.get(key)
        return claim[0] if claim is not None else None

    async def agent_key(self, key: str) -> str:
        """Return the key, because there is no other controller."""
        return key

    async def revoke_tokens(self, session_id: str, token_id: str, until: float) -> None:
        """Do nothing, because there is no other controller."""

    async def revoked_tokens(self, now: float) -> dict[str, tuple[str, float]]:
        """Return an empty dict, because there is no other controller."""
        return {}

    async def report_alive(self, server_id: str) -> None:
        """Record that this controller received a heartbeat from a server."""
        self._alive[server_id] = self._clock()
        self._trim(self._alive)

    async def is_alive(self, server_id: str, within_s: float) -> bool:
        """Return True if the controller received a heartbeat within the last seconds."""
        return self._clock() - self._alive.get(server_id, float("-inf")) < within_s

    async def report_lost(self, server_id: str) -> None:
        """Record that a server is lost."""
        self._lost[server_id] = None
        self._trim(self._lost)

    async def is_lost(self, server_id: str) -> bool:
        """Return True if a server was declared lost."""
        return server_id in self._lost

    async def knows(self, server_id: str) -> bool:
        """Return True if the controller has ever received a heartbeat from a server."""
        return server_id in self._alive

    async def read(self, session_id: str) -> tuple[bytes | None, str]:
        """Return the record of a session and its version, or ``None, ""`` if there is none."""
        record, version, expiry = self._records.get(session_id, (b"", "", 0.0))
        return (record, version) if expiry > self._clock() else (None, "")

    async def write(self, session_id: str, record: bytes | None, version: str, ttl_s: float) -> bool:
        """Compare and set the record of a session. Return False if its version differs."""
        if version != (await self.read(session_id))[1]:
            return False
        self._records.pop(session_id, None)
        if record is not None:
            self._records[session_id] = (record, str(next(self._versions)), self._clock() + ttl_s)
        while self._records and next(iter(self._records.values()))[2] <= self._clock():
            self._records.popitem(last=False)
        self._trim(self._records)
        return True

    async def aclose(self) -> None:
        """Do nothing."""

    def _trim(self, entries: OrderedDict[str, Any]) -> None:
        while len(entries) > self._size:
            entries.popitem(last=False)
