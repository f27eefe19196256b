"""Launchers: programs of this package in which an unmodified coding agent plays a task that has a shell."""

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
from agentrl_train.gateway.launchers.shell import shell_tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A coding agent that plays the sessions of a served task."""

    name: str
    """Name of the launcher in ``environments.program``."""
    module: str
    """Module with the program."""
    requirement: str
    """Requirement of the agent's package."""

    def check_installed(self) -> None:
        """Raise ``ConfigError`` if the agent's package is missing or has another version."""
        requirement = Requirement(self.requirement)
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            found = "it is not installed"
        else:
            if requirement.specifier.contains(installed, prereleases=True):
                return
            found = f"{installed} is installed"
        raise ConfigError(
            f"environments.program = {self.name!r} needs {requirement}, and {found}: "
            f"pip install '{requirement}'"
        )

    def command(self, task: TaskInfo, *, timeout_s: float) -> list[str]:
        """Return the command line that plays a session of a task.

        Args:
            task: the served task.
            timeout_s: deadline of one call of the server.

        Raises:
            ConfigError: the task has no tool that runs commands.
        """
        try:
            shell_tool(task.tools)
        except ValueError as error:
            raise ConfigError(f"{self.name} cannot play the task {task.name!r}: {error}") from error
        # -P: modules in the working directory do not replace those of the agent.
        options = ["--max-turns", str(task.max_turns), "--timeout", str(timeout_s)]
        return [sys.executable, "-P", "-m", self.module, *options]


LAUNCHERS: Mapping[str, Launcher] = MappingProxyType(
    {
        launcher.name: launcher
        for launcher in (
            Launcher(
                name="mini-swe-agent",
                module=f"{__name__}.mini_swe_agent",
                requirement="mini-swe-agent>=2.4,<3",
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
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if len(run.split()) == 1 and not {":", "/"} & set(run) and not shutil.which(run, path=path):
        near = get_close_matches(run, LAUNCHERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the launchers are {', '.join(LAUNCHERS)}"
        raise ConfigError(
            f"environments.program = {run!r} is neither a launcher nor a command on the PATH; {hint}"
        )
    return None
