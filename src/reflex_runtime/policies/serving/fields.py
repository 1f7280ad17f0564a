"""The fields of POST /act, in JSON and in msgpack, and the answer.

msgspec decodes and validates in one pass; its messages carry the path of the field. Both formats end in the same
`ActFields`; only images and arrays differ: base64 text in JSON, bytes in msgpack.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.web.errors import ClientError, InvalidJson, InvalidRequest
from reflex_runtime.web.fields import Whole, check_id, invalid, invalid_field, whole
from reflex_runtime.web.json import MAX_VALUES, encode, is_json, is_unicode, printable

MAX_INSTRUCTION = 16_384  # characters
MAX_STATE = 16_384  # numbers
MAX_IMAGES = 64
MAX_ESCAPES = 500_000  # backslashes in a body; some encoders write each / of 16 MB of base64 as \/
LARGEST = 1e30  # of a number of the state: larger ones need not be finite in the model's units
_DTYPES = {"<f4", "<f8", "<f2", "|u1", "<u1", "u1", "<i4", "<i8", "<i2", "|i1"}


class Array(msgspec.Struct, forbid_unknown_fields=True):
    """An array in msgpack: little-endian, C order."""

    dtype: str
    shape: Annotated[list[int], msgspec.Meta(max_length=4)]
    data: bytes


Image = str | bytes | Array


def _says(description: str) -> msgspec.Meta:
    """What a field means, for /openapi.json and /docs."""
    return msgspec.Meta(description=description)


Text = str | None
Numbers = Annotated[list[float], msgspec.Meta(max_length=MAX_STATE)]
Instruction = Annotated[str, msgspec.Meta(max_length=MAX_INSTRUCTION)]
_MANY = msgspec.Meta(max_length=MAX_IMAGES)


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    instruction: Annotated[Instruction | None, _says("what to do, in words")] = None
    episode_id: Annotated[Text, _says("what cached prefixes and held actions belong to")] = None
    request_id: Annotated[Text, _says("comes back in the answer and as X-Request-Id; made when absent")] = None
    robot_id: Annotated[Text, _says("whose fair share it takes; else the episode's, else the connection's")] = None
    seed: Annotated[Whole | None, _says("of the noise; else the first 8 bytes of SHA-256 of request_id")] = None
    priority: Annotated[
        Literal["urgent", "default", "background"], _says("urgent goes first and at once, background fills free places")
    ] = "default"
    deadline_ms: Annotated[float | None, _says("refused before it runs when it cannot be answered within this")] = None
    executed: Annotated[
        Whole | None, _says("actions of the episode's last chunk executed when this was seen; for --rtc")
    ] = None


class ActJson(_Common, kw_only=True):
    """The JSON body."""

    image: Annotated[Text, _says("PNG or JPEG as base64; a data URL will do")] = None
    image_wrist: Annotated[Text, _says("likewise, for the camera of that name")] = None
    images: Annotated[Annotated[dict[str, str], _MANY] | None, _says("further cameras by name")] = None
    state: Annotated[Numbers | None, _says("the robot's state in its own units; finite")] = None


class ActMsgpack(_Common, kw_only=True):
    """The msgpack body."""

    image: bytes | Array | None = None
    image_wrist: bytes | Array | None = None
    images: Annotated[dict[str, bytes | Array], _MANY] | None = None
    state: Numbers | Array | None = None


ActFields = ActJson | ActMsgpack

_json = msgspec.json.Decoder(ActJson)
_msgpack = msgspec.msgpack.Decoder(ActMsgpack)


def decode(body: bytes, packed: bool) -> ActFields:
    """The validated fields, or the 400 or 422 that names what is wrong. packed: msgpack, else JSON."""
    fields: ActFields = _decode_msgpack(body) if packed else _decode_json(body)
    if fields.episode_id is not None:
        check_id("episode_id", fields.episode_id)
    if fields.request_id is not None:
        check_id("request_id", fields.request_id)
    if fields.robot_id is not None:
        check_id("robot_id", fields.robot_id)
    if fields.instruction is not None and not is_unicode(fields.instruction):
        raise invalid("instruction", "instruction: holds text that is not Unicode (a lone surrogate)")
    fields.seed, fields.executed = whole("seed", fields.seed), whole("executed", fields.executed)
    if fields.seed is not None and not 0 <= fields.seed < 2**64:
        raise invalid("seed", f"seed={fields.seed}: must be in [0, 2^64)")
    if fields.executed is not None and not 0 <= fields.executed <= 1_000_000:
        raise invalid("executed", f"executed={fields.executed}: must be in [0, 1000000]")
    limit = fields.deadline_ms
    if limit is not None and not 0.0 < limit <= 600_000.0:
        raise invalid("deadline_ms", f"deadline_ms={limit}: must be in (0, 600000]")
    return fields


def _decode_json(body: bytes) -> ActJson:
    if body.count(b",") > MAX_VALUES:  # a decoder lets nothing else run: what it takes is bounded by what it is given
        raise _too_many_values(body)
    if body.count(b"\\") > MAX_ESCAPES:
        raise invalid("body", f"body: has more than {MAX_ESCAPES} escapes")
    try:
        return _json.decode(body)
    except msgspec.ValidationError as error:
        raise (invalid_field(error) if is_json(body) else InvalidJson("the body is not JSON: it breaks off")) from None
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
        raise invalid_field(error) from None
    except UnicodeEncodeError:
        raise invalid("body", "body: a name in it is not Unicode (a lone surrogate)") from None


def _too_many_values(body: bytes) -> InvalidRequest:
    """The 422 for a body with more values than all fields may hold: what is wrong so far, else the field it is in."""
    enough = len(body) - len(body.split(b",", MAX_VALUES)[-1])
    try:
        _json.decode(memoryview(body)[:enough])
    except msgspec.ValidationError as error:
        return invalid_field(error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    end = body.rfind(b'":', 0, enough)
    name = printable(body[body.rfind(b'"', 0, max(0, end)) + 1 : max(0, end)].decode("utf-8", "replace"))
    return invalid(name or "body", f"{name or 'the body'}: there are more than {MAX_VALUES} values up to here")


def _decode_msgpack(body: bytes) -> ActMsgpack:
    try:
        return _msgpack.decode(body)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientError(f"the body is not msgpack: {error}") from None


def state_of(fields: ActFields) -> NDArray[np.float32] | None:
    """The state as float32 [n], finite; 422 otherwise."""
    state = fields.state
    if state is None:
        return None
    if isinstance(state, Array):
        values = array_of(state, "state")
        if values.ndim != 1:
            raise invalid("state", f"state: has shape {list(values.shape)}, must have one dimension")
        wide = values.astype(np.float64)
    else:
        if sum(map(abs, state)) <= LARGEST:  # all finite, each within the bound: the usual case, in a tenth of the time
            return np.array(state, np.float32)
        wide = np.asarray(state, dtype=np.float64)
    if not (np.abs(wide) <= LARGEST).all():
        raise invalid("state", f"state: holds NaN, infinity or a number beyond {LARGEST:g}")
    return wide.astype(np.float32)


def array_of(array: Array, field: str) -> NDArray[Any]:
    """A numpy view of a msgpack array; 422 when type, shape and length do not agree."""
    if array.dtype not in _DTYPES:
        raise invalid(field, printable(f"{field}: dtype {array.dtype!r} is not one of {', '.join(sorted(_DTYPES))}"))
    dtype = np.dtype(array.dtype)
    if len(array.shape) > 4 or any(n < 0 for n in array.shape):
        raise invalid(field, printable(f"{field}: shape {array.shape} must have at most 4 dimensions, each >= 0"))
    if prod(array.shape) * dtype.itemsize != len(array.data):
        raise invalid(
            field, printable(f"{field}: {len(array.data)} bytes do not make shape {array.shape} of {array.dtype}")
        )
    try:
        return np.frombuffer(array.data, dtype=dtype).reshape(array.shape)
    except ValueError:  # nothing times something astronomical is nothing, but no array
        raise invalid(field, f"{field}: shape {array.shape} is no array") from None


class Timing(msgspec.Struct):
    """Where the time of a request went."""

    queue_ms: float
    batch_ms: float
    total_ms: float
    age_ms: float


class ActAnswer(msgspec.Struct, omit_defaults=False):
    """The 200 body."""

    actions: Any
    num_actions: int
    action_dim: int
    latency_ms: float
    hz: float
    denoising_steps: int
    inference_mode: str
    model_hash: str
    config_hash: str
    reflex_version: str
    request_id: str
    timing: Timing
    batch: dict[str, Any]
    cache: str
    guard: dict[str, Any] | None = None
    rtc: Mapping[str, Any] | None = None
    policy_changed: bool = False
    injected: dict[str, Any] | None = None
    warnings: list[str] = []


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


def schema_of(kind: type) -> dict[str, Any]:
    """The schema of one body."""
    _, components = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    found: dict[str, Any] = components[kind.__name__]
    return found


def request_schema() -> dict[str, Any]:
    """The schema of a JSON body, whatever the policy."""
    return schema_of(ActJson)


def answer_schema() -> tuple[dict[str, Any], dict[str, Any]]:
    """(the schema of a 200, those it refers to)."""
    _, components = msgspec.json.schema_components([ActAnswer], ref_template="#/components/schemas/{name}")
    answer = components.pop(ActAnswer.__name__)
    answer["properties"]["actions"] = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    return answer, components
