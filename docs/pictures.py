"""Make the pictures of README from real output (``python -m docs.pictures runs/NAME runs/REAL``).

The terminal shows a command and its output. Chromium draws the report of the first run, an episode on its
live page, and the page of a server with sessions. The curve is from the metrics of the second run.
"""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from agentrl_env import EnvClient
from agentrl_env.launch.process import ServerProcess
from agentrl_train.report.charts import Series, line_chart, percent_label, standalone

IMAGES = Path(__file__).parent / "images"
WIDTH = 104
"""Columns of the terminal."""
PAGE = (1400, 1000)
"""Pixels of the page that are shown."""
PLAYED_S = 150.0
"""Seconds for which experts play before the page of a server is shown."""
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def terminal(*command: str) -> str:
    """Return an SVG image of a terminal with a command and its output."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(f"[bold]$[/] {' '.join(command)}", highlight=False)
    console.print(Text.from_ansi(done.stdout.rstrip()))
    return FONT.sub("", console.export_svg(title="agentrl-kit", theme=MONOKAI, unique_id="terminal"))


def curve(folder: Path) -> str:
    """Return the success of a run in each of its tasks by step, as an SVG image."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    series = [
        Series(
            name=task,
            points=[(step["step"], mean_success(steps[max(0, place - 2) : place + 1], task))
                    for place, step in enumerate(steps)],
            colour=number,
        )
        for number, task in enumerate(sorted(steps[0]["tasks"]))
    ]  # fmt: skip
    chart = line_chart(series, label=percent_label, top=1.0)
    names = [(line.name, line.colour) for line in series]
    return standalone(chart, title="Success of SmolLM2-135M, mean of three steps", names=names)


def mean_success(steps: list[dict[str, Any]], task: str) -> float:
    """Return the success in a task over some steps."""
    return fmean(step["tasks"][task]["success"] for step in steps)


def server_page(picture: Path) -> None:
    """Write the page of a server on which experts have played and some sessions are open."""
    tasks = ("household", "shop", "sql")
    targets = (f"environments/{task}" for task in tasks)
    with ServerProcess(*targets, oracle=True) as server, EnvClient.connect_sync(server.url) as client:
        end = time.monotonic() + PLAYED_S
        for number in itertools.count():
            session = client.open(tasks[number % 3], index=number % 40)
            left_open = time.monotonic() > end - 1
            while session.status == "running" and not (left_open and session.turn == 1):
                session.step(session.expert())
                time.sleep(0.02 * (1 + math.sin(number / 60)))
            if time.monotonic() > end:
                break
        page(server.url, picture)


def page(address: str, picture: Path) -> None:
    """Write the top of a page as a PNG image."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("the report is drawn by Chromium, which is not installed")
    size = f"--window-size={PAGE[0]},{PAGE[1]}"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1", size]
    command = [browser, *options, "--virtual-time-budget=4000", f"--screenshot={picture}", address]
    subprocess.run(command, check=True, capture_output=True)


def live_page(run: Path, picture: Path) -> None:
    """Write an episode on the live page of a run as a PNG image."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "agentrl_train", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as driver:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": PAGE[0], "height": PAGE[1]})
        view.goto(f"{address}/?kind=trained&order=highest")
        view.locator(".episode-row summary").first.click(timeout=60_000)
        view.locator("[data-t]").nth(4).wait_for()
        view.evaluate("document.getElementById('episodes').scrollIntoView()")
        view.locator("[data-t]").nth(4).hover()
        view.screenshot(path=picture)
        browser.close()
        server.terminate()


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    commands = Path(sys.executable).parent
    os.environ["PATH"] = f"{commands}:{os.environ['PATH']}"
    (IMAGES / "check.svg").write_text(terminal("agentrl-env", "check", "environments/shop"))
    page((Path(sys.argv[1]) / "report.html").resolve().as_uri(), IMAGES / "report.png")
    live_page(Path(sys.argv[1]), IMAGES / "watch.png")
    (IMAGES / "real.svg").write_text(curve(Path(sys.argv[2])))
    server_page(IMAGES / "server.png")
