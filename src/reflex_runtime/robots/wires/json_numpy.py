"""json-numpy on POST /act, for clients of OpenVLA, OpenVLA-OFT, X-VLA, open-pi-zero and GR00T: JSON with arrays as
maps, as the text of such a map, or as nested lists.

    {"__numpy__": base64, "dtype": "|u1", "shape": [224, 224, 3]}
    {"__ndarray__": base64, "dtype": "uint8", "shape": [224, 224, 3]}

The keys of a body tell six forms apart. Each is answered in its own form; errors are those of /act.

    {"image": array, "instruction": text, …}        an array: the first action of the chunk
    {"encoded": "<the JSON of that>"}               a text: the JSON of that array
    {"full_image": array, "state": array, …}        a list of arrays: one for each action of the chunk
    {"image0": "<array>", "proprio": "<array>", …}  {"action": lists}: every action of the chunk, as X-VLA
    {"image": array, "proprio": array,
     "unnorm_key": text, …}                         an array: every action of the chunk, as open-pi-zero
    {"observation": {"video.x": array, …}, …}       {"action.x": array}: the groups of GR00T; lists unless an array
                                                    of the observation is a map with `__numpy__`
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.robots.serving.handler import Asked
from reflex_runtime.robots.serving.question import (
    GROOT,
    JSON_NUMPY,
    PROMPTS,
    ObservationReader,
    Question,
    RequestLimits,
)
from reflex_runtime.robots.wires.common import LIMITS, limits_among, limits_of, question_of
from reflex_runtime.robots.wires.groot import GROUPS, GrootObservation, array_of, only, options_of
from reflex_runtime.web.arrays import array_in, check_json, check_keys
from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.fields import client_errors, encode, invalid_input, printable
from reflex_runtime.web.pictures import decoded_base64

ARRAYS: Final = ("__numpy__", "__ndarray__")
FULL_IMAGE: Final = "full_image"
KEY: Final = "unnorm_key"  # of the statistics that a client of OpenVLA asks for
OBSERVATION: Final = "observation"
VIEWS: Final = ("image0", "image1", "image2")  # of X-VLA
PROPRIO: Final = "proprio"
DOMAIN, STEPS = "domain_id", "steps"  # of X-VLA: the robot's prompt, and denoise steps
FIRST, EVERY, WHOLE, ACTION = "first", "every", "whole", "action"  # forms of answers
_MARKS: Final = (b'"__numpy__"', b'"encoded"', b'"observation"', b'"proprio"', b'"image0"')


@dataclass(slots=True)
class JsonNumpy:
    """A decoded observation. quoted: it was JSON in a text of JSON. form: of the answer. arrays: the answer has arrays
    as json-numpy, because the client sent no nested lists."""

    block: ClassVar = JSON_NUMPY
    observation: dict[str, Any]
    quoted: bool
    form: str
    arrays: bool
    together: bool = False  # whether it has several robots, with a leading axis

    @property
    def policy(self) -> str | None:
        """The name of its policy."""
        return limits_of({"policy": self.observation.get("policy")}).policy

    def questions(self, reading: ObservationReader) -> list[Asked]:
        """A question for each robot; the 422 names a missing or wrong field."""
        if self.form == ACTION:
            self._name_views(reading)
        rows = reading.split(self.observation)
        self.together = rows is not None
        return [partial(self._question, reading, row) for row in (rows or {"": self.observation}).values()]

    def answer(self, chunks: Sequence[NDArray[Any]]) -> bytes:
        """The body of the answer."""
        actions = np.stack(chunks, 1) if self.together else chunks[0]

        def write(array: NDArray[Any]) -> Any:
            return _map(array) if self.arrays else array.tolist()

        if self.form == ACTION:
            written = encode({ACTION: np.stack(chunks).tolist() if self.together else actions.tolist()})
        elif self.form == EVERY:
            written = encode([write(action) for action in actions])
        else:
            written = encode(write(actions if self.form == WHOLE and len(actions) > 1 else actions[0]))
        return encode(written.decode()) if self.quoted else written

    def _name_views(self, reading: ObservationReader) -> None:
        """Name the views of X-VLA: they are the policy's cameras in order, unless the export names them."""
        seen = self.observation
        for i, camera in enumerate(reading.spec.images):
            name, view = reading.wire.images.get(camera, camera), f"image{i}"
            if view in seen and name not in seen and name not in VIEWS:
                seen[name] = seen.pop(view)

    def _question(self, reading: ObservationReader, observation: Mapping[str, Any]) -> Question:
        seen = {name: value for name, value in observation.items() if name not in LIMITS}
        metadata = reading.wire.metadata
        own = {KEY: metadata.get(KEY)}
        if self.form == ACTION:
            own |= {DOMAIN: metadata.get(DOMAIN), STEPS: metadata.get(STEPS, reading.spec.num_denoising_steps)}
        for name, value in own.items():
            sent = seen.get(name)
            if sent is not None and value is not None and (isinstance(sent, np.ndarray) or sent != value):
                raise invalid_input(name, f"is {printable(str(sent)[:100])}, the export has {value}")
        return _asked(reading, seen, limits_among(observation))


