"""The load generator: load on one or two servers.

All robots run on one event loop. Every request has the time at which it was to be sent; its latency counts from there,
also where it had to wait for its robot's last answer (so a stall of the server is not omitted). What is sent is made
before: the generator shares its machine with the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Final, Literal

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.load.wires.caller import Frames, WireCaller
from bench.load.wires.connection import Connection, reply_of, request
from bench.load.wires.expected import Observed
from bench.load.wires.http import MadeCaller
from bench.load.wires.meet import CALLERS, meet
from bench.load.wires.target import Target
from bench.sim.loads import Every
from reflex_runtime.cli.probe import ServerLook, advice, look, read_observation
from reflex_runtime.client.errors import ClientError, Unreachable
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.request import Request
from reflex_runtime.sim.workload import (
    Arrival,
    Arrivals,
    Bursty,
    Callers,
    Fixed,
    Open,
    Poisson,
    RecordedArrivals,
    RequestStream,
)

OK: Final = "ok"
UNSENT: Final = "not_sent"  # its robot was still busy `timeout` after the end
_TICK: Final = 0.010  # seconds between two measurements of the loop's own lag
_PAUSE: Final = 0.1  # seconds of pause after a failed connection
_TOLD: Final = 0.5  # seconds between two lines of progress

Loop = Literal["closed", "paced", "constant", "poisson", "bursts", "replay"]


class BenchSide(msgspec.Struct, frozen=True):
    """A server and the wire to use. made: whole requests to send in turn, of HTTP or (wire "openpi") frames; by default
    what the server expects is found out."""

    url: str
    wire: str
    made: list[bytes] = []


class LoadJob(msgspec.Struct, frozen=True):
    """A run. Times in seconds.

    loop: `closed` (a robot asks `think` after its answer), `paced` (`rate` times a second each), or open at `rate` in
    all, or at the times `arrivals` of a recording. deadline: 0.0 for none. beside: path that is asked every 10 ms.
    pids: processes whose CPU time is counted. pinned: the generator keeps to the cores that are not the server's.
    """

    sides: list[BenchSide]
    loop: Loop
    robots: int
    rounds: int
    seconds: float
    warmup: float
    rate: float = 0.0
    think: float = 0.0
    deadline: float = 0.0
    timeout: float = 10.0
    seed: int = 0
    key: str = ""
    observation: str = ""
    arrivals: list[float] = []
    beside: str = ""
    pids: list[int] = []
    pinned: bool = False


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One request, in seconds from the beginning of its round. kind: `ok`, or the error. batch: requests that shared
    it, 0 where the wire does not say."""

    due: float
    sent: float
    done: float
    kind: str
    batch: int


class LoadRound(msgspec.Struct):
    """A round on one server. at: seconds from the beginning of the run. samples: those due in the measured part.

    answered: how many answers came in the measured part. server: what its counters moved by in it, empty where it has
    none. lags: by how much the generator's own loop was late. cpu: the share of a core that the generator took. spent:
    CPU seconds of `pids` in it, and of the main thread of the first, where an event loop runs. beside: seconds of each
    answer there.
    """

    side: int
    at: float
    seconds: float
    samples: list[Sample]
    answered: int
    server: dict[str, float]
    lags: list[float]
    cpu: float
    spent: tuple[float, float] = (0.0, 0.0)
    beside: list[float] = []


class LoadLine(msgspec.Struct, omit_defaults=True):
    """A line of output: progress, the result, or the error."""

    told: str = ""
    rounds: list[LoadRound] | None = None
    error: str = ""


