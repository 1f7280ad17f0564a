"""`reflex status`: asks a running server for its queues, waits and processes, and prints them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from reflex_runtime.cli.live_tables import STREAM, feeds_table, groups_table, own_tables, snapshot_of
from reflex_runtime.cli.server_address import ServerAddress, add_server, key_of
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.telemetry.live import LiveSnapshot

WIDE = 120  # columns where the output is no terminal and COLUMNS does not say
ABREAST = 4  # processes beside each other
PARTITIONS = 20  # shown; --json has all
MOST = 16 * 2**20  # bytes of a snapshot
_HEAD = frozenset({"status", "state", "model", "running", "waiting", "error", "policies"})  # told elsewhere
_TABLES = frozenset({"feeds", "coordinators", "outputs", "slots", "verdict", "restarts"})  # in the tables of a snapshot
_STATES = {"open": "given up for a while"}
_STYLES = {"ready": "green", "ok": "green", "starting": "yellow", "restarting": "bold yellow"}

_EPILOG = """\
examples:
  reflex status                                    the server on this machine, port 8000
  reflex status http://10.0.0.7:8000 --api-key KEY
  reflex status --json | jq '.lines[].generate.partitions'

docs/workers.md explains the columns. Exit status: 0 the server is ready, 1 it answers but is not ready, 2 it does not
answer.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "status",
        description="Show a running server's state, queues, waits and processes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server(parser)
    parser.add_argument("--json", action="store_true", help="print the server's JSON answer")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask and print; returns the exit status."""
    told = ask(args.url, key_of(args))
    if args.json:
        print(json.dumps(told, indent=1))
    else:
        show(
            told,
            args.url,
            Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE, highlight=False),
            snapshot_from(args.url, key_of(args)),
        )
    return 0 if told.get("status") == "ok" else 1


def snapshot_from(url: str, key: str = "") -> LiveSnapshot | None:
    """What those who watch the server see now; None where it has no such stream, or room for one more."""
    address = ServerAddress.of(url)
    if address.path:  # of one policy
        return None
    with address.answer(STREAM, key) as response:
        return snapshot_of(response.readline(MOST), url) if response.status == 200 else None


def ask(url: str, key: str = "") -> dict[str, Any]:
    """What the server says at /status, or at /health where it has no such page. Raises ReflexError."""
    address = ServerAddress.of(url)
    for path in ("/status", "/health"):
        status, body = address.get(path, key)
        if status == 401:
            raise address.wrong_key(key)
        found = _object(body)
        if found is not None and "status" in found and (status == 200 or (path == "/health" and status == 503)):
            return found
    only = f"; give the address alone, without {address.path}" if address.path else ""
    raise ReflexError(f"{url}: answers {status}, and not as a server of reflex does{only}")


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


# -- as a table --------------------------------------------------------------------------------------------------------


def show(told: Mapping[str, Any], url: str, console: Console, snapshot: LiveSnapshot | None = None) -> None:
    """Print the server's answer: its state, and the tables that `reflex top` has of it, or else what it says."""
    name, state = told.get("model") or told.get("model_id") or "", str(told.get("state") or told.get("status"))
    head = Text(f"{name} on {url}: " if name else f"{url}: ").append(state, _STYLES.get(state, "bold red"))
    console.print(head.append(_counts(told)))
    error = told.get("error") or (snapshot.server.get("error") if snapshot is not None else "")
    if error:
        console.print(Text(str(error), "red"))
    if snapshot is not None:
        width, server = console.width, snapshot.server
        tables: list[RenderableType] = [groups_table(snapshot, width)]
        if "feeds" in server:
            tables += ["", feeds_table(server["feeds"], width)]
        console.print(*tables, *own_tables(server, width), "", sep="\n")
    lines = told.get("lines")
    if not lines:
        _plain(told, console, _TABLES if snapshot is not None else frozenset())
        return
    for first in range(0, len(lines), ABREAST):
        some = lines[first : first + ABREAST]
        console.print(_abreast(some, told.get("workers", [])))
    for line in lines:
        if line["client"]["last_error"]:
            console.print(Text(f"{line['name']}, last lost: {line['client']['last_error']}", "yellow"))


def _counts(told: Mapping[str, Any]) -> str:
    found = [f"{told[what]} {what}" for what in ("running", "waiting") if isinstance(told.get(what), int)]
    return ", " + ", ".join(found) if found else ""


