"""OIP over HTTP: the stock client of Triton, unmodified, against a real server; and its bodies."""

from __future__ import annotations

import contextlib
import json
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as stock
from tritonclient.utils import InferenceServerException

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.robots import Export
from reflex_runtime.robots.wires.oip import Sequences, questions
from reflex_runtime.web.oip import decode
from robots.wires.broken import FRESH, check
from serving.exports import ACTIONS, CHUNK, expected, write_tiny
from serving.harness import STATE, Answer, Server, parse_answers
from serving.requests import WAITING, busy, calm, marked

PICTURE = np.full((1, 6, 8, 3), 7, np.uint8)
INFER = "/v2/models/tiny/infer"


@contextlib.contextmanager
def client(server: Server) -> Iterator[Any]:
    with closing(stock.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60)) as found:
        yield found


def tensor(name: str, values: Any, kind: str, binary: bool = True) -> Any:
    found = stock.InferInput(name, list(values.shape), kind)
    return found.set_data_from_numpy(values, binary_data=binary)


def state(*numbers: int, binary: bool = True) -> list[Any]:
    """The inputs of robots with these numbers."""
    rows = np.array([[0.1 * i, -0.1 * i] for i in numbers], np.float32)
    seeds = np.array(numbers, np.int64).reshape(-1, 1)
    return [tensor("state", rows, "FP32", binary), tensor("seed", seeds, "INT64", binary)]


def wanted(*numbers: int) -> Any:
    return np.stack([expected([0.1 * i, -0.1 * i], i) for i in numbers])


def right(answer: Any, *numbers: int) -> bool:
    return bool(np.allclose(answer.as_numpy("actions"), wanted(*numbers), atol=1e-5))


def post(server: Server, body: Any, headers: dict[str, str] | None = None, path: str = INFER) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return server.ask("POST", path, data, headers)


def asked(**more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "state", "datatype": "FP32", "shape": [1, 2], "data": STATE}]} | more


def test_w24_the_stock_client_gets_the_answer_of_act(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "export", cameras=("image", "wrist"))
    with Server(export) as server, client(server) as oip:
        sent = {name: {"dtype": "|u1", "shape": [6, 8, 3], "data": PICTURE.tobytes()} for name in ("image", "wrist")}
        plain = _act(server, {"images": sent, "state": STATE, "seed": 3})
        inputs = [tensor(name, PICTURE, "UINT8") for name in ("image", "wrist")]
        inputs += [tensor("state", np.array([STATE], np.float32), "FP32"), tensor("seed", np.array([[3]]), "INT64")]
        answer = oip.infer("tiny", inputs, request_id="r1")
        assert answer.as_numpy("actions").dtype == np.float32
        assert answer.as_numpy("actions")[0].tolist() == np.float32(plain).tolist()
        told = answer.get_response()
        assert (told["id"], told["model_name"], told["model_version"]) == ("r1", "tiny", "1")
        assert json.loads(told["parameters"]["reflex"])[0]["request_id"] == "r1"
        for output in (stock.InferRequestedOutput("actions", binary_data=binary) for binary in (True, False)):
            again = oip.infer("tiny", inputs, outputs=[output], model_version="1")
            assert again.as_numpy("actions").tolist() == answer.as_numpy("actions").tolist()
            assert ("data" in again.get_output("actions")) is not output._binary
        assert server.metrics()("reflex_requests_total", outcome="ok", wire="oip") == 3


def _act(server: Server, body: Any) -> Any:
    import msgpack

    headers = {"Content-Type": "application/msgpack", "Accept": "application/json"}
    return server.ask("POST", "/act", msgpack.packb(body), headers).json["actions"]


def test_w24_rows_are_requests_in_json_and_binary(tiny: Path) -> None:
    with Server(tiny) as server, client(server) as oip:
        assert right(oip.infer("tiny", state(1, 2, 3)), 1, 2, 3)
        assert right(oip.infer("tiny", state(4, 5, binary=False)), 4, 5)
        assert server.metrics()("reflex_requests_total", outcome="ok", wire="oip") == 5
        answer = post(server, asked(id="mine"))
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["content-type"] == "application/json"
        assert answer.json["outputs"][0]["shape"] == [1, CHUNK, ACTIONS]
        assert len(answer.json["outputs"][0]["data"]) == CHUNK * ACTIONS


def test_w24_a_picture_may_come_as_json(tmp_path: Path) -> None:
    """Of 224 × 224, as servers and their clients show it in examples."""
    export = write_tiny(tmp_path / "export", cameras=("image",))
    picture = np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8)
    with Server(export) as server:
        answers = []
        for data in ([picture.tolist()], picture.ravel().tolist()):
            sent = {"name": "image", "datatype": "UINT8", "shape": [1, 224, 224, 3], "data": data}
            answers.append(post(server, {"inputs": [sent, *asked()["inputs"]], "id": "same"}))
        assert [answer.status for answer in answers] == [200, 200], answers[0].body
        assert answers[0].json["outputs"] == answers[1].json["outputs"]


