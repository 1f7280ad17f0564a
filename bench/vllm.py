"""Our scheduler inside vLLM beside its own: `.venv-vllm/bin/python -m bench.vllm [WORKLOAD …]`.

The figures of docs/vllm.md. Each engine runs in a process of its own, stock and ours in turns. The model has random
weights (30 M), 8 places and 512 tokens a step, unless the workload says otherwise.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tests.on_vllm.engine import engine_of, prompt, scheduler_of
from tests.on_vllm.model import write_model

from reflex_runtime.core.statistics import percentile

OURS = "reflex_runtime.vllm.Scheduler"
ROUNDS = 3


class Load:
    """Requests of one engine and when their tokens came."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.asked: dict[str, float] = {}
        self.tokens: dict[str, list[float]] = {}
        self.ended: dict[str, Any] = {}
        self.scheduling: list[float] = []  # processor seconds of each `schedule()`
        scheduler = scheduler_of(engine)
        inner = scheduler.schedule

        def timed(*args: Any) -> Any:
            began = time.thread_time()
            found = inner(*args)
            self.scheduling.append(time.thread_time() - began)
            return found

        scheduler.schedule = timed

    def ask(self, name: str, length: int, tokens: int, **told: Any) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=told or None,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self.asked[name] = time.monotonic()
        self.tokens[name] = []
        self.engine.add_request(name, {"prompt_token_ids": prompt(length, len(self.asked))}, params)

    def step(self) -> None:
        for output in self.engine.step():
            now = time.monotonic()
            self.tokens[output.request_id] += [now] * len(output.outputs[0].token_ids)
            if output.finished:
                self.ended[output.request_id] = output.outputs[0]

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.engine.has_unfinished_requests() and not until():
            self.step()

    def clear(self) -> None:
        self.run()
        for kept in (self.asked, self.tokens, self.ended, self.scheduling):
            kept.clear()

    def first(self, name: str) -> float:
        """Seconds until its first token."""
        return self.tokens[name][0] - self.asked[name]


def warm(load: Load) -> None:
    """Steps of every kind, so that nothing is compiled later and step times are learned."""
    for i in range(8):
        load.ask(f"warm-{i}", 40 * (i + 1), 24)
    load.ask("warm-long", 1500, 8)
    load.clear()


def light(load: Load) -> dict[str, float]:
    """One client has 24 requests in the system at any time, another one: a closed loop, for twelve seconds."""
    draw, began, counts = random.Random(2), time.monotonic(), {"heavy": 0, "light": 0}
    while time.monotonic() < began + 12.0:
        for client, places in (("heavy", 24), ("light", 1)):
            here = counts[client] - sum(name.startswith(client) for name in load.ended)
            for _ in range(places - here):
                load.ask(f"{client}-{counts[client]}", 32, draw.randint(8, 64), client=client)
                counts[client] += 1
        load.step()
    load.run()
    return {"first_token_s": median(load.first(name) for name in load.asked if name.startswith("light"))}


def open_loop(load: Load) -> dict[str, float]:
    """One client asks for 1.5 times what the engine can do, for ten seconds; another for one request a second."""
    began = time.monotonic()
    for i in range(24):
        load.ask(f"try-{i}", 32, 32)
    load.run()
    rate = 24 / (time.monotonic() - began)
    draw, began = random.Random(1), time.monotonic()
    heavy, modest, count = began, began + 2.0, 0
    while (now := time.monotonic()) < began + 10.0:
        while heavy <= now:
            load.ask(f"heavy-{count}", 32, 32, client="heavy")
            heavy, count = heavy + draw.expovariate(1.5 * rate), count + 1
        while modest <= now:
            load.ask(f"light-{count}", 32, 32, client="light")
            modest, count = modest + 1.0, count + 1
        load.step()
    load.run()
    return {"first_token_s": median(load.first(name) for name in load.asked if name.startswith("light"))}


def jain(load: Load) -> dict[str, float]:
    """Four clients that ask for 6, 12, 24 and 48 requests at once: their tokens when the first has all of its own."""
    for client in range(4):
        for i in range(6 * 2**client):
            load.ask(f"c{client}-{i}", 32, 32, client=f"c{client}")
    load.run(lambda: all(f"c0-{i}" in load.ended for i in range(6)))
    sums = [float(sum(len(t) for name, t in load.tokens.items() if name.startswith(f"c{c}-"))) for c in range(4)]
    load.engine.abort_request([name for name in load.asked if name not in load.ended])
    return {"jain": sum(sums) ** 2 / (4 * sum(x * x for x in sums))}


