"""The dashboard in Debian's Chromium, over real servers: what is seen, and what is asked of whom."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from browser.looked import Browser, Looked, needs_browser
from browser.prefix_proxy import PrefixProxy
from feeds.commands import Feeds
from serving.harness import STATE, Server
from serving.openai_toy import Model, Toy

pytestmark = needs_browser


def test_x4_batches_clients_and_queues_are_seen(browser: Browser, tiny: Path) -> None:
    with Server(tiny) as server:
        look = Looked(browser, server)
        look.until("#link", "live")
        look.page.click("text=30 s")  # a busy machine needs more than two until all is seen
        for name in ("arm-1", "arm-2"):
            assert server.post({"state": STATE, "robot_id": name}).status == 200
        look.until("#clients", "arm-1")
        look.until("#clients", "arm-2")
        look.until("#legend", "arm-2")
        assert look.text("#state") == "ready"
        assert "robot policies" in look.text("#product")
        look.until("#tiles", "answers a second")
        look.until("#queues", "prod")
        look.until("#policies", "crashes in a row")
        painted = """() => {
            const canvas = document.getElementById("strip"), { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            return data.some((red, i) => i % 4 === 0 && red === 0x88 && data[i + 1] === 0xCC && data[i + 2] === 0xEE);
        }"""

        def seen() -> bool:
            """Whether a batch is painted in the colour of the first client; one leaves the strip after 30 s."""
            assert server.post({"state": STATE, "robot_id": "arm-1"}).status == 200
            return bool(look.page.evaluate(painted))

        server.wait_until(seen)
        look.until("#charts", "p99")
        assert "resident" not in look.text("#charts")  # of a policy that runs in one call
        assert (look.wrong, look.hosts) == ([], {f"127.0.0.1:{server.port}"})  # nothing of other sites
        look.page.close()


def test_x4_tokens_are_seen(browser: Browser) -> None:
    with Toy(Model()) as toy:
        look = Looked(browser, toy)
        look.until("#link", "live")
        assert toy.complete(user="chat-7", max_tokens=5).status == 200
        look.until("#clients", "chat-7")
        look.until("#tiles", "first token, p99")
        look.until("#tiles", "cache held")
        assert look.wrong == []
        look.page.close()


def test_x4_feeds_are_seen_and_one_is_enlarged_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    arguments = ("door=shapes:seed=1,fps=20", "yard=rtsp://127.0.0.1:9/x", "--onnx", "shapes", "--api-key", "s3cret")
    with Feeds(*arguments, "--port", "0", cwd=tmp_path) as feeds:
        look = Looked(browser, feeds)
        look.page.fill("input[name=key]", "s3cret")
        look.page.click("text=Watch")
        look.until("#state", "failing: yard is")
        look.until("#feeds table", "Connection refused")
        look.until("#legend", "door")
        assert look.page.is_hidden("#callers")
        drawn = """selector => {
            const canvas = document.querySelector(selector), pen = canvas.getContext("2d");
            return pen.getImageData(0, 0, canvas.width, canvas.height).data.some(value => value > 0);
        }"""
        look.page.focus(".feed")  # what is out of sight is not drawn
        look.page.wait_for_function(drawn, arg=".feed canvas")
        look.page.keyboard.press("Enter")
        look.page.wait_for_function(drawn, arg="dialog canvas")
        look.until("dialog", "door")
        look.page.keyboard.press("Escape")
        assert look.page.is_hidden("dialog")
        assert look.wrong[1:] == []  # the first is the 401 before the key was given
        assert look.hosts == {f"127.0.0.1:{feeds.port}"}
        look.page.close()


def test_x4_it_is_read_by_keyboard_and_stands_still_when_paused(browser: Browser, tiny: Path) -> None:
    with Server(tiny, "--inject-latency-ms", "30") as server:
        look = Looked(browser, server)
        look.until("#link", "live")
        look.page.click("text=30 s")
        for i in range(3):
            assert server.post({"state": STATE, "robot_id": f"arm-{i}"}).status == 200
        look.until("#clients", "arm-2")
        look.page.wait_for_function("() => document.querySelectorAll('#legend li').length === 3")
        look.page.focus("#strip")
        for _ in range(1000):  # the picture is half a second behind: until then it goes on
            look.page.keyboard.press("ArrowLeft")
            if look.page.is_visible("#about") and "Batch 3 " in look.text("#about"):
                break
            if look.page.get_attribute("#pause", "aria-pressed") == "true":
                look.page.keyboard.press(" ")
        newest = look.text("#about")
        look.page.keyboard.press("ArrowLeft")
        assert "Batch 2 " in look.text("#about")
        assert "It left: the device was free" in newest
        assert look.page.get_attribute("#pause", "aria-pressed") == "true"
        look.page.keyboard.press("Escape")
        assert look.page.is_hidden("#about")
        look.page.keyboard.press(" ")
        assert look.page.get_attribute("#pause", "aria-pressed") == "false"
        look.page.click("summary")
        assert look.wrong == []
        look.page.close()


def test_x4_a_pause_keeps_its_picture_and_names_are_bounded(browser: Browser, tiny: Path) -> None:
    with Server(tiny) as server:
        look = Looked(browser, server)
        look.until("#link", "live")
        shown = look.page.evaluate("""async () => {
            const { Strip } = await import("/dashboard/strip.js");
            const canvas = document.getElementById("strip"), made = (tag) => document.createElement(tag);
            const strip = new Strip(canvas, made("div"), made("ul"));
            const batch = (id, at) => ({ id, group: "g", stage: "", cause: "idle", at, expected: 0, cost: 1, size: 1,
                queued: 0, short_of: "", members: [[`client-${id}`, 1, 0, true]], took: 0.01, failed: false });
            strip.add({ at: 100, batches: [batch(0, 99)], running: [] });
            strip.pause(true);
            const later = Array.from({ length: 5000 }, (_, i) => batch(i + 1, 101));
            strip.add({ at: 102, batches: later, running: [] });
            strip.draw();
            return [strip.shown.map((s) => s.batch.id), strip.names.size, strip.seen, strip.colour("client-5000")];
        }""")
        assert shown == [[0], 4000, 5001, 5000]
        look.page.close()


def test_x4_a_shadow_does_not_count_as_answers(browser: Browser, tiny: Path) -> None:
    with Server(tiny, "--shadow-policy", str(tiny), "--shadow-sample", "1") as server:
        look = Looked(browser, server)
        look.until("#link", "live")
        assert server.act(robot_id="arm-1").status == 200
        look.until("#clients", "arm-1")
        served = look.page.evaluate("""async () => {
            const { served } = await import("/dashboard/tables.js");
            const groups = [{ name: "prod" }, { name: "shadow" }];
            const policy = { groups: { prod: "prod", shadow: "shadow" } };
            return served({ groups, server: { policies: { default: policy } } });
        }""")
        assert served == [{"name": "prod"}]
        assert look.wrong == []
        look.page.close()


def test_x4_it_works_behind_a_proxy_that_adds_a_prefix(browser: Browser, tiny: Path) -> None:
    with Server(tiny, "--api-key", "s3cret") as server, PrefixProxy("/robots/7", server.port) as proxy:
        look = Looked(browser, server, f"http://127.0.0.1:{proxy.port}/robots/7")
        look.until("#link", "the key is needed")
        look.wrong.clear()  # the 401 of the first try
        look.page.fill("input[name=key]", "s3cret")
        look.page.click("text=Watch")
        look.until("#link", "live")
        look.page.locator("text=Reset the breaker of prod").dispatch_event("click")  # hidden, as it is fine
        look.until(".operator", "done")
        assert (look.wrong, look.hosts) == ([], {f"127.0.0.1:{proxy.port}"})
        look.page.close()


def test_x4_the_buttons_are_those_of_the_server_that_answers_now(browser: Browser, tiny: Path) -> None:
    with Server(tiny) as server:
        look = Looked(browser, server)
        look.until("#link", "live")
        shown = look.page.evaluate("""async () => {
            const { Policies } = await import("/dashboard/tables.js");
            const place = document.createElement("div"), policies = new Policies(place, () => "");
            const told = (slots, split) => ({ split, breaker: { slots: {} }, versions: {},
                slots: Object.fromEntries(slots.map((slot) => [slot, { verdict: "ok" }])) });
            const texts = (...all) => all.map((policy) => {
                policies.show({ policies: { default: policy } });
                const inputs = [...place.querySelectorAll("input")].map((input) => input.value);
                return [...[...place.querySelectorAll("button")].map((b) => b.textContent.split(" ").pop()), ...inputs];
            });
            return texts(told(["prod"]), told(["a", "b"], 90), told(["a", "b"], 50), told(["prod"]));
        }""")
        assert shown == [["prod"], ["a", "b", "percent", "a", "90"], ["a", "b", "percent", "a", "50"], ["prod"]]
        look.page.close()


def test_only_a_breaker_that_is_not_fine_can_be_reset(browser: Browser, tiny: Path) -> None:
    with Server(tiny) as server:
        look = Looked(browser, server)
        look.until("#link", "live")
        shown = look.page.evaluate("""async () => {
            const { Policies } = await import("/dashboard/tables.js");
            const place = document.createElement("div"), policies = new Policies(place, () => "");
            return [["ok", 0], ["ok", 2], ["drained", 5], ["ok", 0]].map(([verdict, consecutive]) => {
                const breaker = { slots: { prod: { consecutive } } };
                policies.show({ policies: { default: { breaker, versions: {}, slots: { prod: { verdict } } } } });
                return !place.querySelector("button").hidden;
            });
        }""")
        assert shown == [False, True, True, False]
        look.page.close()


def test_h5_the_key_is_asked_for_and_never_in_an_address(browser: Browser, tiny: Path) -> None:
    with Server(tiny, "--api-key", "s3cret") as server:
        look = Looked(browser, server)
        addresses: list[str] = []
        look.page.on("request", lambda asked: addresses.append(asked.url))
        look.until("#link", "the key is needed")
        look.page.fill("input[name=key]", "wrong")
        look.page.click("text=Watch")
        look.until("#refused", "did not take this key")
        look.page.fill("input[name=key]", "s3cret")
        look.page.click("text=Watch")
        look.until("#link", "live")
        assert look.page.is_hidden("#key")
        assert not any("s3cret" in address or "wrong" in address for address in addresses)
        look.page.locator("text=Reset the breaker of prod").dispatch_event("click")  # hidden, as it is fine
        look.until(".operator", "done")
        look.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_x4_it_fits_a_phone(browser: Browser, tiny: Path, scheme: str) -> None:
    with Server(tiny) as server:
        look = Looked(browser, server, viewport={"width": 390, "height": 800}, color_scheme=scheme)
        look.until("#link", "live")
        assert server.act(robot_id="arm-1").status == 200
        look.until("#clients", "arm-1")
        width = look.page.evaluate("[document.scrollingElement.scrollWidth, window.innerWidth]")
        assert width[0] <= width[1]
        back, ink = (
            sum(map(int, look.page.evaluate(f"getComputedStyle(document.body).{name}")[4:-1].split(",")))
            for name in ("backgroundColor", "color")
        )
        assert (back > ink) == (scheme == "light")
        look.page.close()


def test_x4_it_connects_again_to_a_server_that_comes_back(browser: Browser, tiny: Path) -> None:
    with Server(tiny, supervised=True) as server:
        look = Looked(browser, server)
        look.until("#link", "live")
        look.page.evaluate("""() => {
            const link = document.getElementById("link"), note = () => said.push(link.textContent);
            window.said = [];
            new MutationObserver(note).observe(link, { childList: true });
        }""")
        (child,) = psutil.Process(server.process.pid).children()
        child.kill()
        look.page.wait_for_function("() => said.some((text) => text.startsWith('not connected'))")
        look.until("#link", "live")
        assert server.act(robot_id="arm-1").status == 200
        look.until("#clients", "arm-1")
        look.page.close()
