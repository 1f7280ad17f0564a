"""json-numpy on POST /act: its own package writes and reads it, through `requests`, as the robots of OpenVLA do."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import json_numpy
import numpy as np
import PIL.Image
import pybase64
import pytest

from reflex_runtime.robots import Export, PolicySpec
from reflex_runtime.robots.policy.spec import WireMap
from reflex_runtime.robots.serving.question import JSON_NUMPY, ObservationReader
from reflex_runtime.robots.wires.json_numpy import GrootJson, JsonNumpy, decode, is_json_numpy
from reflex_runtime.web.errors import ClientError
from robots.wires.broken import FRESH, check
from serving.exports import CHUNK, expected, write_tiny
from serving.harness import Answer, Server
from serving.requests import numbered
from serving.requests import right as right_act

PICTURE = np.full((6, 8, 3), 7, np.uint8)
SEEN = {"image": PICTURE, "instruction": "open the door", "unnorm_key": "bridge_orig"}
STATE = np.array([0.3, -0.3])
WANTED = expected([0.3, -0.3], 5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    export = write_tiny(
        tmp_path_factory.mktemp("seeing") / "export",
        cameras=("image", "wrist"),
        wires={"json-numpy": {"images": {"wrist": "left_wrist_image"}}},
    )
    with Server(export) as server:
        yield server


def ask(server: Server, observation: dict[str, Any], quoted: bool = False) -> Answer:
    state = {} if "proprio" in observation else {"state": STATE}
    body = json_numpy.dumps({"left_wrist_image": PICTURE, **state, "seed": 5} | observation)
    if quoted:
        body = json.dumps({"encoded": body})
    return server.ask("POST", "/act", body.encode(), {"Content-Type": "application/json"})


def test_w16_openvla_gets_the_first_action_as_an_array(server: Server) -> None:
    answer = ask(server, SEEN)
    assert answer.status == 200, answer.body
    action = json_numpy.loads(answer.body)
    assert (action.dtype, action.shape) == (np.float64, (2,))
    np.testing.assert_allclose(action, WANTED[0], atol=1e-5)
    assert f'wire="{JSON_NUMPY}"' in server.get("/metrics").body.decode()


def test_w16_the_robots_own_program_needs_no_change(server: Server) -> None:
    program = f"""
import json_numpy, numpy as np, requests
json_numpy.patch()
action = requests.post("http://127.0.0.1:{server.port}/act", json={{
    "image": np.zeros((6, 8, 3), np.uint8), "left_wrist_image": np.zeros((6, 8, 3), np.uint8),
    "instruction": "open the door", "state": np.array([0.3, -0.3]), "seed": 5}}).json()
print(action.shape, action.tolist())
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    shape, values = told.stdout.split(") ")
    assert shape == "(2,"
    np.testing.assert_allclose(json.loads(values), WANTED[0], atol=1e-5)


def test_w17_what_comes_as_json_in_json_is_answered_so(server: Server) -> None:
    answer = ask(server, SEEN, quoted=True)
    assert answer.status == 200, answer.body
    text = json.loads(answer.body)
    assert isinstance(text, str)
    np.testing.assert_allclose(json_numpy.loads(text), WANTED[0], atol=1e-5)


def test_w18_oft_gets_every_action_of_the_chunk(server: Server) -> None:
    answer = ask(server, {"full_image": PICTURE, "instruction": "open the door"})
    assert answer.status == 200, answer.body
    actions = json_numpy.loads(answer.body)
    assert isinstance(actions, list)
    assert len(actions) == CHUNK
    np.testing.assert_allclose(np.stack(actions), WANTED, atol=1e-5)


def test_w18_large_pictures_are_read_beside_the_loop_to_the_same_end(server: Server) -> None:
    answer = ask(server, {"full_image": np.full((300, 400, 3), 7, np.uint8), "instruction": "go"})
    assert answer.status == 200, answer.body
    np.testing.assert_allclose(np.stack(json_numpy.loads(answer.body)), WANTED, atol=1e-5)


# -- X-VLA and open-pi-zero: the bodies that their clients post --------------------------------------------------------


def by_xvla(server: Server, proprio: Any, /, *views: Any, **more: Any) -> Answer:
    """As its clients ask through `requests`: arrays as texts of json-numpy, in a body of plain JSON."""
    asked = {
        "proprio": json_numpy.dumps(proprio),
        "language_instruction": "open the door",
        **{f"image{i}": json_numpy.dumps(view) for i, view in enumerate(views)},
        "domain_id": 0,
        "steps": 1,
        "seed": 5,
    } | more
    return server.ask("POST", "/act", json.dumps(asked).encode(), {"Content-Type": "application/json"})


