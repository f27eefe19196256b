"""What every request passes first: the token, the size limit, the protocol header."""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode
from collections.abc import Iterable

from pydantic_core import to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl_env.errors import BodyTooLarge, Unauthorized, WireError
from agentrl_env.server.page.shell import SHELL
from agentrl_env.wire import PROTOCOL_HEADER, PROTOCOL_VERSION, SOCKET_HEADER, SOCKET_PATH

MAX_BODY_BYTES = 64 * 1024 * 1024
TOKEN_PREFIX = "agentrl.token."
"""What comes before the token, in base64url without padding, where it is shown as a subprotocol."""
_PUBLIC = frozenset({"/health", *SHELL})
"""What needs no token: it tells nothing but that a server is here."""
_STAMPED = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_PROTOCOL = (PROTOCOL_HEADER.encode(), str(PROTOCOL_VERSION).encode())
_SOCKET = (SOCKET_HEADER.encode(), SOCKET_PATH.encode())


class Gate:
    """ASGI middleware: refuses strangers and oversized bodies, stamps every answer."""

    def __init__(self, app: ASGIApp, *, token: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else None
        self._max = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return

        async def stamped(message: Message) -> None:
            if message["type"] in _STAMPED:
                message["headers"] = [*message.get("headers", ()), _PROTOCOL, _SOCKET]
            await send(message)

        headers = dict(scope["headers"])
        if scope["type"] == "websocket":
            await self._open_socket(scope, headers, receive, stamped)
            return
        if not self._allowed(scope["path"], headers.get(b"authorization", b"")):
            await _refuse(Unauthorized("this server needs a token: Authorization: Bearer"), stamped)
            return
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max:
            await _refuse(BodyTooLarge(self._too_large()), stamped)
            return
        if length.isdigit() or scope["method"] in ("GET", "DELETE", "HEAD"):
            await self._app(scope, receive, stamped)
        else:
            await self._app(scope, self._counted(receive), stamped)

    async def _open_socket(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        """Let a WebSocket in: who cannot set headers, a browser, shows the token as a subprotocol."""
        shown = headers.get(b"authorization") or _token_of(scope["subprotocols"])
        if not self._allowed(scope["path"], shown):
            words = f"this server needs a token: Authorization: Bearer, or a subprotocol {TOKEN_PREFIX}..."
            await _refuse(Unauthorized(words), send, "websocket.http.response")
        elif self._expected is None and not _same_origin(headers):
            # Without a token, any web page could otherwise reach a server on its reader's machine.
            words = "this server takes no WebSocket from web pages of other origins"
            await _refuse(Unauthorized(words), send, "websocket.http.response")
        else:
            await self._app(scope, receive, send)

    def _allowed(self, path: str, shown: bytes) -> bool:
        if self._expected is None or path in _PUBLIC:
            return True
        return hmac.compare_digest(shown, self._expected)

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
    """Return whether a handshake comes from a page of this server, or from no page at all."""
    origin = headers.get(b"origin")
    return origin is None or origin.rpartition(b"://")[2] == headers.get(b"host")


async def _refuse(error: WireError, send: Send, kind: str = "http.response") -> None:
    body = to_json(error.wire())
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": f"{kind}.start", "status": error.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
