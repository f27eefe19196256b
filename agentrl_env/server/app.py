"""Wire protocol 1 over HTTP: the FastAPI application in front of a ``Service``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from math import ceil
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import WebSocketRoute

from agentrl_env import errors as e
from agentrl_env.server import dashboard
from agentrl_env.server.api import Api
from agentrl_env.server.auth import AgentTokens, caller
from agentrl_env.server.embedded import unless_disconnected
from agentrl_env.server.fast_path import StepFastPath
from agentrl_env.server.limits import Limits
from agentrl_env.server.middleware import AccessMiddleware
from agentrl_env.server.service import Service
from agentrl_env.server.telemetry.history import History
from agentrl_env.server.telemetry.metrics import CONTENT_TYPE, Metrics, measure_loop_lag
from agentrl_env.server.telemetry.tracing import Tracing
from agentrl_env.server.websocket import websocket_endpoint
from agentrl_env.session.pool import VERSION
from agentrl_env.wire import CALLS, OPEN, OPEN_MANY, SOCKET_PATH, Call, Error, Health

_SessionId = Annotated[str, Path(json_schema_extra={"minLength": 1, "pattern": "^[A-Za-z0-9_.-]+$"})]
_REF = "#/components/schemas/{model}"
_SECURITY: dict[str, Any] = {"security": [{"bearer": []}]}
_NO_STORE = {"cache-control": "no-store"}
Mount = Callable[[FastAPI, Api], None]
"""Adds the routes of another protocol, answered by the ``Api``, to an application."""


def create_app(
    service: Service,
    metrics: Metrics,
    *,
    token: str | None = None,
    tokens: AgentTokens | None = None,
    limits: Limits | None = None,
    tracing: Tracing | None = None,
    bridges: Sequence[Mount] = (),
) -> FastAPI:
    """Return the application that serves a ``Service``.

    Args:
        service: the sessions. It is closed with the application.
        metrics: counters of the process.
        token: operator token, required as ``Authorization: Bearer`` on everything but ``/health``, ``/ready``
            and the dashboard's files. With a token, agent tokens are returned with opened sessions.
        tokens: issues and verifies agent tokens. By default they use a key of this application.
        limits: limits of one caller.
        tracing: makes OpenTelemetry spans.
        bridges: add the routes of other protocols.
    """
    limits = limits or Limits()
    if token and tokens is None:
        tokens = AgentTokens(token, limits.agent_token_s)
    history = History(metrics, service.gauges)
    api = Api(service, metrics, limits, tokens, history)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        measuring = asyncio.create_task(measure_loop_lag(metrics))
        recording = asyncio.create_task(history.record())
        try:
            yield
        finally:
            measuring.cancel()
            recording.cancel()
            await service.aclose()

    app = FastAPI(
        title="agentrl-env",
        version=VERSION,
        description="Wire protocol 1.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(StepFastPath, api=api, on_error=partial(_error_response, api))
    app.add_middleware(
        AccessMiddleware, token=token, tokens=tokens, limits=limits, metrics=metrics, tracing=tracing
    )
    _add_error_handlers(app, api)
    _add_probes(app, api, secured=bool(token))
    for call in CALLS.values():
        if call is not OPEN_MANY:  # it is a variant of OPEN's body
            _add_call(app, api, call, secured=bool(token))
    dashboard.add_routes(app)
    for mount in bridges:
        mount(app, api)
    app.router.routes.append(WebSocketRoute(SOCKET_PATH, websocket_endpoint(api, limits)))
    _add_openapi(app, secured=bool(token))
    return app


def call_at_end(app: FastAPI, close: Callable[[], Awaitable[None]]) -> None:
    """Call ``close`` when the application ends, before its service is closed."""
    outer = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with outer(app) as state:
            try:
                yield state
            finally:
                await close()

    app.router.lifespan_context = lifespan


def _add_call(app: FastAPI, api: Api, call: Call, *, secured: bool) -> None:
    async def endpoint(request: Request, id: str | None = None, query: Any = None) -> Response:
        who = caller.get()
        if query is not None:
            fields = dict(query) if id is None else {**dict(query), "session_id": id}
            answer = await api.answer(call, call.request.model_construct(**fields), who)
            return _json(answer, headers=_NO_STORE)
        if call is OPEN:
            opening = api.answer_json(call, await request.body(), who)
            return _json(await unless_disconnected(request, opening), 201)
        text = await request.body() if call.body is not None else b"{}"
        answer = await api.answer_json(call, text, who, id)
        return Response(status_code=204) if call.status == 204 else _json(answer, call.status)

    parameters: list[tuple[str, Any]] = [("request", Request)]
    parameters += [("id", _SessionId)] if "{id}" in call.path else []
    parameters += [("query", Annotated[call.query, Query()])] if call.query is not None else []
    # FastAPI reads path and query from the signature, for requests and for the OpenAPI document. Bodies are
    # parsed from JSON text to the wire's models, once.
    endpoint.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
            for name, annotation in parameters
        ]
    )
    extra: dict[str, Any] = dict(_SECURITY) if secured else {}
    if call.body is not None:
        models = [call.body, OPEN_MANY.request] if call is OPEN else [call.body]
        schemas = [{"$ref": _REF.format(model=model.__name__)} for model in models]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    app.add_api_route(
        call.path,
        endpoint,
        methods=[call.method],
        operation_id=call.name,
        summary=call.summary,
        status_code=call.status,
        response_model=None,
        response_class=Response,
        responses=_responses(call),
        openapi_extra=extra or None,
    )


def _add_probes(app: FastAPI, api: Api, *, secured: bool) -> None:
    service = api.service
    private = _SECURITY if secured else None

    @app.get("/health", summary="Return whether the server is alive.", operation_id="health")
    async def health() -> Health:
        return Health(status="draining" if service.draining else "ok")

    unready: dict[int | str, dict[str, Any]] = {
        503: {"model": Error, "description": "`server_draining`, `server_full`"}
    }

    @app.get(
        "/ready",
        summary="Return whether new sessions are accepted.",
        operation_id="ready",
        responses=unready,
    )
    async def ready() -> Health:
        service.check_ready()
        return Health(status="ready")

    @app.get(
        "/metrics",
        summary="Return the metrics in Prometheus text format.",
        operation_id="metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}, **_errors(_SECURED_ERRORS)},
        openapi_extra=private,
    )
    async def metrics() -> Response:
        gauges = {**service.gauges(), "agentrl_tasks_running": float(len(asyncio.all_tasks()))}
        return Response(api.metrics.render(gauges), headers={"content-type": CONTENT_TYPE})


_SECURED_ERRORS = (e.InternalError, e.Unauthorized, e.Forbidden, e.RateLimited)


def _responses(call: Call) -> dict[int | str, dict[str, Any]]:
    errors: tuple[type[e.WireError], ...] = (*_SECURED_ERRORS, *call.errors)
    if call.body is not None:
        errors += (e.InvalidRequest, e.RequestTimeout, e.BodyTooLarge)
    if call.query is not None or "{id}" in call.path:
        errors += (e.InvalidRequest,)
    answers = [call.answer] if call is not OPEN else [call.answer, OPEN_MANY.answer]
    schemas = [{"$ref": _REF.format(model=model.__name__)} for model in answers if model is not None]
    answer: dict[str, Any] = {"description": call.summary}
    if schemas:
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        answer["content"] = {"application/json": {"schema": schema}}
    return {call.status: answer, **_errors(errors)}


def _errors(errors: Sequence[type[e.WireError]]) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a call, one per status."""
    by_status: dict[int, set[str]] = {}
    for error in errors:
        by_status.setdefault(error.status, set()).add(f"`{error.type}`")
    return {
        status: {"model": Error, "description": ", ".join(sorted(types))}
        for status, types in sorted(by_status.items())
    }


