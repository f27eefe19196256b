"""From JSON text to requests, and from a batch's results to JSON text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from agentrl_env.errors import InvalidRequest
from agentrl_env.fast_wire import UNREADABLE, StepItem, StepItems, StepSaid
from agentrl_env.server.service import Service
from agentrl_env.wire import StepBatch, StepBody, StepRequest

M = TypeVar("M", bound=BaseModel)
_STEP = msgspec.json.Decoder(StepSaid).decode
_STEPS = msgspec.json.Decoder(StepItems).decode


def read(model: type[M], body: bytes | str) -> M:
    """Return the model that JSON text holds. Raises InvalidRequest."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise InvalidRequest(explain(error)) from error


def validate(model: type[M], data: object) -> M:
    """Return the model that plain values hold. Raises InvalidRequest."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest(explain(error)) from error


def explain(error: ValidationError) -> str:
    """Return what is wrong first, and where, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def read_step(body: bytes | str) -> StepSaid:
    """Return the step that JSON text holds. Raises InvalidRequest."""
    try:
        return _STEP(body)
    except UNREADABLE:
        return StepSaid.of(read(StepBody, body))


async def step_many_json(service: Service, body: bytes | str) -> bytes:
    """Play a batch; an item that is malformed is answered with its error, the others are played."""
    try:
        batch = _STEPS(body)
    except UNREADABLE:
        return await _step_many_mixed(service, body)
    return await step_items_json(service, batch.steps, batch.wait_s)


async def step_items_json(service: Service, steps: Sequence[StepItem], wait_s: float | None) -> bytes:
    """Play a batch that is well formed."""
    return _joined(await service.step_many(steps, wait_s))


async def _step_many_mixed(service: Service, body: bytes | str) -> bytes:
    try:
        raw = from_json(body)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    items = raw.get("steps") if isinstance(raw, dict) else None
    if not isinstance(items, list):
        raise InvalidRequest('the body must be {"steps": [...]}')
    wait_s = validate(StepBatch, {**raw, "steps": []}).wait_s
    good: list[StepItem] = []
    parts: list[bytes | None] = []
    for item in items:
        try:
            good.append(StepItem.of(validate(StepRequest, item)))
            parts.append(None)
        except InvalidRequest as error:
            service.metrics.errors[error.type] += 1
            parts.append(to_json(error.wire()))
    played = iter(await service.step_many(good, wait_s))
    return _joined(next(played) if part is None else part for part in parts)


def _joined(parts: Iterable[bytes]) -> bytes:
    # Line breaks, which JSON strings never hold, let a controller split the results without parsing.
    return b'{"results":[' + b",\n".join(parts) + b"]}"
