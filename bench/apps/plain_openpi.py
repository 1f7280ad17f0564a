"""A policy server as openpi's own works: a coroutine per websocket, and one inference at a time in the event loop.

Metadata first, then one frame of msgpack each way; arrays are maps with keys of bytes. No batches, no limits.
"""

from __future__ import annotations

import asyncio
import sys
import time
from http import HTTPStatus
from typing import Any

import msgpack
import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from bench.apps.raw import open_session

NAMES = {"observation/image": "image", "observation/wrist_image": "image_wrist", "observation/state": "state"}


def read(found: dict[Any, Any]) -> Any:
    """The array that a map stands for, else the map."""
    if b"__ndarray__" not in found:
        return found
    return np.ndarray(buffer=found[b"data"], dtype=np.dtype(found[b"dtype"]), shape=found[b"shape"])


def write(value: Any) -> Any:
    """An array as a map."""
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def healthz(connection: ServerConnection, request: Request) -> Response | None:
    """200 on its path, else a websocket."""
    return connection.respond(HTTPStatus.OK, "OK\n") if request.path == "/healthz" else None


async def main(export: str, port: int) -> None:
    """Serve until killed."""
    session = open_session(export)

    async def robot(websocket: ServerConnection) -> None:
        await websocket.send(msgpack.packb({"model": "bench"}))
        try:
            while True:
                observation = msgpack.unpackb(await websocket.recv(), object_hook=read)
                began = time.monotonic()
                feeds = {NAMES[name]: value[None] for name, value in observation.items() if name in NAMES}
                feeds["state"] = feeds["state"].astype(np.float32)
                actions = session.run(None, feeds)[0][0]
                timing = {"infer_ms": (time.monotonic() - began) * 1e3}
                await websocket.send(msgpack.packb({"actions": actions, "server_timing": timing}, default=write))
        except ConnectionClosed:
            return

    async with serve(robot, "127.0.0.1", port, compression=None, max_size=None, process_request=healthz) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
