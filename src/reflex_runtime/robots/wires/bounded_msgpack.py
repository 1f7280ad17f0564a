"""msgpack read within bounds: a frame makes at most `MAX_VALUES` values, keys included.

The library bounds the length of one container, and 16 MB of empty maps are a gigabyte: its hooks count all of a frame.
Lists within each other claim their lengths first: 160 MB at most, for as long as the library reads.
The codecs of the wires differ in how they write an array as a map, which `hook` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgpack

from reflex_runtime.robots.serving.question import MAX_TEXT
from reflex_runtime.web.errors import ClientError

MAX_VALUES: Final = 20_000

Hook = Callable[[dict[str, Any]], Any]


def unpack(data: bytes, hook: Hook) -> Any:
    """The value of a frame; ClientError when it is none. Maps have keys of text, whether they came as text or bytes,
    and pass through `hook`."""
    left, most = MAX_VALUES, min(MAX_VALUES, len(data))

    def count(values: int) -> None:
        nonlocal left
        left -= values
        if left < 0:
            raise _too_many()

    def read_map(pairs: list[tuple[Any, Any]]) -> Any:
        count(2 * len(pairs) + 1)
        return hook({_text(key): value for key, value in pairs})

    def read_list(values: list[Any]) -> list[Any]:
        count(len(values))
        return values

    try:
        return msgpack.unpackb(
            data, object_pairs_hook=read_map, list_hook=read_list, ext_hook=_refuse, strict_map_key=False,
            max_array_len=most, max_map_len=most // 2, max_str_len=MAX_TEXT, max_ext_len=0,
        )  # fmt: skip
    except msgpack.ExtraData as error:
        raise ClientError(f"the frame is not msgpack: {len(error.extra)} bytes are left behind the value") from None
    except msgpack.FormatError:
        _refuse()
    except msgpack.StackError:
        raise ClientError("the frame is nested too deep") from None
    except ValueError as error:  # of what is too long, breaks off, or is not UTF-8
        told = str(error)
        if "exceeds max_ext_len" in told:
            _refuse()
        if "exceeds max_str_len" in told:
            raise ClientError(f"the frame holds a text of over {MAX_TEXT} bytes") from None
        if most == MAX_VALUES and ("exceeds max_array_len" in told or "exceeds max_map_len" in told):
            raise _too_many() from None
        raise ClientError("the frame is not msgpack: it breaks off, or a text in it is not UTF-8") from None


def _too_many() -> ClientError:
    return ClientError(f"the frame holds over {MAX_VALUES} values: send arrays as arrays")


def _refuse(*_: Any) -> Any:
    raise ClientError("the frame holds a msgpack extension, and none is known here") from None


def _text(key: Any) -> str:
    if isinstance(key, bytes):
        return key.decode()
    if not isinstance(key, str):
        raise ClientError("the frame holds a map whose keys are not texts")
    return key
