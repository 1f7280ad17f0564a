"""Recordings of robots that look, are answered, and act: pictures and numbers that tell frames apart."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

from observe.test_journal_recording import Run, asked
from reflex_runtime.observe.journal_writer import JournalWriter, Recording

BEGUN = 1_700_000_000.0  # the wall clock at the start, seconds since the epoch
ROBOT = {
    "embodiment": "bench-arm",
    "control_rate_hz": 20.0,
    "state_names": ["shoulder", "elbow"],
    "action_names": ["shoulder", "elbow"],
}


def picture(number: int, height: int = 48, width: int = 64) -> NDArray[np.uint8]:
    """Smooth, so that a codec keeps it, and different for each number."""
    y, x = np.mgrid[0:height, 0:width]
    base = np.stack([x * 2 + number * 7, y * 3 + number * 11, 128 + 0 * x + number * 5], axis=2)
    return (64 + (base % 384 - 192).clip(-60, 120)).astype(np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def chunk_of(number: int, length: int = 4) -> NDArray[np.float32]:
    return (number + np.arange(length * 2, dtype=np.float32).reshape(length, 2) / 16).astype(np.float32)


class Fleet:
    """A recorder that robots tell of their requests, on a clock moved by hand."""

    def __init__(
        self, directory: Path, images: Any = "full", header: dict[str, Any] | None = None, max_bytes: int = 0
    ) -> None:
        told = {"model_hash": "m"} | (ROBOT if header is None else header)
        to = Recording(directory, images=images, max_bytes=max_bytes)
        self.recorder = JournalWriter(to, header=told, clock=lambda: 1000.0, wall=lambda: BEGUN)
        self.run = Run(self.recorder)

    def look(self, number: int, episode: str | None, at: float, **changes: Any) -> None:
        """A request `at` seconds from the start, with the picture, the state and the chunk of this number."""
        fields: dict[str, Any] = {
            "episode_id": episode,
            "robot_id": f"robot of {episode}",
            "state": [number / 8, -number / 4],
            "actions": chunk_of(number),
            "images": {"top": png(picture(number))},
            "instruction": "open the door",
        }
        outcome = changes.pop("outcome", "ok")
        slot = changes.pop("slot", "prod")
        self.run.now = 1000.001 + at
        self.run.batch(asked(number, **fields | changes), slot=slot, outcome=outcome, took=0.05)

    def ended(self, episode: str, success: bool) -> None:
        self.recorder.note("outcome", episode_id=episode, success=success)

    def close(self) -> Path:
        assert self.recorder.close()
        assert self.recorder.path is not None
        return self.recorder.path


def two_robots(directory: Path, **changes: Any) -> Path:
    """Episodes e1 (numbers 0, 2, 4, 6) and e2 (1, 3, 5), one after the other in time, 0.2 s between two of a robot."""
    fleet = Fleet(directory, **changes)
    for number in range(7):
        task = "open the door" if number % 2 == 0 else "close the drawer"
        before = None if number < 2 else 3
        fleet.look(number, f"e{1 + number % 2}", number * 0.1, instruction=task, executed=before)
    fleet.ended("e1", True)
    return fleet.close()
