"""The interface of callers: one robot on one wire, with its own connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from bench.load.wires.expected import MARK, Expected, Observed
from bench.load.wires.target import Target


class WireCaller(Protocol):
    """One connection. All methods but `frame` raise the errors of `reflex_runtime.client`; after one that leaves the
    connection unusable the next `ask` opens another.

    schemes: of the URLs under which the wire is found. config: its name in the `wires` of /config. setting: the option
    of `reflex serve` that says where its listener is; "" for the main port.
    announced: what the server said when it was connected to, as far as the wire says anything.
    """

    schemes: ClassVar[tuple[str, ...]]
    config: ClassVar[str]
    setting: ClassVar[str]
    announced: Mapping[str, Any]

    def __init__(self, target: Target) -> None: ...

    async def connect(self) -> None:
        """Open the connection and read what the server announces."""

    def expected(self) -> Expected | None:
        """The observation that the server announced when the connection opened; None if it announced none."""

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """The bytes of a request. deadline_ms: 0 for none; ignored if the wire has no field for it."""

    async def ask(self, frame: bytes) -> int:
        """Send a request and wait for its answer: how many requests shared its batch, 0 where the wire does not say."""

    async def close(self) -> None: ...


class Frames:
    """Repeats a request with a different picture each time, so that no cache of the server answers it."""

    def __init__(self, frame: bytes) -> None:
        self._head, mark, self._tail = frame.partition(MARK)
        self._marked, self._count = bool(mark), 0

    def next(self) -> bytes:
        """The next request."""
        if not self._marked:  # no picture, or a compressed one
            return self._head
        self._count += 1
        return b"%b%0*d%b" % (self._head, len(MARK), self._count, self._tail)
