"""The log of a server on standard error: lines for people, or JSON for a collector (`--log-format json`).

A reader that stops reading must not stop the server: `LogStream` never waits for it, and drops lines that do not fit.
Text from outside (messages, exceptions) is `escaped`: it can neither forge a line nor control a terminal.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import os
import select
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NoReturn, TextIO

from reflex_runtime.core.batch import Event, Failed, RequestAnswered
from reflex_runtime.core.errors import ProcessorError, ReflexError
from reflex_runtime.observe.tracing import current_span
from reflex_runtime.pacing import Throttle

PLAIN: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
WAITING: Final = 1 << 20  # most bytes that wait for a slow reader
LONGEST: Final = 1 << 14  # characters of a text in the log: a model may raise one of any length
EXIT_STUCK: Final = 1  # status of a server whose event loop hangs in a model
LAST_WORDS_S: Final = 1.0  # longest wait for the reader at the end of the process


def begin(form: str = PLAIN) -> None:
    """Log lines for people, until `use` sets another format. From now on neither a log line nor a `print` waits."""
    guard(stdout=True)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logging.getLogger().addFilter(_own)
    _format(TextLog(form))


def _own(record: logging.LogRecord) -> bool:
    """Name a line of the root logger: it is the command's own."""
    record.name = "reflex"
    return True


def use(log_format: str) -> None:
    """Set the format of the log: text or json."""
    if log_format == "json":
        _format(JsonLog())


def _format(formatter: logging.Formatter) -> None:
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, LogStream):
            stream.formatter = formatter


def guard(stdout: bool) -> None:
    """Make writes to standard error never wait for a reader; with `stdout` also those to standard output."""
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = LogStream(sys.stderr)
    if stdout and sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = LogStream(sys.stdout)
    atexit.register(finish)


def leave(status: int) -> NoReturn:
    """End the process now, without waiting for threads that may never end. The last log lines get a second."""
    logging.shutdown()
    finish()
    os._exit(status)


def leave_stuck() -> NoReturn:
    """End the process, because the event loop hangs in a model; a supervisor restarts the server."""
    why = "leaving: a batch on the event loop does not come back, and no request can be answered"
    logging.getLogger("reflex.server").error(why)
    leave(EXIT_STUCK)


def finish() -> None:
    """Write the lines that wait for a slow reader, for a second at most."""
    until = time.monotonic() + LAST_WORDS_S
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, LogStream):
            stream.finish(max(0.0, until - time.monotonic()))
        elif stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def cut(text: str) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST // 2]} … {len(text) - LONGEST} characters … {text[-LONGEST // 2 :]}"


def escaped(text: str) -> str:
    """The text with control characters as escapes. Lines after the first are indented, so that no text from outside
    begins a line of the log."""
    text = cut(text)
    if text.isprintable():
        return text
    return "\n    ".join(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        for line in text.rstrip("\n").split("\n")
    )


