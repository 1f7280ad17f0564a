"""/docs of servers in Debian's Chromium: every path of the document, fit for a phone, with commands that run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from browser.looked import Browser, Looked, needs_browser
from browser.prefix_proxy import PrefixProxy
from serving.harness import Server
from serving.openai_toy import Toy

pytestmark = needs_browser


def test_x4_docs_fit_a_phone(browser: Browser) -> None:
    with Toy() as toy:
        phone = Looked(browser, toy, path="/docs", viewport={"width": 390, "height": 844})
        phone.until("td", "include_stop_str_in_output")
        assert phone.page.evaluate("document.documentElement.scrollWidth") == 390
        phone.page.close()


def test_h7_docs_mark_the_picture_of_a_policy_that_needs_one_as_required(browser: Browser) -> None:
    with Server("demo") as server:
        docs = Looked(browser, server, path="/docs")
        docs.until("h2", "Errors")
        rows = {name: docs.text(f"tr:has(code:text-is('{name}'))") for name in ("image", "image_wrist")}
        assert {name: "(required)" in row for name, row in rows.items()} == {"image": True, "image_wrist": False}
        docs.page.close()


def test_h7_docs_have_the_fields_as_declared_and_required_ones_first(browser: Browser) -> None:
    with Server("demo") as server:
        docs = Looked(browser, server, path="/docs")
        docs.until("h2", "Errors")
        document = json.loads(server.get("/openapi.json").body)
        schema = document["paths"]["/act"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        needed = {one for part in (schema, *schema.get("allOf", ())) for one in part.get("required", ())}
        table = docs.page.locator("h2:has-text('/act') ~ table").first
        shown = table.locator("tr td:first-child").all_text_contents()
        assert shown == sorted(schema["properties"], key=lambda field: field not in needed)
        docs.page.close()


def test_h7_docs_show_every_path_and_the_command_of_its_example_runs_when_pasted(browser: Browser, tiny: Path) -> None:
    with Server(tiny, "--api-key", "KEY") as server:
        docs = Looked(browser, server, path="/docs")
        docs.until("h2", "Errors")
        paths = json.loads(server.get("/openapi.json").body)["paths"]
        assert all(path in docs.text("main") for path in paths)
        assert "list of number" in docs.text("tr:has(code:text-is('state'))")
        assert "(required)" in docs.text("tr:has(code:text-is('state'))")
        assert 'one of "prod"' in docs.text("tr:has(code:text-is('slot'))")
        command = docs.text("pre:has-text('/act')")
        done = subprocess.run(["sh", "-c", f"{command} -s"], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["num_actions"] > 0
        assert docs.wrong == []
        docs.page.close()


def test_h7_docs_with_a_slash_behind_a_prefix_find_their_document_and_name_the_prefix(browser: Browser) -> None:
    with Toy() as toy, PrefixProxy("/robots", toy.port) as proxy:
        docs = Looked(browser, proxy, path="/robots/docs/")
        docs.until("h2", "Errors")
        assert f"curl 'http://127.0.0.1:{proxy.port}/robots/v1/completions'" in docs.text("pre:has-text('completions')")
        assert docs.page.get_attribute("p a", "href") == f"http://127.0.0.1:{proxy.port}/robots/openapi.json"
        docs.page.close()
