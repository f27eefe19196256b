"""What every request passes first: tokens, the size limit, the rate; every answer is stamped and counted."""

from __future__ import annotations

import logging
import re
from base64 import urlsafe_b64decode
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from math import ceil
from urllib.parse import urlsplit

from pydantic_core import to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from agentrl_env.errors import BodyTooLarge, Forbidden, RateLimited, Unauthorized, WireError
from agentrl_env.schema import echo
from agentrl_env.server.auth import (
    CLIENT_HEADER,
    OPERATOR,
    Caller,
    bearer_of,
    caller,
    client_name,
    refuse_hurry,
)
from agentrl_env.server.dashboard.shell import SHELL
from agentrl_env.server.limits import Limits, Rates
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.server.telemetry.tracing import Tracing
from agentrl_env.wire import LINK_PATH, PROTOCOL_HEADER, PROTOCOL_VERSION, SOCKET_HEADER, SOCKET_PATH

logger = logging.getLogger("agentrl_env")

MAX_BODY_BYTES = Limits().max_body_bytes
TOKEN_PREFIX = "agentrl.token."
"""What comes before the token, in base64url without padding, where it is shown as a subprotocol."""
_PUBLIC = frozenset({"/health", "/ready", *SHELL})
"""What needs no token: it tells nothing but that a server is here."""
_ROUTES = frozenset(
    {*_PUBLIC, "/metrics", "/openapi.json", "/v1/tasks", "/v1/sessions", "/v1/step", "/v1/fleet"}
)
_OF_SESSION = re.compile(r"/v1/sessions/[^/]+(/step|/fork|/expert|/transcript)?$")
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "PUT", "PATCH", "OPTIONS"})
_HARMLESS = frozenset({"GET", "HEAD"})
_STAMPED = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_PROTOCOL = (PROTOCOL_HEADER.encode(), str(PROTOCOL_VERSION).encode())
_SOCKET = (SOCKET_HEADER.encode(), SOCKET_PATH.encode())
_CLIENT = CLIENT_HEADER.encode()


