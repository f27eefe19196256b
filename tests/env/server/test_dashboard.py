"""The dashboard at ``/`` in a real Chromium."""

import json
import re
from contextlib import asynccontextmanager
from typing import Literal

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import async_playwright, expect
from pydantic import BaseModel

from agentrl_env import Done, Environment, Message, Reply, ToolCall, tool
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from agentrl_env.server.telemetry.history import History
from agentrl_env.types import FleetPoint, FunctionCall
from agentrl_env.wire import OpenRequest
from tests.browser import CHROMIUM, needs_chromium
from tests.env.tasks import Guess, close_session, play_step, until

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    needs_chromium,
]
PATIENCE_MS = 30_000
expect.set_options(timeout=PATIENCE_MS)
EVIL = "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'><b>bold</b>"


class Trove(Environment):
    """Take the treasure. <b onmouseover="window.hit = 3">Beware</b> of what is written here."""

    max_turns = 500
    blocking = False
    splits = ("train", "test")

    def reset(self, sample, rng):
        self.looks = 0
        return [
            Message(role="system", content="You are in a house."),
            Message(role="user", content="Find it!"),
        ]

    @classmethod
    def samples(cls, split):
        return [{"n": n} for n in range(40)]

    def respond(self, text):
        return f"You said: {text}"

    @tool
    def look(self, where: str):
        """Look somewhere."""
        self.looks += 1
        return f"look {self.looks}: there is nothing at the {where}"

    @tool
    def read(self, lines: int = 100):
        """Read a long text."""
        return "\n".join(f"line {n} of the book" for n in range(1, lines + 1))

    @tool
    def evil(self):
        """Show what must not be believed."""
        return Message(role="user", content=EVIL)

    @tool
    def echo(
        self,
        word: str,
        number: int,
        mood: Literal["calm", "hasty"] = "calm",
        ratio: float | None = None,
        flag: bool = False,
        tags: list[str] | None = None,
    ):
        """Say what was given.

        Args:
            word: any word
        """
        return Reply(json.dumps([word, number, mood, ratio, flag, tags]), reward=0.25)

    @tool
    def take(self, thing: str):
        """Take something."""
        return Done("You have it.", reward=1.0) if thing == "treasure" else "It is fixed."

    def snapshot(self):
        return self.looks

    def restore(self, state):
        self.looks = state

    def expert(self, rng):
        return ToolCall.of("take", thing="treasure")


class Line(BaseModel):
    """One line of an order."""

    order_id: int
    reason: str = "damaged"
    express: bool = False


class Place(BaseModel):
    city: str
    within: "Place | None" = None


class Support(Environment):
    """Answer the customers of a shop."""

    blocking = False

    def reset(self, sample, rng):
        return "My parcel is broken."

    @tool
    def refund(self, line: Line, to: Place | None = None, others: list[Line] | None = None):
        """Refund a line of an order."""
        others = [other.model_dump() for other in others] if others else others
        return json.dumps([line.model_dump(), to and to.model_dump(), others])

    @tool
    def write(self, path: str, code: str, lines: list[Line] | None = None):
        """Write a file."""
        return "written"

    @tool
    def crash(self):
        """Break."""
        raise ZeroDivisionError


class Labyrinth(Guess):
    """Guess the way."""

    name = "find_the_shortest_way_through_the_whole_labyrinth_without_a_map"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium():
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def visit(chromium):
    """Open the page in a new profile. Fails on script errors at the end."""
    contexts, broken = [], []

    def hear(message):
        if "Failed to load resource" not in message.text:  # Chromium logs HTTP errors such as 401
            broken.append(message.text)

    async def visit(server, fragment="#/", **options):
        context = await chromium.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = await context.new_page()
        page.on("pageerror", lambda error: broken.append(str(error)))
        page.on("console", hear)
        await page.goto(f"{server.url}/{fragment}")
        return page

    yield visit
    for context in contexts:
        await context.close()
    assert broken == []


