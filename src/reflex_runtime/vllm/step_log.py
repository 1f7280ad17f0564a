"""Every step of vLLM in our journal: who was in it, with how many tokens, how long it took, and what became of them.

vLLM's requests and steps become the core's tickets, batches and events, so that one writer writes all journals, and the
core's cost model learns what steps take. Steps overlap where scheduling is asynchronous: one is decided while the one
before it runs. A step counts from when it was decided or the one before it had come back; a request that ends while a
later step has it ends with that one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from reflex_runtime.core.batch import (
    Batch,
    BatchFinished,
    BatchScheduled,
    Cause,
    Failed,
    RequestAnswered,
    RequestProgressed,
    RequestSettled,
)
from reflex_runtime.core.cost import tally_of
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import AdmittedBatch, Ticket
from reflex_runtime.core.token_budget import TimedTokens
from reflex_runtime.observe.journal_writer import JournalWriter, RequestRecord
from reflex_runtime.vllm import metrics, versions
from reflex_runtime.vllm.entry import GROUP, Entry, VllmSettings, outcome_of


class StepInFlight(NamedTuple):
    """One that is not back. computed: what its members had before it."""

    output: SchedulerOutput
    batch: Batch
    computed: list[float]


class StepLog:
    """The steps of one scheduler: learns how long they take, and writes them where a journal is asked for.

    inline: whether vLLM computes in the call that hands a step over, as on a CPU. Its tokens are taken a step later,
    so what it took is measured when vLLM calls again.
    """

    def __init__(self, model: TimedTokens, writer: JournalWriter | None, inline: bool) -> None:
        self._model, self._writer, self._inline = model, writer, inline
        self._steps: deque[StepInFlight] = deque()
        self._ran: deque[float] = deque()  # seconds of those of them that ran inline
        self._numbers = count()
        self._residents: set[Ticket] = set()
        self._left: list[Ticket] = []
        self._handed = self._returned = 0.0

    def __contains__(self, output: SchedulerOutput) -> bool:
        """Whether it is the oldest step that is not back."""
        return bool(self._steps) and self._steps[0].output is output

    def called(self) -> None:
        """vLLM calls the scheduler again."""
        if self._steps and self._inline and len(self._ran) < len(self._steps):
            self._ran.append(time.monotonic() - self._handed)

    def scheduled(self, output: SchedulerOutput, entries: Mapping[str, Entry], queued: int, short_of: str) -> Batch:
        """A step has been decided."""
        grants: dict[Ticket, float] = {}
        for name, tokens in output.num_scheduled_tokens.items():
            entry = entries[name]
            grants[entry] = float(tokens)
            entry.computed = float(entry.own.num_computed_tokens - tokens)
        new = tuple(ticket for ticket in grants if ticket not in self._residents)
        drafts: dict[Ticket, float] = {
            entries[name]: float(len(guesses)) for name, guesses in output.scheduled_spec_decode_tokens.items()
        }
        now = time.monotonic()
        batch = Batch(
            id=next(self._numbers),
            group=GROUP,
            partition="",
            stage="",
            cause=Cause.STEP,
            scheduled_at=now,
            cost=float(output.total_num_scheduled_tokens),
            expected=tally_of(self._model, {t: units - drafts.get(t, 0.0) for t, units in grants.items()}).seconds,
            grants=grants,
            admitted=new,
            left=tuple(self._left),
            short_of=short_of,
            cached={ticket: ticket.computed for ticket in new if ticket.computed},
            extra=drafts,
        )
        self._left.clear()
        self._residents.update(new)
        for ticket in new:
            if ticket.admission is None:
                ticket.started, ticket.admission = (
                    now,
                    AdmittedBatch(batch.id, len(new), *batch.cause.names, batch.cost),
                )
        self._steps.append(StepInFlight(output, batch, [ticket.computed for ticket in grants]))
        if self._writer is not None:
            self._writer(BatchScheduled(now, batch, queued))
        self._handed = time.monotonic()
        return batch

    def returned(self) -> tuple[Batch, float]:
        """The oldest step has come back, and vLLM has taken its tokens: the step, and the seconds that it took."""
        now = time.monotonic()
        _, batch, computed = self._steps.popleft()
        elapsed = self._ran.popleft() if self._ran else now - max(batch.scheduled_at, self._returned)
        self._returned = now
        for ticket, before in zip(batch.grants, computed, strict=True):
            ticket.computed = before  # a later step may have been decided
        self._model.observe(batch, elapsed)
        if self._writer is not None:
            self._write(self._writer, batch, elapsed, now)
        return batch, elapsed

    def _write(self, writer: JournalWriter, batch: Batch, elapsed: float, now: float) -> None:
        writer(BatchFinished(now, batch, elapsed, crashed=False))
        for entry in batch.grants:
            assert isinstance(entry, Entry)
            tokens = entry.own.num_output_tokens
            new, entry.told = max(0, tokens - entry.told), tokens
            ended = entry.outcome is not None and not self._has(entry)
            for _ in range(max(1, new) - ended):
                writer(RequestProgressed(now, entry, new or None))
            if ended:
                _settle(writer, entry, now)

    def ended(self, entry: Entry) -> None:
        """A request has its outcome. One that a step has is told with it."""
        if not self._has(entry):
            self.preempted(entry)
            if self._writer is not None:
                _settle(self._writer, entry, time.monotonic())
        self._residents.discard(entry)

    def preempted(self, entry: Entry) -> None:
        if entry in self._residents:
            self._residents.discard(entry)
            self._left.append(entry)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _has(self, entry: Entry) -> bool:
        return any(entry in step.batch.grants for step in self._steps)


def _settle(writer: JournalWriter, entry: Entry, now: float) -> None:
    """A request has ended: for its last step, and as a line of its own."""
    writer(RequestSettled(now, entry))
    request, failed = entry.request, entry.outcome if isinstance(entry.outcome, Failed) else None
    error = failed.error if failed is not None and isinstance(failed.error, ReflexError) else None
    limit_ms = None if request.time_limit is None else 1e3 * request.time_limit
    record = RequestRecord(entry.id, robot_id=str(request.client), deadline_ms=limit_ms)
    outcome, status = ("ok", 200) if error is None else (error.outcome, error.http_status)
    took = now - entry.arrived
    writer(RequestAnswered(now, GROUP, outcome, status, took, entry, record, took, error=error))


class TracedScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's own scheduler, watched: it decides as before."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        versions.check()
        self.settings = VllmSettings.read(vllm_config.additional_config)
        super().__init__(vllm_config, *args, **kwargs)
        gap, parallel = self.settings.max_gap_ms, vllm_config.parallel_config
        self.model = TimedTokens(gap=None if gap is None else gap / 1e3)
        inline = current_platform.is_cpu() and parallel.distributed_executor_backend == "uni"
        self.steps = StepLog(self.model, self._journal(), inline)
        self.learns = self.settings.trace is not None  # else steps are not looked at
        self.entries: dict[str, Entry] = {}
        self._arrivals = count()

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:  # else the next part of a session
            self._enter(Entry(request, next(self._arrivals)))
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.steps.called()
        output: SchedulerOutput = super().schedule(throttle_prefills)
        if self.learns and output.total_num_scheduled_tokens:
            waiting = self.get_request_counts()[1]
            self._decided(self.steps.scheduled(output, self.entries, waiting, self._short_of(output, waiting)))
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        self.steps.called()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output in self.steps:
            self._returned(*self.steps.returned())
        return outputs

    def shutdown(self) -> None:
        self.steps.close()
        super().shutdown()

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        found = super()._free_request(request, delay_free_blocks)
        self._ended(self.entries.pop(request.request_id))
        return found

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.steps.preempted(self.entries[request.request_id])

    # -- what happens to requests and steps, for those who decide --------------------------------------------------

    def _enter(self, entry: Entry) -> None:
        self.entries[entry.id] = entry

    def _ended(self, entry: Entry) -> None:
        entry.outcome = entry.outcome or outcome_of(entry.own)
        self.steps.ended(entry)

    def _decided(self, batch: Batch) -> None:
        """A step is on its way."""

    def _returned(self, batch: Batch, elapsed: float) -> None:
        """It is back, after so many seconds."""
        metrics.STEPS.labels("predicted").inc(batch.expected)
        metrics.STEPS.labels("measured").inc(elapsed if batch.expected else 0.0)

    def _short_of(self, output: SchedulerOutput, waiting: int) -> str:
        """What kept those out that still wait."""
        if not waiting:
            return ""
        if output.total_num_scheduled_tokens >= self.max_num_scheduled_tokens:
            return "budget"
        return "places" if len(self.running) >= self.max_num_active_reqs else "memory"

    def _journal(self) -> JournalWriter | None:
        path, parallel = self.settings.trace, self.vllm_config.parallel_config
        if path is None:
            return None
        if parallel.data_parallel_size > 1:  # an engine each
            path = f"{path}.{parallel.data_parallel_index}"
        flush = FlushPolicy.every_step(self.max_num_scheduled_tokens, self.max_num_active_reqs)
        group = GroupConfig(name=GROUP, flush=flush, cost=TimedTokens)
        return JournalWriter(path, [group], header={"model_type": self.vllm_config.model_config.model})
