"""What the controllers of one fleet must agree on."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentrl_env.server.failover import ANSWERS, MAX_TURNS_BYTES
from agentrl_env.session.history import KEPT_TURNS

CLAIM_S = 900.0
"""How long it is remembered which server an opening was given to, or where a session has ended."""
STANDING_S = 3600.0
"""How long it is kept where a session stands, after its last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSession:
    """A session that can be gone on with when its server is lost."""

    holder: str
    """The server that has it."""
    seq: int
    """Number of steps taken."""
    kept: bytes | None
    """Where it stands, as a ``Kept``; None: it has ended."""
    deaths: int = 0
    """How many of its servers have died since its last step."""
    turns: tuple[bytes, ...] = ()
    """Its last turns, each as JSON."""

    def after(self, seq: int, turns: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the last turns after step ``seq``, of which ``turns`` were told: within the bounds."""
        new = seq - self.seq
        last = [*self.turns, *turns[len(turns) - new :]] if new <= len(turns) else list(turns)
        last, size = last[-KEPT_TURNS:], sum(map(len, last[-KEPT_TURNS:]))
        while size > MAX_TURNS_BYTES and len(last) > ANSWERS:
            size -= len(last.pop(0))
        return tuple(last)


def home(session_id: str) -> str:
    """Return the server that has opened a session; its id tells."""
    return session_id.partition(".")[0]


class FleetState(Protocol):
    """The few facts that controllers share. Where sessions live is not among them: ids tell.

    Methods raise StateUnavailable where what holds the state does not answer.
    """

    async def start(self) -> None:
        """Connect to what holds the state. Raises ServeError where it does not answer."""

    async def claim(self, request_id: str, server_id: str) -> str:
        """Give an opening to a server, unless another has it already; return who has it."""

    async def unclaim(self, request_id: str, server_id: str) -> None:
        """Take an opening back from a server that could not serve it."""

    async def claimed(self, request_id: str) -> str | None:
        """Return the server that an opening was given to."""

    async def saw(self, server_id: str) -> None:
        """Note that a server gave a sign of life to this controller."""

    async def seen(self, server_id: str, within_s: float) -> bool:
        """Return whether any controller had a sign of life of a server lately."""

    async def lose(self, server_id: str) -> None:
        """Note that a server's sessions are lost; for every controller, and for good."""

    async def is_lost(self, server_id: str) -> bool:
        """Return whether a server's sessions were declared lost."""

    async def knows(self, server_id: str) -> bool:
        """Return whether any controller has ever seen a server."""

    async def keep(
        self, session_id: str, server_id: str, seq: int, kept: bytes, turns: Sequence[bytes] = ()
    ) -> bool:
        """Keep where a session stands after step ``seq``, unless a later one is kept.

        ``turns`` are the last up to that step; those that are known already change nothing.
        False where another server is its holder.
        """

    async def kept(self, session_id: str) -> KeptSession | None:
        """Return what is kept of a session."""

    async def move(self, session_id: str, holder: str, server_id: str, *, died: bool) -> bool:
        """Give a session from its holder, which has ``died`` or has no room; False where another has it."""

    async def forget_kept(self, session_id: str, holder: str) -> None:
        """Forget where a session stands: it has ended, says its holder. Where it went is still known."""

    async def aclose(self) -> None:
        """Disconnect from what holds the state."""


class MemoryState:
    """The state of a fleet with one controller; a ``FleetState``.

    Args:
        clock: seconds, monotonic.
        kept: how many openings, and servers, are remembered.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, kept: int = 100_000) -> None:
        self._clock = clock
        self._kept = kept
        self._claims: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._lost: OrderedDict[str, None] = OrderedDict()
        self._sessions: OrderedDict[str, tuple[KeptSession, float]] = OrderedDict()

    async def start(self) -> None:
        """Do nothing: the state is in this process."""

    async def claim(self, request_id: str, server_id: str) -> str:
        """Give an opening to a server, unless another has it already; return who has it."""
        owner = await self.claimed(request_id)
        if owner is None:
            self._claims[request_id] = (server_id, self._clock())
            self._forget()
        return owner or server_id

    async def unclaim(self, request_id: str, server_id: str) -> None:
        """Take an opening back from a server that could not serve it."""
        if await self.claimed(request_id) == server_id:
            del self._claims[request_id]

    async def claimed(self, request_id: str) -> str | None:
        """Return the server that an opening was given to."""
        claim = self._claims.get(request_id)
        return claim[0] if claim is not None else None

    async def saw(self, server_id: str) -> None:
        """Note a sign of life."""
        self._seen[server_id] = self._clock()
        self._forget()

    async def seen(self, server_id: str, within_s: float) -> bool:
        """Return whether there was a sign of life lately."""
        return self._clock() - self._seen.get(server_id, float("-inf")) < within_s

    async def lose(self, server_id: str) -> None:
        """Note that a server's sessions are lost."""
        self._lost[server_id] = None
        self._forget()

    async def is_lost(self, server_id: str) -> bool:
        """Return whether a server's sessions were declared lost."""
        return server_id in self._lost

    async def knows(self, server_id: str) -> bool:
        """Return whether a server was ever seen."""
        return server_id in self._seen

    async def keep(
        self, session_id: str, server_id: str, seq: int, kept: bytes, turns: Sequence[bytes] = ()
    ) -> bool:
        """Keep where a session stands after step ``seq``, unless a later one is kept.

        ``turns`` are the last up to that step; those that are known already change nothing.
        False where another server is its holder.
        """
        known = await self.kept(session_id) or KeptSession(holder=server_id, seq=-1, kept=None)
        if known.holder != server_id:
            return False
        if known.seq <= seq:
            last = known.after(seq, turns)
            given = KeptSession(holder=server_id, seq=seq, kept=kept, turns=last)
            self._remember(session_id, given, STANDING_S)
        return True

    async def kept(self, session_id: str) -> KeptSession | None:
        """Return what is kept of a session."""
        known, end = self._sessions.get(session_id, (None, 0.0))
        return known if end > self._clock() else None

    async def move(self, session_id: str, holder: str, server_id: str, *, died: bool) -> bool:
        """Give a session from its holder, which has ``died`` or has no room; False where another has it."""
        known = await self.kept(session_id)
        if known is None or known.holder != holder:
            return False
        given = replace(known, holder=server_id, deaths=known.deaths + died)
        self._remember(session_id, given, STANDING_S)
        return True

    async def forget_kept(self, session_id: str, holder: str) -> None:
        """Forget where a session stands: it has ended, says its holder. Where it went is still known."""
        known = await self.kept(session_id)
        if known is None or known.holder != holder:
            return
        if holder == home(session_id):
            del self._sessions[session_id]
        else:
            self._remember(session_id, replace(known, kept=None, turns=()), CLAIM_S)

    async def aclose(self) -> None:
        """Do nothing: the state ends with the process."""

    def _remember(self, session_id: str, known: KeptSession, seconds: float) -> None:
        self._sessions[session_id] = (known, self._clock() + seconds)
        self._sessions.move_to_end(session_id)
        while next(iter(self._sessions.values()))[1] <= self._clock() or len(self._sessions) > self._kept:
            self._sessions.popitem(last=False)

    def _forget(self) -> None:
        horizon = self._clock() - CLAIM_S
        while self._claims and next(iter(self._claims.values()))[1] < horizon:
            self._claims.popitem(last=False)
        for table in (self._claims, self._seen, self._lost):
            while len(table) > self._kept:
                table.popitem(last=False)
