"""Access middleware: authentication, body and rate limits, protocol headers and request counts."""

from __future__ import annotations

import asyncio
import logging
import re
from base64 import urlsafe_b64decode
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache, partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from math import ceil
from socket import gethostname
from urllib.parse import urlsplit

from pydantic_core import to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from agentrl_env.errors import (
    BodyTooLarge,
    Forbidden,
    RateLimited,
    Unauthorized,
    WireError,
)
from agentrl_env.schema import echo
from agentrl_env.server.auth import (
    CLIENT_HEADER,
    OPERATOR,
    AgentTokens,
    Caller,
    as_bearer,
    bearer_of,
    bearer_token,
    caller,
    client_name,
    limit_rate,
)
from agentrl_env.server.dashboard import FILES
from agentrl_env.server.limits import PAUSE_S, RECEIVE_S, SMALL_BYTES, Budget, Budgets, Limits, Rates
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.server.telemetry.tracing import Tracing
from agentrl_env.server.websocket import CONNECTION
from agentrl_env.wire import CALLS, LINK_PATH, PROTOCOL_HEADER, PROTOCOL_VERSION, SOCKET_HEADER, SOCKET_PATH

logger = logging.getLogger("agentrl_env")

MAX_BODY_BYTES = Limits().max_body_bytes
TOKEN_PREFIX = "agentrl.token."
"""Prefix of a WebSocket subprotocol that contains a token in base64url without padding."""
_HOW = (
    "pass its token with --token-file FILE on the command line, token= in Python, the variable "
    "AGENTRL_TOKEN, "
    "or the header Authorization: Bearer"
)
_PUBLIC = frozenset({"/health", "/ready", *FILES})
"""Paths that need no token, because they reveal only that a server is running."""
AGENTRL_PATH = "/api/"
"""Prefix of AgentRL's protocol."""
AGENTRL_CALLS = frozenset(
    f"{AGENTRL_PATH}{name}"
    for name in (
        *("get_indices", "start_sample", "interact", "cancel", "cancel_all", "list_workers", "list_sessions"),
        *("mark_stale", "clean_worker", "clean_session", "sync_all", "version"),
    )
)
"""Calls of AgentRL's clients."""
AGENTRL_WORKER_CALLS = frozenset({f"{AGENTRL_PATH}receive_heartbeat", f"{AGENTRL_PATH}cancel_notice"})
"""Calls of AgentRL's workers, which a link token allows."""
_AGENTRL = AGENTRL_CALLS | AGENTRL_WORKER_CALLS
_ROUTES = frozenset(
    {*_PUBLIC, "/metrics", "/openapi.json", SOCKET_PATH, *(call.path for call in CALLS.values()), *_AGENTRL}
)
_READS = frozenset(
    {("GET", "/metrics"), *(("GET", call.path) for call in CALLS.values() if call.method == "GET")}
)
"""Requests that a metrics token allows."""
_SESSIONS = "/v1/sessions/"
_BRIDGE = re.compile(r"/(mcp|openenv)/[^/]+")
_AGENT_BRIDGE = re.compile(
    r"/mcp/[^/]+|/openenv/[^/]+/(ws|mcp|health|metadata|schema)|/api/(start_sample|interact)"
)
"""Paths of other protocols that agent tokens allow. The token determines the session."""
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "PUT", "PATCH", "OPTIONS"})
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_STAMPED = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_PROTOCOL = (PROTOCOL_HEADER.encode(), str(PROTOCOL_VERSION).encode())
_SOCKET = (SOCKET_HEADER.encode(), SOCKET_PATH.encode())
_CLIENT = CLIENT_HEADER.encode()


