"""Snapshots of a server as text for a terminal, for `reflex top`.

Each row of a table is one line; a narrow terminal shows fewer columns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reflex_runtime.observe.journal import plain
from reflex_runtime.observe.live import LiveBatch, LiveSnapshot, worst
from reflex_runtime.observe.trace_tables import PALETTE, WHY_WAITING

BATCHES = 400  # kept for the strip
STRIP = 8  # lines of it
NAMES = 4096  # clients whose colour is kept


class TopView:
    """Draws snapshots as text; keeps the batches of the last ones for the strip."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._batches: deque[LiveBatch] = deque(maxlen=BATCHES)
        self._colours: OrderedDict[str, str] = OrderedDict()
        self._named = 0

    def show(self, snapshot: LiveSnapshot, width: int) -> RenderableType:
        """Draw one more snapshot."""
        self._batches.extend(snapshot.batches)
        feeds = snapshot.server.get("feeds")
        clients = self._clients(snapshot, width) if feeds is None else feeds_table(feeds, width, self._name)
        shown: list[RenderableType] = [head_of(snapshot, self._url), self._strip(width), self._newest()]
        shown += [groups_table(snapshot, width), "", clients]
        for name, table in (("policies", policies_table), ("outputs", outputs_table), ("processes", processes_table)):
            if snapshot.server.get(name):
                shown += ["", table(snapshot.server[name], width)]
        return Group(*shown)

    def _strip(self, width: int) -> Text:
        """A column for each batch, a cell for one or more of its requests, in the colour of the client."""
        if not (batches := list(self._batches)[-width:]):
            return Text("no batch yet: batches are kept while this view is open", "dim")
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
        return Text("█ ", self._colour(client)).append(plain(client, TEXT), "default")

    def _colour(self, client: str) -> str:
        found = self._colours.get(client)
        if found is None:
            found = self._colours[client] = PALETTE[self._named % len(PALETTE)]
            self._named += 1
            if len(self._colours) > NAMES:
                self._colours.popitem(last=False)
        return found


LEAST = 18  # columns of a `why` that is cut
TEXT = 300  # characters of a cell, or of the server's error
ROWS = 20  # of a table of clients or feeds
GOOD = {"ready": "green", "ok": "green", "running": "green", "ended": "green", "stopped": "green", "connected": "green"}
_WARNS = {"starting": "yellow", "restarting": "bold yellow", "connecting": "yellow", "reconnecting": "bold yellow"}


def state_text(state: str) -> Text:
    """A state in its colour."""
    return Text(state, GOOD.get(state) or _WARNS.get(state, "bold red"))


def head_of(snapshot: LiveSnapshot, url: str) -> Text:
    """The first lines: the state, the figures of all groups together, and faults."""
    server = snapshot.server
    state, policies, model = str(server.get("state", "")), server.get("policies", {}), server.get("model")
    shadows = {policy["groups"].get("shadow") for policy in policies.values()}  # a shadow has no callers
    served = [g for g in snapshot.groups if g.name not in shadows]
    rate, busy = sum(g.rate for g in served), min(1.0, sum(g.busy for g in snapshot.groups))
    head = Text(f"{url}: ").append(state_text(state))
    head.append(f"  {rate:.1f} answers/s  device {busy:.0%} busy  p99 {ms(worst(served, 'p99'))}")
    for name, policy in policies.items():
        for slot, verdict in policy.get("slots", {}).items():
            if verdict["verdict"] != "ok":
                head.append(f"  {name}/{slot}: {verdict['verdict']}", "bold red")
    if model is not None:
        head.append(f"\n{model.get('model', '')}: {model.get('running', 0)} running")
        first, gap = (ms(worst(served, name)) for name in ("first_p50", "gap_p50"))
        head.append(f"  {sum(g.tokens for g in served):.0f} tokens/s  first {first}  between {gap}")
        if "kv_cache_usage" in model:
            head.append(f"  cache {model['kv_cache_usage']:.0%} held")
    if server.get("error"):
        head.append(f"\n{plain(server['error'], TEXT)}", "red")
    return head


def one_line_of(snapshot: LiveSnapshot, url: str) -> str:
    """The lines above the tables, as one."""
    return "  ".join(head_of(snapshot, url).plain.splitlines())


def groups_table(snapshot: LiveSnapshot, width: int) -> Table:
    """The queue of each group, and its figures."""
    figures, queues = {g.name: g for g in snapshot.groups}, snapshot.server.get("queues", {})
    rows: list[list[str]] = []
    for name in (*queues, *(name for name in figures if name not in queues)):  # runtime processes have a queue each
        queue, g, row = queues.get(name), figures.get(name), [name]
        if queue is None:
            row += ["–"] * 4
        else:
            ready = queue["queued"] - queue["preparing"]
            row += [str(ready), str(queue["preparing"]), str(queue["residents"]), ms(queue["queued_seconds"])]
        if g is None:
            row += [""] * 7
        else:
            ratio = "–" if g.error is None else f"{g.error:.2f}"
            lost = ", ".join(f"{count} {kind}" for kind, count in g.outcomes.items() if kind != "ok")
            row += [f"{g.rate:.1f}", f"{min(1.0, g.busy):.0%}", ms(g.p50), ms(g.p95), ms(g.p99), ratio, lost]
        rows.append(row)
    columns = (
        "group", "waiting", "prepared", "resident", "work", "answers/s", "busy", "p50", "p95", "p99", "pred/meas",
        "without a result",
    )  # fmt: skip
    spared = "prepared", "resident", "p95", "pred/meas", "work", "p50", "without a result", "busy"
    return fitting(columns, rows, width, {"group", "without a result"}, spared)


