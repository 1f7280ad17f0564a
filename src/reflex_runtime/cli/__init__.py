"""The command `reflex`: one file per verb."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from reflex_runtime.config import one_line
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.processors.quiet import telemetry_off
from reflex_runtime.version import __version__

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

VERBS = ("serve", "status", "feeds", "demo", "demo_export", "trace", "simulate", "replay", "report", "doctor", "worker")


class Parser(argparse.ArgumentParser):
    """Usage errors are one line and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(
        prog="reflex",
        description="Decide which requests share the next forward pass, serve them, and watch every batch.",
    )
    parser.add_argument("--version", action="version", version=f"reflex {__version__}")
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for name in VERBS:
        import_module(f"reflex_runtime.cli.{name}").add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns its exit status. What a user can mend is one line on standard error, without a traceback."""
    told = ["reflex"]

    def run() -> int:
        telemetry_off()  # also that of libraries which a processor of the user's imports
        args = build_parser().parse_args(argv)
        told.append(args.verb)
        return int(args.run(args))

    return status_of(run, told)


def status_of(run: Callable[[], int], told: Sequence[str]) -> int:
    """The exit status of a command, and one line for what it raises. told: the words before it, read then."""
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
