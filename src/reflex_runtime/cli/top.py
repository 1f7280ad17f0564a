"""`reflex top`: what /dashboard shows, in a terminal: the batches as they form, the clients, the queues."""

from __future__ import annotations

import argparse
import http.client
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from math import ceil
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from reflex_runtime.cli.server_address import ServerAddress, add_server, key_of
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.telemetry.colours import PALETTE
from reflex_runtime.telemetry.live import LiveBatch, LiveSnapshot
from reflex_runtime.telemetry.steps import WHY_WAITING

STREAM = "/dashboard/stream"
WIDE = 120  # columns where the output is no terminal and COLUMNS does not say
BATCHES = 400  # kept for the strip
STRIP = 8  # lines of it
NAMES = 4096  # clients whose colour is kept
_STYLES = {"ready": "green", "ok": "green"}
_LONGEST = 16 * 2**20  # bytes of a snapshot
_SNAPSHOT = msgspec.json.Decoder(LiveSnapshot)

_EPILOG = """\
examples:
  reflex top                                    the server on this machine, port 8000
  reflex top http://10.0.0.7:8000 --api-key KEY
  reflex top --once                             one snapshot, and out
  reflex top --json | jq -c '.groups[]'         a snapshot a line, four a second

The same in a browser, with more: http://127.0.0.1:8000/dashboard. docs/dashboard.md explains every figure.
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
        if args.json:
            for line in lines:
                print(line.decode(), end="", flush=True)
                if args.once:
                    break
        else:
            _show(lines, args.url, args.once)
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


def _show(lines: Iterator[bytes], url: str, once: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE, highlight=False)
    view = TopView(url)
    snapshots = (_read(line, url) for line in lines)
    if once:
        for snapshot in snapshots:
            console.print(view.show(snapshot, console.width))
            return
    with Screen(console=console, screen=console.is_terminal, auto_refresh=False) as screen:
        for snapshot in snapshots:
            screen.update(view.show(snapshot, console.width), refresh=True)


def _read(line: bytes, url: str) -> LiveSnapshot:
    try:
        return _SNAPSHOT.decode(line)
    except msgspec.DecodeError as error:
        if not line.endswith(b"\n"):
            raise ReflexError(f"{url}: ended in the middle of a snapshot") from None
        raise ReflexError(f"{url}: is of another version of reflex: its snapshot has {error}") from None


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
        head, strip = self._head(snapshot), self._strip(width)
        return Group(head, strip, self._newest(), _groups(snapshot, width), self._clients(snapshot, width))

    def _head(self, snapshot: LiveSnapshot) -> Text:
        server = snapshot.server
        state = str(server.get("state", ""))
        head = Text(f"{self._url}: ").append(state, _STYLES.get(state, "bold red"))
        policies = server.get("policies", {})
        shadows = {policy["groups"].get("shadow") for policy in policies.values()}  # a shadow answers nobody
        served = [g for g in snapshot.groups if g.name not in shadows]
        rate, busy = sum(g.rate for g in served), min(1.0, sum(g.busy for g in snapshot.groups))
        p99 = max((g.p99 for g in served if g.p99 is not None), default=None)
        head.append(f"  {rate:.1f} answers/s  device {busy:.0%} busy  p99 {_ms(p99)}")
        for name, policy in policies.items():
            for slot, told in policy.get("slots", {}).items():
                if told["verdict"] != "ok":
                    head.append(f"  {name}/{slot}: {told['verdict']}", "bold red")
        if server.get("error"):
            head.append(f"\n{server['error']}", "red")
        return head

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
        took = _ms(batch.took)
        predicted = f", predicted {_ms(batch.expected)}" if batch.expected > 0.0 else ""
        why = WHY_WAITING.get(batch.short_of, batch.short_of)
        left = f"; {batch.queued} left waiting{': ' * bool(why)}{why}" if batch.queued else ""
        return Text(f"batch {batch.id} of {batch.group}: {batch.size}, {batch.cause}, took {took}{predicted}{left}\n")

    def _clients(self, snapshot: LiveSnapshot, width: int) -> Table:
        columns = "client", "group", "wire", "answers/s", "last, ago", "answered", "p95", "lost", "why"
        rows: list[Sequence[str | Text]] = []
        for c in snapshot.clients[:20]:
            name = Text("█ ", self._colour(c.name)).append(c.name, "default")
            figures = f"{c.rate:.1f}", _ms(c.age), str(c.answers), _ms(c.p95), str(c.lost)
            rows.append((name, c.group, c.wire, *figures, c.why))
        if snapshot.clients_known > 20:
            rows.append((Text(f"and {snapshot.clients_known - 20} more", "dim"), *[""] * (len(columns) - 1)))
        spared = "wire", "answered", "group", "last, ago", "p95", "why"
        return _table(columns, rows, width, {"client", "group", "wire", "why"}, spared)

    def _colour(self, client: str) -> str:
        found = self._colours.get(client)
        if found is None:
            found = self._colours[client] = PALETTE[self._named % len(PALETTE)]
            self._named += 1
            if len(self._colours) > NAMES:
                self._colours.popitem(last=False)
        return found


def _groups(snapshot: LiveSnapshot, width: int) -> Table:
    figures, queues = {g.name: g for g in snapshot.groups}, snapshot.server.get("queues", {})
    rows = []
    for name in (*queues, *(name for name in figures if name not in queues)):  # runtime processes have a queue each
        queue, g, row = queues.get(name), figures.get(name), [name]
        if queue is None:
            row += ["–"] * 4
        else:
            ready = queue["queued"] - queue["preparing"]
            row += [str(ready), str(queue["preparing"]), str(queue["residents"]), _ms(queue["queued_seconds"])]
        if g is None:
            row += [""] * 7
        else:
            ratio = "–" if g.error is None else f"{g.error:.2f}"
            lost = ", ".join(f"{count} {kind}" for kind, count in g.outcomes.items() if kind != "ok")
            row += [f"{g.rate:.1f}", f"{min(1.0, g.busy):.0%}", _ms(g.p50), _ms(g.p95), _ms(g.p99), ratio, lost]
        rows.append(row)
    columns = (
        "group", "waiting", "prepared", "resident", "work", "answers/s", "busy", "p50", "p95", "p99", "pred/meas",
        "without a result",
    )  # fmt: skip
    spared = "prepared", "resident", "p95", "pred/meas", "work", "p50", "without a result", "busy"
    return _table(columns, rows, width, {"group", "without a result"}, spared)


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int, texts: set[str], spared: Iterable[str]
) -> Table:
    """A table of one line a row. texts: columns that are no figures. spared: those left out, in this order, until the
    others fit."""
    wide = {
        column: max(cell_len(str(cell)) for cell in (column, *cells)) + 2
        for column, *cells in zip(columns, *rows, strict=True)
    }
    for column in spared:
        if sum(wide.values()) - 2 > width:
            del wide[column]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in wide:
        table.add_column(column, justify="left" if column in texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell for column, cell in zip(columns, row, strict=True) if column in wide))
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    ms = seconds * 1e3
    if ms >= 1e4:
        return f"{ms / 1e3:.1f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms"
