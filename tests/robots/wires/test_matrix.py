"""Every wire in every case: a right answer, each refusal, callers that leave, and batches across connections.

`python -m robots.wires.test_matrix` (in tests/) prints the table.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.load.wires import meet

from reflex_runtime.cli import probe
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.robots.policy.spec import WIRES
from reflex_runtime.web import replicas
from serving.exports import write_tiny
from serving.harness import Server
from serving.requests import WAITING, busy, calm

from .callers import CALLERS, Caller, Refused

MOST = 100_000  # bytes of a message
FULL = 20  # requests that may wait
OPTIONS = tuple(option for caller in CALLERS.values() for option in caller.options)
REFUSED = {  # cells whose outcome is a code
    "unknown name": "invalid_request",
    "wrong shape": "invalid_request",
    "NaN": "invalid_request",
    "expired": "deadline_exceeded",
    "shed": "deadline_unreachable",
    "queue full": "queue_full",
    "draining": "shutting_down",
    "model fails": "processor_failed",
}
CELLS = (
    "right answer", *list(REFUSED)[:3], "too large", *list(REFUSED)[3:], "leaves queued", "leaves running", "reset",
    "16 in a batch",
)  # fmt: skip

every_wire = pytest.mark.parametrize("wire", CALLERS)


def needs(wire: str, cell: str) -> type[Caller]:
    """The wire's caller; the test is skipped where its protocol has no such thing."""
    assert cell in CELLS
    caller = CALLERS[wire]
    if cell in caller.lacks:
        pytest.skip(caller.lacks[cell])
    return caller


@contextmanager
def connected(caller: type[Caller], server: Server, count: int = 1) -> Iterator[list[Caller]]:
    with ExitStack() as stack:
        callers = [caller(server) for _ in range(count)]
        for one in callers:
            stack.callback(one.leave)
        yield callers


@contextmanager
def held(server: Server) -> Iterator[Callable[[], None]]:
    """The device is held until what this gives is called, at the latest at the end."""
    with busy(server) as plug, ExitStack() as stack:
        stack.callback(server.release)

        def release() -> None:
            stack.close()
            assert plug.answers()[0].status == 200

        yield release


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its answer depends on the state alone, so that wires without a seed can be compared."""
    return write_tiny(tmp_path_factory.mktemp("plain"), noise=False, wires={"vla-eval": {"execute": 1}})


LEFT = "left while it ran"
LEAVES = f"""
import sys
from reflex_runtime.core.scheduler import Scheduler
_cancel = Scheduler.cancel
def _told(self, ticket, now):
    _cancel(self, ticket, now)
    if ticket.cancel_requested:
        print({LEFT!r}, file=sys.stderr, flush=True)
