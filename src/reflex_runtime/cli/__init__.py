"""The command `reflex`: one file per verb."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.processors.quiet import telemetry_off
from reflex_runtime.version import __version__

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
    """Run a verb; returns its exit status."""
    telemetry_off()  # also that of libraries which a processor of the user's imports
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ReflexError as error:
        print(f"reflex {args.verb}: {error.message}", file=sys.stderr)
        return 2
    except PermissionError as error:
        print(f"reflex {args.verb}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 141  # the reader of our output left, as with `reflex trace FILE | head`
    except KeyboardInterrupt:
        return 130
