"""Where a server runs is one seam: in this process, as a child process, in a container."""

from __future__ import annotations

from typing import Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentrl_env.launch.units import parse_size


class Placed(Protocol):
    """A server that somebody placed: started, waited for, and stopped whole.

    ``ServerThread``, ``ServerProcess`` and ``DockerServer`` are it.
    """

    token: str | None
    url: str

    @property
    def running(self) -> bool:
        """Whether it lives."""

    def start(self) -> Self:
        """Return once the server answers; raise ServeError with its last words where it does not."""

    def stop(self) -> None:
        """Drain and stop the server and everything it started; idempotent."""

    def output(self) -> str:
        """Return what the server has printed."""

    def __enter__(self) -> Self:
        """Start."""

    def __exit__(self, *exc: object) -> None:
        """Stop."""


class Limits(BaseModel):
    """What a server in a container may use of its machine.

    Memory counts all that the server and its sessions hold, files in /tmp included; who takes more is
    killed. Sizes are bytes, or text such as "512m" and "2g".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory: int = Field(default=2 << 30, ge=32 << 20)
    cpus: float = Field(default=1.0, gt=0.0)
    pids: int = Field(default=256, ge=16)
    tmp: int = Field(default=256 << 20, ge=1 << 20)
    files: int = Field(default=4096, ge=64)

    @field_validator("memory", "tmp", mode="before")
    @classmethod
    def _read_size(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) else value