def test_w24_large_bodies_are_read_beside_the_loop_to_the_same_end(tiny: Path) -> None:
    with Server(tiny) as server:
        body = json.dumps(asked() | {"more": " " * 200_000}).encode()
        answer = post(server, body)
        assert answer.status == 200, answer.body
        assert post(server, body[:-1]).status == 400


def test_w24_metadata_and_health(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "export", cameras=("image",), model_id="lab/tiny")
    with Server(export) as server, client(server) as oip:
        assert oip.is_server_live()
        assert oip.is_server_ready()
        assert oip.get_server_metadata()["extensions"][0] == "binary_tensor_data"
        for name in ("tiny", "lab/tiny"):
            for version in ("", "1"):
                assert oip.is_model_ready(name, version)
                told = oip.get_model_metadata(name, version)
                assert told["inputs"][0] == {"name": "image", "datatype": "UINT8", "shape": [-1, 6, 8, 3]}
        assert not oip.is_model_ready("other")
        assert not oip.is_model_ready("tiny", "2")
        with pytest.raises(InferenceServerException, match="model 'other' is not served, only tiny") as info:
            oip.infer("other", state(1))
        assert info.value.status() == "404"
        assert server.get(INFER).status == 405
        assert server.get("/v2/nothing").status == 404


def test_w24_a_server_with_a_key_shows_its_health_alone(tiny: Path) -> None:
    with Server(tiny, "--api-key", "secret") as server, client(server) as oip:
        assert oip.is_server_ready()
        with pytest.raises(InferenceServerException, match="the key is missing or wrong") as info:
            oip.infer("tiny", state(1))
        assert info.value.status() == "401"
        assert right(oip.infer("tiny", state(1), headers={"Authorization": "Bearer secret"}), 1)


def test_w24_robot_and_sequence_are_as_they_were_said(tiny: Path, tmp_path: Path) -> None:
    with Server(tiny, "--record", str(tmp_path)) as server, client(server) as oip:
        said = {"sequence_id": 7, "sequence_start": True, "priority": 1}
        oip.infer("tiny", state(1), parameters={"robot_id": "arm"}, **said)
        oip.infer("tiny", state(1, 2), parameters={"robot_id": "arm"}, request_id="r", **said)
        server.stop()
    (file,) = tmp_path.iterdir()
    found = [recorded.request for recorded in read_journal(file).requests]
    assert [(f.robot_id, f.episode_id) for f in found] == [("arm", "7"), ("arm/0", "7#1/0"), ("arm/1", "7#1/1")]


def test_w25_errors_are_statuses_with_a_text(tiny: Path) -> None:
    with Server(tiny, "--max-body-bytes", "4096") as server, client(server) as oip:
        for inputs, parameters, words in [
            ([tensor("state", np.zeros((1, 3), np.float32), "FP32")], {}, "state"),
            ([tensor("state", np.array([[np.nan, 0]], np.float32), "FP32")], {}, "state: holds NaN"),
            ([tensor("pose", np.zeros((1, 2), np.float32), "FP32")], {}, "pose: no such input; came: pose; expected"),
            ([tensor("seed", np.array([[3]]), "INT64")], {}, "state: missing; came: seed; expected: state"),
            (state(1), {"robot_id": "x" * 300}, "robot_id: longer than"),
        ]:
            with pytest.raises(InferenceServerException, match=words) as info:
                oip.infer("tiny", inputs, parameters=parameters)
            assert info.value.status() == "422"
        assert right(oip.infer("tiny", state(3)), 3)
        assert server.metrics()("reflex_requests_total", outcome="client_error", wire="oip") == 5
        with pytest.raises(InferenceServerException) as info:
            oip.infer("tiny", [tensor("state", np.zeros((1, 2000), np.float32), "FP32")])
        assert info.value.status() == "413"
        with pytest.raises(InferenceServerException, match="compressed") as info:
            oip.infer("tiny", state(3), request_compression_algorithm="gzip")
        assert info.value.status() == "415"
        with pytest.raises(InferenceServerException, match="deadline") as info:
            oip.infer("tiny", state(3), timeout=1)
        assert info.value.status() == "504"
        assert calm(server)


def test_w25_a_full_queue_is_a_503_that_says_when_to_come_again(tiny: Path) -> None:
    with ThreadPoolExecutor(1) as pool, Server(tiny, "--max-queue", "1", held=True) as server, busy(server):
        waiting = pool.submit(post, server, asked())
        server.reach(lambda m: m(WAITING) == 1)
        answer = post(server, asked(id="r2"))
        assert (answer.status, answer.json["code"], answer.headers["x-request-id"]) == (503, "queue_full", "r2")
        assert answer.json["error"] == answer.json["message"]
        assert int(answer.headers["retry-after"]) >= 1
        server.release()
        assert waiting.result().status == 200


