"""Texts of mixed lengths to vectors: Reflex's batches beside a loop by hand, on the same model.

    python -m bench.embeddings [seconds of a run] [rounds]

The model has the sizes of all-MiniLM-L6-v2 (22.7 million parameters) and random weights, traced to OpenVINO, on all
cores. All of them get the same texts' tokens in this process and call the same encoder:

    alone    the oldest text, by itself
    static   the oldest texts, at most 8, padded to the longest
    reflex   the scheduler's batches, cut into calls; budget of a batch 100 ms, the default
    brief    the same with 25 ms

Two loads, in turns within each round. `mixed`: 32 callers, each with one text at a time: 7 of 10 have 4 to 24 tokens,
the others up to 256. `bulk`: one caller that always has 128 such texts waiting, beside four callers with one short text
at a time; their times are told.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reflex_runtime.core.request import Request
from reflex_runtime.drivers.batcher import Batcher
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.embedding.encoder import Encoder
from reflex_runtime.llm.embedding.openvino_encoder import OpenVinoEncoder
from reflex_runtime.llm.embedding.processor import EmbeddingProcessor, embedded, measure
from reflex_runtime.llm.serving.embedding_runtime import TextTokens

STATIC = 8  # texts of a static batch
CALLERS, BULK = 32, 128
BUDGETS = {"reflex": 0.100, "brief": 0.025}  # seconds
Ask = Callable[[Sequence[int], str], Awaitable[Any]]


def model_directory(root: Path) -> EmbeddingModel:
    """A random model of the sizes of all-MiniLM-L6-v2."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(root)
    return EmbeddingModel.open(root)


def texts(seed: int) -> Callable[[], list[int]]:
    """Makes the tokens of one text after the other."""
    rng = random.Random(seed)

    def one() -> list[int]:
        length = rng.randint(4, 24) if rng.random() < 0.7 else min(256, int(24 * 2 ** (rng.random() * 3.5)))
        return [rng.randrange(1000, 30_000) for _ in range(length)]

    return one


class ByHand:
    """A loop by hand: a queue, and a thread that takes the oldest. most: texts of a call."""

    def __init__(self, model: EmbeddingModel, encoder: Encoder, most: int) -> None:
        self._model, self._encoder, self._most = model, encoder, most
        self._queue: deque[tuple[Sequence[int], asyncio.Future[Any]]] = deque()
        self._there = asyncio.Event()

    async def ask(self, text: Sequence[int], client: str) -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append((text, done))
        self._there.set()
        return await done

    async def run(self) -> None:
        while True:
            await self._there.wait()
            taken = [self._queue.popleft() for _ in range(min(self._most, len(self._queue)))]
            if not self._queue:
                self._there.clear()
            rows = await asyncio.to_thread(embedded, self._model, self._encoder, [text for text, _ in taken])
            for (_, done), row in zip(taken, rows, strict=True):
                if not done.cancelled():
                    done.set_result(row)


async def load(ask: Ask, kind: str, seconds: float) -> tuple[float, list[float], float]:
    """(tokens a second, times that are told, texts a second)."""
    took: list[float] = []
    tokens = count = 0
    end = time.perf_counter() + seconds

    async def caller(name: str, make: Callable[[], list[int]], told: bool) -> None:
        nonlocal tokens, count
        while time.perf_counter() < end:
            text, began = make(), time.perf_counter()
            await ask(text, name)
            now = time.perf_counter()
            if told:  # also of a text that was asked for in time and answered later
                took.append(now - began)
            if now < end:
                tokens, count = tokens + len(text), count + 1

    if kind == "mixed":
        callers = [caller(str(i), texts(i), True) for i in range(CALLERS)]
    else:
        short = random.Random(1)
        brief = lambda: [short.randrange(1000, 30_000) for _ in range(short.randint(4, 16))]  # noqa: E731
        callers = [caller("bulk", texts(i), False) for i in range(BULK)]
        callers += [caller(f"query {i}", brief, True) for i in range(4)]
    await asyncio.gather(*callers)
    return tokens / seconds, took, count / seconds


async def one(way: str, kind: str, model: EmbeddingModel, encoder: Encoder, measured: Any, seconds: float) -> Any:
    if way in BUDGETS:
        processor = EmbeddingProcessor(model, encoder, measured, max_batch_cost=BUDGETS[way])
        processor.stop = lambda: None  # type: ignore[method-assign]  # the encoder is used again
        async with Batcher({"default": processor}, [processor.group], watchdog=0.0) as batcher:

            async def ask(text: Sequence[int], client: str) -> Any:
                return await batcher.run(Request(TextTokens(text), client=client, wants=float(len(text))))

            return await load(ask, kind, seconds)
    by_hand = ByHand(model, encoder, 1 if way == "alone" else STATIC)
    running = asyncio.create_task(by_hand.run())
    try:
        return await load(by_hand.ask, kind, seconds)
    finally:
        running.cancel()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory() as folder:
        model = model_directory(Path(folder))
        encoder = OpenVinoEncoder(model, "float32", None, None)
        measured = measure(model, encoder)
        print(f"{encoder.name}; calls take {', '.join(f'{sum(s)} tokens {t * 1e3:.1f} ms' for s, t in measured)}")
        found: dict[tuple[str, str], list[Any]] = {}
        for _ in range(rounds):
            for kind in ("mixed", "bulk"):
                for way in ("alone", "static", *BUDGETS):
                    asked = one(way, kind, model, encoder, measured, seconds)
                    found.setdefault((kind, way), []).append(asyncio.run(asked))
        for (kind, way), runs in found.items():
            rates = [rate for rate, _, _ in runs]
            p50, p95 = ([float(np.percentile(took, q)) * 1e3 for _, took, _ in runs] for q in (50, 95))
            told = (f"{statistics.median(v):.0f} ({min(v):.0f} to {max(v):.0f})" for v in (rates, p50, p95))
            print(kind, way, *(f"{name} {value}" for name, value in zip(("tokens/s", "p50", "p95"), told, strict=True)))


if __name__ == "__main__":
    main()
