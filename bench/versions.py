"""What two versions, the recording and the shadow cost those who are served.

Servers are asked in turns, the order turning with every round; a row is the median over the rounds of what the one has
more than the other in the same round. The servers of a case are started anew in the middle of it: two processes of the
same program differ by a percent or two for as long as they live. Beside each there is the same between two servers
that do not differ, which is what can be told apart at all.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.load import STATE, Answered
from bench.report import Row, row, say
from bench.servers import Raw, Server, reflex, running
from reflex_runtime.core.batch import Batch, BatchFinished, BatchScheduled, Cause, RequestAnswered
from reflex_runtime.core.request import AdmittedBatch, Ticket
from reflex_runtime.observe.journal_writer import JournalWriter, Recording
from reflex_runtime.robots import Export, Policy, load_policy
from reflex_runtime.robots.serving.handler import PendingRequest
from reflex_runtime.robots.serving.question import ACT, ActAnswer, Timing
from reflex_runtime.robots.serving.runtime import header_of
from reflex_runtime.robots.versions.breaker import Breaker
from reflex_runtime.robots.versions.rollout import Rollout
from reflex_runtime.robots.versions.slots import Slot, Version
from reflex_runtime.robots.wires.act import decode
from reflex_runtime.settings import ServeConfig

EPISODES = 32
RATE = 2000.0  # requests a second that the recording has to keep up with
PACE = 25.0  # requests a second beside a shadow: the device is a quarter busy, and has gaps
COMPANY = 8  # requests a batch, for what is counted once per batch


def versions(tiny: Path, heavy: Path, scale: float) -> list[Row]:
    """Routing, breaker and recording; recording at a pace; a shadow."""
    return [*_calls(tiny, scale), *_added(tiny, scale), *_recording(tiny, scale), *_shadow(heavy, scale)]


def _rounds(scale: float) -> int:
    return max(4, round(12 * scale))


Start = Callable[[], Server]


def _turns(
    case: str, starts: Sequence[Start], rounds: int, load: Callable[[Server, int], Answered]
) -> Iterator[list[tuple[Server, Answered]]]:
    """Every round: each server and what it answered. They are started anew half-way."""
    for half in (range(rounds // 2), range(rounds // 2, rounds)):
        with running(*(start() for start in starts)) as servers:
            for server in servers:
                load(server, -1)  # not counted: the first requests of a process are its slowest
            for i in half:
                say(f"  {case}: round {i + 1} of {rounds}")
                found: dict[int, Answered] = {}
                places = list(range(len(servers)))
                for k in places[i % len(places) :] + places[: i % len(places)]:
                    answered = load(servers[k], i)
                    if answered.failed or not answered.requests:
                        raise RuntimeError(f"{servers[k].name}: {answered.failed} of {answered.requests} failed")
                    found[k] = answered
                yield [(servers[k], found[k]) for k in places]


def _two(export: Path) -> tuple[str, ...]:
    """Flags for two versions of which a gets everything, so that the batches are those of one."""
    return ("--policy-a", str(export), "--policy-b", str(export), "--split", "100", "--no-rtc")


# -- routing, breaker, recording ---------------------------------------------------------------------------------------


def _added(tiny: Path, scale: float) -> list[Row]:
    case = f"{EPISODES} callers, small policy"
    one: list[float] = []
    again: list[float] = []
    two: list[float] = []
    recorded: list[float] = []
    flags = _two(tiny)
    with tempfile.TemporaryDirectory(prefix="reflex-bench-") as directory:
        starts: list[Start] = [
            lambda: reflex(tiny, name="one slot"),
            lambda: reflex(tiny, name="one slot, again"),
            lambda: reflex(tiny, *flags, name="two slots"),
            lambda: reflex(tiny, *flags, "--record", directory, name="two slots, recorded"),
        ]

        def load(server: Server, i: int) -> Answered:
            return server.load(callers=EPISODES, episodes=EPISODES, seconds=0.9)

        for found in _turns(case, starts, _rounds(scale), load):
            for (_, answered), into in zip(found, (one, again, two, recorded), strict=True):
                into.append(answered.loop / answered.requests * 1e6)
    return [
        row(case, "event loop per request, one slot", one, "us"),
        row(case, "routing, breaker and recording add to that", _less(recorded, one), "us", most=20.0),
        row(case, "of it: recording", _less(recorded, two), "us"),
        row(case, "of it: routing and breaker", _less(two, one), "us"),
        row(case, "one slot against one slot, the same", _less(again, one), "us"),
    ]


def _calls(tiny: Path, scale: float) -> list[Row]:
    """The calls themselves, on this process's main thread: CPU time per request."""
    case = "the calls alone, in process"
    n = max(2000, round(20_000 * scale))
    routed, recorded = [], []
    with tempfile.TemporaryDirectory(prefix="reflex-bench-") as directory:
        bench = _Calls(tiny, Path(directory))
        for _ in range(_rounds(scale)):
            routed.append(_timed(bench.route, n))
            recorded.append(_timed(bench.record, n))
            bench.settle()
        bench.recorder.close(30.0)
        if bench.recorder.dropped:
            raise RuntimeError(f"{bench.recorder.dropped} lines were dropped: {bench.recorder.error}")
    both = [a + b for a, b in zip(routed, recorded, strict=True)]
    return [
        row(case, "routing and breaker", routed, "us"),
        row(case, f"recording, batches of {COMPANY}", recorded, "us"),
        row(case, "both", both, "us", most=20.0),
    ]


