"""What `--default-tiers` does to callers who stream, to those who do not, and to a batch of prompts: virtual time.

A model of 42 million parameters on two cores by its step times, 64 places. Every caller but the batch asks for 60
tokens behind 100.
"""

from __future__ import annotations

import math
import random

from bench.gaps import MODELS, Arrival, play
from bench.report import Row, row, say
from reflex_runtime.core.request import Priority
from reflex_runtime.core.statistics import percentile
from reflex_runtime.core.token_budget import TimedTokens

UNTIL, LAST = 120.0, 20.0  # seconds in all; of those who come in the last ones the first token is not waited for
LOADS = {"a batch of 2,000 prompts": (2.0, 0.5, 2000), "40 streams a second": (40.0, 1.0, 0)}


def tiers(scale: float) -> list[Row]:
    """Rows of each load, without tiers and with them."""
    rows = []
    for what, (streams, whole, prompts) in LOADS.items():
        for on in (False, True):
            way = "by kind" if on else "all alike"
            say(f"  {what}, {way}")
            rows += _run(f"{what}, {way}", streams, whole, prompts, on, UNTIL * max(scale, 0.3))
    return rows


def _run(what: str, streams: float, whole: float, prompts: int, on: bool, until: float) -> list[Row]:
    chance = random.Random(3)
    todo = [
        *_callers("stream", streams, Priority.URGENT if on else Priority.DEFAULT, until, chance),
        *_callers("whole", whole, Priority.DEFAULT, until, chance),
    ]
    of_batch = Priority.BACKGROUND if on else Priority.DEFAULT
    todo += [Arrival(5.0, f"batch {i}", 200, 200, "batch", of_batch) for i in range(prompts)]
    todo.sort()
    tokens, now = play(todo, MODELS["42 M"][0], 2048, TimedTokens, chance, until)
    rows = [row("tiers", f"{what}: tokens/s", [sum(map(len, tokens.values())) / now], "/s")]
    for kind in ("stream", "whole"):
        came = {each.name: each.at for each in todo if each.name.startswith(kind) and each.at < until - LAST}
        waited = sorted(tokens[name][0] - at if tokens[name] else math.inf for name, at in came.items())
        first = f"{what}: first token of {kind}"
        rows += [row("tiers", f"{first} p{100 * part:g}", [percentile(waited, part)], "s") for part in (0.5, 0.99)]
    return rows


def _callers(kind: str, rate: float, priority: Priority, until: float, chance: random.Random) -> list[Arrival]:
    found, at = list[Arrival](), chance.expovariate(rate)
    while at < until:
        name = f"{kind} {len(found)}"
        found.append(Arrival(at, name, 100, 60, name, priority))
        at += chance.expovariate(rate)
    return found
