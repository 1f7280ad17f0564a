"""This tree against another checkout of it, and against a loop by hand on bare ASGI, asked in turns.

    python -m bench.against CHECKOUT [--rounds N] [--only pictures small openpi]

Ratios are taken round by round, from servers that ran side by side on the same core.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.load import STATE, Answered
from bench.models import SIDE, picture, write_export
from bench.report import Row, table
from bench.servers import Server, byhand, reflex, running
from bench.serving import figures, over, turns

OURS, THEIRS, HAND = "this tree", "the other", "batcher by hand, 3 ms"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=__doc__)
    parser.add_argument("checkout", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reflex-against-") as root:
        for case in args.only:
            print(table(CASES[case](Path(root), args.checkout, args.rounds)), flush=True)


def _both(export: Path, checkout: Path, ready: dict[str, Any]) -> list[Server]:
    other = {"PYTHONPATH": str(checkout.resolve() / "src")}
    return [reflex(export, name=OURS, ready=ready), reflex(export, name=THEIRS, env=other, ready=ready)]


def pictures(root: Path, checkout: Path, rounds: int) -> list[Row]:
    """A policy of 10 to 14 ms, callers in a closed loop that send a PNG each, default options."""
    export = write_export(root / "seeing", heavy=True, cameras=("image",))
    body = STATE | {"image": picture("PNG", (SIDE, SIDE))}
    rows: list[Row] = []
    with running(*_both(export, checkout, body), byhand(export, 3, ready=body)) as servers:
        for callers in (8, 32, 128):
            seconds, warm = (5.0, 2.5) if callers == 128 else (2.0, 0.9)
            case = f"{callers} callers with a PNG"
            found = turns(case, servers, rounds, callers, seconds, warm=warm, body=body)
            rows += _ratios(case, found, (THEIRS, HAND))
    return rows


def small(root: Path, checkout: Path, rounds: int) -> list[Row]:
    """A model that costs nothing, 32 callers."""
    export = write_export(root / "tiny", heavy=False)
    with running(*_both(export, checkout, dict(STATE))) as servers:
        found = turns("32 callers, no work", servers, rounds, 32, 2.0)
        return _ratios("32 callers, no work", found, (THEIRS,))


def openpi(root: Path, checkout: Path, rounds: int) -> list[Row]:
    """Sixteen robots on openpi's websocket, a raw picture each."""
    export = write_export(root / "seeing-tiny", heavy=False, cameras=("image",))
    ready = STATE | {"image": picture("PNG", (SIDE, SIDE))}
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    array = {b"__ndarray__": True, b"data": pixels.tobytes(), b"dtype": "|u1", b"shape": list(pixels.shape)}
    packed = base64.b64encode(msgspec.msgpack.encode({"image": array, **STATE})).decode()
    with running(*_both(export, checkout, ready)) as servers:
        case = "16 robots on openpi's websocket"
        found = turns(case, servers, rounds, 16, 2.0, path="/", wire="openpi", packed=packed)
        return _ratios(case, found, (THEIRS,))


def _ratios(case: str, found: dict[str, list[Answered]], others: Sequence[str]) -> list[Row]:
    rows = figures(case, OURS, found[OURS])
    for other in others:
        rows += over(case, found[OURS], other, found[other])
    return rows


CASES: dict[str, Callable[[Path, Path, int], list[Row]]] = {"pictures": pictures, "small": small, "openpi": openpi}

if __name__ == "__main__":
    main()
