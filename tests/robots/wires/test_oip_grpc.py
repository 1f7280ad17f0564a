"""The Open Inference Protocol over gRPC: Triton's stock client, unmodified, against a real server."""

from __future__ import annotations

import io
import json
import queue
import resource
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import PIL.Image
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, service_pb2
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from reflex_runtime.web import messages
from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.grpc_listener import decode
from robots.wires.broken import FRESH, check
from serving.exports import ACTIONS, CHUNK, WEIGHTS, expected, write_tiny
from serving.harness import PATIENCE, STATE, Server
from serving.requests import AGELESS, busy, queued, recorded

PICTURE = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(1, 6, 8, 3)


@contextmanager
def serving(export: Path, *options: str, **more: Any) -> Iterator[tuple[Server, InferenceServerClient]]:
    with Server(export, "--oip-grpc", "127.0.0.1:0", *options, **more) as server:
        address = server.wait_log("clients of OIP over gRPC: ").rpartition(" ")[2]
        with closing(InferenceServerClient(address)) as client:
            yield server, client


def tensor(name: str, values: Any) -> InferInput:
    array = np.asarray(values)
    return InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)


def state(*rows: list[float]) -> InferInput:
    return tensor("state", np.float32(rows or [STATE]))


def seed(*rows: int) -> InferInput:
    return tensor("seed", np.int64(rows).reshape(-1, 1))


def begin(client: InferenceServerClient, *inputs: InferInput, **more: Any) -> tuple[Any, queue.Queue[Any]]:
    """An infer request that is not waited for: its call, and where its result comes."""
    found: queue.Queue[Any] = queue.Queue()
    call = client.async_infer("tiny", list(inputs), lambda result, error: found.put(error or result), **more)
    return call, found


@contextmanager
def refused(status: str) -> Iterator[None]:
    with pytest.raises(InferenceServerException) as info:
        yield
    assert info.value.status() == f"StatusCode.{status}", info.value


def test_w50_the_stock_client_gets_the_answer_of_act(tiny: Path) -> None:
    with serving(tiny) as (server, client):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("tiny")
        assert client.is_model_ready("tiny", "1")
        assert client.get_server_metadata(as_json=True)["name"] == "reflex"
        told = client.get_model_metadata("tiny", as_json=True)
        assert told["inputs"] == [
            {"name": "state", "datatype": "FP32", "shape": ["-1", "2"]},
            {"name": "seed", "datatype": "INT64", "shape": ["-1", "1"]},
        ]
        assert told["outputs"] == [{"name": "actions", "datatype": "FP32", "shape": ["-1", str(CHUNK), str(ACTIONS)]}]
        plain = server.post({"state": STATE, "seed": 3}).json["actions"]
        wanted = [InferRequestedOutput("actions")]
        answer = client.infer("tiny", [state(), seed(3)], outputs=wanted, request_id="mine")
        assert answer.as_numpy("actions").tolist() == [np.float32(plain).tolist()]
        response = answer.get_response()
        assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "mine")
        (more,) = json.loads(response.parameters["reflex"].string_param)
        assert more["request_id"] == "mine"
        assert more["batch"]["size"] == 1
        assert server.metrics()("reflex_requests_total", outcome="ok", wire="oip") == 1