def _timed(call: Callable[[int], object], n: int) -> float:
    """Microseconds of CPU a call."""
    began = time.thread_time()
    for i in range(n):
        call(i)
    return (time.thread_time() - began) / n * 1e6


class _Calls:
    """What a server with two slots does for a request beside serving it."""

    def __init__(self, tiny: Path, directory: Path) -> None:
        self.policy: Policy = load_policy(Export.load(tiny), "a")
        config = ServeConfig()
        slots = {"a": Slot("a", config, self.policy, ())}
        self._served: Any = SimpleNamespace(
            slots=slots, policy=self.policy, config=config, served=("a",), group=lambda slot: slot
        )
        self.rollout = Rollout(("a", "b"), Breaker(("a", "b")), 50)
        self.recorder = JournalWriter(Recording(directory), capacity=1_000_000, header=header_of([self._served]))
        self._body = json.dumps(STATE | {"episode_id": "episode-7"}).encode()
        actions = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
        timing = Timing(0.1, 1.0, 1.1, 1.1)
        self._answer = ActAnswer(
            actions, 4, 4, 1.1, 900.0, 1, "monolithic", "", "", "", "r", timing, {}, "off", {"clamped": 0}
        )
        self._ask = self._asked(slots["a"].version)

    def route(self, i: int) -> None:
        """Where a request goes, and what came of it."""
        now = i * 1e-3
        slot = self.rollout.place(f"episode-{i % EPISODES}", "r", now).slot
        if i % COMPANY == 0:
            self.rollout.computed(slot, now)
        self.rollout.answered(slot, "ok", 0.001)

    def record(self, i: int) -> None:
        """A request, and every so often the batch that it ran in."""
        ask, now = self._ask, time.monotonic()
        assert ask.ticket is not None
        detail = ask.record(now, None)
        self.recorder(RequestAnswered(now, "a", "ok", 200, 0.001, ask.ticket, detail))
        if i % COMPANY == 0:
            self._batch.id = i
            self.recorder(BatchScheduled(now, self._batch, 0))
            self.recorder(BatchFinished(now, self._batch, 0.001, False))

    def settle(self) -> None:
        """Wait until the writer has caught up: it shares the interpreter."""
        before = -1
        while self.recorder.recorded != before:
            before = self.recorder.recorded
            time.sleep(0.5)

    def _asked(self, version: Version) -> PendingRequest:
        ask = PendingRequest(ACT, "request", None)
        ask.question = question = decode(self._body, False)
        ask.received, ask.counted = time.monotonic(), self._served
        ask.version = version
        ask.answer = self._answer
        ask.routing = self.rollout.place("episode-7", ask.request_id, 0.0)
        observation = self.policy.prepare(state=question.state_vector(), request_id=ask.request_id)
        ticket = Ticket(self.policy.request(observation), 0, ask.received)
        ticket.admission = AdmittedBatch(1, COMPANY, "timeout", "idle", 0.001)
        ticket.started = ticket.arrived
        ask.ticket = ticket
        company = tuple(Ticket(ticket.request, i, ticket.arrived) for i in range(COMPANY))
        self._batch = Batch(1, "a", "", "", Cause.IDLE, ticket.arrived, 0.0, 0.0, dict.fromkeys(company, 1.0), company)
        return ask


# -- recording at a pace -----------------------------------------------------------------------------------------------


