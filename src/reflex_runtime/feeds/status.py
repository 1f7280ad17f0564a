"""The server of `reflex feeds --port`, on a thread with an event loop of its own: a caller cannot delay a feed."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, Self

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.run.process import loop_factory
from reflex_runtime.web.app import App
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.listen import bind, url_of
from reflex_runtime.web.request import Route
from reflex_runtime.web.serve import ReflexServer, ServerLife, uvicorn_config

log = logging.getLogger("reflex.feeds.status")


class StatusSettings(Protocol):
    """host, port: port 0 takes a free one. api_key, allow_host: see `web.access`."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def api_key(self) -> str: ...
    @property
    def allow_host(self) -> tuple[str, ...]: ...


class StatusPages(Protocol):
    """What is answered. find: the route of a path that is not in `routes`. close: end what is being answered."""

    @property
    def routes(self) -> Mapping[str, Route]: ...
    def find(self, path: str) -> Route | None: ...
    def close(self) -> None: ...


class StatusServer:
    """Answers with these pages, which are made and called on its thread. address, url: where it listens, once it does.

    A context manager. ConfigError when the address cannot be bound.
    """

    def __init__(self, settings: StatusSettings, pages: Callable[[], StatusPages]) -> None:
        self.address, self.url = (settings.host, settings.port), ""
        self._settings, self._pages = _StatusLimits(settings), pages
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], Any] = lambda: None

    @property
    def port(self) -> int:
        return self.address[1]

    def start(self) -> None:
        """Bind and answer from now on."""
        if self._thread is not None:
            raise ConfigError("StatusServer.start: already started")
        listening = bind(*self.address)
        listening.set_inheritable(False)
        self.address, self.url = listening.getsockname()[:2], url_of(listening)
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(listening, ready), name="reflex-status", daemon=True)
        self._thread.start()
        ready.result()

    def stop(self) -> None:
        """Stop answering and cut off open connections. May be called twice."""
        if self._thread is not None:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._stop()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _main(self, listening: socket.socket, ready: Future[None]) -> None:
        try:
            with listening, asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(self._serve(listening, ready))
        except BaseException as error:
            if ready.done():
                log.exception("the status pages are gone")
            else:
                ready.set_exception(error)

    async def _serve(self, listening: socket.socket, ready: Future[None]) -> None:
        pages = self._pages()
        app = App(self._settings, pages.routes, PLAIN, pages.find, missing=partial(_missing, pages.routes))
        life = ServerLife(app, _StatusHost(pages), drain_s=0.0)
        self._stop = partial(asyncio.get_running_loop().call_soon_threadsafe, life.stop.set)
        server = ReflexServer(uvicorn_config(app, self._settings), life)
        server.on_listening = partial(ready.set_result, None)
        await server.serve([listening])


class _StatusHost:
    """The pages, as `web.serve` takes a product: they are there at once."""

    state, error, unusable, writes_files = "ready", "", False, False

    def __init__(self, pages: StatusPages) -> None:
        self.drain = pages.close

    async def start(self) -> None:
        """Nothing is loaded."""

    async def stop(self, until: float, answered: Callable[[], Awaitable[None]]) -> bool:
        return True

    def turn_files(self) -> None:
        """There are none."""


class _StatusLimits:
    """The settings of the HTTP layer: those of the feeds, and limits for a server that is asked by few."""

    max_connections: Final = 256
    idle_timeout_s: Final = 75.0
    head_timeout_s: Final = 10.0
    body_timeout_s: Final = 10.0
    max_bodies_mb: Final = 1.0
    max_body_bytes: Final = 1 << 16
    drain_timeout_s: Final = 0.0
    ssl_certfile: Final = ""
    ssl_keyfile: Final = ""

    def __init__(self, settings: StatusSettings) -> None:
        self.host, self.api_key, self.allow_host = settings.host, settings.api_key, settings.allow_host


def _missing(routes: Mapping[str, Route], path: str) -> str:
    there = [known for known in ("/dashboard", "/feeds", "/metrics", "/health") if known in routes]
    return f"there is no {path[:200]} here, but {', '.join(there)}"
