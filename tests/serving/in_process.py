"""An application in this process, asked without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from reflex_runtime.robots import Export, PolicySource
from reflex_runtime.robots.app import application
from reflex_runtime.robots.serving.runtime import PolicyPlan, PolicyRuntime
from reflex_runtime.settings import DEFAULT_POLICY, ServeConfig
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import CallerLeft
from reflex_runtime.web.request import CANCELS

from .harness import PATIENCE, Answer


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
                while not runtime.batcher.device._bell.waiting:  # noqa: ASYNC110  # it would take the first of several
                    await asyncio.sleep(0)
                await check(app, runtime)
        finally:
            await runtime.stop(asyncio.get_running_loop().time() + 1.0, nothing)
            app.bodies.close()

    asyncio.run(main())


class Caller:
    """One that sends a request to an application in as many parts as it likes, without a server."""

    def __init__(self, app: App, path: str = "/act", method: str = "POST", leaves: bool = True) -> None:
        """leaves: the server cancels what is computed for callers that left, as ours does; others say that one left."""
        self.app, self._leaves = app, leaves
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._sent: list[dict[str, Any]] = []
        self._reads, self._begun = asyncio.Event(), asyncio.Event()
        self._reads.set()
        self.unread = 0  # messages of the answer that it has not taken
        headers = [(b"host", b"localhost")]
        if method == "POST":
            headers.append((b"content-type", b"application/json"))
        else:
            self.say(b"")
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers,
            "client": ("127.0.0.1", 1), "extensions": {CANCELS: {}} if leaves else {},
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._parts.get, self._send))

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.unread += 1
        await self._reads.wait()
        self.unread -= 1
        self._sent.append(dict(message))
        self._begun.set()

    def say(self, body: bytes, more: bool = False) -> None:
        """Send a part of the body, which is the last unless there is more."""
        self._parts.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def stop_reading(self) -> None:
        """Take no more of the answer, as one whose connection is full."""
        self._reads.clear()

    def leave(self) -> None:
        """Close the connection."""
        self._parts.put_nowait({"type": "http.disconnect"})
        if self._leaves:
            self.task.cancel(CallerLeft("the caller left"))

    @property
    def head(self) -> dict[str, Any] | None:
        """The first message of the answer, once it is there."""
        return self._sent[0] if self._sent else None

    @property
    def body(self) -> bytes:
        """What has come of the body."""
        return b"".join(message.get("body", b"") for message in self._sent[1:])

    async def status(self) -> int:
        """The status of an answer that has begun."""
        await asyncio.wait_for(self._begun.wait(), PATIENCE)
        return int(self._sent[0]["status"])

    async def answer(self) -> Answer:
        """The answer to the request."""
        await asyncio.wait_for(self.task, PATIENCE)
        head = self._sent[0]
        headers = {name.decode(): value.decode() for name, value in head["headers"]}
        return Answer(head["status"], headers, self.body)
