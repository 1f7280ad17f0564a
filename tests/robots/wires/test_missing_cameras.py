"""Cameras that a robot does not have, on every wire that has pictures: openpi's ALOHA above all."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from reflex_runtime.cli import main
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import Export
from reflex_runtime.robots.policy.spec import PolicySpec
from reflex_runtime.robots.serving.question import ObservationReader
from reflex_runtime.robots.wires.oip import Sequences, inputs_of, questions
from reflex_runtime.web.errors import InvalidRequest
from reflex_runtime.web.oip import InferRequest, tensor_of_bytes, tensor_of_values
from robots import means
from robots.tiny import picture
from serving.harness import Server

pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
PORTS: Any = {name: ("u", [4, 6, 3]) for name in CAMERAS} | {"image_masks": ("b", [3]), "state": ("f", [14])}


@pytest.fixture(scope="module")
def aloha(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns of an action: brightness of the three cameras, the share of those that were sent, mean of the state."""
    return means.write_export(
        tmp_path_factory.mktemp("aloha"), PORTS, 32, action_dim=14, state_dim=14, x_dim=32,
        images={name: [4, 6] for name in CAMERAS},
        optional_images=list(CAMERAS[1:]), wires="openpi/aloha",
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(aloha: Path) -> Iterator[Server]:
    with Server(aloha) as running:
        yield running


def first_first(image: Any) -> Any:
    return np.ascontiguousarray(image.transpose(2, 0, 1))


def test_p20_the_stock_client_of_aloha_may_leave_out_its_wrist_cameras(server: Server) -> None:
    pictures = {name: picture(i) for i, name in enumerate(("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist"))}
    state = np.full(14, 0.5)
    client = WebsocketClientPolicy(f"ws://127.0.0.1:{server.port}")
    with closing(client._ws):
        told = client.get_server_metadata()["reflex"]
        assert told["optional_images"] == ["images/cam_left_wrist", "images/cam_right_wrist"]
        assert next(iter(told["images"])) == "images/cam_high"
        for missing in ((), ("cam_left_wrist",), ("cam_low", "cam_left_wrist", "cam_right_wrist")):
            images = {name: first_first(image) for name, image in pictures.items() if name not in missing}
            actions = client.infer({"images": images, "state": state, "prompt": "go"})["actions"]
            assert actions.shape == (3, 14)
            seen = [0.0 if name in missing else pictures[name].mean() for name in ("cam_left_wrist", "cam_right_wrist")]
            there = 3 - len(set(missing) - {"cam_low"})
            expected = [pictures["cam_high"].mean(), *seen, there / 3, 0.5]
            assert actions[0, :5] == pytest.approx(expected, rel=1e-5)
        with pytest.raises(RuntimeError, match="images/cam_high: missing"):
            client.infer({"images": {"cam_left_wrist": first_first(picture(0))}, "state": state, "prompt": "go"})


def test_p20_act_takes_a_request_without_them_and_says_so(server: Server) -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(rows := picture(0)).save(file, "PNG")
    body = {"images": {"base_0_rgb": base64.b64encode(file.getvalue()).decode()}}
    answer = server.post(body | {"state": [0.5] * 14})
    assert answer.status == 200, answer.body
    assert np.float32(answer.json["actions"])[0, :4] == pytest.approx([rows.mean(), 0.0, 0.0, 1 / 3], rel=1e-5)
    told = server.get("/config").json
    assert told["wires"]["openpi"]["optional_images"] == ["images/cam_left_wrist", "images/cam_right_wrist"]
    body = server.get("/openapi.json").json["paths"]["/act"]["post"]["requestBody"]
    ways = body["content"]["application/json"]["schema"]["allOf"]
    assert [way["properties"]["images"]["required"] for way in ways] == [["base_0_rgb"]]


def test_p20_probe_says_what_may_be_left_out(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", f"http://127.0.0.1:{server.port}", "--wire", "openpi", "--json"]) == 0
    (wire,) = json.loads(capsys.readouterr().out)["wires"]
    assert wire["known"] == "/config; may be left out: images/cam_left_wrist, images/cam_right_wrist"
    assert wire["works"]


def spec(aloha: Path) -> PolicySpec:
    return Export.load(aloha)


def test_p20_every_wire_reads_observations_by_the_same_names(aloha: Path) -> None:
    read = ObservationReader(spec(aloha), None).read
    sent = {"observation.images.base_0_rgb": picture(0), "observation.state": [0.0] * 14}
    assert [name for name, _, _ in read(sent)[0]] == ["base_0_rgb"]
    more = sent | {"video.left_wrist_0_rgb": picture(1)}
    assert [name for name, _, _ in read(more)[0]] == ["base_0_rgb", "left_wrist_0_rgb"]
    with pytest.raises(InvalidRequest, match="base_0_rgb: missing"):
        read({"observation.state": [0.0] * 14})


def test_p20_oip_takes_an_inference_without_their_tensors(aloha: Path) -> None:
    export = spec(aloha)
    assert [name for name, _, _ in inputs_of(export)][:3] == list(CAMERAS)
    base = tensor_of_bytes("base_0_rgb", "UINT8", [1, 4, 6, 3], picture(0).tobytes())
    state = tensor_of_values("state", "FP32", [1, 14], [0.0] * 14)
    (question,) = questions(export, Sequences(), InferRequest((base, state), {}, (), ""), None)
    assert [name for name, _, _ in question.images] == ["base_0_rgb"]
    with pytest.raises(InvalidRequest, match="base_0_rgb: missing"):
        questions(export, Sequences(), InferRequest((state,), {}, (), ""), None)


def test_p20_a_camera_that_a_preset_does_not_know_may_be_optional(tmp_path: Path) -> None:
    """openpi's models have three cameras, LIBERO two: the third is always missing."""
    keys: Any = {"images": {name: [4, 6] for name in CAMERAS}, "state_dim": 14, "wires": "openpi/libero"}
    export = Export.load(means.write_export(tmp_path / "a", PORTS, 5, optional_images=[CAMERAS[2]], **keys))
    wire = export.wires["openpi"]
    sent = {"observation/image": picture(0), "observation/wrist_image": picture(1), "observation/state": [0.0] * 14}
    images = ObservationReader(export, wire).read(sent | {"prompt": "go"})[0]
    assert [name for name, _, _ in images] == list(CAMERAS[:2])
    with pytest.raises(ConfigError, match="the preset has no camera 'right_wrist_0_rgb'"):
        Export.load(means.write_export(tmp_path / "b", PORTS, 5, **keys))