class LogStream(io.TextIOBase):
    """A text stream over standard error or output that never waits for its reader.

    A write goes to the kernel at once. What a full pipe does not take waits for a thread, up to 1 MiB; further lines
    are dropped, and their count is written when there is room again.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._fd = stream.fileno()
        self.formatter: logging.Formatter = TextLog(PLAIN)  # of the line on dropped lines
        self._to, self._write_some = _non_blocking(self._fd)
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Reset the state. Also called in a fork: it has no thread, and the parent writes the lines that wait."""
        self._lock = threading.RLock()  # a signal handler may print
        self._line = ""  # the beginning of a line
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._dropped = 0
        self._written = threading.Event()
        self._written.set()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            self._line += text
            end = self._line.rfind("\n") + 1
            if end or len(self._line) > WAITING:
                lines, self._line = self._line[: end or None], self._line[end:] if end else ""
                self._put(lines.encode(self.encoding, "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Write the beginning of a line, as progress does."""
        with self._lock:
            if self._line:
                text, self._line = self._line, ""
                self._put(text.encode(self.encoding, "backslashreplace"))

    def finish(self, limit: float) -> None:
        """Wait until everything is written, `limit` seconds at most."""
        self.flush()
        self._written.wait(limit)

    def _put(self, lines: bytes) -> None:
        if not self._waiting:
            lines = lines[self._write_some(lines) :]
            if not lines:
                return
        if self._size and self._size + len(lines) > WAITING:
            self._dropped += lines.count(b"\n")
            return
        self._waiting.append(lines)
        self._size += len(lines)
        if self._written.is_set():
            self._written.clear()
            try:
                threading.Thread(target=self._drain, name="reflex-log", daemon=True).start()
            except RuntimeError:  # no further thread is allowed, or the interpreter ends
                self._written.set()  # the next line tries again

    def _drain(self) -> None:
        room = select.poll()
        room.register(self._to, select.POLLOUT)
        while True:
            room.poll()
            with self._lock:
                lines = self._waiting.popleft()
                rest = lines[self._write_some(lines) :]
                self._size -= len(lines) - len(rest)
                if rest:
                    self._waiting.appendleft(rest)
                elif not self._waiting and self._dropped:
                    words = f"{self._dropped} lines of the log were dropped: its reader did not read"
                    record = logging.makeLogRecord({"name": "reflex.log", "levelname": "WARNING", "msg": words})
                    line = f"{self.formatter.format(record)}\n".encode()
                    self._dropped = 0
                    self._waiting.append(line)
                    self._size += len(line)
                elif not self._waiting:
                    self._written.set()
                    return


def _non_blocking(fd: int) -> tuple[int, Callable[[bytes], int]]:
    """A descriptor, and a function that writes as much as the kernel takes without waiting, and returns how many bytes.

    The flag O_NONBLOCK of `fd` itself is shared with others, such as the shell, so it stays as it is. Libraries that
    close `fd` or point it to /dev/null for a while do not affect this descriptor.
    """
    kind = os.fstat(fd).st_mode
    if stat.S_ISSOCK(kind):  # systemd's journal
        other = socket.socket(fileno=os.dup(fd))
        return other.fileno(), lambda lines: _taken(lambda: other.send(lines, socket.MSG_DONTWAIT), lines)
    if stat.S_ISFIFO(kind) or os.isatty(fd):
        with contextlib.suppress(OSError):  # no /proc, or the terminal is another user's
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            return own, lambda lines: _taken(lambda: os.write(own, lines), lines)
    return fd, lambda lines: _taken(lambda: os.write(fd, lines), lines)


def _taken(write: Callable[[], int], lines: bytes) -> int:
    try:
        return write()
    except BlockingIOError:
        return 0
    except OSError:  # the reader is gone, or the disk is full: the server continues
        return len(lines)


class TextLog(logging.Formatter):
    """A record as a line, and a traceback below it, with control characters as escapes."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


class JsonLog(logging.Formatter):
    """A record as one JSON object on one line.

    time: UTC, ISO 8601 with microseconds. level, logger, message, pid, thread. Of an exception also `error` (its
    class), `error_message` and `traceback`. With `--otel`, a line about a request has the ids of its span: `trace_id`,
    `span_id`. The line at the start also has `settings`.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": cut(record.getMessage()),
            "pid": record.process,
            "thread": record.threadName,
        }
        if (span := current_span()) is not None:
            fields |= {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}
        if "settings" in record.__dict__:
            fields["settings"] = record.__dict__["settings"]
        if record.exc_info and (error := record.exc_info[1]) is not None:
            fields |= {"error": type(error).__name__, "error_message": cut(str(error))}
            fields["traceback"] = cut(self.formatException(record.exc_info))
        return json.dumps(fields, default=str)  # ASCII: whatever the encoding of standard error


class FailureLog:
    """A sink that logs failed requests: the first at once, then at most one line a second with the count. Client
    errors, overload and cancellations are only in the metrics."""

    events = frozenset({RequestAnswered})

    def __init__(self) -> None:
        self._throttle = Throttle()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RequestAnswered) or event.outcome != "failed":
            return
        if event.ticket is None or event.served_in is None:
            return
        if isinstance(event.ticket.outcome, Failed):
            self.tell(event.at, event.ticket.id, event.ticket.outcome.error)
        elif isinstance(event.error, ProcessorError):  # it ran, but its result cannot be encoded
            self.tell(event.at, event.ticket.id, event.error)

    def tell(self, now: float, request_id: str, error: BaseException) -> None:
        """Log a failed request. now: seconds."""
        if count := self._throttle.count(now):
            more = f" ({count - 1} more since the last line)" if count > 1 else ""
            reason = error.logged() if isinstance(error, ReflexError) else error
            logging.getLogger("reflex.server").error("request %s failed: %s%s", request_id, reason, more)
