"""Signals of a run of `reflex feeds`: each is news for a thread of its own."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Collection
from typing import Any


class Signals:
    """While it is entered, `came(number)` is called on a thread of its own for each of these signals.

    The interpreter writes the numbers into a socket as they come, whichever thread the kernel gives them to.
    """

    def __init__(self, numbers: Collection[int], came: Callable[[int], None]) -> None:
        self._numbers, self._came = numbers, came
        self._before: dict[int, Any] = {}
        self._told, self._tell = socket.socketpair()
        self._tell.setblocking(False)
        self._tell_before = -1

    def __enter__(self) -> None:
        for number in self._numbers:
            self._before[number] = signal.signal(number, lambda *_: None)
        self._tell_before = signal.set_wakeup_fd(self._tell.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="reflex-feeds-signals", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._tell_before)
        self._tell.close()

    def _listen(self) -> None:
        with self._told:
            while numbers := self._told.recv(16):
                for number in filter(self._numbers.__contains__, numbers):
                    self._came(number)
