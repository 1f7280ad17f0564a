"""Progress of a command on stderr: on a terminal a line that is overwritten, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time

_EVERY = 0.5  # seconds between two lines on a terminal; elsewhere ten times that


class ProgressLine:
    """Called with (done, total), as often as one likes. what: of which things. At done = total the line goes away.

    total: None where it is not known.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._told = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int | None = None) -> None:
        now = time.monotonic()
        if total is not None and done >= total:
            if self._terminal:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            return
        if now - self._told < (_EVERY if self._terminal else 10 * _EVERY):
            return
        self._told = now
        text = f"{done:,} {self._what}" if total is None else f"{done:,} of {total:,} {self._what}"
        before, after = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        print(f"{before}{text}", end=after, file=sys.stderr, flush=True)
