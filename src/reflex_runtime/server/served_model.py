"""What `reflex serve MODEL_DIR` serves: a model with its state, its settings, its series and its trace.

States: initializing → loading → warming → ready; `warmup_failed`; `degraded` while a step hangs; `draining`. It exists,
and tells its state, before the model is there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from reflex_runtime.config import LLMServeConfig
from reflex_runtime.core.errors import Closed, ConfigError
from reflex_runtime.llm.engine import EngineConfig, LLMProcessor
from reflex_runtime.llm.runner import Runner, Step
from reflex_runtime.llm.series import EngineSeries
from reflex_runtime.llm.tokenizer import Tokenizer
from reflex_runtime.server.errors import NotReady
from reflex_runtime.server.generation import GenerationRuntime
from reflex_runtime.telemetry.series import Counter
from reflex_runtime.telemetry.trace import TraceWriter

log = logging.getLogger("reflex.server")

T = TypeVar("T")

Load = Callable[[], tuple[Runner, Tokenizer]]


class ServedModel:
    """One model. `start` returns when it is ready or has failed.

    name: by which clients ask for it. load: makes the runner and the tokenizer; called once, in a thread of its own.
    on_fatal: called on the loop when the model is lost for good.
    """

    def __init__(
        self, config: LLMServeConfig, name: str, load: Load, on_fatal: Callable[[], None] | None = None
    ) -> None:
        self.config, self.name = config, name
        self.created = int(time.time())
        self.error = ""
        self.unusable = False  # the directory or an option is wrong: there is nothing to wait for
        self.registry = CollectorRegistry()
        self.trace: TraceWriter | None = None
        self._load, self._on_fatal = load, on_fatal
        self._state = "initializing"
        self._runtime: GenerationRuntime | None = None
        self._clean = True
        self._holds = Counter(
            "reflex_stream_holds_total", "Times a stream was held for its slow reader", (), registry=self.registry
        ).labels()
        self._answers = Counter(
            "reflex_openai_requests_total", "Answers over HTTP", ("path", "status"), registry=self.registry
        )

    @property
    def state(self) -> str:
        """As /health tells it."""
        hangs = self._runtime is not None and self._runtime.hangs
        return "degraded" if self._state == "ready" and hangs else self._state

    @property
    def runtime(self) -> GenerationRuntime:
        """What generates. Raises when there is none, or none that may be asked any more."""
        if self._state == "draining":
            raise Closed("the server is shutting down", retry_after=1.0)
        if self._state == "warmup_failed":
            raise NotReady(f"the model could not be loaded: {self.error}", state=self._state)
        if self._runtime is None or self._state != "ready":
            raise NotReady(f"the server is {self._state}", retry_after=1.0, state=self._state)
        return self._runtime

    async def start(self) -> None:
        """Load, warm up, serve. What goes wrong ends in `warmup_failed` with the error kept.

        Cancelling it leaves the thread that loads behind: nothing can stop a model being read.
        """
        self._clean = False
        try:
            self._state = "loading"
            runner, tokenizer = await _in_thread(self._load)
            self._state = "warming"
            self._runtime = self._build(LLMProcessor(runner, tokenizer, engine_config(self.config)))
            await self._runtime.start(lambda: warm_up(runner))
        except Exception as error:
            self._state = "warmup_failed"
            self.unusable = isinstance(error, ConfigError)  # the message says what to mend: nobody needs a stack
            self.error = str(error) if self.unusable else f"{type(error).__name__}: {error}"
            if not self.unusable:
                log.exception("the model could not be started")
            if self._runtime is not None:
                await self._runtime.close(drain=False)
            self._clean = True
            return
        self._clean = True
        self._state = "ready"

    def drain(self) -> None:
        """Say that the end has begun; the door turns away what comes."""
        if self._state != "warmup_failed":
            self._state = "draining"

    async def stop(self, timeout: float) -> bool:
        """Let what was asked finish within `timeout` seconds, end the rest. Returns whether no thread is left."""
        if self._runtime is not None and self._state == "draining":
            self._clean = await self._runtime.close(drain=True, timeout=timeout)
        if self.trace is not None:
            self.trace.close()
        return self._clean

    # -- what is asked of it -------------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """The body of /health."""
        state, runtime = self.state, self._runtime
        body: dict[str, Any] = {
            "status": "ok" if state == "ready" else state,
            "state": state,
            "model": self.name,
            "model_loaded": runtime is not None and self._state in ("ready", "draining"),
        }
        if runtime is not None:
            processor = runtime.processor
            body |= {
                "runner": processor.runner.name,
                "max_model_len": processor.runner.max_model_len,
                "running": runtime.running,
                "waiting": runtime.waiting,
                "kv_cache_usage": round(processor.pool.usage, 6),
                "kv_cache_tokens": processor.pool.num_blocks * processor.pool.block_size,
                "hung_steps": runtime.batcher.device.hung,
            }
        if self.error:
            body["error"] = self.error
        if self.trace is not None and self.trace.error is not None:
            body["trace_error"] = str(self.trace.error)
        return body

    def card(self) -> dict[str, Any]:
        """The model as /v1/models tells it."""
        card: dict[str, Any] = {"id": self.name, "object": "model", "created": self.created, "owned_by": "reflex"}
        if self._runtime is not None:
            card["max_model_len"] = self._runtime.processor.runner.max_model_len
        return card

    def metrics(self) -> bytes:
        """Prometheus text."""
        if self._runtime is not None:
            self._runtime.batcher.flush()
            self._holds.value = float(self._runtime.holds)
        return generate_latest(self.registry)

    def answered(self, path: str, status: int) -> None:
        """The server answered a request. path: of a known endpoint, so that there are few."""
        self._answers.labels(path, str(status)).inc()

    def _build(self, processor: LLMProcessor) -> GenerationRuntime:
        runtime = GenerationRuntime(processor, watchdog=self.config.watchdog_s, on_fatal=self._on_fatal)
        runtime.batcher.add_sink(EngineSeries(processor, lambda: runtime.waiting, self.registry))
        if self.config.trace:
            self.trace = TraceWriter(self.config.trace, [processor.group])
            runtime.batcher.add_sink(self.trace)
        return runtime


def engine_config(config: LLMServeConfig) -> EngineConfig:
    """The engine's part of the settings."""
    return EngineConfig(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_prefix_caching=config.prefix_caching,
        max_queue=config.max_queue,
        max_queued_tokens=config.max_queued_tokens,
    )


def warm_up(runner: Runner) -> None:
    """Steps of a few shapes, so that the first request does not wait for what is made once.

    They write to block 0, whose rows mean nothing to anybody before they are written again.
    """
    whole = min(runner.block_size, runner.max_model_len)
    for past, new in ((0, whole - 1), (whole - 1, 1)):
        if new:
            ids, positions = np.zeros(new, np.int64), np.arange(past, past + new, dtype=np.int64)
            begins, table = np.array([0, new], np.int32), np.zeros(1, np.int32)
            runner.forward(Step(ids, positions, np.array([past], np.int32), begins, table, np.array([0, 1], np.int32)))


async def _in_thread(function: Callable[[], T]) -> T:
    """Run it in a thread that does not keep the process alive."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)
        except BaseException as error:  # SystemExit, or a panic in a library's own code: whoever waits must know
            done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=run, name="reflex-load", daemon=True).start()
    return await asyncio.wrap_future(done)
