"""`reflex top`: the figures of /dashboard in a terminal: batches as they form, clients, queues."""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live as Screen

from reflex_runtime.cli.console import add_key, console, key_of
from reflex_runtime.observe.live import STREAM
from reflex_runtime.observe.top_view import GOOD, TopView, one_line_of
from reflex_runtime.web.server_address import ServerAddress, snapshot_of

WIDE = 120  # columns if the output is not a terminal and COLUMNS is not set

_EPILOG = """\
examples:
  reflex top                                    the server on this machine, port 8000
  reflex top --once                             one snapshot
  reflex top | tee top.log                      into a pipe or a file: a line for each snapshot, four a second
  reflex top --json | jq -c '.groups[]'         each snapshot as a line of JSON

docs/dashboard.md explains every figure.
Exit status of --once: 0 the server is ready, 1 it answers but is not ready, 2 it does not answer.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    what = "Watch a running server: its batches as they form, its clients and its queues. Ctrl-C ends it."
    parser = verbs.add_parser("top", description=what, epilog=_EPILOG)
    default = "http://127.0.0.1:8000"
    parser.add_argument("url", nargs="?", default=default, metavar="URL", help="the server (default %(default)s)")
    add_key(parser)
    parser.add_argument("--once", action="store_true", help="show one snapshot and end")
    parser.add_argument("--json", action="store_true", help="print each snapshot as a line of JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Watch until an interrupt or the end of the stream; returns the exit status."""
    lines = watched(ServerAddress.of(args.url), key_of(args))
    try:
        if args.once:
            return _show_once(next(lines), args.url, args.json)
        shown = console(WIDE)
        if shown.is_terminal and not args.json:
            _show(shown, lines, args.url)
        for line in lines:  # into a pipe or a file
            text = line.decode() if args.json else f"{one_line_of(snapshot_of(line, args.url), args.url)}\n"
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        return 0
    finally:
        lines.close()
    return 0


def watched(address: ServerAddress, key: str = "") -> Generator[bytes]:
    """The snapshots of a server, one JSON document each. Ends when the server drains."""
    with address.answer(STREAM, key) as response:
        if response.status != 200:
            raise address.refusal(response, STREAM, key)
        while line := response.readline(16 * 2**20):  # bytes; a snapshot is much smaller
            yield line


def _show_once(line: bytes, url: str, as_json: bool) -> int:
    snapshot = snapshot_of(line, url)
    if as_json:
        print(line.decode(), end="")
    else:
        shown = console(WIDE)
        shown.print(TopView(url).show(snapshot, shown.width))
    return 0 if snapshot.server.get("state") in GOOD else 1


def _show(shown: Console, lines: Iterator[bytes], url: str) -> None:
    view = TopView(url)
    with Screen(console=shown, screen=True, auto_refresh=False) as screen:
        for line in lines:
            screen.update(view.show(snapshot_of(line, url), shown.width), refresh=True)
