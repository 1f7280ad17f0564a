"""`POST /act`: what it takes and answers, and how it refuses what is wrong."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgpack
import numpy as np
import PIL.Image
import pytest

from robots.tiny import ACTIONS, CHUNK, HEIGHT, STEPS, WIDTH, picture, write_export
from serving.exports import write_tiny
from serving.harness import Answer, Server
from serving.requests import check_error

POSE = [1.5, -0.5]
TEXT = "open the door"
MSGPACK = {"Content-Type": "application/msgpack"}
LIMIT = 4 * 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A policy of an image, a text and a state."""
    with Server(write_export(tmp_path_factory.mktemp("export")), "--max-body-bytes", str(LIMIT)) as running:
        yield running
        assert running.post(fields()).status == 200
        assert not any("Traceback" in line for line in running.log)


def png(array: Any, mode: str | None = None, form: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image = PIL.Image.fromarray(array) if mode is None else PIL.Image.fromarray(array).convert(mode)
    image.save(file, form, **how)
    return file.getvalue()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


PIXELS = picture(1)
PICTURE = b64(png(PIXELS))


def fields(**changes: Any) -> dict[str, Any]:
    """A request this policy can answer, with these changes; None leaves a field out."""
    sent = {"image": PICTURE, "instruction": TEXT, "state": POSE, "seed": 7} | changes
    return {name: value for name, value in sent.items() if value is not None}


def good(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return answer.json


# -- H1, H2: what is asked and what is answered ------------------------------------------------------------------------


def test_h2_the_answer_has_every_key(server: Server) -> None:
    body = good(server.post(fields(request_id="req-1")))
    assert len(body["actions"]) == body["num_actions"] == CHUNK
    assert {len(action) for action in body["actions"]} == {body["action_dim"]} == {ACTIONS}
    assert body["denoising_steps"] == STEPS
    assert body["inference_mode"] == "monolithic"
    assert body["request_id"] == "req-1"
    assert body["hz"] == pytest.approx(1e3 / body["latency_ms"], rel=0.01)
    assert set(body["timing"]) == {"queue_ms", "batch_ms", "total_ms", "age_ms"}
    assert body["timing"]["queue_ms"] + body["timing"]["batch_ms"] <= body["timing"]["total_ms"] + 0.01
    assert set(body["batch"]) == {"id", "size", "reason", "cost_ms"}
    assert body["batch"]["reason"] == "idle"
    assert body["cache"] == "off"
    export = server.get("/config").json["policy"]
    assert (body["model_hash"], body["config_hash"]) == (export["model_hash"], export["config_hash"])
    assert body["reflex_version"] == server.get("/config").json["reflex_version"]


def test_h1_an_image_comes_as_png_jpeg_or_data_url_and_under_its_own_name(server: Server) -> None:
    plain = good(server.post(fields()))["actions"]
    assert good(server.post(fields(image="data:image/png;base64," + PICTURE)))["actions"] == plain
    assert good(server.post(fields(image=None, images={"front": PICTURE})))["actions"] == plain
    lines = "\r\n".join(PICTURE[at : at + 76] for at in range(0, len(PICTURE), 76))
    urls = PICTURE.replace("+", "-").replace("/", "_").rstrip("=")
    assert urls != PICTURE
    for text in (lines, urls):
        assert good(server.post(fields(image=text)))["actions"] == plain
    jpeg = b64(png(np.full((HEIGHT, WIDTH, 3), 90, np.uint8), form="JPEG", quality=95))
    grey = b64(png(np.full((HEIGHT, WIDTH, 3), 90, np.uint8)))
    assert good(server.post(fields(image=jpeg)))["actions"] == good(server.post(fields(image=grey)))["actions"]


def test_h1_an_image_of_another_size_is_resized(server: Server) -> None:
    flat = np.full((HEIGHT, WIDTH, 3), 77, np.uint8)
    large = np.full((480, 640, 3), 77, np.uint8)
    same = good(server.post(fields(image=b64(png(flat)))))["actions"]
    assert good(server.post(fields(image=b64(png(large)))))["actions"] == same


def test_h1_the_default_seed_is_the_request_id(server: Server) -> None:
    seed = int.from_bytes(hashlib.sha256("räq 1".encode()).digest()[:8], "big")
    by_id = good(server.post(fields(seed=None, request_id="räq 1")))
    assert by_id["actions"] == good(server.post(fields(seed=seed)))["actions"]
    assert by_id["actions"] != good(server.post(fields(seed=None, request_id="other")))["actions"]


@pytest.mark.parametrize(("missing", "named"), [("image", "images.front"), ("instruction", None), ("state", None)])
def test_h1_what_is_missing_is_named(server: Server, missing: str, named: str | None) -> None:
    check_error(server.post(fields(**{missing: None})), 422, "invalid_request", named or missing)


def test_h1_every_priority_and_a_deadline_are_taken(server: Server) -> None:
    for priority in ("urgent", "default", "background"):
        good(server.post(fields(priority=priority, deadline_ms=60_000, robot_id="r", episode_id="e")))


def test_an_instruction_that_changes_nothing_is_a_warning_and_is_counted(server: Server, tmp_path: Path) -> None:
    before = server.metrics()("reflex_request_warnings_total", kind="instruction_unknown")
    assert good(server.post(fields()))["warnings"] == []
    assert good(server.post(fields(instruction="")))["warnings"] == []  # it has none
    said = "instruction: words that the policy does not know: "
    cut = "instruction: the policy reads 3 tokens, and {} more were cut off its end"
    for text, words, more in (
        ("fold my door, fold\n", "'fold', 'my', 'door,'", [cut.format(1)]),
        ("Tür öffnen", "'tür', 'öffnen'", []),
    ):
        answer = good(server.post(fields(instruction=text)))
        assert answer["warnings"] == [said + words, *more]
        assert server.wait_log(f"{said}{words} (repeats are not logged)")
    assert good(server.post(fields(instruction="fold my door,", request_id="again")))["warnings"] == [
        f"{said}'fold', 'my', 'door,'"
    ]
    again = json.dumps(fields(instruction="fold my door,", request_id="again")).encode()  # on another path
    assert good(server.ask("POST", "/policies/default/act", again))["warnings"] == [f"{said}'fold', 'my', 'door,'"]
    long = f"\x1b{50 * 'x'} " + " ".join(f"w{i}" for i in range(9))
    told, end = good(server.post(fields(instruction=long)))["warnings"]
    assert end == cut.format(7)
    assert told == said + ", ".join(map(repr, [f"\x1b{39 * 'x'}", *(f"w{i}" for i in range(7))])) + " and 2 more"
    server.wait_log("and 2 more (repeats are not logged)")
    assert not any("request again: " in line for line in server.log)
    assert server.metrics()("reflex_request_warnings_total", kind="instruction_unknown") == before + 5
    assert server.metrics()("reflex_request_warnings_total", kind="instruction_cut") >= 2
    with Server(write_tiny(tmp_path / "tiny")) as blind:
        assert good(blind.act())["warnings"] == []
        (told,) = good(blind.act(instruction="open the door"))["warnings"]
        assert told == "instruction: this policy reads no text; it changes nothing"
        assert blind.metrics()("reflex_request_warnings_total", kind="instruction_ignored") == 1
        assert blind.metrics()("reflex_request_warnings_total", kind="instruction_unknown") == 0


def test_images_the_policy_does_not_look_at_are_named_with_those_it_does(server: Server) -> None:
    for field, more in (("images.rear", {"images": {"rear": PICTURE}}), ("image_wrist", {"image_wrist": PICTURE})):
        body = check_error(server.post(fields(**more)), 422, "invalid_request", field)
        assert body["message"] == f"{field}: no policy here has such a camera (there are: front, image)"
    plain = good(server.post(fields()))["actions"]
    assert good(server.post(fields(images={"front": PICTURE})))["actions"] == plain  # its own name wins
    body = check_error(server.post(fields(images={"image": PICTURE})), 422, "invalid_request", "images.image")
    assert "given twice" in body["message"]


# -- H3: msgpack -------------------------------------------------------------------------------------------------------


def packed(**changes: Any) -> dict[str, Any]:
    image = {"dtype": "|u1", "shape": list(PIXELS.shape), "data": PIXELS.tobytes()}
    state = {"dtype": "<f4", "shape": [2], "data": np.array(POSE, "<f4").tobytes()}
    return {"image": image, "state": state, "instruction": TEXT, "seed": 7} | changes


def unpack(answer: Answer) -> Any:
    assert answer.headers["content-type"] == "application/msgpack"
    return msgpack.unpackb(answer.body)


def test_h3_msgpack_both_ways_equals_json(server: Server) -> None:
    plain = np.array(good(server.post(fields()))["actions"], np.float32)
    for image in (packed()["image"], png(PIXELS)):
        body = unpack(server.post(msgpack.packb(packed(image=image)), MSGPACK))
        actions = body.pop("actions")
        assert (actions["dtype"], actions["shape"]) == ("<f4", [CHUNK, ACTIONS])
        assert np.array_equal(np.frombuffer(actions["data"], "<f4").reshape(actions["shape"]), plain)
        assert set(body) | {"actions"} >= {"latency_ms", "timing", "batch", "model_hash"}


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "<i4"])
def test_h3_a_state_of_any_number_type(server: Server, dtype: str) -> None:
    state = np.array([2, -1], dtype)
    sent = packed(state={"dtype": dtype, "shape": [2], "data": state.tobytes()})
    want = good(server.post(fields(state=[2.0, -1.0])))["actions"]
    body = unpack(server.post(msgpack.packb(sent), MSGPACK))
    assert np.frombuffer(body["actions"]["data"], "<f4").tolist() == pytest.approx(np.array(want).ravel().tolist())
    assert server.post(msgpack.packb(packed(state=[2.0, -1.0])), MSGPACK).status == 200


