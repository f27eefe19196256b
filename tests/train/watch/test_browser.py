"""The live page in a real Chromium."""

from pathlib import Path

import pytest

from agentrl_train.watch.app import WatchServer
from tests.browser import CHROMIUM, needs_chromium
from tests.train.watch.test_watch import TOKEN, write_step


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
async def test_page_requests_the_token_grows_and_shows_tokens(tmp_path: Path, width: int, scheme: str):
    from playwright.async_api import async_playwright, expect

    run = tmp_path / "night"
    write_step(run, 1)
    write_step(run, 2)
    server = WatchServer([run], host="127.0.0.1", port=0, token=TOKEN)
    await server.start()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = await browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = await context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.goto(server.url)
        await page.get_by_label("Token of this page").fill(TOKEN)
        await page.get_by_role("button", name="Continue").click()
        await expect(page.locator("#overview")).to_contain_text("step 2", timeout=30_000)
        write_step(run, 3)
        await expect(page.locator("#overview")).to_contain_text("step 3", timeout=30_000)
        await page.locator(".episode-row summary").first.click()
        await page.locator("[data-t]").first.hover()
        await expect(page.locator("#tip")).to_contain_text("log-probability")
        await expect(page.locator("#tip")).to_contain_text("advantage +2")
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert problems == []
        await browser.close()
    await server.stop()
