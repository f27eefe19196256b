"""The hierarchy of all errors of this package.

AgentRLError
├── ToolError                 raised by a tool to answer the model; the turn counts
├── DefinitionError           an invalid Environment class
├── TargetError               a TARGET that cannot be loaded
├── ServeError                a server that cannot start (port in use, no token, ...)
├── LaunchError               an image, a container or a fleet that cannot be created
├── SandboxUnavailable        a task requires a sandbox and this machine supports none
├── SandboxFailed             an infrastructure failure of a sandbox, not of a command in it
├── StateError                a session's state that cannot be encoded or decoded
├── UnsupportedSystem         the commands do not run on this operating system
├── ServerUnreachable         no server answers at the URL
├── CallTimeout               the server did not answer in time
├── ClientClosed              the client was closed before the call
├── ProtocolError             the peer uses another protocol
└── WireError                 crosses the wire: a ``type`` and one fixed HTTP status
    ├── InvalidRequest        422  malformed body or argument
    ├── Unauthorized          401  token missing or wrong
    ├── Forbidden             403  the token does not permit this call
    ├── UnknownRoute          404  no such path
    ├── MethodNotAllowed      405  no such method on this path
    ├── UnknownTask           404  no such task on this server
    ├── UnknownServer         404  no such server in this fleet
    ├── UnknownSample         404  no such split or index
    ├── UnknownSession        404  never existed, or ended too long ago
    ├── RequestTimeout        408  the request did not arrive in time
    ├── SeqConflict           409  a gap in the numbering of steps
    ├── IdempotencyConflict   409  a repeated ``request_id`` or ``seq`` with another payload
    ├── SessionEnded          409  a new step in a session that has ended
    ├── SessionExpired        410  idle past its lease
    ├── SessionLost           410  its server died or left; the outcome of its last step is unknown
    ├── BodyTooLarge          413  over the size limit
    ├── HeadersTooLarge       431  over the limit of the headers
    ├── StepPending           425  in a batch: still running, to be repeated with the same seq
    ├── RateLimited           429  too many requests of the client, with ``Retry-After``
    ├── NotSupported          501  the task or the server does not support the call
    ├── EnvironmentFailed     500  an exception in author code outside a step (reset, expert)
    ├── InternalError         500  a bug in the server
    ├── ServerFull            503  no free session, with ``Retry-After``
    ├── ServerDraining        503  shutting down, accepts no new sessions
    └── StateUnavailable      503  the shared state of a fleet's controllers cannot be reached
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pydantic import ValidationError

AUTHOR_ERRORS = (Exception, SystemExit, BaseExceptionGroup)
"""Exceptions of author code that end an episode rather than the process. A group can contain a SystemExit."""


class AgentRLError(Exception):
    """Base class of all errors that agentrl_env and agentrl_train raise on purpose."""


class UnsupportedSystem(AgentRLError):
    """The commands do not run on this operating system."""


def check_system() -> None:
    """Raise UnsupportedSystem unless the commands run on this operating system."""
    if platform.system() == "Windows":
        raise UnsupportedSystem(
            "the commands run on Linux and macOS, and not on Windows itself; run them in WSL 2 "
            "(https://learn.microsoft.com/windows/wsl) or in a container"
        )


class ToolError(AgentRLError):
    """Raised by a tool to report a mistake to the model. The text is the tool's answer."""


class DefinitionError(AgentRLError):
    """An Environment class is invalid. The message says what to change.

    Args:
        message: A sentence.
        at: The function or class with the mistake. Its file and line are appended to the sentence.
        attribute: The attribute of the class.
    """

    def __init__(self, message: str, at: Any = None, attribute: str = "") -> None:
        from agentrl_env.author_code import place, with_place  # lazy: it loads a parser

        super().__init__(with_place(message, place(at, attribute)))


class TargetError(AgentRLError):
    """A TARGET (folder, ``file.py:Class`` or ``module:Class``) cannot be loaded."""


class ServeError(AgentRLError):
    """A server cannot start as configured."""


class LaunchError(AgentRLError):
    """An image, a container or a fleet of servers cannot be created as configured."""


class SandboxUnavailable(AgentRLError):
    """A task requires a sandbox and this machine supports none. The message names what is missing."""


class SandboxFailed(AgentRLError):
    """A sandbox failed or is closed. This is an infrastructure failure, not the failure of a command."""


class StateError(AgentRLError):
    """The state of a session cannot be encoded, or the bytes do not contain a valid state."""


class ServerUnreachable(AgentRLError):
    """No server answers at the URL."""


class CallTimeout(AgentRLError):
    """The server did not answer within the caller's timeout."""