@pytest.mark.parametrize("proprio", [STATE, STATE[None], STATE.tolist()])
def test_w57_xvla_gets_every_action_as_lists(server: Server, proprio: Any) -> None:
    answer = by_xvla(server, proprio, PICTURE, PICTURE)
    assert answer.status == 200, answer.body
    assert answer.json.keys() == {"action"}
    np.testing.assert_allclose(answer.json["action"], WANTED, atol=1e-5)


def test_w57_xvla_may_send_encoded_pictures_and_lists(server: Server) -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(PICTURE).save(file, "JPEG")
    answer = by_xvla(server, STATE, np.frombuffer(file.getvalue(), np.uint8), PICTURE.tolist())
    assert answer.status == 200, answer.body
    plain = {"image0": PICTURE.tolist(), "image1": PICTURE.tolist(), "proprio": STATE.tolist()}
    answer = by_xvla(server, STATE, PICTURE, PICTURE, **plain)
    np.testing.assert_allclose(answer.json["action"], WANTED, atol=1e-5)


def test_w57_the_views_of_xvla_are_the_cameras_in_their_order() -> None:
    seen = {f"image{i}": json_numpy.dumps(PICTURE + i) for i in range(3)} | {"proprio": "[0.3, -0.3]"}
    spec = PolicySpec(model_id="m", staged=False, images={"front": (6, 8), "wrist": (6, 8)}, takes_state=True,
                      state_dim=2, action_dim=2, chunk_size=3)  # fmt: skip
    for wire, wanted in ((None, (0, 1)), (WireMap(images={"front": "image2"}), (2, 1))):
        asked = decode(json.dumps(seen).encode())
        assert isinstance(asked, JsonNumpy)
        (question,) = [one() for one in asked.questions(ObservationReader(spec, wire))]
        assert [(name, int(picture[0, 0, 0]) - 7) for name, _, picture in question.images] == [
            ("front", wanted[0]), ("wrist", wanted[1]),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "status", "word"),
    [
        ({"steps": 10}, 422, "steps: is 10, the export has 1"),
        ({"image1": None}, 422, "left_wrist_image"),
        ({"image1": "/etc/passwd"}, 422, "left_wrist_image: must be an array"),
        ({"image0": '{"__numpy__": "@@"}'}, 400, "base64"),
        ({"proprio": "[0.3, "}, 400, "not JSON"),
        ({"proprio": "[[0.3, [1]], 2]"}, 422, "proprio"),
        ({"proprio": "[0.3]"}, 422, "state"),
    ],
)
def test_w57_what_xvla_says_wrong_is_named(server: Server, more: dict[str, Any], status: int, word: str) -> None:
    answer = by_xvla(server, STATE, PICTURE, PICTURE, **more)
    assert answer.status == status, answer.body
    assert word in answer.json["message"]


def test_w57_another_domain_than_the_exports_is_refused(tmp_path: Path) -> None:
    metadata = {"domain_id": 2, "steps": 10}
    with Server(write_tiny(tmp_path, cameras=("front",), wires={"json-numpy": {"metadata": metadata}})) as server:
        assert by_xvla(server, STATE, PICTURE, domain_id=2, steps=10).status == 200
        assert "domain_id: is 3, the export has 2" in by_xvla(server, STATE, PICTURE, domain_id=3).json["message"]


def test_w57_open_pi_zero_gets_the_chunk_as_one_array(server: Server) -> None:
    """As AutoEval's clients ask it: with `unnorm_key` all actions, without the next one."""
    asked = {"image": PICTURE, "instruction": "open the door", "unnorm_key": "bridge_orig", "proprio": STATE}
    for more in ({}, {"image": PICTURE.tolist(), "proprio": STATE.tolist(), "left_wrist_image": PICTURE.tolist()}):
        for quoted in (False, True):
            answer = ask(server, asked | more, quoted)
            assert answer.status == 200, answer.body
            told = json_numpy.loads(answer.body)
            told = json_numpy.loads(told) if quoted else told
            assert isinstance(told, list) is bool(more)  # who sends lists reads lists
            np.testing.assert_allclose(told, WANTED, atol=1e-5)
    del asked["unnorm_key"]
    action = json_numpy.loads(ask(server, asked).body)
    np.testing.assert_allclose(action, WANTED[0], atol=1e-5)


def test_w57_a_picture_of_256_pixels_may_be_lists(server: Server) -> None:
    picture = np.full((256, 256, 3), 255, np.uint8).tolist()
    asked = {"image": picture, "instruction": "go", "unnorm_key": "x", "proprio": STATE.tolist()}
    assert ask(server, asked).status == 200


