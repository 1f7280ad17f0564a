"""Reads GR00T's observations in all forms: flat or nested names, with or without a batch axis.

    {"video.front": [T, H, W, C], "state.arm": [T, D], "annotation.human.task": [text]}                      N1.5
    {"video": {"front": [B, T, H, W, C]}, "state": {"arm": [B, T, D]}, "language": {"task": [[text]]}}       N1.6, N1.7

The dimensions of an array say which axes it has. Of several steps T the last counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.policies.policy.robot import WireMap
from reflex_runtime.policies.wires.groot_codec import modality_config
from reflex_runtime.policies.wires.observations import PROMPTS, Reading, text_of
from reflex_runtime.web.errors import ClientError, InvalidRequest
from reflex_runtime.web.fields import invalid
from reflex_runtime.web.json import printable

MAX_ROWS: Final = 256
GROUPS: Final = ("video", "state", "language")
VIDEO, STATE, ACTION, LANGUAGE = "video.", "state.", "action.", "language."
LANGUAGE_KEY: Final = "annotation.human.task_description"  # of N1.5 and N1.6, if the export gives none
_AXES: Final = {VIDEO: 3, STATE: 1}  # of one picture, of one state


class GrootObservation:
    """The rows of an observation.

    flat: names have prefixes, and so will those of actions. batched: arrays have a batch axis, and so will actions.
    """

    def __init__(self, observation: Mapping[str, Any]) -> None:
        self.flat = not any(isinstance(observation.get(name), dict) for name in GROUPS)
        self._arrays: dict[str, NDArray[Any]] = {}
        self._languages: dict[str, Any] = {}
        for name, value in observation.items() if self.flat else _joined(observation):
            self._add(name, value)
        sizes = {len(array) for name, array in self._arrays.items() if array.ndim == _axes(name) + 2}
        self.batched = bool(sizes)
        self.size = sizes.pop() if sizes else 1
        if sizes or not 0 < self.size <= MAX_ROWS:
            raise ClientError(f"the batch axes of video and state must be equal, and 1 to {MAX_ROWS}")

    def rows(self, wire: WireMap) -> list[dict[str, Any]]:
        """One observation for each row, as `Reading` takes them."""
        names = {name: name for name in self._arrays}
        states = [name for name in names if name.startswith(STATE)]
        if len(states) == 1 and not wire.state:
            names[states[0]] = "state"
        languages = {name: _texts(name, value, self.size) for name, value in self._languages.items()}
        if len(languages) == 1:
            languages = {wire.prompt or PROMPTS[0]: next(iter(languages.values()))}
        return [
            {names[name]: self._of(row, name, array) for name, array in self._arrays.items()}
            | {name: texts[row] for name, texts in languages.items()}
            for row in range(self.size)
        ]

    def actions(self, reading: Reading, chunks: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The answer: the actions of all rows, split into groups."""
        stacked = np.stack(chunks) if self.batched else chunks[0]
        found, at = {}, 0
        for name, size in groups_of(reading):
            found[ACTION + name if self.flat else name] = stacked[..., at : at + size]
            at += size
        return found

    def _add(self, name: str, value: Any) -> None:
        prefix = next((prefix for prefix in _AXES if name.startswith(prefix)), None)
        if prefix is None:
            if not name.startswith(ACTION) and _is_text(value):
                self._languages[name.removeprefix(LANGUAGE)] = value
            return
        array = _array(name, value)
        if not _AXES[prefix] <= array.ndim <= _AXES[prefix] + 2:
            axes = "[B, T, H, W, C], [T, H, W, C] or [H, W, C]" if prefix == VIDEO else "[B, T, D], [T, D] or [D]"
            raise _wrong(name, f"has shape {list(array.shape)}, must be {axes}")
        self._arrays[name] = array

    def _of(self, row: int, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """The last step of a row."""
        if self.batched:
            if array.ndim != _axes(name) + 2:
                raise _wrong(name, "has no batch axis, and others have one")
            array = array[row]
        if array.ndim == _axes(name):
            return array
        if not len(array):
            raise _wrong(name, "has no step")
        last: NDArray[Any] = array[-1]
        return last


def groups_of(reading: Reading) -> Sequence[tuple[str, int]]:
    """The groups of an action."""
    return reading.wire.actions or (("actions", reading.spec.action_dim),)


def modalities(reading: Reading, flat: bool) -> dict[str, Any]:
    """The answer to get_modality_config. flat: with names as in N1.5."""
    wire, spec = reading.wire, reading.spec
    names = {"video.": [wire.images.get(camera, VIDEO + camera).removeprefix(VIDEO) for camera in spec.images]}
    names["state."] = [name.removeprefix(STATE) for name in wire.state or ("state",)] if spec.takes_state else []
    names["action."] = [name for name, _ in groups_of(reading)]
    found = {
        prefix[:-1]: modality_config(
            [prefix + name if flat else name for name in own], spec.chunk_size if prefix == ACTION else 1, flat
        )
        for prefix, own in names.items()
        if own
    }
    if spec.takes_text:
        found["language"] = modality_config([wire.prompt or LANGUAGE_KEY], 1, flat)
    return found


def _joined(observation: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for modality in GROUPS:
        named = observation.get(modality)
        if named is None:
            continue
        if not isinstance(named, dict):
            raise _wrong(modality, "must be a map")
        for name, value in named.items():
            yield f"{modality}.{name}", value


def _axes(name: str) -> int:
    return _AXES[VIDEO] if name.startswith(VIDEO) else _AXES[STATE]


def _array(name: str, value: Any) -> NDArray[Any]:
    if _is_numbers(value, 5):  # with a text among them numpy would allocate the longest text for each
        try:
            value = np.asarray(value)
        except (ValueError, OverflowError):
            value = None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        raise _wrong(name, "must be an array of numbers")
    return value


def _is_numbers(value: Any, depth: int) -> bool:
    if isinstance(value, list):
        return depth > 0 and all(_is_numbers(part, depth - 1) for part in value)
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, (str, memoryview)) or (isinstance(value, np.ndarray) and value.dtype.kind in "US")


def _texts(name: str, value: Any, rows: int) -> list[Any]:
    """The text of each row: one text for all, a list of texts, or a list of lists."""
    if isinstance(value, np.ndarray):
        if value.size > 16 * MAX_ROWS:
            raise _wrong(name, f"has over {16 * MAX_ROWS} texts")
        value = value.tolist()
    if not isinstance(value, list):
        return [text_of(value)] * rows
    if len(value) not in (1, rows):
        raise _wrong(name, f"has {len(value)} texts, must have one or {rows}")
    texts = [text_of(text[-1] if isinstance(text, list) and text else text) for text in value]
    return texts if len(texts) == rows else texts * rows


def _wrong(name: str, why: str) -> InvalidRequest:
    return invalid(printable(name), printable(f"{name}: {why}"))