def test_h3_the_answer_comes_as_accepted(server: Server) -> None:
    as_json = server.post(msgpack.packb(packed()), MSGPACK | {"Accept": "application/json"})
    assert as_json.headers["content-type"] == "application/json"
    good(as_json)
    assert unpack(server.post(fields(), {"Accept": "application/msgpack"}))["num_actions"] == CHUNK
    wrong = server.post(msgpack.packb({"state": "x"}), MSGPACK)
    assert wrong.status == 422
    assert unpack(wrong)["field"] == "state"


def test_h3_images_of_an_odd_shape_or_type_are_named(server: Server) -> None:
    for shape, dtype, data in (
        ([4, 6], "|u1", bytes(24)),
        ([4, 6, 4], "|u1", bytes(96)),
        ([4, 6, 3], "<f4", bytes(288)),
        ([0, 6, 3], "|u1", b""),
        ([1, 4096 * 4096 + 1, 3], "|u1", b""),
        ([4, 6, 3], "|u1", bytes(71)),
    ):
        image = {"dtype": dtype, "shape": shape, "data": data}
        answer = server.post(msgpack.packb(packed(image=image)), MSGPACK | {"Accept": "application/json"})
        check_error(answer, 422, "invalid_request", "image")


BOMBS = {
    "array32": b"\x81\xa5state\xdd\xff\xff\xff\xff",
    "map32": b"\xdf\xff\xff\xff\xff",
    "images map32": b"\x81\xa6images\xdf\xff\xff\xff\xff",
    "bin32": b"\x81\xa5image\xc6\xff\xff\xff\xff",
    "str32": b"\x81\xabinstruction\xdb\xff\xff\xff\xff",
    "deep array": b"\x81\xa5state" + b"\x91" * 100_000,
    "deep unknown": b"\x81\xa3foo" + b"\x81\xa1a" * 100_000,
    "not utf-8": b"\x81\xabinstruction\xa2\xff\xfe",
    "key not text": b"\x81\x01\x02",
    "extension": b"\x81\xa5state\xd4\x01\x00",
    "astronomical": msgpack.packb(packed(state={"dtype": "<f4", "shape": [0, 2**62], "data": b""})),
    "negative": msgpack.packb(packed(state={"dtype": "<f4", "shape": [-1], "data": b""})),
    "zero-dimensional": msgpack.packb(packed(state={"dtype": "<f4", "shape": [], "data": bytes(4)})),
    "nothing": msgpack.packb(packed(state={"dtype": "<f4", "shape": [0], "data": b""})),
    "object type": msgpack.packb(packed(state={"dtype": "O", "shape": [2], "data": bytes(16)})),
    "nan": msgpack.packb(packed(state={"dtype": "<f4", "shape": [2], "data": struct.pack("<ff", 1.0, float("nan"))})),
    "empty": b"",
    "JSON": b'{"state": [1, 2]}',
}


