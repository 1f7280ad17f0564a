"""The page of all feeds in Debian's Chromium, over a real run."""

from __future__ import annotations

import os
from pathlib import Path

from browser.looked import Browser, Looked, needs_browser
from feeds.commands import Feeds

pytestmark = needs_browser
SHOTS = os.environ.get("REFLEX_TEST_SHOTS", "")  # a folder for pictures of the pages
DRAWN = """selector => [...document.querySelectorAll(selector)].every(canvas => {
    const pen = canvas.getContext("2d");
    return pen.getImageData(0, 0, canvas.width, canvas.height).data.some(value => value > 0);
})"""


def test_x4_every_feed_is_seen_on_one_page_and_one_is_enlarged_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    names = ["door", "gate", "hall", "lift", "ramp", "shop", "yard"]  # more than a browser has connections to a server
    sources = [f"{name}=shapes:seed={number},fps=3" for number, name in enumerate(names)]
    with Feeds(*sources, "--onnx", "shapes", "--api-key", "s3cret", "--port", "0", cwd=tmp_path) as feeds:
        look = Looked(browser, feeds, path="/feeds", viewport={"width": 1200, "height": 800})
        look.page.fill("input[name=key]", "s3cret")
        look.page.click("text=Watch")
        look.page.wait_for_function("() => document.querySelectorAll('.feed').length === 7")
        look.page.wait_for_function(DRAWN, arg=".feed canvas")
        if SHOTS:
            look.page.wait_for_timeout(1500)
            look.page.screenshot(path=f"{SHOTS}/feeds-page.png")
        streams = [path for path in look.asked if path.startswith("/feeds.mjpeg")]
        assert [path.count("feed=") for path in streams][-1] == 7
        assert "s3cret" not in "".join(look.asked)
        look.page.focus(".feed")
        look.page.keyboard.press("ArrowRight")
        look.page.keyboard.press("ArrowDown")
        look.page.keyboard.press("ArrowUp")
        look.page.keyboard.press("Enter")
        look.until("dialog", "gate")
        look.page.wait_for_function(DRAWN, arg="dialog canvas")
        look.page.keyboard.press("Escape")
        assert look.page.is_hidden("dialog")
        look.page.evaluate("window.before = document.querySelector('.feed canvas').toDataURL()")
        look.page.wait_for_function("() => document.querySelector('.feed canvas').toDataURL() !== before", polling=100)
        assert look.wrong[1:] == []  # the first is the 401 before the key was given
        assert look.hosts == {f"127.0.0.1:{feeds.port}"}
        look.page.close()
        phone = Looked(browser, feeds, path="/feeds", color_scheme="dark", viewport={"width": 390, "height": 844})
        phone.page.fill("input[name=key]", "s3cret")
        phone.page.click("text=Watch")
        phone.page.wait_for_function(DRAWN, arg=".feed:first-child canvas")
        assert phone.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if SHOTS:
            phone.page.wait_for_timeout(1500)
            phone.page.screenshot(path=f"{SHOTS}/feeds-phone.png")
        phone.page.close()
