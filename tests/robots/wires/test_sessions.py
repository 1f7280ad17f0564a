"""What every session on a websocket has in common, on an application without a socket."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openpi_client import msgpack_numpy

from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.robots.wires import openpi, vla_eval
from reflex_runtime.web.app import App
from reflex_runtime.web.request import CANCELS
from serving.exports import write_tiny
from serving.harness import STATE
from serving.in_process import with_app

PICTURE = np.zeros((600, 800, 3), np.uint8)


def _openpi(seen: dict[str, Any]) -> bytes:
    packed: bytes = msgpack_numpy.packb(seen)
    return packed


def _vla_eval(seen: dict[str, Any]) -> bytes:
    return vla_eval.encode(vla_eval.EvalMessage("observation", seen, 0))


@pytest.mark.parametrize(
    ("path", "write", "frames"),
    [(openpi.PATHS[0], _openpi, 2), (vla_eval.PATH, _vla_eval, 1)],
)
def test_w4_a_session_keeps_no_picture_that_is_answered(
    path: str, write: Callable[[dict[str, Any]], bytes], frames: int, tmp_path: Path
) -> None:
    """frames: that it sends, the first of openpi before anything came."""

    async def check(app: App, runtime: PolicyRuntime) -> None:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        sent: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        scope = {
            "type": "websocket", "path": path, "query_string": b"", "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1), "extensions": {CANCELS: {}},
        }  # fmt: skip
        messages.put_nowait({"type": "websocket.connect"})
        session = asyncio.ensure_future(app(scope, messages.get, sent.put))
        frame = write({"image": PICTURE, "state": np.array(STATE)})
        before = sys.getrefcount(frame)
        messages.put_nowait({"type": "websocket.receive", "bytes": frame})
        assert sys.getrefcount(frame) > before
        kinds = [(await sent.get())["type"] for _ in range(frames + 1)]
        assert kinds == ["websocket.accept"] + ["websocket.send"] * frames
        while sys.getrefcount(frame) > before:  # noqa: ASYNC110 (the device thread lets go of its batch)
            await asyncio.sleep(0)
        messages.put_nowait({"type": "websocket.disconnect"})
        await session

    with_app(write_tiny(tmp_path / "export", cameras=("image",)), check)
