"""The session of an exported Harbor task: a process in the container, reached through the command ``task``.

``python -I -m agentrl_env.bridges.harbor.container_session`` is the health check of the container. It runs as
root, starts the process if it is not running, and succeeds once the episode has started. The process, the
task's code, its sample and the record of its rewards belong to a separate user. The model's commands run as
another user.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agentrl_env.bridges.episode import RESPOND, offered_tools
from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.errors import AgentRLError
from agentrl_env.types import FunctionCall, Message, SessionStatus, StepResult, ToolCall, ToolSpec

FOLDER = Path("/opt/agentrl-task")
"""Folder of the sample, which only the process can read."""
SOCKET = "/run/agentrl-task.sock"
RECORD = Path("/var/lib/agentrl-task/reward.json")
"""Reward and metrics so far, in the format of a Harbor verifier. Missing if the environment has failed."""
USER = 65532
MAX_LINE = 1 << 20
READY_S, LEASE_S = 110.0, 7 * 86_400.0


class Play:
    """Plays one session and records its rewards.

    Args:
        session: the session.
        tools: the tools offered to the model.
        record: file written after every step.
    """

    def __init__(self, session: ClientSession, tools: tuple[ToolSpec, ...], record: Path = RECORD) -> None:
        self._session = session
        self._tools = tools
        self._record = record
        self._reward = 0.0
        self._playing = asyncio.Lock()
        self._write({})

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the only line of a connection: a tool call, or ``{}`` for the opening."""
        try:
            call = json.loads(await reader.readline())
            if not isinstance(call, dict) or not isinstance(call.get("arguments", {}), dict):
                return
            async with self._playing:
                answer = await self._play(call)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (ConnectionError, ValueError):  # ValueError: the line is too long or not JSON
            return
        finally:
            writer.close()

    async def _play(self, call: dict[str, Any]) -> dict[str, Any]:
        session = self._session
        if "name" not in call:
            tools = [tool.function.model_dump() for tool in self._tools]
            return {"text": text_of(session.messages), "status": session.status, "tools": tools}
        name, arguments = str(call["name"]), call.get("arguments", {})
        if name == RESPOND.function.name and RESPOND in self._tools:
            message = Message.assistant(str(arguments.get("text", "")))
        else:
            function = FunctionCall(name=name, arguments=json.dumps(arguments))
            message = Message.assistant(None, ToolCall(id=f"call_{session.turn + 1}", function=function))
        try:
            result = await session.step(message)
        except AgentRLError as error:
            return {"text": str(error), "status": session.status}
        self._note(result)
        return {"text": text_of(result.messages), "status": result.status}

    def _note(self, result: StepResult) -> None:
        if result.status is SessionStatus.FAILED_ENVIRONMENT:
            self._record.unlink(missing_ok=True)  # a failure is not a reward
            return
        self._reward += result.reward
        self._write(result.metrics if result.final else {})

    def _write(self, metrics: dict[str, float]) -> None:
        written = self._record.with_suffix(".new")
        written.write_text(json.dumps({**metrics, "reward": self._reward}))
        written.replace(self._record)


async def serve(listening: socket.socket, folder: Path = FOLDER, record: Path = RECORD) -> None:
    """Open the session of the folder's sample and answer the connections of a socket."""
    sample = json.loads((folder / "sample.json").read_text())
    async with EnvClient.local(sample.pop("target"), oracle=False, lease_s=LEASE_S) as client:
        (task,) = (await client.tasks()).values()
        session = await client.open(**sample)
        play = Play(session, offered_tools(task, session.tools), record)
        server = await asyncio.start_unix_server(play.answer, sock=listening, limit=MAX_LINE)
        async with server:
            await server.serve_forever()


def answers(path: str = SOCKET) -> bool:
    """Return True if the process answers on its socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def start() -> bool:
    """Start the process if it is not running. Return True if it answers."""
    if answers():
        return True
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    os.chown(RECORD.parent, USER, USER)
    RECORD.parent.chmod(0o700)
    with (RECORD.parent / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", __spec__.name, "serve"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "HOME": str(RECORD.parent)},
            start_new_session=True,
        )
    ready_by = time.monotonic() + READY_S
    while time.monotonic() < ready_by and process.poll() is None:
        if answers():
            return True
        time.sleep(0.1)
    print((RECORD.parent / "log").read_text(errors="replace")[-2000:], file=sys.stderr)
    return False


def run() -> None:
    """Bind the socket for every user, become ``USER``, and serve."""
    Path(SOCKET).unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(SOCKET)
    os.chmod(SOCKET, 0o666)
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    os.umask(0o077)
    try:
        asyncio.run(serve(listening))
    except AgentRLError as error:
        sys.exit(f"error: {error}")


def text_of(messages: tuple[Message, ...]) -> str:
    """Join the contents of messages into one text."""
    parts = [message.content for message in messages]
    return "\n\n".join(part if isinstance(part, str) else json.dumps(part) for part in parts if part)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        run()
    else:
        sys.exit(not start())