Scheduler.cancel = _told
"""  # run in the server's process: nothing else shows this before the batch ends


@pytest.fixture(scope="module")
def server(export: Path) -> Iterator[Server]:
    """Whose device can be held, and whose batches of any size take a millisecond."""
    options = (*OPTIONS, "--max-body-bytes", str(MOST), "--max-queue", str(FULL))
    with Server(export, *options, held=True, takes="0.001", before=LEAVES) as server:
        yield server


@pytest.fixture(scope="module")
def slow(export: Path) -> Iterator[Server]:
    """Whose batches are taken to take a minute, and whose device can be held: an estimate holds while a batch runs."""
    with Server(export, *OPTIONS, held=True, takes="60.0") as server:
        for _ in range(4):
            server.act()
        yield server


@pytest.fixture(scope="module")
def broken(export: Path) -> Iterator[Server]:
    """Whose model raises for every request."""
    with Server(export, *OPTIONS, "--inject-fault", "prod:raise:1", "--max-consecutive-crashes", "0") as server:
        yield server


def state(i: int) -> list[float]:
    return [0.1 * i, -0.1 * i]


def right(server: Server, i: int, actions: Any) -> bool:
    """Whether it is what /act answers. Clients that get the first step alone are compared in that."""
    wanted = np.float32(server.act(state=state(i)).json["actions"])
    return len(actions) > 0 and bool(np.allclose(actions, wanted[: len(actions)], atol=1e-6))


def counted(server: Server, caller: type[Caller], outcome: str) -> float:
    with contextlib.suppress(AssertionError):  # none yet
        return server.metrics()("reflex_requests_total", outcome=outcome, wire=caller.wire)
    return 0.0


@every_wire
def test_w7_the_answer_is_that_of_act(server: Server, wire: str) -> None:
    caller = needs(wire, "right answer")
    before = counted(server, caller, "ok")
    with connected(caller, server) as (one,):
        answers = [one.ask(state(i)) for i in (1, 2)]
    assert counted(server, caller, "ok") == before + 2
    assert all(right(server, i, answer) for i, answer in zip((1, 2), answers, strict=True))


def refused(one: Caller, values: list[float], **fields: Any) -> Refused:
    with pytest.raises(Refused) as info:
        one.ask(values, **fields)
    return info.value


@every_wire
def test_w11_a_name_that_nothing_knows(server: Server, wire: str) -> None:
    caller = needs(wire, "unknown name")
    with connected(caller, server) as (one,):
        if not caller.ignores:
            error = refused(one, state(1), nonsense=1)
            assert error.code == REFUSED["unknown name"]
            assert "nonsense" in error.message
        assert right(server, 1, one.ask(state(1), **({"nonsense": 1} if caller.ignores else {})))


@every_wire
@pytest.mark.parametrize(("cell", "values"), [("wrong shape", [0.0, 0.0, 0.0]), ("NaN", [float("nan"), 0.0])])
def test_w11_a_wrong_state(server: Server, wire: str, cell: str, values: list[float]) -> None:
    caller = needs(wire, cell)
    with connected(caller, server) as (one,):
        error = refused(one, values)
        assert error.code == REFUSED[cell]
        assert (cell if cell == "NaN" else caller.names) in error.message
        assert right(server, 1, one.ask(state(1)))


@every_wire
def test_w3_a_message_that_is_too_large(server: Server, wire: str) -> None:
    caller = needs(wire, "too large")
    with connected(caller, server) as (one,):
        assert refused(one, state(1), more=b"x" * MOST).code == caller.too_large
    with connected(caller, server) as (one,):
        assert right(server, 1, one.ask(state(1)))


@every_wire
def test_w11_a_deadline_that_passes_in_the_queue(server: Server, wire: str) -> None:
    caller = needs(wire, "expired")
    with held(server) as release, connected(caller, server) as (one,):
        assert refused(one, state(1), deadline_ms=50).code == REFUSED["expired"]
        release()
        assert right(server, 1, one.ask(state(1)))


@every_wire
def test_w11_a_deadline_that_cannot_be_met(slow: Server, wire: str) -> None:
    caller = needs(wire, "shed")
    with held(slow) as release, connected(caller, slow) as (one,):
        assert refused(one, state(1), deadline_ms=30_000).code == REFUSED["shed"]
        release()
        assert right(slow, 1, one.ask(state(1), deadline_ms=300_000))


@every_wire
def test_w11_a_full_queue(server: Server, wire: str) -> None:
    caller = needs(wire, "queue full")
    with held(server) as release, connected(caller, server) as (one,):
        with server.burst([{"state": state(i), "robot_id": f"r{i}"} for i in range(FULL)]) as burst:
            burst.send()
            server.reach(lambda m: m(WAITING) == FULL)
            assert refused(one, state(1)).code == REFUSED["queue full"]
            release()
            assert all(answer.status == 200 for answer in burst.answers())
        assert right(server, 1, one.ask(state(1)))


@every_wire
def test_w11_a_model_that_raises(broken: Server, wire: str) -> None:
    caller = needs(wire, "model fails")
    with connected(caller, broken) as (one,):
        for _ in range(2):
            assert refused(one, state(1)).code == REFUSED["model fails"]


@every_wire
def test_w13_a_caller_that_leaves_while_queued_is_never_computed(server: Server, wire: str) -> None:
    caller = needs(wire, "leaves queued")
    ok, gone = counted(server, caller, "ok"), counted(server, caller, "cancelled")
    with held(server) as release:
        with connected(caller, server) as (one,):
            one.send(state(1))
            server.reach(lambda m: m(WAITING) == 1)
        server.reach(lambda m: counted(server, caller, "cancelled") == gone + 1)
        assert server.metrics()(WAITING) == 0
        release()
    assert counted(server, caller, "ok") == ok + (caller.wire == "act")  # the plug itself
    assert calm(server)


@every_wire
def test_w13_a_caller_that_leaves_while_it_runs_is_no_fault(server: Server, wire: str) -> None:
    """It runs in a batch with a second plug, which is held too."""
    caller = needs(wire, "leaves running")
    failed, gone = counted(server, caller, "failed"), counted(server, caller, "cancelled")
    left = sum(LEFT in line for line in server.log)
    with held(server) as release, server.burst([{"state": state(0), "request_id": "plug"}]) as second:
        second.send()
        server.reach(lambda m: m(WAITING) == 1)
        with connected(caller, server) as (one,):
            one.send(state(1))
            server.reach(lambda m: m(WAITING) == 2)
            release()
            server.reach(lambda m: (m("reflex_in_flight_requests"), m(WAITING)) == (2, 0))
        server.wait_log_while_fewer(LEFT, left + 1)
        server.release()
        assert second.answers()[0].status == 200
    server.reach(lambda m: counted(server, caller, "cancelled") == gone + 1)
    assert counted(server, caller, "failed") == failed
    assert calm(server)
    with connected(caller, server) as (one,):
        assert right(server, 1, one.ask(state(1)))


@every_wire
def test_w15_sixteen_connections_share_a_batch(server: Server, wire: str) -> None:
    caller = needs(wire, "16 in a batch")
    with held(server) as release, connected(caller, server, 16) as callers:
        for i, one in enumerate(callers):
            one.send(state(i))
        server.reach(lambda m: m(WAITING) == 16)
        before = server.metrics()
        release()
        answers = [one.answer() for one in callers]
    ran = server.metrics()
    name = "reflex_batch_size_per_flush"
    assert [ran(f"{name}_{what}") - before(f"{name}_{what}") for what in ("count", "sum")] == [1, 16]
    assert all(right(server, i, answer) for i, answer in enumerate(answers))


@pytest.fixture(scope="module")
def ended(export: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each wire the episodes of what it asked before and after a reset, and what it is told at the server's end."""
    record = tmp_path_factory.mktemp("record")
    found: dict[str, Any] = {wire: {"robots": []} for wire in CALLERS}
    with Server(export, *OPTIONS, "--record", str(record), held=True) as server, ExitStack() as stack:
        late = {}
        for place, (wire, caller) in enumerate(CALLERS.items()):
            with connected(caller, server) as (one,):
                for step in range(3):
                    if step == 2 and "reset" not in caller.lacks:
                        one.reset()
                    one.ask(state(100 * place + step))
            if "draining" not in caller.lacks:
                late[wire] = caller(server)
                stack.callback(late[wire].leave)
        release = stack.enter_context(held(server))
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("draining")
        for wire, one in late.items():
            try:
                found[wire]["drained"] = one.ask(state(1))
            except Refused as error:
                found[wire]["drained"] = error.code
        release()
        assert server.wait() == 0
    (file,) = record.iterdir()
    for place, wire in enumerate(CALLERS):
        numbers = [100 * place + step for step in range(3)]
        asked = {round(10 * r.request.state[0]): r.request.episode_id for r in read_journal(file).requests}
        found[wire]["episodes"] = [asked[number] for number in numbers]
    return found


