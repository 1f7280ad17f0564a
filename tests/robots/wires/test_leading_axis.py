"""One message with the observations of N robots, as simulators have them: arrays with a leading axis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import json_numpy
import numpy as np
import pytest
from openpi_client import msgpack_numpy
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from reflex_runtime.robots import Export
from reflex_runtime.robots.serving.question import ObservationReader
from serving.exports import ACTIONS, CHUNK, expected, write_tiny
from serving.harness import Answer, Server
from serving.requests import WAITING, busy, calm, recorded

pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")

N = 5
PICTURES = np.full((N, 6, 8, 3), 7, np.uint8)
STATES = np.array([[0.1 * i, -0.1 * i] for i in range(N)])
WANTED = np.stack([expected(state.tolist(), i) for i, state in enumerate(STATES)])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of two cameras and a state, with names of LIBERO."""
    folder = tmp_path_factory.mktemp("seeing")
    return write_tiny(folder / "export", cameras=("image", "image_wrist"), wires="openpi/libero")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with Server(root) as server:
        yield server


@contextmanager
def simulator(server: Server, query: str = "") -> Iterator[WebsocketClientPolicy]:
    """openpi's own client."""
    client = WebsocketClientPolicy(f"ws://127.0.0.1:{server.port}/{query}")
    with closing(client._ws):
        yield client


def seen(**more: Any) -> dict[str, Any]:
    """What N robots see, each with a seed of its own."""
    pictures = {"observation/image": PICTURES, "observation/wrist_image": PICTURES}
    return pictures | {"observation/state": STATES, "prompt": "go", "reflex/seed": np.arange(N)} | more


def refused(client: WebsocketClientPolicy, sent: dict[str, Any]) -> Any:
    with pytest.raises(RuntimeError, match="Error in inference server") as info:
        client.infer(sent)
    return json.loads(str(info.value).split("\n", 1)[1])


def post(server: Server, observation: dict[str, Any], quoted: bool = False) -> Answer:
    body = json_numpy.dumps({"seed": list(range(N))} | observation)
    if quoted:
        body = json.dumps({"encoded": body})
    return server.ask("POST", "/act", body.encode(), {"Content-Type": "application/json"})


# -- openpi ------------------------------------------------------------------------------------------------------------


def test_w60_the_stock_client_gets_the_actions_of_all_with_the_axis(server: Server) -> None:
    before = server.metrics()("reflex_requests_total", outcome="ok", wire="openpi")
    with simulator(server) as client:
        answer = client.infer(seen())
        assert answer["actions"].shape == (N, CHUNK, ACTIONS)
        np.testing.assert_allclose(answer["actions"], WANTED, atol=1e-5)
        assert len({told["request_id"] for told in answer["reflex"]}) == N
        assert answer["server_timing"]["infer_ms"] > 0
        channels_first = seen() | {"observation/image": PICTURES.transpose(0, 3, 1, 2)}
        np.testing.assert_allclose(client.infer(channels_first)["actions"], WANTED, atol=1e-5)
    assert server.metrics()("reflex_requests_total", outcome="ok", wire="openpi") - before == 2 * N


def test_w60_one_robot_with_the_axis_is_answered_with_it_and_a_flat_state_as_before(server: Server, tiny: Path) -> None:
    one = {name: value[:1] for name, value in seen().items() if name != "prompt"} | {"prompt": "go"}
    with simulator(server) as client:
        np.testing.assert_allclose(client.infer(one)["actions"], WANTED[:1], atol=1e-5)
        plain = {"observation/image": PICTURES[0], "observation/wrist_image": PICTURES[0], "reflex/seed": 0}
        for state in (STATES[0], STATES[:1]):
            answer = client.infer(plain | {"observation/state": state})
            np.testing.assert_allclose(answer["actions"], WANTED[0], atol=1e-5)
    with Server(tiny) as blind, simulator(blind) as client:
        answer = client.infer({"observation/state": STATES[:1], "reflex/seed": [0]})
        np.testing.assert_allclose(answer["actions"], WANTED[:1], atol=1e-5)


def test_w60_texts_seeds_and_resets_are_of_each_or_of_all(root: Path, tmp_path: Path) -> None:
    with Server(root, "--record", str(tmp_path)) as server, simulator(server, "?robot_id=sim") as client:
        for more in (
            {"prompt": list("abcde")},
            {"prompt": np.array(list("abcde")), "reset": np.array([True, False, False, False, True])},
            {"prompt": ["z", *"bcde"]},
            {"prompt": ["z", *"bcde"], "reset": True, "reflex/request_id": "r"},
        ):
            client.infer(seen(**more))
        server.stop()
    found = recorded(tmp_path)
    by_robot: dict[str | None, list[Any]] = {line.robot_id: [] for line in found}
    for line in found:
        by_robot[line.robot_id].append((line.instruction, str(line.episode_id).partition("/")[2], line.seed))
    texts = ["abcde", "abcde", "zbcde", "zbcde"]
    resets = ["00000", "10001", "20001", "31112"]
    for i in range(N):
        epochs = [f"{i}#{of[i]}".removesuffix("#0") for of in resets]
        assert by_robot[f"sim/{i}"] == [(text[i], epoch, i) for text, epoch in zip(texts, epochs, strict=True)]
    assert sorted(line.request_id for line in found[-N:]) == [f"r.{i}" for i in range(N)]


