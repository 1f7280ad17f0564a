"""The Prometheus series of an embedding model: those of the engine where they mean the same, and what padding cost."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.events import BatchFinished, BatchScheduled, Event, RequestSettled
from reflex_runtime.telemetry.series import Counter, Histogram

_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)


class EmbeddingSeries:
    """A sink that keeps the series of one model's group in `registry`. waiting, running: texts that do, read at the
    scrape."""

    events = frozenset({BatchScheduled, BatchFinished, RequestSettled})

    def __init__(
        self, group: str, waiting: Callable[[], int], running: Callable[[], int], registry: CollectorRegistry
    ) -> None:
        self._group = group
        for name, told, read in (("waiting", "wait", waiting), ("running", "are computed", running)):
            gauge = Gauge(f"reflex_num_requests_{name}", f"Texts that {told}, now", registry=registry)
            gauge.set_function(read)

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help, (), buckets=buckets, registry=registry)

        self._prompts = counter("reflex_prompt_tokens_total", "Tokens of texts that got their vector").labels()
        self._ends = counter("reflex_request_success_total", "Texts ended, by how", "finished_reason")
        self._calls = counter("reflex_embedding_calls_total", "Calls of the model").labels()
        self._padded = counter("reflex_embedding_padding_total", "Places of padding that were computed").labels()
        self._tokens = histogram("reflex_iteration_tokens_total", "Tokens in a batch", _TOKENS).labels()
        self._texts = histogram("reflex_embedding_batch_texts", "Texts in a batch", _TEXTS).labels()
        self._queue = histogram("reflex_request_queue_time_seconds", "Arrival to the batch", _SECONDS).labels()
        self._e2e = histogram("reflex_e2e_request_latency_seconds", "Arrival to the vector", _SECONDS).labels()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestSettled):
            if event.ticket.request.group == self._group:
                self._settled(event)
        elif not isinstance(event, (BatchScheduled, BatchFinished)) or event.batch.group != self._group:
            return  # another model's
        elif isinstance(event, BatchScheduled):
            self._tokens.observe(sum(event.batch.grants.values()))
            self._texts.observe(len(event.batch))
            for ticket in event.batch.admitted:
                self._queue.observe(event.at - ticket.arrived)
        else:
            self._calls.inc(event.batch.notes.get("calls", 0))
            self._padded.inc(event.batch.notes.get("padding", 0))

    def _settled(self, event: RequestSettled) -> None:
        outcome = event.ticket.outcome
        if isinstance(outcome, Done):
            self._ends.labels("stop").inc()
            self._prompts.inc(event.ticket.request.wants)
            self._e2e.observe(event.at - event.ticket.arrived)
        else:
            self._ends.labels(outcome.error.code if isinstance(outcome.error, ReflexError) else "failed").inc()