@every_wire
def test_w10_a_reset_begins_another_episode(ended: dict[str, Any], wire: str) -> None:
    needs(wire, "reset")
    first, second, third = ended[wire]["episodes"]
    assert first == second != third


@every_wire
def test_w5_a_server_that_ends_says_so(ended: dict[str, Any], wire: str) -> None:
    needs(wire, "draining")
    assert ended[wire]["drained"] == REFUSED["draining"]


def table() -> str:
    """The cells as Markdown: what a caller is told, or why there is no such thing."""

    def told(caller: type[Caller], cell: str) -> str:
        if cell in caller.lacks:
            return f"none: {caller.lacks[cell]}"
        if cell == "unknown name" and caller.ignores:
            return "ignored"
        return caller.too_large if cell == "too large" else REFUSED.get(cell, "tested")

    lines = ["| | " + " | ".join(CALLERS) + " |", "| --- |" + " --- |" * len(CALLERS)]
    lines += [f"| {cell} | " + " | ".join(told(caller, cell) for caller in CALLERS.values()) + " |" for cell in CELLS]
    return "\n".join(lines)


def test_every_wire_has_a_caller_in_each_place_that_needs_one() -> None:
    assert {caller.wire for caller in CALLERS.values()} == set(WIRES)
    assert {wire.config for wire in probe.WIRES.values()} == set(WIRES)
    assert {caller.config for caller in meet.CALLERS.values()} == set(WIRES)
    assert {wire.setting for wire in WIRES.values() if wire.listener} == set(replicas.LISTENERS)


def test_every_cell_has_a_test_or_a_reason() -> None:
    here: dict[str, Callable[..., Any]] = {name: value for name, value in globals().items() if name.startswith("test")}
    assert len(here) == 15
    assert all(cell in CELLS for caller in CALLERS.values() for cell in caller.lacks)
    assert table().count("\n") == len(CELLS) + 1


if __name__ == "__main__":
    print(table())
