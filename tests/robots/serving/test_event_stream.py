"""One event stream: what the sinks of a server make of it does not depend on the order they were added in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from core.helpers import ask, finish, scheduler_of, take
from core.test_isolation import ERROR
from reflex_runtime.core.batch import Done, Event, Failed, RequestAnswered, RequestSettled
from reflex_runtime.core.cost import UnitCost
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.observe.journal_writer import JournalWriter, Recording, RequestRecord
from reflex_runtime.observe.logs import FailureLog
from reflex_runtime.observe.metrics import Metrics
from reflex_runtime.robots import Export
from reflex_runtime.robots.app import application
from reflex_runtime.robots.versions.breaker import Breaker
from reflex_runtime.robots.versions.ramp import Change, Objective, SloTracker
from reflex_runtime.robots.versions.rollout import Rollout
from reflex_runtime.run.audience import Audience
from reflex_runtime.settings import ServeConfig
from reflex_runtime.web.app import App
from serving.harness import STATE
from serving.in_process import Caller, nothing, one_policy


def _history(tell: Callable[[Event], None]) -> None:
    """Batches of one slot that answers, then crashes until it is drained, then answers again."""
    scheduler = scheduler_of(name="prod", cost=UnitCost)
    for i in range(30):
        now, crashes = float(i), 10 <= i < 20
        ask(scheduler, now, group="prod", client=i % 4, id=f"r{i}")
        finish(scheduler, take(scheduler, now), now + 0.5, 0.5, Failed(ERROR) if crashes else Done())
        for event in scheduler.take_events():
            tell(event)
            if isinstance(event, RequestSettled):
                ticket, outcome, status = event.ticket, "failed" if crashes else "ok", 500 if crashes else 200
                detail = RequestRecord(request_id=ticket.id)
                tell(RequestAnswered(event.at, "prod", outcome, status, 0.5 + i, ticket, detail, 0.01 * i))


def _found(folder: Path, order: Random | None, caplog: pytest.LogCaptureFixture) -> list[Any]:
    """What each sink made of the history. order: shuffles the sinks."""
    folder.mkdir()
    caplog.clear()
    changes: list[Change] = []

    def on_change(change: Change) -> None:
        changes.append(change)
        recorder.note("decision", action=change.kind, why=change.why)

    rollout = Rollout(("prod",), Breaker(("prod",)), on_change=on_change)
    metrics, slo = Metrics(), SloTracker(Objective(50.0, 0.1), "503")
    metrics.add_slot("prod", "arm", lambda: 0.0, lambda: 0.0, lambda: 0.0)
    header = {"session_id": "s", "model_hash": "m", "config_hash": "c", "export_dir": "/v1", "model_type": "flow",
              "export_kind": "monolithic", "embodiment": "arm", "hardware": {}, "providers": []}  # fmt: skip
    recorder = JournalWriter(
        Recording(folder, gzip=False), header=header, clock=lambda: 0.0, wall=lambda: 1000.0, notes=rollout.notes
    )
    trace = JournalWriter(folder / "trace", clock=lambda: 0.0, notes=rollout.notes)
    sinks = [metrics, rollout, slo, FailureLog(), recorder, trace]
    if order is not None:
        order.shuffle(sinks)
    _history(Audience(sinks).publish)
    assert recorder.close()
    assert trace.close()
    assert recorder.path is not None
    page = [line for line in metrics.render().decode().splitlines() if "_created" not in line]
    logged = sorted(caplog.messages)
    batches = read_journal(trace.path).batches
    recorded, breaker = recorder.path.read_text(), rollout.breaker.snapshot(100.0)
    return [page, batches, recorded, changes, breaker, slo.value, slo.value, logged]


def test_the_order_of_sinks_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = _found(tmp_path / "first", None, caplog)
    verdicts = [batch.notes.get("verdict") for batch in first[1]]
    assert verdicts == [None] * 14 + ["degraded"] * 7 + [None] * 9  # it counts the crash, not yet the answer
    assert '"verdict":"degraded"' in first[2]
    assert [change.kind for change in first[3]] == ["drain", "return"]
    assert first[-1]
    for seed in range(20):
        assert _found(tmp_path / str(seed), Random(seed), caplog) == first, seed


def test_an_answer_before_there_is_a_policy_is_in_the_stream(tiny: Path) -> None:
    """No batcher and no ticket: every sink gets it all the same."""
    seen: list[RequestAnswered] = []

    class Sink:
        events = frozenset({RequestAnswered})

        def __call__(self, event: RequestAnswered) -> None:
            seen.append(event)

    async def main() -> None:
        runtime = one_policy(ServeConfig(), {"prod": Export.load(tiny)})
        runtime.audience.add(Sink())  # type: ignore[arg-type]
        app = application(runtime)
        assert await _status(app) == 503
        await runtime.start()
        assert await _status(app) == 200
        await runtime.stop(asyncio.get_running_loop().time() + 1.0, nothing)
        app.bodies.close()
        page = runtime.metrics.render().decode().splitlines()
        counted = [line for line in page if line.startswith("reflex_requests_total") and line.endswith(" 1.0")]
        assert ["rejected" in line for line in sorted(counted)] == [False, True]

    asyncio.run(main())
    refused, answered = seen
    assert (refused.outcome, refused.status, refused.ticket) == ("rejected", 503, None)
    assert answered.outcome == "ok"
    assert answered.served_in is not None
    assert 0.0 < answered.served_in <= answered.latency


async def _status(app: App) -> int:
    caller = Caller(app)
    caller.say(json.dumps({"state": STATE}).encode())
    return (await caller.answer()).status
