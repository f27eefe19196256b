"""A Harbor task folder, read and checked."""

from __future__ import annotations

import base64
import io
import math
import os
import re
import shlex
import tarfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_env.errors import NotSupported, SandboxFailed
from agentrl_env.sandbox import Sandbox
from agentrl_env.sandbox.sandbox import parse_size

_CHECK = ("interval", "timeout", "start_period", "start_interval")
SECTIONS = {
    "agent": {"timeout_sec", "user", "network_mode"},
    "verifier": {"timeout_sec", "env", "network_mode"},
    "environment": {
        *("build_timeout_sec", "docker_image", "cpus", "memory_mb", "memory", "storage_mb", "storage"),
        *("allow_internet", "network_mode", "env", "workdir"),
    },
    "environment.healthcheck": {"command", "retries", *(f"{name}_sec" for name in _CHECK)},
    "solution": {"env"},
    "": {"version", "schema_version", "task", "metadata", "source"},
}
"""The supported keys of each section of ``task.toml``. Top-level keys describe the task."""
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "verifier.user": ("root", "0"),
    "verifier.environment_mode": ("shared",),
    "environment.os": ("linux",),
}
"""Keys supported only with these values."""
UNSUPPORTED = {
    "steps": "several steps",
    "artifacts": "files that are handed over to the tests",
    "environment.gpus": "GPUs",
    "environment.mcp_servers": "MCP servers",
    "verifier.user": "another user than root",
    "verifier.environment": "an environment of its own for the tests",
    "verifier.environment_mode": "an environment of its own for the tests",
}
"""Meaning of each unsupported key, for the log message about an omitted task."""
FILES = {
    "environment/docker-compose.yaml": "several containers",
    "environment/docker-compose.yml": "several containers",
    "tests/Dockerfile": "an image of its own for the tests",
    "tests/docker-compose.yaml": "several containers",
    "tests/docker-compose.yml": "several containers",
}
"""Unsupported files in a folder, and their meaning."""
REMEDY = "which is not supported; play this task with Harbor itself"
NETWORKS = {None: None, "public": True, "no-network": False}
"""Network modes of ``task.toml``."""
SHELL = ("sh", "-c", 'exec "$(command -v bash || echo sh)" -c "$1"', "sh")
"""Arguments that run the following text in bash, or in sh if the machine has no bash."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """A command that runs as root before the model starts, until it succeeds. Times are in seconds."""

    command: str
    interval: float = 5.0
    timeout: float = 30.0
    start_period: float = 0.0
    start_interval: float = 5.0
    retries: float = 3

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> HealthCheck | None:
        """Return the check in a ``task.toml``, or None. Raises ValueError."""
        given = _get(settings, "environment.healthcheck")
        if not given:
            return None
        numbers = {name: float(given[f"{name}_sec"]) for name in _CHECK if f"{name}_sec" in given}
        return cls(command=str(given["command"]), retries=float(given.get("retries", 3)), **numbers)

    @property
    def seconds(self) -> float:
        """Maximum total duration of the check."""
        return self.start_period + self.retries * (self.interval + self.timeout)

    def pass_on(self, box: Sandbox, **options: Any) -> None:
        """Run the command until it succeeds. Raises SandboxFailed after ``retries`` failures."""
        begun, failures = time.monotonic(), 0
        while (done := box.run([*SHELL, self.command], timeout=self.timeout, **options)).code != 0:
            starting = time.monotonic() - begun < self.start_period
            failures += not starting
            if failures >= self.retries:
                raise SandboxFailed(f"the health check of the machine failed: {done.text[-300:]}")
            time.sleep(self.start_interval if starting else self.interval)


class Unusable(Exception):
    """Raised if a task folder cannot be served. The message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """One task folder, read and checked."""

    name: str
    folder: Path
    instruction: str
    image: str | None
    """Name of a container image. None if ``environment/`` has a Dockerfile or no image is needed."""
    agent_s: float = 600.0
    verifier_s: float = 600.0
    build_s: float = 600.0
    cpus: float = 1.0
    memory: int = 2 << 30
    disk: int = 10 << 30
    network: bool = True
    """True if the model's commands can reach a network."""
    verifier_network: bool = True
    """True if the tests can reach a network."""
    workdir: str | None = None
    """Working directory of every command. None for the image's default."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every command."""
    user: str | None = None
    """User of the model's commands. None for root."""
    check: HealthCheck | None = None
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> HarborTask:
        """Read a task folder. Raises Unusable."""
        try:
            settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8-sig"))
            instruction = (folder / "instruction.md").read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise Unusable(f"cannot read it: {error}") from error
        for key, value in _unsupported_keys(settings):
            if key in UNSUPPORTED:
                raise Unusable(f"{key} requires {UNSUPPORTED[key]}, {REMEDY}")
            raise Unusable(f"{key} = {value!r:.80} is not supported")
        if not (folder / "tests/test.sh").is_file():
            raise Unusable("it has no tests/test.sh")
        for name, meaning in FILES.items():
            if (folder / name).exists():
                raise Unusable(f"{name} requires {meaning}, {REMEDY}")
        try:
            user = _get(settings, "agent.user")
            network = _network(settings, "environment", _flag(settings, "environment.allow_internet"))
            task = cls(
                name=folder.name,
                folder=folder,
                instruction=re.sub(r"\A(\s*(<!--|#)[^\n]*canary[^\n]*\n)+", "", instruction).strip(),
                image=_get(settings, "environment.docker_image"),
                agent_s=_positive(settings, "agent.timeout_sec", 600.0),
                verifier_s=_positive(settings, "verifier.timeout_sec", 600.0),
                build_s=_positive(settings, "environment.build_timeout_sec", 600.0),
                cpus=_positive(settings, "environment.cpus", 1.0),
                memory=_size(settings, "memory", 2 << 30),
                disk=_size(settings, "storage", 10 << 30),
                network=_network(settings, "agent", network),
                verifier_network=_network(settings, "verifier", network),
                workdir=_folder(settings, "environment.workdir"),
                env=_variables(settings, "environment.env"),
                user=None if user in (None, "", 0, "0", "root") else str(user),
                check=HealthCheck.read(settings),
                verifier_env=_variables(settings, "verifier.env"),
                solution_env=_variables(settings, "solution.env"),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise Unusable(f"task.toml: {error}") from error
        if task.user is not None and not task.needs_image:
            raise Unusable("agent.user sets another user, which requires an image")
        return task

    @property
    def dockerfile(self) -> bool:
        """True if the image is built from the folder."""
        return (self.folder / "environment/Dockerfile").is_file()

    @property
    def check_s(self) -> float:
        """Maximum seconds of the health check."""
        return self.check.seconds if self.check is not None else 0.0

    @property
    def options(self) -> dict[str, Any]:
        """Options for ``Sandbox.run``, for every command."""
        return {"cwd": self.workdir, "env": self.env}

    @property
    def needs_image(self) -> bool:
        """True if the task runs in a container."""
        return self.image is not None or self.dockerfile

    def solution(self) -> str:
        """Return the command that writes and runs the solution. Raises NotSupported without one."""
        files = self.files("solution")
        if "solve.sh" not in files:
            raise NotSupported(f"{self.name} has no solution/solve.sh")
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:xz") as tar:
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(data), 0o755
                tar.addfile(entry, io.BytesIO(data))
        text = base64.b64encode(archive.getvalue()).decode()
        settings = "".join(f"{name}={shlex.quote(value)} " for name, value in self.solution_env.items())
        run = f"{settings}bash /solution/solve.sh"
        if len(files) == 1:
            script = files["solve.sh"].decode("utf-8", "replace").rstrip("\n")
            write = f"cat >/solution/solve.sh <<'END_OF_SOLUTION'\n{script}\nEND_OF_SOLUTION\n"
            return f"mkdir -p /solution; {write}{run}"
        return f"mkdir -p /solution; echo {text} | base64 -d | tar -xJf - -C /solution; {run}"

    def files(self, part: str) -> dict[str, bytes]:
        """Return the contents of one subfolder's files by relative path."""
        root = self.folder / part
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def _get(settings: Mapping[str, Any], key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _unsupported_keys(settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each unsupported key with its value. Empty values count as not set."""
    for name, value in settings.items():
        key = f"{section}.{name}" if section else name
        if key in SECTIONS and isinstance(value, Mapping):
            yield from _unsupported_keys(value, key)
        elif name not in SECTIONS[section] and value not in (None, "", 0, [], {}, *HARMLESS.get(key, ())):
            yield key, value


def _flag(settings: Mapping[str, Any], key: str) -> bool:
    """Return a flag that defaults to true. Raises ValueError."""
    value = _get(settings, key)
    if value not in (None, True, False):
        raise ValueError(f"{key} = {value!r} is neither true nor false")
    return value is not False


def _folder(settings: Mapping[str, Any], key: str) -> str | None:
    value = _get(settings, key) or None
    if value is not None and not (isinstance(value, str) and value.startswith("/")):
        raise ValueError(f"{key} = {value!r} is not an absolute path")
    return value


def _network(settings: Mapping[str, Any], section: str, default: bool) -> bool:
    """Return True if a section's commands can reach a network. Raises ValueError."""
    mode = _get(settings, f"{section}.network_mode")
    if mode not in NETWORKS:
        raise ValueError(f"{section}.network_mode = {mode!r} is not supported")
    allowed = NETWORKS[mode]
    return default if allowed is None else allowed


def _positive(settings: Mapping[str, Any], key: str, default: float) -> float:
    value = _get(settings, key)
    number = default if value is None else float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{key} = {value!r} is not a positive number")
    return number


def _size(settings: Mapping[str, Any], name: str, default: int) -> int:
    """Return a size in bytes: ``memory_mb = 2048``, or the older ``memory = "2G"``."""
    megabytes, text = _get(settings, f"environment.{name}_mb"), _get(settings, f"environment.{name}")
    if megabytes is not None:
        return int(float(megabytes) * (1 << 20))
    return default if text is None else parse_size(text)


def _variables(settings: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return environment variables, with ``${NAME}`` and ``${NAME:-default}`` expanded from this process."""

    def replaced(found: re.Match[str]) -> str:
        value = os.environ.get(found[1], found[2])
        if value is None:
            raise ValueError(f"{key} needs the environment variable {found[1]}")
        return value

    given = _get(settings, key) or {}
    return {name: _VARIABLE.sub(replaced, str(value)) for name, value in given.items()}
