"""Maps observations of other protocols to cameras, state and instruction, by the export's block `wires`, otherwise by
name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.policies.policy.robot import WireMap
from reflex_runtime.policies.policy.spec import PolicySpec
from reflex_runtime.policies.serving.question import Image
from reflex_runtime.policies.serving.served import ServedPolicy
from reflex_runtime.policies.serving.wire_names import GROOT
from reflex_runtime.policies.wires.bounded_msgpack import MAX_TEXT
from reflex_runtime.web.errors import InvalidRequest
from reflex_runtime.web.fields import invalid
from reflex_runtime.web.json import printable

PREFIXES: Final = ("observation/", "observation.images.", "observation.", "images/", "vision/", "video.")
"""Prefixes that other protocols put before a name."""
PROMPTS: Final = ("prompt", "instruction", "task", "task_description")
STATES: Final = ("state", "states")
MAX_STATE: Final = 16_384  # numbers
MAX_NAME: Final = 256  # characters of a name with the names of its enclosing maps

Observed = tuple[tuple[tuple[str, str, Image], ...], NDArray[np.float64] | None, str | None]


class Reading:
    """Reads the observations of one wire for one export.

    others: of exports that may answer instead. Pictures that only they use are read where they came. video: what the
    wire puts in front of a camera's name.
    """

    def __init__(self, spec: PolicySpec, wire: WireMap | None, others: Sequence[Reading] = (), video: str = "") -> None:
        self.spec, self.wire, self._others, self._video = spec, wire or WireMap(), others, video

    def read(self, observation: Mapping[str, Any]) -> Observed:
        """(images, state, instruction) of a `Question`; 422 naming what is missing or wrong."""
        came = dict(_flat(observation))
        plain = {_stripped(name): name for name in reversed(came)}
        images = {
            camera: self._image(camera, came, plain)
            for camera in self.spec.images
            if self._is_there(camera, came, plain)
        }
        for other in self._others:
            for camera in [camera for camera in other.spec.images if camera not in images]:
                with suppress(InvalidRequest):  # the version that needs it reports the error
                    images[camera] = other._image(camera, came, plain)
        return tuple(images.values()), self._state(came, plain), self._prompt(came, plain)

    def describe(self) -> dict[str, Any]:
        """The expected observation, JSON-safe."""
        spec, wire = self.spec, self.wire
        images = {wire.images.get(name, self._video + name): list(size) for name, size in spec.images.items()}
        found: dict[str, Any] = {"images": images}
        if spec.optional_images:
            found["optional_images"] = [
                wire.images.get(name, self._video + name) for name in spec.images if name in spec.optional_images
            ]
        if spec.observation_steps > 1:
            found["observation_steps"] = spec.observation_steps
        if spec.takes_state:
            found["state"] = {"names": list(wire.state or ("state",)), "dim": spec.state_dim}
            if wire.state_sizes:
                found["state"]["sizes"] = list(wire.state_sizes)
        if spec.takes_text:
            found["prompt"] = wire.prompt or PROMPTS[0]
        return found

    def _is_there(self, camera: str, came: Mapping[str, Any], plain: Mapping[str, str]) -> bool:
        """Whether it was sent; of cameras that must be sent, `_image` says so."""
        return camera not in self.spec.optional_images or (self.wire.images.get(camera) or plain.get(camera)) in came

    def _image(self, camera: str, came: Mapping[str, Any], plain: Mapping[str, str]) -> tuple[str, str, Image]:
        name = self.wire.images.get(camera) or plain.get(camera)
        if name is None and len(self.spec.images) == 1:
            only = [name for name in came if name.startswith(("images/", "vision/", "video."))]
            name = plain.get("image") or (only[0] if len(only) == 1 else None)
        if name is None or name not in came:
            raise self._missing(name or self._video + camera, came)
        image = came[name]
        if isinstance(image, memoryview):
            return camera, name, bytes(image)  # PNG or JPEG
        if not isinstance(image, np.ndarray):
            raise invalid(printable(name), printable(f"{name}: must be an array, or a PNG or JPEG"))
        if image.ndim == 3 and image.shape[0] == 3 and image.shape[2] != 3:
            image = image.transpose(1, 2, 0)
        return camera, printable(name), image

    def _state(self, came: Mapping[str, Any], plain: Mapping[str, str]) -> NDArray[np.float64] | None:
        if not self.spec.takes_state:
            return None
        names = self.wire.state or (next((plain[name] for name in STATES if name in plain), STATES[0]),)
        parts = []
        for name in names:
            if name not in came:
                raise self._missing(name, came)
            parts.append(_numbers(name, came[name]))
        for name, part, size in zip(names, parts, self.wire.state_sizes, strict=False):
            if len(part) != size:
                raise invalid(name, f"{name}: must be {size} numbers, came {len(part)}")
        state = np.concatenate(parts)
        if len(state) != self.spec.state_dim:
            given = ", ".join(f"{name} {len(part)}" for name, part in zip(names, parts, strict=True))
            raise invalid("state", printable(f"state: must be {self.spec.state_dim} numbers, came: {given}"))
        return state

    def _prompt(self, came: Mapping[str, Any], plain: Mapping[str, str]) -> str | None:
        names = [self.wire.prompt] if self.wire.prompt else [plain.get(name, name) for name in PROMPTS]
        name = next((name for name in names if name in came), None)
        if name is None:
            if self.spec.takes_text:
                raise self._missing(names[0], came)
            return None
        return _text(name, came[name])

    def _missing(self, name: str, came: Mapping[str, Any]) -> InvalidRequest:
        expected = self.describe()
        names = [*expected["images"], *expected.get("state", {}).get("names", ())]
        names += [expected["prompt"]] if "prompt" in expected else []
        there = ", ".join(list(came)[:50]) or "nothing"
        return invalid(printable(name), printable(f"{name}: missing; came: {there}; expected: {', '.join(names)}"))


class Readings:
    """The `Reading` of one wire for what the slots of a policy have now."""

    def __init__(self, served: ServedPolicy, wire: str) -> None:
        self._served, self._wire = served, wire
        self._specs: list[PolicySpec] = []

    @property
    def map(self) -> WireMap:
        """The export's block for the wire."""
        return self._served.spec.wires.get(self._wire) or WireMap()

    @property
    def now(self) -> Reading:
        """The current reading; it changes when a policy is exchanged."""
        specs = self._served.all_specs
        if specs != self._specs:
            first, *others = (Reading(spec, spec.wires.get(self._wire)) for spec in specs)
            video = "video." if self._wire == GROOT else ""
            self._specs, self._reading = specs, Reading(first.spec, first.wire, others, video)
        return self._reading


def text_of(value: Any) -> Any:
    """The text in bytes, an array or a list of one; any other value unchanged."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, memoryview) and len(value) <= MAX_TEXT:
        value = bytes(value)
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "US":
        value = value.item()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested maps to names joined by slashes."""
    for name, value in values.items():
        if len(before) + len(name) > MAX_NAME:
            raise invalid("observation", f"observation: a name in it has more than {MAX_NAME} characters")
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}/")
        else:
            yield before + name, value


def _stripped(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _text(name: str, value: Any) -> str:
    value = text_of(value)
    if not isinstance(value, str):
        raise invalid(printable(name), printable(f"{name}: must be a text"))
    return value


def _numbers(name: str, value: Any) -> NDArray[np.float64]:
    """A part of the state as a vector, from an array, a list, or one number."""
    if isinstance(value, list) and (len(value) > MAX_STATE or not all(type(v) in (int, float) for v in value)):
        value = None
    if isinstance(value, (list, int, float)) and not isinstance(value, bool):
        return np.array(value, np.float64, ndmin=1)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and value.size <= MAX_STATE:
        return value.astype(np.float64).reshape(-1)
    raise invalid(printable(name), printable(f"{name}: must be numbers"))
