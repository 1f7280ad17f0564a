"""The way to a runtime process: what the generate batcher saves and what it costs, and two processes against one.

The first half is asked in this process: it is the front, on the server's loop, with a real runtime process behind a
real connection and a model that costs nothing, so that what is measured is the way. Waits and messages are counted
where they leave, beside the batcher's own figures: from the call of `enqueue` to after the write.

Closed-loop callers (the case `callers`) ask over HTTP, from a process of their own (`bench.callers`): the bundled model
behind `reflex serve scribe --workers 1`, and a model whose steps take 8 ms; each once with the batcher and once with
every request by itself, in turns.

The last part runs `reflex serve` with and without `--workers 1`, and the clients in a process of their own. Nothing
is pinned to a core: a front, a runtime process and clients share two cores, and where each of them runs best depends on
what the others do. Both sides get `--threads 1`, so that a step leaves a core to whoever brings its tokens away.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import math
import random
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench import callers, streams
from bench.apps.runtime_process import STEP_MS
from bench.llm import VOCAB, write_model
from bench.load import quantile
from bench.report import Row, row, say
from bench.servers import Server, running
from bench.streams import Job, Streamed
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.demo import model_directory
from reflex_runtime.ipc.client import RuntimeClient
from reflex_runtime.ipc.generate_batcher import OFF, GenerateBatcher, GenerateBatcherConfig
from reflex_runtime.ipc.messages import LOAD, GenerateParams
from reflex_runtime.ipc.spawn import spawned
from reflex_runtime.ipc.streams import StreamRegistry
from reflex_runtime.run.process import COLLECTIONS, loop_factory

CASE = "workers"
CONCURRENT = (1, 2, 4, 8, 10, 16, 32, 64)
BARRED = (10, 16, 32, 64)  # callers, of which nine messages in ten are to be saved
CLOSED_LOOP = (8, 16, 32)  # callers over HTTP
LENGTHS = {"16 tokens": (16, 16), "4 to 40 tokens": (4, 40)}  # of their answers
PAUSE = 1.5  # steps from a request to its first token, in the mean
DEVICE_MS, SLOW_DEVICE_MS = 2.0, 8.0  # that a step takes where others are being served beside
STREAMS = 32
THREADS = ("--threads", "1")
LARGE = 2 * 2**20  # characters


def workers(root: Path, scale: float) -> list[Row]:
    """Every row about runtime processes."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        rows = runner.run(_batcher(scale))
    scribe = model_directory("scribe")
    rows += _two_against_one(scribe, "3.3 M", 512, scale)
    rows += _two_against_one(_larger(root / "llama-workers"), "40 M", 128, scale)
    return rows + _killed(scribe, scale)


# -- a front in this process -------------------------------------------------------------------------------------------


class Counted:
    """The client as the batcher sees it, with a count of messages and the time at which each request was written."""

    def __init__(self, client: RuntimeClient) -> None:
        self._client = client
        self.messages = 0
        self.written: dict[str, float] = {}
        self.notify, self.unavailable = client.notify, client.unavailable
        self._saying: list[str] = []

    @property
    def capabilities(self) -> frozenset[str]:
        return self._client.capabilities

    @property
    def ready(self) -> bool:
        return self._client.ready

    def call(self, method: str, params: Any) -> asyncio.Future[Any]:
        answer = self._client.call(method, params)
        told = params["requests"] if isinstance(params, dict) else [params]
        self.messages += 1
        self._saying += [one.stream_id for one in told]
        asyncio.get_running_loop().call_soon(self._left)  # behind the write
        return answer

    def flush(self) -> None:
        self._client.flush()
        self._left()

    def _left(self) -> None:
        self.written |= dict.fromkeys(self._saying, time.perf_counter())
        self._saying.clear()


