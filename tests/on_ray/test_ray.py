"""`reflex ray` on this machine: the answers of `reflex serve`, and an episode stays with its replica."""

from __future__ import annotations

import json

import msgpack
import numpy as np
import pytest
from websockets.sync.client import connect

from on_ray.server import RayServer, observation
from reflex_runtime.demo.exports import export_dir
from serving.harness import Server

pytest.importorskip("ray.serve", reason="Ray is not installed: make test-ray installs it into its own environment")


def test_x7_a_replica_answers_as_reflex_serve_does(pair: RayServer) -> None:
    with Server(export_dir()) as alone:
        for body in (
            observation() | {"request_id": "one", "episode_id": "e"},
            observation() | {"request_id": "two", "nonsense": 1},
            {"request_id": "three"},
            b"{",
        ):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            ours = pair.ask("POST", "/act", data)
            theirs = alone.ask("POST", "/act", data, {"Content-Type": "application/json"})
            assert (ours.status, ours.json.keys()) == (theirs.status, theirs.json.keys())
            if ours.status == 200:
                assert np.allclose(ours.json["actions"], theirs.json["actions"], atol=1e-5)
                assert ours.headers["x-request-id"] == "one"
            else:
                assert ours.json["message"] == theirs.json["message"]
                assert ours.headers["x-request-id"] == ours.json["request_id"]
        for path in ("/health", "/healthz", "/config", "/openapi.json", "/docs", "/dashboard", "/nowhere"):
            ours, theirs = pair.ask("GET", path), alone.ask("GET", path)
            assert (ours.status, ours.headers["content-type"]) == (theirs.status, theirs.headers["content-type"]), path
        assert b"reflex_requests_total" in pair.ask("GET", "/metrics").body


def test_x7_an_episode_stays_with_its_replica_however_it_is_named(pair: RayServer) -> None:
    first = {f"ep-{n}": pair.act(episode_id=f"ep-{n}").replica for n in range(24)}
    assert len(set(first.values())) == 2
    for episode, replica in first.items():
        assert pair.act(episode_id=episode, robot_id="any").replica == replica
        assert pair.ask("POST", "/act", observation(), X_Reflex_Episode=episode).replica == replica
        packed = msgpack.packb(observation() | {"episode_id": episode})
        assert pair.ask("POST", "/act", packed, Content_Type="application/msgpack").replica == replica
        told = pair.ask("POST", f"/episodes/{episode}/outcome", {"success": True})
        assert (told.status, told.replica) == (200, replica)


def test_x7_a_websocket_is_served_by_one_replica(pair: RayServer) -> None:
    said = {"observation/state": np.zeros(4, np.float32).tobytes(), "prompt": "open the door"}
    assert said
    with connect(f"ws://127.0.0.1:{pair.port}/", proxy=None, compression=None) as websocket:
        assert msgpack.unpackb(websocket.recv())  # the policy's metadata, unasked
        websocket.send(msgpack.packb({"nonsense": 1}))
        assert "nonsense" in str(websocket.recv())


def test_x7_ctrl_c_ends_every_process() -> None:
    with RayServer("--port", "0", "--replicas", "1", "--replica-cpus", "0.5") as server:
        assert server.act(episode_id="e").status == 200
        assert server.end() == 0
