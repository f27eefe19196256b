"""The calls of the protocol as methods. ``SessionPool`` and the controller of a fleet implement them."""

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
    """One method per row of ``wire.CALLS``, except ``open_many`` and token calls, which ``Api`` answers.

    A method takes the row's request and returns its answer, as a model or as JSON. Methods raise WireError.
    """

    draining: bool
    """True if no new session is accepted."""

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of ``/metrics``."""

    def check_ready(self) -> None:
        """Raise ServerDraining or ServerFull if no session can be opened, with the reason."""

    async def tasks(self, request: EmptyRequest) -> TaskList | bytes:
        """Return the tasks."""

    async def open(self, request: OpenRequest) -> SessionInfo | bytes:
        """Open a session."""

    async def step(self, request: Step) -> bytes:
        """Play one assistant message."""

    async def step_many(self, request: FastBatch | StepBatch) -> Sequence[bytes | WireError]:
        """Step many sessions and return the result or the error of each step."""

    async def info(self, request: SessionRequest) -> SessionInfo | bytes:
        """Return the state of a session."""

    async def sessions(self, request: SessionQuery) -> SessionList | bytes:
        """Return the sessions that are open or have ended recently, newest first."""

    async def transcript(self, request: TranscriptRequest) -> Transcript | bytes:
        """Return the last turns of a session."""

    async def fleet(self, request: FleetQuery) -> FleetInfo:
        """Return the servers. ``Api`` adds the history."""

    async def drain_server(self, request: DrainRequest) -> FleetInfo:
        """Stop or resume opening new sessions on a server. Return the servers."""

    async def expert(self, request: SessionRequest) -> ExpertAnswer | bytes:
        """Return the next message of the task's expert."""

    async def fork(self, request: ForkRequest) -> ForkAnswer | bytes:
        """Open sessions that continue from the state of a session."""

    async def close(self, request: SessionRequest) -> bytes | None:
        """End a session. Idempotent."""

    async def aclose(self) -> None:
        """Release everything."""
