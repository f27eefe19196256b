"""Create the pictures of README and documentation from real output (``make pictures RUN=runs/NAME``).

The terminal shows a command and its output. Chromium draws the report of a finished run, an episode on its
live page, the page of a server while sessions are played, and a session of the tutorial. Each page is drawn
for light and dark, in the width of a phone with two pixels for each pixel of CSS. Parts of a page that do not
fit are hidden. mkdocs loads this file too, for ``on_page_markdown``.
"""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
COLUMNS = 60
"""Columns of the terminal."""
LINES = 21
"""Number of shown lines of the terminal, from the end of the output."""
TRAIN_COLUMNS, TRAIN_LINES = 72, 24
"""The same for the table of a training run."""
WIDTH = 460
"""Width of a page in CSS pixels. Images have two pixels for each."""
MODES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
TASKS = ("household", "shop", "sql")
PLAYED_S = 150.0
"""Seconds of playing sessions before the page of a server is drawn."""
MISTAKES = 0.2
"""Share of sessions played without calls, so that not every session succeeds."""
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img src="(?P<light>[^"]+)" width="(?P<width>\d+)" alt="(?P<alt>[^"]+)">\s*</picture>'
)
"""A picture for light and dark in Markdown. Code hosts and editors show it as it is."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page of the site with pictures that follow the switch between light and dark.

    mkdocs calls this hook. It checks and rewrites the links of Markdown images, but not of HTML.
    """
    return PICTURE.sub(_as_images, markdown)


def _as_images(found: re.Match[str]) -> str:
    images = (f"![{found['alt']}]({found[mode]}#only-{mode}){{ width={found['width']} }}" for mode in MODES)
    return "\n".join(images)


def terminal(*command: str, columns: int = COLUMNS, lines: int = LINES) -> str:
    """Return an SVG image of a terminal with a command and the end of its output.

    Args:
        command: the command and its arguments.
        columns: width of the terminal.
        lines: number of shown lines, from the end of the output.
    """
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(columns)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    shown = done.stdout.replace(f"{DOCS.parent}/", "").rstrip().splitlines()[-lines:]
    console = Console(record=True, width=columns, file=StringIO(), force_terminal=True)
    console.print(f"[bold]$[/] {' '.join(command)}\n[dim]...[/]", highlight=False)
    console.print(Text.from_ansi("\n".join(shown)))
    return FONT.sub("", console.export_svg(title="agentrl-kit", theme=MONOKAI, unique_id="terminal"))


def save(view: Page, name: str, *, height: int, hidden: str = "") -> None:
    """Write a screenshot of a page as two PNG images, for light and dark.

    Args:
        view: the page.
        name: name of the images, without mode and suffix.
        height: CSS pixels.
        hidden: CSS selector of elements to hide.
    """
    if hidden:
        view.add_style_tag(content=f"{hidden} {{ display: none !important }}")
    view.route("**/*", lambda route: None)  # without new data the page is the same in both modes
    view.wait_for_timeout(500)
    for mode in MODES:
        view.emulate_media(color_scheme=mode)
        view.screenshot(
            path=IMAGES / f"{name}-{mode}.png", clip={"x": 0, "y": 0, "width": WIDTH, "height": height}
        )


def report(view: Page, run: Path) -> None:
    """Draw the report of a run: its main numbers and the success of its tasks."""
    from agentrl_train.report.page import read_run, render

    view.set_content(render(read_run(run)))
    save(
        view, "report", height=544, hidden=".tile:nth-child(n+3), #results, #results ~ :not(#curves, .charts)"
    )


def live_page(view: Page, run: Path) -> None:
    """Draw the tokens of an episode on the live page of a run."""
    command = [sys.executable, "-m", "agentrl_train", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, ExitStack() as stack:
        stack.callback(server.terminate)
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        view.goto(f"{address}/?kind=trained&order=highest")
        view.locator(".episode-row summary").first.click(timeout=60_000)
        view.locator("[data-t]").first.wait_for()
        shades = (view.locator(f"[data-t].p{shade}") for shade in range(6, -1, -1))
        unlikely = next(tokens for tokens in shades if tokens.count()).first
        unlikely.locator("xpath=ancestor::*[contains(@class, 'bubble')]").evaluate(
            "(one) => one.scrollIntoView()"
        )
        unlikely.hover()
        save(view, "watch", height=494)


def server_page(view: Page) -> None:
    """Draw the page of a server with finished and open sessions."""
    from agentrl_env import EnvClient
    from agentrl_env.launch.process import ServerProcess

    targets = (f"environments/{task}" for task in TASKS)
    with ServerProcess(*targets, oracle=True) as server, EnvClient.connect_sync(server.url) as client:
        view.goto(server.url)
        sessions: list[Any] = []
        chance, opened, start = random.Random(0), 0, time.monotonic()
        while (played := time.monotonic() - start) < PLAYED_S:
            while len(sessions) < 16 + 12 * math.sin(played / 25):
                session = client.open(TASKS[opened % len(TASKS)], index=opened)
                sessions.append((session, chance.random() < MISTAKES))
                opened += 1
            for session, mistaken in sessions:
                session.step("I do not know." if mistaken else session.expert())
            sessions = [(session, kind) for session, kind in sessions if session.status == "running"]
            view.wait_for_timeout(500)  # time for the page to poll the server
        save(view, "server", height=554, hidden="#name, .scroll")


def session_page(view: Page) -> None:
    """Draw the page of a session in the tutorial's environment."""
    from agentrl_env import EnvClient
    from agentrl_env.launch.process import ServerProcess

    tutorial = (DOCS / "tutorials" / "environment.md").read_text(encoding="utf-8")
    code = re.search(r"^```python\n(.*?)^```$", tutorial, re.MULTILINE | re.DOTALL)
    assert code is not None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "guess"
        target.mkdir()
        (target / "environment.py").write_text(code[1], encoding="utf-8")
        with ServerProcess(str(target), oracle=True) as server, EnvClient.connect_sync(server.url) as client:
            session = client.open("guess", index=1, seed=7)
            for _ in range(2):
                session.step(session.expert())
            view.goto(f"{server.url}/#/session/{session.session_id}")
            view.locator(".entry").nth(4).wait_for()
            save(view, "session", height=740, hidden="#name, .id")


def main(run: Path) -> None:
    """Create every picture."""
    from playwright.sync_api import sync_playwright

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit(
            "Chromium draws the pages and is not installed; .ci/system-packages chromium installs it"
        )
    IMAGES.mkdir(exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    (IMAGES / "check.svg").write_text(terminal("agentrl-env", "check", "environments/shop"))
    (IMAGES / "train.svg").write_text(terminal("make", "train", columns=TRAIN_COLUMNS, lines=TRAIN_LINES))
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox", "--hide-scrollbars"])
        context = chromium.new_context(
            viewport={"width": WIDTH, "height": 1200}, device_scale_factor=2, bypass_csp=True
        )
        report(context.new_page(), run)
        live_page(context.new_page(), run)
        session_page(context.new_page())
        server_page(context.new_page())
        chromium.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("give the folder of a finished run: make pictures RUN=runs/NAME")
    main(Path(sys.argv[1]))
