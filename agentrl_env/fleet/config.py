"""A fleet as a file says it: one controller, and for each task how its servers are placed."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from agentrl_env.errors import LaunchError
from agentrl_env.launch.placement import Limits

_FROZEN = ConfigDict(frozen=True, extra="forbid")


class ControllerPlan(BaseModel):
    """The fleet's address.

    ``token_env`` names the environment variable with the operator's token: a secret is no part of a file.
    """

    model_config = _FROZEN

    host: str = "127.0.0.1"
    port: int = Field(default=8100, ge=0, le=65535)
    token_env: str = "AGENTRL_TOKEN"
    queue: float = Field(default=30.0, ge=0.0)
    image: str | None = None
    """What runs the controller in Compose and Kubernetes; the first task's image by default."""
    redis: str | None = None
    """Where the controller keeps its state, which further controllers of the fleet may share."""
    resume: bool = False
    """Go on with a dead server's sessions at another, where tasks can fork."""


class TaskPlan(BaseModel):
    """The servers of one task.

    Give ``target``, or ``image`` with ``kind = "docker"``; ``limits`` and ``network`` are for that kind
    alone. ``name`` is what its servers are called.
    """

    model_config = _FROZEN

    name: str
    target: str | None = None
    image: str | None = None
    kind: Literal["process", "docker"] = "process"
    replicas: int = Field(default=1, ge=1)
    max_sessions: int = Field(default=256, ge=1)
    lease: float = Field(default=900.0, gt=0.0)
    drain: float = Field(default=30.0, ge=0.0)
    oracle: bool = False
    network: str = "none"
    environment: dict[str, str] = Field(default_factory=dict)
    limits: Limits = Limits()

    @field_validator("name")
    @classmethod
    def _is_a_label(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
            raise ValueError("must be lower-case letters, digits and '-', at most 40, as Kubernetes wants it")
        return name

    @model_validator(mode="after")
    def _has_something_to_serve(self) -> TaskPlan:
        if (self.target is None) == (self.image is None):
            raise ValueError("give either target or image")
        if self.kind == "process" and self.target is None:
            raise ValueError('an image runs with kind = "docker"')
        if self.kind == "process" and (unheeded := sorted({"limits", "network"} & self.model_fields_set)):
            raise ValueError(f'a process has no {unheeded[0]}; leave it out, or set kind = "docker"')
        return self

    @property
    def image_name(self) -> str:
        """The image that serves it; ``agentrl-NAME:latest`` where it is built from a target."""
        return self.image or f"agentrl-{self.name}:latest"

    def arguments(self) -> list[str]:
        """Return the options of ``agentrl-env serve`` that this plan means."""
        numbers = {"--max-sessions": self.max_sessions, "--lease": self.lease, "--drain": self.drain}
        options = [word for key, value in numbers.items() for word in (key, f"{value:g}")]
        return [*options, "--oracle"] if self.oracle else options


class FleetPlan(BaseModel):
    """A whole fleet: what ``agentrl-env up FILE`` reads."""

    model_config = _FROZEN

    name: str = "agentrl"
    controller: ControllerPlan = ControllerPlan()
    tasks: tuple[TaskPlan, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> FleetPlan:
        names = [task.name for task in self.tasks]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tasks are named {doubled[0]!r}")
        return self

    @property
    def token(self) -> str | None:
        """The operator's token, out of this process's environment."""
        return os.environ.get(self.controller.token_env) or None


def read_plan(file: Path) -> FleetPlan:
    """Read a fleet's file; targets are relative to its folder.

    Raises:
        LaunchError: it cannot be read or means nothing; one sentence with the key.
    """
    try:
        plan = FleetPlan.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LaunchError(f"cannot read {file}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise LaunchError(f"{file}: {key}: {first['msg'].removeprefix('Value error, ')}") from error
    return plan.model_copy(update={"tasks": tuple(_beside(file.parent, task) for task in plan.tasks)})


def _beside(folder: Path, task: TaskPlan) -> TaskPlan:
    if task.target is None or not (folder / task.target.partition(":")[0]).exists():
        return task
    return task.model_copy(update={"target": str(folder / task.target)})
