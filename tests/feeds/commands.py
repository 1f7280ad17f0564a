"""A real `reflex feeds` in a process of its own: its log, its output, its screen, and processors for it to import.

Nothing here sleeps: a run is where its log says it is, or where a result says it is.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pty
import re
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE
from typing import Any, Self

import pytest

from feeds import chaos, markers  # noqa: F401 — sources of their own, for `main` in this process
from forked import Forked
from reflex_runtime.cli import main

PATIENCE = 60.0  # seconds until a test gives up; nothing waits this long unless it is broken

# Processors as a user writes them. SECONDS: what a batch takes.
PROCESSORS = '''
import logging
import os
from threading import Event
from reflex_runtime.run.coordinator import _owners

SECONDS = float(os.environ.get("SECONDS_EACH", "0"))

class Sizes:
    """Answers with the size of the batch."""
    id = "sizes"
    def on_start(self):
        pass
    def process(self, entries):
        Event().wait(SECONDS)
        return [{"size": len(entries), "text": entry.feed_id} for entry in entries]
    def on_stop(self):
        pass

def make():
    return Sizes()

ready = Sizes()

class StartsLate(Sizes):
    """Has not started when it is told to stop."""
    def on_start(self):
        while not _owners[id(self)]._signalled:
            Event().wait(0.01)

class Hangs(Sizes):
    def process(self, entries):
        logging.getLogger().info("hangs now")
        Event().wait()

class Raises(Sizes):
    def process(self, entries):
        raise ValueError("too\\ndark")

class Dies(Sizes):
    def process(self, entries):
        raise SystemExit(3)

class BadStart(Sizes):
    def on_start(self):
        raise ValueError("no\\nweights")

class BadStop(Sizes):
    def on_stop(self):
        raise ValueError("stuck")

class NoStop:
    id = "nostop"
    def on_start(self):
        pass
    def process(self, entries):
        return entries

class NoProcess:
    id = "noprocess"

class NoName(NoStop):
    id = None

class Needs(Sizes):
    def __init__(self, path):
        pass
'''


def scratch(folder: Path) -> Path:
    """A folder with the processors in it, as mine.py."""
    (folder / "mine.py").write_text(PROCESSORS, encoding="utf-8")
    return folder


def clean(env: Mapping[str, str] | None = None) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("REFLEX_")}
    return found | {"COLUMNS": ""} | dict(env or {})


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command refuses to start, asked in this process. Asserts that it is one."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        status = main(["feeds", *arguments])
    except SystemExit as left:
        status = int(left.code or 0)
    finally:
        root.handlers[:] = before  # its own writes to what `capsys` closes
        root.setLevel(level)
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), (status, out, err)
    assert len(err.splitlines()) == 1, err
    return err.rstrip("\n")


class Feeds:
    """`reflex feeds ARGUMENTS`. Use it in a with statement: on the way out no process is left.

    out: lines of standard output so far. log: lines of standard error. terminal: columns and rows of the pseudo
    terminal that standard error is then; what came is `raw`, and not in `log`.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        terminal: tuple[int, int] | None = None,
    ) -> None:
        master, err = -1, PIPE
        if terminal is not None:
            master, err = pty.openpty()
            fcntl.ioctl(err, termios.TIOCSWINSZ, struct.pack("HHHH", terminal[1], terminal[0], 0, 0))
        environment = clean(env) | {"TERM": "xterm"}
        run = "from reflex_runtime.feeds.runtime import runtime; "
        run += f"runtime.OUTPUTS_S = {PATIENCE}; "  # results that wait are sent, however busy the machine is
        run += f"import sys; from reflex_runtime.cli import main; sys.exit(main({['feeds', *arguments]!r}))"
        self.process = Forked(run, env=environment, cwd=cwd, stdout=PIPE, stderr=err)
        self.out: list[str] = []
        self.log: list[str] = []
        self.raw = b""
        self.told = threading.Condition()
        self._open = 2
        if terminal is not None:
            os.close(err)
        readers: list[tuple[Any, ...]] = [(self._read, self.process.stdout, self.out)]
        readers.append((self._read, self.process.stderr, self.log) if terminal is None else (self._read_screen, master))
        self._readers = [threading.Thread(target=target, args=rest, daemon=True) for target, *rest in readers]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        died = self.process.poll()
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        assert died is None or died >= 0, f"it died of signal {-died}:\n{self}"

    def __str__(self) -> str:
        return "\n".join([*self.log, self.raw.decode("utf-8", "replace"), *self.out[-5:]])

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read(self, stream: Any, into: list[str]) -> None:
        try:
            for line in stream:
                with self.told:
                    into.append(line.decode().rstrip("\n"))
                    self.told.notify_all()
        except ValueError:
            pass  # a test closed it
        self._ended()

    def _read_screen(self, master: int) -> None:
        try:
            while data := os.read(master, 65536):
                with self.told:
                    self.raw += data
                    self.told.notify_all()
        except OSError:
            pass  # the other end is gone
        os.close(master)
        self._ended()

    def _ended(self) -> None:
        with self.told:
            self._open -= 1
            self.told.notify_all()

    def reach(self, what: Any, words: str) -> Any:
        until = time.monotonic() + PATIENCE
        with self.told:
            while not (found := what()):
                left = until - time.monotonic()
                assert left > 0.0, f"waited in vain for {words}:\n{self}"
                assert self._open, f"ended without {words}:\n{self}"
                self.told.wait(left)
        return found

    def wait_log(self, text: str, times: int = 1) -> str:
        """The line of the log that holds `text` for so many times."""
        lines = self.reach(lambda: [x for x in self.log if text in x][times - 1 :], repr(text))
        return str(lines[0])

    def wait_out(self, count: int) -> list[Any]:
        """Results on standard output, at least so many."""
        self.reach(lambda: len(self.out) >= count, f"{count} results")
        return [json.loads(line) for line in self.out]

    @property
    def port(self) -> int:
        found = re.search(r"http://[^ ]*:(\d+)/dashboard", self.wait_log("/metrics and /health"))
        assert found is not None
        return int(found[1])

    # -- ending ------------------------------------------------------------------------------------------------------

    def stop(self, number: int = signal.SIGINT) -> int:
        """Signal it; its exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait until it is gone; its exit status."""
        status = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        assert not any("Traceback" in line for line in self.log), self
        return status


