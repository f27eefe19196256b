"""One Chromium for all sessions of a process. Each session has its own context without network."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Lock, Thread

from playwright.async_api import Error, TimeoutError, async_playwright

ANSWER_SECONDS = 100.0
"""Time limit of one request to the browser in seconds."""
ACTION_MS = 30_000
"""Time limit of one action in Chromium in milliseconds."""
NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-gpu", "--disable-dev-shm-usage"]

START = """seed => {
    Math.seedrandom(String(seed));
    core.EPISODE_MAX_TIME = 2 ** 31 - 1;  // no clock: the same actions get the same reward
    if (window.jQuery) jQuery.fx.off = true;
    core.startEpisodeReal();
}"""
LOOK = """async wait => {
    await new Promise(done => setTimeout(done, wait));  // what an action schedules with a delay of 0 has run
    const hidden = new Set(['query', 'reward-display', 'sync-task-cover', 'click-canvas']);
    const controls = new Set(['INPUT', 'TEXTAREA', 'SELECT', 'BUTTON', 'A']);
    const lines = [], seen = window.seenElements = [];
    const clean = text => text.replace(/\\s+/g, ' ').trim();
    const on = '.active, .ui-tabs-active, .ui-state-active, [aria-selected=true], [aria-expanded=true]';
    const visible = e => e.getClientRects().length > 0 && getComputedStyle(e).visibility !== 'hidden';
    function add(e) {
        const line = {tag: e.tagName.toLowerCase(), classes: clean(e.getAttribute('class') || '')};
        seen.push(e);
        if (e.tagName === 'SELECT') {
            line.options = [...e.options].map(option => clean(option.text));
            line.value = e.selectedIndex < 0 ? '' : clean(e.options[e.selectedIndex].text);
        } else if (e.tagName === 'INPUT' || e.tagName === 'TEXTAREA') {
            line.type = e.type;
            if (e.type === 'checkbox' || e.type === 'radio') line.checked = e.checked;
            else line.value = e.value;
        } else line.text = clean(e.textContent);
        line.active = e.matches(on) || e.parentElement.matches(on);
        lines.push({ref: seen.length, ...line});
    }
    function whole(e) {  // its text is its own, and nothing in it is a control
        const own = [...e.childNodes].filter(n => n.nodeType === Node.TEXT_NODE).map(n => n.data).join(' ');
        return clean(own) && clean(own) === clean(e.textContent) &&
            ![...e.querySelectorAll('*')].some(n => controls.has(n.tagName));
    }
    function walk(node) {
        for (const child of node.childNodes) {
            if (child.nodeType === Node.TEXT_NODE) {
                const text = clean(child.data);
                if (text) lines.push({text});
            } else if (child.nodeType === Node.ELEMENT_NODE && !hidden.has(child.id) && visible(child)) {
                if (controls.has(child.tagName) || whole(child)) add(child);
                else if (child.children.length) walk(child);
                else if (child.getAttribute('class')) add(child);
            }
        }
    }
    walk(document.body);
    return {
        done: WOB_DONE_GLOBAL,
        raw: WOB_RAW_REWARD_GLOBAL,
        query: clean(document.getElementById('query').textContent),
        lines,
    };
}"""
SETTLE_MS = 50
"""Milliseconds to wait after an action for changes of the page."""
ELEMENT = "ref => window.seenElements[ref - 1]"


class BrowserFailed(RuntimeError):
    """Chromium cannot start, crashed, or does not answer."""


class CannotAct(Exception):
    """The action is not possible, because the element cannot be reached or no longer exists."""


class Browser:
    """Starts Chromium when the first session needs it, and again if it died. Callable from any thread."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.chromium = self.playwright = None

    def open(self, page: str, seed: int) -> Visit:
        """Return a page of MiniWoB++ with the problem of a seed. Raises BrowserFailed."""
        return Visit(self, self.run(self._open(page, seed)))

    def run(self, work):
        """Run a coroutine on the browser's event loop. Raises BrowserFailed."""
        with self.lock:
            if self.loop is None:
                self.loop, self.starting = asyncio.new_event_loop(), asyncio.Lock()
                self.thread = Thread(target=_serve, args=(self.loop,), name="miniwob-browser", daemon=True)
                self.thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(ANSWER_SECONDS)
        except CannotAct:
            raise
        except Exception as error:
            future.cancel()
            raise BrowserFailed(f"Chromium failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End Chromium and its event loop."""
        if self.loop is not None:
            self.run(self._stop())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop = None

    async def _open(self, page, seed):
        async with self.starting:
            if self.chromium is None or not self.chromium.is_connected():
                await self._stop()
                self.playwright = await async_playwright().start()
                self.chromium = await self.playwright.chromium.launch(
                    executable_path=executable(), args=ARGUMENTS, chromium_sandbox=os.geteuid() != 0
                )
        context = await self.chromium.new_context(offline=True, viewport={"width": 400, "height": 400})
        context.set_default_timeout(ACTION_MS)
        opened = await context.new_page()
        await opened.goto((pages() / f"{page}.html").as_uri())
        await opened.evaluate(START, seed)
        return opened

    async def _stop(self):
        if self.chromium is not None:
            await self.chromium.close()
        if self.playwright is not None:
            await self.playwright.stop()
        self.chromium = self.playwright = None


class Visit:
    """The page of one session. Elements have the numbers of the last ``look``. Raises BrowserFailed."""

    def __init__(self, browser: Browser, page) -> None:
        self.browser, self.page = browser, page

    def look(self) -> dict:
        """Return the instruction, the lines of the page, and whether the problem is over, with its reward."""
        return self.browser.run(self.page.evaluate(LOOK, SETTLE_MS))

    def seek(self, seed: int, step: int, wanted: Callable[[dict], bool]) -> int:
        """Show the first suitable problem of the seeds from ``seed`` on, and return its seed."""
        return self.browser.run(self._seek(seed, step, wanted))

    def click(self, element: int) -> None:
        """Click the middle of an element with the mouse. Raises CannotAct."""
        self.browser.run(self._click(element))

    def write(self, element: int, text: str) -> None:
        """Replace the text of a field, key by key."""
        self.browser.run(self._write(element, text))

    def choose(self, element: int, option: str) -> None:
        """Choose an option of a list by its text."""
        self.browser.run(self._choose(element, option))

    def press(self, key: str) -> None:
        """Press a key."""
        self.browser.run(self.page.keyboard.press(key))

    def close(self) -> None:
        """Close the page and its context."""
        self.browser.run(self.page.context.close())

    async def _seek(self, seed, step, wanted):
        while not wanted(await self.page.evaluate(LOOK, 0)):
            seed += step
            await self.page.evaluate(START, seed)
        return seed

    async def _element(self, number):
        return (await self.page.evaluate_handle(ELEMENT, number)).as_element()

    async def _click(self, number):
        try:
            # Without force, playwright would wait for an element that another element covers.
            await (await self._element(number)).click(force=True)
        except TimeoutError:
            raise
        except Error as error:
            if self.page.is_closed():
                raise
            raise CannotAct(f"Element {number} cannot be clicked.") from error

    async def _write(self, number, text):
        await (await self._element(number)).focus()
        for key in ("Control+A", "Delete"):
            await self.page.keyboard.press(key)
        await self.page.keyboard.type(text)

    async def _choose(self, number, option):
        await (await self._element(number)).select_option(label=option)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def executable() -> str | None:
    """Return the path of Chromium: MINIWOB_CHROMIUM, a browser in PATH, or None for playwright's own."""
    return os.environ.get("MINIWOB_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def pages() -> Path:
    """Return the folder of the pages, which are in the package ``miniwob``."""
    found = importlib.util.find_spec("miniwob")
    if found is None or not found.submodule_search_locations:
        raise BrowserFailed("the pages are missing: pip install 'agentrl-kit[miniwob]'")
    return Path(found.submodule_search_locations[0]) / "html" / "miniwob"
