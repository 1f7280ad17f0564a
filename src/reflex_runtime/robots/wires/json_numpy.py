"""json-numpy on POST /act, as clients of OpenVLA, OpenVLA-OFT and GR00T send it: JSON with arrays as maps.

    {"__numpy__": base64, "dtype": "|u1", "shape": [224, 224, 3]}
    {"__ndarray__": base64, "dtype": "uint8", "shape": [224, 224, 3]}

Four forms, recognised by their keys. Each is answered in its own form; errors are those of /act.

    {"image": array, "instruction": text, …}        an array: the first action of the chunk
    {"encoded": "<the JSON of that>"}               a text: the JSON of that array
    {"full_image": array, "state": array, …}        a list of arrays: one for each action of the chunk
    {"observation": {"video.x": array, …}, …}       {"action.x": array}: the groups of GR00T, as lists where none of
                                                    the observation's arrays came as `__numpy__`
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.robots.serving.handler import Asked
from reflex_runtime.robots.serving.images import decoded_base64
from reflex_runtime.robots.serving.question import GROOT, JSON_NUMPY, Question
from reflex_runtime.robots.wires.common import (
    LIMITS,
    ObservationReader,
    RequestLimits,
    SocketLimits,
    array_in,
    invalid_input,
    limits_among,
    limits_of,
    limits_of_row,
    question_of,
)
from reflex_runtime.robots.wires.groot import GROUPS, GrootObservation, only, options_of
from reflex_runtime.web.errors import ClientError, InvalidJson
from reflex_runtime.web.fields import MAX_VALUES, encode, printable

ARRAYS: Final = ("__numpy__", "__ndarray__")
FULL_IMAGE: Final = "full_image"
KEY: Final = "unnorm_key"  # of the statistics that a client of OpenVLA asks for
OBSERVATION: Final = "observation"
_MARKS: Final = (b'"__numpy__"', b'"encoded"', b'"observation"')
_TYPES: Final = {np.dtype(code).name: np.dtype(code).str for code in "?bBhHiIlLefd"}


@dataclass(slots=True)
class JsonNumpy:
    """A decoded observation. quoted: it came as JSON within JSON. whole: the client takes all actions of a chunk."""

    block: ClassVar = JSON_NUMPY
    observation: dict[str, Any]
    quoted: bool
    whole: bool
    together: bool = False  # it is of several robots, with a leading axis

    @property
    def policy(self) -> str | None:
        """The policy that it names."""
        return limits_of({"policy": self.observation.get("policy")}).policy

    def questions(self, reading: ObservationReader) -> list[Asked]:
        """One for each robot, made when it is called; 422 names what is missing or wrong."""
        rows = reading.split(self.observation)
        self.together = rows is not None
        return [partial(self._question, reading, row) for row in rows or [self.observation]]

    def answer(self, chunks: Sequence[NDArray[Any]]) -> bytes:
        """The body of the answer."""
        actions = np.stack(chunks, 1) if self.together else chunks[0]
        written = encode([_map(action) for action in actions] if self.whole else _map(actions[0]))
        return encode(written.decode()) if self.quoted else written

    @staticmethod
    def _question(reading: ObservationReader, observation: Mapping[str, Any]) -> Question:
        seen = {name: value for name, value in observation.items() if name not in LIMITS}
        _check_key(seen.get(KEY), reading.wire.metadata)
        return _asked(reading, seen, limits_among(observation))


class GrootJson:
    """A decoded observation of GR00T. arrays: the client reads json-numpy."""

    block: ClassVar = GROOT

    def __init__(self, observation: dict[str, Any], limits: RequestLimits, arrays: bool) -> None:
        self.observation, self.policy = GrootObservation(observation), limits.policy
        self._limits, self._arrays = limits, arrays
        self._reading: ObservationReader | None = None

    def questions(self, reading: ObservationReader) -> list[Asked]:
        """One for each row, made when it is called; 422 names what is missing or wrong."""
        self._reading = reading
        rows = self.observation.rows(reading)
        limits = [self._limits] if len(rows) == 1 else [limits_of_row(self._limits, row) for row in range(len(rows))]
        return [partial(_asked, reading, *each) for each in zip(rows, limits, strict=True)]

    def answer(self, chunks: Sequence[NDArray[Any]]) -> bytes:
        """The body of the answer."""
        assert self._reading is not None
        groups = self.observation.actions(self._reading, chunks)
        return encode({name: _map(group) if self._arrays else group.tolist() for name, group in groups.items()})


def _asked(reading: ObservationReader, seen: Mapping[str, Any], limits: RequestLimits) -> Question:
    return question_of(reading.read(seen), limits, SocketLimits(), None, limits.episode_id)


def _check_key(sent: Any, metadata: Mapping[str, Any]) -> None:
    """422 for statistics that are not the export's, where it says which it has."""
    own = metadata.get(KEY)
    if None not in (sent, own) and sent != own:
        raise invalid_input(KEY, f"is {printable(str(sent)[:100])}, the export has the statistics of {own}")


def is_json_numpy(body: bytes) -> bool:
    """Whether a body that is not in the form of /act may be in one of these."""
    return any(mark in body for mark in _MARKS)


def decode(body: bytes) -> JsonNumpy | GrootJson | None:
    """Decode a body; None if it has no array and is not quoted. ClientError for a malformed array."""
    value = _parse(body)
    quoted = isinstance(value, dict) and isinstance(value.get("encoded"), str)
    if quoted:
        if len(value) > 1:
            raise ClientError("encoded: must be alone")
        body = value["encoded"].encode()
        value = _parse(body)
    if not isinstance(value, dict):
        return None
    if isinstance(value.get(OBSERVATION), dict):
        only(value, (OBSERVATION, "options", *LIMITS))
        options = options_of(value, LIMITS)
        return GrootJson(_read_groups(value[OBSERVATION]), limits_among(value | options), _MARKS[0] in body)
    observation = {name: _read(name, sent) for name, sent in value.items()}
    if not quoted and not any(isinstance(sent, np.ndarray) for sent in observation.values()):
        return None
    if whole := FULL_IMAGE in observation:
        observation.setdefault("image", observation.pop(FULL_IMAGE))
    return JsonNumpy(observation, quoted, whole)


def _parse(text: bytes) -> Any:
    if text.count(b",") > MAX_VALUES:
        raise ClientError(f"the body holds over {MAX_VALUES} values: send arrays as arrays")
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the body is not JSON: {error}") from None


def _read(name: str, value: Any) -> Any:
    key = next((key for key in ARRAYS if key in value), "") if isinstance(value, dict) else ""
    if not key:
        return value
    try:
        data = decoded_base64(value[key])
    except (binascii.Error, ValueError, TypeError, AttributeError):
        raise ClientError(printable(f"{name}: {key} is not base64")) from None
    dtype = value.get("dtype")
    return array_in(data, _TYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype, value.get("shape"))


def _read_groups(observation: dict[str, Any], flat: bool = False) -> dict[str, Any]:
    """Decode the arrays of an observation with flat names, or with a map for each modality."""
    return {
        name: _read_groups(sent, True) if name in GROUPS and not flat and isinstance(sent, dict) else _read(name, sent)
        for name, sent in observation.items()
    }


def _map(action: NDArray[Any]) -> dict[str, Any]:
    data = np.ascontiguousarray(action, "<f8")
    return {ARRAYS[0]: base64.b64encode(data.tobytes()).decode(), "dtype": "<f8", "shape": list(data.shape)}
