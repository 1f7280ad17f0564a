"""The whole server against ONNX Runtime alone, a bare ASGI hello, a batcher by hand, mosec and LitServe.

Every case starts its servers once and asks them in turns; a row is the median over the rounds. The rivals answer the
same requests with the same model on the same core. Requests have no pictures, but for the cases named `…-pictures`.
"""

from __future__ import annotations

import contextlib
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.load import STATE, Answered, quantile
from bench.models import SIDE, picture, write_export
from bench.report import Row, row, say
from bench.servers import Raw, Server, byhand, hello, reflex, rivals, running

CALLERS = 32
REFLEX = "reflex"
WINDOW = 3  # milliseconds, of the batcher by hand that has one
BUDGET = ("--max-batch-cost-ms", "400")  # 128 rows fit, as they do with the rivals; the default of 100 ms takes half
FIGURES: dict[str, tuple[str, Callable[[Answered], float]]] = {
    "answers a second": ("/s", lambda a: a.rate),
    "p50": ("ms", lambda a: a.quantile(0.5) * 1e3),
    "p99": ("ms", lambda a: a.quantile(0.99) * 1e3),
    "mean batch": ("", lambda a: a.mean_batch),
    "CPU a request": ("us", lambda a: a.cpu / a.requests * 1e6),
}


def _rounds(scale: float, full: int) -> int:
    return max(3, round(full * scale))


def turns(
    case: str,
    servers: list[Server],
    rounds: int,
    callers: int = CALLERS,
    seconds: float = 1.2,
    may_refuse: bool = False,
    alone: bool = False,
    **job: Any,
) -> dict[str, list[Answered]]:
    """Ask every server in every round; the order turns, so that none always follows the same one.

    may_refuse: whether an error is an answer, as it is where more is asked than a server can do. alone: the others are
    stopped meanwhile.
    """
    found: dict[str, list[Answered]] = defaultdict(list)
    for i in range(rounds):
        say(f"  {case}: round {i + 1} of {rounds}")
        turned = servers[i % len(servers) :] + servers[: i % len(servers)]
        for server in turned[:: -1 if i % 2 else 1]:  # both orders
            for other in servers if alone else ():
                other.hold() if other is not server else other.go_on()
            answered = server.load(callers=callers, seconds=seconds, **job)
            if (answered.failed and not may_refuse) or not answered.requests:
                raise RuntimeError(f"{server.name}: {answered.failed} of {answered.requests} requests failed")
            found[server.name].append(answered)
    return found


def figures(case: str, name: str, answered: Sequence[Answered]) -> list[Row]:
    """What one server did."""
    return [row(case, f"{what}, {name}", list(map(of, answered)), unit) for what, (unit, of) in FIGURES.items()]


def over(
    case: str,
    mine: Sequence[Answered],
    other: str,
    theirs: Sequence[Answered],
    bars: Mapping[str, Mapping[str, float]] | None = None,
) -> list[Row]:
    """Ratios of two servers that were asked in turns, round by round. bars: `least` or `most` of a figure's ratio."""
    rows: list[Row] = []
    for what in ("answers a second", "p99", "CPU a request"):
        of = FIGURES[what][1]
        ratios = [of(a) / of(b) for a, b in zip(mine, theirs, strict=True)]
        rows.append(row(case, f"{what} over {other}", ratios, "x", **(bars or {}).get(what, {})))
    return rows