class GrootJson:
    """A decoded observation of GR00T. arrays: the answer has arrays as json-numpy, not as lists."""

    block: ClassVar = GROOT

    def __init__(self, observation: dict[str, Any], limits: RequestLimits, arrays: bool) -> None:
        self.observation, self.policy = GrootObservation(observation), limits.policy
        self._limits, self._arrays = limits, arrays
        self._reading: ObservationReader | None = None

    def questions(self, reading: ObservationReader) -> list[Asked]:
        """A question for each row; the 422 names a missing or wrong field."""
        self._reading = reading
        rows = self.observation.rows(reading)
        parts = [""] if len(rows) == 1 else [f"/{row}" for row in range(len(rows))]
        return [partial(_asked, reading, row, self._limits, part) for row, part in zip(rows, parts, strict=True)]

    def answer(self, chunks: Sequence[NDArray[Any]]) -> bytes:
        """The body of the answer."""
        assert self._reading is not None
        groups = self.observation.actions(self._reading, chunks)
        return encode({name: _map(group) if self._arrays else group.tolist() for name, group in groups.items()})


def _asked(reading: ObservationReader, seen: Mapping[str, Any], limits: RequestLimits, part: str = "") -> Question:
    episode = limits.episode_id and limits.episode_id + part
    return question_of(reading.read(seen), limits, None, episode, part=part)


def is_json_numpy(body: bytes) -> bool:
    """Whether a body that is no /act request may be json-numpy, by a quick search."""
    return any(mark in body for mark in _MARKS)


def decode(body: bytes) -> JsonNumpy | GrootJson | None:
    """Decode a body; None if it is no json-numpy: it has no array and is not quoted. ClientError for a wrong array."""
    value = _parse(body)
    quoted = isinstance(value, dict) and isinstance(value.get("encoded"), str)
    if quoted:
        if len(value) > 1:
            raise ClientError("encoded: must be the only key")
        body = value["encoded"].encode()
        value = _parse(body)
    if not isinstance(value, dict):
        return None
    if isinstance(value.get(OBSERVATION), dict):
        only(value, (OBSERVATION, "options", *LIMITS))
        options = options_of(value, LIMITS)
        return GrootJson(_read_groups(value[OBSERVATION]), limits_among(value | options), _MARKS[0] in body)
    form = ACTION if VIEWS[0] in value else EVERY if FULL_IMAGE in value else FIRST
    if form == FIRST and PROPRIO in value and KEY in value:
        form = WHOLE
    if form == ACTION:
        value |= {name: _parse(sent.encode()) for name, sent in value.items() if _is_quoted(name, sent)}
    observation = {name: (_pixels if _is_nested(sent) else _read)(name, sent) for name, sent in value.items()}
    if not quoted and not any(isinstance(sent, np.ndarray) for sent in observation.values()):
        return None
    if form == EVERY:
        observation.setdefault("image", observation.pop(FULL_IMAGE))
    if form == ACTION:  # a picture with one dimension is a PNG or JPEG
        encoded = {name: sent for name, sent in observation.items() if isinstance(sent, np.ndarray) and sent.ndim == 1}
        pictures = {name: sent.tobytes() for name, sent in encoded.items() if sent.dtype == np.uint8}
        observation |= pictures
    return JsonNumpy(observation, quoted, form, not any(map(_is_nested, value.values())))


def _parse(text: bytes) -> Any:
    check_json(text)
    with client_errors():
        return msgspec.json.decode(text)


def _read(name: str, value: Any) -> Any:
    key = next((key for key in ARRAYS if key in value), "") if isinstance(value, dict) else ""
    if not key:
        return value
    try:
        data = decoded_base64(value[key])
    except (ValueError, TypeError, AttributeError):
        raise ClientError(printable(f"{name}: {key} is not base64")) from None
    check_keys(value, key, "dtype", "shape")
    return array_in(data, value.get("dtype"), value.get("shape"))


def _is_quoted(name: str, sent: Any) -> bool:
    return isinstance(sent, str) and sent[:1] in ("{", "[") and name not in (*PROMPTS, *LIMITS)


def _is_nested(sent: Any) -> bool:
    """Whether it is a list of lists of numbers, judged by the first element."""
    depth = 0
    while isinstance(sent, list) and sent:
        sent, depth = sent[0], depth + 1
    return depth > 1 and type(sent) in (int, float)


def _pixels(name: str, value: list[Any]) -> NDArray[Any]:
    """The array in nested lists; uint8 if it has three dimensions or more and only whole numbers from 0 to 255."""
    array = array_of(name, value)
    pixels = array.ndim > 2 and array.dtype.kind in "iu" and bool(((array >= 0) & (array <= 255)).all())
    return array.astype(np.uint8) if pixels else array


def _read_groups(observation: dict[str, Any], flat: bool = False) -> dict[str, Any]:
    """Decode the arrays of an observation with flat names, or with one map for each modality."""
    return {
        name: _read_groups(sent, True) if name in GROUPS and not flat and isinstance(sent, dict) else _read(name, sent)
        for name, sent in observation.items()
    }


def _map(action: NDArray[Any]) -> dict[str, Any]:
    data = np.ascontiguousarray(action, "<f8")
    return {ARRAYS[0]: base64.b64encode(data.tobytes()).decode(), "dtype": "<f8", "shape": list(data.shape)}
