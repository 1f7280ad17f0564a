"""The Prometheus series of an engine, under the names of vLLM with our prefix.

They are computed from the scheduler's events; gauges are read live. The sink also checks the invariants of every step
and every request, and counts violations: a violation is a bug of the engine, never of a caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Gauge

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.events import BatchScheduled, Event, RequestPreempted, RequestProgressed, RequestSettled
from reflex_runtime.core.request import Ticket
from reflex_runtime.llm.processor import LLMProcessor
from reflex_runtime.llm.sequence import Sequence
from reflex_runtime.telemetry.series import Counter, Histogram

SHORT_OF = ("budget", "places", "memory", "share", "room")
INVARIANTS = ("budget", "conservation", "blocks")
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_GAP = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)


_OF_TICKETS = (RequestPreempted, RequestProgressed, RequestSettled)


@dataclass(slots=True)
class _Lane:
    """The state of a request from its first step on. known: its tokens. last: time of the latest token, None before the
    first. running: whether it holds a place."""

    known: int
    last: float | None = None
    running: bool = True


class EngineSeries:
    """A sink that keeps the series of one engine in `registry`.

    waiting: the number of waiting requests, read at the scrape, like the processor's pool.
    """

    events = frozenset({BatchScheduled, *_OF_TICKETS})

    def __init__(self, processor: LLMProcessor, waiting: Callable[[], int], registry: CollectorRegistry) -> None:
        self._config, self._group = processor.config, processor.name
        self._processor = processor
        self._lanes: dict[Ticket, _Lane] = {}
        self._running = 0
        self._short_of = ""
        depth = Gauge("reflex_num_requests_waiting", "Requests that wait, now", registry=registry)
        depth.set_function(waiting)
        why = Gauge(
            "reflex_num_requests_waiting_by_reason", "The same, by what the last step was short of", ["reason"],
            registry=registry,
        )  # fmt: skip
        for reason in SHORT_OF:
            why.labels(reason).set_function(partial(self._waits_for, reason, waiting))
        running = Gauge("reflex_num_requests_running", "Requests that hold a place, now", registry=registry)
        running.set_function(lambda: self._running)
        usage = Gauge("reflex_kv_cache_usage_perc", "Fraction of the cache's blocks held, 0 to 1", registry=registry)
        usage.set_function(lambda: processor.pool.usage)

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, labels, registry=registry)

        self._preemptions = counter("reflex_num_preemptions_total", "Requests that lost their blocks").labels()
        self._asked = counter("reflex_prefix_cache_queries_total", "Tokens looked up in the prefix cache").labels()
        self._hits = counter("reflex_prefix_cache_hits_total", "Tokens found there").labels()
        self._drafted = counter("reflex_spec_decode_num_draft_tokens_total", "Guessed tokens computed").labels()
        self._accepted = counter("reflex_spec_decode_num_accepted_tokens_total", "Those that were right").labels()
        self._prompts = counter("reflex_prompt_tokens_total", "Prompt tokens of requests that got a token").labels()
        self._outputs = counter("reflex_generation_tokens_total", "Tokens generated").labels()
        self._ends = counter("reflex_request_success_total", "Requests ended, by how", "finished_reason")
        violations = counter("reflex_invariant_violations_total", "Defects of the engine itself", "invariant")
        self._violations = {name: violations.labels(name) for name in INVARIANTS}

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help, (), buckets=buckets, registry=registry)

        self._tokens = histogram("reflex_iteration_tokens_total", "Tokens in a step", _TOKENS).labels()
        self._first = histogram("reflex_time_to_first_token_seconds", "Arrival to the first token", _FIRST).labels()
        self._gap = histogram("reflex_inter_token_latency_seconds", "One token to the next", _GAP).labels()
        self._queue = histogram("reflex_request_queue_time_seconds", "Arrival to the first step", _FIRST).labels()
        self._e2e = histogram("reflex_e2e_request_latency_seconds", "Arrival to the end", _WHOLE).labels()

    def __call__(self, event: Event) -> None:
        if isinstance(event, BatchScheduled):
            if event.batch.group == self._group:
                self._scheduled(event)
        elif not isinstance(event, _OF_TICKETS) or event.ticket.request.group != self._group:
            return  # another model's
        elif isinstance(event, RequestProgressed):
            if event.value is not None:
                self._token(self._lanes[event.ticket], event.ticket, event.at)
        elif isinstance(event, RequestSettled):
            self._settled(event.ticket, event.at)
        else:
            self._preemptions.inc()
            self._lanes[event.ticket].running = False
            self._running -= 1

    def _waits_for(self, reason: str, waiting: Callable[[], int]) -> float:
        return float(waiting()) if reason == self._short_of else 0.0

    def _scheduled(self, event: BatchScheduled) -> None:
        batch = event.batch
        self._guessed()
        self._short_of = batch.short_of
        tokens = sum(batch.grants.values())
        self._tokens.observe(tokens)
        self._violations["budget"].inc(tokens > self._config.max_num_batched_tokens)
        for ticket in batch.admitted:
            lane = self._lanes.get(ticket)
            if lane is None:
                lane = self._lanes[ticket] = _Lane(ticket.request.payload.num_prompt_tokens)
                self._queue.observe(event.at - ticket.arrived)
            lane.running = True
            self._running += 1
            self._asked.inc(lane.known)
            self._hits.inc(batch.cached.get(ticket, 0.0))

    def _token(self, lane: _Lane, ticket: Ticket, now: float) -> None:
        if lane.last is None:
            self._first.observe(now - ticket.arrived)
            self._prompts.inc(ticket.request.payload.num_prompt_tokens)
        else:
            self._gap.observe(now - lane.last)
        lane.last = now
        lane.known += 1
        self._outputs.inc()

    def _guessed(self) -> None:
        self._drafted.value, self._accepted.value = float(self._processor.drafted), float(self._processor.accepted)

    def _settled(self, ticket: Ticket, now: float) -> None:
        self._guessed()
        lane = self._lanes.pop(ticket, None)
        if lane is not None:
            self._running -= lane.running
        outcome = ticket.outcome
        if not isinstance(outcome, Done):
            error = outcome.error
            self._ends.labels(error.code if isinstance(error, ReflexError) else "failed").inc()
            return
        if lane is not None:
            self._token(lane, ticket, now)
        self._ends.labels(outcome.value.finish).inc()
        self._e2e.observe(now - ticket.arrived)
        for name, holds in invariants(ticket).items():
            self._violations[name].inc(not holds)


def invariants(ticket: Ticket) -> dict[str, bool]:
    """Check an answered request: it was granted exactly the tokens it needed, and its blocks were released."""
    sequence: Sequence = ticket.request.payload
    needed = sequence.num_prompt_tokens + sequence.num_output_tokens - 1
    return {
        "conservation": ticket.granted - ticket.recomputed - ticket.unused == needed - ticket.cached,
        "blocks": not sequence.blocks,
    }