def gap(load: Load) -> dict[str, float]:
    """A prompt of 2,500 tokens beside 6 sequences that run."""
    for i in range(6):
        load.ask(f"row-{i}", 32, 400)
    load.run(lambda: all(len(load.tokens[f"row-{i}"]) > 60 for i in range(6)))
    plain = [gap for times in load.tokens.values() for gap in _gaps(times[10:])]
    counts = {i: len(load.tokens[f"row-{i}"]) for i in range(6)}
    load.ask("long", 2500, 2)
    load.run(lambda: "long" in load.ended)
    found = sorted(gap for i, n in counts.items() for gap in _gaps(load.tokens[f"row-{i}"][n - 1 :]))
    seconds = load.first("long")
    load.run()
    return {"gap_p99_ms": 1e3 * percentile(found, 0.99), "long_s": seconds, "plain_ms": 1e3 * median(plain)}


def _gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def deadlines(load: Load) -> dict[str, float]:
    """60 requests at once; 18 of them want their first token within 0.3 s, which passes for most of those."""
    began = time.monotonic()
    for i in range(60):
        load.ask(f"r-{i}", 64, 32, **({"deadline_ms": 300} if i % 10 in (3, 6, 9) else {}))
    load.run()
    limited = {name for i, name in enumerate(load.asked) if i % 10 in (3, 6, 9)}
    late = sum(1 for name in limited if load.tokens[name] and load.first(name) > 0.3)
    others = [name for name in load.asked if name not in limited]
    last = max(load.tokens[name][-1] for name in others)
    return {"answered_late": late, "others_per_s": len(others) / (last - began)}


def saturation(load: Load) -> dict[str, float]:
    """96 requests at once, without clients, promises or deadlines; three times, and the median."""
    rates, used = [], []
    for _ in range(3):
        load.clear()
        began, cpu = time.monotonic(), time.process_time()
        for i in range(96):
            load.ask(f"r-{i}", 48, 48)
        load.run()
        rates.append(96 * 48 / (time.monotonic() - began))
        used.append(1e6 * (time.process_time() - cpu) / (96 * 48))
    cost = {"cpu_us_per_token": median(used), "schedule_us": 1e6 * median(load.scheduling)}
    return {"tokens_per_s": median(rates), **cost}


def waiting(load: Load) -> dict[str, float]:
    """`schedule()` with 100 requests waiting, of ten clients, and with 10,000 of a thousand."""
    found = {}
    for count, clients in ((100, 10), (10_000, 1000)):
        for i in range(count):
            load.ask(f"{count}-{i}", 8, 16, client=f"c{i % clients}")
        for _ in range(8):
            load.step()
        load.scheduling.clear()
        for _ in range(60 if count > 100 else 40):
            load.step()
        found[f"schedule_us_{count}"] = 1e6 * median(load.scheduling)
        load.engine.abort_request(list(load.asked))
        load.clear()
    return found


WORKLOADS: dict[str, Callable[[Load], dict[str, float]]] = {
    "saturation": saturation,
    "waiting": waiting,
    "light": light,
    "open_loop": open_loop,
    "jain": jain,
    "deadlines": deadlines,
    "gap": gap,
}
PROMISED: dict[str, Any] = {"gap": {"max_gap_ms": 100}}


def one(model: str, scheduler: str, names: list[str], settings: str) -> None:
    """Workloads on one engine, in this process."""
    engine = engine_of(
        model, scheduler, json.loads(settings), max_model_len=4096, max_num_batched_tokens=512,
        enable_prefix_caching=False,
    )  # fmt: skip
    load = Load(engine)
    warm(load)
    for name in names:
        load.clear()
        print("FOUND " + json.dumps({name: WORKLOADS[name](load)}), flush=True)


def main(names: list[str]) -> None:
    found: dict[tuple[str, str, str], list[float]] = {}
    apart = [[name for name in names if (name in PROMISED) == promised] for promised in (False, True)]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), hidden=512, layers=12, length=4096)
        for _ in range(ROUNDS):
            for some in filter(None, apart):
                for scheduler in ("stock", OURS):
                    for name, figure, value in measured(folder, scheduler, some):
                        found.setdefault((name, figure, scheduler), []).append(value)
    print("| workload | figure | vLLM's own | ours |")
    for (name, figure, scheduler), values in found.items():
        if scheduler == "stock":
            print(f"| {name} | {figure} | {_told(values)} | {_told(found[name, figure, OURS])} |")


def measured(model: str, scheduler: str, names: list[str]) -> Iterator[tuple[str, str, float]]:
    """Workloads on one engine, in a process of its own: name, figure, value."""
    settings = json.dumps(PROMISED.get(names[0], {}))
    command = [sys.executable, "-m", "bench.vllm", "--one", model, scheduler, ",".join(names), settings]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=offline)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            print(f"{scheduler}: {line}", file=sys.stderr, flush=True)
            for name, figures in json.loads(line.removeprefix("FOUND ")).items():
                for figure, value in figures.items():
                    yield name, figure, value


def _told(values: list[float]) -> str:
    return f"{median(values):.4g} ({min(values):.4g}–{max(values):.4g})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], sys.argv[3], sys.argv[4].split(","), sys.argv[5])
    else:
        main(sys.argv[1:] or list(WORKLOADS))
