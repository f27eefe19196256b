"""Tokens and callers.

The operator token permits every call. Two kinds of tokens are derived from it and never stored, so that every
server and controller with the operator token verifies them. MAC(x) is the base64url form of HMAC-SHA256 under
the operator token.

- An agent token permits to step and read one session: ``agent.SESSION_ID.MAC``.
- The link token permits a server to connect to a controller, and nothing else: ``link.MAC``.
"""

from __future__ import annotations

import hmac
import re
from base64 import urlsafe_b64encode
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256

from agentrl_env.errors import Forbidden, RateLimited
from agentrl_env.server.limits import Budget, Rates
from agentrl_env.wire import Call

CLIENT_HEADER = "x-agentrl-client"
"""Request header with the name of a client."""
_AGENT = "agent."
_LINK = re.compile(r"link\.[A-Za-z0-9_-]{43}")
_OF_LINK = b"\0link"
"""Message of the link token's MAC; no session has this id."""
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
    rates: Rates | None = None
    """Rate limits of each call; None where the request as a whole was counted."""
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
        """Raise Forbidden for a link token, and for an agent token where ``agent_may`` is False."""
        if self.is_server:
            raise Forbidden("a link token only permits a server to join a fleet: serve --controller URL")
        if self.session_id is not None and not agent_may:
            raise Forbidden("an agent token only permits to step and read its own session")


OPERATOR = Caller()
"""The caller with the operator token, and any caller where there is no token."""
caller: ContextVar[Caller] = ContextVar("agentrl_caller", default=OPERATOR)
"""The caller that the running task serves."""


def limit_rate(rates: Rates, client: str) -> None:
    """Count one request of a client. Raises RateLimited."""
    wait = rates.take(client)
    if wait:
        raise RateLimited("this client makes too many requests; slow down", retry_after=round(wait, 3))


def agent_token(token: str, session_id: str) -> str:
    """Return the agent token of a session, derived from the operator token."""
    return f"{_AGENT}{session_id}.{_mac(token, session_id.encode())}"


def link_token(token: str) -> str:
    """Return the link token of a fleet, derived from the operator token; a link token is returned as it is.

    All servers of a fleet have the same one and sign checkpoints with it.
    """
    return token if is_link_token(token) else f"link.{_mac(token, _OF_LINK)}"


def is_link_token(token: str) -> bool:
    """Return whether a token has the form of a link token."""
    return _LINK.fullmatch(token) is not None


def bearer_of(shown: bytes, token: str) -> Caller | None:
    """Return the caller of a presented token, without a name; None where it is not valid.

    Args:
        shown: presented token.
        token: operator token.
    """
    if hmac.compare_digest(shown, token.encode()):
        return OPERATOR
    session_id = session_of(shown.decode("latin-1"), token)
    if session_id is not None:
        return Caller(session_id=session_id)
    return Caller(is_server=True) if hmac.compare_digest(shown, link_token(token).encode()) else None


def session_of(shown: str, token: str) -> str | None:
    """Return the session of an agent token; None where it is not valid.

    Args:
        shown: presented token.
        token: operator token.
    """
    session_id = shown.removeprefix(_AGENT).rpartition(".")[0]
    if not shown.startswith(_AGENT) or not session_id:
        return None
    right = agent_token(token, session_id)
    return session_id if hmac.compare_digest(shown.encode(), right.encode()) else None


def _mac(token: str, text: bytes) -> str:
    return urlsafe_b64encode(hmac.digest(token.encode(), text, sha256)).rstrip(b"=").decode()


def client_name(header: bytes, address: object) -> str:
    """Return the name that a client gives itself, safe for logs; else its address."""
    name = _NAME.sub("", header.decode("latin-1"))[:128]
    return name or (str(address[0]) if isinstance(address, tuple | list) and address else "")