class Front:
    """A batcher and the runtime process behind it. waits: seconds from `enqueue` to the write, of all requests; urgent:
    of the urgent ones. firsts: to the first token."""

    def __init__(self, client: RuntimeClient, registry: StreamRegistry, config: GenerateBatcherConfig) -> None:
        self.client, self._registry = client, registry
        self.counted = Counted(client)
        self.batcher = GenerateBatcher(self.counted, registry, config)
        self.waits: list[float] = []
        self.urgent: list[float] = []
        self.firsts: list[float] = []

    async def ask(self, max_tokens: int = 1, priority: str = "default") -> None:
        """One request, to its end."""
        handle = self._registry.register()
        params = GenerateParams(
            stream_id=handle.id, model_id="toy", prompt_token_ids=[1, 2, 3], temperature=0, max_tokens=max_tokens
        )
        asked = time.perf_counter()
        await self.batcher.enqueue(params, priority)
        await handle.read()
        self.firsts.append(time.perf_counter() - asked)
        while await handle.read():
            pass
        wait = self.counted.written.pop(handle.id) - asked
        (self.urgent if priority == "urgent" else self.waits).append(wait)

    @property
    def sent(self) -> int:
        """Messages that ask for streams, as the client counts them."""
        sent = self.client.stats()["sent"]
        return int(sent.get("generate", 0) + sent.get("batch_generate", 0))

    def forget(self) -> None:
        """What was measured so far was practice."""
        for times in (self.waits, self.urgent, self.firsts):
            times.clear()


@asynccontextmanager
async def _front(step_ms: float = 0.0, **config: Any) -> AsyncIterator[Front]:
    settings = GenerateBatcherConfig(**config)
    registry = StreamRegistry(settings.stream_limit)
    command = [sys.executable, "-m", "bench.apps.runtime_process"]
    client = RuntimeClient(spawned(command, env={STEP_MS: str(step_ms)}), on_note=registry.note, on_lost=registry.lost)
    await client.start()
    front = Front(client, registry, settings)
    try:
        await client.request(LOAD, {"model_id": "toy", "path": "toy"})
        yield front
    finally:
        await front.batcher.close()
        await client.close()


async def _batcher(scale: float) -> list[Row]:
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)  # as the server sets it
    async with _front() as front:
        rows = await _saved(front, scale)
        async with _front(DEVICE_MS) as device:
            rows += await _waits(front, device, scale)
    return rows + await _first_tokens(scale)


# -- messages saved, and what for --------------------------------------------------------------------------------------


async def _burst(front: Front, n: int) -> None:
    """n callers in one turn of the loop."""
    await asyncio.gather(*(front.ask() for _ in range(n)))


async def _saved(front: Front, scale: float) -> list[Row]:
    say("  messages saved")
    saved: dict[int, list[float]] = {}
    waits: list[float] = []
    bursts = max(10, round(20 * scale))
    for _ in range(max(3, round(7 * scale))):
        pooled = []
        for n in CONCURRENT:
            front.forget()
            before, counted = front.sent, front.counted.messages
            for _ in range(bursts):
                await _burst(front, n)
            messages = front.sent - before
            assert messages == front.counted.messages - counted
            saved.setdefault(n, []).append(100.0 * (1.0 - messages / (n * bursts)))
            pooled += front.waits if n in BARRED else []
        waits.append(1e3 * quantile(pooled, 0.95))
    rows = [
        row(CASE, f"messages saved, {n} at once", found, "%", least=90.0 if n in BARRED else None)
        for n, found in saved.items()
    ]
    return [*rows, row(CASE, f"added wait, {BARRED[0]} to {BARRED[-1]} at once, p95", waits, "ms", most=4.0)]


# -- what waiting costs those who are alone or in a hurry --------------------------------------------------------------


