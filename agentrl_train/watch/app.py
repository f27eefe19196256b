"""The server of the live page: static files, and the parts of the page that require the token."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from agentrl_env.server.auth import AgentTokens
from agentrl_env.server.limits import Limits
from agentrl_env.server.middleware import AccessMiddleware
from agentrl_env.server.sockets import Listener
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_train.watch import page
from agentrl_train.watch.episodes import Filter, Key
from agentrl_train.watch.run import WatchedRun
from agentrl_train.watch.tokens import Vocabulary

HERE = Path(__file__).parent
STYLE = (HERE.parent / "report" / "chart.css", HERE.parent / "report" / "page.css", HERE / "watch.css")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
COMPRESSED_BYTES = 2000
"""Shorter answers are sent without compression."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def create_app(folders: Sequence[Path], *, token: str | None = None) -> Starlette:
    """Return the application for one run, or for two runs to compare.

    Args:
        folders: run folders, which do not have to exist yet.
        token: required as ``Authorization: Bearer`` for everything about the runs, if given.

    Raises:
        RunFolderError: a path is not a run folder.
    """
    parts = _Parts([WatchedRun(folder) for folder in folders])
    limits = Limits()
    data = AccessMiddleware(
        Starlette(routes=[Route(f"/{name}", answer) for name, answer in parts.answers.items()]),
        token=token,
        tokens=AgentTokens(token, limits.agent_token_s) if token else None,
        limits=limits,
        metrics=Metrics(),
    )
    files = {
        "/": (page.document, "text/html"),
        "/watch.css": (lambda: "".join(path.read_text(encoding="utf-8") for path in STYLE), "text/css"),
        "/watch.js": (lambda: (HERE / "watch.js").read_text(encoding="utf-8"), "text/javascript"),
    }
    routes = [Route(path, _file(*file)) for path, file in files.items()]
    compressed = Middleware(GZipMiddleware, minimum_size=COMPRESSED_BYTES, compresslevel=5)
    return Starlette(routes=[*routes, Mount("/data", app=data)], middleware=[compressed])


def _file(read: Callable[[], str], kind: str) -> Callable[[Request], Response]:
    return lambda request: _answer(request, read(), kind)


def _answer(request: Request, text: str, kind: str = "text/html") -> Response:
    """Return a text, or 304 if the client has it already."""
    body = text.encode("utf-8", errors="replace")
    headers = HEADERS | {"etag": f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=kind)


class _Parts:
    """Answers requests for the parts of the page. The folders are read on request, in threads."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self.runs = runs
        self._vocabularies = [Vocabulary(run.folder) for run in runs]
        self._curves: tuple[Any, str] = (None, "")
        self._numbers: tuple[Any, list[str]] = (None, [])
        self.answers: Mapping[str, Callable[[Request], Response]] = {
            "about": self._about,
            "overview": self._overview,
            "curves": self._curve_section,
            "episodes": self._episodes,
            "episode": self._episode,
        }

    def _refresh(self) -> None:
        for run in self.runs:
            run.refresh()

    def _about(self, request: Request) -> Response:
        """Return names and tasks, for the filters."""
        self._refresh()
        runs = [{"name": run.name, "tasks": run.tasks} for run in self.runs]
        return _answer(request, json.dumps(runs), "application/json")

    def _overview(self, request: Request) -> Response:
        self._refresh()
        version = [run.version for run in self.runs]
        if self._numbers[0] != version:
            self._numbers = version, [page.numbers(run) for run in self.runs]
        return _answer(request, page.overview(self.runs, self._numbers[1]))

    def _curve_section(self, request: Request) -> Response:
        self._refresh()
        version = [run.version for run in self.runs]
        if self._curves[0] != version:
            self._curves = version, page.curve_section(self.runs)
        return _answer(request, self._curves[1])

    def _episodes(self, request: Request) -> Response:
        self._refresh()
        try:
            number, chosen = self._number(request), _filter(request.query_params)
            shown = int(request.query_params.get("page") or 0)
        except ValueError as error:
            return _wrong(error)
        return _answer(request, page.episode_list(self.runs[number], number, chosen, shown))

    def _episode(self, request: Request) -> Response:
        try:
            number, key = self._number(request), _key(request.query_params.get("key", ""))
        except ValueError as error:
            return _wrong(error)
        return _answer(request, page.episode(self.runs[number], self._vocabularies[number], key))

    def _number(self, request: Request) -> int:
        """Return the number of the run of a request. Raises ``ValueError``."""
        number = int(request.query_params.get("run") or 0)
        if not 0 <= number < len(self.runs):
            raise ValueError(f"run must be below {len(self.runs)}, not {number}")
        return number


def _wrong(error: ValueError) -> Response:
    return PlainTextResponse(str(error), status_code=422, headers=HEADERS)


def _filter(given: Mapping[str, str]) -> Filter:
    """Return the filter of a query. Raises ``ValueError`` for a bound that is not a number."""

    def bound(name: str, default: float) -> float:
        return float(given.get(name) or default)

    return Filter(
        task=given.get("task", ""),
        kind=given.get("kind", ""),
        outcome=given.get("outcome", ""),
        order=given.get("order") or "newest",
        lowest=bound("lowest", -math.inf),
        highest=bound("highest", math.inf),
        first_step=bound("first_step", -math.inf),
        last_step=bound("last_step", math.inf),
    )


def _key(text: str) -> Key:
    """Return the key of an episode. Raises ``ValueError`` if it is not valid."""
    match json.loads(text):
        case [str(file), int(position), int(sibling)] if position >= 0:
            return file, position, sibling
    raise ValueError("key must be a file, a position and a sibling")


class WatchServer:
    """Serves the live page. Satisfies ``agentrl_env.hosting.serve.Running``.

    Args:
        folders: run folders, which do not have to exist yet.
        host: address to bind.
        port: port to bind; 0 picks a free one.
        token: required for addresses other than loopback.

    Raises:
        RunFolderError: a path is not a run folder.
        ServeError: the address is not available, or needs a token.
    """

    drain_notice = ""

    def __init__(self, folders: Sequence[Path], *, host: str, port: int, token: str | None) -> None:
        self._app = create_app(folders, token=token)
        self._listener = Listener(host, port, token=token, insecure=None)
        self.url = self._listener.url
        names = " and ".join(str(folder) for folder in folders)
        self.announcement = f"watching {names} at {self.url}"

    async def start(self) -> None:
        """Start to answer requests."""
        await self._listener.start(self._app, Limits(), Metrics())

    async def stop(self) -> None:
        """Stop."""
        await self._listener.stop()

    def stop_waiting(self) -> None:
        """Do nothing, because there is no drain."""
