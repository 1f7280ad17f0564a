"""What a request must send, and what is said when it does not."""

from __future__ import annotations

import io
import pickle
import re
import struct
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from reflex_runtime.robots import Export, InvalidRequest, Policy, load_policy
from reflex_runtime.robots.policy.observation import decode_image, noise_of, resize_image, seed_of, warm_decoders
from reflex_runtime.robots.policy.spec import Resize
from reflex_runtime.web import pictures
from reflex_runtime.web.pictures import MAX_SIDE, pixels_of
from robots.tiny import picture, write_export
from serving.exports import write_tiny
from thinned import thinned

FINE: dict[str, Any] = {"images": {"front": picture(0)}, "instruction": "open the door", "state": [0.0, 1.0]}


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return load_policy(write_export(tmp_path))


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    PIL.Image.fromarray(image).save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"images": None}, "images.front", "missing"),
        ({"images": {"wrist": picture(0)}}, "images.front", "missing"),
        ({"images": {"front": b"not a picture"}}, "images.front", "not a readable PNG or JPEG"),
        ({"images": {"front": encoded(picture(0))[:-60]}}, "images.front", "not a readable PNG or JPEG"),
        ({"images": {"front": encoded(picture(0), "BMP")}}, "images.front", "not a readable PNG or JPEG"),
        ({"images": {"front": picture(0).astype(np.float32)}}, "images.front", "uint8"),
        ({"images": {"front": picture(0)[..., 0]}}, "images.front", "uint8"),
        ({"images": {"front": np.zeros((0, 4, 3), np.uint8)}}, "images.front", "4096"),
        ({"images": {"front": [[1, 2], [3, 4]]}}, "images.front", "uint8"),
        ({"instruction": None}, "instruction", "missing"),
        ({"state": None}, "state", "missing"),
        ({"state": [0.0]}, "state", "2 numbers"),
        ({"state": [[0.0, 1.0]]}, "state", "2 numbers"),
        ({"state": [0.0, [1.0]]}, "state", "2 numbers"),
        ({"state": ["0", "1"]}, "state", "2 numbers"),
        ({"state": [0.0, None]}, "state", "2 numbers"),
        ({"state": [True, False]}, "state", "2 numbers"),
        ({"state": [0.0, float("nan")]}, "state", "finite"),
        ({"state": [0.0, float("inf")]}, "state", "finite"),
        ({"state": [0.0, 1e300]}, "state", "finite"),
        ({"state": [0.0, 3e38]}, "state", "finite"),  # finite as sent, not in the model's units
        ({"state": [0.0, 10**400]}, "state", "2 numbers"),
        ({"seed": -1}, "seed", "2^64"),
        ({"seed": 1 << 64}, "seed", "2^64"),
    ],
)
def test_h1_what_is_missing_or_wrong_is_named(policy: Policy, change: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        policy.prepare(**(FINE | change))
    error = caught.value
    assert (error.details["field"], error.http_status, error.code) == (field, 422, "invalid_request")
    assert (error.retry_safe, error.outcome) == (False, "client_error")
    assert str(error).startswith(field)
    assert said in str(error)


def test_h1_one_camera_does_not_stand_in_for_another(tmp_path: Path) -> None:
    both, alone = (
        load_policy(Export.load(write_tiny(tmp_path / str(len(names)), cameras=names)))
        for names in (("image", "image_wrist"), ("wrist",))
    )
    sent: Any = {"images": {"image": np.full((6, 8, 3), 7, np.uint8)}, "state": [0.0, 0.0]}
    with pytest.raises(InvalidRequest, match="image_wrist: missing"):
        both.prepare(**sent)
    assert (alone.prepare(**sent).images["wrist"] == 7).all()


def test_h1_images_of_another_size_are_resized(policy: Policy) -> None:
    seen = policy.prepare(**(FINE | {"images": {"front": np.full((40, 30, 3), 7, np.uint8)}})).images["front"]
    assert (seen.shape, seen.dtype) == ((4, 6, 3), np.uint8)
    assert (seen == 7).all()


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("JPEG", {"quality": 95})])
def test_h1_png_and_jpeg_bytes_are_decoded(policy: Policy, kind: str, options: dict[str, Any]) -> None:
    flat = np.full((4, 6, 3), (200, 100, 50), np.uint8)
    seen = policy.prepare(**(FINE | {"images": {"image": encoded(flat, kind, **options)}})).images["front"]
    assert np.abs(seen.astype(int) - flat).max() <= (0 if kind == "PNG" else 3)