def small(tiny: Path, scale: float) -> list[Row]:
    """CPU of the server process per request, and the tail, when the model costs nothing."""
    case = f"small requests, {CALLERS} callers"
    with running(reflex(tiny), hello(tiny), byhand(tiny), *rivals(tiny)) as servers:
        found = turns(case, servers, _rounds(scale, 7))

    def cpu(name: str) -> list[float]:
        return [a.cpu / a.requests * 1e6 for a in found[name]]

    times = [mine / bare for mine, bare in zip(cpu(REFLEX), cpu("bare ASGI hello"), strict=True)]
    rows = [row(case, "CPU of reflex over a bare ASGI hello's", times, "x", most=2.2)]
    absolute = row(case, "CPU per request, reflex", cpu(REFLEX), "us", most=45.0)
    absolute.bar += " or the line above"
    absolute.met = absolute.met or rows[0].met
    rows[0].met = absolute.met
    rows.append(absolute)
    rows += [row(case, f"CPU per request, {name}", cpu(name), "us") for name in found if name != REFLEX]
    rows += [row(case, f"answers a second, {name}", [a.rate for a in found[name]], "/s") for name in found]
    tails = [a.quantile(0.99) / a.quantile(0.5) for a in found[REFLEX]]
    rows.append(row(case, "p99 over p50, reflex", tails, "x", most=3.0))
    for name in found:
        rows.append(row(case, f"p50, {name}", [a.quantile(0.5) * 1e3 for a in found[name]], "ms"))
        if name != REFLEX:
            tails = [a.quantile(0.99) / a.quantile(0.5) for a in found[name]]
            rows.append(row(case, f"p99 over p50, {name}", tails, "x"))
    return rows


def alone(heavy: Path, scale: float) -> list[Row]:
    """One caller: what the server adds to the model's own time."""
    case = "one caller, policy of about 10 ms"
    raw = Raw(heavy)
    added: list[float] = []
    by_hand: list[float] = []
    calls: list[float] = []
    ratios: list[float] = []
    with running(reflex(heavy), byhand(heavy)) as servers:
        for i in range(_rounds(scale, 9)):
            say(f"  {case}: round {i + 1}")
            for server, into in zip(servers, (added, by_hand), strict=True):
                before = raw.calls(1, 0.3)
                seen = server.load(callers=1, seconds=0.8).quantile(0.5)
                model = quantile(before + raw.calls(1, 0.3), 0.5)
                into.append((seen - model) * 1e3)
                if server.name == REFLEX:
                    calls.append(model * 1e3)
                    ratios.append(seen / model)
    raw.stop()
    return [
        row(case, "ONNX Runtime call alone, p50", calls, "ms"),
        row(case, "latency less that call, reflex", added, "ms", most=0.5),
        row(case, "latency over that call, reflex", ratios, "x"),
        row(case, "latency less that call, batcher by hand", by_hand, "ms"),
    ]


def closed(heavy: Path, scale: float) -> list[Row]:
    """8, 32 and 128 callers that ask again as soon as they are answered: throughput against the model alone."""
    raw = Raw(heavy)
    rows: list[Row] = []
    ratios: list[float] = []
    try:
        for _ in range(_rounds(scale, 5)):
            single, many = raw.mean(1, 0.3), raw.mean(32, 0.5)
            ratios.append(many / single)
        rows.append(row("policy", "a batch of 32 over a single, ONNX Runtime alone (made to be 4 to 6)", ratios, "x"))
        with running(reflex(heavy, *BUDGET), byhand(heavy), *rivals(heavy)) as servers:
            for callers in (8, 32, 128):
                rows += _closed(f"closed loop, {callers} callers", servers, raw, callers, scale)
    finally:
        raw.stop()
    return rows


