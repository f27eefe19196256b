"""The page's files, which hold no data: they are served to everybody, what they show is not."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Nothing runs or loads but these files; pictures may also come within an answer."""


def _read() -> dict[str, tuple[bytes, str]]:
    """Return by path each file and its type."""
    found: dict[str, tuple[bytes, str]] = {}
    for file in files(__package__).iterdir():
        kind = file.name.rpartition(".")[2]
        if kind in _TYPES:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            found[path] = (file.read_bytes(), _TYPES[kind])
    return found


SHELL = MappingProxyType(_read())
"""By path, the files and their types."""


def shell_routes() -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
    """Return the routes of the page's files, as ``create_app`` takes them."""
    return [(path, "GET", _handler(body, kind)) for path, (body, kind) in SHELL.items()]


def _handler(body: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(body).hexdigest()[:16]}"',
    }

    async def handler(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    return handler
