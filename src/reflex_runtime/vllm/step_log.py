"""Every step of vLLM in our journal: its members, their tokens and outcomes, and its time.

vLLM's requests and steps become the core's tickets, batches and events, so that one writer writes all journals, and the
core's cost model learns the time of a step. With asynchronous scheduling, a step is decided while the one before it
runs. The time of a step begins with its decision, or with the return of the step before it, whichever is later. If a
request ends while a later step computes it, it ends with that step.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import count
from typing import Any, Final, NamedTuple

from prometheus_client import Counter
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
from reflex_runtime.vllm.entry import GROUP, Entry, VllmSettings

# vLLM's /metrics shows them if its processes share `PROMETHEUS_MULTIPROC_DIR`: the scheduler has its own process.
STEPS: Final = Counter("reflex_step_seconds", "Seconds of steps whose time was predicted", ["kind"])


class StepInFlight(NamedTuple):
    """A step that has not returned. computed: for each member, its computed tokens before the step."""

    output: SchedulerOutput
    batch: Batch
    computed: list[float]


class TracedScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's own scheduler, which decides, with our journal. learns: whether steps are recorded and timed."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.settings = VllmSettings.read(vllm_config.additional_config)
        super().__init__(vllm_config, *args, **kwargs)
        gap, parallel = self.settings.max_gap_ms, vllm_config.parallel_config
        self.model = TimedTokens(gap=None if gap is None else gap / 1e3)
        self.learns = self.settings.trace is not None
        self.entries: dict[str, Entry] = {}
        self._writer = self._journal()
        self._arrivals, self._numbers = count(), count()
        self._steps: deque[StepInFlight] = deque()
        self._residents: set[Ticket] = set()
        self._left: list[Ticket] = []  # residents that lost their place since the last step
        self._returned_at = 0.0
        # On a CPU vLLM computes a step inside of the call that submits it, and takes its tokens one step later: such a
        # step ends when vLLM next calls the scheduler.
        self._inline = current_platform.is_cpu() and parallel.distributed_executor_backend == "uni"
        self._submitted_at = 0.0
        self._ran: deque[float] = deque()  # seconds of steps in flight that were computed so

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:  # else it is the next part of a session
            self._enter(Entry(request, next(self._arrivals)))
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._called()
        output: SchedulerOutput = super().schedule(throttle_prefills)
        if self.learns and output.total_num_scheduled_tokens:
            self._decided(self._batch(output))
            self._submitted_at = time.monotonic()
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        self._called()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._steps and self._steps[0].output is scheduler_output:
            _, batch, computed = self._steps.popleft()
            now = time.monotonic()
            elapsed = self._ran.popleft() if self._ran else now - max(batch.scheduled_at, self._returned_at)
            self._returned_at = now
            for ticket, before in zip(batch.grants, computed, strict=True):
                ticket.computed = before  # `_batch` of a later step may have raised it
            self._returned(batch, elapsed, now)
        return outputs

    def shutdown(self) -> None:
        if self._writer is not None:
            self._writer.close()
        super().shutdown()

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        found = super()._free_request(request, delay_free_blocks)
        self._ended(self.entries.pop(request.request_id))
        return found

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._leave(self.entries[request.request_id])

    # -- requests and steps, as `FairScheduler` extends them -----------------------------------------------------------

    def _enter(self, entry: Entry) -> None:
        self.entries[entry.id] = entry

    def _ended(self, entry: Entry) -> None:
        """A request has its outcome. If a step in flight has it, its end is written with that step."""
        entry.outcome = entry.outcome or entry.result()
        if not self._runs(entry):
            self._leave(entry)
            self._settle(entry, time.monotonic())
        self._residents.discard(entry)

    def _decided(self, batch: Batch) -> None:
        if self._writer is not None:
            self._writer(BatchScheduled(batch.scheduled_at, batch, self.get_request_counts()[1]))

    def _returned(self, batch: Batch, elapsed: float, now: float) -> None:
        """vLLM has taken the tokens of a step. elapsed: seconds of the step."""
        self.model.observe(batch, elapsed)
        STEPS.labels("predicted").inc(batch.expected)
        STEPS.labels("measured").inc(elapsed if batch.expected else 0.0)
        if self._writer is None:
            return
        self._writer(BatchFinished(now, batch, elapsed, crashed=False))
        for entry in batch.grants:
            assert isinstance(entry, Entry)
            tokens = entry.own.num_output_tokens
            new, entry.written = max(0, tokens - entry.written), tokens
            ended = entry.outcome is not None and not self._runs(entry)
            for _ in range(max(1, new) - ended):
                self._writer(RequestProgressed(now, entry, new or None))
            if ended:
                self._settle(entry, now)

    # -- the journal ---------------------------------------------------------------------------------------------------

    def _called(self) -> None:
        if self._inline and len(self._ran) < len(self._steps):
            self._ran.append(time.monotonic() - self._submitted_at)

    def _runs(self, entry: Entry) -> bool:
        return any(entry in step.batch.grants for step in self._steps)

    def _leave(self, entry: Entry) -> None:
        if entry in self._residents:
            self._residents.discard(entry)
            self._left.append(entry)

    def _batch(self, output: SchedulerOutput) -> Batch:
        """The step that was decided, as a batch in flight."""
        grants: dict[Ticket, float] = {}
        for name, tokens in output.num_scheduled_tokens.items():
            entry = self.entries[name]
            grants[entry] = float(tokens)
            entry.computed = float(entry.own.num_computed_tokens - tokens)
        new = tuple(ticket for ticket in grants if ticket not in self._residents)
        drafts: dict[Ticket, float] = {
            self.entries[name]: float(len(guesses)) for name, guesses in output.scheduled_spec_decode_tokens.items()
        }
        batch = Batch(
            id=next(self._numbers),
            group=GROUP,
            partition="",
            stage="",
            cause=Cause.STEP,
            scheduled_at=time.monotonic(),
            cost=float(output.total_num_scheduled_tokens),
            expected=tally_of(self.model, {t: units - drafts.get(t, 0.0) for t, units in grants.items()}).seconds,
            grants=grants,
            admitted=new,
            left=tuple(self._left),
            short_of=self._short_of(output),
            cached={ticket: ticket.computed for ticket in new if ticket.computed},
            extra=drafts,
        )
        self._left.clear()
        self._residents.update(new)
        for ticket in new:
            if ticket.admission is None:
                ticket.started = batch.scheduled_at
                ticket.admission = AdmittedBatch(batch.id, len(new), *batch.cause.names, batch.cost)
        self._steps.append(StepInFlight(output, batch, [ticket.computed for ticket in grants]))
        return batch

    def _short_of(self, output: SchedulerOutput) -> str:
        """What the step was short of, so that some requests still wait; "" if none does."""
        if not self.get_request_counts()[1]:
            return ""
        if output.total_num_scheduled_tokens >= self.max_num_scheduled_tokens:
            return "budget"
        return "places" if len(self.running) >= self.max_num_active_reqs else "memory"

    def _settle(self, entry: Entry, now: float) -> None:
        """Write the end of a request: as a member of its last step, and as a line of its own."""
        if self._writer is None:
            return
        self._writer(RequestSettled(now, entry))
        request, failed = entry.request, entry.outcome if isinstance(entry.outcome, Failed) else None
        error = failed.error if failed is not None and isinstance(failed.error, ReflexError) else None
        limit_ms = None if request.time_limit is None else 1e3 * request.time_limit
        record = RequestRecord(entry.id, robot_id=str(request.client), deadline_ms=limit_ms)
        outcome, status = ("ok", 200) if error is None else (error.outcome, error.http_status)
        took = now - entry.arrived
        self._writer(RequestAnswered(now, GROUP, outcome, status, took, entry, record, took, error=error))

    def _journal(self) -> JournalWriter | None:
        path, parallel = self.settings.trace, self.vllm_config.parallel_config
        if path is None:
            return None
        if parallel.data_parallel_size > 1:  # there are several engines: a journal for each
            path = f"{path}.{parallel.data_parallel_index}"
        flush = FlushPolicy.every_step(self.max_num_scheduled_tokens, self.max_num_active_reqs)
        group = GroupConfig(name=GROUP, flush=flush, cost=TimedTokens)
        return JournalWriter(path, [group], header={"model_type": self.vllm_config.model_config.model})