def test_w60_episodes_with_ids_are_known_wherever_they_stand(root: Path, tmp_path: Path) -> None:
    with Server(root, "--record", str(tmp_path)) as server, simulator(server) as client:
        for ids, resets in (("abcde", "00000"), ("abcde", "01000"), ("edcba", "00000"), ("e", "1")):
            rows = len(ids)
            sent = {name: value[:rows] if name != "prompt" else value for name, value in seen().items()}
            client.infer(sent | {"episode_id": list(ids), "reset": [reset == "1" for reset in resets]})
        client.infer(seen() | {"session_id": "s"})
        server.stop()
    kept = recorded(tmp_path)
    found = [str(line.episode_id) for line in kept]
    robots = [str(line.robot_id).rpartition("/")[2] for line in kept[: 3 * N + 1]]  # what is kept is a robot's
    assert robots == [episode[0] for episode in found[: 3 * N + 1]]
    assert [sorted(found[at : at + N]) for at in (0, N, 2 * N)] == [
        ["a", "b", "c", "d", "e"], ["a", "b#1", "c", "d", "e"], ["a", "b#1", "c", "d", "e"],
    ]  # fmt: skip
    assert found[3 * N] == "e#1"
    assert sorted(found[-N:]) == [f"s/{i}" for i in range(N)]


@pytest.mark.parametrize(
    ("change", "field", "told"),
    [
        ({"observation/state": STATES[:3]}, "observation/state", "observation/state 3"),
        ({"observation/state": STATES[0]}, "observation/state", "observation/state none"),
        ({"observation/wrist_image": PICTURES[0]}, "observation/wrist_image", "observation/image 5, observation/wrist"),
        ({"prompt": ["a", "b"]}, "prompt", "prompt 2"),
    ],
)
def test_w60_parts_that_differ_are_named(server: Server, change: dict[str, Any], field: str, told: str) -> None:
    with simulator(server) as client:
        error = refused(client, seen() | change)
        assert (error["error"], error["field"]) == ("invalid_request", field)
        assert "leading axis" in error["message"]
        assert told in error["message"]


def test_w60_robots_in_a_message_are_bounded(tiny: Path) -> None:
    with Server(tiny) as server, simulator(server) as client:
        most = client.infer({"observation/state": np.zeros((256, 2))})
        assert len(most["actions"]) == 256
        error = refused(client, {"observation/state": np.zeros((257, 2))})
        assert (error["error"], error["field"]) == ("invalid_request", "observation/state")
        assert "has 257 robots, a message may have 256" in error["message"]
        assert refused(client, {"observation/state": np.zeros((0, 2))})["error"] == "invalid_request"
        many = {f"name {i}": 0 for i in range(9000)}  # two million entries of maps
        error = refused(client, many | {"observation/state": np.zeros((256, 2))})
        assert "9001 names of 256 robots" in error["message"]


def test_w60_one_that_is_wrong_is_named_and_takes_the_others_along(tiny: Path) -> None:
    states = STATES.copy()
    states[3, 0] = np.nan
    with Server(tiny, held=True) as server, busy(server), simulator(server) as client:
        error = refused(client, {"observation/state": states})
        assert (error["error"], error["field"], error["row"]) == ("invalid_request", "state", 3)
        assert error["message"].startswith("row 3: state: holds NaN")
        server.reach(lambda m: m(WAITING) == 0)
        assert server.metrics()("reflex_requests_total", outcome="cancelled", wire="openpi") == N - 1
        server.release()
        answer = client.infer({"observation/state": STATES, "reflex/seed": list(range(N))})
        np.testing.assert_allclose(answer["actions"], WANTED, atol=1e-5)
        assert calm(server)


def test_w60_who_leaves_takes_all_along_and_a_deadline_is_for_all(tiny: Path) -> None:
    with Server(tiny, held=True) as server, busy(server):
        with simulator(server) as client:
            client._ws.send(msgpack_numpy.packb({"observation/state": STATES}))
            server.reach(lambda m: m(WAITING) == N)
        server.reach(lambda m: m(WAITING) == 0)
        with simulator(server) as client:
            error = refused(client, {"observation/state": STATES, "reflex/deadline_ms": 200})
            assert error["error"] == "deadline_exceeded"
        server.release()
        assert calm(server)