def test_h1_grey_and_transparent_pictures_become_rgb() -> None:
    assert decode_image(encoded(np.zeros((2, 3), np.uint8))).shape == (2, 3, 3)
    assert decode_image(encoded(np.zeros((2, 3, 4), np.uint8))).shape == (2, 3, 3)


def test_h4_an_image_above_4096_squared_is_refused_before_it_is_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    PIL.Image.new("1", (4097, 4096)).save(out, "PNG")
    monkeypatch.setattr(PIL.Image.Image, "convert", lambda *a: pytest.fail("it was decompressed"))
    with pytest.raises(InvalidRequest, match="4097×4096 pixels"):
        decode_image(out.getvalue())


@pytest.mark.parametrize(("width", "height"), [(MAX_SIDE + 1, 1), (1, MAX_SIDE + 1), (4096 * 4096, 1)])
def test_h4_a_picture_has_a_longest_side(width: int, height: int, policy: Policy) -> None:
    """As PNG, as JPEG where it can be so large, and as an array: a filter has weights for each pixel of a side."""
    flat = np.zeros((height, width, 3), np.uint8)
    sent: list[Any] = [flat, encoded(flat, "PNG"), encoded(flat[..., 0], "PNG")]
    if max(width, height) < 65536:
        sent += [encoded(flat, "JPEG"), encoded(flat[..., 0], "JPEG")]
    for image in sent:
        with pytest.raises(InvalidRequest, match=f"image: {width}×{height} pixels, .* and {MAX_SIDE} on a side"):
            policy.prepare(**(FINE | {"images": {"image": image}}))


