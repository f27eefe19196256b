"""The two busy calls, answered before the framework's routing: there they would take twice as long."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl_env.errors import MethodNotAllowed, WireError
from agentrl_env.server.bodies import read_step, step_many_json
from agentrl_env.server.service import Service

_ONE = re.compile(r"/v1/sessions/([^/]+)/step")
_JSON = (b"content-type", b"application/json")


class StepRoutes:
    """ASGI middleware, to stand right behind the ``Gate``: answers the steps, passes on everything else.

    Args:
        app: what answers everything else.
        service: plays the steps.
        refuse: answers a request with an error.
    """

    def __init__(self, app: ASGIApp, *, service: Service, refuse: Callable[[WireError], ASGIApp]) -> None:
        self._app = app
        self._service = service
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a step, or pass the request on."""
        play = self._step_of(scope["path"]) if scope["type"] == "http" else None
        if play is None:
            await self._app(scope, receive, send)
            return
        try:
            if scope["method"] != "POST":
                where = f"{scope['method']} {scope['path']}"
                raise MethodNotAllowed(f"{where}: this path has no such method")
            answer = await play(await _body(receive))
        except WireError as error:
            await self._refuse(error)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        length = (b"content-length", b"%d" % len(answer))
        await send({"type": "http.response.start", "status": 200, "headers": [length, _JSON]})
        await send({"type": "http.response.body", "body": answer})

    def _step_of(self, path: str) -> Callable[[bytes], Awaitable[bytes]] | None:
        """Return what plays the body of a request; None where the path is another."""
        if path == "/v1/step":
            return self._step_many
        match = _ONE.fullmatch(path)
        if match is None:
            return None
        session_id = match[1]
        return lambda body: self._service.step(session_id, read_step(body))

    async def _step_many(self, body: bytes) -> bytes:
        return await step_many_json(self._service, body)


async def _body(receive: Receive) -> bytes:
    """Return the whole body. Raises ClientDisconnect."""
    message: Any = await receive()
    if not message.get("more_body") and message["type"] == "http.request":
        whole: bytes = message.get("body", b"")
        return whole
    parts: list[bytes] = []
    while message["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()
    raise ClientDisconnect
