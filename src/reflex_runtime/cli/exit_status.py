"""How a command ends: its exit status, and one line for an error instead of a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.settings.declare import one_line

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def status_of(run: Callable[[], int], told: Sequence[str]) -> int:
    """Run a command: returns its exit status, and prints one line for an error. told: returns the words before the
    line."""
    try:
        status = run()
        sys.stdout.flush()  # here, where what is wrong with it can still be told
        return status
    except ReflexError as error:
        print(f"{' '.join(told)}: {error.message}", file=sys.stderr)
        return 2
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
        where = f"{one_line(error.filename)}: " if error.filename is not None else ""
        print(f"{' '.join(told)}: {where}{error.strerror}", file=sys.stderr)
        return 1 if full else 2
    except KeyboardInterrupt:
        print(f"{' '.join(told)}: interrupted", file=sys.stderr)
        return 130
    finally:
        _let_go()


def _let_go() -> None:
    """What standard output could not take is dropped: the interpreter would try again at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):  # ValueError: it is no file
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