@pytest.mark.parametrize(
    ("observation", "status", "word"),
    [
        ({"image": PICTURE, "left_wrist_image": None}, 422, "left_wrist_image"),
        ({"image": PICTURE, "state": np.zeros(3)}, 422, "state"),
        ({"image": PICTURE, "state": np.array([np.nan, 0.0])}, 422, "NaN"),
        ({"image": PICTURE, "state": {"__numpy__": "AAAA", "dtype": "|O", "shape": [1]}}, 400, "dtype"),
        ({"image": {"__numpy__": "@@", "dtype": "|u1", "shape": [1]}}, 400, "base64"),
        ({"image": {"__numpy__": "AAAA", "dtype": "|u1", "shape": [1 << 40]}}, 400, "bytes do not make"),
        ({"image": {"__numpy__": "AAAA", "dtype": "|u1", "shape": [3], "order": "F"}}, 400, "no 'order'"),
        ({"image": PICTURE, "deadline_ms": "soon"}, 422, "deadline_ms"),
    ],
)
def test_w19_errors_are_statuses_with_our_body(
    server: Server, observation: dict[str, Any], status: int, word: str
) -> None:
    answer = ask(server, observation)
    assert answer.status == status, answer.body
    assert word in answer.json["message"]
    assert answer.json["request_id"]


def test_w19_what_is_missing_is_told_with_what_came(server: Server) -> None:
    body = json_numpy.dumps({"full_image": PICTURE, "state": STATE}).encode()
    message = server.ask("POST", "/act", body, {"Content-Type": "application/json"}).json["message"]
    assert message.startswith("left_wrist_image: missing; came: ")
    assert "expected: image, left_wrist_image, state" in message


def test_w19_a_late_request_is_refused_with_its_status(server: Server) -> None:
    answer = ask(server, {"image": PICTURE, "deadline_ms": 0.000_1})
    assert answer.status == 504


def test_w16_others_are_read_as_before(tmp_path: Path) -> None:
    """A word of json-numpy in the body of /act changes nothing."""
    with Server(write_tiny(tmp_path)) as server:
        for i, fields in enumerate(numbered(3, instruction='"encoded" "__numpy__"')):
            assert right_act(server.post(fields), i)
        assert server.post({"encoded": 3, "state": [0.0, 0.0]}).status == 422


@FRESH
def test_w19_broken_bodies_raise_nothing_but_our_errors(tmp_path: Path, count: int) -> None:
    """Each is an observation, none of these, or our error."""
    reading = ObservationReader(Export.load(write_tiny(tmp_path / "e")), None)
    plain = json_numpy.dumps({"image": PICTURE[:2, :2], "state": STATE, "instruction": "go"})
    good = [plain.encode(), json.dumps({"encoded": plain}).encode()]
    packed = {"__ndarray__": base64.b64encode(bytes(12)).decode(), "dtype": "uint8", "shape": [2, 2, 3]}
    seen = {"video.x": packed, "state.y": [[0.5, 1]], "annotation": ["go"]}
    good.append(json.dumps({"observation": seen}).encode())

    def ask(body: bytes) -> None:
        assert isinstance(is_json_numpy(body), bool)
        found = decode(body)
        if isinstance(found, GrootJson):
            found.observation.rows(reading)

    assert check("json_numpy", good, ask, count) > 0.01


def test_w18_large_arrays_are_decoded_in_pieces_so_that_the_loop_runs_in_between(monkeypatch: Any) -> None:
    sizes: list[int] = []
    one = pybase64.b64decode
    monkeypatch.setattr(pybase64, "b64decode", lambda text, **how: sizes.append(len(text)) or one(text, **how))
    big = np.random.Generator(np.random.PCG64(1)).integers(0, 256, (1500, 1500, 3), np.uint8)
    found = decode(json_numpy.dumps({"image": big}).encode())
    assert found is not None
    assert np.array_equal(found.observation["image"], big)
    assert max(sizes) <= 1 << 20


def test_w19_no_more_is_made_than_was_sent() -> None:
    many = b'{"encoded": "' + b"[],".replace(b'"', b'\\"') * 100_000 + b'"}'
    with pytest.raises(ClientError, match="over 2 MB or 70000 lists"):
        decode(many)
    packed = base64.b64encode(bytes(12)).decode()
    assert decode(json.dumps({"image": {"__numpy__": packed, "dtype": "|u1", "shape": [2, 2, 3]}}).encode()) is not None
