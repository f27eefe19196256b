"""One of several controllers: where one does not answer, the next is asked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from pydantic_core import from_json

from agentrl_env.client.transport import Call, HttpResponse, Transport
from agentrl_env.errors import ServerDraining, StateUnavailable, from_wire

ATTEMPT_S = 10.0
"""How long one controller may take before another is asked as well; a step under way is waited for
there too. An opening may wait in a queue, so that it gets its share of all the time there is."""


class FailoverTransport:
    """Calls to a fleet that has several controllers, whichever of them answers.

    Asking twice is safe: every call gives the same result again, at any controller.

    Args:
        transports: one for each controller; the first to be asked is drawn, so that clients spread.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = transports
        self._at = random.randrange(len(transports))

    async def send(self, call: Call, *, timeout: float) -> HttpResponse:
        """Make one call. Raises what the transports raise, once each has failed or time is up."""
        loop = asyncio.get_running_loop()
        end, failures = loop.time() + timeout, 0
        while True:
            at, left = self._at, end - loop.time()
            longest = timeout / len(self._transports) if call.name == "open" else ATTEMPT_S
            try:
                response = await self._transports[at].send(call, timeout=min(left, longest))
            except TimeoutError:
                if loop.time() >= end:
                    raise
                failures = 0
            except OSError:
                failures += 1
                if failures == len(self._transports):
                    raise
            else:
                failures += 1
                if failures == len(self._transports) or not _others_may_do(response):
                    return response
            if at == self._at:
                self._at = (at + 1) % len(self._transports)

    async def aclose(self) -> None:
        """Hang up all."""
        for transport in self._transports:
            await transport.aclose()


def _others_may_do(response: HttpResponse) -> bool:
    """Whether a refusal is one controller's own: it leaves, or what is behind it cannot be reached."""
    if response.status not in (502, 503, 504):
        return False
    try:
        error = from_wire(from_json(response.body))
    except ValueError:
        return True  # a proxy's
    return error is None or isinstance(error, ServerDraining | StateUnavailable)
