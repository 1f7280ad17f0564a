"""A route that raises what is no `Exception`, as libraries in Rust do, is answered 500; the server goes on."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from reflex_runtime.settings import ServeConfig
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import PLAIN
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route
from web.listening import listening


class PanicException(BaseException):
    """As a library in Rust raises it."""


async def panics(request: HttpRequest) -> HttpResponse:
    raise PanicException("unwrap on a None value")


async def fine(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, b"{}")


def test_a_panic_is_a_500_without_its_text_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        app = App(
            ServeConfig(), {path: Route(path, run) for path, run in [("/panics", panics), ("/fine", fine)]}, PLAIN
        )
        async with listening(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            answer = await client.get("/panics")
            assert (answer.status_code, answer.json()["error"]) == (500, "internal")
            assert "unwrap" not in answer.text
            assert "unwrap on a None value" in caplog.text
            assert (await client.get("/fine")).status_code == 200

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
