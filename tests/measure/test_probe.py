"""`reflex probe` against real servers: ours in all states, another one of openpi, and what is no such server."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio
from openpi_client import msgpack_numpy
from websockets.asyncio.server import ServerConnection, serve

from reflex_runtime.bench.callers import CALLERS
from reflex_runtime.bench.expected import Expected
from reflex_runtime.bench.probe import ServerProbe, probe
from reflex_runtime.bench.target import Target
from reflex_runtime.cli import main
from reflex_runtime.policies.wires.groot import decode, encode, modality_config
from serving.exports import ACTIONS, CHUNK, write_tiny
from serving.harness import Server
from serving.openai_toy import Toy

ONE = ("json-numpy", "vla-eval")  # their answers are one action
CAMERAS = {"observation/image": "uint8 [6, 8, 3]", "observation/wrist_image": "uint8 [6, 8, 3]"}


def probed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Exit status, and the JSON."""
    status = main(["probe", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def by_wire(found: Any) -> dict[str, Any]:
    return {wire["wire"]: wire for wire in found["wires"]}


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_every_wire_of_a_server_answers(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = probed(capsys, url(server))
    wires = by_wire(found)
    assert (status, found["works"], found["server"]["state"]) == (0, True, "ready")
    assert found["server"]["model"].startswith("tiny@")
    assert list(wires) == list(CALLERS)
    for name, wire in wires.items():
        assert (wire["works"], wire["error"]) == (True, ""), wire
        assert wire["actions"][-2:] == {"lerobot": [CHUNK]}.get(name, [ACTIONS] if name in ONE else [CHUNK, ACTIONS])
        assert wire["answer_ms"] > 0.0
    assert wires["openpi"]["sent"] == CAMERAS | {"observation/state": "float32 [2]"}
    assert wires["openpi"]["announced"]["reflex"]["actions"] == [CHUNK, ACTIONS]
    assert {wire["known"] for wire in wires.values()} == {"/config"}
    assert wires["gr00t"]["announced"]["video"]["as_json"]["modality_keys"] == ["image", "image_wrist"]
    assert wires["vla-eval"]["announced"]["model_server"] == "tiny"
    assert wires["act-json"]["sent"]["image_wrist"] == "uint8 [6, 8, 3]"


def test_the_table_says_what_is_sent_and_what_comes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", url(server), "--wire", "openpi"]) == 0
    told = capsys.readouterr().out
    for part in ("reflex 0.1.0 tiny@", ": ready", "observation/wrist_image: uint8 [6, 8, 3]", f"[{CHUNK}, {ACTIONS}]"):
        assert part in told
    assert "act-json" not in told


def test_a_key_is_asked_for_and_taken(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tiny, "--api-key", "s3cret") as server:
        status, found = probed(capsys, url(server))
        assert (status, found["works"], found["server"]["locked"]) == (1, False, True)
        for wire in found["wires"]:
            assert wire["error"] == "unauthorized"
            assert wire["advice"].startswith("give the server's key: --api-key")
        status, found = probed(capsys, url(server), "--api-key", "wrong")
        assert {wire["advice"] for wire in found["wires"]} == {"the server has another key than this one"}
        for words, told in (((), "needs a key: --api-key"), (("--api-key", "wrong"), "has another key than this one")):
            assert main(["probe", url(server), *words]) == 1
            shown = capsys.readouterr().out
            assert shown.startswith(f"{url(server)}: reflex: ready, {told}\n")
            assert shown.count("send the key as Authorization") == 1
            assert "act-json, act-msgpack, openpi, json-numpy, oip, vla-eval, xpolicylab: unauthorized: " in shown
        status, found = probed(capsys, url(server), "--api-key", "s3cret")
        assert (status, all(wire["works"] for wire in found["wires"])) == (0, True)


def test_a_server_without_a_model_says_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(write_tiny(tmp_path / "broken", fails=True), until="not serving on") as server:
        status, found = probed(capsys, url(server), "--timeout-s", "5")
        wires = by_wire(found)
        assert (status, found["server"]["state"]) == (1, "warmup_failed")
        assert wires["act-json"]["error"] == "not_ready"
        assert "until /health says ready" in wires["act-json"]["advice"]
        assert "could not be started" in wires["openpi"]["message"]
        assert main(["probe", url(server)]) == 1
        assert "warmup_failed" in capsys.readouterr().out


def test_where_nothing_listens_it_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["probe", f"127.0.0.1:{port}"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"reflex probe: cannot connect to http://127.0.0.1:{port}: ")
    assert told.err.count("\n") == 1
    status, found = probed(capsys, f"127.0.0.1:{port}")
    assert (status, found["works"], found["error"]) == (1, False, "unreachable")


@pytest.mark.parametrize("key", ["", "s3cret"])
def test_the_server_of_a_language_model_is_one_line(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Toy(api_key=key) as toy:
        address = f"http://127.0.0.1:{toy.port}"
        assert main(["probe", address]) == 1
        told = capsys.readouterr()
        line = f"{address}: serves a language model; probe and bench ask robot policies\n"
        assert (told.out, told.err) == ("", f"reflex probe: {line}")
        status, found = probed(capsys, address)
        assert (status, found["works"], found["error"]) == (1, False, "language_model")
        assert main(["bench", address, "--wire", "openpi"]) == 2
        assert "serves a language model; probe and bench ask robot policies" in capsys.readouterr().err


class _Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>a page</html>")

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def pages(kind: type[http.server.BaseHTTPRequestHandler] = _Pages) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as plain:
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{plain.server_port}"
        plain.shutdown()


def test_a_server_of_pages_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with pages() as address:
        status, found = probed(capsys, address)
        assert (status, found["server"]) == (1, None)
        for wire in found["wires"]:
            assert wire["works"] is False
            assert wire["advice"] == "no server of this protocol is there; is it another port?", wire
        assert main(["probe", address]) == 1
        assert "no server of reflex" in capsys.readouterr().out


def droid(wanted: str, metadata: dict[str, Any], **also: Any) -> ServerProbe:
    """What is found at a server of openpi's own making that takes observations with this name."""

    async def session(socket: ServerConnection) -> None:
        packer = msgpack_numpy.Packer()
        await socket.send(packer.pack(metadata))
        async for message in socket:
            if wanted not in msgpack_numpy.unpackb(message):
                await socket.send(f"Traceback (most recent call last):\n  …\nKeyError: '{wanted}'\n")
                await socket.close(1011)
                return
            await socket.send(packer.pack({"actions": np.zeros((10, 8)), "server_timing": {"infer_ms": 1.0}}))

    async def run() -> ServerProbe:
        async with serve(session, "127.0.0.1", 0, compression=None) as listening:
            port = next(iter(listening.sockets)).getsockname()[1]
            return await probe(Target.of(f"ws://127.0.0.1:{port}"), ("openpi",), **also)

    return asyncio.run(run())


def test_another_server_of_openpi_is_asked_with_what_its_clients_send() -> None:
    found = droid("observation/joint_position", {"policy": "pi0"})
    (wire,) = found.wires
    assert (wire.works, wire.known, wire.actions) == (True, "a guess: DROID", [10, 8])
    assert wire.announced == {"policy": "pi0"}


def test_where_no_guess_fits_the_servers_own_words_are_told_and_an_observation_helps() -> None:
    found = droid("observation/left_hand", {})
    assert (found.wires[0].error, found.wires[0].message) == ("server_error", "KeyError: 'observation/left_hand'")
    found = droid("observation/left_hand", {}, own={"observation/left_hand": np.zeros(3)})
    assert (found.wires[0].works, found.wires[0].known) == (True, "--observation")


def test_what_xpolicylab_says_in_its_hello_is_sent(seeing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(seeing) as server:
        words = f"ws://127.0.0.1:{server.port}/xpolicylab", "--wire", "xpolicylab"
        status, found = probed(capsys, *words)
    (wire,) = found["wires"]
    assert (status, wire["known"], wire["actions"]) == (0, "hello_ack", [CHUNK, ACTIONS])
    assert wire["announced"]["reflex"]["model_id"] == "tiny"
    cameras = {"image": "uint8 [6, 8, 3]", "image_wrist": "uint8 [6, 8, 3]"}
    assert wire["sent"] == cameras | {"state": "float32 [2]"}


def test_an_observation_of_ones_own_is_sent(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = np.zeros((12, 16, 3), np.uint8)
    seen = {"observation/image": picture, "observation/wrist_image": picture, "observation/state": np.zeros(2)}
    np.savez(tmp_path / "seen.npz", **seen)
    words = url(server), "--wire", "openpi", "--observation"
    status, found = probed(capsys, *words, str(tmp_path / "seen.npz"))
    assert (status, found["wires"][0]["sent"]["observation/image"]) == (0, "uint8 [12, 16, 3]")
    np.savez(tmp_path / "half.npz", **{"observation/image": picture})
    status, found = probed(capsys, *words, str(tmp_path / "half.npz"))
    assert (status, found["wires"][0]["error"]) == (1, "invalid_request")
    assert "observation/wrist_image: missing" in found["wires"][0]["message"]
    own_forms = ("vla-eval", "xpolicylab", "gr00t", "oip", "oip-grpc", "lerobot", "json-numpy")
    for wire in own_forms:  # of errors
        status, found = probed(capsys, url(server), "--wire", wire, "--observation", str(tmp_path / "half.npz"))
        assert (status, found["wires"][0]["error"]) == (1, "invalid_request"), found
        assert found["wires"][0]["message"]


def test_the_dialect_of_roboarena_is_known_from_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "image_resolution needs_wrist_camera n_external_cameras needs_stereo_camera needs_session_id action_space"
    wires = {"openpi": {"dialect": "roboarena", "metadata": dict.fromkeys(names.split(), None)}}
    with Server(write_tiny(tmp_path / "e", wires=wires)) as server:
        status, found = probed(capsys, url(server), "--wire", "openpi")
        assert (status, found["wires"][0]["known"]) == (0, "/config")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["8000"], "URL=8000: must be as http://127.0.0.1:8000 or ws://"),
        (["ftp://x"], "URL=ftp://x: must be as"),
        (["x", "--wire", "openpy"], "--wire=openpy: must be one of act-json, "),
        (["x", "--wire", "openpy"], "did you mean openpi?"),
        (["ws://x", "--wire", "act-json"], "--wire=act-json: not at ws://; give the URL as http://, https://"),
        (["x", "--timeout-s", "0"], "--timeout-s=0: must be in [0.1, 600] s"),
        (["x", "--observation", "y.npz"], "--observation needs --wire"),
        (["x", "--wire", "openpi", "--observation", "no.npz"], "--observation=no.npz: cannot be read as .npz"),
        (["x", "--api-key", "schlüssel"], "--api-key: must be printable ASCII"),
    ],
)
def test_a_wrong_command_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"images": 3},
        {"images": {"a": [1]}},
        {"images": {}, "state": {"names": [], "dim": 2}},
        {"images": {}, "state": {"names": ["a"], "dim": "x"}},
    ],
)
def test_what_cannot_be_read_as_an_expectation_is_none(told: Any) -> None:
    assert Expected.of("metadata", told) is None