@asynccontextmanager
async def serving(*tasks, **options):
    server = EnvServer(tasks or (Trove, Guess), port=0, drain_s=0, oracle=True, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def server():
    async with serving(max_sessions=5000) as server:
        yield server


async def opened(server, task="trove", **fields):
    return (await server.pool.open(OpenRequest(task=task, **fields))).session_id


async def step(server, session_id, seq, name="look", text=None, **arguments):
    arguments = arguments or ({"where": "cellar"} if name == "look" else {})
    message = Message.assistant(text, ToolCall.of(name, **arguments))
    return await play_step(server.pool, session_id, seq, message)


async def look_again(page):
    """Make the page poll immediately, as if its tab became visible."""
    await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


async def test_overview_shows_the_server_with_its_load_and_tasks(server, visit):
    await opened(server)
    page = await visit(server)
    await expect(page.get_by_role("status").filter(has_text="ok")).to_be_visible()
    await expect(page.get_by_text("1 of 5000 sessions open on 1 server.")).to_be_visible()
    row = page.get_by_role("row").filter(has_text=server.pool.server_id[:8])
    await expect(row).to_contain_text("1 / 5000")
    card = page.get_by_role("article").filter(has=page.get_by_role("heading", name="trove"))
    await expect(card).to_contain_text("train (40), test (40)")
    await expect(card).to_contain_text("expert, fork")
    await card.get_by_text("5 tools").click()
    await expect(card).to_contain_text("echo(word, number, mood?, ratio?, flag?, tags?)")
    await opened(server, "guess")
    await look_again(page)
    await expect(row).to_contain_text("2 / 5000")
    server.pool.draining = True
    await look_again(page)
    await expect(row).to_contain_text("draining")
    await expect(page.locator("#health")).to_have_text("draining")


async def test_session_list_is_paginated_and_updates_live(server, visit):
    for _ in range(1000):
        await opened(server)
    last = await opened(server, "guess")
    page = await visit(server, "#/sessions")
    rows = page.locator("tbody tr")
    await expect(page.get_by_text("1001 sessions, page 1; the newest first.")).to_be_visible()
    await expect(rows).to_have_count(100)
    await expect(rows.first).to_contain_text("guess")
    await page.get_by_role("button", name="Older").click()
    await expect(page.get_by_text("page 2;")).to_be_visible()
    await expect(page.get_by_role("cell", name="guess")).to_have_count(0)
    await page.get_by_role("button", name="Newer").click()
    await expect(rows.first).to_contain_text("guess")
    await play_step(server.pool, last, 1, Message.assistant(None, ToolCall.of("guess", n=99)))
    await look_again(page)
    await expect(rows.first.get_by_role("cell").nth(2)).to_have_text("1")  # the turn
    newest = await opened(server)
    await expect(rows.first.get_by_role("link")).to_have_attribute("title", newest)


async def test_sessions_are_filtered_by_task_and_status(server, visit):
    done = await opened(server)
    await step(server, done, 1, "take", thing="treasure")
    await opened(server), await opened(server, "guess")
    page = await visit(server, "#/sessions")
    rows = page.locator("tbody tr")
    await expect(rows).to_have_count(3)
    await page.get_by_label("Task").select_option("guess")
    await expect(rows).to_have_count(1)
    await page.get_by_label("Task").select_option("trove")
    await page.get_by_label("Status").select_option("completed")
    await expect(rows).to_have_count(1)
    await expect(rows.get_by_role("link")).to_have_attribute("title", done)
    await page.reload()
    await expect(page.get_by_label("Task")).to_have_value("trove")
    await expect(rows).to_have_count(1)
    await rows.get_by_role("link").click()
    await expect(page.get_by_role("log")).to_contain_text("You have it.")


async def test_transcript_updates_live(server, visit):
    session_id = await opened(server, seed=7)
    await step(server, session_id, 1, text="Let me see.", where="attic")
    page = await visit(server, f"#/session/{session_id}")
    log = page.get_by_role("log")
    await expect(log).to_contain_text("You are in a house.")
    await expect(log).to_contain_text("Let me see.")
    await expect(log).to_contain_text('{ "where": "attic" }')
    await expect(log).to_contain_text("look 1: there is nothing at the attic")
    await expect(page.get_by_role("status").filter(has_text="seed 7")).to_contain_text("1 turn ")
    await step(server, session_id, 2, "take", thing="treasure")
    await expect(log).to_contain_text("tool · take")
    await expect(log).to_contain_text("reward 1success 1completed")
    await expect(page.get_by_role("status").filter(has_text="seed 7")).to_contain_text("completed")
    await expect(page.get_by_role("link", name="Play on")).to_be_hidden()


async def test_text_of_several_lines_in_arguments_is_shown_as_lines(visit):
    async with serving(Support) as server:
        session_id = await opened(server, "support")
        code = 'def greet():\n    return "Hi \\n"\n\nprint(greet(), 12345678901234567890)'
        await step(server, session_id, 1, "write", path="a b.py", code=code)
        nested = [{"order_id": 1, "reason": "first\n<b>second</b>"}]
        await step(server, session_id, 2, "write", path="x", code="y", lines=nested)
        odd = '{"order_id": 12345678901234567890, "code": "a\\nb"}'
        call = ToolCall(id="1", function=FunctionCall(name="write", arguments=odd))
        await play_step(server.pool, session_id, 3, Message.assistant(None, call))
        page = await visit(server, f"#/session/{session_id}")
        shown = page.locator(".call pre")
        await expect(shown).to_have_count(3)
        assert await shown.nth(0).inner_text() == (
            'path: "a b.py"\ncode:\n  │ def greet():\n  │     return "Hi \\n"\n  │ \n'
            "  │ print(greet(), 12345678901234567890)"
        )
        assert await shown.nth(1).inner_text() == (
            'path: "x"\ncode: "y"\nlines:\n  -\n    order_id: 1\n'
            "    reason:\n      │ first\n      │ <b>second</b>"
        )
        assert await shown.nth(2).inner_text() == odd  # the digits stay


async def test_transcript_follows_its_end_unless_scrolled_up(server, visit):
    session_id = await opened(server)
    for seq in range(1, 31):
        await step(server, session_id, seq)
    page = await visit(server, f"#/session/{session_id}")
    log = page.get_by_role("log")
    jump = page.get_by_role("button", name="Jump to the newest")
    await expect(log.get_by_text("look 30:")).to_be_in_viewport()
    await step(server, session_id, 31)
    await look_again(page)
    await expect(log.get_by_text("look 31:")).to_be_in_viewport()
    await log.evaluate("log => log.scrollTop = 0")
    await step(server, session_id, 32)
    await look_again(page)
    await expect(jump).to_be_visible()
    assert await log.evaluate("log => log.scrollTop") == 0
    await jump.click()
    await expect(log.get_by_text("look 32:")).to_be_in_viewport()
    await expect(jump).to_be_hidden()


async def test_long_result_is_collapsed(server, visit):
    session_id = await opened(server)
    await step(server, session_id, 1, "read", lines=500)
    page = await visit(server, f"#/session/{session_id}")
    log = page.get_by_role("log")
    await expect(log).not_to_contain_text("line 500 of the book")
    await log.get_by_role("button", name="Show all").click()
    await expect(log).to_contain_text("line 500 of the book")
    await log.get_by_role("button", name="Show less").click()
    await expect(log).not_to_contain_text("line 500 of the book")


async def test_dropped_turns_are_counted(server, visit):
    session_id = await opened(server)
    for seq in range(1, 71):
        await step(server, session_id, seq)
    page = await visit(server, f"#/session/{session_id}")
    await expect(page.get_by_role("log")).to_contain_text("6 turns no longer kept by the server")


async def test_content_is_escaped(server, visit):
    session_id = await opened(server)
    await step(server, session_id, 1, "evil", text=EVIL)
    await step(server, session_id, 2, "look", where=EVIL)
    await play_step(server.pool, session_id, 3, Message.assistant(None, ToolCall.of(EVIL)))
    picture = [
        {"type": "image_url", "image_url": {"url": "javascript:window.hit = 4"}},
        {"type": "text", "text": EVIL},
    ]
    await play_step(server.pool, session_id, 4, Message(role="assistant", content=picture))
    page = await visit(server, f"#/session/{session_id}")
    log = page.get_by_role("log")
    await expect(log).to_contain_text("turn 4")
    assert (await log.inner_text()).count("<b>bold</b>") >= 6
    await expect(log.locator("script, img, b")).to_have_count(0)
    await page.goto(f"{server.url}/#/play/{session_id}")
    await expect(page.get_by_role("log")).to_contain_text("turn 4")
    await page.goto(f"{server.url}/#/")
    await expect(page.get_by_text('<b onmouseover="window.hit = 3">Beware</b>')).to_be_visible()
    assert await page.evaluate("window.hit") is None


async def test_playground_plays_an_episode(server, visit):
    page = await visit(server)
    await page.get_by_role("link", name="Playground").click()
    await page.get_by_label("Task").select_option("trove")
    await page.get_by_label("Split").select_option("test")
    await page.get_by_label("Index").fill("3")
    await page.get_by_label("Seed").fill("9007199254740993")
    await page.get_by_role("button", name="Open a session").click()
    log = page.get_by_role("log")
    await expect(log).to_contain_text("Find it!")
    (session, _) = next(server.pool._table.known())
    assert (session.sample.split, session.sample.index, session.sample.seed) == ("test", 3, 2**53 + 1)
    await page.get_by_label("where").fill("garden")
    await page.get_by_role("button", name="Call").click()
    await expect(log).to_contain_text("look 1: there is nothing at the garden")
    await page.get_by_label("Tool").select_option("say something (no tool)")
    await page.get_by_label("Text").fill("is anybody here?")
    await page.get_by_role("button", name="Say").click()
    await expect(log).to_contain_text("You said: is anybody here?")
    await page.reload()  # the session is restored
    await expect(log).to_contain_text("You said: is anybody here?")
    await page.get_by_role("button", name="Ask the expert").click()
    await expect(page.get_by_label("Arguments", exact=True)).to_have_value('{"thing": "treasure"}')
    await page.get_by_role("button", name="Call").click()
    await expect(page.get_by_text("The task has ended. 3 turns, reward 1.")).to_be_visible()
    await expect(page.get_by_role("link", name="Open another")).to_be_visible()


async def test_tool_form_builds_arguments_from_the_schema(server, visit):
    session_id = await opened(server)
    page = await visit(server, f"#/play/{session_id}")
    log, call = page.get_by_role("log"), page.get_by_role("button", name="Call")
    await page.get_by_label("Tool").select_option("echo")
    await expect(page.get_by_text("any word; string")).to_be_visible()
    await page.get_by_label("word").fill('a "quoted"\nword')
    await call.click()  # the browser requires the number first
    await expect(page.get_by_label("number")).to_be_focused()
    await page.get_by_label("number").fill("12345678901234567890")
    await call.click()
    await expect(log).to_contain_text(
        '["a \\"quoted\\"\\nword", 12345678901234567890, "calm", null, false, null]'
    )
    await page.get_by_label("mood").select_option("hasty")
    await page.get_by_label("ratio").fill("0.5")
    await page.get_by_label("flag").select_option("true")
    await page.get_by_label("tags").fill('["x", "y"]')
    await call.click()
    await expect(log).to_contain_text('12345678901234567890, "hasty", 0.5, true, ["x", "y"]]')
    await page.get_by_label("number").fill("many")  # invalid values are rejected by the environment
    await call.click()
    await expect(log).to_contain_text(
        'argument "number" should be a valid integer, got "many"', use_inner_text=True
    )


async def test_nested_arguments_have_fields(visit):
    async with serving(Support) as server:
        session_id = await opened(server, "support")
        page = await visit(server, f"#/play/{session_id}")
        log, call = page.get_by_role("log"), page.get_by_role("button", name="Call")
        line = page.get_by_role("group", name="line", exact=True)
        await expect(line).to_contain_text("One line of an order; object")
        await call.click()  # the browser requires the nested number first
        await expect(line.get_by_label("order_id")).to_be_focused()
        await line.get_by_label("order_id").fill("7")
        await call.click()  # omits the optional object with its required field
        await expect(log).to_contain_text(
            '[{"order_id": 7, "reason": "damaged", "express": false}, null, null]'
        )
        to = page.get_by_role("group", name="to", exact=True)
        await to.get_by_label("city").first.fill("Rome")
        await to.get_by_role("group", name="within").first.get_by_label("city").first.fill("Italy")
        others = page.get_by_role("group", name="others", exact=True)
        for _ in range(2):
            await others.get_by_role("button", name="Add to others").click()
        await others.get_by_label("order_id").nth(0).fill("1")
        await others.get_by_label("order_id").nth(1).fill("2")
        await others.get_by_role("button", name="Remove").first.click()
        await call.click()
        await expect(log).to_contain_text(
            '{"city": "Rome", "within": {"city": "Italy", "within": null}}, [{"order_id": 2,'
        )
        await page.get_by_label("raw JSON arguments").check()
        await expect(page.get_by_label("Arguments", exact=True)).to_have_value(
            '{"line": {"order_id": 7}, "to": {"city": "Rome", "within": {"city": "Italy"}}, '
            '"others": [{"order_id": 2}]}'
        )


async def test_raw_json_is_sent_exactly_as_written(server, visit):
    session_id = await opened(server)
    page = await visit(server, f"#/play/{session_id}")
    await page.get_by_label("where").fill("x")
    await page.get_by_label("raw JSON arguments").check()
    await expect(page.get_by_label("Arguments", exact=True)).to_have_value('{"where": "x"}')
    await page.get_by_label("Arguments", exact=True).fill('{"where": broken')
    await page.get_by_role("button", name="Call").click()
    await expect(page.get_by_role("log")).to_contain_text("arguments are not valid JSON")
    said, _ = next(iter(server.pool.session(session_id).history))
    assert said.tool_calls[0].function.arguments == '{"where": broken'


async def test_playground_forks_and_closes_a_session(server, visit):
    session_id = await opened(server)
    await step(server, session_id, 1)
    page = await visit(server, f"#/play/{session_id}")
    await page.get_by_role("button", name="Fork").click()
    await page.wait_for_url(re.compile(r"#/play/(?!" + re.escape(session_id) + ")"))
    fork = page.url.rpartition("/")[2]
    await page.get_by_label("where").fill("fork")
    await page.get_by_role("button", name="Call").click()
    await expect(page.get_by_role("log")).to_contain_text("look 2: there is nothing at the fork")
    assert server.pool.session(session_id).turn == 1
    await page.get_by_role("button", name="Close the session").click()
    await expect(page.get_by_text("The session was closed before its end.")).to_be_visible()
    assert server.pool.session(fork).status == "cancelled"


async def test_errors_are_shown_as_sentences(server, visit):
    page = await visit(server, "#/play")
    alert = page.get_by_role("alert")
    await page.get_by_label("Index").fill("400")
    await page.get_by_role("button", name="Open a session").click()
    await expect(alert).to_have_text(re.compile(r"^[A-Z].*400.*\.$"))
    await page.get_by_label("Index").fill("4")
    await page.get_by_role("button", name="Open a session").click()
    await expect(page.get_by_role("log")).to_be_visible()
    await expect(alert).to_be_hidden()
    await page.goto(f"{server.url}/#/session/nobody")
    await expect(page.get_by_text("No such session; it never existed or ended long ago.")).to_be_visible()
    await server.stop()
    await look_again(page)
    await expect(alert).to_have_text("The server cannot be reached.")
    await expect(page.locator("#health")).to_have_text("unreachable")


async def test_token_dialog_never_exposes_the_token(visit):
    async with serving(token="open-sesame") as server:
        session_id = await opened(server)
        page = await visit(server)
        dialog = page.get_by_role("dialog")
        seen = []
        page.on("request", lambda request: seen.append(request.url))
        await page.get_by_label("Token", exact=True).fill("wrong")
        await page.keyboard.press("Enter")
        await expect(dialog).to_contain_text("does not take this token")
        await page.get_by_label("Token", exact=True).fill("open-sesame")
        await page.get_by_role("button", name="Continue").click()
        await expect(page.get_by_role("heading", name="trove")).to_be_visible()
        await page.reload()
        await expect(page.get_by_role("heading", name="trove")).to_be_visible()
        assert not [url for url in seen if "sesame" in url]
        assert "sesame" not in await page.evaluate(
            "JSON.stringify(localStorage) + document.cookie + location.href"
        )
        await page.get_by_role("button", name="Forget the token").click()
        await expect(dialog).to_be_visible()
        headers = {"authorization": "Bearer open-sesame"}
        async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=60) as http:
            renewed = await http.post(f"{server.url}/v1/sessions/{session_id}/token")
        await page.get_by_label("Token", exact=True).fill(renewed.json()["agent_token"])
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text(
            "An agent token only allows stepping and reading its own session"
        )