class AccessMiddleware:
    """ASGI middleware that enforces authentication, body sizes, rates and budgets, and counts responses.

    Args:
        app: the application.
        token: operator token. None admits every caller.
        tokens: verifies agent tokens. Required with an operator token.
        limits: limits of one caller.
        metrics: counts requests and errors.
        tracing: makes a span of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        tokens: AgentTokens | None,
        limits: Limits,
        metrics: Metrics,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._token = token or None
        self._tokens = tokens
        self._rates = Rates(limits.rate_per_s, limits.burst) if limits.rate_per_s else None
        self._budgets = Budgets(limits, metrics)
        self._max_bytes = [limits.max_bytes(agent=agent) for agent in (False, True)]
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            who, budget = self._admit(scope, headers)
            body = self._large_body(scope, headers, receive, budget, who)
        except WireError as error:
            await self._refuse(error, scope, headers, _Answer(scope, send, self._metrics))
            return
        caller.set(who)
        answer = _Answer(scope, send, self._metrics, budget)
        serve = self._app if self._tracing is None else partial(self._serve_in_span, self._tracing, headers)
        budget.connections += 1
        try:
            await budget.timed(serve(scope, body or receive, answer))
        except WebSocketDisconnect:
            return
        except Exception as error:
            facts = {"facts": {"method": scope.get("method", "WEBSOCKET"), "path": scope["path"]}}
            logger.error("a bug in the server", exc_info=error, extra=facts)
            raise
        finally:
            budget.connections -= 1
            answer.release()
            if body is not None:
                body.release()

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[Caller, Budget]:
        """Return the caller and its budget. Raises Unauthorized, Forbidden, RateLimited."""
        admit = self._admit_websocket if scope["type"] == "websocket" else self._admit_request
        who = admit(scope, headers)
        budget = self._budgets.of(who.session_id, scope.get("client"))
        budget.check_connections()
        connection = scope.get(CONNECTION)
        if connection is not None and not who.is_server:
            connection.join(budget, self._max_bytes[who.session_id is not None])
        return replace(who, budget=budget), budget

    async def _refuse(
        self, error: WireError, scope: Scope, headers: dict[bytes, bytes], answer: _Answer
    ) -> None:
        self._metrics.errors[error.type] += 1
        kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
        if scope["type"] == "http" and _length(headers) > SMALL_BYTES:
            await asyncio.sleep(PAUSE_S)
        body = to_json(error.wire())
        fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if isinstance(error, RateLimited):
            fields.append((b"retry-after", b"%d" % ceil(error.details["retry_after"])))
        await answer({"type": f"{kind}.start", "status": error.status, "headers": fields})
        await answer({"type": f"{kind}.body", "body": body})

    def _admit_request(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        """Return the caller of a request. Raises Unauthorized, Forbidden, RateLimited."""
        path = scope["path"]
        name = client_name(headers.get(_CLIENT, b""), scope.get("client"))
        if path in _PUBLIC:
            return Caller(name=name)
        self._check_host(scope, headers)
        who = self._authenticate(_authorization(path, headers))
        if who.session_id is not None:
            name = who.session_id
            who.check_token(_agent_may(scope["method"], path, who.session_id))
        elif path not in AGENTRL_WORKER_CALLS and not (
            who.is_monitor and (scope["method"], route_of(path)) in _READS
        ):
            who.check_token(agent_may=False)
        if self._token is None and scope["method"] not in _SAFE_METHODS and not _same_origin(headers):
            # The page cannot read the answer, but the call would take effect.
            raise Forbidden("this server accepts no calls from pages of other origins; start it with a token")
        if self._rates is not None:
            limit_rate(self._rates, name)
        return Caller(name=name, session_id=who.session_id, grant=who.grant)

    def _admit_websocket(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        """Return the caller of a WebSocket. Browsers pass the token as a subprotocol."""
        self._check_host(scope, headers)
        who = self._authenticate(headers.get(b"authorization") or _token_of(scope["subprotocols"]))
        if who.is_monitor or scope["path"] != (LINK_PATH if who.is_server else SOCKET_PATH):
            who.check_token(agent_may=_AGENT_BRIDGE.fullmatch(scope["path"]) is not None)
        if self._token is None and not _same_origin(headers):
            raise Unauthorized("this server accepts no WebSocket from web pages of other origins")
        name = who.session_id or client_name(headers.get(_CLIENT, b""), scope.get("client"))
        return replace(who, name=name, rates=self._rates)

    def _check_host(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse a foreign Host header on a loopback address (DNS rebinding). Raises Forbidden.

        Such calls have the origin of the page, so only the Host header distinguishes them.
        """
        if self._token is not None or not scope.get("server"):
            return
        if name := _foreign_host(scope["server"][0], headers.get(b"host", b"")):
            words = f"this server has no token and answers as localhost, not as {echo(name)}"
            raise Forbidden(f"{words}: use that name, or start it with a token")

    def _authenticate(self, shown: bytes) -> Caller:
        """Return the caller of an authorization header. Raises Unauthorized."""
        if self._token is None or self._tokens is None:
            return OPERATOR
        token = bearer_token(shown)
        who = bearer_of(token, self._token, self._tokens) if token else None
        if who is None:
            what = "does not accept this token" if token else "needs a token"
            raise Unauthorized(f"this server {what}; {_HOW}")
        return who

    def _large_body(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, budget: Budget, who: Caller
    ) -> _LargeBody | None:
        """Return a ``receive`` that counts a large body, else None. Raises BodyTooLarge, RateLimited."""
        if scope["type"] != "http":
            return None
        chunked = b"transfer-encoding" in headers
        size = 0 if chunked else _length(headers)
        limit = self._max_bytes[who.session_id is not None]
        if size > limit:
            raise BodyTooLarge(f"the body exceeds the limit of {limit} bytes")
        if scope["method"] in _SAFE_METHODS or (size <= SMALL_BYTES and not chunked):
            return None  # the server never reads more than the announced bytes
        return _LargeBody(receive, budget, limit, size)

    async def _serve_in_span(
        self, tracing: Tracing, headers: dict[bytes, bytes], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve a request in a child of the span in its ``traceparent`` header."""
        tracing.activate()
        if scope["type"] == "websocket":  # each of its calls has its own span
            await self._app(scope, receive, send)
            return
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        route = route_of(scope["path"])
        with tracing.span(f"{scope['method']} {route}", carrier, client=caller.get().name):
            await self._app(scope, receive, send)


class _Answer:
    """Sends an answer with the headers of the protocol and counts it. Large parts are charged to a budget.

    Args:
        scope: the ASGI scope.
        send: the ASGI ``send``.
        metrics: counts the answer.
        budget: budget of the caller. None if the request is refused.
    """

    __slots__ = ("_budget", "_held", "_metrics", "_scope", "_send")

    def __init__(self, scope: Scope, send: Send, metrics: Metrics, budget: Budget | None = None) -> None:
        self._scope = scope
        self._send = send
        self._metrics = metrics
        self._budget = budget
        self._held = 0

    async def __call__(self, message: Message) -> None:
        """Send a message."""
        if message["type"] in _STAMPED:
            message["headers"] = [*message.get("headers", ()), _PROTOCOL, _SOCKET]
            self._count(message.get("status", 101))
        try:
            if self._budget is not None and (size := len(message.get("body", b""))) > SMALL_BYTES:
                self._budget.keep(size)
                self._held += size
                await self._send({**message, "more_body": True})
                message = {**message, "body": b""}  # the end is sent once the client has read the rest
            await self._send(message)
        except RuntimeError as error:
            # uvloop notices a disconnect before uvicorn does.
            if self._scope["type"] == "websocket" or "handler is closed" not in str(error):
                raise

    def release(self) -> None:
        """End the request."""
        if self._budget is not None and self._held:
            self._budget.release(self._held)

    def _count(self, status: int) -> None:
        scope = self._scope
        method = scope.get("method", "WEBSOCKET")
        method = method if method in _METHODS else "WEBSOCKET" if scope["type"] == "websocket" else "other"
        self._metrics.requests[method, route_of(scope["path"]), status] += 1


class _LargeBody:
    """Receives a body that is large or of unknown length, and charges it to the caller's budget.

    Args:
        receive: the ASGI ``receive``.
        budget: budget of the caller.
        limit: maximum size in bytes.
        size: announced number of bytes. 0 counts the bytes as they arrive.

    Raises RateLimited.
    """

    def __init__(self, receive: Receive, budget: Budget, limit: int, size: int) -> None:
        self._receive = receive
        self._budget = budget
        self._limit = limit
        self._held = size
        self._chunked = not size
        self._receiving = True
        budget.admit()
        budget.hold(size, begin=True)

    async def __call__(self) -> Message:
        """Return the next message. Raises BodyTooLarge, RateLimited."""
        message = await self._receive()
        if self._chunked and (size := len(message.get("body", b""))):
            self._budget.hold(size)
            self._held += size
            if self._held > self._limit:
                raise BodyTooLarge(f"the body exceeds the limit of {self._limit} bytes")
        if self._receiving and not message.get("more_body"):
            self._end()
            if self._held > SMALL_BYTES:
                self._budget.charge(RECEIVE_S * self._held)
                await self._budget.turn()
        return message

    def release(self) -> None:
        """End the request."""
        if self._receiving:
            self._end()
        self._budget.release(self._held)

    def _end(self) -> None:
        self._receiving = False
        self._budget.received()


def _length(headers: dict[bytes, bytes]) -> int:
    length = headers.get(b"content-length", b"")
    return int(length) if length.isdigit() else 0


def route_of(path: str) -> str:
    """Return the route of a path, or ``other`` if it is unknown, so that callers cannot invent labels."""
    if path in _ROUTES:
        return path
    if path.startswith(_SESSIONS):
        session_id, slash, call = path.removeprefix(_SESSIONS).partition("/")
        route = f"{_SESSIONS}{{id}}{slash}{call}"
        if session_id and route in _ROUTES:
            return route
    bridge = _BRIDGE.match(path)
    return f"/{bridge[1]}/{{task}}" if bridge else "other"


def _agent_may(method: str, path: str, session_id: str) -> bool:
    """Return True if an agent token allows a request. The items of a batch are checked later."""
    if _AGENT_BRIDGE.fullmatch(path):
        return True
    own = path.replace(session_id, "{id}")
    return any(call.agent and (call.method, call.path) == (method, own) for call in CALLS.values())


def _token_of(subprotocols: Iterable[str]) -> bytes:
    """Return the token among the subprotocols of a handshake, as an authorization header."""
    for name in subprotocols:
        if name.startswith(TOKEN_PREFIX):
            text = name.removeprefix(TOKEN_PREFIX)
            try:
                return b"Bearer " + urlsafe_b64decode(text + "=" * (-len(text) % 4))
            except ValueError:
                return b""
    return b""


def _authorization(path: str, headers: dict[bytes, bytes]) -> bytes:
    """Return the authorization header of a request.

    Basic authentication is not accepted, because browsers also send it for pages of other origins.
    """
    shown = headers.get(b"authorization", b"")
    return as_bearer(shown) if path in _AGENTRL and _same_origin(headers) else shown


def _same_origin(headers: dict[bytes, bytes]) -> bool:
    """Return True if a request comes from a page of this server, or not from a web page at all."""
    origin = headers.get(b"origin")
    return origin is None or origin.rpartition(b"://")[2] == headers.get(b"host")


@lru_cache(maxsize=256)
def _foreign_host(server: str, host: bytes) -> str:
    """Return the name in a Host header if it does not belong to a server on a loopback address, else "".

    Names without a dot are not trusted either, since a network can assign them to other hosts. Only names of
    this machine are accepted.
    """
    here = _address(server)
    if here is None or not here.is_loopback:
        return ""
    text = host.decode("latin-1")
    try:
        name = urlsplit(f"//{text}").hostname or ""
    except ValueError:
        name = text
    own = name in ("", "localhost", gethostname().lower()) or name.endswith(".localhost") or _address(name)
    return "" if own else name


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
