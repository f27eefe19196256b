"""Who calls, and what a token lets them do.

The operator's token may do all. Two others are derived from it and never stored, so that every server and
controller that has the operator's can tell them, with MAC(x) = base64url(HMAC-SHA256(operator's token, x)):

- An agent's token is bound to one session, which it may step and read: ``agent.SESSION_ID.MAC``.
- The fleet's token lets a server dial a controller, and its holder do nothing else: ``link.MAC``.
"""

from __future__ import annotations

import hmac
import re
from base64 import urlsafe_b64encode
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256

from agentrl_env.errors import Forbidden, RateLimited
from agentrl_env.server.limits import Rates

CLIENT_HEADER = "x-agentrl-client"
"""How clients name themselves."""
_AGENT = "agent."
_LINK = re.compile(r"link\.[A-Za-z0-9_-]{43}")
_OF_LINK = b"\0link"
"""What the fleet's token is the MAC of; no session has this id."""
_NAME = re.compile(r"[^\x21-\x7e]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who makes the calls of a request or a WebSocket."""

    name: str = ""
    """The client, in logs and limits."""
    session_id: str | None = None
    """The only session of an agent; None: an operator, who may do all."""
    is_server: bool = False
    """Whether it has shown the fleet's token: it may dial in at a controller, and make no call."""
    rates: Rates | None = None
    """What each call takes from; None where the request as a whole has been counted."""

    def refuse_all_but(self, session_id: str | None) -> None:
        """Raise Forbidden where the caller is a server, or the agent of another session than the call's."""
        if self.is_server:
            raise Forbidden("this token may only bring a server into a fleet: serve --controller URL")
        if self.session_id is not None and self.session_id != session_id:
            raise Forbidden("an agent's token may only step its own session and read how it stands")

    def count_call(self) -> None:
        """Raise RateLimited where the caller makes too many calls."""
        if self.rates is not None:
            refuse_hurry(self.rates, self.name)


OPERATOR = Caller()
"""Who may do all: whoever has shown the operator's token, or calls where there is none."""
caller: ContextVar[Caller] = ContextVar("agentrl_caller", default=OPERATOR)
"""Who the running task works for."""


def refuse_hurry(rates: Rates, client: str) -> None:
    """Count one request. Raises RateLimited."""
    wait = rates.take(client)
    if wait:
        raise RateLimited("more requests than this client may make; slow down", retry_after=round(wait, 3))


def agent_token(token: str, session_id: str) -> str:
    """Return what lets an agent step one session.

    Args:
        token: the operator's.
        session_id: the session.
    """
    return f"{_AGENT}{session_id}.{_mac(token, session_id.encode())}"


def link_token(token: str) -> str:
    """Return what lets servers dial in at the controllers of a fleet; of itself, the same.

    All servers of a fleet have the same, so with ``--resume`` each trusts the states that another has
    sealed with it.

    Args:
        token: the operator's.
    """
    return token if is_link_token(token) else f"link.{_mac(token, _OF_LINK)}"


def is_link_token(token: str) -> bool:
    """Return whether a token has the form of those that only let servers dial in."""
    return _LINK.fullmatch(token) is not None


def bearer_of(shown: bytes, token: str) -> Caller | None:
    """Return who has shown a token, without a name; None for a stranger.

    Args:
        shown: what a caller has shown.
        token: the operator's.
    """
    if hmac.compare_digest(shown, token.encode()):
        return OPERATOR
    session_id = session_of(shown.decode("latin-1"), token)
    if session_id is not None:
        return Caller(session_id=session_id)
    return Caller(is_server=True) if hmac.compare_digest(shown, link_token(token).encode()) else None


def session_of(shown: str, token: str) -> str | None:
    """Return the session that a shown token is bound to; None where it is no agent's token.

    Args:
        shown: what a caller has shown.
        token: the operator's.
    """
    session_id = shown.removeprefix(_AGENT).rpartition(".")[0]
    if not shown.startswith(_AGENT) or not session_id:
        return None
    right = agent_token(token, session_id)
    return session_id if hmac.compare_digest(shown.encode(), right.encode()) else None


def _mac(token: str, text: bytes) -> str:
    return urlsafe_b64encode(hmac.digest(token.encode(), text, sha256)).rstrip(b"=").decode()


def client_name(header: bytes, address: object) -> str:
    """Return a client's name as it gives it, cut to what fits into a log; else its address."""
    name = _NAME.sub("", header.decode("latin-1"))[:128]
    return name or (str(address[0]) if isinstance(address, tuple | list) and address else "")