def test_p32_the_model_names_the_policy(tiny: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", weights=-WEIGHTS)
    with serving(tiny, "--policy", f"other={other}") as (_, client):
        assert client.is_model_ready("other")
        assert client.get_model_metadata("other", as_json=True)["name"] == "other"
        for name, weights in (("other", -WEIGHTS), ("default", WEIGHTS)):
            answer = client.infer(name, [state(), seed(3)])
            assert np.allclose(answer.as_numpy("actions")[0], expected(STATE, 3, weights), atol=1e-5)
            assert answer.get_response().model_name == name
        with refused("NOT_FOUND"):
            client.infer("tiny", [state(), seed(3)])


def test_w50_pictures_come_as_arrays_and_as_files(tmp_path: Path) -> None:
    export = write_tiny(tmp_path / "export", cameras=("image",))
    file = io.BytesIO()
    PIL.Image.fromarray(PICTURE[0]).save(file, "PNG")
    options = ("--record", str(tmp_path / "record"), "--record-images", "full")
    with serving(export, *options) as (server, client):
        for pictures in (PICTURE, np.array([file.getvalue()], object)):
            client.infer("tiny", [tensor("image", pictures), state(), seed(1)])
        with refused("INVALID_ARGUMENT"):
            client.infer("tiny", [tensor("image", PICTURE[:, :, :, :2]), state()])
        server.stop()
    for asked in recorded(tmp_path / "record")[:2]:
        assert (np.asarray(PIL.Image.open(io.BytesIO(asked.images()["image"]))) == PICTURE[0]).all()


def test_w50_rows_are_requests_of_one_batch(tiny: Path) -> None:
    with serving(tiny, held=True, takes="0.001 * len(batch)") as (server, client), busy(server):
        rows = [[0.1 * i, -0.1 * i] for i in range(8)]
        _, found = begin(client, state(*rows), seed(*range(8)), request_id="r")
        server.reach(queued(8))
        server.release()
        answer = found.get(timeout=PATIENCE)
        assert np.allclose(answer.as_numpy("actions"), [expected(row, i) for i, row in enumerate(rows)], atol=1e-5)
        told = json.loads(answer.get_response().parameters["reflex"].string_param)
        assert [(item["request_id"], item["batch"]["size"]) for item in told] == [(f"r/{i}", 8) for i in range(8)]


def test_w50_sixteen_clients_share_a_batch(tiny: Path) -> None:
    with serving(tiny, held=True, takes="0.001 * len(batch)") as (server, client), busy(server):
        waiting = [begin(client, state([0.1 * i, 0.0]), seed(i))[1] for i in range(16)]
        server.reach(queued(16))
        server.release()
        answers = [found.get(timeout=PATIENCE) for found in waiting]
        for i, answer in enumerate(answers):
            assert np.allclose(answer.as_numpy("actions"), [expected([0.1 * i, 0.0], i)], atol=1e-5)
            (told,) = json.loads(answer.get_response().parameters["reflex"].string_param)
            assert told["batch"]["size"] == 16


def test_w50_parameters_and_sequences_are_identity_and_priority_goes_first(tiny: Path, tmp_path: Path) -> None:
    options = ("--record", str(tmp_path), "--max-batch-size", "1")
    with serving(tiny, *options, before=AGELESS, held=True) as (server, client):
        with busy(server):
            calls = []
            for place, more in enumerate(
                (
                    {"priority": 3, "parameters": {"robot_id": "arm", "episode_id": "e"}},
                    {"sequence_id": 7, "sequence_start": True, "request_id": "second"},
                    {"priority": 1, "sequence_id": "seven"},
                ),
                1,
            ):
                calls.append(begin(client, state([0.1 * place, 0.0]), **more)[1])
                server.reach(queued(place))
            server.release()
            for call in calls:
                assert call.get(timeout=PATIENCE).as_numpy("actions").shape == (1, CHUNK, ACTIONS)
        server.stop()
    urgent, plain, background = recorded(tmp_path)[1:]
    assert (background.robot_id, background.episode_id) == ("arm", "e")
    assert (plain.request_id, plain.episode_id, urgent.episode_id) == ("second", "7", "seven")


def test_w51_every_refusal_is_a_status(tiny: Path) -> None:
    with serving(tiny, "--max-body-bytes", "100000") as (server, client):
        for inputs in (
            [], [state(), tensor("image", PICTURE)], [tensor("state", np.zeros((1, 3), np.float32))],
            [tensor("state", np.float32([[np.nan, 0]]))], [tensor("state", np.zeros(2, np.float32))],
            [state(), tensor("seed", np.float32([[1]]))], [state(), state()],
        ):  # fmt: skip
            with refused("INVALID_ARGUMENT"):
                client.infer("tiny", inputs)
        with refused("INVALID_ARGUMENT"):
            client.infer("tiny", [state()], outputs=[InferRequestedOutput("values")])
        with refused("INVALID_ARGUMENT"):
            client.infer("tiny", [state()], parameters={"robot_id": "x" * 300})
        for ask in (
            lambda: client.infer("other", [state()]), lambda: client.infer("tiny", [state()], model_version="2"),
            lambda: client.get_model_metadata("other"), lambda: client.is_model_ready("other"),
        ):  # fmt: skip
            with refused("NOT_FOUND"):
                ask()
        with refused("RESOURCE_EXHAUSTED"):
            client.infer("tiny", [tensor("state", np.zeros((50_000, 2), np.float32))])
        with refused("UNIMPLEMENTED"):
            client.get_model_repository_index()
        assert client.infer("tiny", [state()]).as_numpy("actions").shape == (1, CHUNK, ACTIONS)
        assert server.metrics()("reflex_requests_total", outcome="client_error", wire="oip") == 12


def test_w51_a_row_that_fails_is_the_error_of_all_and_the_others_are_taken_back(tiny: Path) -> None:
    with serving(tiny, "--max-queue", "1", held=True) as (server, client), busy(server):
        with refused("RESOURCE_EXHAUSTED"):
            client.infer("tiny", [state([0.0, 0.0], [0.1, 0.0])])
        server.reach(lambda m: m("reflex_requests_total", outcome="cancelled", wire="oip") == 1)
        server.release()


def test_w51_full_and_late_have_their_status(tiny: Path) -> None:
    with serving(tiny, "--max-queue", "2", held=True) as (server, client), busy(server):
        waiting = [begin(client, state())[0] for _ in range(2)]
        server.reach(queued(2))
        with refused("RESOURCE_EXHAUSTED"):
            client.infer("tiny", [state()])
        for call in waiting:
            call.cancel()
        server.reach(queued(0))
        _, late = begin(client, state(), timeout=300_000)
        _, later = begin(client, state(), client_timeout=0.3)
        for found in (late, later):
            assert found.get(timeout=PATIENCE).status() == "StatusCode.DEADLINE_EXCEEDED"
        server.reach(queued(0))
        server.release()


def test_w51_the_deadline_of_the_call_is_that_of_the_request(tiny: Path) -> None:
    with serving(tiny, held=True, takes="60.0") as (server, client):
        for _ in range(4):
            client.infer("tiny", [state()])
        with busy(server):  # an estimate holds while a batch runs
            with refused("DEADLINE_EXCEEDED"):
                client.infer("tiny", [state()], client_timeout=30.0)
            assert server.metrics()("reflex_requests_total", outcome="rejected", wire="oip") == 1


def test_w51_who_cancels_while_queued_is_never_computed(tiny: Path) -> None:
    with serving(tiny, held=True) as (server, client), busy(server) as plug:
        call, found = begin(client, state([0.0, 0.0], [0.1, 0.0]))
        server.reach(queued(2))
        call.cancel()
        assert "CANCELLED" in str(found.get(timeout=PATIENCE).status())
        server.reach(lambda m: m("reflex_requests_total", outcome="cancelled", wire="oip") == 2)
        server.release()
        assert plug.answers()[0].status == 200
        assert server.metrics()("reflex_requests_total", outcome="ok", wire="oip") == 0


def test_w51_a_server_that_ends_answers_what_it_took_and_refuses_the_rest(tiny: Path) -> None:
    with serving(tiny, held=True) as (server, client), busy(server):
        _, found = begin(client, state(STATE), seed(1))
        server.reach(queued(1))
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining")
        with refused("UNAVAILABLE"):
            client.infer("tiny", [state()])
        server.release()
        assert np.allclose(found.get(timeout=PATIENCE).as_numpy("actions"), [expected(STATE, 1)], atol=1e-5)
        assert server.wait() == 0
        assert not any("Traceback" in line or " ERROR " in line for line in server.log)


def test_w51_a_key_is_metadata(tiny: Path) -> None:
    with serving(tiny, "--api-key", "secret") as (_, client):
        for headers in (None, {"authorization": "Bearer wrong"}):
            with refused("UNAUTHENTICATED"):
                client.infer("tiny", [state()], headers=headers)
        for headers in ({"authorization": "Bearer secret"}, {"x-reflex-key": "secret"}):
            assert client.infer("tiny", [state()], headers=headers).as_numpy("actions").shape[0] == 1
    with pytest.raises(AssertionError, match="needs --api-key"), Server(tiny, "--oip-grpc", "0.0.0.0:0"):
        pass


def request(**more: Any) -> Any:
    """A request as protobuf's own package writes it, with contents of each type."""
    sent = service_pb2.ModelInferRequest(model_name="m", model_version="1", id="i", **more)
    for name, value in (("a", True), ("b", -5), ("c", "text"), ("d", 0.5)):
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(sent.parameters[name], kind, value)
    sent.parameters["e"].uint64_param = 2**64 - 1
    for datatype, field, values in (
        ("BOOL", "bool_contents", [True, False]), ("INT8", "int_contents", [-1, 127]),
        ("INT32", "int_contents", [-(2**31), 1]), ("INT64", "int64_contents", [-(2**63), 1]),
        ("UINT8", "uint_contents", [0, 255]), ("UINT64", "uint64_contents", [2**64 - 1, 0]),
        ("FP32", "fp32_contents", [0.5, -1]), ("FP64", "fp64_contents", [0.1, 2]),
        ("BYTES", "bytes_contents", [b"a", b""]),
    ):  # fmt: skip
        tensor = sent.inputs.add(name=datatype, datatype=datatype, shape=[2, 1])
        getattr(tensor.contents, field).extend(values)
    sent.outputs.add(name="actions")
    return sent


def test_w49_messages_are_read_as_protobuf_writes_them() -> None:
    model, version, found = decode(request().SerializeToString())
    assert (model, version, found.id, found.outputs) == ("m", "1", "i", ["actions"])
    assert found.parameters == {"a": True, "b": -5, "c": "text", "d": 0.5, "e": 2**64 - 1}
    values = {t.name: t.values if isinstance(t.values, list) else t.values.ravel().tolist() for t in found.inputs}
    assert values == {
        "BOOL": [True, False], "INT8": [-1, 127], "INT32": [-(2**31), 1], "INT64": [-(2**63), 1], "UINT8": [0, 255],
        "UINT64": [2**64 - 1, 0], "FP32": [0.5, -1], "FP64": [0.1, 2], "BYTES": [b"a", b""],
    }  # fmt: skip
    with pytest.raises(ClientError, match="raw_input_contents"):
        decode(request(raw_input_contents=[b"1"]).SerializeToString())


def test_w49_our_messages_are_those_of_the_protocol() -> None:
    pairs = {
        "InferTensor": service_pb2.ModelInferRequest.InferInputTensor,
        "InferTensorContents": service_pb2.InferTensorContents,
        "InferParameter": service_pb2.InferParameter,
        "InferRequestedOutput": service_pb2.ModelInferRequest.InferRequestedOutputTensor,
        "TensorMetadata": service_pb2.ModelMetadataResponse.TensorMetadata,
        "ModelRequest": service_pb2.ModelMetadataRequest,
    }
    for name, own in messages.ModelInferRequest.DESCRIPTOR.file.message_types_by_name.items():
        if name in ("Pickle", "ObservationPart"):  # LeRobot's
            continue
        stock = (pairs.get(name) or getattr(service_pb2, name)).DESCRIPTOR
        for field in own.fields:
            theirs = stock.fields_by_number[field.number]
            assert (field.name, field.type, field.is_repeated) == (theirs.name, theirs.type, theirs.is_repeated)


def _field(number: int, data: bytes) -> bytes:
    length = b""
    size = len(data)
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def test_w49_a_message_that_grows_when_it_is_parsed_is_refused_before() -> None:
    plain = service_pb2.ModelInferRequest(model_name="m").SerializeToString()
    raw = service_pb2.ModelInferRequest(raw_input_contents=[bytes(3 << 20)]).SerializeToString()
    many = b"\x2a\0" * (1 << 20)  # tensors without fields, two bytes each
    for bomb in (
        many, many[:10_000], _field(5, _field(5, b"\x42\0" * (1 << 20))), raw + many,
        _field(5, _field(5, _field(2, bytes(2 << 20)))),
        b"\x0b\x0c" + many, b"\x09" + bytes(8) + many, b"\x0d" + bytes(4) + many,
        b"\x3a" + b"\x81\x80\x80\x80\x80\x80\x80\x80\x80\x02" + b"a" + many,  # a length of 2^64 + 1
    ):  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ClientError, match=r"has over 4096 fields|incomplete, or of another"):
            decode(plain + bomb)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10
    with pytest.raises(ClientError, match="it is incomplete"):
        decode(raw[:-1])
    with pytest.raises(ClientError, match="has 1 elements"):
        decode(raw)


