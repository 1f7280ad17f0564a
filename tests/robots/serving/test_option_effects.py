"""What an option changes, measured where a number would not show it: each of these fails when the option is inert."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reflex_runtime.core.batch import Batch, Done
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.group import Group
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.robots import Export
from reflex_runtime.robots.app import App
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.robots.versions import slots
from reflex_runtime.run.onnx_session import CPU, CUDA
from reflex_runtime.settings import ServeConfig
from serving.harness import PATIENCE, STATE
from serving.in_process import Caller, with_app

# -- --provider --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "asked"), [("cuda", CUDA), ("cpu", CPU), (CUDA, CUDA)])
def test_h10_the_provider_is_the_one_onnx_runtime_is_asked_for(
    given: str, asked: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    sessions: list[Any] = []

    def session(path: str, options: Any, providers: list[Any]) -> Any:
        sessions.append(providers)
        raise RuntimeError("enough was seen")

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    with pytest.raises(ConfigError, match="enough was seen"):
        slots.load(ServeConfig(provider=given), "prod", Export.load(tiny))
    (((provider, _),),) = sessions  # one session, one provider
    assert provider == asked


# -- how slots share a device ------------------------------------------------------------------------------------------


class Device:
    """The scheduler of a server with these slots, in virtual time, on a device of 10 ms a batch. ran: what ran when."""

    def __init__(self, *names: str) -> None:
        config = replace(ServeConfig(), max_batch_size=1)
        plain = {"stages": ("",), "captured_sizes": (), "padded_stages": ()}
        policies: Any = {name: SimpleNamespace(slot=name, **plain) for name in names}
        self.scheduler = Scheduler([slots.group_of(config, name, policy) for name, policy in policies.items()])
        self.now = 0.0
        self.ran: list[tuple[float, str]] = []

    def ask(self, slot: str, n: int = 1) -> None:
        for _ in range(n):
            self.scheduler.submit(Request(group=slot, client=slot), self.now)

    def run(self, until: float) -> None:
        while self.now < until:
            batch: Batch | None = self.scheduler.next_batch(self.now)
            if batch is None:
                self.now = min(until, max(self.now + 1e-6, self.scheduler.wake_at()))
                continue
            self.ran.append((self.now, batch.group))
            self.now += 0.010
            self.scheduler.complete(batch, [Done(None)] * len(batch), 0.010, self.now)


def test_v1_two_versions_share_the_device_evenly() -> None:
    device = Device("a", "b")
    device.ask("a", 100)
    device.ask("b", 100)
    device.run(1.0)
    counts = [sum(group == name for _, group in device.ran) for name in ("a", "b")]
    assert counts[0] + counts[1] == 100
    assert abs(counts[0] - counts[1]) <= 2


def test_v10_a_shadow_waits_for_a_gap_that_is_likely_long_enough() -> None:
    device = Device("prod", "shadow")
    for _ in range(200):  # one request every 20 ms, answered in 10: idle half of the time, and never for long
        device.ask("prod")
        if len(device.ran) == 100:
            device.ask("shadow")
        device.run(device.now + 0.020)
    assert {group for _, group in device.ran} == {"prod"}
    asked, device.ran = device.now, []
    device.run(device.now + 10.0)
    ((began, group),) = device.ran
    assert group == "shadow"
    assert began > asked + 0.010  # once the rate has fallen, not at once


# -- priority ----------------------------------------------------------------------------------------------------------


def test_h1_priority_decides_who_goes_first(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "promote", lambda self, now: None)  # else background work counts as default after 1 s
    order: list[str] = []

    async def check(app: App, runtime: PolicyRuntime) -> None:
        gate, processor = threading.Event(), runtime.first.slots["prod"]
        run = processor.run

        def gated(batch: Batch) -> Any:
            assert gate.wait(PATIENCE)
            return run(batch)

        processor.run = gated  # type: ignore[method-assign]

        async def ask(priority: str) -> None:
            caller = Caller(app)
            caller.say(json.dumps({"state": STATE, "priority": priority}).encode())
            assert (await caller.answer()).status == 200
            order.append(priority)

        asking = [asyncio.create_task(ask("default"))]  # runs, and everything else waits for it
        while runtime.batcher.device.running_since is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        asking += [asyncio.create_task(ask(priority)) for priority in ("background", "default", "urgent")]
        while runtime.batcher.scheduler.unsettled("prod") < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*asking)

    with_app(tiny, check, max_batch_size=1)
    assert order == ["default", "urgent", "default", "background"]
