"""What our server is measured against; ``python -m tests.benchmarks.serving_peers NAME`` serves one of them.

OpenEnv's application is built and run as its documentation says: ``create_app`` over an ``Environment``,
uvicorn with one worker. Its one session is one WebSocket.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import uvicorn
from fastapi import FastAPI, Request, Response

ROOT = Path(__file__).parents[2]


def openenv(*, inline: bool) -> FastAPI:
    """Return OpenEnv's application around the trivial task; ``inline`` overrides ``step_async``."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_app

    class Said(Action):
        text: str

    class Heard(Observation):
        text: str = ""

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            return Heard(text="say something", reward=0.0)

        def step(self, action, timeout_s=None, **kwargs):
            return Heard(text=action.text, reward=0.0)

        @property
        def state(self):
            return State()

    class EchoInline(Echo):
        async def step_async(self, action, timeout_s=None, **kwargs):
            return self.step(action)

    return create_app(EchoInline if inline else Echo, Said, Heard, max_concurrent_envs=100_000)


def bare() -> FastAPI:
    """Return the ceiling: it reads a request and answers it with bytes it was given before."""
    app = FastAPI()
    kept = b""

    @app.put("/answer")
    async def keep(request: Request) -> Response:
        nonlocal kept
        kept = await request.body()
        return Response(status_code=204)

    @app.post("/v1/step")
    async def answer(request: Request) -> Response:
        await request.body()
        return Response(kept, media_type="application/json")

    return app


APPS: dict[str, Callable[[], FastAPI]] = {
    "openenv": lambda: openenv(inline=False),
    "openenv-inline": lambda: openenv(inline=True),
    "bare": bare,
}


class PeerProcess:
    """One of ``APPS`` as a child, which ends when its parent does; Ctrl-C does not reach it by itself."""

    def __init__(self, app: str) -> None:
        self._app, self._url = app, ""
        command = [sys.executable, "-m", "tests.benchmarks.serving_peers", app]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def url(self) -> str:
        """Return where the child listens, once it does."""
        if not self._url:
            assert self._process.stdout is not None
            self._url = self._process.stdout.readline().decode().strip()
        if not self._url:
            raise RuntimeError(f"the server of {self._app!r} did not start; see above")
        return self._url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._process:  # closes the pipes, and waits
            self._process.kill()


def allow_many_sockets() -> None:
    """Let this process hold a socket for each session."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Serve the application named on the command line; print its URL."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    allow_many_sockets()
    app = APPS[sys.argv[1]]()
    # Of a socket that does not name its protocol asyncio does not know that it is TCP, and leaves Nagle's
    # algorithm on.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen(2048)
    print(f"http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[bound])


if __name__ == "__main__":
    main()
