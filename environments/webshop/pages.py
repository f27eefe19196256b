"""The pages of the shop as HTML, and a site of them for people and for agents with a browser."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import escape
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from agentrl_env import ClientSession, EnvClient, ToolCall, WireError, Wording

from .environment import TEXTS, Webshop
from .visit import Page

MAX_VISITS = 1000
"""Maximum number of stored visits of the site. The oldest is dropped first."""
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Shop</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body { font: 16px/1.5 sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em; }
form { display: inline; } li { margin: .4em 0; }
button[aria-pressed=true] { font-weight: bold; outline: 2px solid; }
</style></head><body>"""


def as_html(page: Page, instruction: str) -> str:
    """Return a page as HTML. Clickable parts are buttons of a form that leads to ``click``."""
    parts = [HEAD, f'<p id="instruction">Instruction: {escape(instruction)}</p>', "<nav>"]
    parts += [_button(name) for name in page.navigation]
    parts += ["</nav>", f"<h1>{escape(page.title)}</h1>"]
    if page.has_search:
        parts.append(
            '<form method="post" action="search"><input name="keywords" aria-label="Keywords" autofocus>'
            "<button>Search</button></form>"
        )
    parts += [f"<p>{escape(line)}</p>" for line in page.lines]
    offers = [
        f"<li>{_button(offer.asin)} {escape(offer.title)}, ${offer.price:.2f}</li>" for offer in page.offers
    ]
    parts += ["<ul>", *offers, "</ul>"] if offers else []
    for option, values in page.options.items():
        buttons = (_button(value, pressed=page.chosen.get(option) == value) for value in values)
        parts.append(f"<p>{escape(option)}: {' '.join(buttons)}</p>")
    parts += [f"<p>{' '.join(map(_button, page.actions))}</p>" if page.actions else "", "</body></html>"]
    return "\n".join(filter(None, parts))


def _button(value: str, pressed: bool | None = None) -> str:
    state = "" if pressed is None else f' aria-pressed="{str(pressed).lower()}"'
    name = escape(value, quote=True)
    button = f'<button name="value" value="{name}"{state}>{name}</button>'
    return f'<form method="post" action="click">{button}</form>'


class WebshopPages(Webshop):
    """Buy what the instruction asks for; the pages are HTML."""

    name = "webshop_pages"
    wording = Wording(**TEXTS)
    show = staticmethod(as_html)


def site() -> Starlette:
    """Return an ASGI application. ``/?split=test-2&index=3`` opens a visit of that sample, ``/`` of any."""
    client = EnvClient.local(WebshopPages)
    visits: OrderedDict[str, tuple[ClientSession, str]] = OrderedDict()

    async def enter(request: Request) -> Response:
        asked = request.query_params
        index = int(asked["index"]) if asked.get("index", "").isdecimal() else None
        try:
            session = await client.open(split=asked.get("split", "test"), index=index)
        except WireError as error:
            return PlainTextResponse(str(error), status_code=404)
        key = secrets.token_urlsafe(12)
        visits[key] = (session, str(session.messages[0].content))
        if len(visits) > MAX_VISITS:
            forgotten, _ = visits.popitem(last=False)[1]
            await forgotten.close()
        return RedirectResponse(f"/{key}/")

    async def show(request: Request) -> Response:
        visit = visits.get(request.path_params["visit"])
        return HTMLResponse(visit[1]) if visit else PlainTextResponse("Unknown visit.", status_code=404)

    async def act(request: Request) -> Response:
        key, action = request.path_params["visit"], request.path_params["action"]
        session, _ = visits.get(key, (None, ""))
        argument = {"search": "keywords", "click": "value"}.get(action)
        if session is None or argument is None:
            return PlainTextResponse("Unknown visit or action.", status_code=404)
        given = parse_qs((await request.body()).decode(errors="replace")).get(argument, [""])[0]
        try:
            result = await session.step(ToolCall.of(f"{action}_action", **{argument: given}))
        except WireError as error:
            return PlainTextResponse(str(error), status_code=409)
        shown = str(result.messages[0].content) if result.messages else ""
        if not shown.startswith(HEAD):
            shown = f"{HEAD}<p>{escape(shown)}</p></body></html>"
        if result.done:
            shown = shown.replace("</body>", f'<p id="reward">Reward: {result.reward:g}</p></body>')
        visits[key] = (session, shown)
        return RedirectResponse(f"/{key}/", status_code=303)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    routes = [
        Route("/", enter),
        Route("/{visit}/", show),
        Route("/{visit}/{action}", act, methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)
