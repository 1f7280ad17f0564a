"""Where the batches of a server run: an operator sees it in the metrics and in the trace, and can fix it."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

from reflex_runtime.observe.journal import read_journal
from reflex_runtime.run.device import PROOF
from serving.harness import Server
from serving.requests import numbered, right

ON_LOOP = "reflex_batch_on_loop_total"

# Run in the server's process: a call takes so long, by the clock.
TAKES = """
import time
from reflex_runtime.robots.sources.export_directory import OnnxWhole
_chunk = OnnxWhole.chunk
def _slow(self, rows, noise):
    time.sleep({seconds})
    return _chunk(self, rows, noise)
OnnxWhole.chunk = _slow
"""

# Run in the server's process: every batch counts as brief, and a call on the event loop does not come back.
HANGS = """
import threading, time
from reflex_runtime.run.device import BriefBatches
from reflex_runtime.robots.sources.export_directory import OnnxWhole
_chunk, _ran = OnnxWhole.chunk, BriefBatches.ran
def _hang(self, rows, noise):
    while threading.current_thread() is threading.main_thread():
        time.sleep(600)
    return _chunk(self, rows, noise)
OnnxWhole.chunk = _hang
BriefBatches.ran = lambda self, batch, seconds, failed=False: _ran(self, batch, 0.0, failed)
"""


def test_p50_a_brief_policy_runs_on_the_loop_which_metrics_and_trace_tell(tiny: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with Server(tiny, "--brief-ms", "5", "--trace", str(trace)) as server:
        seen = server.metrics()
        assert seen(ON_LOOP) == 0
        while not seen(ON_LOOP):
            assert right(server.post(numbered(3)[1]), 1)
            seen = server.metrics()
        assert seen("reflex_batch_flush_total") > PROOF
        assert server.stop() == 0
    notes = [batch.notes.get("on_loop") for batch in read_journal(trace).batches]
    assert notes.count(True) >= 1
    assert not any(notes[:PROOF])


@pytest.mark.long
@pytest.mark.parametrize(("limit", "on_loop"), [("5", True), ("0.3", False), ("0", False)])
def test_p50_brief_ms_is_the_longest_that_runs_on_the_loop(limit: str, on_loop: bool, tiny: Path) -> None:
    with Server(tiny, "--brief-ms", limit, before=TAKES.format(seconds=0.001)) as server:
        for _ in range(2 * PROOF):
            assert server.act().status == 200
        if on_loop:
            while not server.metrics()(ON_LOOP):  # on a busy machine a call may take longer
                for _ in range(PROOF):
                    assert server.act().status == 200
        else:
            assert server.metrics()(ON_LOOP) == 0


@pytest.mark.long
@pytest.mark.parametrize("fault", [("--inject-fault", "prod:slow:0"), ("--inject-latency-ms", "20")])
def test_p52_drills_do_not_run_on_the_loop(fault: tuple[str, str], tiny: Path) -> None:
    with Server(tiny, "--brief-ms", "5", *fault) as server:
        for _ in range(2 * PROOF):
            assert server.act().status == 200
        assert server.metrics()(ON_LOOP) == 0


def test_p52_a_hang_on_the_loop_ends_the_server(tiny: Path) -> None:
    with Server(tiny, "--brief-ms", "5", "--watchdog-s", "0.5", before=HANGS) as server:
        with pytest.raises((ConnectionError, http.client.HTTPException)):  # no one can answer
            server.wait_until(lambda: not server.act())  # until one runs on the loop
        assert server.wait() == 1
        assert any("leaving: a batch on the event loop does not come back" in line for line in server.log)