class _Side:
    """A server of the job, and the requests that it has answered once."""

    def __init__(self, job: LoadJob, side: BenchSide) -> None:
        self.target = self.asked = Target.of(side.url, job.key, job.timeout)
        self.kind: type[WireCaller] = CALLERS[side.wire] if side.wire else MadeCaller
        self.name = f"{side.url} {side.wire}"
        self._deadline_ms = job.deadline * 1e3
        self.frames = [Frames(frame) for frame in side.made]

    async def meet(self, own: Observed | None) -> None:
        """Find an observation that the server answers; ReflexError if there is none."""
        if self.frames:
            return
        caller = self.kind(self.asked)
        try:
            here = self.target.address.scheme in ("http", "https")
            seen = await asyncio.to_thread(look, self.target.address, self.target.key) if here else ServerLook()
            self.asked = self.target.on(self.kind.setting, seen)
            caller = self.kind(self.asked)
            await caller.connect()
            observed = await meet(caller, seen, own)
            self.frames = [Frames(caller.frame(observed, self._deadline_ms))]
        except ClientError as error:
            raise ReflexError(f"{self.name}: {error}; {advice(error)}") from None
        finally:
            await caller.close()

    async def counters(self) -> dict[str, float]:
        """The batch counters of its /metrics; empty without them."""
        address = self.target.address
        if address.scheme not in ("http", "https"):
            return {}
        connection = Connection(self.target)
        try:
            asked = request("GET", f"{address.path}/metrics", self.target.headers("text/plain"))
            reply = reply_of(await connection.exchange(asked))
            return _counted(reply.body.decode()) if reply.status == 200 else {}
        except (ClientError, ValueError):
            return {}
        finally:
            connection.close()


def _counted(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name not in ("reflex_batch_size_per_flush", "reflex_batch_flush"):
            continue
        for sample in family.samples:
            name = {"reflex_batch_size_per_flush_sum": "requests", "reflex_batch_size_per_flush_count": "batches"}.get(
                sample.name
            ) or (f"cause {sample.labels.get('cause', '')}" if sample.name == "reflex_batch_flush_total" else "")
            if name and sample.labels.get("policy_slot") != "shadow":
                found[name] = found.get(name, 0.0) + sample.value
    return found


class _Round:
    """One round on one server."""

    def __init__(self, job: LoadJob, side: _Side, number: int, tell: Callable[[str], None]) -> None:
        self._job, self._side, self._number, self._tell = job, side, number, tell
        self._frames = cycle(side.frames)
        self._end = job.warmup + job.seconds
        self._start = 0.0
        self._samples: list[Sample] = []
        self._answered = 0
        self._lags: list[float] = []
        self._beside: list[float] = []
        self._spent = (0.0, 0.0)

    async def play(self, index: int, began: float) -> LoadRound:
        """Connect all robots, run them, and wait for outstanding requests."""
        callers = [self._side.kind(self._side.asked) for _ in range(self._job.robots)]
        try:
            await self._connect(callers)
            before = None if self._job.warmup else await self._counters()  # no request may come first
            self._start, cpu = time.perf_counter(), time.process_time()
            at = self._start - began
            beside = [asyncio.create_task(work) for work in (self._watch(), self._report(), self._look())]
            counting = asyncio.create_task(self._count(before))
            robots = zip(callers, streams(self._job, self._number), strict=True)
            await asyncio.gather(*(self._robot(caller, stream) for caller, stream in robots))
            spent = (time.process_time() - cpu) / (time.perf_counter() - self._start)
            server = await counting
            for task in beside:
                task.cancel()
        finally:
            await asyncio.gather(*(caller.close() for caller in callers))
        return LoadRound(
            index, at, self._job.seconds, self._samples, self._answered, server, self._lags, spent, self._spent,
            self._beside,
        )  # fmt: skip

    async def _connect(self, callers: Sequence[WireCaller]) -> None:
        try:
            await asyncio.gather(*(caller.connect() for caller in callers))
        except ClientError as error:
            raise ReflexError(f"{self._side.name}: of {len(callers)} connections one was refused: {error}") from None

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _robot(self, caller: WireCaller, stream: RequestStream) -> None:
        done = 0.0
        while (arrival := stream.next(done)) is not None and arrival.at < self._end:
            if (wait := arrival.at - self._now()) > 0.0:
                await asyncio.sleep(wait)
            sent = self._now()
            kind, batch = UNSENT, 0
            if sent < self._end + self._job.timeout:
                kind, batch = await self._asked(caller)
            done = self._now()
            if kind == OK and self._job.warmup <= done < self._end:
                self._answered += 1
            if arrival.at >= self._job.warmup:
                self._samples.append(Sample(arrival.at, sent, done, kind, batch))

    async def _asked(self, caller: WireCaller) -> tuple[str, int]:
        try:
            return OK, await caller.ask(next(self._frames).next())
        except Unreachable as error:
            await asyncio.sleep(_PAUSE)
            return error.code, 0
        except ClientError as error:
            return error.code, 0

    async def _count(self, before: dict[str, float] | None) -> dict[str, float]:
        """The change of the server's counters during the measured part, and what its processes took."""
        await asyncio.sleep(max(0.0, self._job.warmup - self._now()))
        before, cpu = await self._counters() if before is None else before, _cpu(self._job.pids)
        await asyncio.sleep(max(0.0, self._end - self._now()))
        after, then = await self._counters(), _cpu(self._job.pids)
        self._spent = then[0] - cpu[0], then[1] - cpu[1]
        return {name: value - before.get(name, 0.0) for name, value in after.items()}

    async def _counters(self) -> dict[str, float]:
        """None while CPU time is counted: reading /metrics would be a part of it."""
        return {} if self._job.pids else await self._side.counters()

    async def _look(self) -> None:
        """Ask `beside`, each time on the same connection."""
        job, target = self._job, self._side.target
        if not job.beside:
            return
        connection = Connection(target)
        asked = request("GET", job.beside, target.headers())
        while True:
            began = self._now()
            await connection.exchange(asked)
            if job.warmup <= began < self._end:
                self._beside.append(self._now() - began)
            await asyncio.sleep(max(0.0, began + _TICK - self._now()))

    async def _watch(self) -> None:
        """Measure this process: how late timers fire, beyond their resolution of 1 ms."""
        while True:
            due = self._now() + _TICK
            await asyncio.sleep(_TICK)
            if self._job.warmup <= due < self._end:
                self._lags.append(max(0.0, self._now() - due - 0.001))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_TOLD)
            ok = [s.done - s.due for s in self._samples if s.kind == OK]
            mean = f", mean {1e3 * sum(ok) / len(ok):.0f} ms" if ok else ""
            failed = len(self._samples) - len(ok)
            self._tell(
                f"round {self._number + 1} of {self._job.rounds}, {self._side.name}: {len(ok)} answers{mean}"
                + (f", {failed} errors" if failed else "")
            )


