"""openpi's websocket: the stock client, unmodified, against a real server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgpack_numpy as packaged
import numpy as np
import PIL.Image
import pytest
from openpi_client import action_chunk_broker, msgpack_numpy
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from websockets.exceptions import ConnectionClosed, InvalidStatus

from reflex_runtime.observe.journal import read_journal
from reflex_runtime.robots.serving.handler import ROWS, RequestHandler
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.robots.wires.common import Episodes
from reflex_runtime.robots.wires.openpi import OpenpiSession
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import InvalidRequest
from reflex_runtime.web.request import SocketMessage
from serving.exports import ACTIONS, CHUNK, expected, write_tiny
from serving.harness import STATE, Server
from serving.in_process import with_app
from serving.requests import AGELESS, WAITING, busy, calm, loads_after, marked, recorded

# The stock client was written for an earlier version of websockets.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")

PICTURE = np.full((6, 8, 3), 7, np.uint8)
MORE = {"observation/image": PICTURE, "observation/wrist_image": PICTURE}
PATHS = ("/", "/openpi/policy", "/v1/realtime/robot/openpi")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of two cameras and a state, for the observations of LIBERO."""
    root = tmp_path_factory.mktemp("seeing")
    return write_tiny(root / "export", cameras=("image", "image_wrist"), wires="openpi/libero")


@contextmanager
def robot(server: Server, url: str = "/", key: str | None = None) -> Iterator[WebsocketClientPolicy]:
    client = WebsocketClientPolicy(f"ws://127.0.0.1:{server.port}{url}", api_key=key)
    with closing(client._ws):
        yield client


def seen(i: int = 0, **more: Any) -> dict[str, Any]:
    """What robot i sees, and what it asks for."""
    own = {f"reflex/{name}": value for name, value in more.items()}
    return {"observation/state": np.array([0.1 * i, -0.1 * i]), "prompt": "go", "reflex/seed": i} | own


def right(answer: Any, i: int = 0) -> bool:
    return bool(np.allclose(answer["actions"], expected([0.1 * i, -0.1 * i], i), atol=1e-5))


def refused(ask: Callable[[], Any]) -> Any:
    """Our error, out of the exception that the stock client raises."""
    with pytest.raises(RuntimeError, match="Error in inference server") as info:
        ask()
    return json.loads(str(info.value).split("\n", 1)[1])


def test_w7_the_stock_client_gets_the_answer_of_act_on_every_path(seeing: Path) -> None:
    with Server(seeing) as server:
        assert (server.get("/healthz").status, server.get("/healthz").body) == (200, b"OK\n")
        plain = server.post({"state": STATE, "seed": 3, "image": _png(), "image_wrist": _png()}).json
        for path in PATHS:
            with robot(server, path) as client:
                told = client.get_server_metadata()["reflex"]
                assert told["images"] == {"observation/image": [6, 8], "observation/wrist_image": [6, 8]}
                assert told["state"] == {"names": ["observation/state"], "dim": 2}
                assert told["actions"] == [CHUNK, ACTIONS]
                sent = MORE | {"observation/state": np.array(STATE), "prompt": b"go", "reflex/seed": 3}
                first, second = client.infer(sent), client.infer(sent)
                assert first["actions"].dtype == np.float32
                assert first["actions"].tolist() == second["actions"].tolist() == np.float32(plain["actions"]).tolist()
                assert "prev_total_ms" not in first["server_timing"]
                assert second["server_timing"]["prev_total_ms"] > 0
                arrays = [name for name, value in first.items() if isinstance(value, np.ndarray)]
                assert arrays == ["actions"]  # whatever is an array is cut into steps by stock clients
        assert "POST /act" in server.get("/").json["paths"]  # what is there, for people who look


def _png() -> str:
    file = io.BytesIO()
    PIL.Image.fromarray(PICTURE).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_w7_a_client_that_packs_with_msgpack_numpy_is_answered_in_its_form(seeing: Path) -> None:
    """As DreamZero's client of MolmoSpaces does. One and the same socket may send both."""
    with Server(seeing) as server, robot(server) as client:
        sent = MORE | {"observation/state": np.array(STATE), "prompt": "go", "reflex/seed": np.int64(3)}
        wanted = client.infer(sent)["actions"]
        client._ws.send(packaged.packb(sent))
        answer = packaged.unpackb(client._ws.recv())
        assert answer["actions"].dtype == np.float32
        assert answer["actions"].tolist() == wanted.tolist()
        client._ws.send(packaged.packb({"batch": [sent, {"prompt": "go"}]}))
        one, wrong = packaged.unpackb(client._ws.recv())["batch"]
        assert one["actions"].shape == wanted.shape
        assert wrong["error"]["error"] == "invalid_request"
        assert client.infer(sent)["actions"].tolist() == wanted.tolist()


