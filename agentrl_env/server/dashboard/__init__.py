"""The dashboard at ``/``: static files without data, served without a token."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from types import MappingProxyType

from fastapi import FastAPI, Request, Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: only the dashboard's own files, and images embedded in answers."""


def _read() -> dict[str, tuple[bytes, str]]:
    found: dict[str, tuple[bytes, str]] = {}
    for file in files(__package__).iterdir():
        kind = file.name.rpartition(".")[2]
        if kind in _TYPES:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            found[path] = (file.read_bytes(), _TYPES[kind])
    return found


FILES = MappingProxyType(_read())
"""Content and media type of each file, by path."""


def add_routes(app: FastAPI) -> None:
    """Add the routes of the files."""
    for path, (body, kind) in FILES.items():
        app.add_api_route(
            path,
            _endpoint(body, kind),
            methods=["GET"],
            operation_id=f"dashboard {path}",
            summary="Return a file of the dashboard.",
            response_class=Response,
            responses={200: {"content": {kind: {}}}},
        )


def _endpoint(body: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(body).hexdigest()[:16]}"',
    }

    async def endpoint(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    return endpoint