async def _waits(front: Front, device: Front, scale: float) -> list[Row]:
    """device: one whose steps take their time, so that others neither starve the loop nor are answered at once."""
    say("  added waits")
    alone, quick, urgent, jitter = [], [], [], []
    asked = max(50, round(150 * scale))
    for _ in range(max(3, round(7 * scale))):
        alone.append(await _in_sequence(front, asked, 0.005))
        quick.append(await _in_sequence(front, asked, 0.0))
        urgent.append(await _in_a_hurry(device, asked))
        jitter.append(await _overshoot(asked))
    return [
        row(CASE, "added wait, a lone caller every 5 ms, p95", alone, "ms", most=1.0),
        row(CASE, "added wait, a lone caller, again as soon as answered, p95", quick, "ms", most=1.0),
        row(CASE, "added wait, urgent amid 16 others, p95", urgent, "ms", most=0.5),
        row(CASE, "lateness of a timer of 1 ms on this machine, p95", jitter, "ms"),
    ]


async def _in_sequence(front: Front, asked: int, pause: float) -> float:
    """Milliseconds, p95. pause: seconds between an answer and the next request."""
    for _ in range(20):  # nobody is expected any more
        await front.ask()
        await asyncio.sleep(0.005)
    front.forget()
    for _ in range(asked):
        await front.ask()
        if pause:
            await asyncio.sleep(pause)
    return 1e3 * quantile(front.waits, 0.95)


async def _in_a_hurry(front: Front, asked: int) -> float:
    """The same of urgent requests every few milliseconds, amid 16 callers who ask again once answered."""
    front.forget()
    others = [asyncio.create_task(_again(front, number)) for number in range(16)]
    hurried = []
    for _ in range(asked):
        await asyncio.sleep(0.004)
        hurried.append(asyncio.create_task(front.ask(priority="urgent")))
    await asyncio.gather(*hurried)
    await _ended(others)
    return 1e3 * quantile(front.urgent, 0.95)


async def _again(front: Front, seed: int) -> None:
    """A closed loop of answers of different lengths, so that callers do not march in step."""
    rng = random.Random(seed)
    while True:
        await front.ask(rng.randint(8, 24))


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, ReflexError):
            raise outcome
    await asyncio.sleep(0.02)


async def _overshoot(n: int) -> float:
    """How late a timer of a millisecond goes off: milliseconds, p95."""
    loop, late = asyncio.get_running_loop(), []
    for _ in range(n):
        came: asyncio.Future[float] = loop.create_future()
        due = time.perf_counter() + 0.001
        loop.call_later(0.001, lambda came=came: came.set_result(time.perf_counter()))
        late.append(await came - due)
    return 1e3 * quantile(late, 0.95)


async def _first_tokens(scale: float) -> list[Row]:
    """On two devices: one as fast as a small model, one as a model of some billions of parameters."""
    say("  time to first token")
    rows = []
    for step_ms in (DEVICE_MS, SLOW_DEVICE_MS):
        async with _front(step_ms) as batched, _front(step_ms, enabled=False) as single:
            for callers in (1, STREAMS):
                times: dict[Front, list[float]] = {batched: [], single: []}
                for number in range(max(4, round(7 * scale))):
                    for front in (batched, single) if number % 2 else (single, batched):
                        times[front].append(await _first_token(front, callers, max(0.5, scale)))
                ratios = [a / b for a, b in zip(times[batched], times[single], strict=True)]
                who = "1 caller" if callers == 1 else f"{callers} callers"
                what = f"first token p50, {who}, steps of {step_ms:g} ms"
                rows += [
                    row(CASE, f"{what}, single calls", times[single], "ms"),
                    row(CASE, f"{what}, batched over single calls", ratios, "x", most=1.05),
                ]
    return rows


async def _first_token(front: Front, callers: int, seconds: float) -> float:
    """Milliseconds, p50, of a closed loop."""
    tasks = [asyncio.create_task(_again(front, number)) for number in range(callers)]
    await asyncio.sleep(0.3)
    front.forget()
    await asyncio.sleep(seconds)
    found = 1e3 * statistics.median(front.firsts)
    await _ended(tasks)
    return found


# -- closed-loop callers over HTTP -------------------------------------------------------------------------------------


class Paced(Server):
    """`bench.apps.front` on whatever cores it gets: a model whose steps take `SLOW_DEVICE_MS`."""

    def __init__(self, env: dict[str, str]) -> None:
        env = env | {STEP_MS: str(SLOW_DEVICE_MS)}
        super().__init__("front", ["-m", "bench.apps.front", "PORT"], "/health", env, pinned=False)

    def _answers(self) -> bool:
        return _ready(self)