def _recording(tiny: Path, scale: float) -> list[Row]:
    case = f"{RATE:,.0f} requests a second"
    seconds = 2.5
    plain: list[Answered] = []
    again: list[Answered] = []
    recorded: list[Answered] = []
    writer: list[float] = []
    lost: list[float] = []
    rates: list[float] = []
    flags = _two(tiny)
    with tempfile.TemporaryDirectory(prefix="reflex-bench-") as directory:
        starts: list[Start] = [
            lambda: reflex(tiny, *flags, name="not recorded"),
            lambda: reflex(tiny, *flags, name="not recorded, again"),
            lambda: reflex(tiny, *flags, "--record", directory, name="recorded"),
        ]

        def load(server: Server, i: int) -> Answered:
            paced: dict[str, Any] = {"callers": EPISODES, "episodes": EPISODES, "rate": RATE, "seed": i}
            if server.name != "recorded":
                return server.load(seconds=seconds, **paced)
            before, began = _health(server), time.monotonic()
            answered = server.load(seconds=seconds, **paced)
            time.sleep(0.7)  # what was gathered is written
            after = _health(server)
            if i >= 0:
                written = after["recorded"] - before["recorded"]
                writer.append((after["cpu_s"] - before["cpu_s"]) / written * RATE * 100.0)
                lost.append(after["dropped"] + float(after["error"] is not None))
                rates.append(answered.rate)
                say(f"    {written} written in {time.monotonic() - began:.1f} s")
            return answered

        for found in _turns(case, starts, _rounds(scale), load):
            for (_, answered), into in zip(found, (plain, again, recorded), strict=True):
                into.append(answered)
    p50, floor = _ratios(recorded, plain, 0.5), _ratios(again, plain, 0.5)
    p99 = _ratios(recorded, plain, 0.99)
    return [
        row(case, "answered, recorded", rates, "/s"),
        row(case, "lines dropped", lost, "", most=0.0),
        row(case, "writer's thread, of a core", writer, "%", most=15.0),
        row(case, "p50, not recorded", [a.quantile(0.5) * 1e3 for a in plain], "ms"),
        row(case, "p50, recorded over not", p50, "x", most=1.02),
        row(case, "p50, not recorded over not, the same", floor, "x"),
        row(case, "p99, recorded over not", p99, "x"),
        _interval(case, "p99, recorded over not: 95 % interval of the median", p99),
        _interval(case, "p99, not recorded over not: 95 % interval", _ratios(again, plain, 0.99)),
    ]


def _health(server: Server) -> Mapping[str, float]:
    found: Mapping[str, float] = json.loads(server.get("/health"))["recording"]
    return found


# -- a shadow ----------------------------------------------------------------------------------------------------------


def _shadow(heavy: Path, scale: float) -> list[Row]:
    case = f"a shadow of 10 %, {PACE:g} requests a second, policy of about 10 ms"
    alone: list[Answered] = []
    again: list[Answered] = []
    beside: list[Answered] = []
    delays: list[float] = []
    counts: list[float] = []
    raw = Raw(heavy)
    steps = raw.calls(1, 0.5)
    starts: list[Start] = [
        lambda: reflex(heavy, name="alone"),
        lambda: reflex(heavy, name="alone, again"),
        lambda: reflex(heavy, "--shadow-policy", str(heavy), "--shadow-sample", "0.1", name="shadow"),
    ]

    def load(server: Server, i: int) -> Answered:
        if server.name != "shadow" or i < 0:
            return server.load(callers=8, rate=PACE, seconds=4.0 if i >= 0 else 1.0, seed=i)
        before = _shadowed(server)
        answered = server.load(callers=8, rate=PACE, seconds=4.0, seed=i)
        ran, met, waited = (b - a for a, b in zip(before, _shadowed(server), strict=True))
        counts.append(ran / answered.requests * 100.0)
        if met:
            delays.append(waited / met * 1e3)
        return answered

    for found in _turns(case, starts, _rounds(scale), load):
        for (_, answered), into in zip(found, (alone, again, beside), strict=True):
            into.append(answered)
    step = statistics.median([*steps, *raw.calls(1, 0.5)]) * 1e3
    raw.stop()
    added = [(b.quantile(0.5) - a.quantile(0.5)) * 1e3 for a, b in zip(alone, beside, strict=True)]
    tails = _ratios(beside, alone, 0.99)
    rows = [
        row(case, "one shadow step, ONNX Runtime alone", [step], "ms"),
        row(case, "shadow answers, of those served", counts, "%"),
        row(case, "median added delay", added, "ms", most=step),
        row(case, "p50, with a shadow over without", _ratios(beside, alone, 0.5), "x", most=1.02),
        row(case, "p50, without over without, the same", _ratios(again, alone, 0.5), "x"),
        _interval(case, "p99, with a shadow over without: 95 % interval of the median", tails),
    ]
    if delays:
        what = "mean delay of those that came while a shadow step ran"
        rows.append(row(case, what, delays, "ms", most=step))
    return rows


def _shadowed(server: Server) -> tuple[float, float, float]:
    """So far: what the shadow answered, who waited for one of its steps, and how long in all."""
    page = server.get("/metrics").decode()

    def read(name: str, *labels: str) -> float:
        lines = (line for line in page.splitlines() if line.startswith(name + "{") and 'policy_slot="shadow"' in line)
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in labels))

    ran = read("reflex_requests_total", 'outcome="ok"')
    return ran, read("reflex_shadow_delay_seconds_count"), read("reflex_shadow_delay_seconds_sum")


# -- numbers -----------------------------------------------------------------------------------------------------------


def _less(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _ratios(a: Sequence[Answered], b: Sequence[Answered], q: float) -> list[float]:
    return [x.quantile(q) / y.quantile(q) for x, y in zip(a, b, strict=True)]


def _interval(case: str, what: str, rounds: Sequence[float]) -> Row:
    """The median, and in place of the extremes its 95 % interval, by 10,000 draws of the rounds with replacement."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(rounds, k=len(rounds))) for _ in range(10_000))
    return Row(case, what, statistics.median(rounds), medians[250], medians[-251], "x", rounds=list(rounds))