async def test_controller_shows_its_fleet_and_sessions(visit):
    controller = ControllerServer(FleetService(queue_s=0.0), port=0)
    await controller.start()
    servers = [
        EnvServer([task], host=NOWHERE, controllers=[controller.url], drain_s=0) for task in (Trove, Guess)
    ]
    try:
        for server in servers:
            await server.start()
        await until(lambda: len(controller.fleet.servers) == 2)
        trove, guess = await opened(servers[0]), await opened(servers[1], "guess")
        page = await visit(controller)
        await expect(page.get_by_text("2 of 2048 sessions open on 2 servers.")).to_be_visible()
        await expect(page.locator("#name")).to_contain_text("fleet of 2")
        await page.get_by_role("link", name="Sessions").first.click()
        titles = page.locator("tbody a")
        await expect(titles).to_have_count(2)
        assert {await titles.nth(n).get_attribute("title") for n in range(2)} == {trove, guess}
        await page.get_by_title(guess).click()
        await expect(page.get_by_role("log")).to_contain_text("I picked a number")
        await page.get_by_role("link", name="Play on").click()
        await page.get_by_label("n", exact=True).fill("99")
        await page.get_by_role("button", name="Call").click()
        await expect(page.get_by_role("log")).to_contain_text("lower")
    finally:
        for server in servers:
            await server.stop()
        await controller.stop()


