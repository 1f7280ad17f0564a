"""What commands share: exit status, one line for an error, progress, the width of tables, the key of a server."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reflex_runtime.core.errors import EXTRAS, ReflexError, not_installed

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def status_of(run: Callable[[], int], told: Sequence[str]) -> int:
    """Run a command: returns its exit status, and prints one line for an error. told: the words before the line."""
    try:
        status = run()
        sys.stdout.flush()  # here, where what is wrong with it can still be told
        return status
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        print(f"{' '.join(told)}: {not_installed(error.name or '').message}", file=sys.stderr)
        return 2
    except ReflexError as error:
        print(f"{' '.join(told)}: {error.message}", file=sys.stderr)
        return 1 if error.code == "journal_unreadable" else 2
    except BrokenPipeError:  # the reader of our output has what it wanted, as with `reflex trace FILE | head`
        return 0
    except SystemExit as error:  # so does rich say it
        if isinstance(error.__context__, BrokenPipeError):
            return 0
        raise
    except OSError as error:
        full = error.errno in _FULL
        if not full and error.filename is None:
            raise
        from reflex_runtime.settings.declare import one_line  # here: `reflex --help` is quick without it

        where = f"{one_line(error.filename)}: " if error.filename is not None else ""
        print(f"{' '.join(told)}: {where}{error.strerror}", file=sys.stderr)
        return 1 if full else 2
    except KeyboardInterrupt:
        print(f"{' '.join(told)}: interrupted", file=sys.stderr)
        return 130
    finally:
        _let_go()


def _let_go() -> None:
    """Drop what standard output could not take: the interpreter would flush it again at its end, and fail."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):  # ValueError: it is no file
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def console(width: int, columns: bool = True, **more: Any) -> Console:
    """Where tables go. width: where the output is no terminal and, with `columns`, COLUMNS is not set."""
    from rich.console import Console

    told = sys.stdout.isatty() or (columns and os.environ.get("COLUMNS", "").isdigit())
    return Console(width=None if told else width, highlight=False, **more)


def add_key(parser: argparse.ArgumentParser) -> None:
    """The option of the key of a running server."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="key of the server, of operators if it has two; default: the environment variable REFLEX_API_KEY",
    )


def key_of(args: argparse.Namespace) -> str:
    """The key that was given, or that of the environment; empty without one."""
    return args.api_key or os.environ.get("REFLEX_API_KEY", "")


_EVERY = 0.5  # seconds between two lines on a terminal; elsewhere ten times that


class ProgressLine:
    """Called with (done, total), as often as one likes. what: of which things. At done = total the line goes away.

    total: None where it is not known.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._told = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int | None = None) -> None:
        now = time.monotonic()
        if total is not None and done >= total:
            if self._terminal:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            return
        if now - self._told < (_EVERY if self._terminal else 10 * _EVERY):
            return
        self._told = now
        text = f"{done:,} {self._what}" if total is None else f"{done:,} of {total:,} {self._what}"
        before, after = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        print(f"{before}{text}", end=after, file=sys.stderr, flush=True)
