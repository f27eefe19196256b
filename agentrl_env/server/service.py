"""The calls of the protocol as methods: implemented by ``SessionPool`` and by a fleet's controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from agentrl_env.errors import WireError
from agentrl_env.fast_wire import FastBatch, Step
from agentrl_env.types import FleetInfo, SessionInfo
from agentrl_env.wire import (
    DrainRequest,
    EmptyRequest,
    ExpertAnswer,
    FleetQuery,
    ForkAnswer,
    ForkRequest,
    OpenRequest,
    SessionList,
    SessionQuery,
    SessionRequest,
    StepBatch,
    TaskList,
    Transcript,
    TranscriptRequest,
)


class Service(Protocol):
    """One method for each row of ``wire.CALLS`` but ``open_many`` and those of tokens, which ``Api`` answers.

    A method takes the row's request and returns its answer, as a model or as JSON. Methods raise WireError.
    """

    draining: bool
    """True where no new session is accepted."""

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of ``/metrics``."""

    def check_ready(self) -> None:
        """Raise ServerDraining or ServerFull where no session can be opened, with the reason."""

    async def tasks(self, request: EmptyRequest) -> TaskList | bytes:
        """Return the tasks."""

    async def open(self, request: OpenRequest) -> SessionInfo | bytes:
        """Open a session."""

    async def step(self, request: Step) -> bytes:
        """Play one assistant message."""

    async def step_many(self, request: FastBatch | StepBatch) -> Sequence[bytes | WireError]:
        """Step many sessions; return the result or the error of each step."""

    async def info(self, request: SessionRequest) -> SessionInfo | bytes:
        """Return the state of a session."""

    async def sessions(self, request: SessionQuery) -> SessionList | bytes:
        """Return the sessions that are open or have ended recently, newest first."""

    async def transcript(self, request: TranscriptRequest) -> Transcript | bytes:
        """Return the last turns of a session."""

    async def fleet(self, request: FleetQuery) -> FleetInfo:
        """Return the servers; ``Api`` adds the history."""

    async def drain_server(self, request: DrainRequest) -> FleetInfo:
        """Open no new sessions on a server, or open them again; return the servers."""

    async def expert(self, request: SessionRequest) -> ExpertAnswer | bytes:
        """Return the next message of the task's expert."""

    async def fork(self, request: ForkRequest) -> ForkAnswer | bytes:
        """Open sessions that continue from the state of a session."""

    async def close(self, request: SessionRequest) -> bytes | None:
        """End a session; idempotent."""

    async def aclose(self) -> None:
        """Release everything."""
