"""`reflex top`: what /dashboard shows, in a terminal: the batches as they form, the clients, the queues."""

from __future__ import annotations

import argparse
import http.client
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Generator, Iterator, Sequence
from math import ceil
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from reflex_runtime.cli.live_tables import (
    GOOD,
    ROWS,
    STREAM,
    feeds_table,
    fitting,
    groups_table,
    head_of,
    more,
    ms,
    own_tables,
    snapshot_of,
)
from reflex_runtime.cli.server_address import ServerAddress, add_server, key_of
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.observe.colours import PALETTE
from reflex_runtime.observe.live import LiveBatch, LiveSnapshot
from reflex_runtime.observe.steps import WHY_WAITING

WIDE = 120  # columns where the output is no terminal and COLUMNS does not say
BATCHES = 400  # kept for the strip
STRIP = 8  # lines of it
NAMES = 4096  # clients whose colour is kept
_LONGEST = 16 * 2**20  # bytes of a snapshot

_EPILOG = """\
examples:
  reflex top                                    the server on this machine, port 8000
  reflex top http://10.0.0.7:8000 --api-key KEY
  reflex top --once                             one snapshot, and out
  reflex top --json | jq -c '.groups[]'         a snapshot a line, four a second

The same in a browser, with more: http://127.0.0.1:8000/dashboard. docs/dashboard.md explains every figure.
Exit status of --once: 0 the server is ready, 1 it answers but is not ready, 2 it does not answer.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "top",
        description="Watch a running server: its batches as they form, its clients and its queues. Ctrl-C ends it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server(parser)
    parser.add_argument("--once", action="store_true", help="show one snapshot and end")
    parser.add_argument("--json", action="store_true", help="print each snapshot as a line of JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Watch until it is interrupted or the server ends the stream; returns the exit status."""
    lines = watched(ServerAddress.of(args.url), key_of(args))
    try:
        if args.once:
            return _show_once(next(lines), args.url, args.json)
        if args.json:
            for line in lines:
                print(line.decode(), end="", flush=True)
        else:
            _show(lines, args.url)
    except KeyboardInterrupt:
        return 0
    finally:
        lines.close()
    return 0


def watched(address: ServerAddress, key: str = "") -> Generator[bytes]:
    """The snapshots of a server as they come, one JSON document each. Ends when the server drains."""
    with address.answer(STREAM, key) as response:
        if response.status == 401:
            raise address.wrong_key(key)
        if response.status != 200:
            raise ReflexError(f"{address.url}: {_refusal(response)}")
        while line := response.readline(_LONGEST):
            yield line


def _refusal(response: http.client.HTTPResponse) -> str:
    body = response.read(4096)
    if response.status == 404:
        return f"has no {STREAM}; is it a server of this version of reflex?"
    try:
        return str(msgspec.json.decode(body)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"answers {response.status} at {STREAM}; is it a server of reflex?"


def _show_once(line: bytes, url: str, as_json: bool) -> int:
    snapshot = snapshot_of(line, url)
    if as_json:
        print(line.decode(), end="")
    else:
        console = _console()
        console.print(TopView(url).show(snapshot, console.width))
    return 0 if snapshot.server.get("state") in GOOD else 1


def _show(lines: Iterator[bytes], url: str) -> None:
    console, view = _console(), TopView(url)
    with Screen(console=console, screen=console.is_terminal, auto_refresh=False) as screen:
        for line in lines:
            screen.update(view.show(snapshot_of(line, url), console.width), refresh=True)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE, highlight=False)


class TopView:
    """Snapshots as a picture of text; it keeps the batches of the last ones."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._batches: deque[LiveBatch] = deque(maxlen=BATCHES)
        self._colours: OrderedDict[str, str] = OrderedDict()
        self._named = 0

    def show(self, snapshot: LiveSnapshot, width: int) -> RenderableType:
        """The picture after one more snapshot."""
        self._batches.extend(snapshot.batches)
        feeds = snapshot.server.get("feeds")
        clients = self._clients(snapshot, width) if feeds is None else feeds_table(feeds, width, self._name)
        return Group(
            head_of(snapshot, self._url),
            self._strip(width),
            self._newest(),
            groups_table(snapshot, width),
            "",
            clients,
            *own_tables(snapshot.server, width),
        )

    def _strip(self, width: int) -> Text:
        """A column is a batch, a cell one or more of its requests, in the colour of the client."""
        batches = list(self._batches)[-width:]
        if not batches:
            return Text("no batch yet", "dim")
        per = ceil(max(batch.size for batch in batches) / STRIP)
        rows = []
        for row in reversed(range(min(STRIP, ceil(max(b.size for b in batches) / per)))):
            line = Text(no_wrap=True)
            for batch in batches:
                at = row * per
                if at >= batch.size:
                    line.append(" ")
                elif at >= len(batch.members):
                    line.append("░")
                else:
                    line.append("▒" if batch.failed else "█", self._colour(batch.members[at].client))
            rows.append(line)
        text = Text("\n").join(rows)
        cell = "a request" if per == 1 else f"{per} requests"
        return text.append(f"\n{'─' * len(batches)} batches, newest right; a cell is {cell}", "dim")

    def _newest(self) -> Text:
        if not self._batches:
            return Text("")
        batch = self._batches[-1]
        took = ms(batch.took)
        predicted = f", predicted {ms(batch.expected)}" if batch.expected > 0.0 else ""
        why = WHY_WAITING.get(batch.short_of, batch.short_of)
        left = f"; {batch.queued} left waiting{': ' * bool(why)}{why}" if batch.queued else ""
        return Text(f"batch {batch.id} of {batch.group}: {batch.size}, {batch.cause}, took {took}{predicted}{left}\n")

    def _clients(self, snapshot: LiveSnapshot, width: int) -> Table:
        columns = "client", "group", "wire", "answers/s", "last, ago", "answered", "p95", "lost", "why"
        rows: list[Sequence[str | Text]] = []
        for c in snapshot.clients[:ROWS]:
            figures = f"{c.rate:.1f}", ms(c.age), str(c.answers), ms(c.p95), str(c.lost)
            rows.append((self._name(c.name), c.group, c.wire, *figures, c.why))
        if snapshot.clients_known > ROWS:
            rows.append((more(snapshot.clients_known - ROWS), *[""] * (len(columns) - 1)))
        spared = "wire", "answered", "group", "last, ago", "p95", "why"
        return fitting(columns, rows, width, {"client", "group", "wire", "why"}, spared)

    def _name(self, client: str) -> Text:
        return Text("█ ", self._colour(client)).append(client, "default")

    def _colour(self, client: str) -> str:
        found = self._colours.get(client)
        if found is None:
            found = self._colours[client] = PALETTE[self._named % len(PALETTE)]
            self._named += 1
            if len(self._colours) > NAMES:
                self._colours.popitem(last=False)
        return found
