"""Output files: links are refused, an earlier file is kept, and a file has one writer; lines are written by a thread.

Functions raise OSError with a readable `strerror`. A device or a pipe is written as it is. For lines serving only
appends to a bounded queue; the thread gathers what came in a fraction of a second and writes it at once, so that an
idle process sleeps and a busy one is woken a few times a second.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from reflex_runtime.core.errors import ConfigError

try:
    import fcntl
except ImportError:  # not on this system: a second writer is not noticed
    fcntl = None  # type: ignore[assignment]

KEPT = ".1"  # appended to the name of the file that a new one takes the place of

_PRIVATE, _SHARED = 0o600, 0o666
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def create(path: str | os.PathLike[str], private: bool = False) -> FileIO:
    """A new file, unbuffered. An existing file is kept as PATH.1, unless it is empty; an older PATH.1 is replaced.

    private: readable by its owner only, for camera images. Refused: a symbolic link, a file that
    cannot be written, and one that another writer made by `create` or `append` has open.
    """
    path = Path(path)
    fresh = os.O_EXCL if _make_way(path) else 0
    return _open(path, os.O_WRONLY | os.O_CREAT | fresh, _PRIVATE if private else _SHARED)


def append(path: str | os.PathLike[str], private: bool = False) -> FileIO:
    """Open for appending; creates a missing file. Refuses the same files as `create`."""
    return _open(Path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, _PRIVATE if private else _SHARED)


def check(path: str | os.PathLike[str]) -> None:
    """Raises the errors of `create`. Creates an empty file if there was none."""
    append(path).close()


def replace(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a whole file at once and replace an existing one; for pictures, which can be drawn again."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with create(draft) as file:
            write_all(file, data)
        os.replace(draft, path)  # replaces a link itself, not its target
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write all of it: a disk that fills up takes a part first."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


@contextmanager
def refused(setting: str, cannot: str = "be written") -> Iterator[None]:
    """An OSError from within is a ConfigError of that setting."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{setting}: cannot {cannot}: {error.strerror}") from error


def _make_way(path: Path) -> bool:
    """Move the regular file that is there to PATH.1. Returns False for a device or a pipe, which stays."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return True
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
        return False
    append(path).close()  # refuses links, files that may not be written, and those that are being written
    if not found.st_size:
        path.unlink()
        return True
    kept = path.with_name(path.name + KEPT)
    try:
        os.replace(path, kept)
    except OSError as error:
        why = f"what is there cannot be kept as {kept.name}: {error.strerror}"
        raise OSError(error.errno, why, str(path)) from None
    return True


def _open(path: Path, flags: int, mode: int) -> FileIO:
    try:
        appends = "ab" if flags & os.O_APPEND else "wb"
        file = FileIO(str(path), appends, opener=lambda name, _: os.open(name, flags | _NO_LINKS, mode))
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(error.errno, "is a symbolic link; name the file itself", str(path)) from None
        if error.errno == errno.ENOENT and not path.parent.exists():
            raise OSError(error.errno, f"there is no directory {path.parent}; make it first", str(path)) from None
        raise
    try:
        _lock(file, path)
    except OSError:
        file.close()
        raise
    return file


def _lock(file: FileIO, path: Path) -> None:
    """Lock the file until it is closed: a second writer is refused."""
    if fcntl is None or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, "is being written by another program or part of this one", str(path)) from None
    except OSError:  # a file system without locks
        return


log = logging.getLogger("reflex.observe")

T = TypeVar("T")

GATHER = 0.2  # seconds the thread waits for more lines after the first
FLUSH = 0.5  # seconds of work between flushes; what a killed process loses is this old at most
PLENTY = 256  # lines that end the wait
_LEVEL = 1  # of compression: half the size of level 6 is not worth three times its time
_CHUNK = 1 << 18  # bytes handed to the file at a time
_TURN = 0.0005  # seconds of work after which the thread releases the interpreter: what it adds to other threads' p99
_BREATH = 0.0001  # seconds that it pauses then


class LineTarget(Protocol):
    """Where a `LineWriter` writes: a `LineFile`, or what stands for one. Called on the writer's thread."""

    path: Path
    size: int

    def write(self, lines: bytes) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


