"""Errors of the gateway's API, in the shape that OpenAI's clients read.

GatewayError
├── InvalidRequest     400    the request is invalid or not supported
│   └── ContextTooLong        the conversation leaves no room for a token
├── Unauthorized       401    the key is missing or wrong
├── UnknownSession     404    no session has this key
├── SessionClosed      410    the episode is over
└── EngineUnavailable  500    the engine failed; clients try again
"""

from __future__ import annotations

from typing import Any, ClassVar


class GatewayError(Exception):
    """Base of all errors that a client of the gateway gets."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


class InvalidRequest(GatewayError):
    """The request is invalid or not supported."""

    status = 400
    kind = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """The conversation leaves no room for a token."""

    code = "context_length_exceeded"


class Unauthorized(GatewayError):
    """The key is missing or wrong."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class UnknownSession(GatewayError):
    """No session has this key."""

    status = 404
    kind = "invalid_request_error"
    code = "session_not_found"


class SessionClosed(GatewayError):
    """The episode is over."""

    status = 410
    kind = "invalid_request_error"
    code = "session_closed"


class EngineUnavailable(GatewayError):
    """The engine failed."""

    code = "engine_error"


def ignoring(name: str) -> str:
    """Return how to ignore a parameter, as a part of an error message."""
    return f"ignore it with environments.program.ignore = [{name!r}] or agentrl-train gateway --ignore {name}"
