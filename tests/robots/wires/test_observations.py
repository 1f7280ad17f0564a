"""What observations mean: by the export's block `wires`, else by name."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openpi_client.image_tools import resize_with_pad

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots import Export, InvalidRequest, load_policy
from reflex_runtime.robots.policy.observation import resize_image
from reflex_runtime.robots.serving.decode_pool import pixels_in
from reflex_runtime.robots.serving.question import ObservationReader, Question
from reflex_runtime.robots.wires.openpi import decode, encode
from robots.tiny import HEIGHT, WIDTH, write_export
from serving.exports import write_tiny

PICTURE = np.zeros((6, 8, 3), np.uint8)
CAMERAS = ("image", "image_wrist")


def reading(root: Path, **settings: Any) -> ObservationReader:
    export = Export.load(write_tiny(root / "export", **settings))
    return ObservationReader(export, export.wires.get("openpi"))


def test_w8_without_a_block_names_are_found_behind_the_known_prefixes(tmp_path: Path) -> None:
    read = reading(tmp_path, cameras=("image", "wrist", "top")).read
    images, state, prompt = read(
        {
            "observation/image": PICTURE, "observation.images.wrist": PICTURE + 1, "images": {"top": PICTURE + 2},
            "observation.state": np.array([1.0, 2.0]), "task": "go", "other": PICTURE,
        }
    )  # fmt: skip
    assert [(camera, field, image[0, 0, 0]) for camera, field, image in images] == [  # type: ignore[index, call-overload]
        ("image", "observation/image", 0), ("wrist", "observation.images.wrist", 1), ("top", "images/top", 2)
    ]  # fmt: skip
    assert state is not None
    assert state.tolist() == [1.0, 2.0]
    assert prompt == "go"


def test_w8_the_only_camera_is_the_only_picture_of_the_map(tmp_path: Path) -> None:
    read = reading(tmp_path, cameras=("front",)).read
    sent = {"images": {"agentview": PICTURE}, "states": [1.0, 2.0], "task_description": "go"}
    images, state, prompt = read(sent)
    assert [(camera, field) for camera, field, _ in images] == [("front", "images/agentview")]
    assert (state is not None, prompt) == (True, "go")
    with pytest.raises(InvalidRequest, match="front: missing"):
        read(sent | {"images": {"agentview": PICTURE, "wrist": PICTURE}})


@pytest.mark.parametrize(
    ("preset", "pictures", "state"),
    [
        ("openpi/libero", ("observation/image", "observation/wrist_image"), {"observation/state": [1.0, 2.0]}),
        (
            "openpi/droid", ("observation/exterior_image_1_left", "observation/wrist_image_left"),
            {"observation/joint_position": np.array([1.0]), "observation/gripper_position": np.float64(2.0)},
        ),
    ],
)  # fmt: skip
def test_w8_presets_know_the_families_of_openpi(tmp_path: Path, preset: str, pictures: Any, state: Any) -> None:
    read = reading(tmp_path, cameras=CAMERAS, wires=preset).read
    sent = decode(encode(dict.fromkeys(pictures, PICTURE) | {"prompt": b"pick"}))
    images, found, prompt = read(sent | state)
    assert [(camera, field) for camera, field, _ in images] == list(zip(CAMERAS, pictures, strict=True))
    assert found is not None
    assert found.tolist() == [1.0, 2.0]
    assert prompt == "pick"


def test_w8_aloha_has_its_pictures_in_a_map_and_channels_first(tmp_path: Path) -> None:
    read = reading(tmp_path, cameras=("cam_high", "cam_left_wrist"), wires="openpi/aloha").read
    sent = {"images": {"cam_high": PICTURE.transpose(2, 0, 1) + 1, "cam_left_wrist": PICTURE}, "state": np.ones(2)}
    images, _, prompt = read(sent)
    assert [image.shape for _, _, image in images] == [(6, 8, 3)] * 2  # type: ignore[union-attr]
    assert (images[0][2] == 1).all()  # type: ignore[union-attr]
    assert prompt is None


def test_w8_a_policy_of_one_camera_takes_the_picture_called_image(tmp_path: Path) -> None:
    sent = {"observation/image": PICTURE, "observation/state": [0, 0]}
    assert reading(tmp_path, cameras=("front",)).read(sent)[0][0][:2] == ("front", "observation/image")


def test_w8_a_block_names_what_no_preset_does(tmp_path: Path) -> None:
    block = {"images": {"image": "cam/left"}, "state": ["arm/joints", "arm/hand"], "prompt": "say"}
    read = reading(tmp_path, cameras=("image",), wires={"openpi": block}).read
    sent = {"cam": {"left": PICTURE}, "arm": {"joints": [1], "hand": 2}, "say": "go", "prompt": "no"}
    images, state, prompt = read(sent)
    assert images[0][:2] == ("image", "cam/left")
    assert state is not None
    assert (state.tolist(), prompt) == ([1.0, 2.0], "go")


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        (
            {"observation/wrist_image": None}, "observation/wrist_image",
            "missing; came: observation/image, observation/state; expected: observation/image, "
            "observation/wrist_image, observation/state",
        ),
        ({"observation/state": None}, "observation/state", "missing; came"),
        ({"observation/state": np.ones(3)}, "state", "must be 2 numbers; observation/state has 3"),
        ({"observation/state": "1, 2"}, "observation/state", "must be numbers"),
        ({"observation/state": np.array(["1", "2"])}, "observation/state", "must be numbers"),
        ({"observation/state": [True, False]}, "observation/state", "must be numbers"),
        ({"observation/state": [0.5, 10**400]}, "observation/state", "must be numbers"),
        ({"observation/state": 10**400}, "observation/state", "must be numbers"),
        ({"observation/state": np.zeros(100_000)}, "observation/state", "must be numbers"),
        ({"observation/image": [[0]]}, "observation/image", "must be an array"),
        ({"prompt": 1}, "prompt", "must be a text"),
        ({"prompt": memoryview(b"\xff")}, "prompt", "must be a text"),
    ],
)
def test_w8_what_is_missing_or_wrong_is_named(tmp_path: Path, change: dict[str, Any], field: str, message: str) -> None:
    read = reading(tmp_path, cameras=CAMERAS, wires="openpi/libero").read
    sent = {"observation/image": PICTURE, "observation/wrist_image": PICTURE, "observation/state": np.ones(2)} | change
    with pytest.raises(InvalidRequest, match=message) as info:
        read({name: value for name, value in sent.items() if value is not None})
    assert info.value.details["field"] == field


def test_w8_names_in_maps_are_not_written_out_without_a_bound(tmp_path: Path) -> None:
    read = reading(tmp_path, cameras=("image",)).read
    for observation in ({"A" * 100_000: {str(i): i for i in range(9000)}}, {"a" * 200: {"b" * 50: {"c" * 10: 1}}}):
        tracemalloc.start()
        with pytest.raises(InvalidRequest, match="a name in it has more than 256 characters"):
            read(observation)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"": deep}
    with pytest.raises(InvalidRequest, match="256 characters"):
        read(deep)


@pytest.mark.parametrize("instruction", ["x" * 16_385, b"x" * 70_000, b"x" * 16_385])
def test_w8_an_instruction_is_bounded_on_every_wire(tmp_path: Path, instruction: Any) -> None:
    read = reading(tmp_path, cameras=("image",)).read
    seen = decode(encode({"image": PICTURE, "state": [1.0, 2.0], "prompt": instruction}))
    with pytest.raises(InvalidRequest, match=r"instruction: has more than 16384|prompt: must be a text"):
        Question(instruction=read(seen)[2])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"wires": "openpi/pusht"}, 'wires: found "openpi/pusht", expected an object, or one of openpi/libero'),
        ({"wires": "openpi/aloha", "cameras": ("front",)}, "the preset has no camera 'front'"),
        ({"wires": {"opempi": {}}}, "wires.opempi: no such key; did you mean openpi?"),
        ({"wires": {"openpi": {"image": {}}}}, "wires.openpi.image: no such key; did you mean images?"),
        ({"wires": {"openpi": {"images": {"top": "x"}}}}, "wires.openpi.images.top: found"),
        ({"wires": {"openpi": {"state": []}}}, "wires.openpi.state: found"),
        ({"wires": {"gr00t": {"state": [["arm", 1], ["hand", 2]]}}}, "expected groups that have 2 numbers together"),
        ({"wires": {"gr00t": {"actions": [["arm", 1], ["arm", 1]]}}}, "wires.gr00t.actions: found"),
        ({"wires": {"gr00t": {"actions": ["arm"]}}}, "expected a list of [group, how many numbers it has]"),
        ({"wires": {"gr00t": {"images": {"top": "x"}}}}, "wires.gr00t.images.top: found"),
        ({"wires": {"gr00t": {"dialect": "x"}}}, "wires.gr00t.dialect: no such key"),
        ({"wires": {"openpi": {"prompt": 1}}}, "wires.openpi.prompt: found 1, expected a name"),
        ({"wires": {"openpi": {"dialect": "roboarena"}}}, "metadata: found nothing, expected exactly the keys"),
        ({"resize": "crop"}, "resize: found \"crop\", expected 'stretch' or 'pad'"),
    ],
)  # fmt: skip
def test_w8_what_is_wrong_in_the_export_stops_it(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    root = write_tiny(tmp_path / "export", **settings)
    with pytest.raises(ConfigError) as info:
        Export.load(root)
    assert said in str(info.value)


@pytest.mark.parametrize("size", [(7, 5), (5, 7), (100, 31), (1, 200), (64, 64), (30, 40)])
def test_w9_padding_is_that_of_openpi(size: tuple[int, int]) -> None:
    image = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    for height, width in ((32, 32), (20, 48)):
        if min(height * size[1], width * size[0]) // max(size):  # openpi fails where one side would be nothing
            assert (resize_image(image, height, width, "pad") == resize_with_pad(image, height, width)).all()
        assert resize_image(image, height, width, "pad").shape == (height, width, 3)


def test_w9_the_export_says_whether_pictures_are_padded(tmp_path: Path) -> None:
    image = np.full((HEIGHT * 4, WIDTH, 3), 200, np.uint8)
    for resize, corner in (("stretch", 200), ("pad", 0)):
        root = write_export(tmp_path / resize, change=lambda config, kind=resize: config.update(resize=kind))
        policy = load_policy(Export.load(root), "prod")
        seen = policy.prepare(images={"image": image}, instruction="open", state=[0, 0]).images["front"]
        assert seen.shape == (HEIGHT, WIDTH, 3)
        assert seen[0, 0, 0] == corner
        assert seen[HEIGHT // 2, (WIDTH - 1) // 2, 0] == 200


def test_w9_pictures_of_floats_are_those_of_bytes_and_must_be_within_one() -> None:
    image = np.array([[[0.0, 0.5, 1.0]]])
    for dtype in (np.float16, np.float32, np.float64):
        assert pixels_in(image.astype(dtype), "x").tolist() == [[[0, 127, 255]]]
    for bad in (1.5, -0.5, np.nan, np.inf):
        with pytest.raises(InvalidRequest, match="within"):
            pixels_in(np.full((1, 1, 3), bad), "x")
