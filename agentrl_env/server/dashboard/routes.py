"""What the page asks for: the fleet, its sessions, one session's transcript."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from agentrl_env.server.bodies import validate
from agentrl_env.server.dashboard.shell import shell_routes
from agentrl_env.server.service import Service
from agentrl_env.wire import SessionQuery, TranscriptQuery


def page_routes(service: Service) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
    """Return the routes of the page and of the JSON that it shows, as ``create_app`` takes them."""

    async def fleet(_: Request) -> Response:
        return _json(await service.fleet())

    async def sessions(request: Request) -> Response:
        return _json(await service.sessions(validate(SessionQuery, dict(request.query_params))))

    async def transcript(request: Request) -> Response:
        query = validate(TranscriptQuery, dict(request.query_params))
        return _json(await service.transcript(request.path_params["id"], query))

    return [
        ("/v1/fleet", "GET", fleet),
        ("/v1/sessions", "GET", sessions),
        ("/v1/sessions/{id}/transcript", "GET", transcript),
        *shell_routes(),
    ]


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})
