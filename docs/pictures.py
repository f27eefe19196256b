"""Make the pictures of README from real output (``python -m docs.pictures runs/NAME``).

The terminal shows a command and what it printed. The pages are the report of a run, and an episode on its
live page, drawn by Chromium.
"""

import os
import re
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
WIDTH = 104
"""Columns of the terminal."""
PAGE = (1400, 1000)
"""Pixels of the page that are shown."""
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def terminal(*command: str) -> str:
    """Return an SVG image of a terminal with a command and its output."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(f"[bold]$[/] {' '.join(command)}", highlight=False)
    console.print(Text.from_ansi(done.stdout.rstrip()))
    return FONT.sub("", console.export_svg(title="agentrl-kit", theme=MONOKAI, unique_id="terminal"))


def page(path: Path, picture: Path) -> None:
    """Write the top of a page as a PNG image."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("the report is drawn by Chromium, which is not installed")
    size = f"--window-size={PAGE[0]},{PAGE[1]}"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1", size]
    command = [browser, *options, f"--screenshot={picture}", path.resolve().as_uri()]
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
    page(Path(sys.argv[1]) / "report.html", IMAGES / "report.png")
    live_page(Path(sys.argv[1]), IMAGES / "watch.png")