def test_w60_they_share_batches_and_are_robots_of_their_own(tiny: Path) -> None:
    with Server(tiny, "--latest-only", held=True) as server, busy(server), simulator(server) as client:
        client._ws.send(msgpack_numpy.packb({"observation/state": STATES, "reflex/seed": np.arange(N)}))
        server.reach(lambda m: m(WAITING) == N)
        server.release()
        answer = msgpack_numpy.unpackb(client._ws.recv())
        np.testing.assert_allclose(answer["actions"], WANTED, atol=1e-5)
        assert {told["batch"]["size"] for told in answer["reflex"]} == {N}


def test_w60_parts_of_a_state_may_be_single_numbers(tmp_path: Path) -> None:
    """A gripper is [N], [N, 1] or a list beside joints [N, 7]."""
    names = ["observation/joint_position", "observation/gripper_position"]
    root = write_tiny(tmp_path / "e", weights=np.eye(3, dtype=np.float32), wires={"openpi": {"state": names}})
    export = Export.load(root)
    reader = ObservationReader(export, export.wires["openpi"])
    joints = np.arange(6.0).reshape(3, 2)
    for gripper in (np.array([7.0, 8.0, 9.0]), np.array([[7.0], [8.0], [9.0]]), [7.0, 8.0, 9.0], [[7.0], [8.0], [9.0]]):
        rows = reader.split({"observation/joint_position": joints, "observation/gripper_position": gripper})
        assert rows is not None
        states = [reader.read(row)[1] for row in rows.values()]
        assert np.array_equal(np.array(states), np.column_stack([joints, [7.0, 8.0, 9.0]]))
    one = {"observation/joint_position": joints[0], "observation/gripper_position": np.float64(7.0)}
    assert reader.split(one) is None


def test_w60_ids_may_come_under_two_names(root: Path) -> None:
    """Of an episode and of a session: those are used that a single robot's would be."""
    export = Export.load(root)
    reader = ObservationReader(export, export.wires["openpi"])
    for sessions in (list("abcde"), ["s"] * N, list("vwxyz")):
        rows = reader.split(seen(episode_id=list("abcde"), session_id=sessions))
        assert rows is not None
        assert [(name, row["episode_id"], row["session_id"]) for name, row in rows.items()] == [
            (name, name, session) for name, session in zip("abcde", sessions, strict=True)
        ]


# -- json-numpy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quoted", [False, True])
def test_w60_openvla_gets_the_first_action_of_each(server: Server, quoted: bool) -> None:
    sent = {"image": PICTURES, "image_wrist": PICTURES, "state": STATES, "instruction": ["go"] * N}
    answer = post(server, sent, quoted)
    assert answer.status == 200, answer.body
    found = json_numpy.loads(json.loads(answer.body) if quoted else answer.body)
    np.testing.assert_allclose(found, WANTED[:, 0], atol=1e-5)


def test_w60_oft_gets_for_each_step_the_actions_of_all(server: Server, tmp_path: Path, root: Path) -> None:
    sent = {"full_image": PICTURES, "image_wrist": PICTURES, "state": STATES.tolist(), "instruction": "go"}
    answer = post(server, sent)
    assert answer.status == 200, answer.body
    found = json_numpy.loads(answer.body)
    assert len(found) == CHUNK
    np.testing.assert_allclose(np.stack(found), WANTED.transpose(1, 0, 2), atol=1e-5)
    with Server(root, "--latest-only", "--record", str(tmp_path)) as recording:
        assert post(recording, sent | {"episode_id": list("abcde"), "robot_id": "sim"}).status == 200
        assert post(recording, sent).status == 200  # no robot has a name, and none takes the place of another
        recording.stop()
    kept = recorded(tmp_path)
    assert {(line.robot_id, line.episode_id) for line in kept[:N]} == {(f"sim/{name}", name) for name in "abcde"}
    assert {(line.robot_id, line.episode_id) for line in kept[N:]} == {(None, None)}


def test_w60_over_http_an_error_names_the_row_and_the_message_is_no_request(server: Server) -> None:
    def counted() -> float:
        return server.metrics()("reflex_requests_total", wire="json-numpy")

    before = counted()
    sent = {"image": PICTURES, "image_wrist": PICTURES, "state": STATES, "instruction": "go"}
    assert post(server, sent).status == 200
    assert counted() - before == N
    states = STATES.copy()
    states[2, 1] = np.inf
    answer = post(server, sent | {"state": states})
    assert (answer.status, answer.json["row"], answer.json["field"]) == (422, 2, "state")
    answer = post(server, sent | {"state": STATES[:2]})
    assert (answer.status, answer.json["field"]) == (422, "state")
    assert "image 5" in answer.json["message"]
