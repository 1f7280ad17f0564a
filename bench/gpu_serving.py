"""A PyTorch policy on a GPU behind `POST /act`, its steps with CUDA graphs and without: `python -m bench.gpu_serving`.

Robots that ask again at once send two pictures of 224 by 224 and a state, as msgpack. One `reflex serve` each with and
without `--cuda-graphs` take turns. *Busy* is the share of the time in which the GPU ran kernels, as its driver says
(NVML), sampled during the load. Before that both answer the same request alone and eight at once: the difference of
their actions is printed. JSON is the last line. Needs a CUDA device, and nvidia-ml-py for *busy*.
"""

from __future__ import annotations

import base64
import concurrent.futures
import http.client
import json
import sys
import threading
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgpack
import numpy as np

from bench.load import Answered
from bench.servers import Server, reflex, running

APP = "bench.apps.torch_vla"
MODELS = {"small": ("make", "float32"), "large": ("make_large", "bfloat16")}
WAYS: dict[str, tuple[str, ...]] = {"plain": (), "graphs": ("--cuda-graphs=1,2,4,8,16,32",)}
CALLERS = (1, 8, 32)
PROVIDER, ROUNDS, SECONDS, WARM = "cuda", 3, 1.0, 0.4


class Busy:
    """Samples how busy the GPU is, in percent, while it is entered. mean: of the samples, NaN without any."""

    def __init__(self, every: float = 0.1) -> None:
        self._every, self._stop, self.samples = every, threading.Event(), list[int]()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Busy:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def mean(self) -> float:
        kept = self.samples[len(self.samples) // 3 :]  # the load begins after the start of a process and a warm-up
        return sum(kept) / len(kept) if kept else float("nan")

    def _sample(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByIndex(0)
            while not self._stop.wait(self._every):
                self.samples.append(pynvml.nvmlDeviceGetUtilizationRates(device).gpu)
        except Exception as error:
            print(f"bench.gpu_serving: busy is not known: {error}", file=sys.stderr)


def packed(seed: int) -> bytes:
    """A request: two random pictures, a state, and the seed of its noise."""
    from bench.apps.torch_vla import SIDE, STATE

    rng = np.random.default_rng(seed)
    shape = [SIDE, SIDE, 3]
    pictures = {
        name: {"dtype": "|u1", "shape": shape, "data": rng.integers(0, 256, shape, np.uint8).tobytes()}
        for name in ("image", "image_wrist")
    }
    found: bytes = msgpack.packb(pictures | {"state": rng.uniform(-1, 1, STATE).tolist(), "seed": seed})
    return found


def actions(server: Server, seed: int) -> tuple[np.ndarray[Any, Any], int]:
    """The actions that it answers, and the size of the batch."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", "/act", packed(seed), {"Content-Type": "application/msgpack"})
        answer = connection.getresponse()
        body = msgpack.unpackb(answer.read()) if answer.status == 200 else {}
        if not body:
            raise RuntimeError(f"{server.name}: {answer.status}")
    finally:
        connection.close()
    told = body["actions"]
    if isinstance(told, dict):  # an array as its bytes
        told = np.frombuffer(told["data"], told["dtype"]).reshape(told["shape"])
    return np.array(told, np.float64), int(body["batch"]["size"])


def difference(servers: list[Server]) -> dict[str, float]:
    """The largest difference of an action between the servers: alone, and eight at once."""
    alone = [actions(server, 1)[0] for server in servers]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = [np.stack([found for found, _ in pool.map(partial(actions, s), range(8))]) for s in servers]
    return {
        "alone": float(np.abs(alone[0] - alone[1]).max()),
        "eight": float(np.abs(together[0] - together[1]).max()),
        "largest": float(np.abs(alone[0]).max()),
    }


def loaded(servers: list[Server]) -> list[dict[str, Any]]:
    """A row for each number of callers and server: medians of rounds that take turns, and the spread of the rate."""
    rows = []
    body = base64.b64encode(packed(0)).decode()
    for callers in CALLERS:
        found: dict[str, list[tuple[Answered, float]]] = {server.name: [] for server in servers}
        for i in range(ROUNDS):
            for server in servers[:: 1 if i % 2 else -1]:
                with Busy() as busy:
                    answered = server.load(callers=callers, seconds=SECONDS, warm=WARM, wire="msgpack", packed=body)
                if answered.failed or not answered.requests:
                    raise RuntimeError(f"{server.name}: {answered.failed} of {answered.requests} requests failed")
                found[server.name].append((answered, busy.mean))
        for name, rounds in found.items():
            rates = sorted(answered.rate for answered, _ in rounds)
            row = {
                "server": name, "callers": callers, "rate": median(rates), "low": rates[0], "high": rates[-1],
                "p50_ms": 1e3 * median(answered.quantile(0.5) for answered, _ in rounds),
                "p99_ms": 1e3 * median(answered.quantile(0.99) for answered, _ in rounds),
                "batch": median(answered.mean_batch for answered, _ in rounds),
                "cpu": median(answered.cpu / answered.seconds for answered, _ in rounds),
                "busy": median(share for _, share in rounds),
            }  # fmt: skip
            rows.append(row)
            print(
                f"{name:14} {callers:3d} callers: {row['rate']:6.0f} answers/s ({row['low']:.0f} to {row['high']:.0f}),"
                f" p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms, batch {row['batch']:.1f}, "
                f"GPU busy {row['busy']:.0f} %, CPU {row['cpu']:.2f} cores",
                flush=True,
            )
    return rows


def started() -> dict[str, list[Server]]:
    """The servers of each model, all started at the same time."""
    asked = [(model, way) for model in MODELS for way in WAYS]

    def start(which: tuple[str, str]) -> Server:
        model, way = which
        make, dtype = MODELS[model]
        source = Path(f"python:{APP}:{make}")
        flags = ("--provider", PROVIDER, "--dtype", dtype, *WAYS[way])
        return reflex(source, *flags, name=f"{model}, {way}", ready="/health", pinned=False)

    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        servers = list(pool.map(start, asked))
    return {model: [s for s, (of, _) in zip(servers, asked, strict=True) if of == model] for model in MODELS}


def main() -> int:
    result: dict[str, Any] = {}
    every = started()
    with running(*(server for servers in every.values() for server in servers)):
        for model, servers in every.items():
            apart = difference(servers)
            print(f"{model}: largest difference of an action {apart}", flush=True)
            rows = loaded(servers)
            counts = [_found(json.loads(server.get("/config")), "cuda_graphs") for server in servers]
            print(f"{model}: graphs {counts[-1]}", flush=True)
            result[model] = {"difference": apart, "rows": rows, "graphs": counts[-1]}
    print(json.dumps(result))
    return 0


def _found(told: Any, name: str) -> Any:
    """The first mapping of that name, anywhere in an answer."""
    if isinstance(told, dict):
        if isinstance(told.get(name), dict):
            return told[name]
        told = list(told.values())
    if isinstance(told, list):
        return next((found for each in told if (found := _found(each, name)) is not None), None)
    return None


if __name__ == "__main__":
    sys.exit(main())
