"""Requests whose work is pointless once their caller is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

from agentrl_env.errors import InvalidRequest

T = TypeVar("T")


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of an opening, and cancel it where the caller disconnects before it is done.

    The body of the request must have been read. Raises InvalidRequest where the work was cancelled.
    """
    working = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnect.cancel()
        if not working.done():
            working.cancel()
    if not working.done():
        await asyncio.wait((working,))
        if working.cancelled():
            raise InvalidRequest("the caller disconnected")
    return working.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
