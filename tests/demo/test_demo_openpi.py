"""Robots of the demo on openpi: the stock client, unmodified, against a real server and one that refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from openpi_client import msgpack_numpy
from websockets.sync.server import ServerConnection, serve

from demo import openpi_robot
from demo.command import main
from demo.openpi_robot import OpenpiPolicy
from demo.robot import Event, Gone, NoAnswer
from demo.tasks import RobotView

# The stock client was written for an earlier version of websockets.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")

SEEN = RobotView(np.zeros((64, 64, 3), np.uint8), np.zeros(4, np.float32), "close the drawer", "x", executed=5)


@contextmanager
def robot(*answers: Any, **options: Any) -> Iterator[tuple[OpenpiPolicy, list[Any], list[Event]]]:
    """A robot at a server that answers so, and then closes; what it asked, and its events."""
    asked: list[Any] = []
    events: list[Event] = []

    def session(socket: ServerConnection) -> None:
        asked.append(socket.request.path if socket.request is not None else "")
        socket.send(msgpack_numpy.packb({}))
        for answer in answers:
            asked.append(msgpack_numpy.unpackb(socket.recv()))
            socket.send(json.dumps(answer) if "error" in answer else msgpack_numpy.packb(answer))

    with serve(session, "127.0.0.1", 0, compression=None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        policy = OpenpiPolicy(url, "r 0", "run7", on_event=events.append, **options)
        with policy.episode("drawer-close-v3/7/0"):
            yield policy, asked, events
        policy.close()
        server.shutdown()


def error(code: str, retry_safe: bool) -> dict[str, Any]:
    return {"error": code, "message": "as the test wants it", "request_id": "x", "retry_safe": retry_safe}


CHUNK = {
    "actions": np.ones((16, 4), np.float32), "request_id": "a", "timing": {"total_ms": 1.0}, "batch": {"size": 3},
    "cache": "off", "guard": None, "policy_changed": False,
}  # fmt: skip


def test_a_refusal_is_asked_again_and_an_error_is_not() -> None:
    with robot(error("queue_full", True), CHUNK, error("invalid_request", False)) as (policy, asked, events):
        assert (policy(SEEN) == 1.0).all()
        assert asked[0] == "/?robot_id=r%200"
        assert asked[1]["episode_id"] == asked[2]["episode_id"] == "r 0:run7:drawer-close-v3/7/0"
        assert asked[1]["reflex/executed"] == 5
        assert [event["event"] for event in events] == ["refused", "act"]
        assert (events[1]["batch_size"], events[1]["status"]) == (3, 200)
        with pytest.raises(NoAnswer, match="invalid_request: as the test wants it"):
            policy(SEEN)
        with pytest.raises(Gone, match="the websocket was closed"):
            policy(SEEN)


def test_patience_ends_and_a_failed_policy_is_asked_anew() -> None:
    with robot(*[error("queue_full", True)] * 50, patience=0.01) as (policy, _, _):
        with pytest.raises(NoAnswer, match="queue_full"):
            policy(SEEN)
    with robot(error("processor_failed", False), CHUNK, again=1) as (policy, _, events):
        assert (policy(SEEN) == 1.0).all()
        assert [event["event"] for event in events] == ["act", "act"]
    not_finite = CHUNK | {"actions": np.full((16, 4), np.nan, np.float32)}
    with robot(not_finite) as (policy, _, _), pytest.raises(NoAnswer, match="expected finite"):
        policy(SEEN)


def test_what_openpi_cannot_do_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--wire", "openpi", "--ab"]) == 2
    assert "--wire=openpi: not with --ab" in capsys.readouterr().err
    monkeypatch.setattr(openpi_robot, "find_spec", lambda name: None)
    assert main(["--wire", "openpi"]) == 2
    assert "openpi_client, tree, typing_extensions not installed: pip install --no-deps" in capsys.readouterr().err