def _plain(told: Mapping[str, Any], console: Console, but: frozenset[str]) -> None:
    """A server without runtime processes: what it says of itself, name by name. but: names that are left out."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in told.items():
        if name not in _HEAD | but and value is not None:
            shown = json.dumps(value) if isinstance(value, dict | list | bool) else str(value)
            table.add_row(name.replace("_", " "), shown)
    console.print(table)
    if told.get("policies") and not but:
        console.print(_policies(told["policies"]))


def _policies(told: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each of several policies: its state, its slots with what their breaker says, and its source."""
    table = Table(box=None, pad_edge=False)
    for heading in ("policy", "state", "slots", "source"):
        table.add_column(heading, no_wrap=heading != "source")
    for name, policy in told.items():
        slots = ", ".join(f"{slot} {found['verdict']}" for slot, found in policy["slots"].items())
        state = str(policy["state"])
        table.add_row(name, Text(state, _STYLES.get(state, "bold red")), slots, str(policy["export_dir"]))
    return table


def _abreast(lines: list[dict[str, Any]], workers: list[dict[str, Any]]) -> Table:
    """One column per runtime process: how it is, then each of its partitions."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for line in lines:
        table.add_column(line["name"], no_wrap=True)
    waiting = {worker["name"]: worker["waiting"] for worker in workers}
    columns = [_process(line, waiting.get(line["name"], line["generate"]["pending"])) for line in lines]
    for what in columns[0]:
        table.add_row(what, *(column[what] for column in columns))
    lanes = [{_named(lane): lane for lane in line["generate"]["partitions"]} for line in lines]
    for name in list(dict.fromkeys(name for line in lanes for name in line))[:PARTITIONS]:
        table.add_section()
        table.add_row(Text(name, "bold"))
        rows = [_lane(line.get(name)) for line in lanes]
        for what in rows[0]:
            table.add_row(f"  {what}", *(row[what] for row in rows))
    return table


def _process(line: dict[str, Any], waiting: int) -> dict[str, RenderableType]:
    client, streams, generate, engine = line["client"], line["streams"], line["generate"], line["engine"] or {}
    asked = sum(sum(lane["priority_mix"].values()) for lane in generate["partitions"])
    sent = sum(client["sent"].get(method, 0) for method in ("generate", "batch_generate"))
    held = [model["kv_cache_usage"] for model in engine.get("models", {}).values() if "kv_cache_usage" in model]
    state = client["state"]
    return {
        "state": Text(_STATES.get(state, state), _STYLES.get(state, "bold red")),
        "process": str(client["pid"] or "-"),
        "up": f"{client['up_s']:.0f} s",
        "restarts": str(client["restarts"]),
        "streams": f"{streams['active']} of {streams['limit']}",
        "waiting": str(waiting),
        "requests": str(asked),
        "messages": str(sent) + (f", {100 * (1 - sent / asked):.0f} % saved" if asked else ""),
        "taken back": str(generate["aborted_requests"]),
        "refused": str(generate["refused"]),
        "pauses": str(generate["backpressure_pauses"]),
        "KV cache": f"{100 * max(held):.0f} %" if held else "-" if engine else "no answer",
    }


def _named(lane: dict[str, Any]) -> str:
    names = [lane["model_id"], lane["draft_model"], lane["guidance"], "each alone" if lane["single"] else ""]
    return " + ".join(filter(None, names)) or "-"


def _lane(lane: dict[str, Any] | None) -> dict[str, str]:
    tiers = ("urgent", "default", "background")
    names = (
        f"waiting {'/'.join(tiers)}",
        f"sent {'/'.join(tiers)}",
        "target, last, mean",
        "wait p50, p95",
        "fallbacks",
    )
    if lane is None:
        return dict.fromkeys(names, "-")
    waits = [lane[f"queue_wait_{p}_ms"] for p in ("p50", "p95")]
    told = (
        "/".join(str(lane["pending"][tier]) for tier in tiers),
        "/".join(str(lane["priority_mix"][tier]) for tier in tiers),
        f"{lane['target_size']}, {lane['last_batch']}, {lane['mean_batch']:.1f}",
        "-" if None in waits else f"{waits[0]:.2f}, {waits[1]:.2f} ms",
        str(sum(lane["fallbacks"].values())),
    )
    return dict(zip(names, told, strict=True))