async def test_lost_server_stays_visible_and_results_are_shown(visit):
    controller = ControllerServer(FleetService(queue_s=0.0), port=0)
    await controller.start()
    here, gone = [
        EnvServer([Trove, Support], host=NOWHERE, controllers=[controller.url], drain_s=0) for _ in range(2)
    ]
    try:
        for server in (here, gone):
            await server.start()
            await step(server, await opened(server), 1, "take", thing="treasure")
        session_id = await opened(here)
        for seq in range(1, 500):
            await step(here, session_id, seq)
        await step(here, session_id, 500)  # the turn limit: no success
        await step(here, await opened(here, "support"), 1, "crash")
        await opened(gone), await opened(gone)
        lost_id = gone.pool.server_id
        await until(lambda: controller.metrics.steps["trove"] == 502)
        await until(lambda: len(controller.fleet.servers) == 2)
        await until(lambda: len(controller.fleet.servers[lost_id].sessions) == 2)
        for task in gone._links._tasks.values():
            task.cancel()
        await controller.fleet.registry.lose(lost_id, "no heartbeat for 5 s")
        page = await visit(controller)
        row = page.get_by_role("row").filter(has_text=lost_id[:8])
        await expect(row).to_contain_text("2 sessions at its loss")
        await expect(row).to_contain_text("lost")
        await expect(row).to_contain_text("no heartbeat for 5 s")
        figures = page.get_by_label("Figures")
        await expect(figures).to_contain_text("Success66.7 %")
        await expect(figures).to_contain_text("Episodes3")
        await expect(figures).to_contain_text("Broken3")  # two of them were lost with their server
        await expect(figures).to_contain_text("Servers lost1")
        card = page.get_by_role("article").filter(has=page.get_by_role("heading", name="trove"))
        await expect(card).to_contain_text("Success66.7 %")
        await expect(card).to_contain_text("Mean reward0.666667")
        await expect(card).to_contain_text("Broken2")
        card = page.get_by_role("article").filter(has=page.get_by_role("heading", name="support"))
        await expect(card).to_contain_text("Broken1")
        await expect(figures).to_contain_text(re.compile(r"Steps/s\d"))  # the second measurement has them
        narrow = await visit(controller, viewport={"width": 390, "height": 800})
        reason = narrow.get_by_text("no heartbeat for 5 s")
        await expect(reason).to_be_visible()
        frame = await narrow.get_by_role("region", name="Servers").bounding_box()
        box = await reason.bounding_box()
        assert box["x"] + box["width"] <= frame["x"] + frame["width"]
        steps = controller.metrics.steps["trove"]
        await step(here, await opened(here), 1)
        await until(lambda: controller.metrics.steps["trove"] == steps + 1)
        await look_again(page)
        await expect(figures).to_contain_text(re.compile(r"Steps/s(0\.[1-9]|[1-9])"))
    finally:
        for server in (here, gone):
            await server.stop()
        await controller.stop()


