"""The rate up to which nine of ten requests are answered in time: a figure that does not stand on the cliff.

At a fixed rate near capacity a few percent of CPU decide between nearly all answers in time and nearly none. So this
looks for the rate itself, by halving, for every server in turns. Rates are shares of the raw model's in batches of 32,
measured before each step, because the machine's speed changes. In time is within three times such a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.models import write_export
from bench.report import Row, row, say
from bench.servers import Raw, Server, byhand, reflex, rivals, running

BATCH = 32
IN_TIME = 0.9
LOWEST, HIGHEST, STEPS = 0.3, 1.1, 5  # the last step is 1/40 of the raw rate
SLOW = 5  # times the heavy policy
WINDOW = 3  # milliseconds, of the batcher by hand that has one
REFLEX = "reflex"


def capacity(root: Path, heavy: Path, scale: float) -> list[Row]:
    """For a policy of about 10 ms, and one of about 45."""
    slow = write_export(root / "slow", heavy=True, times=SLOW)
    rows: list[Row] = []
    for name, export in (("policy of about 10 ms", heavy), ("policy of about 45 ms", slow)):
        raw = Raw(export)
        try:
            with running(reflex(export), byhand(export), byhand(export, WINDOW), *rivals(export)) as servers:
                rows += _capacity(f"open loop, {name}", servers, raw, max(2, round(3 * scale)))
        finally:
            raw.stop()
    return rows


class Halving:
    """The largest share at which enough come in time, between two bounds that halve their distance with each step."""

    def __init__(self, low: float = LOWEST, high: float = HIGHEST) -> None:
        self.low, self.high = low, high

    @property
    def share(self) -> float:
        """The share to try next; after the last step, what was found."""
        return (self.low + self.high) / 2.0

    def tried(self, in_time: float) -> None:
        """At that share, this part of the answers came in time."""
        if in_time >= IN_TIME:
            self.low = self.share
        else:
            self.high = self.share


def _capacity(case: str, servers: Sequence[Server], raw: Raw, repeats: int) -> list[Row]:
    found: dict[str, list[float]] = defaultdict(list)
    for i in range(repeats):
        bounds = {server.name: Halving() for server in servers}
        for step in range(STEPS):
            say(f"  {case}: search {i + 1} of {repeats}, step {step + 1} of {STEPS}")
            for server in servers[:: -1 if (i + step) % 2 else 1]:
                bounds[server.name].tried(_in_time(server, raw, bounds[server.name].share, i))
        for name, halving in bounds.items():
            found[name].append(halving.share)
    others = [found[name] for name in found if name not in (REFLEX, "LitServe")]
    ratio = [mine / max(its) for mine, *its in zip(found[REFLEX], *others, strict=True)]
    what = f"rate with {IN_TIME:.0%} in time over the model's alone"
    rows = [row(case, f"{what}, {name}", shares, "") for name, shares in found.items()]
    return [row(case, "that of reflex over the best of by hand and mosec", ratio, "x", least=1.0), *rows]


def _in_time(server: Server, raw: Raw, share: float, seed: int) -> float:
    batch = raw.mean(BATCH, 0.3)
    answered = server.load(
        callers=BATCH, rate=share * BATCH / batch, seconds=max(2.5, 20.0 * batch), warm=3.0 * batch, seed=seed
    )
    in_time = sum(latency <= 3.0 * batch for latency in answered.latencies)
    return in_time / max(1, answered.requests + answered.failed)