def test_w25_one_row_that_fails_fails_all_and_the_others_are_taken_back(tiny: Path) -> None:
    ids = [f"r{i}" for i in range(100)]
    bad = next(i for i in ids if f"{i}/1" in marked("raise", 0.05, [f"{i}/{row}" for i in ids for row in range(2)]))
    with Server(tiny, "--inject-fault", "prod:raise:0.05") as server, client(server) as oip:
        with pytest.raises(InferenceServerException) as info:
            oip.infer("tiny", state(1, 2), request_id=bad)
        assert info.value.status() == "500"
        metrics = server.reach(lambda m: m("reflex_requests_total", outcome="failed", wire="oip") == 1)
        done = sum(metrics("reflex_requests_total", outcome=o, wire="oip") for o in ("ok", "cancelled"))
        assert done == 1
        assert oip.is_server_ready()


def test_w25_who_leaves_while_queued_is_never_computed(tiny: Path) -> None:
    with Server(tiny, held=True) as server, busy(server) as plug:
        with _sent(server, asked()):
            server.reach(lambda m: m(WAITING) == 1)
        server.reach(lambda m: m("reflex_requests_total", outcome="cancelled") == 1)
        server.release()
        assert plug.answers()[0].status == 200
        assert server.reach(lambda m: m("reflex_requests_total", outcome="ok") == 1)
        assert calm(server)


def test_w25_who_leaves_while_it_runs_is_no_fault(tiny: Path) -> None:
    with Server(tiny, held=True) as server:
        with _sent(server, asked(id="plug")):
            server.reach(lambda m: (m("reflex_in_flight_requests"), m(WAITING)) == (1, 0))
        assert server.get("/health").status == 200
        server.release()
        metrics = server.reach(lambda m: m("reflex_requests_total", outcome="cancelled") == 1)
        assert metrics("reflex_requests_total", outcome="failed") == 0
        assert post(server, asked()).status == 200


def _sent(server: Server, body: Any) -> Any:
    """A connection on which a request was sent."""
    sock, data = server.connect(), json.dumps(body).encode()
    sock.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return closing(sock)


def test_w25_a_server_that_ends_answers_what_it_took(tiny: Path) -> None:
    with Server(tiny, held=True) as server, contextlib.ExitStack() as stack:
        taken = stack.enter_context(_sent(server, asked(id="plug")))
        server.reach(lambda m: (m("reflex_in_flight_requests"), m(WAITING)) == (1, 0))
        late = stack.enter_context(closing(server.connect()))
        late.sendall(f"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\nPOST {INFER} HTTP/1.1\r\n".encode())
        live = b""
        while not live.endswith(b'{"live":true}'):
            live += late.recv(65536)
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining")
        late.sendall(b"Host: localhost\r\nContent-Length: 2\r\n\r\n{}")
        refused = _all_of(late)
        assert (refused.status, refused.json["code"]) == (503, "shutting_down")
        server.release()
        assert _all_of(taken).status == 200
        assert server.wait() == 0


def _all_of(sock: Any) -> Answer:
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    (answer,) = parse_answers(b"".join(parts))
    return answer


def test_w26_sixteen_clients_share_a_batch(tiny: Path) -> None:
    with Server(tiny, held=True, takes="0.001 * len(batch)") as server, busy(server), ThreadPoolExecutor(16) as pool:

        def infer(i: int) -> Any:
            with client(server) as oip:
                return oip.infer("tiny", state(i))

        waiting = [pool.submit(infer, i) for i in range(16)]
        server.reach(lambda m: m(WAITING) == 16)
        server.release()
        answers = [answer.result() for answer in waiting]
        assert all(right(answer, i) for i, answer in enumerate(answers))
        batches = {json.loads(a.get_response()["parameters"]["reflex"])[0]["batch"]["size"] for a in answers}
        assert batches == {16}


def test_w26_the_rows_of_a_request_share_one_too(tiny: Path) -> None:
    with Server(tiny, held=True, takes="0.001 * len(batch)") as server, busy(server), ThreadPoolExecutor(1) as pool:

        def infer() -> Any:
            with client(server) as oip:
                return oip.infer("tiny", state(*range(8)))

        waiting = pool.submit(infer)
        server.reach(lambda m: m(WAITING) == 8)
        server.release()
        answer = waiting.result()
        assert right(answer, *range(8))
        assert {row["batch"]["size"] for row in json.loads(answer.get_response()["parameters"]["reflex"])} == {8}


def binary(*inputs: dict[str, Any], data: bytes = b"", **more: Any) -> tuple[bytes, int]:
    head = json.dumps({"inputs": list(inputs)} | more).encode()
    return head + data, len(head)