class Gate:
    """ASGI middleware: refuses strangers, oversized bodies and the hurried; stamps and counts every answer.

    Args:
        app: what is behind it.
        token: the operator's; None lets everybody in.
        limits: of one caller.
        metrics: where it counts.
        tracing: makes a span of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        limits: Limits,
        metrics: Metrics,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._token = token or None
        self._max = limits.max_body_bytes
        self._rates = Rates(limits.rate_per_s, limits.burst) if limits.rate_per_s else None
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        kind = scope["type"]
        if kind not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])

        async def stamped(message: Message) -> None:
            if message["type"] in _STAMPED:
                message["headers"] = [*message.get("headers", ()), _PROTOCOL, _SOCKET]
                self._count(scope, message)
            try:
                await send(message)
            except RuntimeError as error:
                # uvloop knows that the caller is gone before uvicorn does: nobody waits for this answer.
                if kind == "websocket" or "handler is closed" not in str(error):
                    raise

        try:
            if kind == "websocket":
                caller.set(self._meet_socket(scope, headers))
            else:
                caller.set(self._meet(scope, headers))
                receive = self._measured(scope, headers, receive)
        except WireError as error:
            self._metrics.errors[error.type] += 1
            await _refuse(error, stamped, "http.response" if kind == "http" else "websocket.http.response")
            return
        try:
            if self._tracing is None:
                await self._app(scope, receive, stamped)
            else:
                await self._traced(self._tracing, scope, headers, receive, stamped)
        except WebSocketDisconnect:
            return  # the peer went away while something was sent to it
        except Exception as error:
            facts = {"facts": {"method": scope.get("method", "WEBSOCKET"), "path": scope["path"]}}
            logger.error("a bug in the server", exc_info=error, extra=facts)
            raise

    def _meet(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        """Return who makes a request. Raises Unauthorized, Forbidden, RateLimited."""
        path = scope["path"]
        name = client_name(headers.get(_CLIENT, b""), scope.get("client"))
        if path in _PUBLIC:
            return Caller(name=name)
        self._refuse_borrowed_name(scope, headers)
        who = self._who(headers.get(b"authorization", b""))
        if who.session_id is not None:
            name = who.session_id
        if who.session_id is None or not _agent_may(scope["method"], path, who.session_id):
            who.refuse_all_but(None)
        if self._token is None and scope["method"] not in _HARMLESS and not _same_origin(headers):
            # Its page cannot read the answer, but what it asked for would be done.
            raise Forbidden("this server takes no calls from web pages of other origins; give it a --token")
        if self._rates is not None:
            refuse_hurry(self._rates, name)
        return Caller(name=name, session_id=who.session_id)

    def _meet_socket(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        """Return who opens a WebSocket; a browser, which sets no headers, shows a token as a subprotocol."""
        self._refuse_borrowed_name(scope, headers)
        who = self._who(headers.get(b"authorization") or _token_of(scope["subprotocols"]))
        if scope["path"] != (LINK_PATH if who.is_server else SOCKET_PATH):
            who.refuse_all_but(None)
        if self._token is None and not _same_origin(headers):
            # Without a token, any web page could otherwise reach a server on its reader's machine.
            raise Unauthorized("this server takes no WebSocket from web pages of other origins")
        name = who.session_id or client_name(headers.get(_CLIENT, b""), scope.get("client"))
        return Caller(name=name, session_id=who.session_id, is_server=who.is_server, rates=self._rates)

    def _refuse_borrowed_name(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse a web page whose own name was made to mean this machine (DNS rebinding). Raises Forbidden.

        Its calls are of the page's origin, so that nothing else tells them from others.
        """
        if self._token is not None or not scope.get("server"):
            return
        if name := _borrowed_name(scope["server"][0], headers.get(b"host", b"")):
            words = f"this server has no --token, and is called localhost, not {echo(name)}"
            raise Forbidden(f"{words}: ask it by that name, or give it a token")

    def _who(self, shown: bytes) -> Caller:
        """Return who has shown a header or subprotocol. Raises Unauthorized."""
        if self._token is None:
            return OPERATOR
        scheme, _, token = shown.partition(b" ")
        who = bearer_of(token, self._token) if scheme == b"Bearer" else None
        if who is None:
            words = f"a token: Authorization: Bearer, or of a WebSocket a subprotocol {TOKEN_PREFIX}..."
            raise Unauthorized(f"this server needs {words}")
        return who

    def _measured(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Return what gives a body within the limit. Raises BodyTooLarge where it says it is larger."""
        length = headers.get(b"content-length", b"")
        if not length.isdigit():
            return receive if scope["method"] in ("GET", "DELETE", "HEAD") else self._counted(receive)
        if int(length) > self._max:
            raise BodyTooLarge(self._too_large())
        return receive

    def _counted(self, receive: Receive) -> Receive:
        """Count a body without a declared length as it comes in."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max:
                raise BodyTooLarge(self._too_large())
            return message

        return counted

    def _too_large(self) -> str:
        return f"the body is over the limit of {self._max} bytes"

    def _count(self, scope: Scope, message: Message) -> None:
        method = scope.get("method", "WEBSOCKET")
        method = method if method in _METHODS else "WEBSOCKET" if scope["type"] == "websocket" else "other"
        self._metrics.requests[method, route_of(scope["path"]), message.get("status", 101)] += 1

    async def _traced(
        self, tracing: Tracing, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        """Serve under a span, whose parent is the one that the request's ``traceparent`` names."""
        tracing.activate()
        if scope["type"] == "websocket":  # its calls have a span each
            await self._app(scope, receive, send)
            return
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        route = route_of(scope["path"])
        with tracing.span(f"{scope['method']} {route}", carrier, client=caller.get().name):
            await self._app(scope, receive, send)


def route_of(path: str) -> str:
    """Return the route of a path, of which there are few: what callers make up is ``other``."""
    if path in _ROUTES or path == SOCKET_PATH:
        return path
    match = _OF_SESSION.match(path)
    return "other" if match is None else f"/v1/sessions/{{id}}{match[1] or ''}"


def _agent_may(method: str, path: str, session_id: str) -> bool:
    """Return whether an agent may ask this; the items of a batch are looked at once they are read."""
    own = f"/v1/sessions/{session_id}"
    return (method, path) in (("POST", f"{own}/step"), ("GET", own), ("POST", "/v1/step"))


def _token_of(subprotocols: Iterable[str]) -> bytes:
    """Return the token among a handshake's subprotocols, in the form of the header."""
    for name in subprotocols:
        if name.startswith(TOKEN_PREFIX):
            text = name.removeprefix(TOKEN_PREFIX)
            try:
                return b"Bearer " + urlsafe_b64decode(text + "=" * (-len(text) % 4))
            except ValueError:
                return b""
    return b""


def _same_origin(headers: dict[bytes, bytes]) -> bool:
    """Return whether a request comes from a page of this server, or from no page at all."""
    origin = headers.get(b"origin")
    return origin is None or origin.rpartition(b"://")[2] == headers.get(b"host")


@lru_cache(maxsize=256)
def _borrowed_name(server: str, host: bytes) -> str:
    """Return the name in a Host header that this machine does not have, where only this machine can ask.

    It has a dot: what has none is no name of a web page's.
    """
    here = _address(server)
    if here is None or not here.is_loopback:
        return ""
    text = host.decode("latin-1")
    try:
        name = urlsplit(f"//{text}").hostname or ""
    except ValueError:
        name = text
    own = "." not in name or _address(name) or name.endswith(".localhost")
    return "" if own else name


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


async def _refuse(error: WireError, send: Send, kind: str) -> None:
    body = to_json(error.wire())
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if isinstance(error, RateLimited):
        headers.append((b"retry-after", b"%d" % ceil(error.details["retry_after"])))
    await send({"type": f"{kind}.start", "status": error.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