def feeds_table(feeds: Mapping[str, Any], width: int, shown: Callable[[str], str | Text] = str) -> Table:
    """The first twenty feeds. shown: draws a name."""
    rows: list[list[str | Text]] = []
    for name, feed in list(feeds.items())[:ROWS]:
        drops = ", ".join(f"{count} {reason}" for reason, count in feed["drops"].items())
        figures = f"{feed['fps']:.1f}", ms(feed["age"]), ms(feed["p95"]), str(feed["frames"])
        rows.append([shown(name), state_text(feed["state"]), *figures, str(feed["restarts"]), drops, feed["error"]])
    if len(feeds) > ROWS:
        rows.append([more(len(feeds) - ROWS), *[""] * 8])
    columns = "feed", "state", "answers/s", "last, ago", "p95", "frames", "reconnects", "dropped", "why"
    spared = "why", "reconnects", "frames", "dropped", "last, ago", "p95"
    return fitting(columns, rows, width, {"feed", "state", "dropped", "why"}, spared)


def policies_table(policies: Mapping[str, Any], width: int) -> Table:
    """Every slot of every policy, with its version and the verdict of its breaker."""
    rows: list[list[str | Text]] = []
    for name, policy in policies.items():
        for slot, state in policy["slots"].items():
            why = policy["breaker"]["slots"].get(slot, {}).get("why") or ""
            version = str(policy["versions"].get(slot, ""))
            rows.append([name, state_text(policy["state"]), slot, state_text(state["verdict"]), version, why])
    columns = "policy", "state", "slot", "breaker", "version", "why"
    return fitting(columns, rows, width, set(columns), ("why", "version", "state"))


def processes_table(processes: Sequence[Mapping[str, Any]], width: int) -> Table:
    """The processes of a server."""
    rows: list[list[str | Text]] = []
    for p in processes:
        memory = "–" if p["memory"] is None else f"{p['memory'] / 1e6:.0f} MB"
        counts = ("–" if p[what] is None else str(p[what]) for what in ("running", "waiting"))
        pid = "–" if p["pid"] is None else str(p["pid"])
        rows.append([p["name"], state_text(p["state"]), pid, str(p["restarts"]), memory, *counts, p["why"]])
    columns = "process", "state", "pid", "restarts", "memory", "running", "waiting", "why"
    return fitting(columns, rows, width, {"process", "state", "why"}, ("why", "pid", "restarts", "memory"))


def outputs_table(outputs: Mapping[str, Any], width: int) -> Table:
    """The outputs of feeds, and how many results they sent."""
    rows: list[list[str | Text]] = []
    for name, output in outputs.items():
        drops = ", ".join(f"{count} {reason}" for reason, count in output["drops"].items() if count)
        figures = str(output["sent"]), str(output["waiting"]), drops
        rows.append([name, state_text(output["state"]), *figures, output["where"], output["error"] or ""])
    columns = "output", "state", "sent", "waiting", "dropped", "receiver", "why"
    return fitting(columns, rows, width, {"output", "state", "dropped", "receiver", "why"}, ("why", "receiver"))


def fitting(
    columns: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int, texts: set[str], spared: Iterable[str]
) -> Table:
    """A table with one line a row. texts: columns that are not figures. spared: columns to leave out, in this order,
    until the others fit; a long `why` is cut. A column without a value in any row is left out, too. Texts of
    cameras and models can neither break a row nor control the terminal."""
    rows = [[plain(cell, TEXT) if isinstance(cell, str) else cell for cell in row] for row in rows]
    wide = {
        column: max(cell_len(str(cell)) for cell in (column, *cells)) + 2
        for column, *cells in zip(columns, *rows, strict=True)
        if not rows or any(str(cell) for cell in cells)
    }
    left = width + 2 - sum(cells for column, cells in wide.items() if column != "why")
    if LEAST <= left < wide.get("why", 0):
        wide["why"] = left
    for column in spared:
        if sum(wide.values()) - 2 > width:
            wide.pop(column, None)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in wide:
        justify: Literal["left", "right"] = "left" if column in texts else "right"
        table.add_column(column, justify=justify, no_wrap=True, max_width=wide[column] - 2)
    for row in rows:
        table.add_row(*(cell for column, cell in zip(columns, row, strict=True) if column in wide))
    return table


def more(count: int) -> Text:
    """The first cell below a table that was cut."""
    return Text(f"and {count} more", "dim")


def ms(seconds: float | None) -> str:
    """A time as text."""
    if seconds is None:
        return "–"
    found = seconds * 1e3
    if found >= 1e4:
        return f"{found / 1e3:.1f} s"
    return f"{found:.0f} ms" if found >= 100 else f"{found:.1f} ms"
