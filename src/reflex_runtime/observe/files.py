"""Output files: links are refused, an existing file is kept, and a file has one writer.

Functions raise OSError with a readable `strerror`. A device, and a pipe that is read, is written as it is.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from reflex_runtime.core.errors import ConfigError

try:
    import fcntl
except ImportError:  # not on this system: a second writer is not detected
    fcntl = None  # type: ignore[assignment]

KEPT = ".1"  # suffix of a file that a new one replaces

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
    """Raise the errors of `create`. Creates an empty file if there is none. A pipe is not opened: its reader would get
    the end of the file when it is closed."""
    if not Path(path).is_fifo():
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
    """Write all bytes; a disk that fills up takes only a part at first. Raises OSError, also for a full pipe that does
    not wait."""
    left = memoryview(data)
    while left:
        if (written := file.write(left)) is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left = left[written:]


@contextmanager
def refused(setting: str, cannot: str = "be written") -> Iterator[None]:
    """In this block an OSError, or the ValueError of an invalid name, becomes a ConfigError of that setting."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: cannot {cannot}: {getattr(error, 'strerror', None) or error}") from error


def _make_way(path: Path) -> bool:
    """Move an existing regular file to PATH.1. Returns False for a device or a pipe, which is written as it is."""
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
    at_once = os.O_NONBLOCK if path.is_fifo() else 0  # a pipe would wait for a reader, through every signal
    try:
        appends = "ab" if flags & os.O_APPEND else "wb"
        file = FileIO(str(path), appends, opener=lambda name, _: os.open(name, flags | at_once | _NO_LINKS, mode))
        if at_once:
            os.set_blocking(file.fileno(), True)
    except OSError as error:
        if at_once and error.errno == errno.ENXIO:
            raise OSError(error.errno, "nobody reads this pipe; start its reader first", str(path)) from None
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


def utc(seconds: float | None = None, timespec: str = "milliseconds") -> str:
    """Wall clock as ISO 8601 in UTC; now by default."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat(timespec=timespec).replace("+00:00", "Z")


def text(value: str) -> str:
    """Text that UTF-8 can carry."""
    return value.encode("utf-8", "backslashreplace").decode()
