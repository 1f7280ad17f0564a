"""A replica that is started again takes only the time that the others leave over, until it is ready."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reflex_runtime.replicas import quiet_start
from reflex_runtime.replicas import replica as replica_module
from reflex_runtime.replicas.messages import Serve
from reflex_runtime.replicas.quiet_start import QuietStart, may_leave_idle
from reflex_runtime.replicas.replica import Replica, ReplicaPlan

THREADS = """
import subprocess, sys, threading
sys.stdin.readline()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(child.pid, flush=True)
sys.stdin.readline()
child.communicate()
"""


def policies(pid: int) -> set[int]:
    return {os.sched_getscheduler(int(name)) for name in os.listdir(f"/proc/{pid}/task")}


@pytest.mark.parametrize("idle", [True, False])
def test_x7_a_process_that_starts_is_lowered_and_raised_with_all_its_threads(
    idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the way back from SCHED_IDLE is closed, it takes another way."""
    if idle and not may_leave_idle():
        pytest.skip("this process may not leave SCHED_IDLE")
    monkeypatch.setattr(quiet_start, "may_leave_idle", lambda: idle)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        quiet = QuietStart(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        assert policies(process.pid) == policies(child) == {os.SCHED_IDLE if idle else os.SCHED_BATCH}
        quiet.end()
        assert policies(process.pid) == policies(child) == {os.SCHED_OTHER}
        os.sched_setscheduler(process.pid, os.SCHED_BATCH, os.sched_param(0))
        quiet.end()  # of another's choice since
        assert os.SCHED_BATCH in policies(process.pid)
        process.stdin.write("\n")
    QuietStart(process.pid).end()  # it has ended


def test_x7_a_scheduling_policy_that_somebody_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_FIFO)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *told: chosen.append(told))
    QuietStart(os.getpid()).end()
    assert chosen == []


class Told:
    """Stands for `QuietStart`: what was asked of it."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.ended = asyncio.Event()

    def __call__(self, pid: int) -> Told:
        self.said.append(pid)
        return self

    def end(self) -> None:
        self.said.append("ended")
        self.ended.set()


def test_x7_only_a_replica_that_starts_beside_others_is_lowered_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the first start, which nobody would notice. One that takes long is raised, whatever it is at."""

    async def opened(handler: Any) -> Any:
        return SimpleNamespace(process=SimpleNamespace(pid=7))

    async def main() -> None:
        told = Told()
        monkeypatch.setattr(replica_module, "spawned", lambda *_: opened)
        monkeypatch.setattr(replica_module, "QuietStart", told)
        plan = ReplicaPlan("replica-0", "cpu", Serve("replica-0", {}, {}, []), {})
        replica = Replica(plan, lambda *_: None, lambda *_: None, lambda *_: None)

        async def fails(method: str, serve: Serve) -> None:
            raise RuntimeError("it did not start")

        await replica._open(cast(Any, None))
        assert told.said == []
        replica.client.restarts = 1
        await replica._open(cast(Any, None))
        assert told.said == [7]
        with pytest.raises(RuntimeError, match="it did not start"):
            await replica._prepare(cast(Any, SimpleNamespace(request=fails)))
        assert told.said == [7, "ended"]
        told.ended.clear()
        monkeypatch.setattr(replica_module, "LONGEST", 0.0)
        await replica._open(cast(Any, None))
        await told.ended.wait()  # while it still imports: it has answered nothing
        assert told.said == [7, "ended", 7, "ended"]
        replica._close_channel()

    asyncio.run(asyncio.wait_for(main(), 30.0))
