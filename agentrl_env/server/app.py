"""Wire v1 over HTTP: the FastAPI application in front of a ``Service``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import ceil
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import WebSocketRoute

from agentrl_env.errors import (
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    ServerDraining,
    UnknownRoute,
    WireError,
)
from agentrl_env.server.authorization import GuardedService
from agentrl_env.server.bodies import read
from agentrl_env.server.dashboard.routes import page_routes
from agentrl_env.server.limits import Limits
from agentrl_env.server.middleware import Gate
from agentrl_env.server.openapi import openapi_route
from agentrl_env.server.service import Service
from agentrl_env.server.steps import StepRoutes
from agentrl_env.server.telemetry.metrics import CONTENT_TYPE, watch_loop
from agentrl_env.server.telemetry.tracing import Tracing
from agentrl_env.server.websocket import socket_endpoint
from agentrl_env.wire import SOCKET_PATH, ForkRequest, OpenRequest

Handler = Callable[[Request], Awaitable[Response]]


def create_app(
    service: Service,
    *,
    token: str | None = None,
    limits: Limits | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """Return the application that puts a service on the wire.

    Args:
        service: the sessions; closed with the application.
        token: what callers must show as ``Authorization: Bearer``, on everything but ``/health``. With one,
            whoever opens a session is given a token for it alone.
        limits: of one caller.
        tracing: makes OpenTelemetry spans.
    """
    limits = limits or Limits()
    metrics = service.metrics
    service = GuardedService(service, limits, token)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(watch_loop(metrics))
        try:
            yield
        finally:
            watching.cancel()
            await service.aclose()

    app = FastAPI(title="agentrl-env", lifespan=lifespan, openapi_url=None)
    app.add_middleware(StepRoutes, service=service, refuse=partial(_answer, service))
    app.add_middleware(Gate, token=token, limits=limits, metrics=metrics, tracing=tracing)
    app.add_exception_handler(WireError, _on_wire_error(service))
    app.add_exception_handler(HTTPException, _on_http_error(service))
    app.add_exception_handler(ClientDisconnect, _on_hang_up)
    app.add_exception_handler(Exception, _on_bug(service))
    app.router.routes.append(WebSocketRoute(SOCKET_PATH, socket_endpoint(service, limits.max_body_bytes)))
    for path, method, handler in (*_routes(service), *page_routes(service), openapi_route(token=bool(token))):
        # Plain routes: each handler reads its body once, straight from JSON to the model.
        app.add_route(path, handler, methods=[method])
    return app


def _routes(service: Service) -> list[tuple[str, str, Handler]]:
    async def health(_: Request) -> Response:
        return _json(b'{"status":"draining"}' if service.draining else b'{"status":"ok"}')

    async def ready(_: Request) -> Response:
        if service.draining:
            raise ServerDraining("the server is shutting down; open sessions elsewhere")
        return _json(b'{"status":"ready"}')

    async def metrics(_: Request) -> Response:
        gauges = {**service.gauges(), "agentrl_tasks_running": float(len(asyncio.all_tasks()))}
        return Response(service.metrics.render(gauges), headers={"content-type": CONTENT_TYPE})

    async def tasks(_: Request) -> Response:
        return _json(await service.tasks())

    async def open_session(request: Request) -> Response:
        wanted = read(OpenRequest, await request.body())
        opening = asyncio.ensure_future(service.open(wanted))
        await _unless_gone(request, opening)
        return _json(opening.result(), status=201)

    async def get_session(request: Request) -> Response:
        return _json(await service.info(request.path_params["id"]))

    async def close_session(request: Request) -> Response:
        await service.close_session(request.path_params["id"])
        return Response(status_code=204)

    async def expert(request: Request) -> Response:
        return _json(await service.expert(request.path_params["id"]))

    async def fork(request: Request) -> Response:
        wanted = read(ForkRequest, await request.body())
        return _json(await service.fork(request.path_params["id"], wanted), status=201)

    return [
        ("/health", "GET", health),
        ("/ready", "GET", ready),
        ("/metrics", "GET", metrics),
        ("/v1/tasks", "GET", tasks),
        ("/v1/sessions", "POST", open_session),
        ("/v1/sessions/{id}", "GET", get_session),
        ("/v1/sessions/{id}", "DELETE", close_session),
        ("/v1/sessions/{id}/expert", "POST", expert),
        ("/v1/sessions/{id}/fork", "POST", fork),
    ]


async def _unless_gone(request: Request, work: asyncio.Future[Any]) -> None:
    """Wait for work, and cancel it where the caller hangs up before it is done."""
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
    if not work.done():
        await asyncio.wait((work,))
        if work.cancelled():
            raise InvalidRequest("the caller hung up")


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _json(body: bytes | str, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


def _answer(service: Service, error: WireError) -> Response:
    service.metrics.errors[error.type] += 1
    response = _json(to_json(error.wire()), error.status)
    if error.status in (429, 503):
        response.headers["retry-after"] = str(ceil(error.details.get("retry_after", 1)))
    return response


def _on_wire_error(service: Service) -> Any:
    async def answer(_: Request, error: WireError) -> Response:
        return _answer(service, error)

    return answer


def _on_http_error(service: Service) -> Any:
    async def answer(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        if error.status_code == 405:
            answer = _answer(service, MethodNotAllowed(f"{where}: this path has no such method"))
            answer.headers.update(error.headers or {})  # which methods it has
            return answer
        if error.status_code == 404:
            return _answer(service, UnknownRoute(f"{where}: no such path in protocol 1"))
        return _answer(service, InvalidRequest(f"{where}: {error.detail}"))

    return answer


async def _on_hang_up(_: Request, error: Exception) -> Response:
    """Give an answer that nobody reads: the caller hung up before all of its request had come."""
    return Response(status_code=400)


def _on_bug(service: Service) -> Any:
    async def answer(_: Request, error: Exception) -> Response:
        return _answer(service, InternalError(f"a bug in the server: {type(error).__name__}"))

    return answer