@pytest.mark.parametrize("name", BOMBS)
def test_h4_msgpack_that_is_none_or_means_harm_is_refused(server: Server, name: str) -> None:
    answer = server.post(BOMBS[name], MSGPACK | {"Accept": "application/json"})
    assert answer.status in (400, 422)
    check_error(answer, answer.status, "invalid_request")


# -- H4: what is wrong is named ----------------------------------------------------------------------------------------

NOT_JSON = {
    "empty": b"",
    "broken": b'{"state": [1, 2}',
    "broken off in an unknown field": b'{"a":',
    "trailing": b"{} x",
    "not utf-8": b'{"instruction": "\xff"}',
    "key not utf-8": b'{"\xff": 1}',
    "gzip": b"\x1f\x8b\x08\x00",
    "zeros": bytes(100),
    "form": b"image=AAAA&state=1",
    "python": b"{'state': [1, 2]}",
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_h4_what_is_not_json_is_400(server: Server, name: str) -> None:
    answer = server.post(NOT_JSON[name])
    check_error(answer, 400, "invalid_json")
    assert (answer.json["message"] == "the body is not JSON: it is empty") == (name == "empty")


def with_state(text: str) -> bytes:
    return json.dumps(fields(state=None)).encode()[:-1] + b', "state": ' + text.encode() + b"}"


WRONG: dict[str, tuple[bytes | dict[str, Any], str]] = {
    "list": (b"[]", "body"),
    "null": (b"null", "body"),
    "number": (b"1", "body"),
    "deep list": (b"[" * 100_000, "body"),
    "deep state": (b'{"state":' + b"[" * 100_000, "state"),
    "deep images": (b'{"images":' + b'{"a":' * 100_000, "images"),
    "unknown field": ({"speed": 3}, "speed"),
    "surrogate in a name": (b'{"\\ud800": 1}', "body"),
    "surrogate in text": (b'{"instruction": "\\ud800"}', "instruction"),
    "state not numbers": ({"state": ["a", "b"]}, "state"),
    "state a text": ({"state": "1, 2"}, "state"),
    "state too short": (fields(state=[1.0]), "state"),
    "state too long": (fields(state=[1.0] * 3), "state"),
    "state empty": (fields(state=[]), "state"),
    "state nested": (fields(state=[[1.0, 2.0]]), "state"),
    "state nan": (with_state("[NaN, 1]"), "state"),
    "state infinity": (with_state("[1, Infinity]"), "state"),
    "state -infinity": (with_state("[-Infinity, 1]"), "state"),
    "state 1e999": (with_state("[1e999, 1]"), "state"),
    "state beyond float32": (with_state("[1e39, 1]"), "state"),
    "state of 400 digits": (with_state(f"[{'9' * 400}, 1]"), "state"),
    "state of 5000 digits": (with_state(f"[{'9' * 5000}, 1]"), "state"),
    "image a number": ({"image": 5}, "image"),
    "image not base64": (fields(image="!!!"), "image"),
    "image not an image": (fields(image=b64(b"GIF89a")), "image"),
    "image cut off": (fields(image=b64(png(picture(2, 300, 300))[:2000])), "image"),
    "image empty": (fields(image=""), "image"),
    "image data url without data": (fields(image="data:image/png;base64"), "image"),
    "image data url not base64": (fields(image="data:image/png,abc"), "image"),
    "image a surrogate": (b'{"image": "\\ud800"}', "image"),
    "wrist not an image": (fields(image_wrist="AAAA"), "image_wrist"),
    "images a list": ({"images": [PICTURE]}, "images"),
    "instruction a number": ({"instruction": 5}, "instruction"),
    "instruction of 20,000 characters": (fields(instruction="x" * 20_000), "instruction"),
    "65 images": (fields(images=dict.fromkeys(map(str, range(65)), PICTURE)), "images"),
    "state of 20,000 numbers": (fields(state=[1.0] * 20_000), "state"),
    "state of a million numbers": (with_state("[" + "1," * 10**6 + "1]"), "state"),
    "a picture of a million escapes": (b'{"image": "' + b"\\n" * 10**6 + b'"}', "body"),
    "a hundred thousand unknown fields": ({f"k{i}": i for i in range(100_000)}, "k0"),
    "images by the hundred thousand": (b'{"images": {' + b",".join(b'"%d": ""' % i for i in range(10**5)), "39999"),
    "seed negative": (fields(seed=-1), "seed"),
    "seed too large": (fields(seed=2**64), "seed"),
    "seed huge": (b'{"seed": 1' + b"0" * 5000 + b"}", "seed"),
    "seed a float": (fields(seed=1.5), "seed"),
    "priority unknown": (fields(priority="soon"), "priority"),
    "deadline zero": (fields(deadline_ms=0), "deadline_ms"),
    "deadline negative": (fields(deadline_ms=-5), "deadline_ms"),
    "deadline nan": (b'{"deadline_ms": NaN}', "deadline_ms"),
    "deadline huge": (fields(deadline_ms=1e300), "deadline_ms"),
    "deadline a text": (fields(deadline_ms="50"), "deadline_ms"),
}


@pytest.mark.parametrize("name", WRONG)
def test_h4_what_is_wrong_is_422_and_names_the_field(server: Server, name: str) -> None:
    body, field = WRONG[name]
    check_error(server.post(body), 422, "invalid_request", field)


def test_h4_an_image_above_4096_squared_is_refused_by_its_header_alone(server: Server) -> None:
    head = png(picture(3))
    for width, height in ((4097, 4096), (2**31 - 1, 2**31 - 1), (0, 5)):
        ihdr = b"IHDR" + struct.pack(">II", width, height) + head[24:29]
        lying = head[:8] + struct.pack(">I", 13) + ihdr + struct.pack(">I", zlib.crc32(ihdr)) + head[33:]
        check_error(server.post(fields(image=b64(lying))), 422, "invalid_request", "image")
    assert server.post(fields(image=b64(png(np.zeros((4096, 4096, 3), np.uint8))))).status == 200


def test_h4_images_of_every_mode_are_understood(server: Server) -> None:
    grey = np.full((HEIGHT, WIDTH), 120, np.uint8)
    rgb = np.repeat(grey[:, :, None], 3, axis=2)
    want = good(server.post(fields(image=b64(png(rgb)))))["actions"]
    kinds = {
        "grey": png(grey),
        "16 bit": png((grey.astype(np.uint16) << 8) | grey),
        "palette": png(rgb, "P"),
        "transparent": png(np.dstack([rgb, np.full_like(grey, 128)])),
        "grey with alpha": png(rgb, "LA"),
        "animated": png(rgb, save_all=True, append_images=[PIL.Image.new("RGB", (WIDTH, HEIGHT), "red")]),
        "JPEG": png(rgb, form="JPEG", quality=100),
        "grey JPEG": png(grey, form="JPEG", quality=100),
    }
    for name, data in kinds.items():
        got = good(server.post(fields(image=b64(data))))["actions"]
        assert np.abs(np.array(got) - want).max() < 0.02, name
    good(server.post(fields(image=b64(png(rgb, "CMYK", form="JPEG")))))
    good(server.post(fields(image=b64(png(rgb, "1")))))


# -- H7, H12, paths and methods ----------------------------------------------------------------------------------------


def test_h7_config_tells_export_and_settings(server: Server) -> None:
    body = good(server.get("/config"))
    assert body["export"]["model_id"] == "tiny"
    assert body["policy"]["inference_mode"] == "monolithic"
    assert body["server"]["max_body_bytes"] == LIMIT
    assert body["server"]["max_batch_cost_ms"] is None  # by the fixed part of the model


def test_h7_the_metrics_are_prometheus_text(server: Server) -> None:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert b"# TYPE reflex_requests_total counter" in answer.body


def test_h7_openapi_names_every_path_field_and_status(server: Server) -> None:
    document = good(server.get("/openapi.json"))
    assert {path for path in document["paths"] if not path.startswith("/v2")} == {  # OIP's have tests of their own
        "/", "/act", "/health", "/healthz", "/config", "/metrics", "/diagnostics/cost-model", "/diagnostics/rollout",
        "/diagnostics/shadow", "/admin/split", "/admin/rollback", "/admin/reset", "/admin/load", "/admin/faults",
        "/reset", "/episodes/{id}/outcome", "/openapi.json", "/docs", "/dashboard", "/dashboard/stream",
        "/diagnostics/journal",
    }  # fmt: skip
    act = document["paths"]["/act"]["post"]
    known = act["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert set(known) == {
        "image", "image_wrist", "images", "instruction", "state", "episode_id", "request_id", "robot_id", "seed",
        "priority", "deadline_ms", "executed", "delay", "policy",
    }  # fmt: skip
    failures = {"400", "401", "403", "405", "408", "409", "413", "415", "422", "429", "500", "503", "504"}
    assert set(act["responses"]) == {"200"} | failures
    page = server.get("/docs")
    assert page.status == 200
    assert b"//" not in page.body.replace(b"\n//", b"")  # it needs nothing from outside


def test_h12_every_answer_has_an_id_and_every_error_its_keys(server: Server) -> None:
    for path in ("/health", "/config", "/metrics", "/openapi.json", "/docs", "/diagnostics/cost-model"):
        assert server.get(path).headers["x-request-id"]
        head = server.ask("HEAD", path)
        assert (head.status, head.body) == (200, b"")
        assert head.headers["x-request-id"]
        wrong = server.ask("POST", path, b"x")
        check_error(wrong, 405, "method_not_allowed")
        assert wrong.headers["allow"] == "GET"
    for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"):
        wrong = server.ask(method, "/act")
        assert wrong.status == 405
        assert wrong.headers["allow"] == "POST"
    for path in ("/act//x", "/ACT", "/v1/models", "/%00", "/a%0d%0ab", "/" + "x" * 5000, "/%C3%A9", "/%FF"):
        check_error(server.get(path), 404, "not_found")
    assert server.post(fields()).headers["x-request-id"] != server.post(fields()).headers["x-request-id"]


# -- H13: any text -----------------------------------------------------------------------------------------------------

IDS = {
    "plain": "robot-7",
    "spaces": " a b ",
    "accents": "Zürich",
    "emoji": "🤖" * 64,
    "right to left": "\u202eabc",
    "separator": "a\u2028b",
    "percent": "100%",
    "quotes": "\"'\\<>&",
    "256 bytes": "x" * 256,
    "empty": "",
}


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("field", ["episode_id", "request_id", "robot_id"])
def test_h13_an_id_is_any_text(server: Server, field: str, name: str) -> None:
    answer = server.post(fields(**{field: IDS[name]}))
    body = good(answer)
    shown = answer.headers["x-request-id"]
    if field == "request_id" and IDS[name]:
        assert body["request_id"] == IDS[name]
        plain = IDS[name].isascii() and IDS[name] == IDS[name].strip()
        assert shown == (IDS[name] if plain else quote(IDS[name], safe=""))
    else:
        assert body["request_id"] == shown
        assert shown  # made by the server


@pytest.mark.parametrize("text", ["a\nb", "a\r\nX-Evil: 1", "\x00", "\x7f", "\x85", "x" * 257, "é" * 129])
@pytest.mark.parametrize("field", ["episode_id", "request_id", "robot_id"])
def test_h13_a_control_character_or_too_long_an_id_is_422(server: Server, field: str, text: str) -> None:
    answer = server.post(fields(**{field: text}))
    check_error(answer, 422, "invalid_request", field)
    assert "x-evil" not in answer.headers
    check_error(server.post(json.dumps({field: "\ud800"}).encode()), 422, "invalid_request", field)


@pytest.mark.parametrize("text", ["a\nb", "\x00", "é" * 5000, "🤖", "\u202e", "{}", "'; drop table"])
def test_h13_any_instruction_is_answered(server: Server, text: str) -> None:
    good(server.post(fields(instruction=text)))


# -- the wire itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/json; a=b", "ü"])
def test_a_body_of_another_type_is_read_as_json(server: Server, kind: str) -> None:
    good(server.ask("POST", "/act", json.dumps(fields()).encode(), {"Content-Type": kind.encode().decode("latin-1")}))


def test_the_last_of_a_repeated_key_counts(server: Server) -> None:
    text = json.dumps(fields(seed=None)).encode()[:-1]
    twice = good(server.post(text + b', "seed": 1, "seed": 2}'))
    assert twice["actions"] == good(server.post(fields(seed=2)))["actions"]
