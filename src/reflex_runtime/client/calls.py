"""The bodies of calls: an observation's fields, a function's item; and the pause before a further attempt."""

from __future__ import annotations

import io
import uuid
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.client.errors import ClientError, StaleRequest
from reflex_runtime.pacing import doubled

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between attempts, doubling, without Retry-After

Picture = NDArray[np.uint8] | bytes
"""uint8 [height, width, 3], or a PNG or JPEG file's bytes."""

Encoding = Literal["raw", "png", "jpeg"]
Priority = Literal["urgent", "default", "background"]


class ActFields(TypedDict, total=False):
    """The arguments of `act`.

    image: the policy's only picture; images: by the policy's names. state: [n], in the robot's units. seed: of the
    noise, by default from request_id. deadline_ms: from this call on, all attempts included. executed: number of
    actions of the last chunk that were executed. delay: number that the robot will execute until the answer.
    """

    image: Picture | None
    images: Mapping[str, Picture] | None
    instruction: str | None
    state: Sequence[float] | NDArray[Any] | None
    episode_id: str | None
    robot_id: str | None
    seed: int | None
    priority: Priority | None
    deadline_ms: float | None
    request_id: str | None
    executed: int | None
    delay: int | None


def pause_after(error: ClientError, made: int, spread: float) -> float | None:
    """Seconds until the next attempt; None if there is none. made: further attempts so far. spread: in [0, 1); adds up
    to a tenth, so that robots that were refused together do not return together.

    Only requests with a `retry_safe` error are sent again, but no late or superseded ones. The pause is at least
    Retry-After, or without it 0.1 s, doubling to 2 s.
    """
    if not error.retry_safe or isinstance(error, StaleRequest):
        return None
    pause = doubled(FIRST_PAUSE, LONGEST_PAUSE, made) if error.retry_after is None else error.retry_after
    return pause * (1.0 + 0.1 * spread)


def observation(fields: Mapping[str, Any], encoding: Encoding) -> dict[str, Any]:
    """The fields of POST /act. ValueError for values that no server would accept, TypeError for unknown names."""
    if unknown := fields.keys() - ActFields.__annotations__.keys():
        raise TypeError(f"act() has no {', '.join(sorted(unknown))}; it has {', '.join(ActFields.__annotations__)}")
    sent = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in fields.items()
        if value is not None
    }
    sent.setdefault("request_id", uuid.uuid4().hex)  # made here, so that every attempt has the same noise
    images = sent.pop("images", {})
    if not isinstance(images, Mapping):
        raise ValueError(f"images: must be a dict of pictures by camera, is {type(images).__name__}")
    if "image" in sent:
        sent["image"] = _picture(sent["image"], "image", encoding)
    if images:
        sent["images"] = {name: _picture(value, f"images[{name!r}]", encoding) for name, value in images.items()}
    if "state" in sent:
        sent["state"] = _state(sent["state"])
    check_deadline(sent.get("deadline_ms"))
    return sent


def check_deadline(deadline_ms: float | None) -> None:
    if deadline_ms is not None and not (isinstance(deadline_ms, Real) and 0.0 < deadline_ms <= 600_000.0):
        raise ValueError(f"deadline_ms={deadline_ms!r}: must be in (0, 600000]")


def _state(values: Any) -> dict[str, Any]:
    state = np.asarray(values)
    if state.ndim != 1 or state.dtype.kind not in "fiu":
        raise ValueError(f"state: must be numbers [n], is {state.dtype} {list(state.shape)}")
    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite: the server's error names the field
        return _array(state.astype(np.float32))


def _picture(picture: Any, name: str, encoding: Encoding) -> Any:
    if isinstance(picture, (bytes, bytearray, memoryview)):
        return bytes(picture)
    pixels = np.asarray(picture)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        shape = list(pixels.shape)
        raise ValueError(f"{name}: must be uint8 [height, width, 3] or bytes, is {pixels.dtype} {shape}")
    if encoding == "raw":
        return _array(pixels)
    import PIL.Image  # here: programs that send raw pictures do not need it

    return _file(PIL.Image.fromarray(pixels), encoding)


def _file(image: Any, kind: Literal["png", "jpeg"]) -> bytes:
    """A picture of Pillow as a file."""
    out = io.BytesIO()
    image.save(out, kind, **({"compress_level": 1} if kind == "png" else {}))
    return out.getvalue()


def plain_item(value: Any) -> Any:
    """What msgpack sends for an array, a NumPy number, a pydantic model or a Pillow picture."""
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "model_dump"):  # pydantic
        return value.model_dump()
    if hasattr(value, "save") and hasattr(value, "mode"):  # a picture
        return _file(value, "png")
    raise TypeError(f"item: of type {type(value).__name__}, which cannot be sent")


def _array(values: NDArray[Any]) -> dict[str, Any]:
    """The wire form: dtype, shape and little-endian bytes in C order."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return {"dtype": little.dtype.str, "shape": list(little.shape), "data": little.tobytes()}
