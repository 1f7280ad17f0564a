"""A page of a real server in Debian's Chromium."""

from __future__ import annotations

import shutil
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = shutil.which("chromium")
QUIET = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
QUIET += ["--disable-gpu"]  # there is none: otherwise the CPU computes what one would
# Pages draw ten times a second: sixty pictures of a second, painted without a GPU, take a core.
TEN_A_SECOND = """const frame = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (draw) => setTimeout(() => frame(draw), 100);"""
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
Browser = Any  # Playwright's, which need not be installed


class Looked:
    """A page of a server, with everything that went wrong on it."""

    def __init__(self, browser: Browser, server: Any, address: str = "", path: str = "/dashboard", **options: Any):
        self.url = f"{address or f'http://127.0.0.1:{server.port}'}{path}"
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(30_000)
        self.wrong: list[str] = []
        self.hosts: set[str] = set()
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.on("request", lambda asked: self._asks(asked.url))
        self.page.add_init_script(TEN_A_SECOND)
        self.page.goto(self.url)

    def _asks(self, url: str) -> None:
        self.hosts.add(urlsplit(url).netloc)
        self.asked.append(url.partition(urlsplit(url).netloc)[2])

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def until(self, selector: str, text: str) -> None:
        """Returns once the element says it."""
        self.page.locator(selector, has_text=text).first.wait_for()
