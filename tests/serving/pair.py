"""Two versions that can be told apart by their answers, servers of both, and episodes that belong to one of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reflex_runtime.robots.versions.router import bucket

from .exports import WEIGHTS, expected, write_tiny
from .harness import PATIENCE, STATE, Answer, Server, changed

WEIGHTS_OF = {"v1": WEIGHTS, "v2": -WEIGHTS, "v3": 2 * WEIGHTS}

# Run first in a server's process: no policy is loaded as long as there is a file of that name.
SLOW_LOAD = """
import os, time
import reflex_runtime.robots.versions.slots as slots
really = slots.load_policy
def load_policy(*given, **more):
    while os.path.exists({gate!r}):
        time.sleep(0.01)
    return really(*given, **more)
slots.load_policy = load_policy
"""


class Pair(NamedTuple):
    """Export directories of versions with the same dimensions."""

    v1: Path
    v2: Path
    v3: Path


def write_pair(root: Path) -> Pair:
    return Pair(*(write_tiny(root / name, weights=weights, model_id=name) for name, weights in WEIGHTS_OF.items()))


def two(pair: Pair, *options: str, split: int | None = 50, **more: Any) -> Server:
    """A server of v1 as a and v2 as b."""
    shares = () if split is None else ("--split", str(split))
    both = ("--policy-a", str(pair.v1), "--policy-b", str(pair.v2), "--no-rtc")
    return Server(pair.v1, *both, *shares, *options, **more)


def episodes(slot: str, n: int, split: int = 50, name: str = "ep") -> list[str]:
    """Ids of episodes that belong to the slot at the split."""
    found: list[str] = []
    i = 0
    while len(found) < n:
        key = f"{name}-{i}"
        if (bucket(key) < split) == (slot == "a"):
            found.append(key)
        i += 1
    return found


def version_of(answer: Answer, seed: int, state: list[float] = STATE) -> str:
    """Which version computed an answer: told by its actions, not by what it says of itself."""
    assert answer.status == 200, answer.body
    actions = np.array(answer.json["actions"])
    fitting = [n for n, w in WEIGHTS_OF.items() if np.allclose(actions, expected(state, seed, w), atol=1e-5)]
    assert len(fitting) == 1, (fitting, actions)
    return fitting[0]


def admin(server: Server, what: str, **fields: Any) -> Answer:
    """POST /admin/WHAT."""
    return server.ask("POST", f"/admin/{what}", json.dumps(fields).encode())


def outcome(server: Server, episode: str, success: bool = True) -> Answer:
    return server.ask("POST", f"/episodes/{episode}/outcome", json.dumps({"success": success}).encode())


def rollout(server: Server) -> Any:
    return server.get("/diagnostics/rollout").json


def until(what: Callable[[], Any], meanwhile: Callable[[], Any] = changed) -> Any:
    """The first true value of `what`, asked again and again; `meanwhile` is done in between."""
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < end, "never came true"
        meanwhile()
    return found


@contextmanager
def in_background(action: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run it in a thread; its result is in the list once the block has been left."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(action()), daemon=True)
    thread.start()
    yield found
    thread.join(PATIENCE)
    assert found, "it has not ended"
