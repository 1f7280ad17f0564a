"""POST /act in JSON and in msgpack: bodies into a `Question`, answers into bodies.

msgspec decodes and validates in one pass; its messages carry the path of the field. The two formats differ only in
images and arrays: base64 text in JSON, bytes in msgpack.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from reflex_runtime.core.request import PRIORITIES
from reflex_runtime.robots.serving.question import LARGEST, MAX_INSTRUCTION, ActAnswer, Array, Image, Question
from reflex_runtime.web.errors import ClientError, InvalidJson, InvalidRequest
from reflex_runtime.web.fields import ID, MAX_VALUES, Whole, encode, invalid, invalid_field, is_json, printable, whole

MAX_STATE = 16_384  # numbers
MAX_IMAGES = 64
MAX_ESCAPES = 500_000  # backslashes in a body; some encoders write each / of 16 MB of base64 as \/


def _says(description: str, **checked: Any) -> msgspec.Meta:
    """What a field means, for /openapi.json and /docs. checked: what `Question` looks at, as JSON Schema has it."""
    return msgspec.Meta(description=description, extra_json_schema=checked)


Id = Annotated[str, msgspec.Meta(extra_json_schema=ID)] | None
Number = Annotated[float, msgspec.Meta(extra_json_schema={"minimum": -LARGEST, "maximum": LARGEST})]
Numbers = Annotated[list[Number], msgspec.Meta(max_length=MAX_STATE)]
Picture = Annotated[str, msgspec.Meta(extra_json_schema={"format": "image", "contentEncoding": "base64"})]
Instruction = Annotated[str, msgspec.Meta(max_length=MAX_INSTRUCTION)]
_MANY = msgspec.Meta(max_length=MAX_IMAGES)


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    instruction: Annotated[Instruction | None, _says("what to do, in words")] = None
    episode_id: Annotated[Id, _says("what cached prefixes and held actions belong to, with robot_id")] = None
    request_id: Annotated[Id, _says("comes back in the answer and as X-Request-Id; made when absent")] = None
    robot_id: Annotated[Id, _says("whose fair share it takes; else the episode's, else the connection's")] = None
    seed: Annotated[
        Whole | None,
        _says("of the noise; else the first 8 bytes of SHA-256 of request_id", minimum=0, maximum=2**64 - 1),
    ] = None
    priority: Annotated[
        Literal["urgent", "default", "background"], _says("urgent goes first and at once, background fills free places")
    ] = "default"
    deadline_ms: Annotated[
        float | None,
        _says("refused before it runs when it cannot be answered within this", exclusiveMinimum=0, maximum=600_000),
    ] = None
    executed: Annotated[
        Whole | None,
        _says("actions of the episode's last chunk executed when this was seen; for --rtc", minimum=0, maximum=10**6),
    ] = None
    delay: Annotated[
        Whole | None,
        _says("actions executed until the answer arrives, 0 for no delay; for --rtc", minimum=0, maximum=10**6),
    ] = None
    policy: Annotated[str | None, _says("which of several policies is asked, by its name")] = None


class ActJson(_Common, kw_only=True):
    """The JSON body."""

    image: Annotated[Picture | None, _says("PNG or JPEG as base64; a data URL will do")] = None
    image_wrist: Annotated[Picture | None, _says("likewise, for the camera of that name")] = None
    images: Annotated[Annotated[dict[str, Picture], _MANY] | None, _says("further cameras by name")] = None
    state: Annotated[Numbers | None, _says("the robot's state in its own units; finite")] = None


class ActMsgpack(_Common, kw_only=True):
    """The msgpack body."""

    image: bytes | Array | None = None
    image_wrist: bytes | Array | None = None
    images: Annotated[dict[str, bytes | Array], _MANY] | None = None
    state: Numbers | Array | None = None


_json = msgspec.json.Decoder(ActJson)
_msgpack = msgspec.msgpack.Decoder(ActMsgpack)


def decode(body: bytes, packed: bool) -> Question:
    """What is asked, or the 400 or 422 that names what is wrong. packed: msgpack, else JSON."""
    sent = _decode_msgpack(body) if packed else _decode_json(body)
    return Question(
        images=_images(sent),
        state=sent.state,
        instruction=sent.instruction,
        episode_id=sent.episode_id,
        request_id=sent.request_id,
        robot_id=sent.robot_id,
        seed=None if sent.seed is None else whole("seed", sent.seed),
        executed=None if sent.executed is None else whole("executed", sent.executed),
        delay=None if sent.delay is None else whole("delay", sent.delay),
        priority=PRIORITIES[sent.priority],
        deadline_ms=sent.deadline_ms,
        policy=sent.policy,
    )


def _images(sent: ActJson | ActMsgpack) -> Sequence[tuple[str, str, Image]]:
    if sent.image is None and sent.image_wrist is None and not sent.images:
        return ()
    found: list[tuple[str, str, Image]] = []
    if sent.image is not None:
        found.append(("image", "image", sent.image))
    if sent.image_wrist is not None:
        found.append(("image_wrist", "image_wrist", sent.image_wrist))
    for name, image in (sent.images or {}).items():
        found.append((name, printable(f"images.{name}"), image))
    return found


def _decode_json(body: bytes) -> ActJson:
    # A decoder lets nothing else run: what it takes is bounded by what it is given.
    if len(body) > MAX_VALUES and body.count(b",") > MAX_VALUES:
        raise _too_many_values(body)
    if len(body) > MAX_ESCAPES and body.count(b"\\") > MAX_ESCAPES:
        raise invalid("body", f"body: has more than {MAX_ESCAPES} escapes")
    try:
        return _json.decode(body)
    except msgspec.ValidationError as error:
        if not is_json(body):
            raise InvalidJson("the body is not JSON: it breaks off") from None
        raise invalid_field(error, ActJson) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    # NaN and Infinity are no JSON, but a client that sends them deserves the name of the field.
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidJson(f"the body is not JSON: {error}") from None
    try:
        return msgspec.convert(value, ActJson)
    except msgspec.ValidationError as error:
        raise invalid_field(error, ActJson) from None
    except UnicodeEncodeError:
        raise invalid("body", "body: a name in it is not Unicode (a lone surrogate)") from None


def _too_many_values(body: bytes) -> InvalidRequest:
    """The 422 for a body with more values than all fields may hold: what is wrong so far, else the field it is in."""
    enough = len(body) - len(body.split(b",", MAX_VALUES)[-1])
    try:
        _json.decode(memoryview(body)[:enough])
    except msgspec.ValidationError as error:
        return invalid_field(error, ActJson)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    end = body.rfind(b'":', 0, enough)
    name = printable(body[body.rfind(b'"', 0, max(0, end)) + 1 : max(0, end)].decode("utf-8", "replace"))
    return invalid(name or "body", f"{name or 'the body'}: there are more than {MAX_VALUES} values up to here")


def _decode_msgpack(body: bytes) -> ActMsgpack:
    try:
        return _msgpack.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_field(error, ActMsgpack) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(f"the body is not msgpack: {error}") from None


def encode_json(value: Any) -> bytes:
    """JSON bytes; numpy arrays as lists."""
    if isinstance(value, ActAnswer):
        value.actions = value.actions.tolist()
    return encode(value)


def encode_msgpack(value: Any) -> bytes:
    """msgpack bytes; arrays as {dtype, shape, data}."""
    if isinstance(value, ActAnswer):
        actions = np.ascontiguousarray(value.actions, dtype="<f4")
        value.actions = {"dtype": "<f4", "shape": list(actions.shape), "data": actions.tobytes()}
    return msgspec.msgpack.encode(value)
