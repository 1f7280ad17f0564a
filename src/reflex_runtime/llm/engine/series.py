"""The Prometheus series of an engine, under the names of vLLM with our prefix.

They are computed from the scheduler's events; gauges are read live. The sink also checks the invariants of every step
and every request, and counts violations: a violation is a bug of the engine, never of a caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.events import BatchScheduled, Event, RequestPreempted, RequestProgressed, RequestSettled
from reflex_runtime.core.request import Ticket
from reflex_runtime.llm.engine.processor import LLMProcessor
from reflex_runtime.llm.engine.sequence import Sequence
from reflex_runtime.observe.series import ENGINE, SeriesSet

SHORT_OF = ("budget", "places", "memory", "share", "room")
INVARIANTS = ("budget", "conservation", "blocks")


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
        of = SeriesSet(ENGINE, registry)
        of.gauge("reflex_num_requests_waiting").set_function(waiting)
        for reason in SHORT_OF:
            why = of.gauge("reflex_num_requests_waiting_by_reason", reason)
            why.set_function(partial(self._waits_for, reason, waiting))
        of.gauge("reflex_num_requests_running").set_function(lambda: self._running)
        of.gauge("reflex_kv_cache_usage_perc").set_function(lambda: processor.pool.usage)
        self._preemptions = of.counter("reflex_num_preemptions_total")
        self._asked = of.counter("reflex_prefix_cache_queries_total")
        self._hits = of.counter("reflex_prefix_cache_hits_total")
        self._drafted = of.counter("reflex_spec_decode_num_draft_tokens_total")
        self._accepted = of.counter("reflex_spec_decode_num_accepted_tokens_total")
        self._prompts = of.counter("reflex_prompt_tokens_total")
        self._outputs = of.counter("reflex_generation_tokens_total")
        self._ends = partial(of.counter, "reflex_request_success_total")
        self._violations = {name: of.counter("reflex_invariant_violations_total", name) for name in INVARIANTS}
        self._tokens = of.histogram("reflex_iteration_tokens_total")
        self._first = of.histogram("reflex_time_to_first_token_seconds")
        self._gap = of.histogram("reflex_inter_token_latency_seconds")
        self._queue = of.histogram("reflex_request_queue_time_seconds")
        self._e2e = of.histogram("reflex_e2e_request_latency_seconds")

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
            self._ends(error.code if isinstance(error, ReflexError) else "failed").inc()
            return
        if lane is not None:
            self._token(lane, ticket, now)
        self._ends(outcome.value.finish).inc()
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
