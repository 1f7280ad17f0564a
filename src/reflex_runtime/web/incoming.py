"""What comes on a websocket before it is a frame. `websockets` parses without I/O from what it finds in a buffer;
here a large payload is read from the socket into its place instead: 300 kB are copied twice, not five times."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from websockets.server import ServerProtocol
from websockets.streams import StreamReader

LARGE_PAYLOAD: Final = 64 * 1024  # bytes, from which on it has its own place
PIECE: Final = 512 * 1024  # bytes allocated at once: announcing a length does not reserve memory


class Incoming(StreamReader):
    """room: where the next bytes belong, while a large payload is read. placed: bytes of that payload so far."""

    def __init__(self) -> None:
        super().__init__()
        self.room: memoryview | None = None
        self.placed = 0

    @property
    def held(self) -> int:
        """Bytes that have come and are no frame yet."""
        return len(self.buffer) + self.placed

    def read_exact(self, n: int) -> Generator[None, None, bytearray]:
        if n <= max(LARGE_PAYLOAD, len(self.buffer)):
            return (yield from super().read_exact(n))
        begun = self.buffer
        self.buffer, self.placed = bytearray(), len(begun)
        whole = bytearray()
        try:
            for at in range(0, n, PIECE):
                part = bytearray(min(PIECE, n - at))
                part[: len(begun)] = begun
                self.room = memoryview(part)[len(begun) :]
                begun = bytearray()
                while len(self.room):
                    if self.eof:
                        raise EOFError(f"stream ends after {self.placed} bytes, expected {n} bytes")
                    yield
                if len(part) == n:
                    return part
                whole += part  # each in the turn of the loop that read it, not all of them at the end
        finally:
            self.room, self.placed = None, 0
        return whole

    def place(self, count: int) -> bool:
        """So many bytes have been written to `room`. Whether it is full."""
        assert self.room is not None
        self.room = self.room[count:]
        self.placed += count
        return not len(self.room)


class SocketProtocol(ServerProtocol):
    """The server's side of a websocket, which reads from `Incoming`."""

    reader: Incoming

    def parse(self) -> Generator[None, None, None]:
        self.reader = Incoming()
        yield from super().parse()