def test_gr00t_is_found_by_its_own_address_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = {"images": {"image": "ego_view"}, "state": [["arm", 1], ["gripper", 1]], "prompt": "task"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    export = write_tiny(tmp_path / "e", cameras=("image",), wires={"gr00t": groups})
    with Server(export, "--gr00t", address, "--api-key", "s3cret") as server:
        status, found = probed(capsys, address, "--api-key", "s3cret")
        (wire,) = found["wires"]
        assert (status, wire["known"], wire["actions"]) == (0, "ping", [1, CHUNK, ACTIONS])
        assert wire["sent"]["video.ego_view"] == "uint8 [6, 8, 3]"
        assert list(wire["sent"]) == ["video.ego_view", "state.arm", "state.gripper"]
        assert main(["probe", address, "--api-key", "s3cret"]) == 0
        assert f"{address}: asked over tcp only" in capsys.readouterr().out
        status, found = probed(capsys, url(server), "--wire", "gr00t", "--api-key", "s3cret")
        assert (status, found["wires"][0]["known"], found["wires"][0]["works"]) == (0, "/config", True)
        status, found = probed(capsys, address, "--api-key", "wrong")
        assert (status, found["wires"][0]["error"]) == (1, "unauthorized")


def test_gr00t_says_the_sizes_of_a_policy_whose_export_names_no_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with Server(write_tiny(tmp_path / "e"), "--gr00t", address):
        status, found = probed(capsys, address)
        (wire,) = found["wires"]
        assert (status, wire["sent"]["state"], wire["actions"]) == (0, "float32 [2]", [1, CHUNK, ACTIONS]), wire


@pytest.mark.parametrize("pong", [{"status": "ok"}, {"error": "Unknown endpoint: ping"}])
def test_another_server_of_gr00t_is_asked_by_its_names(pong: dict[str, str]) -> None:
    answers = {
        "get_modality_config": {
            "video": modality_config(["ego_view"], 1, False),
            "state": modality_config(["arm"], 1, False),
        },
        "ping": pong,
        "get_action": [{"arm": np.zeros((1, 5, 7), np.float32)}, {}],
    }

    async def serve_three(socket: Any) -> None:
        for _ in answers:
            await socket.send(encode(answers[decode(await socket.recv())["endpoint"]]))

    async def run() -> ServerProbe:
        with zmq.asyncio.Context() as context, context.socket(zmq.REP) as socket:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            serving = asyncio.create_task(serve_three(socket))
            found = await probe(Target.of(f"tcp://127.0.0.1:{port}"))
            serving.cancel()
            return found

    (wire,) = asyncio.run(run()).wires
    assert (wire.known, wire.actions) == ("the modalities", [1, 5, 7]), wire
    assert wire.sent == {"video.ego_view": "uint8 [224, 224, 3]", "state.arm": "float32 [1]"}


def test_a_listener_that_is_not_there_is_told(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tiny) as server:
        status, found = probed(capsys, url(server), "--wire", "gr00t", "--timeout-s", "1")
        assert (status, found["wires"][0]["error"]) == (1, "not_found")
        assert found["wires"][0]["advice"] == "start the server with --gr00t, or give the listener's own URL"
        status, found = probed(capsys, url(server))
        assert "gr00t" not in by_wire(found)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    status, found = probed(capsys, address, "--timeout-s", "0.3")
    assert (status, found["wires"][0]["error"]) == (1, "timed_out")


class _Triton(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/v2/models/arm"
        tensors = [
            {"name": "state", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "seen", "datatype": "UINT8", "shape": [-1, -1, -1, 3]},
        ]
        self._answer(200 if found else 404, {"name": "arm", "inputs": tensors} if found else {})

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v2/repository/index":
            return self._answer(200, [{"name": "arm", "state": "READY"}])
        if len(sent) < 224 * 224 * 3:
            return self._answer(400, {"error": "[request id: <id_unknown>] unexpected shape for input 'seen'"})
        return self._answer(200, {"model_name": "arm", "outputs": [{"name": "actions", "shape": [1, 5, 7]}]})

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None: ...


def test_another_server_of_oip_is_asked_by_its_own_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pages(_Triton) as address:
        status, found = probed(capsys, address, "--wire", "oip")
        (wire,) = found["wires"]
        assert (status, wire["known"], wire["actions"]) == (0, "the model's metadata", [1, 5, 7]), wire
        assert wire["sent"] == {"seen": "uint8 [224, 224, 3]", "state": "float32 [3]"}
        np.savez(tmp_path / "small.npz", seen=np.zeros((2, 2, 3), np.uint8))
        status, found = probed(capsys, address, "--wire", "oip", "--observation", str(tmp_path / "small.npz"))
        assert (status, found["wires"][0]["error"]) == (1, "http_400")
        assert "unexpected shape" in found["wires"][0]["message"]


def test_listeners_over_grpc_want_the_key_and_are_found_by_their_own_address(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with Server(tiny, "--lerobot", address, "--api-key", "s3cret") as server:
        status, found = probed(capsys, url(server), "--wire", "lerobot", "--api-key", "s3cret")
        assert (status, found["wires"][0]["actions"], found["wires"][0]["known"]) == (0, [CHUNK], "/config")
        status, found = probed(capsys, f"grpc://{address}")
        wires = by_wire(found)
        assert (status, wires["lerobot"]["error"], wires["oip-grpc"]["error"]) == (1, "unauthorized", "not_found")
        assert wires["oip-grpc"]["advice"] == "give the server's http:// URL: it says what its listeners expect"
        status, found = probed(capsys, f"grpc://{address}", "--wire", "lerobot", "--api-key", "s3cret")
        assert (status, found["wires"][0]["error"]) == (1, "invalid_request")
        assert found["wires"][0]["advice"].startswith("give the server's http:// URL: it says what its listeners")
        np.savez(tiny.parent / "state.npz", state=np.zeros(2))
        words = f"grpc://{address}", "--wire", "lerobot", "--observation", str(tiny.parent / "state.npz")
        assert probed(capsys, *words, "--api-key", "s3cret")[0] == 0
    status, found = probed(capsys, f"grpc://{address}", "--wire", "lerobot", "--timeout-s", "2")
    assert (status, found["wires"][0]["error"]) in ((1, "unreachable"), (1, "timed_out"))