def _cpu(pids: Sequence[int]) -> tuple[float, float]:
    """CPU seconds so far of these processes with their threads, and of the first one's main thread; 0 where the system
    does not count so finely."""
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    try:
        with open(f"/proc/{pids[0]}/task/{pids[0]}/schedstat") as file:
            return total, int(file.read().split()[0]) / 1e9
    except (OSError, IndexError, ValueError):
        return total, 0.0


def streams(job: LoadJob, number: int) -> list[RequestStream]:
    """The times at which each robot sends; in an open loop all robots take them from one shared stream."""
    seed, robots = f"{job.seed}/{number}", job.robots
    if job.loop == "closed":
        return list(Callers(robots, Fixed(job.think)).streams(seed))
    if job.loop == "paced":
        every = Open(Every(1.0 / job.rate))
        return [stream for i in range(robots) for stream in every.streams(f"{seed}/{i}")]
    if job.loop == "replay":
        recorded = RecordedArrivals([Arrival(at, Request()) for at in job.arrivals])
        return list(recorded.streams(seed)) * robots
    processes: dict[str, Callable[[], Arrivals]] = {
        "constant": lambda: Every(1.0 / job.rate, phase=0.0),
        "poisson": lambda: Poisson(job.rate),
        "bursts": lambda: Bursty(job.rate),
    }
    return list(Open(processes[job.loop]()).streams(seed)) * robots


async def play(job: LoadJob, tell: Callable[[str], None]) -> list[LoadRound]:
    """All rounds. The order of two servers alternates from round to round."""
    own = read_observation(job.observation) if job.observation else None
    sides = [_Side(job, side) for side in job.sides]
    for side in sides:
        tell(f"asking {side.name} once")
        await side.meet(own)
    began = time.perf_counter()
    found = []
    for number in range(job.rounds):
        order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
        found += [await _Round(job, sides[index], number, tell).play(index, began) for index in order]
    return found
