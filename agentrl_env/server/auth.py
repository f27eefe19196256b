"""Tokens and callers.

The operator token permits every call. MAC is the base64url form of HMAC-SHA256.

- An agent token allows its holder to step and read one session. Its form is
  ``agent.SESSION_ID.EXPIRY.ID.MAC``, signed with a random key of the server or fleet. See ``AgentTokens``.
- The metrics token allows its holder to read ``/metrics`` and the data of the dashboard. Its form is
  ``metrics.MAC``, signed with the operator token. It cannot open, step or close a session.
- The link token allows a server to connect to a controller, and nothing else. Its form is ``link.MAC``,
  signed with the operator token, so every controller can verify it and servers can receive it in advance.
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
from agentrl_env.wire import Call, is_header_value

CLIENT_HEADER = "x-agentrl-client"
"""Request header with the name of a client."""
AGENT_KEY = "AGENTRL_AGENT_KEY"
"""Environment variable with the random key of agent tokens."""
CLOSED_S = 600.0
"""Seconds for which the tokens of a closed session are refused, before the session is forgotten."""
SHARE_S = 1.0
"""Seconds between exchanges of revocations among the controllers of a fleet."""
MIN_TOKEN_CHARS, MIN_TOKEN_VARIETY = 16, 8
NEW_TOKEN = "python -c 'import secrets; print(secrets.token_urlsafe())' > token.txt"
"""Command that makes an operator token."""
_AGENT = "agent."
_LINK = re.compile(r"link\.[A-Za-z0-9_-]{43}")
_OF_LINK = b"\0link"
"""The message that the link token's MAC authenticates."""
_OF_METRICS = b"\0metrics"
"""The message that the metrics token's MAC authenticates."""
_NAME = re.compile(r"[^\x21-\x7e]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of a request or a WebSocket."""

    name: str = ""
    """Name of the client in logs and limits."""
    session_id: str | None = None
    """Session of an agent token. None for the operator token."""
    is_server: bool = False
    """True for a link token, which allows no call."""
    is_monitor: bool = False
    """True for a metrics token, which only allows reading."""
    rates: Rates | None = None
    """Rate limits of each call. None if the request was already counted as a whole."""
    grant: Grant | None = None
    """Content of an agent token."""
    budget: Budget | None = None
    """Budget of the caller. None before the caller is admitted."""

    def admit(self, call: Call, session_id: str | None) -> None:
        """Authorize and rate-limit a call of a session. Raises Forbidden, RateLimited."""
        self.check_token(call.agent and session_id in (None, self.session_id))
        if self.rates is not None:
            limit_rate(self.rates, self.name)
        if self.budget is not None:
            self.budget.admit()

    def check_token(self, agent_may: bool) -> None:
        """Raise Forbidden for a link or metrics token, and for an agent token if ``agent_may`` is False.

        Raises Unauthorized for an agent token that has expired or was revoked since it was presented.
        """
        if self.is_server:
            raise Forbidden("a link token only permits a server to join a fleet: serve --controller URL")
        if self.is_monitor:
            raise Forbidden("a metrics token only allows reading metrics, servers, tasks and sessions")
        if self.session_id is not None and not agent_may:
            raise Forbidden("an agent token only allows stepping and reading its own session")
        if self.grant is not None:
            self.grant.check()


OPERATOR = Caller()
"""The caller with the operator token, or any caller if the server has no token."""
caller: ContextVar[Caller] = ContextVar("agentrl_caller", default=OPERATOR)
"""The caller that the running task serves."""


def limit_rate(rates: Rates, client: str) -> None:
    """Count one request of a client. Raises RateLimited."""
    wait = rates.take(client)
    if wait:
        raise RateLimited("this client makes too many requests; slow down", retry_after=round(wait, 3))


def is_weak(token: str) -> bool:
    """Return True if a token is short or uniform enough to be guessed."""
    return len(token) < MIN_TOKEN_CHARS or len(set(token)) < MIN_TOKEN_VARIETY


def check_characters(token: str) -> None:
    """Raise ServeError if clients cannot send a token in a header."""
    if not is_header_value(token) or token != token.strip():
        raise ServeError(
            "the token has a character that is not allowed in an HTTP header, such as a letter with an "
            f"accent, a line break, or white space around it; make one with {NEW_TOKEN}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Content of an agent token."""

    session_id: str
    expiry: int
    """Unix time, in seconds."""
    token_id: str
    tokens: AgentTokens

    def check(self) -> None:
        """Raise Unauthorized if the token has expired or was revoked."""
        if self.tokens.now() >= self.expiry:
            raise Unauthorized("this agent token has expired; the operator can issue another")
        if self.tokens.is_revoked(self.session_id, self.token_id):
            raise Unauthorized("this agent token was revoked")


class TokenStore(Protocol):
    """Store in which the controllers of a fleet share the agent tokens' key and the revocations."""

    async def agent_key(self, key: str) -> str:
        """Store a key unless one is already stored, and return the stored key. Raises StateUnavailable."""

    async def revoke_tokens(self, session_id: str, token_id: str, until: float) -> None:
        """Store the id of a session's only valid token until a Unix time. Raises StateUnavailable."""

    async def revoked_tokens(self, now: float) -> dict[str, tuple[str, float]]:
        """Return token id and end of each revocation in force at a Unix time. Raises StateUnavailable."""


class AgentTokens:
    """Issues, verifies and revokes agent tokens.

    Tokens are signed with a key derived from the operator token and a random key. So an agent token does not
    help to guess the operator token, and reading the store does not allow signing. The random key comes from
    the variable AGENTRL_AGENT_KEY, else from the controllers' store, else it is generated by this process.

    Args:
        token: operator token.
        lifetime_s: seconds for which a token is valid.
        clock: returns the Unix time in seconds.

    Raises ServeError if the key in the variable is too weak.
    """

    def __init__(
        self, token: str, lifetime_s: float = AGENT_TOKEN_S, clock: Callable[[], float] = time.time
    ) -> None:
        given = os.environ.get(AGENT_KEY)
        if given and is_weak(given):
            raise ServeError(f"{AGENT_KEY} is too easy to guess; generate one with: {NEW_TOKEN}")
        self.now = clock
        self._token = token
        self._lifetime_s = lifetime_s
        self._is_given = bool(given)
        self._use(given or secrets.token_urlsafe(32))
        self._renewed: dict[str, tuple[str, float]] = {}
        """Sessions with revoked tokens, with the id of the only valid token and the end of the revocation."""
        self._closed: dict[str, float] = {}
        """Closed sessions with the end of their revocation, earliest first."""
        self._store: TokenStore | None = None
        self._sharing: asyncio.Task[None] | None = None

    def issue(self, session_id: str) -> str:
        """Return a new token of a session."""
        return self._sign(session_id, secrets.token_urlsafe(9))

    async def renew(self, session_id: str) -> str:
        """Return a new token of a session and revoke the earlier ones. Raises StateUnavailable."""
        token_id, until = secrets.token_urlsafe(9), self.now() + self._lifetime_s
        if self._store is not None:
            await self._store.revoke_tokens(session_id, token_id, until)
        self._renewed = {name: kept for name, kept in self._renewed.items() if kept[1] > self.now()}
        self._renewed[session_id] = (token_id, until)
        return self._sign(session_id, token_id)

    def close(self, session_id: str) -> None:
        """Revoke the tokens of a closed session."""
        now = self.now()
        while self._closed and next(iter(self._closed.values())) <= now:
            del self._closed[next(iter(self._closed))]
        self._closed.setdefault(session_id, now + CLOSED_S)

    def is_revoked(self, session_id: str, token_id: str) -> bool:
        """Return True if a token of a session was revoked."""
        renewed = self._renewed.get(session_id)
        return session_id in self._closed or (renewed is not None and renewed[0] != token_id)

    def read(self, shown: str) -> Grant | None:
        """Return the content of an agent token, or None if it is invalid. Raises the errors of ``check``."""
        text, _, mac = shown.removeprefix(_AGENT).rpartition(".")
        right = _mac(self._key, text.encode("latin-1", "replace"))
        if not shown.startswith(_AGENT) or not hmac.compare_digest(mac.encode(), right.encode()):
            return None
        session_id, expiry, token_id = text.rsplit(".", 2)
        grant = Grant(session_id=session_id, expiry=int(expiry), token_id=token_id, tokens=self)
        grant.check()
        return grant

    async def share(self, store: TokenStore) -> None:
        """Share the key and revocations with other controllers until ``stop``. Raises StateUnavailable."""
        self._store = store
        await self._synchronize(store)
        self._sharing = asyncio.create_task(self._keep_sharing(store))

    async def stop(self) -> None:
        """Stop sharing. Idempotent."""
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
    """Return the link token that is derived from the operator token. A link token is returned unchanged.

    All servers of a fleet share the link token and sign checkpoints with it.
    """
    return token if is_link_token(token) else f"link.{_mac(token.encode(), _OF_LINK)}"


def metrics_token(token: str) -> str:
    """Return the metrics token of all servers that have this operator token."""
    return f"metrics.{_mac(token.encode(), _OF_METRICS)}"


def is_link_token(token: str) -> bool:
    """Return True if a token has the form of a link token."""
    return _LINK.fullmatch(token) is not None


def bearer_of(shown: bytes, token: str, tokens: AgentTokens) -> Caller | None:
    """Return the caller of a presented token, without a name, or None if the token is invalid.

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


def bearer_token(shown: bytes) -> bytes:
    """Return the token in an authorization header, or nothing for another scheme than Bearer."""
    scheme, _, token = shown.partition(b" ")
    return token.lstrip(b" ") if scheme.lower() == b"bearer" else b""


def as_bearer(shown: bytes) -> bytes:
    """Convert a Basic authorization header to a bearer token, which is the password.

    Peers of AgentRL's protocol do not support tokens, but accept URLs such as ``http://any:TOKEN@host/api``.
    """
    scheme, _, encoded = shown.partition(b" ")
    if scheme.lower() != b"basic":
        return shown
    try:
        return b"Bearer " + b64decode(encoded.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _mac(key: bytes, text: bytes) -> str:
    return urlsafe_b64encode(hmac.digest(key, text, sha256)).rstrip(b"=").decode()


def client_name(header: bytes, address: object) -> str:
    """Return the name in the client's header, made safe for logs, else the client's address."""
    name = _NAME.sub("", header.decode("latin-1"))[:128]
    return name or (str(address[0]) if isinstance(address, tuple | list) and address else "")
