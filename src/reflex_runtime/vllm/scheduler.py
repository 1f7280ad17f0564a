"""vLLM's scheduler, in which the core decides who is next, how much is computed, and whether a request may wait.

Who: first by `priority`, then the client with the fewest computed tokens. The tokens of a preempted request, and those
in flight when a request ends, are not charged. While memory is short, running requests have this order, too, and vLLM
preempts the last.

How much: while a gap is promised, running sequences go first, and prompts get the tokens that the tightest promise
leaves.

Whether: a request is ended before it is computed if its deadline has passed or cannot be met, or if too many seconds of
work wait and its client has more than its share of them. Its caller gets an abort with our code as the reason.
"""

from __future__ import annotations

import time
from math import inf
from operator import attrgetter
from typing import Any, Final

from prometheus_client import Counter
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from reflex_runtime.core.batch import Batch, Done, Failed
from reflex_runtime.core.cost import SLACK, Backlog, Evidence
from reflex_runtime.core.errors import ConfigError, Expired, QueueFull, ReflexError, Shed
from reflex_runtime.core.order import Clients, LazyHeap
from reflex_runtime.core.request import BACKGROUND
from reflex_runtime.vllm.entry import Entry
from reflex_runtime.vllm.fair_queue import FairQueue
from reflex_runtime.vllm.step_log import TracedScheduler

OUTPUTS: Final = 0.05  # weight of a request that ends in the mean of output tokens
NAMES: Final = 1000  # most clients with a series of their own

TOKENS: Final = Counter("reflex_client_tokens", "Tokens computed for requests that have ended, by client", ["client"])
REFUSED: Final = Counter("reflex_refused_requests", "Requests ended by the scheduler, by code", ["code"])


