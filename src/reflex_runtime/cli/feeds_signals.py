"""Signals of a run of `reflex feeds`: each is news for the main thread."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from typing import Any


class Signals:
    """While it is entered, SIGINT, SIGTERM and SIGHUP call `stop(number)` on the main thread.

    wake: called on another thread for each; lets the main thread go on. It alone runs handlers, and one that waits for
    a lock is not interrupted if the kernel gives the signal to another thread.
    """

    def __init__(self, stop: Callable[[int], None], wake: Callable[[], None]) -> None:
        self._stop, self._wake = stop, wake
        self._before: dict[int, Any] = {}
        self._told, self._tell = socket.socketpair()
        self._tell.setblocking(False)
        self._tell_before = -1

    def __enter__(self) -> None:
        hangup = getattr(signal, "SIGHUP", signal.SIGTERM)
        for number in {signal.SIGINT, signal.SIGTERM, hangup}:
            if number != hangup or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, lambda n, _: self._stop(n))
        self._tell_before = signal.set_wakeup_fd(self._tell.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="reflex-feeds-signals", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._tell_before)
        self._tell.close()

    def _listen(self) -> None:
        with self._told:
            while self._told.recv(16):
                self._wake()
