"""Batches of an application in this process, kept waiting."""

from __future__ import annotations

import threading
from typing import Any, Final

import pytest

from reflex_runtime.run import device
from serving.harness import PATIENCE

HELD: Final[dict[str, Any]] = {"watchdog_s": 0.0, "brief_ms": 0.0}  # for `with_app`: a batch may wait, not on the loop


def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From now on no batch runs before the event is set."""
    go, run = threading.Event(), device.run_batch

    def held(*given: Any) -> Any:
        assert go.wait(PATIENCE)
        return run(*given)

    monkeypatch.setattr(device, "run_batch", held)
    return go
