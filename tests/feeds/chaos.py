"""A camera that misbehaves on purpose, the same way every time for one seed: `chaos:` as a source of the command."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.feeds.runtime.pipeline import Picture, SourceError
from reflex_runtime.feeds.sources import DRAWN
from reflex_runtime.feeds.sources.shapes import made_of, size_of

Clock = Callable[[], float]
Wait = Callable[[threading.Event, float], bool]  # sleeps that long or until the event is set; returns whether it is


class ChaosSource:
    """Pictures at a rate, with faults drawn from a seed. Each picture shows its number (`number_of`).

    seed: decides every fault and every picture; two sources of one seed and the same options are alike.
    length: pictures until the end, counted over losses: reopened, it goes on where it was. None: it has no end.
    short: probability that it ends before that, at a place drawn evenly. `total` says `length` all the same.
    size: width and height in pixels. fps: pictures per second; 0 gives them as fast as they are read.
    live: as `Source.live`. read_timeout: seconds after which a freeze counts as lost.

    Probabilities in [0, 1], of each picture:
    freeze: nothing comes for a time in `freeze_s` (seconds), with the connection open.
    bad_pts: its pts runs backwards, repeats, is enormous, or is missing.
    resize: from it on the pictures have another size, each side between half and twice of `size`.
    flood: it and the next `flood_length` come at once, on top of the rate.
    lose: it is not given; the source is lost, and has to be opened again.
    refuse: probability that an `open` fails.

    clock, wait: for tests in virtual time. `interrupt` ends a wait at once.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        length: int | None = None,
        short: float = 0.0,
        size: tuple[int, int] = (64, 48),
        fps: float = 25.0,
        live: bool = True,
        freeze: float = 0.0,
        freeze_s: tuple[float, float] = (0.1, 1.0),
        bad_pts: float = 0.0,
        resize: float = 0.0,
        flood: float = 0.0,
        flood_length: int = 20,
        lose: float = 0.0,
        refuse: float = 0.0,
        read_timeout: float = 5.0,
        clock: Clock = time.monotonic,
        wait: Wait = threading.Event.wait,
    ) -> None:
        self.name = f"chaos:seed={seed}"
        self.live = live
        self.total = length
        self._random = random.Random(seed)
        self._end = length
        if length is not None and self._random.random() < short:
            self._end = self._random.randrange(length)
        self._freeze, self._freeze_s, self._read_timeout = freeze, freeze_s, read_timeout
        self._bad_pts, self._resize, self._lose, self._refuse = bad_pts, resize, lose, refuse
        self._flood, self._flood_length = flood, flood_length
        self._step = 1.0 / fps if fps else 0.0
        self._base = self._size = size
        self._clock, self._wait = clock, wait
        self._stop = threading.Event()
        self._open = False
        self._count = 0  # pictures given or lost
        self._at_once = 0  # pictures of a flood still to come
        self._due = 0.0

    @classmethod
    def of(cls, text: str) -> ChaosSource:
        """From a text: chaos:seed=7,length=200,freeze=0.01,freeze_s=0.5-2,size=64x48,live=0."""
        return made_of(text, cls, _KNOWN)

    def open(self) -> None:
        self._check_interrupted()
        if self._random.random() < self._refuse:
            raise SourceError(f"{self.name}: connection refused")
        self._open = True
        self._due = self._clock()

    def read(self) -> Picture | None:
        """The next picture with whatever happens to it."""
        self._check_interrupted()
        if not self._open:
            raise SourceError(f"{self.name}: not open", retryable=False)
        if self._end is not None and self._count >= self._end:
            return None
        # One draw for each fault, whether it is wanted or not: then one option does not change what another does.
        lost, frozen, flooded, resized, bad = (self._random.random() for _ in range(5))
        details = random.Random(self._random.getrandbits(64))
        if frozen < self._freeze:
            self._be_frozen(details.uniform(*self._freeze_s))
        self._pace(flooded < self._flood)
        number, self._count = self._count, self._count + 1
        if lost < self._lose:
            self._open = False
            raise SourceError(f"{self.name}: connection reset at picture {number}")
        if resized < self._resize:
            width, height = self._base
            self._size = (details.randint(width // 2, width * 2), details.randint(height // 2, height * 2))
        pts = number * (self._step or 0.04)
        return _numbered(number, self._size), self._bad(pts, details) if bad < self._bad_pts else pts

    def close(self) -> None:
        self._open = False

    def interrupt(self) -> None:
        """End a wait, now and from now on."""
        self._stop.set()

    def _pace(self, flooded: bool) -> None:
        """Wait until the next picture is due; those of a flood are due at once and leave the others' time alone."""
        if flooded:
            self._at_once = self._flood_length + 1
        if self._at_once:
            self._at_once -= 1
            return
        self._sleep(self._due - self._clock())
        self._due += self._step

    def _be_frozen(self, seconds: float) -> None:
        self._sleep(min(seconds, self._read_timeout))
        if seconds > self._read_timeout:
            self._open = False
            raise SourceError(f"{self.name}: no frame for {self._read_timeout:g} s")
        self._due = self._clock()  # missed pictures are not caught up

    def _sleep(self, seconds: float) -> None:
        if seconds > 0.0:
            self._wait(self._stop, seconds)
        self._check_interrupted()

    def _check_interrupted(self) -> None:
        if self._stop.is_set():
            raise SourceError(f"{self.name}: interrupted", retryable=False)

    @staticmethod
    def _bad(pts: float, details: random.Random) -> float | None:
        backwards = pts - details.uniform(0.0, 10.0)
        return details.choice((backwards, max(0.0, pts - 0.04), 1e12 + pts, None))


def number_of(image: NDArray[np.uint8]) -> int:
    """The number that a picture of a ChaosSource shows."""
    return int.from_bytes(image[0, :2].tobytes()[:4], "little")


def _numbered(number: int, size: tuple[int, int]) -> NDArray[np.uint8]:
    """A grey picture, uint8 [h, w, 3], whose first four bytes are its number."""
    image = np.full((size[1], size[0], 3), number * 7 % 256, np.uint8)
    image.reshape(-1)[:4] = np.frombuffer(number.to_bytes(4, "little"), np.uint8)
    return image


def _between(text: str, where: str) -> tuple[float, float]:
    first, _, second = text.partition("-")
    return float(first), float(second or first)


_KNOWN = dict.fromkeys(("short", "fps", "freeze", "bad_pts", "resize", "flood", "lose", "refuse"), float)
_KNOWN |= {"read_timeout": float, "seed": int, "length": int, "flood_length": int, "live": bool}
_KNOWN |= {"size": size_of, "freeze_s": _between}
DRAWN["chaos"] = ChaosSource.of
