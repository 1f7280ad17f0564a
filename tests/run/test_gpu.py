"""A GPU that a process has lost, as PyTorch tells of it. With a real one: robots/serving/test_on_gpu.py."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from reflex_runtime.core.batch import Batch, Failed
from reflex_runtime.core.errors import ConfigError, ReflexError, Rejected
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.run.device import Device
from reflex_runtime.run.processor import BaseProcessor
from run.helpers import PATIENCE

ASSERTED = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported asynchronously"


class Raises(BaseProcessor):
    """Raises an error; without one it answers."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def run(self, batch: Batch) -> list[int]:
        if self.error is not None:
            raise self.error
        return [1] * len(batch)


@pytest.fixture
def torch_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception | None], None]:
    """Makes a torch whose GPU raises that, whatever is asked of it."""

    def make(error: Exception | None) -> None:
        def synchronize() -> None:
            if error is not None:
                raise error

        cuda = SimpleNamespace(synchronize=synchronize, is_initialized=lambda: True)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    return make


def asked(processor: Raises) -> tuple[Device, Ticket, threading.Event]:
    """A device that was asked once and has answered, and the event of its end."""
    told, fatal = threading.Event(), threading.Event()
    device = Device(Scheduler([GroupConfig()]), {"default": processor}, told.set, on_fatal=fatal.set)
    device.start()
    ticket = device.submit(Request(1))
    assert told.wait(PATIENCE)
    return device, ticket, fatal


def test_b17_a_lost_gpu_ends_the_device_at_once(torch_that: Callable[[Exception | None], None]) -> None:
    torch_that(RuntimeError(ASSERTED))
    device, ticket, fatal = asked(Raises(RuntimeError(ASSERTED)))
    assert fatal.wait(PATIENCE)
    assert isinstance(ticket.outcome, Failed)
    assert str(ticket.outcome.error).endswith(
        "the GPU is lost to this process: RuntimeError: CUDA error: device-side assert triggered"
    )
    with pytest.raises(Rejected):
        device.submit(Request(2))


@pytest.mark.parametrize(
    ("error", "gpu"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), RuntimeError(ASSERTED)),  # is not looked at
        (RuntimeError("CUDA error: invalid argument"), None),  # the GPU goes on
        (ValueError("no"), None),
        (ConfigError("CUDA error: operation not permitted when stream is capturing"), RuntimeError(ASSERTED)),
    ],
)
def test_b17_another_error_fails_its_requests_alone(
    torch_that: Callable[[Exception | None], None], error: Exception, gpu: Exception | None
) -> None:
    torch_that(gpu)
    processor = Raises(error)
    device, ticket, fatal = asked(processor)
    assert isinstance(ticket.outcome, Failed)
    assert isinstance(ticket.outcome.error, ReflexError)
    processor.error = None
    assert not fatal.is_set()
    device.submit(Request(2))
    assert device.stop()