async def test_single_server_shows_its_results(server, visit):
    await step(server, await opened(server), 1, "take", thing="treasure")
    page = await visit(server)
    await expect(page.get_by_label("Figures")).to_contain_text("Success100 %")
    card = page.get_by_role("article").filter(has=page.get_by_role("heading", name="guess"))
    await expect(card).to_contain_text("Successno step yet")


async def test_curves_show_the_last_hour(server, visit, monkeypatch):
    points = [
        FleetPoint(
            time=1000.0 + 60 * minute,
            open=minute,
            steps=0 if minute == 20 else 600 * minute,  # from another process that counts from zero
            scored=10 * minute,
            succeeded=4 * minute,
        )
        for minute in range(1, 41)
    ]
    monkeypatch.setattr(History, "since", lambda _, when: tuple(one for one in points if one.time > when))
    page = await visit(server)
    curves = page.get_by_role("group", name="The last hour")
    await expect(curves.get_by_role("img")).to_have_count(4)
    await expect(curves.get_by_role("img", name="Open sessions over 39 min, at most 40")).to_be_visible()
    await expect(curves).to_contain_text("Steps/s10")
    await expect(curves).to_contain_text("Success40 %")
    await expect(curves).to_contain_text("Broken/min0")
    steps = curves.get_by_role("img", name="Steps/s")
    await expect(steps.locator("polyline")).to_have_count(2)
    await steps.hover(position={"x": 1, "y": 10})
    await expect(curves).to_contain_text(re.compile("Steps/s.*, 3[89] min ago"))


