"""/docs of a server in Debian's Chromium: long names of fields do not make it wider than a phone."""

from __future__ import annotations

from browser.looked import Browser, Looked, needs_browser
from serving.openai_toy import Toy

pytestmark = needs_browser


def test_x4_docs_fit_a_phone(browser: Browser) -> None:
    with Toy() as toy:
        phone = Looked(browser, toy, path="/docs", viewport={"width": 390, "height": 844})
        assert "include_stop_str_in_output" in phone.text("body")
        assert phone.page.evaluate("document.documentElement.scrollWidth") == 390
        phone.page.close()
