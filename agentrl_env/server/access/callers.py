"""Who calls, and what a token lets them do.

The operator's token may do all. An agent's token is bound to one session, which it may step and read:
``agent.SESSION_ID.MAC``, where MAC = base64url(HMAC-SHA256(operator's token, session id)). It is derived
and never stored, so every server and controller that has the operator's token can tell it.
"""

from __future__ import annotations

import hmac
import re
from base64 import urlsafe_b64encode
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256

from agentrl_env.errors import Forbidden, RateLimited
from agentrl_env.server.access.limits import Rates

CLIENT_HEADER = "x-agentrl-client"
"""How clients name themselves."""
_AGENT = "agent."
_NAME = re.compile(r"[^\x21-\x7e]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who makes the calls of a request or a WebSocket."""

    name: str = ""
    """The client, in logs and limits."""
    session_id: str | None = None
    """The only session of an agent; None: an operator, who may do all."""
    rates: Rates | None = None
    """What each call takes from; None where the request as a whole has been counted."""

    def refuse_all_but(self, session_id: str | None) -> None:
        """Raise Forbidden where the caller is the agent of another session than the call's."""
        if self.session_id is not None and self.session_id != session_id:
            raise Forbidden("an agent's token may only step its own session and read how it stands")

    def count_call(self) -> None:
        """Raise RateLimited where the caller makes too many calls."""
        if self.rates is not None:
            refuse_hurry(self.rates, self.name)


_NOBODY = Caller()
caller: ContextVar[Caller] = ContextVar("agentrl_caller", default=_NOBODY)
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
    mac = hmac.digest(token.encode(), session_id.encode(), sha256)
    return f"{_AGENT}{session_id}.{urlsafe_b64encode(mac).rstrip(b'=').decode()}"


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


def client_name(header: bytes, address: object) -> str:
    """Return a client's name as it gives it, cut to what fits into a log; else its address."""
    name = _NAME.sub("", header.decode("latin-1"))[:128]
    return name or (str(address[0]) if isinstance(address, tuple | list) and address else "")
