"""Results as Parquet: a directory of parts, each whole by itself, so that a killed process leaves all but the last."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from reflex_runtime.feeds.outputs.json_lines import ResultRecord, SinkError, json_safe, record_of
from reflex_runtime.feeds.runtime.pipeline import Result, library
from reflex_runtime.observe import files
from reflex_runtime.run.device import Clock

try:
    import fcntl
except ImportError:  # not on this system: a second writer is not noticed
    fcntl = None  # type: ignore[assignment]

ROWS: Final = 10_000  # in a part, which is one row group
BYTES: Final = 16_000_000  # of results in memory, after which a part is written
EVERY_S: Final = 60.0  # after which a part is written, once a further result comes
SLICE: Final = 256  # rows that are converted at a time: the interpreter is held meanwhile
_PART: Final = re.compile(r"\.?part-\d{6,}\.parquet")
_LARGEST: Final = 2**53  # whole numbers beyond are no double


class ParquetResults:
    """A row per result, in PATH/part-000000.parquet and so on. Any number of feeds may share it.

    Columns: feed, sequence, pts, latency_ms; boxes, scores, labels, tracker_ids, text and model where the value is a
    mapping in which they have their usual form, else null; value: JSON of the rest of the value, null if there is
    none. See `read_parquet`. Parts are written on a thread of its own; while one is written the next one is collected,
    and a feed that would begin a third one waits.

    path: a directory, which is made; parts of an earlier run are kept in PATH.1. After `close` a further result begins
    a further part. lost: results that could not be written. Raises ConfigError if pyarrow is missing.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Clock = time.monotonic) -> None:
        _library()
        self._path = Path(path)
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0
        self._began = 0.0  # when the first of these rows came
        self._parts = 0
        self._folder: int | None = None  # locked while it is written
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] = Future()  # the part in progress
        self._writing.set_result(None)
        self._failed = False
        self.lost = 0

    def __call__(self, result: Result) -> None:
        """Add a row. Raises SinkError the first time that it cannot be written."""
        row = _row(record_of(result))
        with self._lock:
            if self._failed:
                self.lost += 1
                return
            now = self._clock()
            if not self._rows:
                self._began = now
            self._rows.append(row)
            self._bytes += _size(row)
            if len(self._rows) >= ROWS or self._bytes >= BYTES or now - self._began >= EVERY_S:
                self._guarded(self._hand_over)

    def begin(self) -> None:
        """Make the directory now, unless a result has, so that a run without results does not leave earlier parts."""
        with self._lock, suppress(OSError):  # the first result says it
            self._open()

    def close(self) -> None:
        """Write what is left. Raises SinkError if that fails."""
        with self._lock:
            if not self._failed:
                self._guarded(self._finish)
            self._release()

    # -- within, under the lock ----------------------------------------------------------------------------------------

    def _finish(self) -> None:
        if self._rows:
            self._hand_over()
        self._writing.result()

    def _hand_over(self) -> None:
        """Begin to write the rows, once the part before is written. Raises what that raised."""
        self._writing.result()
        self._open()
        self._thread = self._thread or ThreadPoolExecutor(1, "reflex-parquet")
        rows, self._rows, self._bytes = self._rows, [], 0
        self._writing = self._thread.submit(self._write, rows, self._parts)
        self._parts += 1

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._failed = True
            self.lost += len(self._rows)
            self._rows = []
            why = getattr(error, "strerror", None) or error
            raise SinkError(f"Parquet to {self._path} failed: {why}; no more is written") from error

    def _open(self) -> None:
        if self._folder is not None:
            return
        if not self._parts:  # not again after a close
            _make_way(self._path)
        self._path.mkdir(parents=False, exist_ok=True)
        self._folder = _locked(self._path)

    def _release(self) -> None:
        (folder, self._folder), (thread, self._thread) = (self._folder, None), (self._thread, None)
        if folder is not None:
            os.close(folder)
        if thread is not None:
            thread.shutdown()

    # -- on its thread -------------------------------------------------------------------------------------------------

    def _write(self, rows: list[dict[str, Any]], number: int) -> None:
        """A part has its name once it is whole."""
        try:
            arrow, parquet = _library(), _library("pyarrow.parquet")
            schema = _schema(arrow)
            slices = (rows[i : i + SLICE] for i in range(0, len(rows), SLICE))
            table = arrow.Table.from_batches([arrow.RecordBatch.from_pylist(s, schema) for s in slices], schema)
            draft = self._path / f".part-{number:06}.parquet"
            draft.unlink(missing_ok=True)  # of an earlier attempt
            with files.create(draft) as file:
                parquet.write_table(table, file, row_group_size=ROWS)
            os.replace(draft, self._path / draft.name[1:])
        except Exception:
            self.lost += len(rows)
            raise