def closed_loops(scale: float) -> list[Row]:
    """What callers that ask again as soon as they are answered save, and when their first tokens come."""
    scribe = model_directory("scribe")
    makes: dict[str, Callable[[dict[str, str]], Server]] = {
        "scribe": lambda env: Floating(scribe, *THREADS, "--workers", "1", env=env),
        f"steps of {SLOW_DEVICE_MS:g} ms": Paced,
    }
    rows = []
    for name, make in makes.items():
        say(f"  closed-loop callers over HTTP, {name}")
        with running(make({}), make({OFF: "1"})) as [batched, single]:
            for n in CLOSED_LOOP:
                for length, tokens in LENGTHS.items():
                    rounds = [_asked_again(batched, single, n, tokens, number) for number in range(round(12 * scale))]
                    saved, ratios, rates = map(list, zip(*rounds, strict=True))
                    what = f"{name}, {n} callers, {length}"
                    rows.append(row("callers", f"{what}: messages saved", saved, "%"))
                    if tokens[0] < tokens[1]:
                        together = n / (sum(tokens) / 2 + PAUSE)
                        most = 100.0 * (1.0 + math.expm1(-together) / together)
                        rows.append(row("callers", f"{what}: the most without a later first token", [most], "%"))
                    rows.append(row("callers", f"{what}: first token p50 over single calls", ratios, "x", most=1.03))
                    rows.append(row("callers", f"{what}: answers a second over single calls", rates, "x"))
    return rows


def _asked_again(
    batched: Server, single: Server, n: int, tokens: tuple[int, int], number: int
) -> tuple[float, float, float]:
    """Of one round: messages saved in per cent, first token p50 and answers over those of single calls."""
    found = {}
    for server in (batched, single)[:: 1 if number % 2 else -1]:
        before = _sent(server)
        job = callers.Job(server.port, "scribe" if isinstance(server, Floating) else "toy", n, tokens, 1.0, seed=number)
        found[server] = callers.ask(job), [after - at for after, at in zip(_sent(server), before, strict=True)]
    (one, (messages, requests)), (other, _) = found[batched], found[single]
    ratio = statistics.median(one.firsts) / statistics.median(other.firsts)
    return 100.0 * (1.0 - messages / requests), ratio, one.answers / other.answers


def _sent(server: Server) -> tuple[int, int]:
    """(messages that ask for streams, requests in them), as client and batcher count them."""
    [line] = json.loads(server.get("/status"))["lines"]
    said = line["client"]["sent"]
    requests = sum(sum(lane["priority_mix"].values()) for lane in line["generate"]["partitions"])
    return said.get("generate", 0) + said.get("batch_generate", 0), requests


# -- servers -----------------------------------------------------------------------------------------------------------