class ClientClosed(AgentRLError):
    """The client was closed before the call. Connect another client."""


class ProtocolError(AgentRLError):
    """The peer's answer does not follow the protocol."""


class WireError(AgentRLError):
    """An error with a ``type`` and a fixed HTTP status. The client raises the same class as the server."""

    type: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def wire(self) -> dict[str, Any]:
        """Return the body that carries this error: ``{"error": {"type", "message", ...}}``."""
        return {"error": {"type": self.type, "message": self.message, **self.details}}


class InvalidRequest(WireError):
    """The body or an argument is malformed."""

    type = "invalid_request"
    status = 422


class Unauthorized(WireError):
    """The token is missing or wrong."""

    type = "unauthorized"
    status = 401


class Forbidden(WireError):
    """The token is valid, but does not permit this call."""

    type = "forbidden"
    status = 403


class UnknownRoute(WireError):
    """The path does not exist."""

    type = "unknown_route"
    status = 404


class MethodNotAllowed(WireError):
    """The path exists, but not with this method."""

    type = "method_not_allowed"
    status = 405


class UnknownTask(WireError):
    """This server does not serve the task."""

    type = "unknown_task"
    status = 404


class UnknownServer(WireError):
    """The fleet does not have this server, or has lost it."""

    type = "unknown_server"
    status = 404


class UnknownSample(WireError):
    """The task does not have this split or index."""

    type = "unknown_sample"
    status = 404


class UnknownSession(WireError):
    """The session never existed, or ended so long ago that the server has removed it."""

    type = "unknown_session"
    status = 404


class RequestTimeout(WireError):
    """The request was not received completely in time."""

    type = "request_timeout"
    status = 408


class SeqConflict(WireError):
    """The step's ``seq`` leaves a gap."""

    type = "seq_conflict"
    status = 409


class IdempotencyConflict(WireError):
    """A ``request_id`` or ``seq`` is repeated with a different payload."""

    type = "idempotency_conflict"
    status = 409


class SessionEnded(WireError):
    """The session has ended, so no further step is possible."""

    type = "session_ended"
    status = 409


class SessionExpired(WireError):
    """The session was idle past its lease and its resources are released."""

    type = "session_expired"
    status = 410


class SessionLost(WireError):
    """The server of the session died or left. A running step might or might not have been applied."""

    type = "session_lost"
    status = 410


class BodyTooLarge(WireError):
    """The request exceeds the server's size limit."""

    type = "body_too_large"
    status = 413


class HeadersTooLarge(WireError):
    """The request line and the headers exceed the server's limit."""

    type = "headers_too_large"
    status = 431


class StepPending(WireError):
    """The step is still in progress. Repeating the ``seq`` waits for its answer."""

    type = "step_pending"
    status = 425


class RateLimited(WireError):
    """The client exceeds its rate limit. ``retry_after`` is the number of seconds to wait."""

    type = "rate_limited"
    status = 429


class NotSupported(WireError):
    """The task, or the server as configured, does not support this call."""

    type = "not_supported"
    status = 501


class EnvironmentFailed(WireError):
    """Author code raised an exception outside a step, so no step result can report it."""

    type = "environment_failed"
    status = 500


class InternalError(WireError):
    """A bug in the server."""

    type = "internal_error"
    status = 500


class ServerFull(WireError):
    """The server has no free session."""

    type = "server_full"
    status = 503


class ServerDraining(WireError):
    """The server is shutting down and accepts no new sessions."""

    type = "server_draining"
    status = 503


class StateUnavailable(WireError):
    """The shared state of a fleet's controllers cannot be reached. Open sessions continue."""

    type = "state_unavailable"
    status = 503


_BY_TYPE: dict[str, type[WireError]] = {error.type: error for error in WireError.__subclasses__()}


def _is_duration(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= 86_400  # type: ignore[operator]


def from_wire(body: Any) -> WireError | None:
    """Rebuild the error from ``{"error": {...}}``, or return None if the body is not an error."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("type"), str):
        return None
    details = {key: value for key, value in error.items() if key not in ("type", "message")}
    if not _is_duration(details.get("retry_after", 0)):
        del details["retry_after"]
    known = _BY_TYPE.get(error["type"], InternalError)
    return known(str(error.get("message", error["type"])), **details)


def install_extra(name: str) -> str:
    """Return the command that installs an extra of this package, from an index or in a checkout."""
    return f"pip install 'agentrl-kit[{name}]', or '.[{name}]' in a checkout"


def explain(error: ValidationError) -> str:
    """Return the first problem of a validation error and its location in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
