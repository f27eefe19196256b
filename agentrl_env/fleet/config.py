"""The configuration file of ``agentrl-env up``: a controller, and the servers of each task."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from agentrl_env.errors import LaunchError
from agentrl_env.launch.docker import ContainerLimits
from agentrl_env.launch.installed import installed_task
from agentrl_env.server.watchdog import STUCK_S

_FROZEN = ConfigDict(frozen=True, extra="forbid")


class ControllerConfig(BaseModel):
    """The controller of a fleet.

    ``token_env`` names the environment variable that holds the operator's token.
    """

    model_config = _FROZEN

    host: str = "127.0.0.1"
    port: int = Field(default=8100, ge=0, le=65535)
    token_env: str = "AGENTRL_TOKEN"
    queue: float = Field(default=30.0, ge=0.0)
    image: str | None = None
    """The controller's image in Compose and Kubernetes. By default the first task's image."""
    redis: str | None = None
    """URL of the Redis server that several controllers share."""
    resume: bool = False
    """Resume a dead server's sessions on another, for tasks that can fork."""


class TaskConfig(BaseModel):
    """The servers of one task.

    Give ``target``, or ``image`` with ``kind = "docker"``. Only this kind has ``limits`` and ``network``.
    The servers are named after ``name``.
    """

    model_config = _FROZEN

    name: str
    target: str | None = None
    image: str | None = None
    kind: Literal["process", "docker"] = "process"
    replicas: int = Field(default=1, ge=1)
    max_sessions: int = Field(default=256, ge=1)
    lease: float = Field(default=900.0, ge=1.0)
    drain: float = Field(default=30.0, ge=0.0)
    oracle: bool = False
    stuck_after: float = Field(default=STUCK_S, ge=0.0, allow_inf_nan=False)
    network: str = "none"
    environment: dict[str, str] = Field(default_factory=dict)
    limits: ContainerLimits = ContainerLimits()

    @field_validator("name")
    @classmethod
    def _is_a_label(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
            raise ValueError("must be lower-case letters, digits and '-', at most 40, as Kubernetes requires")
        return name

    @model_validator(mode="after")
    def _check_kind(self) -> TaskConfig:
        if (self.target is None) == (self.image is None):
            raise ValueError("give either target or image")
        if self.kind == "process" and self.target is None:
            raise ValueError('an image needs kind = "docker"')
        if self.kind == "process" and (unused := sorted({"limits", "network"} & self.model_fields_set)):
            raise ValueError(f'a process has no {unused[0]}; remove it, or set kind = "docker"')
        return self

    @property
    def image_name(self) -> str:
        """The image's name, which is ``agentrl-NAME:latest`` if it is built from a target."""
        return self.image or f"agentrl-{self.name}:latest"

    def serve_options(self) -> dict[str, Any]:
        """Return the options of ``ServeOptions`` that concern sessions."""
        return self.model_dump(include={"max_sessions", "lease", "drain", "oracle", "stuck_after"})


class FleetConfig(BaseModel):
    """A whole fleet: the file of ``agentrl-env up FILE``."""

    model_config = _FROZEN

    name: str = "agentrl"
    controller: ControllerConfig = ControllerConfig()
    tasks: tuple[TaskConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_names(self) -> FleetConfig:
        names = [task.name for task in self.tasks]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tasks are named {duplicates[0]!r}")
        return self

    @property
    def token(self) -> str | None:
        """The operator's token, from this process's environment."""
        return os.environ.get(self.controller.token_env) or None


SECTIONS: dict[str, type[BaseModel]] = {
    "controller": ControllerConfig,
    "tasks": TaskConfig,
    "tasks.limits": ContainerLimits,
}
"""The tables of the file."""


def read_fleet_config(file: Path) -> FleetConfig:
    """Read a fleet's configuration file. Relative targets start at the file's folder.

    Raises LaunchError if the file cannot be read or is invalid. The message names the key.
    """
    try:
        config = FleetConfig.model_validate(tomllib.loads(file.read_text(encoding="utf-8-sig")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LaunchError(f"cannot read {file}: {error}") from error
    except ValidationError as error:
        raise LaunchError(f"{file}: {'; '.join(_problems(error.errors()))}") from error
    tasks = (
        task.model_copy(update={"target": task.target and resolve_target(file.parent, task.target)})
        for task in config.tasks
    )
    return config.model_copy(update={"tasks": tuple(tasks)})


def _problems(errors: Sequence[ErrorDetails]) -> list[str]:
    """Return the messages of validation errors. An invalid task also makes the list of tasks too short."""
    inside = [error for error in errors if error["loc"] != ("tasks",)]
    if len(inside) < len(errors) and not any(error["loc"][:1] == ("tasks",) for error in inside):
        return [*map(_problem, inside), "tasks: the file needs at least one table [[tasks]]"]
    return list(map(_problem, inside))


def _problem(error: ErrorDetails) -> str:
    """Return the message for a validation error, starting with the key in the file."""
    key = ".".join(str(part) for part in error["loc"]) or "the file"
    if error["type"] == "extra_forbidden":
        *parents, name = (part for part in error["loc"] if isinstance(part, str))
        known = SECTIONS.get(".".join(parents), FleetConfig).model_fields
        elsewhere = [f"{section}.{name}" for section, model in SECTIONS.items() if name in model.model_fields]
        similar = elsewhere or get_close_matches(name, known, n=1)
        return f"{key}: there is no such key" + (f"; did you mean {similar[0]!r}?" if similar else "")
    return f"{key}: {error['msg'].removeprefix('Value error, ')}"


def resolve_target(folder: Path, target: str) -> str:
    """Return a target with its path relative to ``folder`` if the path exists there.

    The name of an installed task becomes its ``module:Class``.
    """
    if (task := installed_task(target, folder)) is not None:
        return task.target
    exists = (folder / target.partition(":")[0]).exists()
    return str(folder / target) if exists else target