def _closed(case: str, servers: list[Server], raw: Raw, callers: int, scale: float) -> list[Row]:
    share: dict[str, list[float]] = defaultdict(list)
    mean: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    rounds = _rounds(scale, 5)
    for i in range(rounds):
        say(f"  {case}: round {i + 1} of {rounds}")
        for server in servers[i % len(servers) :] + servers[: i % len(servers)]:
            answered = server.load(callers=callers, seconds=1.5, warm=0.6)
            size = max(1, round(answered.mean_batch))
            share[server.name].append(answered.rate * raw.mean(size, 0.4) / size)
            mean[server.name].append(answered.mean_batch)
            rates[server.name].append(answered.rate)
    rows = [row(case, "share of ONNX Runtime at the batch size reached, reflex", share[REFLEX], "", least=0.90)]
    split = {8: 6.0, 32: 24.0}.get(callers)  # three quarters: alternating halves would be 4 and 16
    rows.append(row(case, "mean batch, reflex", mean[REFLEX], "", least=split))
    for name in share:
        if name != REFLEX:
            rows.append(row(case, f"share of ONNX Runtime, {name}", share[name], ""))
            rows.append(row(case, f"mean batch, {name}", mean[name], ""))
            gain = [mine / its for mine, its in zip(rates[REFLEX], rates[name], strict=True)]
            rows.append(row(case, f"answers a second of reflex over those of {name}", gain, "x"))
    return rows


def closed_pictures(root: Path, scale: float, callers: Sequence[int] = (8, 32, 128)) -> list[Row]:
    """The same loop with a picture in each request, on the path a user takes: default options, decoding included."""
    rows: list[Row] = []
    with _seeing(root) as servers:
        for form, body in _bodies():
            for n in callers:
                case = f"closed loop, {n} callers, {form} of 224 x 224"
                seconds, warm = (5.0, 2.5) if n > CALLERS else (1.5, 0.9)  # of many callers a batch takes half a second
                found = turns(case, servers, _rounds(scale, 5), n, seconds, warm=warm, body=body)
                rows += _against_the_best(case, found, n)
    return rows


@contextlib.contextmanager
def _seeing(root: Path) -> Iterator[list[Server]]:
    """Servers of the heavy policy with a camera: reflex, the hand loops without and with a window, the others."""
    export = write_export(root / "heavy-seeing", heavy=True, cameras=("image",))
    ready = next(_bodies())[1]
    started = (reflex(export, ready=ready), byhand(export, ready=ready), byhand(export, WINDOW, ready=ready))
    with running(*started, *rivals(export, ready=ready)) as servers:
        yield servers


def _bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    for form in ("PNG", "JPEG"):
        yield form, STATE | {"image": picture(form, (SIDE, SIDE))}


def _against_the_best(case: str, found: dict[str, list[Answered]], callers: int) -> list[Row]:
    """Rates and tails of every server, and reflex's over the best of the others but LitServe, round by round."""
    others = [found[name] for name in found if name not in (REFLEX, "LitServe")]
    whole = {8: 7.5, 32: 28.0}.get(callers)
    rows = [row(case, "mean batch, reflex", [a.mean_batch for a in found[REFLEX]], "", least=whole)]
    gain = [mine.rate / max(a.rate for a in its) for mine, *its in zip(found[REFLEX], *others, strict=True)]
    rows.append(row(case, "answers a second of reflex over the best of by hand and mosec", gain, "x", least=1.0))
    tails = [
        mine.quantile(0.99) / min(a.quantile(0.99) for a in its)
        for mine, *its in zip(found[REFLEX], *others, strict=True)
    ]
    rows.append(row(case, "p99 of reflex over the least of theirs", tails, "x", most=1.15 if callers == 128 else None))
    for name, answered in found.items():
        rows.append(row(case, f"answers a second, {name}", [a.rate for a in answered], "/s"))
        rows.append(row(case, f"p99, {name}", [a.quantile(0.99) * 1e3 for a in answered], "ms"))
        if name != REFLEX:
            rows.append(row(case, f"mean batch, {name}", [a.mean_batch for a in answered], ""))
    return rows


def arriving_pictures(root: Path, heavy: Path, scale: float) -> list[Row]:
    """Requests that come by themselves at 90 % of what the model alone gets through in batches of 32, without pictures
    and with them: the share answered within three times such a batch, by every server."""
    raw = Raw(heavy)
    rows: list[Row] = []
    try:
        with running(reflex(heavy), byhand(heavy), byhand(heavy, WINDOW), *rivals(heavy)) as servers:
            rows += _in_time("open loop at 90 %", servers, raw, scale, {})
        with _seeing(root) as servers:
            for form, body in _bodies():
                rows += _in_time(f"open loop at 90 %, {form} of 224 x 224", servers, raw, scale, {"body": body})
    finally:
        raw.stop()
    return rows


