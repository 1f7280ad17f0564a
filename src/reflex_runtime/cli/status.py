"""`reflex status`: ask a running server how its requests fare, and print it."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reflex_runtime.core.errors import ConfigError, ReflexError

WIDE = 160  # columns where the output is no terminal
PATIENCE = 10.0  # seconds for the answer
MOST = 64 * 2**20  # bytes of it
_STYLES = {"ready": "green", "ok": "green", "starting": "yellow", "restarting": "bold yellow"}

_EPILOG = """\
examples:
  reflex status                                    the server on this machine, port 8000
  reflex status http://10.0.0.7:8000 --api-key KEY
  reflex status --json | jq '.lines[].generate.partitions'

What the columns say is in docs/workers.md. Exit status: 0 when the server is ready, 1 when it is there and is not,
2 when it cannot be asked.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "status",
        help="ask a running server: partitions, tiers, targets, waits, streams, workers",
        description="Ask a running server how its requests fare.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL",
        help="where the server is (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--api-key", metavar="KEY", help="of the server; also from the environment, REFLEX_API_KEY")
    parser.add_argument("--json", action="store_true", help="the answer as it came")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask and print; returns the exit status."""
    told = ask(args.url, args.api_key or os.environ.get("REFLEX_API_KEY", ""))
    if args.json:
        print(json.dumps(told, indent=1))
    else:
        show(told, args.url, Console(width=None if sys.stdout.isatty() else WIDE, highlight=False))
    return 0 if told.get("status") == "ok" else 1


def ask(url: str, key: str = "") -> dict[str, Any]:
    """What the server says at /status, or at /health where it has no such page. Raises ReflexError."""
    parts = urlsplit(url if "//" in url else "//" + url, scheme="http")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"URL={url!r:.200}: must be as http://127.0.0.1:8000")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    for path in ("/status", "/health"):
        connection = kind(parts.hostname, port, timeout=PATIENCE)
        try:
            connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
            response = connection.getresponse()
            status, body = response.status, response.read(MOST)
        except (OSError, http.client.HTTPException) as error:
            raise ReflexError(f"{url}: no answer: {error or type(error).__name__}; is the server running?") from None
        finally:
            connection.close()
        if status == 401:
            raise ConfigError(f"{url}: wants a key: --api-key KEY, or REFLEX_API_KEY in the environment")
        found = _object(body)
        if found is not None and (status == 200 or (path == "/health" and status == 503)):
            return found
    raise ReflexError(f"{url}: answers {status}, and not as a server of reflex does")


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


# -- as tables ---------------------------------------------------------------------------------------------------------


def show(told: Mapping[str, Any], url: str, console: Console) -> None:
    """Print what was told: a line on the server, its processes, and what waits where."""
    name, state = told.get("model") or told.get("model_id") or "", str(told.get("state") or told.get("status"))
    head = Text(f"{name} on {url}: " if name else f"{url}: ").append(state, _STYLES.get(state, "bold red"))
    console.print(head.append(_counts(told)))
    if told.get("error"):
        console.print(Text(str(told["error"]), "red"))
    lines = told.get("lines")
    if not lines:
        _plain(told, console)
        return
    console.print(_workers(lines, told.get("workers", [])))
    console.print(_partitions(lines))


def _counts(told: Mapping[str, Any]) -> str:
    found = [f"{told[what]} {what}" for what in ("running", "waiting") if isinstance(told.get(what), int)]
    return ", " + ", ".join(found) if found else ""


def _plain(told: Mapping[str, Any], console: Console) -> None:
    """A server without runtime processes: what it says of itself, name by name."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in told.items():
        if name not in ("status", "state", "model", "running", "waiting", "error"):
            table.add_row(name, json.dumps(value) if isinstance(value, dict | list) else str(value))
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right")
    return table


def _workers(lines: list[dict[str, Any]], workers: list[dict[str, Any]]) -> Table:
    """One row per runtime process."""
    table = _table(
        "worker", "state", "pid", "up s", "restarts", "streams", "waiting", "requests", "messages", "saved",
        "fallbacks", "aborted", "held off", "KV cache", "last error",
    )  # fmt: skip
    waiting = {worker["name"]: worker["waiting"] for worker in workers}
    for line in lines:
        client, streams, generate, engine = line["client"], line["streams"], line["generate"], line["engine"] or {}
        asked = sum(sum(lane["priority_mix"].values()) for lane in generate["partitions"])
        sent = sum(client["sent"].get(method, 0) for method in ("generate", "batch_generate"))
        held = [model["kv_cache_usage"] for model in engine.get("models", {}).values() if "kv_cache_usage" in model]
        table.add_row(
            line["name"],
            Text(client["state"], _STYLES.get(client["state"], "bold red")),
            str(client["pid"] or "-"),
            f"{client['up_s']:.0f}",
            str(client["restarts"]),
            f"{streams['active']}/{streams['limit']}",
            str(waiting.get(line["name"], generate["pending"])),
            str(asked),
            str(sent),
            f"{100 * (1 - sent / asked):.0f} %" if asked else "-",
            str(sum(generate["fallbacks"].values())),
            str(generate["aborted_requests"]),
            str(generate["backpressure_pauses"]),
            f"{100 * max(held):.0f} %" if held else "-",
            client["last_error"][:60],
        )
    return table


def _partitions(lines: list[dict[str, Any]]) -> Table:
    """One row per partition of each process: what may share a message."""
    table = _table(
        "partition", "worker", "urgent", "default", "background", "target", "last", "mean", "wait p50", "p95 ms",
        "urgent/default/background", "fallbacks",
    )  # fmt: skip
    for line in lines:
        for lane in line["generate"]["partitions"]:
            names = [lane["model_id"], lane["draft_model"], lane["guidance"], "alone" if lane["single"] else ""]
            mix, waits = lane["priority_mix"], [lane[f"queue_wait_{p}_ms"] for p in ("p50", "p95")]
            table.add_row(
                " + ".join(filter(None, names)) or "-",
                line["name"],
                *(str(lane["pending"][tier]) for tier in ("urgent", "default", "background")),
                str(lane["target_size"]),
                str(lane["last_batch"]),
                f"{lane['mean_batch']:.1f}",
                *("-" if wait is None else f"{wait:.2f}" for wait in waits),
                "/".join(str(mix[tier]) for tier in ("urgent", "default", "background")),
                str(sum(lane["fallbacks"].values())),
            )
    return table