def _add_openapi(app: FastAPI, *, secured: bool) -> None:
    """Add the models that routes read and write as JSON text to the OpenAPI document."""
    generate = app.openapi
    models = {model for call in CALLS.values() for model in (call.body, call.answer) if model is not None}

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            ordered = sorted(models, key=lambda model: model.__name__)
            _, schemas = models_json_schema([(model, "validation") for model in ordered], ref_template=_REF)
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(schemas["$defs"])
            if secured:
                components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers=headers, media_type="application/json")


def _error_response(api: Api, error: e.WireError) -> Response:
    api.count(error)
    response = _json(to_json(error.wire()), error.status)
    if error.status in (429, 503):
        response.headers["retry-after"] = str(ceil(error.details.get("retry_after", 1)))
    if isinstance(error, e.RequestTimeout | e.BodyTooLarge):
        response.headers["connection"] = "close"  # the rest of the body is not read
    return response


def _add_error_handlers(app: FastAPI, api: Api) -> None:
    answer = partial(_error_response, api)

    async def on_wire_error(_: Request, error: e.WireError) -> Response:
        return answer(error)

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        if error.status_code == 405:
            response = answer(e.MethodNotAllowed(f"{where}: this path has no such method"))
            response.headers.update(error.headers or {})  # the allowed methods
            return response
        if error.status_code == 404:
            return answer(e.UnknownRoute(f"{where}: no such path in protocol 1"))
        return answer(e.InvalidRequest(f"{where}: {error.detail}"))

    async def on_bad_parameters(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return answer(e.InvalidRequest(f"{where}: {first['msg']}" if where else first["msg"]))

    async def on_disconnect(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # no client receives it

    async def on_bug(_: Request, error: Exception) -> Response:
        return answer(e.InternalError(f"a bug in the server: {type(error).__name__}"))

    handlers: dict[Any, Callable[..., Awaitable[Response]]] = {
        e.WireError: on_wire_error,
        HTTPException: on_http_error,
        RequestValidationError: on_bad_parameters,
        ClientDisconnect: on_disconnect,
        Exception: on_bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
