"""Peers of our server. ``python -m tests.benchmarks.serving_peers NAME`` serves one of them.

OpenEnv's application is built and run as documented: ``create_app`` over an ``Environment``, uvicorn with one
worker. Each of its sessions is one WebSocket. AgentRL's worker is the application that its own ``run``
builds, but without an access log. Its heartbeats are not answered.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self
from unittest import mock

import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from agentrl_env.types import StepResult
from agentrl_env.wire import StepBatch
from tests.benchmarks import serving_task

ROOT = Path(__file__).parents[2]


def openenv(*, inline: bool) -> FastAPI:
    """Return OpenEnv's application for the trivial task. ``inline`` overrides ``step_async``."""
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


def agentrl_worker() -> FastAPI:
    """Return the application of AgentRL's worker for the trivial task."""
    from agentrl.worker.task import Task
    from agentrl.worker.task_worker import TaskWorker
    from agentrl.worker.typings import AgentCancelledException, SampleStatus, TaskSampleExecutionResult

    class Echo(Task):
        def get_indices(self):
            return [0]

        async def start_sample(self, index, session):
            session.inject({"role": "user", "content": "say something"})
            with suppress(AgentCancelledException):
                while True:
                    for message in (await session.action()).messages:
                        for call in message["tool_calls"]:
                            text = json.loads(call["function"]["arguments"])["text"]
                            session.inject({"role": "tool", "tool_call_id": call["id"], "content": text})
            return TaskSampleExecutionResult(status=SampleStatus.CANCELLED)

    quiet = logging.getLogger("quiet")
    quiet.setLevel(logging.CRITICAL)
    specs = [spec.model_dump() for spec in serving_task.Echo.tool_specs()]
    task = Echo("echo", concurrency=100_000, tools=specs)
    worker = TaskWorker(task, "http://127.0.0.1:9/api", "http://127.0.0.1:9/api", logger=quiet)
    with mock.patch("agentrl.worker.task_worker.uvicorn.run"):
        worker.run("127.0.0.1", 0)
    return worker.app


class Answers(BaseModel):
    """The answer of a batch call."""

    results: list[StepResult]


def bare() -> FastAPI:
    """Return the application of both ceilings, which answer with prepared data.

    The first parses a request to plain values and answers with bytes. The second follows FastAPI's
    documentation: it parses the request to models and builds the answer from models.
    """
    app = FastAPI()
    kept, answers = b"", Answers(results=[])

    @app.put("/answer")
    async def keep(request: Request) -> Response:
        nonlocal kept, answers
        kept = await request.body()
        answers = Answers.model_validate_json(kept)
        return Response(status_code=204)

    @app.post("/v1/step")
    async def answer(request: Request) -> Response:
        await request.json()
        return Response(kept, media_type="application/json")

    @app.post("/parsed")
    async def parsed(batch: StepBatch) -> Answers:
        return answers

    return app


APPS: dict[str, Callable[[], FastAPI]] = {
    "openenv": lambda: openenv(inline=False),
    "openenv-inline": lambda: openenv(inline=True),
    "agentrl": agentrl_worker,
    "bare": bare,
}


class PeerProcess:
    """One of ``APPS`` in a child process. The process ends with its parent and does not receive Ctrl-C."""

    def __init__(self, app: str) -> None:
        self._app, self._url = app, ""
        command = [sys.executable, "-m", "tests.benchmarks.serving_peers", app]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._process.pid

    def url(self) -> str:
        """Wait until the child listens and return its URL."""
        if not self._url:
            assert self._process.stdout is not None
            self._url = self._process.stdout.readline().decode().strip()
        if not self._url:
            raise RuntimeError(f"the server of {self._app!r} did not start; see above")
        return self._url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._process:  # also closes the pipes
            self._process.kill()


def allow_many_sockets() -> None:
    """Raise the limit of open files to one socket for each session."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Serve the application named on the command line and print its URL."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    allow_many_sockets()
    app = APPS[sys.argv[1]]()
    # Without an explicit protocol, asyncio does not recognize a TCP socket and leaves Nagle's algorithm on.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    bound.listen(2048)
    print(f"http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
    # A connection is idle while the other players play their rounds.
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=600)
    uvicorn.Server(config).run(sockets=[bound])


if __name__ == "__main__":
    main()