async def test_failures_are_listed_with_their_reasons(visit):
    async with serving(Support) as server:
        page = await visit(server)
        await expect(page.get_by_role("heading", name="support")).to_be_visible()
        await expect(page.get_by_role("heading", name="Failures")).to_be_hidden()
        session_id = await opened(server, "support")
        await step(server, session_id, 1, "crash")
        await look_again(page)
        failures = page.get_by_role("region", name="Failures")
        await expect(failures).to_contain_text("ZeroDivisionError")
        await page.get_by_role("link", name="All 1 session that failed").click()
        await expect(page.get_by_label("Status")).to_have_value("failed_environment")
        await expect(page.locator("tbody tr")).to_have_count(1)


@pytest.mark.parametrize(
    "view", ["constructor", "__proto__", "toString/x", "hasOwnProperty?task=x", "%", "%E0%A4"]
)
async def test_unknown_address_shows_the_overview(server, visit, view):
    page = await visit(server, f"#/{view}")
    await expect(page.get_by_role("heading", name="trove")).to_be_visible()
    await expect(page.get_by_role("alert")).to_be_hidden()


async def test_narrow_screen_shows_every_session_column(visit):
    async with serving(Trove, Labyrinth, Support) as server:
        await opened(server, Labyrinth.name)
        await step(server, await opened(server, "support"), 1, "crash")
        session_id = await opened(server)
        for seq in range(1, 101):
            await step(server, session_id, seq)
        await step(server, session_id, 101, "echo", word="x", number=1)
        page = await visit(server, "#/sessions", viewport={"width": 390, "height": 800})
        rows = page.locator("tbody tr")
        await expect(rows).to_have_count(3)
        await expect(page.get_by_text("failed environment", exact=True).last).to_be_visible()
        frame = await page.get_by_role("region", name="Sessions").bounding_box()
        for cell in [
            page.get_by_role("columnheader", name="Reward"),
            *await rows.locator("td:nth-child(5)").all(),
        ]:
            box = await cell.bounding_box()
            assert box["x"] + box["width"] <= frame["x"] + frame["width"]


