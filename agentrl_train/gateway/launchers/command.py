"""Runs a coding agent as a command until the agent or the task ends."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentrl_train.gateway.launchers.session import TaskSession
from agentrl_train.gateway.launchers.tool_server import ToolServer, served_tools

Start = Callable[[Path, str], tuple[Sequence[str], Mapping[str, str]]]
"""Returns the command line and the variables of an agent, from its home and the address of its tools."""
POLL_S = 0.1
"""Interval of checks for the end of the agent."""
GRACE_S = 2.0
"""Seconds between the signals TERM and KILL for an agent after its task has ended."""
MAX_OUTPUT = 2000
"""Number of characters from the end of the agent's output in an error."""


class AgentFailed(Exception):
    """The agent exited with an error. The message ends with its output."""


def play_command(session: TaskSession, start: Start, *, own: tuple[str, ...]) -> None:
    """Run an agent in an empty home until it ends, with the tools of a session.

    Args:
        session: the session.
        start: returns the command line and the environment variables of the agent.
        own: prefixes of variables with which users configure their own agent. They are not passed on.

    Raises:
        AgentFailed: the agent exited with a status other than 0.
        Exception: the session failed.
    """
    home = Path(os.environ["AGENTRL_SAMPLE"]).parent / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    with served_tools(session) as (tools, url):
        command, variables = start(home, url)
        variables = {"HOME": str(home), "PWD": str(home), **variables}
        run_agent(command, environment=environment | variables, folder=home, tools=tools)


def run_agent(
    command: Sequence[str], *, environment: Mapping[str, str], folder: Path, tools: ToolServer
) -> None:
    """Run an agent until it ends by itself or cannot call tools any more.

    Args:
        command: its command line.
        environment: all its environment variables.
        folder: its working directory, which gets the file ``output``.
        tools: the tools that it calls.

    Raises:
        AgentFailed: the agent exited with a status other than 0.
        Exception: the session failed.
    """
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
        )
        try:
            while process.poll() is None and not tools.ended.wait(POLL_S):
                pass
        finally:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if tools.failure is not None:
        raise tools.failure
    if process.returncode and not tools.ended.is_set():
        last = output.read_text(encoding="utf-8", errors="replace").strip()[-MAX_OUTPUT:]
        raise AgentFailed(f"{command[0]} exited with status {process.returncode}: {last}")
