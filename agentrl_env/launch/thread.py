"""A server in this process, on an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any, Self

from agentrl_env.environment import Environment
from agentrl_env.errors import ServeError
from agentrl_env.server.serve import EnvServer


class ServerThread:
    """Tasks served over HTTP from a thread: the classes may be of this process, and nothing is isolated.

    Without HTTP, ``Environment.local()`` runs the same code path.

    Args:
        targets: as for ``EnvServer``; classes, too.
        token: what callers must show.
        drain: seconds that open sessions get to end when the server stops.
        options: further ones of ``EnvServer``.
    """

    def __init__(
        self,
        *targets: str | type[Environment],
        token: str | None = None,
        drain: float = 0.0,
        **options: Any,
    ) -> None:
        self.token = token
        self.url = ""
        """Where the server answers, once it is started."""
        self._targets = targets
        self._options = {"port": 0, "token": token, "drain_s": drain, **options}
        self._thread: threading.Thread | None = None
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def running(self) -> bool:
        """Whether the thread lives."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> Self:
        """Return once the server answers. Raises TargetError, ServeError."""
        if not self.running:
            ready: Future[str] = Future()
            self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
            self._thread.start()
            self.url = ready.result()
        return self

    def stop(self) -> None:
        """Drain and stop the server; idempotent."""
        thread, self._thread = self._thread, None
        stop, self._stop = self._stop, None
        if stop is not None:
            loop, event = stop
            loop.call_soon_threadsafe(event.set)
        if thread is not None:
            thread.join()

    def output(self) -> str:
        """Return nothing: what the server prints, this process prints."""
        return ""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self, ready: Future[str]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error if isinstance(error, Exception) else ServeError(str(error)))

    async def _serve(self, ready: Future[str]) -> None:
        server, event = EnvServer(self._targets, **self._options), asyncio.Event()
        try:
            await server.start()
            self._stop = (asyncio.get_running_loop(), event)
            ready.set_result(server.url)
            await event.wait()
        finally:
            await server.stop()
