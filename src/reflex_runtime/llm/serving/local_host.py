"""What runs in this process, on one device of a thread of its own: its state, its trace, and those who watch it."""

from __future__ import annotations

from typing import Any

from reflex_runtime.drivers.audience import Sink
from reflex_runtime.llm.serving.model_device import ModelDevice
from reflex_runtime.telemetry.journal_writer import JournalWriter
from reflex_runtime.telemetry.lines import turn_all
from reflex_runtime.telemetry.processes import LiveProcess


class LocalHost:
    """The part of a `ServingHost` that is the same for every kind of model. trace: file of its batches, or ""."""

    def __init__(self, device: ModelDevice, trace: str) -> None:
        self.device = device
        self.trace = JournalWriter(trace, device.groups) if trace else None
        if self.trace is not None:
            device.batcher.add_sink(self.trace)

    @property
    def state(self) -> str:
        """degraded while a step hangs."""
        return "degraded" if self.device.hangs else "ready"

    def of_device(self) -> dict[str, Any]:
        """What /health says of the device and the trace."""
        body: dict[str, Any] = {"hung_steps": self.device.batcher.device.hung}
        if self.trace is not None and self.trace.error is not None:
            body["trace_error"] = str(self.trace.error)
        return body

    async def status(self) -> dict[str, Any]:
        """The same as /health, because the engine is in the server's process."""
        return {}

    def add_sink(self, sink: Sink) -> None:
        """See `ServingHost.add_sink`."""
        self.device.batcher.add_sink(sink)

    def remove_sink(self, sink: Sink) -> None:
        """See `ServingHost.remove_sink`."""
        self.device.batcher.remove_sink(sink)

    def fold(self) -> None:
        """None: its sinks get the events of its batches."""

    def processes(self) -> list[LiveProcess]:
        """None: the engine is in the server's process."""
        return []

    def queues(self) -> dict[str, Any]:
        """See `ServingHost.queues`. Events without an answer are delivered first."""
        batcher = self.device.batcher
        batcher.flush()
        groups: dict[str, Any] = batcher.device.input(lambda scheduler, _: scheduler.snapshot()["groups"])
        return groups

    def refresh(self) -> None:
        """Bring the series up to date."""
        self.device.batcher.flush()

    async def metrics(self) -> bytes:
        """Nothing beyond what is in the registry."""
        self.refresh()
        return b""

    def turn(self) -> None:
        """See `ServingHost.turn`."""
        turn_all()

    async def close(self, timeout: float, drain: bool = True) -> bool:
        """See `ServingHost.close`."""
        clean = await self.device.close(drain, timeout)
        if self.trace is not None:
            self.trace.close()
        return clean
