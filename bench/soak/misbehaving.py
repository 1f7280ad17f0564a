"""A policy and a processor of frames that misbehave, for `reflex serve` and `reflex feeds`.

Every fifth call misbehaves in the way that the file named by SOAK_FAULT says, and none while it is empty. What ends the
process empties the file first: it happens once, and the server that is started again has a good model.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from reflex_runtime.robots import DeviceOptions, Observation, PolicySpec, WholeModel

FAULT, EVERY = "SOAK_FAULT", 5
STEPS = JOINTS = 4
CALLS = count(1)


def _raises(error: BaseException) -> Any:
    raise error


def _prints(result: Any) -> Any:
    sys.stdout.write("y" * 200_000)
    sys.stdout.flush()
    return result


def _starts_a_thread(result: Any) -> Any:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    return result


# What comes instead of the right answer, [rows, steps, joints].
ANSWERS: dict[str, Callable[[Any], Any]] = {
    "a row too few": lambda right: right[:-1],
    "a row too many": lambda right: np.concatenate([right, right[:1]]),
    "steps too few": lambda right: right[:, :2],
    "steps too many": lambda right: np.repeat(right, 3, axis=1),
    "no steps": lambda right: right[:, :0],
    "joints too few": lambda right: right[:, :, :3],
    "rows without an axis": lambda right: right.reshape(len(right), -1),
    "not a number": lambda right: right * np.nan,
    "infinite": lambda right: right * np.inf,
    "None": lambda right: None,
    "a list": lambda right: right.tolist(),
    "complex numbers": lambda right: right.astype(np.complex64),
    "it prints": _prints,
    "it starts threads": _starts_a_thread,
    "it raises": lambda right: _raises(RuntimeError("boom\nINFO root a forged line\x1b[2J")),
    "it raises 5 MB": lambda right: _raises(RuntimeError("x" * 5_000_000)),
}
# What ends or hangs the process.
ENDS: dict[str, Callable[[], Any]] = {
    "KeyboardInterrupt": lambda: _raises(KeyboardInterrupt()),
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(7),
    "a segmentation fault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "it hangs": lambda: time.sleep(1000),
    "it holds the GIL": lambda: ctypes.PyDLL(None).sleep(8),
}
FRAMES = ("a row too few", "a row too many", "None", "it prints", "it raises", "it raises 5 MB")  # also of frames


def misbehave(right: Any) -> Any:
    """The right result, or what the fault in force makes of it."""
    file = Path(os.environ[FAULT])
    kind = file.read_text()
    if not kind or next(CALLS) % EVERY:
        return right
    if kind in ENDS:
        file.write_text("")
        return ENDS[kind]()
    return ANSWERS[kind](right)


class Policy(WholeModel):
    """Answers twice the state and one, in every step."""

    def chunk(self, rows: Sequence[Observation], noise: Any) -> Any:
        states = np.stack([row.state for row in rows if row.state is not None])
        return misbehave(np.repeat(states[:, None] * 2 + 1, STEPS, axis=1))


def policy(device: DeviceOptions) -> Policy:
    return Policy(
        PolicySpec(
            model_id="misbehaving", staged=False, takes_state=True, state_dim=JOINTS, chunk_size=STEPS,
            action_dim=JOINTS, takes_noise=False,
        )
    )  # fmt: skip


class Frames:
    """Answers how bright a frame is."""

    id = "misbehaving"

    def on_start(self) -> None:
        return

    def process(self, entries: Sequence[Any]) -> Any:
        return list(misbehave(np.array([entry.frame.mean() for entry in entries])))

    def on_stop(self) -> None:
        return
