"""A server on a thread of the test process, whose tasks can be classes of the test."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Self

from agentrl_env import Environment
from agentrl_env.client.loop_thread import LoopThread
from agentrl_env.launch.process import ServerHandle
from agentrl_env.server.serve import EnvServer


class ServerThread(ServerHandle):
    """A server on a thread of this process, without isolation; targets can be classes.

    Args:
        targets: as for ``EnvServer``.
        token: the token of callers.
        drain: seconds that open sessions get to end when the server stops.
        options: further options of ``EnvServer``.
    """

    def __init__(
        self,
        *targets: str | type[Environment],
        token: str | None = None,
        drain: float = 0.0,
        **options: Any,
    ) -> None:
        self.token = token
        self._targets = targets
        self._options = {"port": 0, "token": token, "drain_s": drain, **options}
        self._thread = LoopThread("agentrl-env-server")
        self._serving: tuple[asyncio.AbstractEventLoop, EnvServer] | None = None

    @property
    def running(self) -> bool:
        """True until ``stop`` returns."""
        return self._serving is not None

    def start(self) -> Self:
        """Start the server; see ``ServerHandle.start``."""
        if self._serving is None:
            try:
                self._serving = self._thread.run(self._serve())
            except BaseException:
                self._thread.stop()
                raise
            self.url = self._serving[1].url
        return self

    def stop(self) -> None:
        """Drain and stop the server; idempotent."""
        if self._serving is not None:
            try:
                self._thread.run(self._serving[1].stop())
            finally:
                self._thread.stop()
                self._serving = None

    def stop_waiting(self) -> None:
        """Cut the drain of a concurrent ``stop`` short."""
        if (serving := self._serving) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                serving[0].call_soon_threadsafe(serving[1].stop_waiting)

    def end_reason(self) -> str:
        """Return that the thread ended."""
        return "its thread ended"

    async def _serve(self) -> tuple[asyncio.AbstractEventLoop, EnvServer]:
        server = EnvServer(self._targets, **self._options)
        try:
            await server.start()
        except BaseException:
            await server.stop()
            raise
        return asyncio.get_running_loop(), server