def _in_time(case: str, servers: list[Server], raw: Raw, scale: float, job: dict[str, Any]) -> list[Row]:
    share: dict[str, list[float]] = defaultdict(list)
    for i in range(_rounds(scale, 5)):
        batch = raw.mean(CALLERS, 0.5)
        asked = job | {"rate": 0.9 * CALLERS / batch, "seed": i}
        found = turns(f"{case}, part {i + 1}", servers[:: -1 if i % 2 else 1], 1, CALLERS, 3.0, True, **asked)
        for name, (answered,) in found.items():
            in_time = sum(latency <= 3.0 * batch for latency in answered.latencies)
            share[name].append(in_time / (answered.requests + answered.failed))
    best = [max(of) for of in zip(*(share[n] for n in share if n not in (REFLEX, "LitServe")), strict=True)]
    behind = [mine - its for mine, its in zip(share[REFLEX], best, strict=True)]
    rows = [row(case, "within three batch times: reflex less the best of by hand and mosec", behind, "", least=0.0)]
    return rows + [row(case, f"within three batch times, {name}", share[name], "") for name in share]


def arriving(heavy: Path, scale: float) -> list[Row]:
    """Requests that come by themselves at 70 % of what the closed loop got through; and /health beside a full load."""
    case = "open loop at 70 %"
    raw = Raw(heavy)
    tails: list[float] = []
    sizes: list[float] = []
    probes: list[float] = []
    floors: list[float] = []
    with running(reflex(heavy, *BUDGET)) as (server,):
        rounds = _rounds(scale, 5)
        single, many = raw.mean(1, 0.5), raw.mean(32, 1.0)
        marginal = (many - single) / 31
        for i in range(rounds):
            say(f"  {case}: round {i + 1} of {rounds}")
            full = server.load(callers=CALLERS, seconds=1.5, warm=0.6, probe="/health")
            probes.append(quantile(full.probes, 0.99) * 1e3)
            answered = server.load(callers=2 * CALLERS, rate=0.7 * full.rate, seconds=3.0, warm=0.6, seed=i)
            size = max(1, round(sum(n * count for n, count in answered.sizes.items()) / answered.requests))
            tails.append(answered.quantile(0.99) / raw.mean(size, 0.5))
            sizes.append(size)
            floors.append(_perfect(single - marginal, marginal, 0.7 * full.rate, i))
    raw.stop()
    return [
        row(case, "p99 over the time of the batch size reached, reflex", tails, "x", most=2.5),
        row(case, "the same for a perfect server of that model, simulated: no overhead, no noise", floors, "x"),
        row(case, "batch size a request finds itself in, mean", sizes, ""),
        row(f"/health, {CALLERS} callers", "p99 while batches run", probes, "ms", most=5.0),
    ]


def _perfect(fixed: float, marginal: float, rate: float, seed: int, count: int = 20_000) -> float:
    """p99 over the time of the batch size reached, were every batch sent at once and cost what the model costs."""
    rng = random.Random(seed)
    arrivals = list(accumulate(rng.expovariate(rate) for _ in range(count)))
    latencies: list[float] = []
    sizes: list[int] = []
    now, begun = 0.0, 0
    while begun < count:
        now = max(now, arrivals[begun])
        end = bisect_right(arrivals, now, begun)
        now += fixed + marginal * (end - begun)
        latencies += [now - at for at in arrivals[begun:end]]
        sizes += [end - begun] * (end - begun)
        begun = end
    return quantile(latencies, 0.99) / (fixed + marginal * round(sum(sizes) / count))
