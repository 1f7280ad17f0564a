"""Common parts of commands: exit status, one line for an error, progress, the width of tables, the key of a server."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.extras import EXTRAS, not_installed

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def status_of(run: Callable[[], int], prefix: Sequence[str]) -> int:
    """Run a command and return its exit status. An error is one line that begins with the words of `prefix`."""
    try:
        status = run()
        sys.stdout.flush()  # now, while an error can still be reported
        return status
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        print(f"{' '.join(prefix)}: {not_installed(error.name or '').message}", file=sys.stderr)
        return 2
    except ReflexError as error:
        print(f"{' '.join(prefix)}: {error.message}", file=sys.stderr)
        missing = isinstance(error.__cause__, FileNotFoundError | IsADirectoryError)  # then an argument is wrong
        return 1 if error.code == "journal_unreadable" and not missing else 2
    except BrokenPipeError:  # the reader closed the pipe, as in `reflex trace FILE | head`
        return 0
    except SystemExit as error:  # rich raises it if the reader closed the pipe
        if isinstance(error.__context__, BrokenPipeError):
            return 0
        raise
    except OSError as error:
        full = error.errno in _FULL
        if not full and error.filename is None:
            raise
        from reflex_runtime.settings.declare import one_line  # imported late, so that `reflex --help` is quick

        where = f"{one_line(error.filename)}: " if error.filename is not None else ""
        print(f"{' '.join(prefix)}: {where}{error.strerror}", file=sys.stderr)
        return 1 if full else 2
    except KeyboardInterrupt:
        print(f"{' '.join(prefix)}: interrupted", file=sys.stderr)
        return 130
    finally:
        _drop_output()


def _drop_output() -> None:
    """Drop output that cannot be written: the interpreter would flush it again when it ends, and fail."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):  # ValueError: not a file
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def console(width: int, columns: bool = True, **more: Any) -> Console:
    """A console for tables. width: if the output is no terminal, and, with `columns`, COLUMNS is not set."""
    from rich.console import Console

    known = sys.stdout.isatty() or (columns and os.environ.get("COLUMNS", "").isdigit())
    return Console(width=None if known else width, highlight=False, **more)


def add_key(parser: argparse.ArgumentParser) -> None:
    """Add --api-key, the key of a running server."""
    what = "key of the server, if it has two that of operators; default: the environment variable REFLEX_API_KEY"
    parser.add_argument("--api-key", metavar="KEY", help=what)


def key_of(args: argparse.Namespace) -> str:
    """The key from --api-key or the environment; empty without one."""
    return args.api_key or os.environ.get("REFLEX_API_KEY", "")


_EVERY = 0.5  # seconds between two updates on a terminal; ten times as many between lines of a file


class ProgressLine:
    """Prints progress on standard error. Call it with (done, total) as often as you like. what: names what is counted.

    total: None if unknown. When done is total, the line is removed from a terminal.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._printed = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int | None = None) -> None:
        now = time.monotonic()
        if total is not None and done >= total:
            if self._terminal:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            return
        if now - self._printed < (_EVERY if self._terminal else 10 * _EVERY):
            return
        self._printed = now
        text = f"{done:,} {self._what}" if total is None else f"{done:,} of {total:,} {self._what}"
        before, after = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        print(f"{before}{text}", end=after, file=sys.stderr, flush=True)
