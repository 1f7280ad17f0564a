"""Fixtures: servers, and one browser for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from browser.looked import CHROMIUM, QUIET, Browser
from serving.fixtures import pair, tiny

__all__ = ["pair", "tiny"]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Playwright's loop runs in this thread until it is closed: no test of another folder could run one meanwhile."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield found
        found.close()