class FairScheduler(TracedScheduler):
    """`--scheduler-cls reflex_runtime.vllm.Scheduler`; see `docs/vllm.md`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokens: int = self.max_num_scheduled_tokens  # of a step without a promise
        self._places: int = self.max_num_active_reqs
        if self.settings.max_gap_ms is not None and not self.scheduler_config.enable_chunked_prefill:
            raise ConfigError("additional_config.reflex.max_gap_ms: without chunked prefill no gap can be promised")
        self.learns |= self.settings.max_gap_ms is not None or self.settings.max_queue_s is not None
        blocks = self._places + self._tokens // self.block_size + 1
        self._enough = len(self.kv_cache_config.kv_cache_groups) * blocks  # free blocks that suffice for any step
        self.policy = SchedulingPolicy.FCFS  # vLLM then preempts the last of `running`, which we sort
        self._clients = Clients()
        self.waiting: FairQueue = FairQueue(self.entries, self._clients)
        self._deadlines: LazyHeap[Entry, float] = LazyHeap()  # of requests without a first token
        self._promised: set[Entry] = set()  # requests with a gap of their own
        self._evidence, self._backlog = Evidence(), Backlog()
        self._units = self._scheduled = 0  # tokens of the last step: of sequences that generate, and of all
        self._outputs = 0.0  # mean output tokens of requests that have ended
        self._refused: list[tuple[Request, ReflexError]] = []  # not yet reported to their callers
        self._named: set[str] = set()  # clients with a series

    # -- vLLM's interface ------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        new = request.request_id not in self.requests
        super().add_request(request)
        if new:
            entry = self.entries[request.request_id]
            refusal = entry.wrong or self._full(entry)
            if refusal is not None:
                self._refuse(entry, refusal)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._deadlines:
            self._expire(time.monotonic())
        self.max_num_scheduled_tokens, self.max_num_active_reqs = self._tokens, self._places
        if self._promised or self.settings.max_gap_ms is not None:
            self._limit()
        if self.kv_cache_manager.block_pool.get_num_free_blocks() < self._enough:
            self.running.sort(key=self._rank)
        output = super().schedule(throttle_prefills)
        entries = self.entries
        for name, tokens in output.num_scheduled_tokens.items():
            entry = entries[name]
            entry.granted += tokens
            entry.client.counter += tokens
        if self.waiting.taken:
            self.waiting.settle()
        self._scheduled = output.total_num_scheduled_tokens
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request, refusal in self._refused:
            output = EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=request.get_finished_reason(),
                stop_reason=refusal.code,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        self._refused.clear()
        return outputs

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        entry = self.entries[request.request_id]
        self.waiting.give_back(entry.client, entry.granted)
        entry.granted = 0.0
        super()._preempt_request(request, *args, **kwargs)

    # -- whether ---------------------------------------------------------------------------------------------------

    def _refuse(self, entry: Entry, refusal: ReflexError) -> None:
        entry.outcome = Failed(refusal)
        self.finish_requests(entry.id, RequestStatus.FINISHED_ABORTED)
        self._refused.append((entry.own, refusal))
        REFUSED.labels(refusal.code).inc()

    def _full(self, entry: Entry) -> ReflexError | None:
        """Why the request may not wait, by the rule of the core's `max_queued_seconds`; None if it may."""
        most, request = self.settings.max_queue_s, entry.request
        if most is None or request.priority is BACKGROUND or not self.model.measured:
            return None
        outputs, places = min(float(entry.own.max_tokens), self._outputs), self._places
        seconds = self._reading(entry, 0) + outputs * self.model.predict(places, 0.0, 0.0) / places
        ahead = self._backlog.ahead(request.priority)
        if ahead and ahead + seconds > most * SLACK and self._backlog.exceeds_share(request.client, seconds, most):
            return QueueFull("too many seconds wait", retry_after=max(1.0, ahead))
        self._backlog.add(entry, seconds)
        return None

    def _reading(self, entry: Entry, cached: int) -> float:
        """Seconds to compute its prompt alone. cached: tokens of it in the prefix cache."""
        tokens = max(1.0, entry.own.num_tokens - cached)
        return self.model.predict(0.0, tokens, tokens * (cached + 0.5 * tokens))

    def _expire(self, now: float) -> None:
        """End requests whose first token is late or will be, beginning with the earliest deadline."""
        while (top := self._deadlines.first()) is not None:
            deadline, entry = top
            if entry.own.num_output_tokens:
                self._deadlines.discard(entry)
            elif deadline <= now:
                self._refuse(entry, Expired())
            elif self._too_late(entry, now):
                self._refuse(entry, Shed())
            else:
                return

    def _too_late(self, entry: Entry, now: float) -> bool:
        """Whether it waits and could not be in time even alone. `Evidence` lets some through, to renew the estimate."""
        if entry.own.status is RequestStatus.RUNNING or not self.model.measured or self._evidence.probes(entry):
            return False
        if now + self._reading(entry, 0) <= entry.deadline:
            return False
        cached = self.kv_cache_manager.get_computed_blocks(entry.own)[1]
        if now + self._reading(entry, cached) <= entry.deadline:
            return False
        if self._evidence.refuses(entry, now):
            return True
        self._evidence.probe(entry)
        return False

    # -- how much --------------------------------------------------------------------------------------------------

    def _limit(self) -> None:
        """Bound the step so that the tightest promise of the running sequences holds; prompts get what is left."""
        promise = None if self.settings.max_gap_ms is None else self.model.gap
        self.running.sort(key=attrgetter("is_prefill_chunk"))
        rows, units, pairs, past, own = 0, 0, 0.0, 0, inf
        for request in self.running:
            if request.is_prefill_chunk:
                past = max(past, request.num_computed_tokens)
                continue
            gap = self.entries[request.request_id].request.max_gap or promise
            own = own if gap is None else min(own, gap)
            rows += 1
            units += 1 + len(request.spec_token_ids)
            pairs += request.num_computed_tokens
        if promise is None and own == inf:
            return
        most = self.model.most(rows, 0.0, pairs, past, self.model.allowed(own, rows, pairs))
        if rows and self._scheduled == self._units:  # a prompt after steps without one is slow: new shapes
            most = max(1.0, 0.5 * most)
        self._units = units
        if self.need_mamba_block_aligned_split:
            most = max(most, float(self.block_size))
        self.max_num_scheduled_tokens = int(min(self._tokens, units + most))
        if self.model.closed(len(self.running), pairs):
            self.max_num_active_reqs = len(self.running)

    # -- who -------------------------------------------------------------------------------------------------------

    def _rank(self, request: Request) -> tuple[int, float, float, int]:
        """Order of running requests while memory is short: vLLM preempts the last.

        The counter of a client with a single request is ignored: by it the oldest would be last, which loses most.
        """
        entry = self.entries[request.request_id]
        return (
            request.priority,
            entry.client.counter if entry.client.unsettled > 1 else 0.0,
            request.arrival_time,
            entry.seq,
        )

    # -- requests and steps --------------------------------------------------------------------------------------------

    def _enter(self, entry: Entry) -> None:
        super()._enter(entry)
        entry.client = self._clients.enter(entry.request.client)
        if entry.request.time_limit is not None:
            self._deadlines.push(entry.deadline, entry)
            self.learns = True
        if entry.request.max_gap is not None:
            self._promised.add(entry)
            self.learns = True

    def _ended(self, entry: Entry) -> None:
        super()._ended(entry)
        now, answered = time.monotonic(), isinstance(entry.outcome, Done)
        if answered:
            self.waiting.give_back(entry.client, float(entry.own.num_in_flight_tokens))
            self._outputs += OUTPUTS * (entry.own.num_output_tokens - self._outputs)
        self._deadlines.discard(entry)
        self._promised.discard(entry)
        self._backlog.remove([entry])
        if self._evidence.probes(entry):
            self._evidence.settled(entry, answered, now)
        self._count(entry)
        self._clients.leave(entry.client, now)

    def _count(self, entry: Entry) -> None:
        name = "" if entry.request.client == entry.id else str(entry.request.client)  # "": the request named no client
        if len(self._named) < NAMES:
            self._named.add(name)
        TOKENS.labels(name if name in self._named else "others").inc(entry.granted)

    def _decided(self, batch: Batch) -> None:
        super()._decided(batch)
        self._evidence.scheduled(batch, {(t.request.shape, t.request.cost_class) for t in batch.grants})
        self._backlog.remove(batch.admitted)
        for ticket in batch.grants:
            ticket.batches += 1

    def _returned(self, batch: Batch, elapsed: float, now: float) -> None:
        super()._returned(batch, elapsed, now)
        self._evidence.returned(batch, elapsed, now, clean=True)
