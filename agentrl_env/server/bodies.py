"""From JSON text to requests, and from a batch's results to JSON text."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from agentrl_env.errors import InvalidRequest, WireError
from agentrl_env.server.pool import SessionPool
from agentrl_env.types import StepResult
from agentrl_env.wire import StepBatch, StepRequest

M = TypeVar("M", bound=BaseModel)


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


async def step_many_json(pool: SessionPool, body: bytes | str) -> bytes:
    """Play a batch; an item that is malformed is answered with its error, the others are played."""
    try:
        batch = StepBatch.model_validate_json(body)
    except ValidationError:
        return await _step_many_mixed(pool, body)
    return _results(pool, await pool.step_many(batch.steps, batch.wait_s))


async def _step_many_mixed(pool: SessionPool, body: bytes | str) -> bytes:
    try:
        raw = from_json(body)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    items = raw.get("steps") if isinstance(raw, dict) else None
    if not isinstance(items, list):
        raise InvalidRequest('the body must be {"steps": [...]}')
    wait_s = validate(StepBatch, {**raw, "steps": []}).wait_s
    good: list[StepRequest] = []
    answers: list[StepResult | WireError | None] = []
    for item in items:
        try:
            good.append(validate(StepRequest, item))
            answers.append(None)
        except InvalidRequest as error:
            answers.append(error)
    results = iter(await pool.step_many(good, wait_s))
    return _results(pool, [next(results) if answer is None else answer for answer in answers])


def _results(pool: SessionPool, results: list[StepResult | WireError]) -> bytes:
    parts: list[bytes] = []
    for result in results:
        if isinstance(result, WireError):
            pool.metrics.errors[result.type] += 1
            parts.append(to_json(result.wire()))
        else:
            parts.append(result.model_dump_json().encode())
    return b'{"results":[' + b",".join(parts) + b"]}"
