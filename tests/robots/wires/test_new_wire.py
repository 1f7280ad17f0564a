"""The worked example of a new wire, examples/wires/xpolicylab.py: the client of Inspect Robots, unmodified, against the
application under uvicorn.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import types
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from xpolicylab import LabFrame, decode, encode, read

from reflex_runtime.client import Client
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.robots import Export, InvalidRequest
from reflex_runtime.robots.policy.spec import WireMap
from reflex_runtime.web.errors import ClientError
from robots.wires.broken import FRESH, check
from serving.exports import expected, write_tiny
from serving.harness import PATIENCE

EXAMPLES = Path(__file__).parents[3] / "examples" / "wires"
UVICORN = [sys.executable, "-m", "uvicorn", "--factory", "xpolicylab:create", "--port", "0", "--no-access-log"]

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
def served(export: Path, **settings: str) -> Iterator[int]:
    """The port of the application under uvicorn, which ends without an error."""
    env = os.environ | {"REFLEX_SOURCE": str(export)} | settings
    with subprocess.Popen(UVICORN, cwd=EXAMPLES, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = (re.search(r"running on http://[0-9.]+:(\d+)", line) for line in process.stderr)
            yield next(int(port[1]) for port in found if port)
        finally:
            process.terminate()
            told = process.stderr.read()
    assert "Traceback" not in told, told


@contextmanager
def robot(port: int, query: str = "", evaluation: str = "eval") -> Iterator[Any]:
    url = f"ws://127.0.0.1:{port}/xpolicylab{query}"
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


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "export")


def test_the_stock_client_gets_the_chunk_of_act_in_the_groups_of_its_joints(tmp_path: Path) -> None:
    with served(write_tiny(tmp_path / "export", cameras=("image", "cam_wrist"))) as port, robot(port) as client:
        color = {"color": PICTURE, "depth": np.zeros((6, 8)), "shape": (6, 8)}
        sent = seen(3) | {"vision": {"image": color, "cam_wrist": color}, "instructions": ["go", "do go"]}
        payload = infer(client, sent)
        assert payload["latency_ms"] > 0
        with closing(Client(f"http://127.0.0.1:{port}")) as own:
            images = {"image": PICTURE, "cam_wrist": PICTURE}
            plain = own.act(images=images, state=[0.3, -0.3], instruction="go", seed=3).actions
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            answers = page.read().decode()
        found = [[step["arm_joint_state"][0], step["ee_joint_state"][0]] for step in payload["actions"]]
        assert np.array_equal(np.float32(found), plain)
        line = next(line for line in answers.splitlines() if 'wire="xpolicylab"' in line)
        assert line.startswith("reflex_requests_total{")
        assert line.endswith(" 1.0")


def test_every_message_has_its_answer_and_every_error_keeps_the_session(export: Path) -> None:
    with served(export, REFLEX_MAX_BODY_BYTES="4096") as port, robot(port) as client:
        for kind in ("PREPARE_CASE", "RESET", "TRIAL_END", "HEARTBEAT"):
            answer = client.request(stock.MessageType[kind], {}, trial_id="t", action_case_id="c", step=4)
            assert answer.payload == {"ok": True}
            assert (answer.trial_id, answer.action_case_id, answer.step) == ("t", "c", 4)
        hello = client.request(stock.MessageType.HELLO, {}).payload
        assert (hello["ok"], hello["reflex"]["model_id"]) == (True, "tiny")
        for bad, field in [
            ({"reflex/nonsense": 1}, "reflex/nonsense"),
            ({"state": {"arm_joint_state": np.zeros(3)}}, "state"),
            ({"state": {"arm_joint_state": "x"}}, "state/arm_joint_state"),
            ({"env_idx": -1}, "env_idx"),
            ({"instruction": 5}, "instruction"),
        ]:
            error = refused(lambda bad=bad: infer(client, seen() | bad))
            assert (error["error"], error["field"], error["retry_safe"]) == ("invalid_request", field, False)
        assert "infer needs an observation" in refused(lambda: infer(client, None))["message"]
        client._ws.send(b"\xc1")
        answer = stock.decode_frame(client._ws.recv())
        assert (answer.request_id, answer.payload["code"]) == ("", "invalid_frame")
        assert right(infer(client, seen(2)), 2)
        socket = client._ws
        client.request(stock.MessageType.CLOSE, {"reason": "done"})
        with pytest.raises(ConnectionClosed) as info:
            socket.recv()
        assert info.value.rcvd is not None
        assert info.value.rcvd.code == 1000


@pytest.mark.long
def test_a_trial_is_an_episode_and_an_environment_a_robot(export: Path, tmp_path: Path) -> None:
    with served(export, REFLEX_RECORD=str(tmp_path)) as port, robot(port) as client:
        for _ in range(2):
            client.reset("t1")
            infer(client, seen(), "t1")
        infer(client, seen() | {"env_idx": 3}, "t2")
        client.request(stock.MessageType.TRIAL_END, {"trial_id": "t2", "success": True}, trial_id="t2")
    (file,) = tmp_path.iterdir()
    found = [recorded.request for recorded in read_journal(file).requests]
    assert [asked.episode_id for asked in found] == ["eval/t1", "eval/t1#1", "eval/t2/3"]
    own = found[0].robot_id or ""
    assert [asked.robot_id for asked in found] == [own, own, f"{own}/3"]
    assert {recorded.wire for recorded in read_journal(file).requests} == {"xpolicylab"}


def test_groups_may_be_named(tmp_path: Path) -> None:
    spec = Export.load(write_tiny(tmp_path / "export"))
    wider = replace(spec, action_dim=3, x_dim=3)
    sent = {"state": {"arm_joint_state": np.zeros(1), "ee_joint_state": [0.0]}, "instructions": ["go", "do go"]}
    with pytest.raises(InvalidRequest, match=r"\(arm_joint_state 1, ee_joint_state 1\) do not make the 3 numbers"):
        read(wider, WireMap(), sent)
    observed, groups = read(wider, WireMap(actions=(("a", 3),)), sent)
    assert (observed[2], groups) == ("go", (("a", 3),))


# -- frames ------------------------------------------------------------------------------------------------------------


def frame(**more: Any) -> dict[str, Any]:
    return {"message_type": "infer", "message_id": "m", "evaluation_id": "e", "payload": {}} | more


def test_frames_are_read_and_written_as_the_stock_client_does() -> None:
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
def test_what_is_no_message_is_refused_and_says_why(value: Any, why: str) -> None:
    with pytest.raises(ClientError, match=why):
        decode(msgpack.packb(value))


@FRESH
def test_broken_frames_raise_nothing_but_our_errors(tmp_path: Path, count: int) -> None:
    export = Export.load(write_tiny(tmp_path / "export", cameras=("cam_head",)))
    sent = seen(3) | {"vision": {"cam_head": {"color": PICTURE}}}
    frames = [stock.Frame(stock.MessageType.INFER, "m", "e", trial_id="t", step=5, payload={"observation": sent})]
    frames.append(stock.Frame(stock.MessageType.TRIAL_END, "m", "e", payload={"result": {"success": True}}))

    def ask(data: bytes) -> None:
        found = decode(data)
        if isinstance(found.payload.get("observation"), dict):
            read(export, WireMap(), found.payload["observation"])

    assert check("xpolicylab", [stock.encode_frame(frame) for frame in frames], ask, count) > 0.01
