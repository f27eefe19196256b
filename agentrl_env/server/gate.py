"""What every request passes first: the token, the size limit, the protocol header."""

from __future__ import annotations

import hmac

from pydantic_core import to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl_env.errors import BodyTooLarge, Unauthorized, WireError
from agentrl_env.wire import PROTOCOL_HEADER, PROTOCOL_VERSION

MAX_BODY_BYTES = 64 * 1024 * 1024
_PROTOCOL = (PROTOCOL_HEADER.encode(), str(PROTOCOL_VERSION).encode())


class Gate:
    """ASGI middleware: refuses strangers and oversized bodies, stamps every answer."""

    def __init__(self, app: ASGIApp, *, token: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else None
        self._max = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], _PROTOCOL]
            await send(message)

        headers = dict(scope["headers"])
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

    def _allowed(self, path: str, shown: bytes) -> bool:
        if self._expected is None or path == "/health":
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


async def _refuse(error: WireError, send: Send) -> None:
    body = to_json(error.wire())
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
