"""H5 --cors: pages of the sites that it names may ask and read; others may not, and nobody's pages reach operators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.harness import STATE, Server, refusal
from serving.openai_toy import Toy

PAGE = "http://page.example:3000"
ASKS = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-key"}
PROMPT = {"model": "toy", "prompt": "hello", "max_tokens": 1}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def toy() -> Iterator[Toy]:
    with Toy(cors=(PAGE, "https://Other.example:443")) as found:
        yield found


def test_h5_cors_lets_the_pages_of_a_site_ask_and_read(toy: Toy) -> None:
    told = toy.ask("OPTIONS", CHAT, headers=ASKS)
    assert (told.status, told.body) == (200, b"")
    assert told.headers["access-control-allow-origin"] == PAGE
    assert told.headers["access-control-allow-methods"] == "POST"
    assert told.headers["access-control-allow-headers"] == "content-type,x-key"
    assert told.headers["vary"] == "Origin"
    answer = toy.post("/v1/completions", PROMPT, Origin=PAGE)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    streamed = toy.post("/v1/completions", PROMPT | {"stream": True}, Origin=PAGE)
    assert (streamed.status, streamed.headers["access-control-allow-origin"]) == (200, PAGE)
    wrong = toy.post("/v1/completions", {"model": "toy"}, Origin=PAGE)  # a page may read what it did wrong, too
    assert (wrong.status, wrong.headers["access-control-allow-origin"]) == (400, PAGE)
    assert "access-control-allow-origin" not in toy.complete().headers
    other = "https://other.example"
    assert toy.ask("OPTIONS", CHAT, headers=ASKS | {"Origin": other}).headers["access-control-allow-origin"] == other


def test_h5_cors_lets_no_other_pages_ask(toy: Toy) -> None:
    for origin in ("http://page.example", "https://page.example:3000", "http://evil.example", "null"):
        told = toy.ask("OPTIONS", CHAT, headers=ASKS | {"Origin": origin})
        assert (told.status, "access-control-allow-origin" in told.headers) == (403, False)
        answer = toy.post("/v1/completions", PROMPT, Origin=origin)
        assert (answer.status, "access-control-allow-origin" in answer.headers) == (403, False)
    rebound = toy.ask("OPTIONS", CHAT, headers=ASKS | {"Host": "evil.example"})
    assert rebound.status == 403
    assert toy.ask("OPTIONS", "/v1/nothing", headers=ASKS).status == 404
    assert toy.ask("OPTIONS", CHAT, headers={"Origin": PAGE}).status == 405  # no browser asks so


def test_h5_cors_with_a_key_asks_for_it_in_the_request_itself() -> None:
    with Toy(cors=("*",), api_key="secret") as toy:
        told = toy.ask("OPTIONS", CHAT, headers=ASKS | {"Host": "anything.example"})
        assert (told.status, told.headers["access-control-allow-origin"]) == (200, "*")
        assert toy.post("/v1/completions", PROMPT, Origin=PAGE).status == 401
        answer = toy.post("/v1/completions", PROMPT, Origin="null", **{"x-api-key": "secret"})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")


def test_h5_cors_never_lets_a_page_reach_operators(tiny: Path) -> None:
    with Server(tiny, "--cors", "*") as server:
        body = json.dumps({"state": STATE}).encode()
        answer = server.ask("POST", "/act", body, {"Origin": PAGE})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
        for path in ("/admin/split", "/admin/reset", "/episodes/e/outcome"):
            for method, headers in (("OPTIONS", ASKS), ("POST", {"Origin": PAGE})):
                answer = server.ask(method, path, b"{}" if method == "POST" else None, headers)
                assert (answer.status, "access-control-allow-origin" in answer.headers) == (403, False), path
        for path in ("/journal", "/dashboard/stream"):
            assert server.ask("GET", path, None, {"Origin": PAGE}).status in (403, 404)


@pytest.mark.parametrize("origin", ["page.example", "http://x/", "http://x/path", "file://x", "null", ""])
def test_h5_cors_is_a_site_without_a_path(tiny: Path, origin: str) -> None:
    assert f"--cors={origin}: must be *, or a site such as https://example.org" in refusal(tiny, "--cors", origin)