async def test_unknown_session_shows_a_message_and_no_transcript(server, visit):
    page = await visit(server, "#/session/nope")
    await expect(page.get_by_role("status").filter(has_text="No such session")).to_be_visible()
    await expect(page.locator(".log")).to_be_hidden()


VIEWS = ["#/", "#/sessions", "#/session/ID", "#/play", "#/play/ID"]
READY = {"#/": "article", "#/sessions": "tbody tr", "#/play": "form", "#/play/ID": "form"}
CONTRAST = """() => {
  const luminance = (rgb) => {
    const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, alpha = 1] = numbers(getComputedStyle(at).backgroundColor);
      if (alpha === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const control = ["INPUT", "SELECT", "TEXTAREA"].includes(element.tagName);
    if (!(own || control) || !element.checkVisibility() || element.closest(":disabled, .skip")) continue;
    const [a, b] = [numbers(getComputedStyle(element).color).slice(0, 3), behind(element)].map(luminance);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${element.outerHTML}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""
UNNAMED = """() => [...document.querySelectorAll("input, select, textarea, button, a")]
  .filter((e) => !(e.labels?.length || e.ariaLabel || (/BUTTON|A/.test(e.tagName) && e.textContent.trim())))
  .map((e) => e.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_view_has_contrast_and_labels_in_both_schemes_and_widths(visit, scheme):
    async with serving(Trove, Labyrinth) as server:
        await look_at_every_view(server, visit, scheme)


async def look_at_every_view(server, visit, scheme):
    await opened(server, Labyrinth.name)
    for name in ("gain", "finish"):
        session_id = await opened(server)
        await step(server, session_id, 1, "echo", text=name, word="w" * 300, number=1)
        await step(server, session_id, 2, "read", lines=90)
    crashed = await opened(server)
    await close_session(server.pool, crashed)
    done = await opened(server)
    await step(server, done, 1, "take", thing="treasure")
    page = await visit(server, color_scheme=scheme)
    backgrounds = set()
    for width in (1280, 400):
        await page.set_viewport_size({"width": width, "height": 800})
        for view in VIEWS:
            await page.goto(f"{server.url}/{view.replace('ID', session_id)}")
            await expect(page.locator("main").locator(READY.get(view, ".outcome")).first).to_be_visible()
            assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, (
                view,
                width,
            )
            assert await page.evaluate(CONTRAST) == []
            assert await page.evaluate(UNNAMED) == []
        backgrounds.add(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 1
    brightness = sum(map(int, re.findall(r"\d+", backgrounds.pop())))
    assert (brightness > 600) == (scheme == "light")


async def test_dashboard_can_be_used_with_the_keyboard(server, visit):
    page = await visit(server)
    await expect(page.get_by_role("heading", name="trove")).to_be_visible()
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    for _ in range(3):
        await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Playground")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Task")).to_be_visible()
    await page.keyboard.press("Tab")
    await expect(page.get_by_label("Task")).to_be_focused()
    for _ in range(4):
        await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("log")).to_contain_text("Find it!")
    await page.get_by_label("where").focus()
    await page.keyboard.type("cellar")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("button", name="Call")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("log")).to_contain_text("look 1: there is nothing at the cellar")