@pytest.mark.parametrize("resize", thinned(["stretch", "pad", "pad-smolvla-float"], ["pad"]))
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "LA", "1", "I;16"])
def test_h4_a_large_picture_is_converted_in_parts_to_the_same_pixels(
    mode: str, resize: Resize, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    if mode == "I;16":
        picture = PIL.Image.fromarray(rng.integers(0, 1 << 16, (700, 900)).astype(np.uint16))
    else:
        picture = PIL.Image.fromarray(rng.integers(0, 256, (700, 900, 3), np.uint8)).convert(mode)
    data = io.BytesIO()
    picture.save(data, "PNG", compress_level=1)
    sizes = (None, (64, 48), (700, 900), (1024, 1024))
    monkeypatch.setattr(pictures, "SMALL_PIXELS", 0)  # not by another library
    at_once = [decode_image(data.getvalue(), "image", size, resize) for size in sizes]
    monkeypatch.setattr(pictures, "BAND_PIXELS", 900 * 100 + 1)
    for whole, size in zip(at_once, sizes, strict=True):
        parts = decode_image(data.getvalue(), "image", size, resize)
        assert np.abs(parts.astype(np.float32) - whole).max() <= (resize != "pad-smolvla-float" and size is not None)


@pytest.mark.parametrize(("mode", "resize", "most"), [("LA", "stretch", 4.0), ("P", "pad-smolvla-float", 5.0)])
def test_h4_a_large_picture_is_in_memory_once(mode: str, resize: Resize, most: float) -> None:
    """In the mode of its file, and a part of it in the one that is needed: at most 4 bytes a pixel, and some."""
    data = io.BytesIO()
    PIL.Image.new(mode, (4096, 4096)).save(data, "PNG", compress_level=1)
    took = subprocess.run(
        [sys.executable, "-c", PEAK, resize], input=data.getvalue(), capture_output=True, check=True, timeout=120
    ).stdout
    assert int(took) / 4096**2 < most + 1.0


PEAK = """
import sys
from pathlib import Path
from reflex_runtime.robots.policy.observation import decode_image, warm_decoders

def peak(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

data = sys.stdin.buffer.read()
warm_decoders()
Path("/proc/self/clear_refs").write_text("5")
before = peak("VmRSS")
decode_image(data, "image", (224, 224), sys.argv[1])
print(peak("VmHWM") - before)
"""


def test_h1_one_image_may_be_called_image_and_strange_ones_are_ignored(policy: Policy) -> None:
    by_name = policy.prepare(**FINE)
    by_default = policy.prepare(**(FINE | {"images": {"image": picture(0), "roof": b"nonsense"}}))
    assert np.array_equal(by_name.images["front"], by_default.images["front"])


def test_h1_the_default_seed_is_stated(policy: Policy) -> None:
    # First 8 bytes, big-endian, of SHA-256 of the request id.
    assert seed_of("req_42") == 0x0B2A76153D100088
    assert seed_of("") == 0xE3B0C44298FC1C14
    assert policy.prepare(**FINE, request_id="").seed == seed_of("")
    assert policy.prepare(**FINE, request_id="", seed=3).seed == 3


def test_h13_any_text_is_a_request_id(policy: Policy) -> None:
    for text in ("Ü", "\ud800", "x" * 10_000):
        assert 0 <= policy.prepare(**FINE, request_id=text).seed < 1 << 64


def test_noise_is_stated() -> None:
    noise = noise_of((1 << 64) - 1, 3, 2)
    expected = np.random.Generator(np.random.PCG64((1 << 64) - 1)).standard_normal((3, 2), dtype=np.float32)
    assert (noise.dtype, noise.shape) == (np.float32, (3, 2))
    assert np.array_equal(noise, expected)
    # Bytes, so that another numpy or platform that draws differently is noticed: a seed is a promise in a recording.
    assert noise_of(0, 1, 2).tobytes().hex() == "3d0e8f3f4f8db1bf"


def test_state_is_normalised_before_the_graph(policy: Policy) -> None:
    state = policy.prepare(**(FINE | {"state": [3.0, 0.0]})).state
    assert state is not None
    assert state.tolist() == [1.0, 2.0]


def test_a_policy_without_state_or_text_asks_for_neither(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    from robots.tiny import write_graph

    def change(settings: dict[str, Any]) -> None:
        settings["inputs"] = {"front": "rgb", "noise": "x"}
        del settings["tokenizer"]

    write_export(tmp_path, change=change)
    nodes = [
        helper.make_node("Cast", ["rgb"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["pixels"], ["grey"], axes=[1, 2, 3], keepdims=0),
        helper.make_node("Unsqueeze", ["grey", "one_two"], ["wide"]),
        helper.make_node("Add", ["x", "wide"], ["chunk"]),
    ]
    write_graph(tmp_path / "model.onnx", nodes, ["rgb", "x"], ["chunk"])
    policy = load_policy(tmp_path)
    seen = policy.prepare(images={"front": picture(0)})
    assert (seen.state, seen.tokens) == (None, None)
    assert policy.prepare(images={"front": picture(0)}, state=[0.0, 1.0]).state is None
    with pytest.raises(InvalidRequest, match="state: must be 2 numbers, has 1"):
        policy.prepare(images={"front": picture(0)}, state=[0.0])
    assert policy.warm_up((1, 2)).finished


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(InvalidRequest("state: missing", "state")))
    assert (str(error), error.details) == ("state: missing", {"field": "state"})


def _as_pillow(data: bytes, size: tuple[int, int] | None) -> Any:
    """The same picture by Pillow alone, stretched to the size."""
    with PIL.Image.open(io.BytesIO(data)) as image:
        if size is not None:
            image.draft(None, size[::-1])
        whole = image.convert("RGB")
        if size is not None and whole.size != size[::-1]:
            whole = whole.resize(size[::-1], PIL.Image.Resampling.BILINEAR)
        return np.asarray(whole)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_h4_a_jpeg_is_decoded_to_the_last_bit_as_pillow_does(subsampling: int, progressive: bool) -> None:
    """Of any size, at its own size and at the fraction of it that is needed."""
    rng = np.random.default_rng(subsampling)
    for _ in range(20):
        height, width = (int(n) for n in rng.integers(1, 260, 2))
        slope = np.linspace(0, 200, width)[None, :, None]
        pixels = (rng.integers(0, 40, (height, width, 3)) + slope).astype(np.uint8)
        file = io.BytesIO()
        options = {"quality": int(rng.integers(30, 95)), "subsampling": subsampling, "progressive": progressive}
        PIL.Image.fromarray(pixels).save(file, "JPEG", **options)
        for size in (None, (int(rng.integers(1, 90)), int(rng.integers(1, 90)))):
            decoded = decode_image(file.getvalue(), "image", size)
            assert np.array_equal(decoded, _as_pillow(file.getvalue(), size))


def test_h4_half_a_jpeg_and_one_with_a_wrong_header_are_refused() -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(file, "JPEG")
    data = file.getvalue()
    for broken in (data[: len(data) // 2], data[:40], data[:3], data[:2] + b"\xff\xc0" + data[4:]):
        with pytest.raises(InvalidRequest, match="not a readable PNG or JPEG"):
            decode_image(broken)


def test_h4_a_png_is_decoded_to_the_last_bit_as_pillow_does() -> None:
    """Of any size, filter and colours, small or large."""
    rng = np.random.default_rng(0)
    for mode in ("RGB", "RGBA", "L", "P", "1"):
        for height, width in ((1, 1), (1, 90), (90, 1), (224, 224), (900, 800)):
            slope = np.linspace(0, 200, width)[None, :, None]
            pixels = (rng.integers(0, 40, (height, width, 3)) + slope).astype(np.uint8)
            file = io.BytesIO()
            PIL.Image.fromarray(pixels).convert(mode).save(file, "PNG")
            with PIL.Image.open(file) as image:
                assert np.array_equal(decode_image(file.getvalue()), np.asarray(image.convert("RGB")))


def test_h4_a_broken_png_is_refused_and_one_without_an_end_is_read() -> None:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(file, "PNG")
    data = file.getvalue()
    end = b"\0\0\0\0IEND"
    cut = data[: data.index(end)]
    assert np.array_equal(decode_image(cut), pixels)
    wrong = bytearray(data)
    wrong[len(data) // 2] ^= 1
    for broken in (data[: len(data) // 2], data[:40], data[:30], data[:20], bytes(wrong)):
        with pytest.raises(InvalidRequest, match="not a readable PNG or JPEG"):
            decode_image(broken)


@pytest.mark.parametrize("size", [None, (20, 30), (12, 9)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_p29_a_picture_is_turned_as_its_exif_says(kind: str, size: tuple[int, int] | None) -> None:
    """All eight orientations, at its size and at smaller ones: the picture that a viewer shows, then fitted."""
    coarse = np.random.default_rng(0).integers(0, 255, (6, 4, 3), np.uint8)
    pixels = coarse.repeat(8, 0).repeat(8, 1)
    for orientation in range(1, 9):
        exif, file = PIL.Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        PIL.Image.fromarray(pixels).save(file, kind, exif=exif)
        with PIL.Image.open(file) as image:
            seen = np.asarray(PIL.ImageOps.exif_transpose(image))
        for resize in ("stretch", "pad", "pad-smolvla-float"):
            wanted = seen if size is None else resize_image(seen, *size, resize)
            decoded = decode_image(file.getvalue(), "image", size, resize)
            assert decoded.shape == wanted.shape
            # A JPEG is first decoded at a fraction of its size.
            most = 6 if kind == "JPEG" and size == (12, 9) else 1e-9
            assert np.abs(decoded.astype(np.float32) - wanted).mean() < most
        assert seen.shape == ((48, 32, 3) if orientation < 5 else (32, 48, 3))


def test_p29_a_broken_exif_turns_nothing() -> None:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 48, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(file, "PNG")
    data = file.getvalue()
    chunk = b"eXIf" + b"II*\0\xff\xff\xff\xff broken"
    chunk = (len(chunk) - 4).to_bytes(4) + chunk + zlib.crc32(chunk).to_bytes(4)
    end = data.index(b"IEND") - 4
    assert np.array_equal(decode_image(data[:end] + chunk + data[end:]), pixels)
    with pytest.raises(InvalidRequest, match="not a readable PNG or JPEG"):  # of the picture itself
        decode_image(data[:33] + chunk + data[33 : end - 60])


def test_h4_what_a_png_has_beside_its_pixels_costs_no_more_than_they_do() -> None:
    """A colour profile that inflates a thousandfold, and an EXIF of all the tags there are."""
    plain = encoded(picture(0))
    bomb = _with_part(plain, b"iCCP", b"profile\0\0" + zlib.compress(bytes(64 << 20)))
    with pytest.raises(InvalidRequest, match="not a readable PNG"):
        decode_image(bomb)
    profile = _with_part(plain, b"iCCP", b"profile\0\0" + zlib.compress(bytes(1000)))
    assert np.array_equal(decode_image(profile), picture(0))
    turned = [(0x0112, 3, 1, 6), *((tag, 3, 1, 1) for tag in range(0x0113, 0x0113 + 6000))]
    exif = b"II*\0" + struct.pack("<IH", 8, len(turned)) + b"".join(struct.pack("<HHII", *tag) for tag in turned)
    assert np.array_equal(decode_image(_with_part(plain, b"eXIf", exif + bytes(4))), picture(0))


SEEN = picture(0, 64, 64)
PNG, JPEG, GREY = encoded(SEEN), encoded(SEEN, "JPEG"), encoded(SEEN[..., 0], "JPEG")
CHUNKS = struct.pack(">I4sI", 0, b"teSt", zlib.crc32(b"teSt")) * 100_000
PARTS = {
    "APP segments": JPEG[:2] + b"\xff\xe1\0\2" * 500_000 + JPEG[2:],
    "comments in grey": GREY[:2] + b"\xff\xfe\0\2" * 500_000 + GREY[2:],
    "fill bytes": JPEG[:2] + b"\xff" * 500_000 + JPEG[2:],
    "bytes between parts": JPEG[:20] + bytes(500_000) + JPEG[20:],
    "markers without a length": JPEG[:2] + b"\xff\xd0" * 500_000 + JPEG[2:],
    "chunks": PNG[:33] + CHUNKS + PNG[33:],
    "chunks at the end": PNG[:-12] + CHUNKS + PNG[-12:],
    "chunks in grey": encoded(SEEN[..., 0])[:33] + CHUNKS + encoded(SEEN[..., 0])[33:],
}


@pytest.mark.parametrize(
    ("sent", "found"),
    [(np.zeros((2, 2)), "float64 [2, 2]"), ([[1], [1, 2]], "list"), ("a.png", "str")],
)  # fmt: skip
def test_what_is_no_picture_is_named(sent: Any, found: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"must be uint8 [height, width, 3], is {found}") + "$"):
        pixels_of(sent)


@pytest.mark.parametrize("read", [pixels_of, decode_image])
@pytest.mark.parametrize("name", PARTS)
def test_h4_a_picture_of_very_many_parts_is_refused(name: str, read: Callable[..., Any]) -> None:
    if read is pixels_of and name in ("chunks", "chunks at the end"):
        return  # it reads the first one only
    with pytest.raises(InvalidRequest, match="image: a file of over 4096 parts"):
        read(PARTS[name])


@pytest.mark.timing
@pytest.mark.parametrize("name", PARTS)
def test_h4_very_many_parts_are_refused_before_they_are_read(name: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequest):
        decode_image(PARTS[name])
    assert time.thread_time() - began < 0.2  # half a second to two without the bound


def test_h4_a_picture_of_many_parts_is_read() -> None:
    """A PNG in parts of 20 bytes, and a JPEG with fill bytes, thumbnails and markers that decoders skip."""
    found = [PNG[:33]]
    body = PNG[41 : 41 + int.from_bytes(PNG[33:37])]
    for at in range(0, len(body), 20):
        part = b"IDAT" + body[at : at + 20]
        found.append(struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)))
    assert len(found) > 500
    assert np.array_equal(decode_image(b"".join(found) + PNG[-12:]), SEEN)
    beside = b"\xff\xff\xff\xfe\0\4hi" + b"\xff\xe1\0\x0eJPEG \xff\xd8\xff\xda\0\0"
    assert np.array_equal(decode_image(JPEG[:2] + beside * 100 + JPEG[2:]), decode_image(JPEG))


@pytest.mark.filterwarnings("default")
def test_h4_what_pillow_warns_of_is_not_printed_for_each_request() -> None:
    """A picture beyond its bound, and one that begins as several pictures do."""
    many = GREY[:2] + b"\xff\xe2\0\x08MPF\0xx" + GREY[2:]
    large = io.BytesIO()
    PIL.Image.new("1", (10_000, 10_000)).save(large, "PNG")
    with warnings.catch_warnings(record=True) as caught:
        warm_decoders()
        decode_image(many)
        with pytest.raises(InvalidRequest, match="10000×10000 pixels"):
            decode_image(large.getvalue())
    assert caught == []


def _with_part(png: bytes, kind: bytes, data: bytes) -> bytes:
    """The PNG with a part more behind its header."""
    part = struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return png[:33] + part + png[33:]