def check_parquet(path: Path) -> None:
    """ConfigError or OSError if results cannot be written there."""
    _library()
    if path.exists() and not path.is_dir():
        raise OSError(errno.ENOTDIR, "is a file, and Parquet results are a directory of parts")
    _check_parts(path)
    if path.is_dir():
        os.close(_locked(path))
    if not path.parent.is_dir():
        raise OSError(errno.ENOENT, f"there is no directory {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, "the directory cannot be written to")


def read_parquet(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The results of a directory, each as its JSON line has it, in the order in which they were written."""
    dataset = _library("pyarrow.dataset")
    parts = sorted(str(part) for part in Path(path).glob("part-*.parquet"))
    for batch in dataset.dataset(parts, format="parquet").to_batches(batch_size=SLICE) if parts else ():
        for row in batch.to_pylist():
            rest = None if row["value"] is None else json.loads(row["value"])
            found = {name: row[name] for name in _FORMS if row[name] is not None}
            line = {name: row[name] for name in ("feed", "sequence", "pts", "latency_ms")}
            yield line | {"value": found | (rest or {}) if found else rest}


def _library(name: str = "pyarrow") -> Any:
    return library(name, "Parquet")


# -- rows --------------------------------------------------------------------------------------------------------------


def _number(value: Any) -> bool:
    if isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


def _text(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # it has half of a character
        return False


def _box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_number, value))


_FORMS: Final[dict[str, Callable[[Any], bool]]] = {
    "boxes": lambda v: isinstance(v, list) and all(map(_box, v)),
    "scores": lambda v: isinstance(v, list) and all(map(_number, v)),
    "labels": lambda v: isinstance(v, list) and all(map(_text, v)),
    "tracker_ids": lambda v: isinstance(v, list) and all(i is None or (_number(i) and int(i) == i) for i in v),
    "text": _text,
    "model": _text,
}


def _row(record: ResultRecord) -> dict[str, Any]:
    value = json_safe(record.value)
    row: dict[str, Any] = {
        "feed": record.feed, "sequence": record.sequence, "pts": json_safe(record.pts), "latency_ms": record.latency_ms,
    }  # fmt: skip
    if isinstance(value, Mapping):
        usual = {name: value[name] for name, has_form in _FORMS.items() if name in value and has_form(value[name])}
        rest = {name: item for name, item in value.items() if name not in usual}
        row |= usual
        if rest or not usual:
            row["value"] = _json(rest)
    elif value is not None:
        row["value"] = _json(value)
    return row


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace").decode()


def _size(row: Mapping[str, Any]) -> int:
    """About how many bytes it takes in memory."""
    return 500 + len(row.get("value", "")) + 400 * len(row.get("boxes", ())) + 100 * len(row.get("labels", ()))


def _schema(arrow: Any) -> Any:
    text, number, whole = arrow.string(), arrow.float64(), arrow.int64()
    return arrow.schema(
        [
            ("feed", text), ("sequence", whole), ("pts", number), ("latency_ms", number),
            ("boxes", arrow.list_(arrow.list_(number))), ("scores", arrow.list_(number)), ("labels", arrow.list_(text)),
            ("tracker_ids", arrow.list_(whole)), ("text", text), ("model", text), ("value", text),
        ]
    )  # fmt: skip


# -- the directory -----------------------------------------------------------------------------------------------------


def _make_way(path: Path) -> None:
    """Keep parts of an earlier run in PATH.1, in place of those that are there."""
    if not path.is_dir() or not any(path.iterdir()):
        return
    _check_parts(path)
    os.close(_locked(path))
    kept = path.with_name(path.name + files.KEPT)
    if kept.is_dir():
        shutil.rmtree(kept)
    os.replace(path, kept)


def _check_parts(path: Path) -> None:
    """Raise OSError if the directory, or the one that is kept, has other files than parts."""
    for folder in (path, path.with_name(path.name + files.KEPT)):
        names = sorted(os.listdir(folder)) if folder.is_dir() else ()
        if (other := next((name for name in names if not _PART.fullmatch(name)), None)) is not None:
            raise OSError(errno.EEXIST, f"{folder.name} has files that are no parts of results, such as {other}")


def _locked(path: Path) -> int:
    """The directory, open and locked: a second writer is refused."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link; name the directory itself")
    found = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        if fcntl is not None:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(found)
        raise OSError(errno.EBUSY, "is being written by another program or part of this one") from None
    except OSError:  # a file system without locks
        pass
    return found