class LineFile:
    """A new file to which lines are appended, compressed or not; flushed lines can be read before it is closed.

    path, private: see `files.create`. size: bytes written. Raises OSError where the disk does.
    """

    def __init__(self, path: Path, compress: bool, private: bool = False) -> None:
        self.path = path
        self.size = 0
        self._file = create(path, private)
        self._deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31) if compress else None  # 31: with a gzip header

    def write(self, lines: bytes) -> None:
        self._write(lines if self._deflate is None else self._deflate.compress(lines))

    def flush(self) -> None:
        """Make the written lines readable, also in compressed files (it costs a few bytes)."""
        if self._deflate is not None:
            self._write(self._deflate.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        if self._deflate is not None:
            self._write(self._deflate.flush(zlib.Z_FINISH))
        self._file.close()

    def _write(self, data: bytes) -> None:
        write_all(self._file, data)
        self.size += len(data)

    def abandon(self) -> None:
        """Close it after an error; ignore a further one."""
        with suppress(OSError, ValueError):
            self._file.close()


class LineWriter(Generic[T]):
    """A bounded queue, and the thread that writes it into one `LineTarget` after another.

    start: a file and its first lines; called with the first item of each file, or at once when `eager`. encode: an item
    as lines. finish: the last lines. They run on the thread; an item that cannot be encoded is logged and dropped.
    capacity: most items waiting; beyond it they are dropped and counted. limit: bytes after which a file is finished
    and the next item begins another; 0 is none. turns: `turn_all` turns it too.

    A disk error ends the writing and is kept in `error`; callers do not see it. cpu: processor seconds the thread has
    used, as of its last write.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], tuple[LineTarget, bytes]],
        encode: Callable[[T], bytes],
        finish: Callable[[], bytes],
        capacity: int,
        eager: bool = False,
        limit: int = 0,
        turns: bool = True,
    ) -> None:
        self.error: OSError | None = None
        self.cpu = 0.0
        self._full = self._odd = 0  # dropped by callers, without room or file; here, with the file or as unwritable
        self._start, self._encode, self._finish = start, encode, finish
        self._capacity, self._eager, self._limit = capacity, eager, limit
        self._chunk = min(limit or _CHUNK, _CHUNK)
        self._file: LineTarget | None = None
        self._queue: deque[T] = deque()
        self._told = False  # the thread was woken
        self._some, self._hurry = threading.Event(), threading.Event()
        self.closed = False
        self._turned = False  # finish the file and begin another
        if turns:
            _writers.add(self)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Items that are not in the file: there was no room, they could not be encoded, or the disk failed.

        What stood in the file's buffer when it did is not among them.
        """
        return self._full + self._odd

    def put(self, item: T) -> bool:
        """Queue an item; False when it is not written: the queue is full, or the writing has ended. Never waits."""
        if not self.takes():
            return False
        self._queue.append(item)
        if not self._told:
            self._told = True
            self._some.set()
        elif len(self._queue) == PLENTY:
            self._hurry.set()
        return True

    def takes(self) -> bool:
        """Whether `put` would take an item now; one without room, or without a file any more, is counted here."""
        if self.closed:
            return False
        if self.error is not None or len(self._queue) >= self._capacity:
            self._full += 1
            return False
        return True

    def turn(self) -> None:
        """Write the queued lines, finish the file, and continue in another."""
        self._turned = True
        self._hurry.set()
        self._some.set()

    def close(self, timeout: float) -> bool:
        """Write the queued lines and the end. Returns whether all of it reached the file within `timeout` seconds."""
        self.closed = True
        self._hurry.set()
        self._some.set()
        self._thread.join(timeout)
        return not self._thread.is_alive() and self.error is None

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            closing = False
            if self._eager:
                self._begin()
            while not closing:
                self._some.wait()
                self._hurry.wait(GATHER)
                closing = self.closed
                self._hurry.clear()
                self._some.clear()
                self._told = False
                if self._queue:
                    if self._file is None:
                        self._begin()
                    self._empty()
                    if self._file is not None:
                        self._file.flush()
                if self._turned:
                    self._turned = False
                    self._end()
                    if self._eager and not closing:
                        self._begin()
                self.cpu = time.thread_time()
            self._end()
        except Exception as error:
            name = threading.current_thread().name
            if isinstance(error, OSError):
                where = self._file.path if self._file is not None else error.filename
                log.error("%s: %s: %s; nothing more is written", name, where, error.strerror or error)
            else:
                log.exception("%s ended", name)
            self.error = error if isinstance(error, OSError) else OSError(0, f"{type(error).__name__}: {error}")
            self._odd += len(self._queue)
            self._queue.clear()
            if self._file is not None:
                self._file.abandon()

    def _begin(self) -> LineTarget:
        self._file, head = self._start()
        self._file.write(head)
        self._file.flush()
        return self._file

    def _end(self) -> None:
        if self._file is not None:
            self._file.write(self._finish())
            self._file.close()
            self._file = None

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            file = self._file or self._begin()
            file.write(b"".join(lines))
            if 0 < self._limit <= file.size:
                self._end()

    def _empty(self) -> None:
        """Write what is queued in short slices, so that other threads get the interpreter. A queue that never
        becomes empty is flushed, too."""
        queue, lines, size = self._queue, list[bytes](), 0
        breath = time.monotonic() + _TURN
        flush = breath + FLUSH
        while queue:
            try:
                line = self._encode(queue.popleft())
            except Exception:  # one bad item must not end a file
                self._odd += 1
                log.exception("a line could not be written")
                continue
            lines.append(line)
            size += len(line)
            now = time.monotonic()
            if size >= self._chunk or now > flush:
                self._write(lines)
                lines, size = [], 0
            if now > flush:
                if self._file is not None:
                    self._file.flush()
                flush = now + FLUSH
            if now > breath and not self.closed:
                time.sleep(_BREATH)
                breath = time.monotonic() + _TURN
        self._write(lines)


_writers: WeakSet[LineWriter[Any]] = WeakSet()


def turn_all() -> None:
    """Every writer of this process continues in a new file, as a server does at SIGHUP."""
    for writer in list(_writers):
        writer.turn()


def utc(seconds: float | None = None, timespec: str = "milliseconds") -> str:
    """Wall clock as ISO 8601 in UTC; now by default."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat(timespec=timespec).replace("+00:00", "Z")


def text(value: str) -> str:
    """Text that UTF-8 can carry."""
    return value.encode("utf-8", "backslashreplace").decode()