def ran(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None, status: int = 0) -> Feeds:
    """A run that came to its end by itself, with this exit status."""
    with Feeds(*arguments, cwd=cwd, env=env) as feeds:
        assert feeds.wait() == status, feeds
    return feeds


def together(*runs: Feeds) -> tuple[Feeds, ...]:
    """Runs that go on at the same time, once all have come to their end; every exit status is 0."""
    with ExitStack() as closing:
        for feeds in runs:
            closing.enter_context(feeds)
        for feeds in runs:
            assert feeds.wait() == 0, feeds
    return runs


def results(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_feed(lines: Iterable[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for line in lines:
        found.setdefault(line["feed"], []).append(line)
    return found


def figures(feeds: Feeds, name: str) -> dict[str, int]:
    """What the last table says of a feed: frames, answered, and drops by their reasons."""
    rows = [re.split(r" {2,}", line.strip()) for line in feeds.log if re.match(rf"{re.escape(name)} {{2,}}", line)]
    head = re.split(r" {2,}", next(line for line in feeds.log if line.startswith("feed ")).strip())
    row = rows[-1]
    dropped = re.findall(r"(\d+) ([a-z_]+)(?:,|$)", row[-1]) if not row[-1].endswith((" s", " ms")) else ()
    at = head.index("frames")
    return {"frames": int(row[at]), "answered": int(row[at + 1]), **{reason: int(n) for n, reason in dropped}}


def screen(raw: bytes) -> list[str]:
    """What stands on a terminal that was sent this: lines that were moved over and erased are gone."""
    lines, x = [""], 0
    y = 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", raw.decode()):
        if token == "\r":
            x = 0
        elif token == "\n":
            y += 1
            lines += [""] * (y + 1 - len(lines))
        elif token.endswith("A") and token.startswith("\x1b"):
            y = max(0, y - int(token[2:-1] or 1))
        elif token == "\x1b[2K":
            lines[y] = ""
        elif not token.startswith("\x1b"):
            lines[y] = lines[y][:x].ljust(x) + token + lines[y][x + len(token) :]
            x += len(token)
    return [line.rstrip() for line in lines]
