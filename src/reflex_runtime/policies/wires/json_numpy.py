"""json-numpy on POST /act, as robots ask the servers of OpenVLA and OpenVLA-OFT: JSON in which an array is a map.

    {"__numpy__": base64, "dtype": "|u1", "shape": [224, 224, 3]}

Three forms, told apart by what they hold. Each is answered in its own form; errors are those of /act.

    {"image": array, "instruction": text, …}        an array: the first action of the chunk
    {"encoded": "<the JSON of that>"}               a text: the JSON of that array
    {"full_image": array, "state": array, …}        a list of arrays: one for each action of the chunk
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.policies.serving.question import Question
from reflex_runtime.policies.wires.arrays import array_in
from reflex_runtime.policies.wires.limits import RequestLimits, SocketLimits, limits_of, question_of
from reflex_runtime.policies.wires.observations import Reading
from reflex_runtime.web.errors import ClientError, InvalidJson
from reflex_runtime.web.json import MAX_VALUES, encode, printable

ARRAY: Final = "__numpy__"
FULL_IMAGE: Final = "full_image"
_MARKS: Final = (b'"__numpy__"', b'"encoded"')
_OWN: Final = RequestLimits.__struct_fields__


@dataclass(frozen=True, slots=True)
class JsonNumpy:
    """An observation as it was sent. quoted: as JSON within JSON. whole: its client takes all actions of a chunk."""

    observation: dict[str, Any]
    quoted: bool
    whole: bool

    def question(self, reading: Reading) -> Question:
        """What is asked; 422 naming what is missing or wrong."""
        seen = dict(self.observation)
        limits = limits_of({name: seen.pop(name) for name in _OWN if name in seen})
        if FULL_IMAGE in seen:
            seen.setdefault("image", seen.pop(FULL_IMAGE))
        return question_of(reading.read(seen), limits, SocketLimits(), None, limits.episode_id)

    def answer(self, actions: NDArray[Any]) -> bytes:
        """The body of the answer."""
        written = encode([_map(action) for action in actions] if self.whole else _map(actions[0]))
        return encode(written.decode()) if self.quoted else written


def is_json_numpy(body: bytes) -> bool:
    """Whether a body that is none of /act's own may be one of these: worth another look."""
    return any(mark in body for mark in _MARKS)


def decode(body: bytes) -> JsonNumpy | None:
    """The observation in a body; None where it has no array and is not quoted. ClientError where an array is none."""
    value = _parse(body)
    quoted = isinstance(value, dict) and isinstance(value.get("encoded"), str)
    if quoted:
        if len(value) > 1:
            raise ClientError("encoded: must be alone")
        value = _parse(value["encoded"].encode())
    if not isinstance(value, dict):
        return None
    observation = {name: _read(name, sent) for name, sent in value.items()}
    if not quoted and not any(isinstance(sent, np.ndarray) for sent in observation.values()):
        return None
    return JsonNumpy(observation, quoted, FULL_IMAGE in observation)


def _parse(text: bytes) -> Any:
    if text.count(b",") > MAX_VALUES:
        raise ClientError(f"the body holds over {MAX_VALUES} values: send arrays as arrays")
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the body is not JSON: {error}") from None


def _read(name: str, value: Any) -> Any:
    if not isinstance(value, dict) or ARRAY not in value:
        return value
    try:
        data = base64.b64decode(value[ARRAY], validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise ClientError(printable(f"{name}: {ARRAY} is not base64")) from None
    return array_in(data, value.get("dtype"), value.get("shape"))


def _map(action: NDArray[Any]) -> dict[str, Any]:
    data = np.ascontiguousarray(action, "<f8")
    return {ARRAY: base64.b64encode(data.tobytes()).decode(), "dtype": "<f8", "shape": list(data.shape)}
