"""Load on one or two servers, in a process of its own: `python -m reflex_runtime.bench.load`.

A job as JSON on standard input; on standard output a line of JSON for each step of progress, the result as the last.
All robots run on one event loop. Every request has the time at which it was to be sent; its latency counts from there,
also where it had to wait for its robot's last answer (so a stall of the server is not omitted).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from reflex_runtime.bench.caller import Frames, WireCaller
from reflex_runtime.bench.callers import CALLERS
from reflex_runtime.bench.expected import Observed, read_observation
from reflex_runtime.bench.probe import WireProbe, advice, at, meet
from reflex_runtime.bench.streams import Streams
from reflex_runtime.bench.target import HTTP, ServerLook, Target, look
from reflex_runtime.client.errors import ClientError, Unreachable
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.request import Request
from reflex_runtime.run.process import loop_factory
from reflex_runtime.sim.workload import (
    Arrival,
    Arrivals,
    Bursty,
    Callers,
    Every,
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
    """A server and the wire to use."""

    url: str
    wire: str


class LoadJob(msgspec.Struct, frozen=True):
    """A run. Times in seconds.

    loop: `closed` (a robot asks `think` after its answer), `paced` (`rate` times a second each), or open at `rate` in
    all, or at the times `arrivals` of a recording. deadline: 0.0 for none.
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
    none. lags: by how much the generator's own loop was late. cpu: the share of a core that the generator took.
    """

    side: int
    at: float
    seconds: float
    samples: list[Sample]
    answered: int
    server: dict[str, float]
    lags: list[float]
    cpu: float


class LoadLine(msgspec.Struct, omit_defaults=True):
    """A line of output: progress, the result, or the error."""

    told: str = ""
    rounds: list[LoadRound] | None = None
    error: str = ""


class _Side:
    """A server of the job, and the request that it has answered once."""

    def __init__(self, job: LoadJob, side: BenchSide) -> None:
        self.target = self.asked = Target.of(side.url, job.key, job.timeout)
        self.kind = CALLERS[side.wire]
        self.name = f"{side.url} {side.wire}"
        self._deadline_ms = job.deadline * 1e3
        self.frame = b""

    async def meet(self, own: Observed | None) -> None:
        """Find an observation that the server answers; ReflexError if there is none."""
        caller, seen = self.kind(self.asked), ServerLook()
        try:
            seen = await look(self.target)
            self.asked = at(self.target, self.kind, seen)
            caller = self.kind(self.asked)
            await caller.connect()
            observed = await meet(caller, seen, own, WireProbe(self.name))
            self.frame = caller.frame(observed, self._deadline_ms)
        except ClientError as error:
            raise ReflexError(f"{self.name}: {error}; {advice(error, seen, self.target.key)}") from None
        finally:
            await caller.close()

    async def counters(self) -> dict[str, float]:
        """The batch counters of its /metrics; empty without them."""
        if self.target.scheme not in HTTP:
            return {}
        streams = Streams(self.target.address)
        try:
            reply = await streams.exchange(self.target.send("GET", "/metrics", "text/plain"))
            return _counted(reply.body.decode()) if reply.status == 200 else {}
        except (ClientError, ValueError):
            return {}
        finally:
            await streams.close()


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
        self._frames = Frames(side.frame)
        self._end = job.warmup + job.seconds
        self._start = 0.0
        self._samples: list[Sample] = []
        self._answered = 0
        self._lags: list[float] = []

    async def play(self, index: int, began: float) -> LoadRound:
        """Connect all robots, run them, and wait for outstanding requests."""
        callers = [self._side.kind(self._side.asked) for _ in range(self._job.robots)]
        try:
            await self._connect(callers)
            self._start, cpu = time.perf_counter(), time.process_time()
            at = self._start - began
            beside = [asyncio.create_task(work) for work in (self._watch(), self._report(index))]
            counting = asyncio.create_task(self._count())
            robots = zip(callers, streams(self._job, self._number), strict=True)
            await asyncio.gather(*(self._robot(caller, stream) for caller, stream in robots))
            spent = (time.process_time() - cpu) / (time.perf_counter() - self._start)
            server = await counting
            for task in beside:
                task.cancel()
        finally:
            await asyncio.gather(*(caller.close() for caller in callers))
        return LoadRound(index, at, self._job.seconds, self._samples, self._answered, server, self._lags, spent)

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
            answer = await caller.ask(self._frames.next())
        except Unreachable as error:
            await asyncio.sleep(_PAUSE)
            return error.code, 0
        except ClientError as error:
            return error.code, 0
        return OK, answer.batch

    async def _count(self) -> dict[str, float]:
        """The change of the server's counters during the measured part."""
        await asyncio.sleep(max(0.0, self._job.warmup - self._now()))
        before = await self._side.counters()
        await asyncio.sleep(max(0.0, self._end - self._now()))
        after = await self._side.counters()
        return {name: value - before.get(name, 0.0) for name, value in after.items()}

    async def _watch(self) -> None:
        """Measure this process: how late timers fire, beyond their resolution of 1 ms."""
        while True:
            due = self._now() + _TICK
            await asyncio.sleep(_TICK)
            if self._job.warmup <= due < self._end:
                self._lags.append(max(0.0, self._now() - due - 0.001))

    async def _report(self, index: int) -> None:
        while True:
            await asyncio.sleep(_TOLD)
            ok = [s.done - s.due for s in self._samples if s.kind == OK]
            mean = f", mean {1e3 * sum(ok) / len(ok):.0f} ms" if ok else ""
            failed = len(self._samples) - len(ok)
            self._tell(
                f"round {self._number + 1} of {self._job.rounds}, {self._side.name}: {len(ok)} answers{mean}"
                + (f", {failed} errors" if failed else "")
            )


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


def main() -> int:
    """Read the job from standard input, run it, write lines to standard output."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadJob)

    def write(line: LoadLine) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            rounds = runner.run(play(job, lambda told: write(LoadLine(told=told))))
    except ReflexError as error:
        write(LoadLine(error=error.message))
        return 1
    write(LoadLine(rounds=rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
