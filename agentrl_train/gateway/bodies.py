"""Reads the bodies of requests."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from agentrl_train.gateway.chat_completions import Fields, validate_as
from agentrl_train.gateway.errors import InvalidRequest
from agentrl_train.tool_calls.turn import encodable

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_Body = TypeVar("_Body", bound=BaseModel)


async def parse_body(
    request: Request, model: type[_Body], *, fields: Fields | None = None, ignored: Collection[str] = ()
) -> _Body:
    """Return the body of a request as a model.

    Args:
        request: the request.
        model: the model.
        fields: the fields that the body can have. None leaves this to the model.
        ignored: fields that are not read.

    Raises:
        InvalidRequest: the body is not JSON, or does not fit.
    """
    try:
        body = _read(await request.body())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body is not a JSON object")
    body = {name: value for name, value in body.items() if name not in ignored}
    if fields is not None:
        fields.check(body)
    try:
        return validate_as(model, body)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def _read(content: bytes) -> Any:
    """Return the value of JSON without lone surrogates, which a file of a rollout cannot contain."""
    value = json.loads(content.decode(), parse_constant=_finite, parse_float=_finite)
    return value if _SURROGATE.search(content) is None else encodable(value)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a number that JSON can represent")
    return number
