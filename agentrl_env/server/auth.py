"""Tokens and callers.

The operator token permits every call. MAC is the base64url form of HMAC-SHA256.

- An agent token permits to step and read one session: ``agent.SESSION_ID.EXPIRY.ID.MAC``, under a random key
  of the server or fleet. See ``AgentTokens``.
- The metrics token permits to read ``/metrics`` and what the dashboard shows: ``metrics.MAC``, under the
  operator token. It neither opens, steps nor closes a session.
- The link token permits a server to connect to a controller, and nothing else: ``link.MAC``, under the
  operator token, so that every controller verifies it and every server can be given it in advance.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import secrets
import time
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from agentrl_env.errors import Forbidden, RateLimited, ServeError, StateUnavailable, Unauthorized
from agentrl_env.server.limits import AGENT_TOKEN_S, Budget, Rates
from agentrl_env.wire import Call

CLIENT_HEADER = "x-agentrl-client"
"""Request header with the name of a client."""
AGENT_KEY = "AGENTRL_AGENT_KEY"
"""Environment variable with the random key of agent tokens."""
CLOSED_S = 600.0
"""Seconds for which the tokens of a closed session are refused; then the session is forgotten."""
SHARE_S = 1.0
"""Interval in which the controllers of a fleet learn of each other's revocations."""
MIN_TOKEN_CHARS, MIN_TOKEN_VARIETY = 16, 8
NEW_TOKEN = "python -c 'import secrets; print(secrets.token_urlsafe())' > token.txt"
"""Command that makes an operator token."""
_AGENT = "agent."
_LINK = re.compile(r"link\.[A-Za-z0-9_-]{43}")
_OF_LINK = b"\0link"
"""Message of the link token's MAC."""
_OF_METRICS = b"\0metrics"
"""Message of the metrics token's MAC."""
_NAME = re.compile(r"[^\x21-\x7e]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of a request or a WebSocket."""

    name: str = ""
    """Name of the client in logs and limits."""
    session_id: str | None = None
    """Session of an agent token; None for the operator token."""
    is_server: bool = False
    """True for a link token, which permits no call."""
    is_monitor: bool = False
    """True for a metrics token, which only permits to read."""
    rates: Rates | None = None
    """Rate limits of each call; None where the request as a whole was counted."""
    grant: Grant | None = None
    """Content of an agent token."""
    budget: Budget | None = None
    """Budget of the caller; None before it is admitted."""

    def admit(self, call: Call, session_id: str | None) -> None:
        """Authorize and rate-limit a call of a session. Raises Forbidden, RateLimited."""
        self.check_token(call.agent and session_id in (None, self.session_id))
        if self.rates is not None:
            limit_rate(self.rates, self.name)
        if self.budget is not None:
            self.budget.admit()

    def check_token(self, agent_may: bool) -> None:
        """Raise Forbidden for a link or metrics token, and for an agent token where ``agent_may`` is False.

        Raises Unauthorized for an agent token that has expired or was revoked since it was presented.
        """
        if self.is_server:
            raise Forbidden("a link token only permits a server to join a fleet: serve --controller URL")
        if self.is_monitor:
            raise Forbidden("a metrics token only permits to read: metrics, servers, tasks and sessions")
        if self.session_id is not None and not agent_may:
            raise Forbidden("an agent token only permits to step and read its own session")
        if self.grant is not None:
            self.grant.check()


OPERATOR = Caller()
"""The caller with the operator token, and any caller where there is no token."""
caller: ContextVar[Caller] = ContextVar("agentrl_caller", default=OPERATOR)
"""The caller that the running task serves."""


def limit_rate(rates: Rates, client: str) -> None:
    """Count one request of a client. Raises RateLimited."""
    wait = rates.take(client)
    if wait:
        raise RateLimited("this client makes too many requests; slow down", retry_after=round(wait, 3))


def is_weak(token: str) -> bool:
    """Return whether a token is so short or uniform that it can be guessed."""
    return len(token) < MIN_TOKEN_CHARS or len(set(token)) < MIN_TOKEN_VARIETY


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Content of an agent token."""

    session_id: str
    expiry: int
    """Unix time, in seconds."""
    token_id: str
    tokens: AgentTokens

    def check(self) -> None:
        """Raise Unauthorized where the token has expired or was revoked."""
        if self.tokens.now() >= self.expiry:
            raise Unauthorized("this agent token has expired; the operator can issue another")
        if self.tokens.is_revoked(self.session_id, self.token_id):
            raise Unauthorized("this agent token was revoked")


class TokenStore(Protocol):
    """Store in which the controllers of a fleet share the key of agent tokens, and revocations."""

    async def agent_key(self, key: str) -> str:
        """Keep a key unless there is one already; return the one that is kept. Raises StateUnavailable."""

    async def revoke_tokens(self, session_id: str, token_id: str, until: float) -> None:
        """Keep, until a Unix time, the id of a session's only valid token. Raises StateUnavailable."""

    async def revoked_tokens(self, now: float) -> dict[str, tuple[str, float]]:
        """Return the id and the end of each revocation that holds at a Unix time. Raises StateUnavailable."""


class AgentTokens:
    """Issues, verifies and revokes agent tokens.

    They are signed with a key derived from the operator token and a random one: who sees an agent token
    cannot guess the operator token, and who reads the store cannot sign. The random key is that of the
    variable AGENTRL_AGENT_KEY, else of the controllers' store, else of this process.

    Args:
        token: operator token.
        lifetime_s: seconds for which a token is valid.
        clock: Unix time, in seconds.

    Raises ServeError where the variable can be guessed.
    """

    def __init__(
        self, token: str, lifetime_s: float = AGENT_TOKEN_S, clock: Callable[[], float] = time.time
    ) -> None:
        given = os.environ.get(AGENT_KEY)
        if given and is_weak(given):
            raise ServeError(f"{AGENT_KEY} is too easy to guess; make it like a token: {NEW_TOKEN}")
        self.now = clock
        self._token = token
        self._lifetime_s = lifetime_s
        self._is_given = bool(given)
        self._use(given or secrets.token_urlsafe(32))
        self._renewed: dict[str, tuple[str, float]] = {}
        """Sessions with revoked tokens: the id of the only valid one, and the end of the revocation."""
        self._closed: dict[str, float] = {}
        """Closed sessions: the end of the revocation, the next one first."""
        self._store: TokenStore | None = None
        self._sharing: asyncio.Task[None] | None = None

    def issue(self, session_id: str) -> str:
        """Return a new token of a session."""
        return self._sign(session_id, secrets.token_urlsafe(9))

    async def renew(self, session_id: str) -> str:
        """Return a new token of a session, and revoke those before. Raises StateUnavailable."""
        token_id, until = secrets.token_urlsafe(9), self.now() + self._lifetime_s
        if self._store is not None:
            await self._store.revoke_tokens(session_id, token_id, until)
        self._renewed = {name: kept for name, kept in self._renewed.items() if kept[1] > self.now()}
        self._renewed[session_id] = (token_id, until)
        return self._sign(session_id, token_id)

    def close(self, session_id: str) -> None:
        """Revoke the tokens of a session that is closed."""
        now = self.now()
        while self._closed and next(iter(self._closed.values())) <= now:
            del self._closed[next(iter(self._closed))]
        self._closed.setdefault(session_id, now + CLOSED_S)

    def is_revoked(self, session_id: str, token_id: str) -> bool:
        """Return whether a token of a session was revoked."""
        renewed = self._renewed.get(session_id)
        return session_id in self._closed or (renewed is not None and renewed[0] != token_id)

    def read(self, shown: str) -> Grant | None:
        """Return the content of an agent token; None where it is not valid. Raises what ``check`` does."""
        text, _, mac = shown.removeprefix(_AGENT).rpartition(".")
        right = _mac(self._key, text.encode("latin-1", "replace"))
        if not shown.startswith(_AGENT) or not hmac.compare_digest(mac.encode(), right.encode()):
            return None
        session_id, expiry, token_id = text.rsplit(".", 2)
        grant = Grant(session_id=session_id, expiry=int(expiry), token_id=token_id, tokens=self)
        grant.check()
        return grant

    async def share(self, store: TokenStore) -> None:
        """Share key and revocations with the other controllers, until ``stop``. Raises StateUnavailable."""
        self._store = store
        await self._synchronize(store)
        self._sharing = asyncio.create_task(self._keep_sharing(store))

    async def stop(self) -> None:
        """Stop sharing; idempotent."""
        if self._sharing is not None:
            self._sharing.cancel()
            await asyncio.gather(self._sharing, return_exceptions=True)

    async def _keep_sharing(self, store: TokenStore) -> None:
        while True:
            await asyncio.sleep(SHARE_S)
            try:
                await self._synchronize(store)
            except StateUnavailable:
                continue  # the registry logs it

    async def _synchronize(self, store: TokenStore) -> None:
        if not self._is_given:
            self._use(await store.agent_key(self._random))
        self._renewed.update(await store.revoked_tokens(self.now()))

    def _use(self, random: str) -> None:
        self._random = random
        self._key = hmac.digest(random.encode(), self._token.encode(), sha256)

    def _sign(self, session_id: str, token_id: str) -> str:
        text = f"{session_id}.{int(self.now() + self._lifetime_s)}.{token_id}"
        return f"{_AGENT}{text}.{_mac(self._key, text.encode())}"


def link_token(token: str) -> str:
    """Return the link token of a fleet, derived from the operator token; a link token is returned as it is.

    All servers of a fleet have the same one and sign checkpoints with it.
    """
    return token if is_link_token(token) else f"link.{_mac(token.encode(), _OF_LINK)}"


def metrics_token(token: str) -> str:
    """Return the metrics token, derived from the operator token; every server of the token accepts it."""
    return f"metrics.{_mac(token.encode(), _OF_METRICS)}"


def is_link_token(token: str) -> bool:
    """Return whether a token has the form of a link token."""
    return _LINK.fullmatch(token) is not None


def bearer_of(shown: bytes, token: str, tokens: AgentTokens) -> Caller | None:
    """Return the caller of a presented token, without a name; None where it is not valid.

    Args:
        shown: presented token.
        token: operator token.
        tokens: verifies agent tokens.

    Raises Unauthorized for an agent token that has expired or was revoked.
    """
    if hmac.compare_digest(shown, token.encode()):
        return OPERATOR
    grant = tokens.read(shown.decode("latin-1"))
    if grant is not None:
        return Caller(session_id=grant.session_id, grant=grant)
    if hmac.compare_digest(shown, metrics_token(token).encode()):
        return Caller(is_monitor=True)
    return Caller(is_server=True) if hmac.compare_digest(shown, link_token(token).encode()) else None


def as_bearer(shown: bytes) -> bytes:
    """Return an authorization header with the password of Basic authentication as a bearer token.

    The peers of AgentRL's protocol know no tokens, but URLs such as ``http://any:TOKEN@host/api``.
    """
    scheme, _, encoded = shown.partition(b" ")
    if scheme != b"Basic":
        return shown
    try:
        return b"Bearer " + b64decode(encoded, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _mac(key: bytes, text: bytes) -> str:
    return urlsafe_b64encode(hmac.digest(key, text, sha256)).rstrip(b"=").decode()


def client_name(header: bytes, address: object) -> str:
    """Return the name that a client gives itself, safe for logs; else its address."""
    name = _NAME.sub("", header.decode("latin-1"))[:128]
    return name or (str(address[0]) if isinstance(address, tuple | list) and address else "")
