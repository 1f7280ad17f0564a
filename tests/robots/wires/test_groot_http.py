"""GR00T over HTTP: observations on POST /act, without --gr00t."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import json_numpy
import numpy as np
import pytest

from robots.wires.groot_clients import BLOCK, PICTURE, nested, want
from serving.exports import CHUNK, write_tiny
from serving.harness import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root: Path = tmp_path_factory.mktemp("seeing") / "export"
    with Server(write_tiny(root, cameras=("image",), wires={"gr00t": BLOCK})) as server:
        yield server


def as_json(array: Any, key: str = "__ndarray__") -> dict[str, Any]:
    array = np.asarray(array)
    dtype = str(array.dtype) if key == "__ndarray__" else array.dtype.str
    return {key: base64.b64encode(array.tobytes()).decode(), "dtype": dtype, "shape": array.shape}


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("key", ["__ndarray__", "__numpy__"])
def test_w30_over_http_groups_come_as_the_client_reads_them(server: Server, key: str, quoted: bool) -> None:
    sent = {
        "video.ego_view": as_json(PICTURE[None], key),
        "state.arm": as_json(np.array([[0.3]]), key),
        "state.gripper": [[-0.3]],
        "annotation.human.action.task_description": ["open the door"],
    }
    body = {"observation": sent, "seed": 5}
    answer = server.post({"encoded": json.dumps(body)} if quoted else body)
    assert answer.status == 200, answer.body
    groups = json_numpy.loads(answer.body) if key == "__numpy__" else answer.json
    assert set(groups) == {"action.arm", "action.gripper"}
    assert {type(group) for group in groups.values()} == {np.ndarray if key == "__numpy__" else list}
    both = np.concatenate([groups["action.arm"], groups["action.gripper"]], 1)
    np.testing.assert_allclose(both, want(3, 5), atol=1e-5)
    assert server.metrics()("reflex_requests_total", outcome="ok", wire="json-numpy") > 0


def test_w30_over_http_names_may_be_nested(server: Server) -> None:
    seen = nested(3)
    sent = {
        "video": {"ego_view": as_json(seen["video"]["ego_view"])},
        "state": {name: as_json(array) for name, array in seen["state"].items()},
        "language": seen["language"],
    }
    answer = server.post({"observation": sent, "seed": 5, "request_id": "r", "robot_id": "arm"})
    assert answer.status == 200, answer.body
    assert np.shape(answer.json["arm"]) == (1, CHUNK, 1)
    np.testing.assert_allclose(np.array(answer.json["gripper"])[0, :, 0], want(3, 5)[:, 1], atol=1e-5)
    assert answer.headers["x-request-id"] == "r"


def test_w32_over_http_rows_are_requests_and_are_answered_stacked(server: Server) -> None:
    seen = nested(1, 2, 3)
    sent = {f"{kind}.{name}": as_json(array) for kind in ("video", "state") for name, array in seen[kind].items()}
    answer = server.post({"observation": sent | {"annotation": ["open the door"]}, "seed": 5, "robot_id": "env"})
    assert answer.status == 200, answer.body
    gripper = np.array(answer.json["action.gripper"])
    assert gripper.shape == (3, CHUNK, 1)
    np.testing.assert_allclose(gripper[..., 0], [want(i, 5)[:, 1] for i in (1, 2, 3)], atol=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"observation": {}}, 422, "video.ego_view: missing"),
        ({"observation": {"state.arm": "x"}}, 422, "state.arm: must be an array of numbers"),
        ({"observation": {"state.arm": as_json(np.zeros((1, 1, 1))) | {"dtype": "object"}}}, 400, "dtype"),
        ({"observation": {"state.arm": as_json(np.zeros((1, 1, 1))) | {"dtype": []}}}, 400, "dtype"),
        ({"observation": {"state": 5, "video": {}}}, 422, "state: must be a map"),
        ({"observation": {"state.arm": as_json(np.zeros((2, 1, 1)))}}, 422, "row 0: video.ego_view: missing"),
        ({"observation": 5}, 422, "observation"),
    ],
)
def test_w33_over_http_errors_are_statuses(server: Server, body: Any, status: int, why: str) -> None:
    answer = server.post(body)
    assert answer.status == status, answer.body
    assert why in answer.json["message"]


def test_w36_over_http_reset_is_answered(server: Server) -> None:
    answer = server.ask("POST", "/reset", b"")
    assert (answer.status, answer.json) == (200, {})
