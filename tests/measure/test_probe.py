"""`reflex probe` against real servers: ours in all states, another one of openpi, and what is no such server."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench.load.__main__ import main as bench
from openpi_client import msgpack_numpy
from websockets.sync.server import ServerConnection, serve

from feeds.commands import Feeds
from reflex_runtime.cli import main, probe
from reflex_runtime.cli.probe import WIRES, example
from reflex_runtime.client import Client
from reflex_runtime.demo import POLICY
from reflex_runtime.web.server_address import ServerAddress
from robots.wires.groot_clients import port_of
from serving.exports import ACTIONS, CHUNK, write_tiny
from serving.harness import Server
from serving.openai_toy import Toy
from serving.place import Place

ASKED = ("act", "openpi")  # on the port of HTTP
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
    assert list(wires) == list(WIRES)
    for name, wire in wires.items():
        assert (wire["works"], wire["error"], wire["known"]) == (True, "", "/config"), wire
        assert wire["actions"] == ([CHUNK, ACTIONS] if name in (*ASKED, "lerobot") else None)
        assert (wire["answer_ms"] is None) == (wire["actions"] is None), "a greeting is no answer"
    assert wires["openpi"]["sent"] == CAMERAS | {"observation/state": "float32 [2]"}
    assert wires["openpi"]["announced"]["reflex"]["actions"] == [CHUNK, ACTIONS]
    assert wires["gr00t"]["announced"]["video"]["as_json"]["modality_keys"] == ["image", "image_wrist"]
    assert wires["act"]["sent"]["image_wrist"] == "uint8 [6, 8, 3]"


@pytest.fixture
def so101(tmp_path: Path) -> Iterator[Server]:
    """A policy as `reflex export` writes it: of a kind that LeRobot names, with the motors of its robot."""
    robot = {"name": "so101", "state_names": ["shoulder.pos", "elbow.pos"], "control_rate_hz": 30}
    export = write_tiny(tmp_path / "e", cameras=("front", "wrist"), embodiment="embodiment.json", model_type="act")
    (export / "embodiment.json").write_text(json.dumps(robot))
    with Server(export, "--lerobot", "127.0.0.1:0") as server:
        yield server


def test_a_robot_of_lerobot_is_what_config_says_of_its_motors(
    so101: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its listener is found where it is, whatever port was asked for; the load generator asks as the same robot."""
    status, found = probed(capsys, url(so101), "--wire", "lerobot")
    (wire,) = found["wires"]
    assert (status, wire["error"], wire["actions"], wire["known"]) == (0, "", [CHUNK, ACTIONS], "/config")
    camera, motor = "uint8 [6, 8, 3]", "float32 [1]"
    assert wire["sent"] == {"front": camera, "wrist": camera, "shoulder.pos": motor, "elbow.pos": motor}
    quick = ("--rounds", "1", "--round-s", "0.3", "--warmup-s", "0")
    assert bench([url(so101), "--wire", "lerobot", *quick, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["servers"]
    assert (told["errors"], told["answers"] > 0) == ({}, True)


def test_an_observation_of_a_robot_of_lerobot_is_sent(
    so101: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = {name: np.zeros((480, 640, 3), np.uint8) for name in ("front", "wrist")}  # in several messages
    np.savez(tmp_path / "seen.npz", **seen, **{"shoulder.pos": 0.5, "elbow.pos": np.float32(1.0), "task": "go"})
    words = ["--wire", "lerobot", "--observation", str(tmp_path / "seen.npz")]
    status, found = probed(capsys, url(so101), *words)
    assert (status, found["wires"][0]["error"], found["wires"][0]["actions"]) == (0, "", [CHUNK, ACTIONS])
    np.savez(tmp_path / "seen.npz", **seen, **{"elbow.pos": 0.5, "shoulder.pos": 0.5})
    status, found = probed(capsys, url(so101), *words)
    (wire,) = found["wires"]
    assert (status, wire["error"]) == (1, "invalid_request")
    assert "the motors are elbow.pos, shoulder.pos; the export has shoulder.pos, elbow.pos" in wire["message"]


def test_the_table_says_what_is_expected_and_what_comes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", url(server), "--wire", "openpi"]) == 0
    told = capsys.readouterr().out
    for part in ("reflex 0.1.0 tiny@", ": ready", "observation/wrist_image: uint8 [6, 8, 3]", f"[{CHUNK}, {ACTIONS}]"):
        assert part in told
    assert "json-numpy" not in told


def test_a_probe_sends_no_word_that_the_policy_may_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with Server(POLICY) as server:
        status, found = probed(capsys, url(server))
        assert (status, by_wire(found)["act"]["sent"]["instruction"]) == (0, "text")
        with Client(url(server)) as client:
            client.act(image=np.zeros((8, 8, 3), np.uint8), instruction="zebra", state=[0.0] * 4)
        assert "'zebra'" in server.wait_log("does not know")  # the first line


def test_the_time_of_act_begins_when_the_client_is_made(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(Client):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            now[0] += 5.0

    monkeypatch.setattr(probe, "Client", Slow)
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    asked = ServerAddress.of(url(server), probe.HTTP)
    assert probe.probe(asked, "", 5.0, "act", probe.look(asked, "")).answer_ms == 0.0


def test_a_key_is_asked_for_and_taken(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tiny, "--api-key", "s3cret") as server:
        for words in ((), ("--api-key", "wrong")):
            status, found = probed(capsys, url(server), *words)
            assert (status, found["works"]) == (1, False)
            for name in ASKED:
                wire = by_wire(found)[name]
                assert (wire["error"], wire["advice"][:24]) == ("unauthorized", "give the server's key: -")
        assert main(["probe", url(server)]) == 1
        shown = capsys.readouterr().out
        assert shown.startswith(f"{url(server)}: reflex: ready\n")
        assert "act, openpi: unauthorized: " in shown
        status, found = probed(capsys, url(server), "--api-key", "s3cret")
        assert (status, all(wire["works"] for wire in found["wires"])) == (0, True)


def test_a_server_without_a_model_says_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(write_tiny(tmp_path / "broken", fails=True), until="not serving on") as server:
        status, found = probed(capsys, url(server), "--timeout-s", "5")
        wires = by_wire(found)
        assert (status, found["server"]["state"]) == (1, "warmup_failed")
        assert wires["act"]["error"] == "not_ready"
        assert "until the state in /health is ready" in wires["act"]["advice"]
        assert "could not be started" in wires["openpi"]["message"]
        assert main(["probe", url(server)]) == 1
        assert "warmup_failed" in capsys.readouterr().out


def test_where_nothing_listens_it_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Place() as place:
        assert main(["probe", f"127.0.0.1:{place.port}"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"reflex probe: 127.0.0.1:{place.port}: nothing listens there")
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("key", ["", "s3cret"])
def test_the_server_of_a_language_model_is_one_line(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Toy(api_key=key) as toy:
        assert main(["probe", f"http://127.0.0.1:{toy.port}"]) == 2
        at = f"http://127.0.0.1:{toy.port}"
        line = f"{at}: serves a language model; {at}/docs has a command that calls it\n"
        assert capsys.readouterr().err == f"reflex probe: {line}"


def test_feeds_are_one_line_with_their_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Feeds("a=shapes:seed=1,fps=3", "--onnx", "shapes", "--port", "0", cwd=tmp_path) as feeds:
        at = f"http://127.0.0.1:{feeds.port}"
        assert main(["probe", at]) == 2
        line = f"{at}: runs feeds; {at}/feeds shows them, {at}/docs has all paths\n"
        assert capsys.readouterr().err == f"reflex probe: {line}"


class _Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>a page</html>")

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def pages() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as plain:
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{plain.server_port}"
        plain.shutdown()


def test_a_policy_that_is_not_served_is_told(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", f"{url(server)}/policies/amr"]) == 2
    told = f"reflex probe: {url(server)}/policies/amr: policy 'amr' is not served, only default\n"
    assert capsys.readouterr().err == told


def test_a_server_of_pages_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with pages() as address:
        status, found = probed(capsys, address)
        assert (status, found["server"], found["works"]) == (1, None, False)
        assert by_wire(found)["openpi"]["advice"] == "no server of this protocol listens there; check the port"
        assert main(["probe", address]) == 1
        told = capsys.readouterr().out
        assert "not a Reflex server" in told
        assert "<html" not in told.lower()
        assert "docs/errors.md" not in told


def test_a_server_of_several_policies_is_probed_by_policy(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(f"--policy=arm={tiny}", "--policy", f"hand={tiny}") as server:
        _, found = probed(capsys, url(server), "--wire", "act")
        assert found["wires"][0]["advice"] == f"probe one policy: reflex probe {url(server)}/policies/NAME"
        assert probed(capsys, f"{url(server)}/policies/arm", "--wire", "act")[0] == 0


def test_another_server_of_openpi_is_asked_with_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def session(socket: ServerConnection) -> None:
        packer = msgpack_numpy.Packer()
        socket.send(packer.pack({"policy": "pi0"}))
        if "hand" in msgpack_numpy.unpackb(socket.recv()):
            socket.send(packer.pack({"actions": np.zeros((10, 8)), "server_timing": {"infer_ms": 1.0}}))
        else:
            socket.send("Traceback (most recent call last):\n  …\nKeyError: 'hand'\n")

    np.savez(tmp_path / "seen.npz", hand=np.zeros(3))
    with serve(session, "127.0.0.1", 0, compression=None) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        words = f"ws://127.0.0.1:{other.socket.getsockname()[1]}", "--wire", "openpi"
        status, found = probed(capsys, *words, "--observation", str(tmp_path / "seen.npz"))
        (wire,) = found["wires"]
        assert (status, wire["known"], wire["actions"]) == (0, "--observation", [10, 8])
        assert wire["announced"] == {"policy": "pi0"}
        status, found = probed(capsys, *words)
        assert (status, found["wires"][0]["message"]) == (1, "KeyError: 'hand'")
        other.shutdown()


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


def test_a_name_that_act_does_not_know_is_one_line(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "seen.npz", joints=np.zeros(2))
    assert main(["probe", url(server), "--wire", "act", "--observation", str(tmp_path / "seen.npz")]) == 2
    assert "--observation: /act has no field joints" in capsys.readouterr().err


def test_the_environments_proxy_is_not_asked_for_a_server_on_this_machine(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    status, found = probed(capsys, url(server))
    assert (status, [wire["wire"] for wire in found["wires"] if not wire["works"]]) == (0, [])


def test_the_dialect_of_roboarena_is_known_from_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "image_resolution needs_wrist_camera n_external_cameras needs_stereo_camera needs_session_id action_space"
    wires = {"openpi": {"dialect": "roboarena", "metadata": dict.fromkeys(names.split(), None)}}
    with Server(write_tiny(tmp_path / "e", wires=wires)) as server:
        status, found = probed(capsys, url(server), "--wire", "openpi")
        assert (status, found["wires"][0]["known"]) == (0, "/config")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["8000"], "URL='8000': must be like http://127.0.0.1:8000"),
        (["ftp://x"], "URL='ftp://x': must be like"),
        (["x", "--wire", "openpy"], "--wire=openpy: must be one of act, "),
        (["x", "--wire", "openpy"], "did you mean openpi?"),
        (["ws://x", "--wire", "act"], "--wire=act: not at ws://; give the URL as http://, https://"),
        (["x", "--timeout-s", "0"], "--timeout-s=0: must be in [0.1, 600] s"),
        (["x", "--observation", "y.npz"], "--observation needs --wire"),
        (["x", "--wire", "openpi", "--observation", "no.npz"], "--observation=no.npz: cannot be read as .npz"),
        (["x", "--api-key", "schlüssel"], "--api-key: must be printable ASCII"),
    ],
)
def test_a_wrong_command_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["probe", *words])
    except SystemExit as error:  # argparse's own
        status = int(error.code or 0)
    assert status == 2
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
    assert example(told) is None


def test_listeners_want_the_key_and_are_found_by_their_own_address(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listens = "--lerobot", "127.0.0.1:0", "--gr00t", "tcp://127.0.0.1:0"
    with Server(tiny, *listens, "--api-key", "s3cret") as server:
        robots = server.wait_log("clients of LeRobot: ").rpartition(" ")[2]
        zmq = f"127.0.0.1:{port_of(server)}"
        for wire, address in (("lerobot", f"grpc://{robots}"), ("gr00t", f"tcp://{zmq}")):
            for where in (url(server), address):
                status, found = probed(capsys, where, "--wire", wire, "--api-key", "s3cret")
                assert (status, found["wires"][0]["works"]) == (0, True)
            main(["probe", address, "--wire", wire, "--api-key", "s3cret"])
            assert "not a Reflex server" not in capsys.readouterr().out
            status, found = probed(capsys, address, "--wire", wire, "--api-key", "wrong")
            assert (status, found["wires"][0]["error"]) == (1, "unauthorized")
        status, found = probed(capsys, f"grpc://{robots}", "--api-key", "s3cret")
        assert (status, by_wire(found)["oip-grpc"]["error"]) == (0, "not_found")
        assert main(["probe", url(server), "--wire", "oip-grpc", "--api-key", "s3cret"]) == 2
        assert "/config has no --oip-grpc: start the server with it" in capsys.readouterr().err
        assert "oip-grpc" not in by_wire(probed(capsys, url(server), "--api-key", "s3cret")[1])
    with Place() as place:
        for scheme in ("grpc", "tcp"):
            status, found = probed(capsys, f"{scheme}://127.0.0.1:{place.port}", "--timeout-s", "0.3")
            assert status == 1
            assert found["wires"][-1]["error"] in ("unreachable", "timed_out")