def test_w49_raw_tensors_are_views_of_the_message() -> None:
    sent = service_pb2.ModelInferRequest(raw_input_contents=[bytes(3 << 20)])
    sent.inputs.add(name="image", datatype="UINT8", shape=[3, 1 << 20])
    data = sent.SerializeToString()
    tracemalloc.start()
    _, _, found = decode(data)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert np.shares_memory(found.inputs[0].values, np.frombuffer(data, np.uint8))


@FRESH
def test_w49_broken_requests_raise_nothing_but_ours(count: int) -> None:
    sent = request()
    del sent.inputs[:3], sent.inputs[2:5]
    check("oip_grpc", [sent.SerializeToString()], decode, count)


def test_w50_a_client_of_grpc_alone_is_served(tiny: Path) -> None:
    """As those in other languages: no metadata, and the bytes of protobuf's package."""
    with Server(tiny, "--oip-grpc", "127.0.0.1:0") as server:
        address = server.wait_log("clients of OIP over gRPC: ").rpartition(" ")[2]
        sent = service_pb2.ModelInferRequest(model_name="tiny")
        asked = sent.inputs.add(name="state", datatype="FP32", shape=[1, 2])
        asked.contents.fp32_contents.extend(STATE)
        seeded = sent.inputs.add(name="seed", datatype="INT64", shape=[1])
        seeded.contents.int64_contents.append(3)
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            answer = service_pb2.ModelInferResponse.FromString(call(sent.SerializeToString(), timeout=PATIENCE))
        found = np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(CHUNK, ACTIONS)
        assert np.allclose(found, expected(STATE, 3), atol=1e-5)
