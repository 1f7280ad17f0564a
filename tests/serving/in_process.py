"""An application in this process, asked over its own connections without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from reflex_runtime.policies import Export, PolicySource
from reflex_runtime.policies.serving.app import application
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.policies.serving.served import PolicyPlan
from reflex_runtime.settings import DEFAULT_POLICY, ServeConfig
from reflex_runtime.web.app import App
from reflex_runtime.web.connection import HttpConnection

from .harness import PATIENCE, Answer, parse_answers


def one_policy(config: ServeConfig, specs: Mapping[str, PolicySource]) -> PolicyRuntime:
    """The runtime of a server with one policy. specs: by slot."""
    return PolicyRuntime(config, [PolicyPlan(DEFAULT_POLICY, config, specs)])


async def nothing() -> None:
    """For `stop`: nobody waits for an answer."""


def with_app(
    tiny: Path, check: Callable[[App, PolicyRuntime], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run `check` with an application and its policies."""

    async def main() -> None:
        runtime = one_policy(ServeConfig(**options), {"prod": Export.load(tiny)})
        app = application(runtime)
        await runtime.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await check(app, runtime)
        finally:
            await runtime.stop(asyncio.get_running_loop().time() + 1.0, nothing)
            app.bodies.close()

    asyncio.run(main())


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.aborted = False
        self.reading = True

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def write(self, data: bytes) -> None:
        self.written.put_nowait(data)

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        self.closed.set()

    def abort(self) -> None:
        self.aborted = True

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def connected(app: App) -> tuple[HttpConnection, Wire]:
    """A new connection to it."""
    connection, wire = HttpConnection(app), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    return connection, wire


class Caller:
    """One that sends a request in as many parts as it likes."""

    def __init__(self, app: App, path: str = "/act", method: str = "POST") -> None:
        self.connection, self.wire = connected(app)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
        if method == "POST":
            head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        self._head = head.encode() + b"\r\n"
        if method != "POST":
            self._send(b"")

    def _send(self, data: bytes) -> None:
        head, self._head = self._head, b""
        self.connection.data_received(head + data)
        self.connection.app.read()  # each part comes in a turn of the loop of its own

    def say(self, body: bytes, more: bool = False) -> None:
        """Send a part of the body, which is the last unless there is more."""
        self._send(b"%x\r\n%b\r\n" % (len(body), body) + (b"" if more else b"0\r\n\r\n"))

    def end(self) -> None:
        """Close the sending side."""
        self.connection.eof_received()

    def leave(self) -> None:
        """Close the connection."""
        self.connection.connection_lost(None)

    async def answer(self) -> Answer:
        """The answer to the request."""
        (answer,) = parse_answers(await self.wire.written.get())
        return answer