class Floating(Server):
    """`reflex serve` of a language model, on whatever cores it gets."""

    def __init__(self, directory: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.model = directory.name
        command = ["-m", "reflex_runtime", "serve", str(directory), "--port", "PORT", "--no-supervise", *flags]
        super().__init__(" ".join(("reflex serve", *flags)), command, "/health", env, pinned=False)

    def streamed(self, **job: Any) -> Streamed:
        """Ask it for streams. cpu: of the server, and of its runtime process where it has one."""
        pids = [] if "kill" in job else self.pids()
        return streams.ask(Job(port=self.port, model=self.model, pids=pids, **job))

    def worker(self) -> int:
        """The number of its runtime process."""
        return int(json.loads(self.get("/health"))["workers"][0]["pid"])

    def _answers(self) -> bool:
        return _ready(self)


def _ready(server: Server) -> bool:
    try:
        return bool(json.loads(server.get("/health"))["state"] == "ready")
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _larger(directory: Path) -> Path:
    """The model of the case `llm`, with the tokenizer of the bundled one and words enough for all its tokens."""
    write_model(directory, "bfloat16")
    scribe = model_directory("scribe")
    shutil.copy(scribe / "tokenizer_config.json", directory)
    tokenizer = json.loads((scribe / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    known |= {f"Ġword{number}": number for number in range(len(known), VOCAB)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def _two_against_one(directory: Path, size: str, tokens: int, scale: float) -> list[Row]:
    """A runtime process against a model in the server's own, in turns. tokens: of each stream."""
    say(f"  two processes against one, {size} parameters")
    rates: dict[str, list[float]] = {}
    gaps: dict[str, list[float]] = {}
    front, everything = [], []
    rounds = max(3, round(7 * scale))
    with running(Floating(directory, *THREADS, "--workers", "1"), Floating(directory, *THREADS)) as servers:
        for server in servers:
            server.streamed(tokens=64)
        for number in range(rounds):
            for server in servers[:: 1 if number % 2 else -1]:
                found = server.streamed(tokens=tokens, seed=number)
                rates.setdefault(server.name, []).append(found.rate)
                if server is servers[0]:
                    front.append(1e6 * found.cpu[0] / found.tokens)
                    everything.append(1e6 * sum(found.cpu) / found.tokens)
        for number in range(max(3, round(5 * scale))):
            for server in servers[:: 1 if number % 2 else -1]:
                found = server.streamed(tokens=tokens, seed=number, large=LARGE)
                assert set(found.large) == {400}, found.large
                gaps.setdefault(server.name, []).append(1e3 * quantile(found.gaps, 0.99))
    apart, one = (server.name for server in servers)
    what = f"{STREAMS} streams, {size}"
    faster = [a / b for a, b in zip(rates[apart], rates[one], strict=True)]
    evener = [a / b for a, b in zip(gaps[apart], gaps[one], strict=True)]
    return [
        row(CASE, f"{what}: CPU of the front per token", front, "us", most=20.0),
        row(CASE, f"{what}: CPU of front and runtime process per token", everything, "us"),
        row(CASE, f"{what}: tokens a second, --workers 1", rates[apart], ""),
        row(CASE, f"{what}: tokens a second, in process", rates[one], ""),
        row(CASE, f"{what}: --workers 1 over in process", faster, "x", least=0.97),
        row(CASE, f"{what}, 2 MiB prompts beside: gap p99, --workers 1", gaps[apart], "ms"),
        row(CASE, f"{what}, 2 MiB prompts beside: gap p99, in process", gaps[one], "ms"),
        row(CASE, f"{what}, 2 MiB prompts beside: --workers 1 over in process", evener, "x", most=1.0),
    ]


def _killed(directory: Path, scale: float) -> list[Row]:
    """A server each time: one whose process was killed before waits longer before it starts the next."""
    say("  a runtime process killed under streams")
    told, answered, started = [], [], []
    for number in range(max(3, round(4 * scale))):
        with running(Floating(directory, *THREADS, "--workers", "1")) as [server]:
            server.streamed(tokens=64)
            found = server.streamed(tokens=1500, seed=number, kill=server.worker())
            assert len(found.told) == STREAMS, found.told
            told.append(1e3 * max(found.told))
            answered.append(found.answered)
            started.append(asyncio.run(_started(directory)))
    what = f"killed under {STREAMS} streams"
    return [
        row(CASE, f"{what}: the last caller was told after", told, "ms", most=100.0),
        row(CASE, f"{what}: a request was answered again after", answered, "s"),
        row(CASE, "a runtime process, from its start to a loaded model", started, "s"),
    ]


async def _started(directory: Path) -> float:
    """Seconds until a runtime process is there and has loaded a model."""

    async def load(client: RuntimeClient) -> None:
        await client.request(LOAD, {"model_id": "it", "path": str(directory), "options": {"threads": 1}})

    began = time.perf_counter()
    client = RuntimeClient(spawned([sys.executable, "-m", "reflex_runtime", "worker"]), prepare=load)
    await client.start()
    found = time.perf_counter() - began
    await client.close()
    return found
