"""What every session on a websocket has in common, without a socket."""

from __future__ import annotations

import asyncio
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openpi_client import msgpack_numpy
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.web.websocket import SocketMessage

from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.policies.wires import vla_eval, xpolicylab_codec
from reflex_runtime.policies.wires.openpi import OpenpiSession
from reflex_runtime.policies.wires.vla_eval import VlaEvalSession
from reflex_runtime.policies.wires.xpolicylab import XPolicyLabSession
from reflex_runtime.web.app import App
from serving.exports import write_tiny
from serving.harness import STATE
from serving.in_process import with_app

PICTURE = np.zeros((600, 800, 3), np.uint8)


def _openpi(seen: dict[str, Any]) -> bytes:
    packed: bytes = msgpack_numpy.packb(seen)
    return packed


def _vla_eval(seen: dict[str, Any]) -> bytes:
    return vla_eval.encode(vla_eval.EvalMessage("observation", seen))


def _xpolicylab(seen: dict[str, Any]) -> bytes:
    observation = {"vision": {"image": {"color": seen["image"]}}, "state": {"arm_joint_state": seen["state"]}}
    envelope = {"message_id": "m", "evaluation_id": "e"}
    return xpolicylab_codec.encode(xpolicylab_codec.LabFrame("infer", envelope, {"observation": observation}))


@pytest.mark.parametrize(
    ("session", "write"),
    [(OpenpiSession, _openpi), (VlaEvalSession, _vla_eval), (XPolicyLabSession, _xpolicylab)],
)
def test_w4_a_session_keeps_no_picture_that_is_answered(
    session: Callable[[Asking, Any], Any], write: Callable[[dict[str, Any]], bytes], tmp_path: Path
) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        answered = asyncio.Event()
        socket: Any = types.SimpleNamespace(id="s", query={}, answer=lambda frame: answered.set())
        robot = session(Asking(runtime), socket)
        frame = write({"image": PICTURE, "state": np.array(STATE)})
        before = sys.getrefcount(frame)
        robot.asked(SocketMessage(frame, len(frame), time.monotonic()))
        assert sys.getrefcount(frame) > before
        await answered.wait()
        while sys.getrefcount(frame) > before:  # noqa: ASYNC110 (the device thread lets go of its batch)
            await asyncio.sleep(0)
        assert robot is not None

    with_app(write_tiny(tmp_path / "export", cameras=("image",)), check)
