"""A camera that misbehaves on purpose, the same way every time for one seed: for tests and drills."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.source import Picture, SourceError
from reflex_runtime.options import one_of

Clock = Callable[[], float]
Wait = Callable[[threading.Event, float], bool]  # sleeps that long or until the event is set; returns whether it is

MAX_SIDE = 4096
MAX_SECONDS = 3600.0


class ChaosSource:
    """Pictures at a rate, with faults drawn from a seed. Each picture shows its number (`number_of`).

    seed: decides every fault and every picture; two sources of one seed and the same options are alike.
    length: pictures until the end, counted over losses: reopened, it goes on where it was. None: it has no end.
    short: probability that it ends before that, at a place drawn evenly. `total` says `length` all the same.
    size: width and height in pixels, in [8, 4096]. fps: pictures per second; 0 gives them as fast as they are read.
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
        chances = {"short": short, "freeze": freeze, "bad_pts": bad_pts, "resize": resize, "flood": flood}
        for field, value in (chances | {"lose": lose, "refuse": refuse}).items():
            _check(field, value, 0.0 <= value <= 1.0, "in [0, 1]")
        _check("length", length, length is None or length >= 1, ">= 1 pictures, or None")
        _check("short", short, not short or length is not None, "0 without a length")
        _check("size", size, len(size) == 2 and all(8 <= side <= MAX_SIDE for side in size), f"in [8, {MAX_SIDE}]")
        _check("fps", fps, 0.0 <= fps <= 10_000.0, "in [0, 10000] pictures per second")
        ordered = len(freeze_s) == 2 and 0.0 <= freeze_s[0] <= freeze_s[1] <= MAX_SECONDS
        _check("freeze_s", freeze_s, ordered, f"two times in [0, {MAX_SECONDS:g}] seconds, the shorter first")
        _check("flood_length", flood_length, 1 <= flood_length <= 100_000, "in [1, 100000] pictures")
        _check("read_timeout", read_timeout, 0.0 < read_timeout <= 600.0, "in (0, 600] seconds")
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
        """From a text: chaos:seed=7,length=200,freeze=0.01,freeze_s=0.5-2,size=64x48,live=0. Raises ConfigError."""
        options: dict[str, Any] = {}
        for part in filter(None, text.removeprefix("chaos:").split(",")):
            field, _, value = part.partition("=")
            if field not in _FORMS:
                raise ConfigError(f"chaos:{part}: {one_of(part, _FORMS)}")
            parse, form = _FORMS[field]
            try:
                options[field] = parse(value)
            except ValueError:
                raise ConfigError(f"chaos:{part}: must be {form}") from None
        return cls(**options)

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


def _check(field: str, value: object, right: bool, must: str) -> None:
    if not right:
        raise ConfigError(f"ChaosSource.{field}={value!r}: must be {must}")


def _pair(separator: str, number: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        first, found, second = text.partition(separator)
        return number(first), number(second if found else first)

    return parse


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


_NUMBER, _WHOLE = (float, "a number"), (int, "a whole number")
_FORMS: dict[str, tuple[Callable[[str], Any], str]] = {
    "seed": _WHOLE,
    "length": _WHOLE,
    "short": _NUMBER,
    "size": (_pair("x", int), "WIDTHxHEIGHT"),
    "fps": _NUMBER,
    "live": (_flag, "0 or 1"),
    "freeze": _NUMBER,
    "freeze_s": (_pair("-", float), "SECONDS or SHORTEST-LONGEST"),
    "bad_pts": _NUMBER,
    "resize": _NUMBER,
    "flood": _NUMBER,
    "flood_length": _WHOLE,
    "lose": _NUMBER,
    "refuse": _NUMBER,
    "read_timeout": _NUMBER,
}
