"""The observation that a wire expects: names, shapes, and an example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MARK: Final = b"reflex picture 0"
"""The first bytes of every generated picture. `Frames` changes them, so that no two requests have the same picture."""
PROMPT: Final = "pick up the cup"

Observed = Mapping[str, Any]  # values by their names on the wire: arrays, and a text


@dataclass(frozen=True, slots=True)
class Expected:
    """Names and shapes. images: height, width. state: count of numbers. prompt: name of the instruction, "" for none.
    source: what they are taken from."""

    source: str
    images: Mapping[str, tuple[int, int]]
    state: Mapping[str, int]
    prompt: str = ""
    channels_first: bool = False

    @classmethod
    def of(cls, source: str, told: Any) -> Expected | None:
        """Parse what a server announces; None if it is missing or malformed."""
        try:
            images = {str(name): (int(size[0]), int(size[1])) for name, size in told["images"].items()}
            state: dict[str, int] = {}
            if "state" in told:
                first, *others = told["state"]["names"]
                state = {first: int(told["state"]["dim"]) - len(others), **dict.fromkeys(others, 1)}
                state |= dict(zip(state, told["state"].get("sizes", ()), strict=False))
            return cls(source + _more(told), images, state, str(told.get("prompt", "")))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            return None

    def observation(self) -> dict[str, Any]:
        """An example observation with these names and shapes."""
        found: dict[str, Any] = {name: _picture(*size) for name, size in self.images.items()}
        if self.channels_first:
            found = {name: np.ascontiguousarray(picture.transpose(2, 0, 1)) for name, picture in found.items()}
        found |= {name: np.full(dim, 0.1, np.float32) for name, dim in self.state.items()}
        if self.prompt:
            found[self.prompt] = PROMPT
        return found


GUESSES: Final = {
    "openpi": (
        Expected(
            "a guess: LIBERO",
            {"observation/image": (224, 224), "observation/wrist_image": (224, 224)},
            {"observation/state": 8},
            "prompt",
        ),
        Expected(
            "a guess: DROID",
            {"observation/exterior_image_1_left": (224, 224), "observation/wrist_image_left": (224, 224)},
            {"observation/joint_position": 7, "observation/gripper_position": 1},
            "prompt",
        ),
        Expected(
            "a guess: ALOHA",
            {f"images/cam_{name}": (224, 224) for name in ("high", "low", "left_wrist", "right_wrist")},
            {"state": 14},
            "prompt",
            channels_first=True,
        ),
    ),
    "vla-eval": (Expected("a guess: LIBERO", {"images/agentview": (256, 256)}, {}, "task_description"),),
    "json-numpy": (Expected("a guess: OpenVLA", {"image": (224, 224)}, {}, "instruction"),),
}
"""Observations to try, in order, on a server that does not announce what it expects."""


def _more(told: Mapping[str, Any]) -> str:
    """What else a server says of observations, in words."""
    optional, steps = ", ".join(map(str, told.get("optional_images", ()))), int(told.get("observation_steps", 1))
    more = f"; may be left out: {optional}" if optional else ""
    return more + (f"; sees the last {steps} observations of an episode" if steps > 1 else "")


def _picture(height: int, width: int) -> NDArray[np.uint8]:
    """A picture like a camera's, smooth colours with a little noise, that begins with `MARK`."""
    rows, columns = np.mgrid[0:height, 0:width]
    plain = np.stack(
        [rows * 200 // max(height, 1), columns * 200 // max(width, 1), (rows + columns) // 4 % 200], axis=-1
    )
    noise = np.random.Generator(np.random.PCG64(0)).integers(0, 12, plain.shape)
    picture = np.ascontiguousarray((plain + noise).astype(np.uint8))
    if picture.size >= len(MARK):
        picture.reshape(-1)[: len(MARK)] = np.frombuffer(MARK, np.uint8)
    return picture
