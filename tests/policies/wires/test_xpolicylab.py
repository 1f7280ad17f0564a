"""XPolicyLab's websocket: the client of Inspect Robots, unmodified, against a real server."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from policies.wires.broken import FRESH, check
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe.journal_reader import read_journal
from reflex_runtime.policies import Export, InvalidRequest
from reflex_runtime.policies.policy.robot import WireMap
from reflex_runtime.policies.wires.xpolicylab import read
from reflex_runtime.policies.wires.xpolicylab_codec import LabFrame, decode, encode
from reflex_runtime.web.errors import ClientError
from serving.exports import CHUNK, expected, write_tiny
from serving.harness import PATIENCE, STATE, Server
from serving.pair import Pair, rollout, two
from serving.requests import WAITING, busy, calm, loads_after, marked

# The stock client was written for an earlier version of websockets.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")

PICTURE = np.full((6, 8, 3), 7, np.uint8)


def _stock(name: str) -> Any:
    """A module of the stock client, whose package cannot be imported without a simulator."""
    package = "inspect_robots_xpolicylab"
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = list(spec.submodule_search_locations or ())
    return importlib.import_module(f"{package}.{name}")


stock, client_of = _stock("_protocol"), _stock("_client").PolicyClient


@contextmanager
def robot(server: Server, query: str = "", evaluation: str = "eval") -> Iterator[Any]:
    url = f"ws://127.0.0.1:{server.port}/xpolicylab{query}"
    with closing(client_of(url, evaluation, connect_attempts=1, request_timeout_s=PATIENCE)) as client:
        client.connect()
        yield client


def seen(i: int = 0, **more: Any) -> dict[str, Any]:
    """What robot i sees, and what it asks for."""
    own = {f"reflex/{name}": value for name, value in more.items()}
    state = {"ee_joint_state": np.array([-0.1 * i]), "arm_joint_state": np.array([0.1 * i])}
    return {"data_format_version": "v1.0", "instruction": "go", "state": state, "reflex/seed": i} | own


def infer(client: Any, observation: Any, trial: str = "t") -> Any:
    return client.infer(observation, trial_id=trial, step=0).payload


def right(payload: Any, i: int = 0) -> bool:
    found = [[step["arm_joint_state"][0], step["ee_joint_state"][0]] for step in payload["actions"]]
    return bool(np.allclose(found, expected([0.1 * i, -0.1 * i], i), atol=1e-5))


def refused(ask: Callable[[], Any]) -> Any:
    with pytest.raises(stock.WsError) as info:
        ask()
    assert info.value.code == "infer_failed"
    return info.value.details


def test_w27_the_stock_client_gets_the_chunk_of_act_in_groups(tmp_path: Path) -> None:
    block = {"images": {"image": "cam_head"}, "state": [["arm", 1], ["hand", 1]], "actions": [["lift", 2]]}
    export = write_tiny(tmp_path / "export", cameras=("image", "cam_wrist"), wires={"xpolicylab": block})
    with Server(export) as server, robot(server) as client:
        picture = {"dtype": "|u1", "shape": [6, 8, 3], "data": PICTURE.tobytes()}
        body = msgpack.packb({"image": picture, "images": {"cam_wrist": picture}, "state": STATE, "seed": 3})
        headers = {"Content-Type": "application/msgpack", "Accept": "application/json"}
        plain = server.ask("POST", "/act", body, headers).json["actions"]
        color = {"color": PICTURE, "depth": np.zeros((6, 8)), "shape": (6, 8)}
        sent = {
            "vision": {"cam_head": color, "cam_wrist": color}, "instructions": ["go", "do go"], "reflex/seed": 3,
            "state": {"arm": np.array(STATE[:1]), "hand": STATE[1:], "mobile": {"base_pose": [0.0]}},
        }  # fmt: skip
        payload = infer(client, sent)
        assert [set(step) for step in payload["actions"]] == [{"lift"}] * CHUNK
        assert np.stack([step["lift"] for step in payload["actions"]]).tolist() == np.float32(plain).tolist()
        assert payload["latency_ms"] > 0
        assert server.metrics()("reflex_requests_total", outcome="ok", wire="xpolicylab") == 1


def test_w27_without_a_block_the_groups_are_those_of_the_joints(tiny: Path) -> None:
    with Server(tiny) as server, robot(server) as client:
        assert right(infer(client, seen(2)), 2)
        error = refused(lambda: infer(client, seen() | {"state": {"arm_joint_state": np.zeros(1)}}))
        assert error["message"] == "state: must be 2 numbers, came: state/arm_joint_state 1"


def test_w27_actions_that_are_no_joints_need_a_block(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "export", wires={"xpolicylab": {"state": [["a", 1], ["b", 1]]}})
    with Server(export) as server, robot(server) as client:
        assert [set(s) for s in infer(client, {"state": {"a": 0.0, "b": [0.1]}})["actions"]] == [{"a", "b"}] * CHUNK
    for wrong, why in (
        ({"state": [["a", 3]]}, "2 numbers together"), ({"actions": [["a", 1]]}, "2 numbers together"),
        ({"actions": [["a", 1], ["a", 1]]}, "different names"), ({"prompts": "x"}, "prompts"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"xpolicylab.*{why}"):
            Export.load(write_tiny(tmp_path / "wrong", wires={"xpolicylab": wrong}))
    wider = replace(Export.load(export), action_dim=3, x_dim=3)
    sent = {"state": {"arm_joint_state": np.zeros(1), "ee_joint_state": [0.0]}, "instructions": ["go", "do go"]}
    with pytest.raises(InvalidRequest, match=r"\(arm_joint_state 1, ee_joint_state 1\) do not make the 3 numbers"):
        read(wider, WireMap(), sent)
    observed, groups = read(wider, WireMap(actions=(("a", 3),)), sent)
    assert (observed[2], groups) == ("go", (("a", 3),))


def test_w28_every_message_has_its_answer(tiny: Path) -> None:
    with Server(tiny) as server, robot(server) as client:
        for kind in ("PREPARE_CASE", "RESET", "TRIAL_END", "HEARTBEAT"):
            answer = client.request(stock.MessageType[kind], {}, trial_id="t", action_case_id="c", step=4)
            assert answer.payload == {"ok": True}
            assert (answer.trial_id, answer.action_case_id, answer.step) == ("t", "c", 4)
        hello = client.request(stock.MessageType.HELLO, {}).payload
        assert (hello["ok"], hello["reflex"]["model_id"]) == (True, "tiny")
        socket = client._ws
        client.request(stock.MessageType.CLOSE, {"reason": "done"})
        with pytest.raises(ConnectionClosed) as info:
            socket.recv()
        assert info.value.rcvd is not None
        assert info.value.rcvd.code == 1000
        assert server.get("/xpolicylab").status == 404


def test_w28_hello_is_answered_when_the_policy_is_ready(tiny: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    wait = loads_after(gate)
    with ThreadPoolExecutor(1) as pool, Server(tiny, before=wait, until="http://") as server:

        def meet() -> Any:
            with robot(server) as client:
                return infer(client, seen(1))

        answer = pool.submit(meet)
        server.reach(lambda m: True)
        assert not answer.done()
        gate.write_text("go")
        assert right(answer.result(), 1)


def test_w28_a_trial_is_an_episode_and_an_environment_a_robot(tiny: Path, tmp_path: Path) -> None:
    with Server(tiny, "--record", str(tmp_path)) as server:
        with robot(server) as client, robot(server, "?robot_id=arm") as named:
            client.reset("t1")
            infer(client, seen(), "t1")
            client.reset("t1")
            infer(client, seen(), "t1")
            infer(client, seen() | {"env_idx": 0}, "t2")
            infer(client, seen() | {"env_idx": 3}, "t2")
            client.reset("t1")
            infer(client, seen(), "t1")
            infer(named, seen(episode_id="mine"))
        server.stop()
    (file,) = tmp_path.iterdir()
    found = [recorded.request for recorded in read_journal(file).requests]
    episodes = ["eval/t1", "eval/t1#1", "eval/t2", "eval/t2/3", "eval/t1", "mine"]
    assert [asked.episode_id for asked in found] == episodes
    own = found[0].robot_id or ""
    assert own.startswith("ws-")
    assert [asked.robot_id for asked in found] == [own, own, own, f"{own}/3", own, "arm"]


def test_w28_the_success_of_a_trial_counts(pair: Pair) -> None:
    with two(pair) as server, robot(server) as client:
        for i, result in enumerate(({"success": True}, {"result": {"success": False}}, {}, {"success": "yes"})):
            client.reset(f"t{i}")
            infer(client, seen(), f"t{i}")
            client.request(stock.MessageType.TRIAL_END, {"trial_id": f"t{i}"} | result, trial_id=f"t{i}")
        client.request(stock.MessageType.TRIAL_END, {"success": True}, trial_id="never")
        outcomes = rollout(server)["outcomes"]
        assert sum(outcomes[slot]["episodes"] for slot in "ab") == 2
        assert sum(outcomes[slot]["successes"] for slot in "ab") == 1


def test_w29_every_error_keeps_the_session(tiny: Path) -> None:
    with Server(tiny, "--max-body-bytes", "4096", "--max-concurrent", "1") as server, robot(server) as client:
        for bad, field in [
            ({"reflex/nonsense": 1}, "nonsense"),
            ({"state": {"arm_joint_state": np.zeros(3)}}, "state"),
            ({"state": {"arm_joint_state": np.array([np.nan]), "ee_joint_state": np.zeros(1)}}, "state"),
            ({"state": {"arm_joint_state": "x"}}, "state/arm_joint_state"),
            ({"state": 5}, "state"),
            ({"env_idx": -1}, "env_idx"),
            ({"instruction": 5}, "instruction"),
        ]:
            error = refused(lambda bad=bad: infer(client, seen() | bad))
            assert (error["error"], error["field"], error["retry_safe"]) == ("invalid_request", field, False)
            assert error["request_id"]
        assert "infer needs an observation" in refused(lambda: infer(client, None))["message"]
        assert right(infer(client, seen(3)), 3)
        assert server.metrics()("reflex_requests_total", outcome="client_error", wire="xpolicylab") == 8
        frame = stock.Frame(stock.MessageType.HELLO_ACK, "m7", "e").to_wire()
        client._ws.send(stock.encode_frame(frame))
        answer = stock.decode_frame(client._ws.recv())
        assert (answer.request_id, answer.payload["code"]) == ("m7", "invalid_frame")
        client._ws.send(b"\xc1")
        answer = stock.decode_frame(client._ws.recv())
        assert (answer.request_id, answer.payload["code"]) == ("", "invalid_frame")
        with pytest.raises(ConnectionError, match="1009"):
            infer(client, seen() | {"more": bytes(5000)})
        assert calm(server)


def test_w29_a_full_queue_and_an_expired_deadline_are_errors(tiny: Path) -> None:
    with Server(tiny, "--max-queue", "1", held=True) as server, busy(server):
        with robot(server, "?deadline_ms=200") as late, robot(server) as full:
            with server.burst([{"state": STATE}]) as first:
                first.send()
                server.reach(lambda m: m(WAITING) == 1)
                error = refused(lambda: infer(full, seen()))
                assert (error["error"], error["retry_safe"], error["max_queue"]) == ("queue_full", True, 1)
                first.hang_up(range(1))
                server.reach(lambda m: m(WAITING) == 0)
            assert refused(lambda: infer(late, seen()))["error"] == "deadline_exceeded"
            server.release()
            assert right(infer(full, seen(1)), 1)


def test_w29_a_model_that_fails_is_an_error_of_its_request_alone(tiny: Path) -> None:
    ids = [f"request-{i}" for i in range(100)]
    bad = min(marked("raise", 0.05, ids))
    fine = min(set(ids) - marked("raise", 0.05, ids))
    with Server(tiny, "--inject-fault", "prod:raise:0.05") as server, robot(server) as client:
        error = refused(lambda: infer(client, seen(request_id=bad)))
        assert (error["error"], error["request_id"], error["retry_safe"]) == ("processor_failed", bad, False)
        assert right(infer(client, seen(1, request_id=fine)), 1)


def _send(client: Any, observation: Any) -> None:
    sent = stock.Frame(stock.MessageType.INFER, "m", "e", payload={"observation": observation})
    client._ws.send(stock.encode_frame(sent))


def test_w29_who_leaves_while_queued_or_running_is_no_fault(tiny: Path) -> None:
    with Server(tiny, held=True) as server:
        with robot(server) as running, robot(server) as queued:
            _send(running, seen(request_id="plug"))
            server.reach(lambda m: (m("reflex_in_flight_requests"), m(WAITING)) == (1, 0))
            _send(queued, seen())
            server.reach(lambda m: m(WAITING) == 1)
            queued._ws.close()
            server.reach(lambda m: m("reflex_requests_total", outcome="cancelled") == 1)
        assert server.get("/health").status == 200
        server.release()
        metrics = server.reach(lambda m: m("reflex_requests_total", outcome="cancelled") == 2)
        assert metrics("reflex_requests_total", outcome="failed") == 0
        with robot(server) as client:
            assert right(infer(client, seen(1)), 1)
        assert calm(server)


def test_w29_a_server_that_ends_answers_what_it_took_and_then_closes(tiny: Path) -> None:
    with ThreadPoolExecutor(1) as pool, Server(tiny, held=True) as server:
        with robot(server) as taken, robot(server) as idle:
            waiting = pool.submit(infer, taken, seen(1, request_id="plug"))
            server.reach(lambda m: (m("reflex_in_flight_requests"), m(WAITING)) == (1, 0))
            server.process.send_signal(signal.SIGTERM)
            server.wait_log("draining")
            assert refused(lambda: infer(idle, seen()))["error"] == "shutting_down"
            server.release()
            assert right(waiting.result(), 1)
            for client in (taken, idle):
                with pytest.raises(ConnectionClosed) as info:
                    client._ws.recv()
                assert info.value.rcvd is not None
                assert info.value.rcvd.code == 1001
            assert server.wait() == 0


def test_w27_sixteen_robots_share_a_batch(tiny: Path) -> None:
    with ThreadPoolExecutor(16) as pool, Server(tiny, held=True, takes="0.001 * len(batch)") as server, busy(server):

        def one(i: int) -> Any:
            with robot(server) as client:
                return infer(client, seen(i))

        waiting = [pool.submit(one, i) for i in range(16)]
        server.reach(lambda m: m(WAITING) == 16)
        server.release()
        answers = [answer.result() for answer in waiting]
        assert all(right(answer, i) for i, answer in enumerate(answers))
        assert {answer["reflex"]["batch"]["size"] for answer in answers} == {16}


# -- frames ------------------------------------------------------------------------------------------------------------


def frame(**more: Any) -> dict[str, Any]:
    return {"message_type": "infer", "message_id": "m", "evaluation_id": "e", "payload": {}} | more


def test_w29_frames_are_read_and_written_as_the_stock_client_does() -> None:
    sent = stock.Frame(stock.MessageType.INFER, "m", "e", trial_id="t", repeat_index=2, step=5, payload=seen(3))
    found = decode(stock.encode_frame(sent))
    assert found.type == "infer"
    assert found.envelope == {
        "message_id": "m", "evaluation_id": "e", "action_case_id": None, "trial_id": "t", "repeat_index": 2, "step": 5,
    }  # fmt: skip
    assert found.payload["state"]["arm_joint_state"].tolist() == [pytest.approx(0.3)]
    assert decode(msgpack.packb(frame())).envelope["step"] == 0
    assert encode(LabFrame("x", {}, {"a": np.float32([1])})).endswith(stock.encode_frame({"a": np.float32([1])}))
    back = stock.decode_frame(encode(LabFrame("infer_result", found.envelope, {"a": np.array([1, 2], np.float32)})))
    assert (back.message_type, back.request_id, back.step) == (stock.MessageType.INFER_RESULT, "m", 5)
    assert back.payload["a"].dtype == np.float32
    assert back.payload["a"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([1], "must be a map"),
        (frame(message_type=3), "message_type"),
        (frame(message_id=None), "message_id"),
        (frame(evaluation_id=None), "evaluation_id"),
        (frame(trial_id=[1]), "trial_id must be"),
        (frame(step=True), "step must be"),
        (frame(payload=[1]), "payload"),
        (frame(payload={"a": {b"nd": True, b"kind": b"O", b"type": "|O", b"data": b"\x80\x04N."}}), "kind O"),
        (frame(payload={"a": {b"nd": True, b"kind": b"", b"type": "|O", b"shape": [1], b"data": b"1"}}), "dtype"),
        (frame(payload={"a": {b"nd": True, b"kind": b"", b"type": "<f4", b"shape": [2], b"data": b"1234"}}), "4 bytes"),
    ],
)
def test_w29_what_is_no_message_is_refused_and_says_why(value: Any, why: str) -> None:
    with pytest.raises(ClientError, match=why):
        decode(msgpack.packb(value))


@FRESH
def test_w29_broken_frames_raise_nothing_but_our_errors(tmp_path: Path, count: int) -> None:
    export = Export.load(write_tiny(tmp_path / "export", cameras=("cam_head",)))
    sent = seen(3) | {"vision": {"cam_head": {"color": PICTURE}}}
    frames = [stock.Frame(stock.MessageType.INFER, "m", "e", trial_id="t", step=5, payload={"observation": sent})]
    frames.append(stock.Frame(stock.MessageType.TRIAL_END, "m", "e", payload={"result": {"success": True}}))

    def ask(data: bytes) -> None:
        found = decode(data)
        if isinstance(found.payload.get("observation"), dict):
            read(export, WireMap(), found.payload["observation"])

    assert check("xpolicylab", [stock.encode_frame(frame) for frame in frames], ask, count) > 0.01
