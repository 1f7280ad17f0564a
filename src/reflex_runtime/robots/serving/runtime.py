"""The part of a policy server below the wires: its policies on one device, their batcher and sinks, and its state.

States: initializing → loading → warming → ready; `warmup_failed`; `degraded`; `draining`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from reflex_runtime.core.errors import Closed, ConfigError
from reflex_runtime.core.events import BatchFinished
from reflex_runtime.observe.journal import WarmUpLine
from reflex_runtime.observe.journal_writer import JournalWriter, LineTarget, Recording, turn_all
from reflex_runtime.observe.logs import FailureLog, leave_stuck
from reflex_runtime.observe.metrics import Metrics
from reflex_runtime.observe.spans import spans_of
from reflex_runtime.robots import Policy
from reflex_runtime.robots.policy.observation import warm_decoders
from reflex_runtime.robots.serving.decode_pool import DecodePool
from reflex_runtime.robots.serving.served import PolicyPlan, ServedPolicy
from reflex_runtime.robots.serving.telemetry import header_of
from reflex_runtime.robots.versions.slots import SHADOW, Slot
from reflex_runtime.run.audience import Audience
from reflex_runtime.run.batcher import Batcher
from reflex_runtime.run.process import in_thread
from reflex_runtime.settings import DEFAULT_POLICY, ServeConfig
from reflex_runtime.web.errors import NotReady
from reflex_runtime.web.supervisor import Parent

log = logging.getLogger("reflex.server")

TICK = 1.0  # seconds between looks at the ramp, the guards and what may be unloaded


class PolicyRuntime:
    """The policies of one server. `start` returns when they are ready or have failed.

    policies: by name, in the order of their plans. active: requests that have entered and are not settled. journals:
    what it writes: a trace, a recording, and those that are sent to a caller.
    """

    def __init__(
        self,
        config: ServeConfig,
        plans: Sequence[PolicyPlan],
        on_fatal: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.state = "initializing"
        self.error = ""
        self.parent: Parent | None = None  # its supervisor, where there is one
        self.unusable = False  # a source itself is wrong: there is nothing to wait for
        self.metrics = Metrics(several=len(plans) > 1)
        self.spans = spans_of(config.otel, self.metrics.registry)
        self.trace: JournalWriter | None = None
        self.recorder: JournalWriter | None = None
        self.journals: list[JournalWriter] = []
        self.decode_pool = DecodePool()
        self.audience = Audience([self.metrics, FailureLog()])  # answers come before there is a batcher
        if self.spans is not None:
            self.audience.add(self.spans)
        self.policies = {plan.name: ServedPolicy(plan, self, alone=len(plans) == 1) for plan in plans}
        self.active = 0
        self.exchanges = False  # a policy is being loaded into a slot
        self.on_drain: list[Callable[[], None]] = []
        self.listening: dict[str, str] = {}  # addresses of wires on ports of their own, by their settings
        self._on_fatal = on_fatal
        self._batcher: Batcher | None = None
        self._journal: Callable[..., JournalWriter] = JournalWriter  # with what its first line says
        self._learned: list[WarmUpLine] = []  # at warm-up
        self._started = False
        self._over = asyncio.Event()  # `start` is
        self._clean = True
        self._stopped = False

    @property
    def first(self) -> ServedPolicy:
        """The policy of the first plan."""
        return next(iter(self.policies.values()))

    @property
    def default(self) -> ServedPolicy | None:
        """The policy that answers requests that name none: the only one, or the one of that name."""
        return self.first if len(self.policies) == 1 else self.policies.get(DEFAULT_POLICY)

    @property
    def slots(self) -> list[Slot]:
        """Those of all policies."""
        return [slot for served in self.policies.values() for slot in served.slots.values()]

    @property
    def batcher(self) -> Batcher:
        """The driver of the device."""
        assert self._batcher is not None
        return self._batcher

    @property
    def loaded(self) -> bool:
        """Whether the policies are there and their device runs."""
        return self._started

    @property
    def health(self) -> str:
        """Its state, or degraded: none of its policies answers."""
        return self.state if any(served.health == self.state for served in self.policies.values()) else "degraded"

    async def start(self) -> None:
        """Load, warm up, serve. A failure ends in the state `warmup_failed`, with its error.

        Cancelling does not end the thread that loads: reading a model file cannot be interrupted.
        """
        self._clean = False
        try:
            self.state = "loading"
            policies = await in_thread(self._load)
            self.state = "warming"
            self._batcher = self._build(policies)
            await self._batcher.start(self._warm)
        except Exception as error:
            self.state = "warmup_failed"
            self.unusable = isinstance(error, ConfigError)  # the message says what to mend, so no stack is logged
            self.error = str(error) if self.unusable else f"{type(error).__name__}: {error}"
            if not self.unusable:
                log.exception("the policy could not be started")
            if self._batcher is not None:
                await self._batcher.close(drain=False)
            self._clean = True
            self._over.set()
            return
        self._clean = True
        self._started = True
        self.state = "ready"
        for served in self.policies.values():
            served.rollout.begin(time.monotonic())
        asyncio.get_running_loop().call_later(TICK, self._tick)
        self._over.set()

    async def stop(self, until: float, answered: Callable[[], Awaitable[None]]) -> bool:
        """Answer what was asked until then, by the loop's clock, and end the rest. Returns whether no thread is left.

        answered: returns when every request has its answer.
        """
        self._stopped = True
        running = "" if self._clean else "a policy is still being loaded or warmed up"
        if self._started:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await answered()
            left = max(0.0, until - asyncio.get_running_loop().time())
            ended = await self.batcher.close(drain=True, timeout=left)
            if not ended or self.batcher.device.hung:
                running = "a batch is still running"
            elif any(served.loading for served in self.policies.values()):
                running = "a policy is still being loaded"
            self._clean = not running
        for journal in self.journals:
            journal.close()
        self.decode_pool.close()
        if self.spans is not None:
            await in_thread(self.spans.close)
        if running:
            log.warning("%s; leaving without it", running)
        return self._clean

    def drain(self) -> None:
        """The end has begun: new requests are refused."""
        if self.state != "warmup_failed":
            self.state = "draining"
        for served in self.policies.values():
            served.drain()
        for tell in self.on_drain:
            tell()

    def note(self, kind: str, **fields: object) -> None:
        """Write a note into every journal."""
        for journal in self.journals:
            journal.note(kind, **fields)

    def journaled(self, to: LineTarget) -> JournalWriter:
        """A further journal from now on, until `forget_journal`. NotReady before there is a policy."""
        self.need_policy()
        self.batcher.flush()  # what has happened before is not in it
        writer = self._journal(to)
        for learned in self._learned:
            writer.warmed(learned)
        self._add_journal(writer)
        return writer

    def forget_journal(self, writer: JournalWriter) -> None:
        """It gets no more events, and is the caller's to close."""
        self.batcher.flush()
        self.audience.remove(writer)
        self.journals.remove(writer)

    @property
    def writes_files(self) -> bool:
        """Whether it writes a trace or a recording."""
        return bool(self.config.trace or self.config.record)

    def turn_files(self) -> None:
        """Go on in new files."""
        turn_all()

    async def wait_started(self) -> bool:
        """Wait until `start` has returned. Returns whether the policies are there."""
        await self._over.wait()
        return self._started

    def need_policy(self) -> None:
        """Raise NotReady unless a policy is loaded."""
        if not self._started:
            if self.state == "draining":
                raise Closed("the server is shutting down", retry_after=1.0)
            if self.state == "warmup_failed":  # waiting does not help
                raise NotReady(f"the policy could not be started: {self.error}", state=self.state)
            raise NotReady(f"the server is {self.state}", retry_after=1.0, state=self.state)

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _load(self) -> dict[str, dict[str, Policy]]:
        """Of every policy what is in its slots."""
        if any(spec.images for served in self.policies.values() for spec in served.specs.values()):
            warm_decoders()
        return {name: served.load() for name, served in self.policies.items()}

    def _build(self, policies: Mapping[str, Mapping[str, Policy]]) -> Batcher:
        groups = [group for name, served in self.policies.items() for group in served.build(policies[name])]
        processors = {slot.group: slot for slot in self.slots}
        expendable = {slot.group for slot in self.slots if slot.name == SHADOW}
        batcher = Batcher(
            processors,
            groups,
            self.audience,
            self.config.watchdog_s,
            on_fatal=self._on_fatal,
            expendable=expendable,
            brief=self.config.brief_ms / 1e3,
            on_stuck=leave_stuck,
        )
        of_group = {slot.group: served for served in self.policies.values() for slot in served.slots.values()}

        def notes(event: BatchFinished) -> dict[str, str]:
            return of_group[event.batch.group].notes(event)

        header = header_of(list(self.policies.values()))
        self._journal = partial(JournalWriter, groups=groups, header=header, notes=notes)
        self._open_journals()
        for served in self.policies.values():
            served.join(batcher)
        return batcher

    def _open_journals(self) -> None:
        config, journal = self.config, self._journal
        if config.trace:
            self.trace = journal(config.trace)
            self._add_journal(self.trace)
        if config.record:
            images, gzip = config.record_images, not config.record_no_gzip
            to = Recording(config.record, gzip, images, config.record_max_mb << 20)  # type: ignore[arg-type]
            recorder = self.recorder = journal(to)
            self._add_journal(recorder)
            self.metrics.add_recording(lambda: recorder.dropped, lambda: recorder.error is not None)

    def _add_journal(self, journal: JournalWriter) -> None:
        self.journals.append(journal)
        self.audience.add(journal)

    def _warm(self) -> None:
        for served in self.policies.values():
            for learned in served.warm():
                self._learned.append(learned)
                for journal in self.journals:
                    journal.warmed(learned)

    def _tick(self) -> None:
        """Once a second, also after a failure."""
        if self._stopped:
            return
        now = time.monotonic()
        for served in self.policies.values():
            try:
                served.look(now)
            except Exception:
                log.exception("the look at objective, guards and versions failed, and comes again in a second")
        asyncio.get_running_loop().call_later(TICK, self._tick)
