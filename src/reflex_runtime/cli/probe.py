"""`reflex probe`: one observation on every wire of a server, as its clients would send it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflex_runtime.core.errors import ConfigError

if TYPE_CHECKING:
    from reflex_runtime.bench.probe import ServerProbe, WireProbe
    from reflex_runtime.bench.target import ServerLook, Target

WIDE = 140  # columns where the output is no terminal and COLUMNS does not say

_EPILOG = """\
examples:
  reflex probe http://127.0.0.1:8000                      every wire of a server
  reflex probe ws://10.0.0.7:8000 --wire openpi           any server of openpi, not only ours
  reflex probe http://10.0.0.7:8000 --wire openpi --observation seen.npz

Without --observation it sends what the server says it expects, or what LIBERO, DROID, ALOHA and OpenVLA send.
The policy runs once for each wire. docs/measure.md explains the table.

Exit status: 0 when at least one wire answered with actions, 1 when none did, 2 for a wrong command line.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "probe",
        description="Ask a server once on every wire, as the stock clients do: what answers, and what it expects.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="where the server is: http, https, ws, wss, tcp (GR00T) or grpc")
    parser.add_argument("--wire", metavar="NAME", action="append", help="only this one; may be given again")
    parser.add_argument("--api-key", metavar="KEY", help="of the server; also from the environment, REFLEX_API_KEY")
    parser.add_argument(
        "--observation", type=Path, metavar="FILE", help="an .npz file with the names of the wire (needs --wire)"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=10.0, metavar="S",
        help="for each step of each wire (default %(default)g, range 0.1 to 600)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Probe and print; returns the exit status."""
    from reflex_runtime.bench.callers import CALLERS
    from reflex_runtime.bench.expected import read_observation
    from reflex_runtime.bench.probe import advice, probe
    from reflex_runtime.bench.target import ServerLook, Target
    from reflex_runtime.client.errors import NotFound, Unreachable
    from reflex_runtime.settings.declare import one_line, one_of

    if not 0.1 <= args.timeout_s <= 600.0:
        raise ConfigError(f"--timeout-s={args.timeout_s:g}: must be in [0.1, 600] s")
    target = Target.of(args.url, args.api_key or os.environ.get("REFLEX_API_KEY", ""), args.timeout_s)
    for name in args.wire or ():
        if name not in CALLERS:
            raise ConfigError(f"--wire={one_line(name)}: {one_of(name, CALLERS)}")
        if target.scheme not in CALLERS[name].schemes:
            schemes = ", ".join(f"{scheme}://" for scheme in CALLERS[name].schemes)
            raise ConfigError(f"--wire={name}: not at {target.scheme}://; give the URL as {schemes}")
    if args.observation is not None and not args.wire:
        raise ConfigError("--observation needs --wire: its names are those of one wire")
    own = None if args.observation is None else read_observation(args.observation)
    try:
        found = asyncio.run(probe(target, args.wire or (), own))
    except (Unreachable, NotFound) as error:
        if args.json:
            print(
                json.dumps({"url": args.url, "works": False, "error": error.code, "message": error.message}, indent=1)
            )
        else:
            print(f"reflex probe: {error.message}; {advice(error, ServerLook(), target.key)}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        show(found, target)
    return 0 if found.works else 1


def as_json(found: ServerProbe) -> dict[str, Any]:
    """All of it."""
    server = asdict(found.server) if found.server.ours else None
    return {"url": found.url, "works": found.works, "server": server, "wires": [asdict(wire) for wire in found.wires]}


def show(found: ServerProbe, target: Target) -> None:
    """A line on the server, a table of the wires, and below it each error with its wires and what to do."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE, highlight=False)
    console.print(Text(f"{found.url}: {_server(found.server, target)}"))
    table = Table(box=None, pad_edge=False)
    for title in ("wire", "connect", "answer", "actions", "sent", "known from"):
        table.add_column(title, justify="right" if title in ("connect", "answer") else "left", overflow="fold")
    for wire in found.wires:
        table.add_row(*_row(wire))
    console.print(table)
    failed: dict[tuple[str, str], list[str]] = {}
    for wire in found.wires:
        if not wire.works:
            failed.setdefault((f"{wire.error}: {wire.message}", wire.advice), []).append(wire.wire)
    for (error, what), names in failed.items():
        console.print(Text(f"{', '.join(names)}: {error}", "red"))
        console.print(Text(f"  {what}"))


def _server(server: ServerLook, target: Target) -> str:
    """What is known of the server, in a line."""
    if not server.ours:
        return "no server of reflex" if target.scheme.startswith("http") else f"asked over {target.scheme} only"
    name = " ".join(part for part in ("reflex", server.version, server.model) if part)
    locked = "has another key than this one" if target.key else "needs a key: --api-key"
    return f"{name}: {server.state}" + (f", {locked}" if server.locked else "")


def _row(wire: WireProbe) -> list[Any]:
    from rich.text import Text

    name = Text(wire.wire, "green" if wire.works else "red")
    actions = str(wire.actions) if wire.works else Text(wire.error, "red")
    sent = "\n".join(f"{key}: {value}" for key, value in wire.sent.items())
    return [name, _ms(wire.connect_ms), _ms(wire.answer_ms), actions, Text(sent), wire.known]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"
