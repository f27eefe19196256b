"""The OpenAPI document of protocol 1, made from the models that the routes read and write."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from agentrl_env import errors as e
from agentrl_env.server.admin import VERSION
from agentrl_env.server.dashboard.shell import SHELL
from agentrl_env.types import SessionInfo, StepResult
from agentrl_env.wire import (
    ExpertAnswer,
    FleetInfo,
    ForkAnswer,
    ForkRequest,
    OpenRequest,
    SessionList,
    SessionQuery,
    StepBatch,
    StepBody,
    TaskList,
    Transcript,
    TranscriptQuery,
)

OPENAPI_PATH = "/openapi.json"
_REF = "#/components/schemas/{model}"


class ErrorDetail(BaseModel):
    """What went wrong; some types carry more, such as ``retry_after`` or ``expected``."""

    model_config = ConfigDict(extra="allow")

    type: str
    message: str


class Error(BaseModel):
    """The body of every error; each type has one status."""

    error: ErrorDetail


class Health(BaseModel):
    """Whether the server lives, and whether it takes new sessions."""

    status: str


class BatchAnswer(BaseModel):
    """Answer of ``POST /v1/step``: for each step its result or its error, in order."""

    results: list[StepResult | Error]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """One call: what it takes, what it gives, how it fails."""

    method: str
    path: str
    says: str
    name: str
    answer: type[BaseModel] | str | None = None
    """A model, a media type of something that is not JSON, or nothing."""
    status: int = 200
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    fails: tuple[type[e.WireError], ...] = ()
    public: bool = False


_GONE = (e.UnknownSession, e.SessionExpired, e.SessionLost)
_OPENS = (e.ServerFull, e.ServerDraining, e.EnvironmentFailed)
_SESSION = "/v1/sessions/{id}"
_OPERATIONS = (
    _Operation(
        method="GET",
        path="/health",
        name="health",
        says="Whether the server lives.",
        answer=Health,
        public=True,
    ),
    _Operation(
        method="GET",
        path="/ready",
        name="ready",
        says="Whether the server takes new sessions.",
        answer=Health,
        fails=(e.ServerDraining,),
        public=True,
    ),
    _Operation(method="GET", path="/metrics", name="metrics", says="Prometheus text.", answer="text/plain"),
    _Operation(
        method="GET", path=OPENAPI_PATH, name="openapi", says="This document.", answer="application/json"
    ),
    _Operation(method="GET", path="/v1/tasks", name="tasks", says="What is served.", answer=TaskList),
    _Operation(
        method="POST",
        path="/v1/sessions",
        name="open",
        says="Open a session.",
        body=OpenRequest,
        answer=SessionInfo,
        status=201,
        fails=(e.UnknownTask, e.UnknownSample, e.SessionExpired, *_OPENS),
    ),
    _Operation(
        method="GET",
        path="/v1/sessions",
        name="sessions",
        says="Sessions that are open or have ended lately, the newest first.",
        query=SessionQuery,
        answer=SessionList,
    ),
    _Operation(
        method="POST",
        path="/v1/step",
        name="step_many",
        says="Step many sessions; those of one session in order.",
        body=StepBatch,
        answer=BatchAnswer,
    ),
    _Operation(
        method="POST",
        path=f"{_SESSION}/step",
        name="step",
        says="Play one assistant message; the same seq again gives the same answer.",
        body=StepBody,
        answer=StepResult,
        fails=(e.SeqConflict, e.SessionEnded, *_GONE),
    ),
    _Operation(
        method="GET",
        path=_SESSION,
        name="info",
        says="How a session stands.",
        answer=SessionInfo,
        fails=_GONE,
    ),
    _Operation(method="DELETE", path=_SESSION, name="close", says="End a session; idempotent.", status=204),
    _Operation(
        method="POST",
        path=f"{_SESSION}/fork",
        name="fork",
        says="Open sessions that stand where this one stands.",
        body=ForkRequest,
        answer=ForkAnswer,
        status=201,
        fails=(e.SessionEnded, e.NotSupported, *_GONE, *_OPENS),
    ),
    _Operation(
        method="POST",
        path=f"{_SESSION}/expert",
        name="expert",
        says="Ask the task's oracle for its next message; takes no step.",
        answer=ExpertAnswer,
        fails=(e.SessionEnded, e.NotSupported, e.EnvironmentFailed, *_GONE),
    ),
    _Operation(
        method="GET",
        path=f"{_SESSION}/transcript",
        name="transcript",
        says="A session's last turns.",
        query=TranscriptQuery,
        answer=Transcript,
        fails=_GONE,
    ),
    _Operation(method="GET", path="/v1/fleet", name="fleet", says="The servers.", answer=FleetInfo),
    *(
        _Operation(
            method="GET", path=path, name=f"page {path}", says="A file of the page.", answer=kind, public=True
        )
        for path, (_, kind) in sorted(SHELL.items())
    ),
)
_ANY_BODY = (e.InvalidRequest, e.RequestTimeout, e.BodyTooLarge)
_NOT_PUBLIC = (e.Unauthorized, e.Forbidden, e.RateLimited)


def openapi_document(*, token: bool) -> dict[str, Any]:
    """Return the document.

    Args:
        token: whether the server wants to see one.
    """
    models = {operation.body for operation in _OPERATIONS} | {Error}
    models |= {op.answer for op in _OPERATIONS if isinstance(op.answer, type)}
    wanted = sorted((m for m in models if m is not None), key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in wanted], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation, token)
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    if token:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentrl-env", "version": VERSION, "description": "Wire protocol 1."},
        "paths": paths,
        "components": components,
    }


def openapi_route(*, token: bool) -> tuple[str, str, Callable[[Request], Awaitable[Response]]]:
    """Return the route that serves the document, as ``create_app`` takes it."""
    body = to_json(openapi_document(token=token))

    async def handler(_: Request) -> Response:
        return Response(body, media_type="application/json")

    return OPENAPI_PATH, "GET", handler


def _describe(operation: _Operation, token: bool) -> dict[str, Any]:
    fails: tuple[type[e.WireError], ...] = (e.InternalError, *operation.fails)
    if operation.body is not None:
        fails += _ANY_BODY
    elif operation.query is not None:
        fails += (e.InvalidRequest,)
    if not operation.public:
        fails += _NOT_PUBLIC
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.says,
        "parameters": _parameters(operation),
        "responses": {str(operation.status): _answer(operation), **_failures(fails)},
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.body)}
    if token and not operation.public:
        described["security"] = [{"bearer": []}]
    return described


def _parameters(operation: _Operation) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = []
    if "{id}" in operation.path:
        schema = {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_.-]+$"}
        parameters.append({"name": "id", "in": "path", "required": True, "schema": schema})
    if operation.query is not None:
        fields = operation.query.model_json_schema(ref_template=_REF)["properties"]
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": _not_null(schema)}
            for name, schema in fields.items()
        ]
    return parameters


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a query parameter: what is null in the model is left out of a query."""
    choices = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
    return choices[0] if choices else schema


def _answer(operation: _Operation) -> dict[str, Any]:
    if operation.answer is None:
        return {"description": "Done."}
    if isinstance(operation.answer, str):
        return {"description": operation.says, "content": {operation.answer: {}}}
    return {"description": operation.says, "content": _json(operation.answer)}


def _failures(fails: tuple[type[e.WireError], ...]) -> dict[str, Any]:
    """Return the responses of errors, one a status."""
    by_status: dict[int, set[str]] = {}
    for error in fails:
        by_status.setdefault(error.status, set()).add(f"`{error.type}`")
    return {
        str(status): {"description": ", ".join(sorted(types)), "content": _json(Error)}
        for status, types in sorted(by_status.items())
    }


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
