"""Launchers: programs that let an unmodified coding agent play the sessions of a task."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

from packaging.requirements import Requirement

from agentrl_env.types import TaskInfo
from agentrl_train.errors import ConfigError
from agentrl_train.gateway.launchers.session import shell_tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A coding agent that plays the sessions of a served task."""

    name: str
    """Name of the launcher in ``environments.program``."""
    module: str
    """Module with the program."""
    install: str
    """Command that installs the agent."""
    requirement: str = ""
    """Requirement of the agent if it is a Python package."""
    program: str = ""
    """Name of the command if the agent is a command."""
    shell: bool = False
    """True if the agent needs a tool that runs commands. The others call all tools of a task."""

    def check_installed(self) -> None:
        """Raise ``ConfigError`` if the agent is missing or has another version."""
        if problem := self._problem():
            raise ConfigError(f"environments.program = {self.name!r} needs {problem}: {self.install}")

    def _problem(self) -> str:
        """Return the missing requirement and the reason, or "" if all requirements are met."""
        if self.program:
            missing = shutil.which(self.program, path=_path()) is None
            return f"the command {self.program}, which is not on the PATH" if missing else ""
        requirement = Requirement(self.requirement)
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            return f"{requirement}, which is not installed"
        fits = requirement.specifier.contains(installed, prereleases=True)
        return "" if fits else f"{requirement}, and {installed} is installed"

    def command(self, task: TaskInfo, *, timeout_s: float) -> list[str]:
        """Return the command line that plays a session of a task.

        Args:
            task: the served task.
            timeout_s: deadline of one call of the server.

        Raises:
            ConfigError: the task has no tool that runs commands.
        """
        if self.shell:
            try:
                shell_tool(task.tools)
            except ValueError as error:
                raise ConfigError(f"{self.name} cannot play the task {task.name!r}: {error}") from error
        # -P: modules in the working directory do not replace the agent's modules.
        options = ["--max-turns", str(task.max_turns), "--timeout", str(timeout_s)]
        return [sys.executable, "-P", "-m", self.module, *options]


MINI_SWE_AGENT = "mini-swe-agent>=2.4,<3"
LAUNCHERS: Mapping[str, Launcher] = MappingProxyType(
    {
        launcher.name: launcher
        for launcher in (
            Launcher(
                name="mini-swe-agent",
                module=f"{__name__}.mini_swe_agent",
                requirement=MINI_SWE_AGENT,
                install=f"pip install '{MINI_SWE_AGENT}'",
                shell=True,
            ),
            Launcher(
                name="claude-code",
                module=f"{__name__}.claude_code",
                program="claude",
                install="npm install --global @anthropic-ai/claude-code@2.1",
            ),
            Launcher(
                name="opencode",
                module=f"{__name__}.opencode",
                program="opencode",
                install="npm install --global opencode-ai@1.18",
            ),
            Launcher(
                name="codex",
                module=f"{__name__}.codex",
                program="codex",
                install="npm install --global @openai/codex@0.171",
            ),
        )
    }
)
"""Every launcher by its name."""


def find_launcher(run: str) -> Launcher | None:
    """Return the launcher that a program names, or None if the program is a command or a function.

    Raises:
        ConfigError: the program is a single word that is neither a launcher nor a command.
    """
    if launcher := LAUNCHERS.get(run):
        return launcher
    if len(run.split()) == 1 and not {":", "/"} & set(run) and not shutil.which(run, path=_path()):
        near = get_close_matches(run, LAUNCHERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the launchers are {', '.join(LAUNCHERS)}"
        raise ConfigError(
            f"environments.program = {run!r} is neither a launcher nor a command on the PATH; {hint}"
        )
    return None


def _path() -> str:
    """Return the PATH of a program."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
