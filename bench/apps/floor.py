"""What is left of `reflex serve` without its promises: HTTP, JSON, the scheduler and the model, each called once.

`python -m bench.apps.floor EXPORT PORT STAGE`, with a stage of `STAGES`: each server does what the one before does, and
one thing more. There are no limits, key, checks, errors, ids, versions, metrics or events. A request is read and
answered on the event loop; what was read in one turn of the loop is one batch. So no server in Python that batches by
this scheduler can cost less, and what `reflex serve` costs above it is the price of what it promises.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from copy import copy
from typing import Any

import httptools
import msgspec
import uvloop

from bench.apps.ablated import ANSWER
from bench.apps.raw import Model
from bench.costs import serving_group
from reflex_runtime.core.batch import Done
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler

STAGES = {
    "json": "HTTP, and JSON in and out",
    "scheduler": "the scheduler: submit, form, complete",
    "model": "the model",
}
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


class Asked(msgspec.Struct):
    """A request's body."""

    state: list[float]


class Floor:
    """The server. Requests that come in one turn of the loop are answered in the next."""

    def __init__(self, export: str, stage: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.read = msgspec.json.Decoder(Asked).decode
        self.model = Model(export) if stage == "model" else None
        self.scheduler = None if stage == "json" else Scheduler([serving_group()])
        self.came: list[tuple[FloorConnection, Asked]] = []

    def ask(self, connection: FloorConnection, body: bytes) -> None:
        if not self.came:
            self.loop.call_soon(self.turn)
        self.came.append((connection, self.read(body)))

    def turn(self) -> None:
        """Answer what has come."""
        came, self.came = self.came, []
        scheduler, loop = self.scheduler, self.loop
        if scheduler is not None:
            for connection, asked in came:
                request = Request(asked, group="prod", partition="p", client=connection, shape="s", cost_class="c")
                scheduler.submit(request, loop.time())
            while not scheduler.idle:
                now = loop.time()
                batch = scheduler.next_batch(now) or scheduler.next_batch(now := scheduler.wake_at())  # ends a hold
                if batch is not None:
                    scheduler.complete(batch, [Done()] * len(batch), 0.0001, now + 0.0001)
            scheduler.take_events()
        chunks = self.model.run({"state": [asked.state for _, asked in came]}) if self.model is not None else None
        for i, (connection, _) in enumerate(came):
            answer = copy(ANSWER)
            answer.actions = ANSWER.actions.tolist() if chunks is None else chunks[i]
            body = msgspec.json.encode(answer)
            connection.transport.write(_HEAD % (len(body), body))


class FloorConnection(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, server: Floor) -> None:
        self.server, self.body = server, b""
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """httptools: a part of the body."""
        self.body += data

    def on_message_complete(self) -> None:
        """httptools: all of it has come."""
        body, self.body = self.body, b""
        self.server.ask(self, body)


async def main(export: str, port: int, stage: str) -> None:
    """Serve until terminated."""
    server = Floor(export, stage)
    listening = await server.loop.create_server(lambda: FloorConnection(server), "127.0.0.1", port, backlog=4096)
    gc.freeze()
    gc.set_threshold(50_000)  # as `reflex serve` does
    await listening.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