def test_w7_the_broker_of_the_stock_client_hands_out_every_step(tiny: Path) -> None:
    with Server(tiny) as server, robot(server) as client:
        broker = action_chunk_broker.ActionChunkBroker(client, action_horizon=CHUNK)
        steps = [broker.infer(seen())["actions"] for _ in range(CHUNK)]
        assert np.allclose(steps, expected([0.0, 0.0], 0), atol=1e-5)


def test_w7_a_client_that_comes_early_waits_for_the_policy(tiny: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    wait = loads_after(gate)
    with ThreadPoolExecutor(1) as pool, Server(tiny, before=wait, until="http://") as server:
        met = threading.Event()

        def meet() -> Any:
            with robot(server) as client:
                met.set()
                return client.infer(seen(1))

        answer = pool.submit(meet)
        server.reach(lambda m: True)
        assert server.get("/healthz").status == 503
        assert not met.is_set()
        gate.write_text("go")
        assert right(answer.result(), 1)


def test_w7_a_policy_that_cannot_be_started_closes_the_websocket(tiny: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    wait = f"""
import reflex_runtime.robots.serving.runtime as runtime
def _late(self):
    with open({str(gate)!r}) as gate:
        gate.read()
    raise RuntimeError("broken")
runtime.PolicyRuntime._load = _late
"""
    with ThreadPoolExecutor(1) as pool, Server(tiny, before=wait, until="http://") as server:

        def meet() -> None:
            with robot(server):
                pass

        met = pool.submit(meet)
        server.get("/health")
        gate.write_text("go")
        with pytest.raises(ConnectionClosed) as info:
            met.result()
        assert info.value.rcvd is not None
        assert info.value.rcvd.code == 1011


def test_w2_the_stock_clients_key_is_taken(tiny: Path) -> None:
    with Server(tiny, "--api-key", "secret") as server:
        with robot(server, key="secret") as client:
            assert right(client.infer(seen(2)), 2)
        for key in (None, "wrong"):
            with pytest.raises(InvalidStatus) as info, robot(server, key=key):
                pass
            assert info.value.response.status_code == 401
        assert server.get("/healthz").status == 200


def test_w11_every_error_is_a_text_and_the_socket_goes_on(tiny: Path) -> None:
    with Server(tiny, "--max-body-bytes", "4096") as server, robot(server) as client:
        for bad, code, field in [
            ({"reflex/nonsense": 1}, "invalid_request", "reflex/nonsense"),
            ({"observation/state": np.zeros(3)}, "invalid_request", "state"),
            ({"observation/state": np.array([np.nan, 0.0])}, "invalid_request", "state"),
            ({"observation/state": None}, "invalid_request", "observation/state"),
            ({"reflex/deadline_ms": -1}, "invalid_request", "deadline_ms"),
            ({"reflex/robot_id": "x" * 300}, "invalid_request", "robot_id"),
            ({"batch": [seen()]}, "invalid_request", None),
        ]:
            error = refused(lambda bad=bad: client.infer(seen() | bad))
            assert (error["error"], error.get("field")) == (code, field)
            assert error["retry_safe"] is False
            assert error["request_id"]
        near = refused(lambda: client.infer(seen() | {"reflex/deadline": 200}))
        assert near["message"] == "reflex/deadline: no such field; did you mean reflex/deadline_ms?"
        assert right(client.infer(seen(3) | {"cartesian_position": np.zeros(6)}), 3)
        assert server.metrics()("reflex_requests_total", outcome="client_error") == 8
        with pytest.raises(ConnectionClosed) as info:
            client.infer(seen() | {"picture": np.zeros(5000, np.uint8)})
        assert info.value.rcvd is not None
        assert info.value.rcvd.code == 1009
        assert calm(server)


def test_w11_a_full_queue_and_an_expired_deadline_are_texts(tiny: Path) -> None:
    with Server(tiny, "--max-queue", "1", held=True) as server, busy(server):
        with robot(server, "/?deadline_ms=200") as late, robot(server) as full:
            with server.burst([{"state": STATE}]) as first:
                first.send()
                server.reach(lambda m: m(WAITING) == 1)
                error = refused(lambda: full.infer(seen()))
                assert (error["error"], error["retry_safe"], error["max_queue"]) == ("queue_full", True, 1)
                first.hang_up(range(1))
                server.reach(lambda m: m(WAITING) == 0)
            assert refused(lambda: late.infer(seen()))["error"] == "deadline_exceeded"
            server.release()
            assert right(full.infer(seen(1)), 1)
            assert right(late.infer(seen(2, deadline_ms=60_000)), 2)


def test_w11_what_cannot_be_in_time_is_refused_at_once(tiny: Path) -> None:
    with Server(tiny, held=True, takes="60.0") as server, robot(server) as client:
        for i in range(4):
            client.infer(seen(i))
        with busy(server):  # an estimate holds while a batch runs
            error = refused(lambda: client.infer(seen(deadline_ms=30_000)))
            assert (error["error"], error["retry_safe"]) == ("deadline_unreachable", True)


def test_w11_a_newer_observation_of_the_robot_takes_the_place_of_the_one_that_waits(tiny: Path) -> None:
    with ThreadPoolExecutor(1) as pool, Server(tiny, "--latest-only", held=True) as server, busy(server):
        with robot(server, "/?robot_id=arm") as old, robot(server, "/?robot_id=arm") as new:
            waiting = pool.submit(old.infer, seen(1))
            server.reach(lambda m: m(WAITING) == 1)
            new._ws.send(msgpack_numpy.packb(seen(2)))
            assert refused(waiting.result)["error"] == "superseded"
            server.release()
            assert right(msgpack_numpy.unpackb(new._ws.recv()), 2)


def test_w11_a_model_that_fails_is_a_text_for_its_request_alone(tiny: Path) -> None:
    ids = [f"request-{i}" for i in range(100)]
    bad = min(marked("raise", 0.05, ids))
    fine = min(set(ids) - marked("raise", 0.05, ids))
    with Server(tiny, "--inject-fault", "prod:raise:0.05") as server, robot(server) as client:
        error = refused(lambda: client.infer(seen(request_id=bad)))
        assert (error["error"], error["request_id"], error["retry_safe"]) == ("processor_failed", bad, False)
        assert right(client.infer(seen(1, request_id=fine)), 1)
        metrics = server.metrics()
        assert metrics("reflex_requests_total", outcome="failed", wire="openpi") == 1
        assert metrics("reflex_requests_total", outcome="ok", wire="openpi") == 1


def test_w10_an_urgent_robot_goes_first(tiny: Path) -> None:
    with Server(tiny, "--max-batch-size", "1", before=AGELESS, held=True) as server, busy(server):
        with robot(server, "/?priority=background") as last, robot(server) as second, robot(server) as first:
            for place, (client, more) in enumerate(((last, {}), (second, {}), (first, {"priority": "urgent"})), 1):
                client._ws.send(msgpack_numpy.packb(seen(**more)))
                server.reach(lambda m, place=place: m(WAITING) == place)
            server.release()
            answers = [msgpack_numpy.unpackb(client._ws.recv()) for client in (first, second, last)]
            ids = [answer["batch"]["id"] for answer in answers]
            assert ids == sorted(ids)
            assert len(set(ids)) == 3


def test_w10_identity_and_limits_come_from_the_query_and_from_the_observation(tiny: Path, tmp_path: Path) -> None:
    with Server(tiny, "--record", str(tmp_path)) as server:
        with robot(server, "/?robot_id=arm%201&episode_id=e1&priority=urgent&deadline_ms=60000") as client:
            client.infer(seen(1))
            client.infer(seen(2, robot_id="arm 2", episode_id="e2", request_id="r2", deadline_ms="50000"))
            client.infer(seen(3) | {"session_id": "e3"})
            client.infer(seen(4) | {"prompt": "stop"})
        for query in ("robot=arm", "robot_id=a%0ab", "episode_id=%7f", f"robot_id={'a' * 257}", "deadline_ms=soon"):
            with pytest.raises(InvalidStatus) as info, robot(server, f"/?{query}"):
                pass
            assert info.value.response.status_code == 422
            assert json.loads(info.value.response.body or b"")["field"] == query.partition("=")[0]
        server.stop()
    (line,) = [line for line in server.log if "a websocket was refused: 422" in line]
    assert "unknown field `robot`" in line
    found = recorded(tmp_path)
    assert [(f.robot_id, f.episode_id, f.seed) for f in found] == [
        ("arm 1", "e1", 1), ("arm 2", "e2", 2), ("arm 1", "e3", 3), ("arm 1", "e1", 4),
    ]  # fmt: skip


def test_w10_a_socket_is_a_robot_and_another_instruction_or_a_reset_an_episode(tiny: Path, tmp_path: Path) -> None:
    with Server(tiny, "--record", str(tmp_path)) as server:
        with robot(server) as first, robot(server) as second:
            for prompt, more in (("a", {}), ("a", {}), ("b", {}), ("b", {"reset": True}), ("b", {"reset": False})):
                first.infer(seen() | {"prompt": prompt} | more)
            second.infer(seen())
        server.stop()
    found = recorded(tmp_path)
    own = found[0].robot_id
    assert own is not None
    assert own.startswith("ws-")
    assert [f.robot_id for f in found[:5]] == [own] * 5
    assert [f.episode_id for f in found[:5]] == [own, own, f"{own}#1", f"{own}#2", f"{own}#2"]
    assert found[5].robot_id == found[5].episode_id != own


def test_w10_names_and_instructions_of_episodes_are_bounded_and_not_kept() -> None:
    episodes = Episodes("own")
    with pytest.raises(InvalidRequest, match="episode_id: longer than 256 bytes"):
        episodes.of("e" * 257, "go")
    long = "walk " * 3000
    assert (episodes.of(None, long), episodes.of(None, long), episodes.of(None, "stop")) == ("own", "own", "own#1")
    assert long not in vars(episodes).values()


@pytest.mark.parametrize("turned", [False, True])
def test_w8_versions_with_other_cameras_get_theirs(tmp_path: Path, turned: bool) -> None:
    one = write_tiny(tmp_path / "one", cameras=("image",), wires="openpi/libero")
    two = write_tiny(tmp_path / "two", cameras=("image", "image_wrist"), wires="openpi/libero", num_denoising_steps=2)
    a, b = (two, one) if turned else (one, two)
    record = tmp_path / "record"
    both = ("--policy-a", str(a), "--policy-b", str(b), "--no-rtc", "--split", "0", "--record", str(record))
    with Server(a, *both) as server:  # b answers
        with robot(server) as client:
            state = {"observation/state": np.array(STATE)}
            client.infer(MORE | state)
            wanting = dict(MORE, **state)
            del wanting["observation/wrist_image"]
            if turned:
                with pytest.raises(RuntimeError, match="observation/wrist_image: missing"):
                    client.infer(wanting)  # a says what an observation holds
            else:
                with pytest.raises(RuntimeError, match="image_wrist: missing"):
                    client.infer(wanting)
        server.stop()
    (file,) = record.iterdir()
    first = read_journal(file).requests[0]
    assert (first.slot, first.outcome, sorted(first.request.hashes())) == ("b", "ok", ["image", "image_wrist"])


def test_w9_pictures_of_floats_with_channels_first_are_recorded_as_they_were_seen(seeing: Path, tmp_path: Path) -> None:
    with Server(seeing, "--record", str(tmp_path), "--record-images", "full") as server, robot(server) as client:
        wrist = np.arange(6 * 8 * 3, dtype=np.float32).reshape(3, 6, 8) / 255
        sent = {"observation/image": PICTURE, "observation/wrist_image": wrist, "observation/state": np.array(STATE)}
        client.infer(sent)
        server.stop()
    (asked,) = recorded(tmp_path)
    kept = {name: np.asarray(PIL.Image.open(io.BytesIO(data))) for name, data in asked.images().items()}
    assert (kept["image"] == PICTURE).all()
    assert (kept["image_wrist"] == (wrist * 255).astype(np.uint8).transpose(1, 2, 0)).all()


def test_w12_a_batch_is_as_many_requests_each_with_its_own_answer_or_error(tiny: Path) -> None:
    with Server(tiny) as server, robot(server) as client:
        found = client.infer({"batch": [seen(0), {"prompt": "no state"}, seen(2), 5, seen(4)]})["batch"]
        assert [right(found[i], i) for i in (0, 2, 4)] == [True] * 3
        assert [found[i]["error"]["error"] for i in (1, 3)] == ["invalid_request"] * 2
        assert len({item["request_id"] for item in found if "actions" in item}) == 3
        assert server.metrics()("reflex_requests_total", outcome="ok") == 3
        for bad in ([], "x", [seen()] * 300):
            assert refused(lambda bad=bad: client.infer({"batch": bad}))["error"] == "invalid_request"


def test_w12_its_rows_share_a_batch_of_the_scheduler(tiny: Path) -> None:
    with Server(tiny, held=True, takes="0.001 * len(batch)") as server, busy(server), robot(server) as client:
        client._ws.send(msgpack_numpy.packb({"batch": [seen(i) for i in range(8)]}))
        server.reach(lambda m: m(WAITING) == 8)
        server.release()
        found = msgpack_numpy.unpackb(client._ws.recv())["batch"]
        assert all(right(item, i) for i, item in enumerate(found))
        assert {item["batch"]["size"] for item in found} == {8}


def test_w12_a_large_batch_is_asked_in_several_turns_of_the_loop(tiny: Path) -> None:
    """The rows of one message: a neighbour is read in between, and a shutdown takes none of them back."""

    async def check(app: App, runtime: PolicyRuntime) -> None:
        socket: Any = types.SimpleNamespace(id="s", query={}, headers={}, app=app)
        robot, read = OpenpiSession(RequestHandler(runtime), socket), []
        question = robot._question

        def counted(observation: Any, part: str) -> Any:
            read.append(part)
            return question(observation, part)

        robot._question = counted  # type: ignore[method-assign]
        data = msgpack_numpy.packb({"batch": [seen(i) for i in range(100)]})
        answer = asyncio.ensure_future(robot.answer(SocketMessage(data, "m"), data))
        while runtime.active == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert runtime.active == 100
        assert read == [f"/{i}" for i in range(ROWS)]
        runtime.drain()
        answers = msgpack_numpy.unpackb(await answer)["batch"]
        assert all(right(answer, i) for i, answer in enumerate(answers))

    with_app(tiny, check)


def test_w12_latest_only_does_not_take_the_rows_of_a_batch_for_one_robot(tiny: Path) -> None:
    with Server(tiny, "--latest-only") as server, robot(server, "/?robot_id=env") as client:
        found = client.infer({"batch": [seen(i) for i in range(8)]})["batch"]
        assert all(right(item, i) for i, item in enumerate(found))


def test_w5_a_server_that_ends_answers_what_it_took_and_then_closes(tiny: Path) -> None:
    with Server(tiny, held=True) as server, robot(server) as busy_one, robot(server) as idle:
        busy_one._ws.send(msgpack_numpy.packb(seen(1, request_id="plug")))
        server.reach(lambda m: (m("reflex_in_flight_requests"), m(WAITING)) == (1, 0))
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining")
        assert refused(lambda: idle.infer(seen()))["error"] == "shutting_down"
        with pytest.raises(ConnectionClosed) as info:
            idle.infer(seen())
        assert info.value.rcvd is not None
        assert info.value.rcvd.code == 1001
        server.release()
        assert right(msgpack_numpy.unpackb(busy_one._ws.recv()), 1)
        with pytest.raises(ConnectionClosed) as info:
            busy_one._ws.recv()
        assert info.value.rcvd is not None
        assert info.value.rcvd.code == 1001
        assert server.wait() == 0


def test_w14_the_dialect_of_roboarena(tmp_path: Path) -> None:
    metadata = {
        "image_resolution": [6, 8], "needs_wrist_camera": False, "n_external_cameras": 1, "needs_stereo_camera": False,
        "needs_session_id": True, "action_space": "joint_position",
    }  # fmt: skip
    block = {
        "images": {"image": "observation/exterior_image_0_left"},
        "state": ["observation/joint_position", "observation/gripper_position"],
        "metadata": metadata, "dialect": "roboarena",
    }  # fmt: skip
    root = write_tiny(tmp_path / "export", cameras=("image",), wires={"openpi": block})
    record = tmp_path / "record"
    with Server(root, "--record", str(record)) as server, robot(server) as client:
        assert client.get_server_metadata() == metadata
        sent = {
            "observation/exterior_image_0_left": PICTURE, "observation/joint_position": np.array([0.1]),
            "observation/gripper_position": np.float64(-0.2), "observation/cartesian_position": np.zeros(6),
            "session_id": "s", "endpoint": "infer", "prompt": "go", "reflex/seed": 3,
        }  # fmt: skip
        assert np.allclose(client.infer(sent)["actions"], expected(STATE, 3), atol=1e-5)
        client._ws.send(msgpack_numpy.packb({"endpoint": "reset"}))
        assert client._ws.recv() == "reset successful"
        client.infer(sent)
        server.stop()
    assert [f.episode_id for f in recorded(record)] == ["s", "s#1"]