def raw(size: Any = 8, **more: Any) -> dict[str, Any]:
    return {"name": "state", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": size}} | more


GOOD = struct.pack("<ff", 0.5, -0.5)


def test_w26_a_binary_body_is_read_as_views_of_it() -> None:
    image = {"name": "image", "datatype": "UINT8", "shape": [1, 2], "parameters": {"binary_data_size": 2}}
    body, head = binary(raw(), image, data=GOOD + b"\1\2", parameters={"binary_data_output": True})
    found = decode(body, head)
    first, second = found.inputs
    assert (first.values.tolist(), second.values.tolist()) == ([[0.5, -0.5]], [[1, 2]])  # type: ignore[union-attr]
    assert not first.values.flags.owndata  # type: ignore[union-attr]
    assert found.binary
    assert not decode(*binary(raw(), data=GOOD)).binary
    other = decode(*binary(raw(), data=GOOD, parameters={"binary_data_output": True}, outputs=[
        {"name": "actions", "parameters": {"binary_data": False}}]))  # fmt: skip
    assert (other.binary, other.outputs) == (False, ["actions"])


@pytest.mark.parametrize(
    ("body", "head", "why"),
    [
        (*binary(raw(), data=GOOD[1:]), "state: binary_data_size is 8, and 7 bytes are left"),
        (*binary(raw(), data=GOOD + b"x"), "1 bytes follow the last tensor"),
        (*binary(raw(-8), data=GOOD), "must be a whole number"),
        (*binary(raw(8.0), data=GOOD), "must be a whole number"),
        (*binary(raw(2**80), data=GOOD), "bytes are left"),
        (*binary(raw(data=[1, 2]), data=GOOD), "either data or binary_data_size"),
        (*binary(raw(None), data=b""), "either data or binary_data_size"),
        (binary(raw())[0], None, "8, and 0 bytes are left"),
        (*binary(raw(parameters={"shared_memory_region": "r"})), "shared_memory_region is not served"),
        (*binary(raw(), data=GOOD, outputs=[{"name": "x", "parameters": {"classification": 3}}]), "classification"),
        (*binary(raw(7), data=GOOD[1:]), "state: 7 bytes do not make"),
        (*binary({"name": "a", "datatype": "FP32", "shape": [1], "data": [1e39]}), "too large for FP32"),
        (*binary({"name": "a", "datatype": "INT8", "shape": [1], "data": [300]}), "too large for INT8"),
        (b"{}", 3, "Inference-Header-Content-Length is 3"),
        (b"{}", None, "inputs"),
        (b"", None, "not JSON"),
        (b'{"inputs": [' + b"[]," * 70_000 + b"]}", None, "70000 lists: send arrays as binary data"),
        (b'{"inputs": [' + b"{}," * 50_000 + b"]}", None, "70000 lists: send arrays as binary data"),
        (b'{"inputs": [' + b"1.000000," * 500_000 + b"]}", None, "over 2 MB"),
        (b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": ' + b"[" * 100_000, None, "not JSON"),
    ],
)
def test_w26_what_is_no_request_is_refused_and_says_why(body: bytes, head: int | None, why: str) -> None:
    with pytest.raises(ReflexError, match=why):
        decode(body, head)


def test_w26_a_length_of_the_head_that_is_no_number_is_refused(tiny: Path) -> None:
    with Server(tiny) as server:
        for length in ("x", "-1", "9" * 30):
            answer = post(server, asked(), {"Inference-Header-Content-Length": length})
            assert (answer.status, answer.json["code"]) == (400, "invalid_request")


@FRESH
def test_w26_broken_bodies_raise_nothing_but_our_errors(tmp_path: Path, count: int) -> None:
    """Two bytes before a body are the length that is told of its JSON; 0 is none told."""
    export = Export.load(write_tiny(tmp_path / "export", cameras=("image",)))
    image = {"name": "image", "datatype": "UINT8", "shape": [1, 6, 8, 3], "parameters": {"binary_data_size": 144}}
    text = {"name": "instruction", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 6}}
    good = [binary(raw(), image, data=GOOD + PICTURE.tobytes()), binary(text, raw(), data=b"\2\0\0\0go" + GOOD)]
    good.append(binary(raw(), image, data=GOOD + PICTURE.tobytes(), parameters={"priority": 1, "sequence_id": "a"}))
    plain = {"name": "image", "datatype": "UINT8", "shape": [1, 6, 8, 3], "data": [7] * 144}
    good.append((json.dumps(asked(inputs=[*asked()["inputs"], plain])).encode(), 0))

    def ask(data: bytes) -> None:
        questions(export, Sequences(), decode(data[2:], int.from_bytes(data[:2]) or None))

    assert check("oip_http", [head.to_bytes(2) + body for body, head in good], ask, count) > 0.01
