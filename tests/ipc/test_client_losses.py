"""How a client notices that its runtime is gone, what it does then, and how it ends: with real processes."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.watching import LOOPS, PATIENCE, QUICK, Script, Watch, alive, child, children, failure, nothing_left, run
from reflex_runtime.core.errors import Closed, ConfigError, CutShort, Rejected
from reflex_runtime.ipc.client import ClientConfig, RuntimeClient, WorkerUnavailable
from reflex_runtime.ipc.peer import ConnectionLost
from reflex_runtime.ipc.spawn import StartFailed


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    with nothing_left(tmp_path):
        yield


def limits(**given: Any) -> ClientConfig:
    return ClientConfig(**{name: getattr(QUICK, name) for name in ClientConfig.__slots__} | given)


def now() -> float:
    return asyncio.get_running_loop().time()


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_g14_kill_9_under_load_fails_every_caller_at_once_and_another_process_takes_over(loop: str) -> None:
    """There is no heartbeat: the end of the connection tells."""

    async def test() -> None:
        watch = Watch()
        client = watch.client(child("well"))
        await client.start()
        pids = []
        for n in (1, 2):
            pids.append(client.pid)
            waiting = [client.call("never", {"text": "x" * 1000}) for _ in range(200)]
            flooded = client.request("flood", {"n": 2000})
            waiting += [client.call("flood", {"n": 5000}) for _ in range(3)]
            await flooded
            os.kill(client.pid or 0, signal.SIGKILL)
            await asyncio.wait(waiting[:1])
            assert len(watch.losses) == n
            assert watch.lost_at[-1] <= now()
            assert not client.ready
            refused = await failure(client.call("never", {}))
            told = [await failure(call) for call in waiting if not call.done() or call.exception()]
            assert len(told) >= 200
            assert {type(error) for error in told} == {ConnectionLost}
            assert all(error.written for error in told)  # type: ignore[attr-defined]
            assert isinstance(refused, WorkerUnavailable)
            assert isinstance(refused, Rejected)
            await watch.times("ready", n + 1)
        assert len(set(pids)) == n
        assert not any(alive(pid) for pid in pids)
        assert client.restarts == n
        assert "SIGKILL" in client.last_error
        await client.close()
        assert watch.states == ["ready", "restarting"] * n + ["ready", "stopped"]

    run(test(), loop)


def test_g14_who_is_told_of_a_loss_is_told_before_its_callers_and_sees_it_not_ready() -> None:
    async def test() -> None:
        order: list[Any] = []
        script = Script("well")
        client = RuntimeClient(script, QUICK, on_lost=lambda error: order.append((client.ready, type(error))))
        await client.start()
        client.call("never", {}).add_done_callback(lambda call: order.append(type(call.exception())))
        script.links[0].peer.abort(RuntimeError("torn"))
        await asyncio.sleep(0)
        assert order == [(False, ConnectionLost), ConnectionLost]
        assert client.last_error == "torn"
        await client.close()

    run(test())


@pytest.mark.parametrize("loop", LOOPS)
def test_g14_a_process_that_stands_still_is_given_up_and_killed(loop: str) -> None:
    async def test() -> None:
        async def prepare(client: RuntimeClient) -> None:
            pass

        watch = Watch()
        client = watch.client(child("well"), limits(heartbeat_s=0.1, hung_after_s=0.6), prepare=prepare)
        await client.start()
        pid = client.pid or 0
        os.kill(pid, signal.SIGSTOP)
        since = now()
        client.on_lost = lambda error: (refused.append(client.call("never", {})), watch.lost(error))
        refused: list[Any] = []
        assert isinstance(await failure(client.call("never", {})), ConnectionLost)
        assert now() - since >= 0.5
        assert isinstance(await failure(refused[0]), WorkerUnavailable)
        assert "it did not answer for 0.6 s" in str(watch.losses[0])
        await watch.times("ready", 2)
        assert not alive(pid)
        await client.close()

    run(test(), loop)


def test_g14_heartbeats_that_are_answered_keep_the_process() -> None:
    async def test() -> None:
        watch, script = Watch(), Script("well")
        client = watch.client(script, limits(heartbeat_s=0.02, hung_after_s=PATIENCE))
        await client.start()
        while client.stats()["sent"]["runtime/info"] < 5:
            await client.request("echo", {})  # time goes by
        assert client.restarts == 0
        await client.close()

    run(test())


def test_g14_without_heartbeats_nobody_asks() -> None:
    async def test() -> None:
        client = Watch().client(Script("well"), limits(heartbeat_s=0))
        await client.start()
        assert client.stats()["sent"]["runtime/info"] == 1
        await client.close()

    run(test())


@pytest.mark.parametrize(
    ("method", "params", "says"),
    [
        ("exit", {"status": 7}, "its process exited with status 7"),
        ("write", {"hex": b"HTTP/1.1 200 OK\r\n".hex()}, "a frame begins with J"),
        ("write", {"hex": b"J\xff\xff\xff\xff".hex()}, "at most 67108864 are read"),
        ("half", {}, "its connection ended; its process exited with status 0"),
    ],
)
def test_g14_however_a_process_is_lost_it_is_known_why_and_another_is_started(
    method: str, params: Any, says: str
) -> None:
    async def test() -> None:
        watch = Watch()
        client = watch.client(child("well"))
        await client.start()
        pid = client.pid or 0
        assert isinstance(await failure(client.call(method, params)), ConnectionLost)
        await watch.times("ready", 2)
        assert says in client.last_error
        assert not alive(pid)
        assert client.pid != pid
        await client.close()

    run(test())


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_g14_failed_restarts_are_tried_again_until_one_succeeds() -> None:
    async def test() -> None:
        watch = Watch()
        script = Script("well", StartFailed("one"), "older", ConfigError("three"), "well")
        client = watch.client(script)
        await client.start()
        script.links[0].peer.abort()
        await watch.times("ready", 2)
        assert len(script.starts) == 5
        assert client.restarts == 4
        assert client.last_error == "three"
        assert watch.states == ["ready", "restarting", "ready"]
        assert len(watch.losses) == 1
        await client.close()

    run(test())


def test_g14_a_restart_that_fails_leaves_no_process() -> None:
    async def test() -> None:
        watch, before = Watch(), children()
        plan = [child("well"), child("older"), child("well")]
        client = watch.client(lambda handler: plan.pop(0)(handler))
        await client.start()
        os.kill(client.pid or 0, signal.SIGKILL)
        await watch.times("ready", 2)
        assert children() - before == {client.pid}
        await client.close()

    run(test())


def test_g14_while_it_waits_callers_are_told_when_it_is_tried_again() -> None:
    async def test() -> None:
        watch, script = Watch(), Script("well", "wait")
        client = watch.client(script, limits(backoff_s=1000, backoff_max_s=1000))
        waits, seconds = asyncio.Event(), client._restarts.wait

        def wait() -> float:
            waits.set()
            return seconds()

        client._restarts.wait = wait  # type: ignore[method-assign]
        await client.start()
        script.links[0].peer.abort(RuntimeError("torn"))
        assert 0 < (client.unavailable().retry_after or 0) <= 1
        await asyncio.wait_for(waits.wait(), PATIENCE)
        error = await failure(client.request("echo", {}))
        assert isinstance(error, WorkerUnavailable)
        assert 400 < (error.retry_after or 0) <= 1000
        assert (error.code, error.http_status, error.retry_safe) == ("worker_unavailable", 503, True)
        assert str(error) == "w is being started again: torn"
        assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
        await client.close()
        assert client.unavailable().retry_after is None
        assert len(script.starts) == 1

    run(test())


def test_g14_the_breaker_opens_and_one_trial_follows_each_rest() -> None:
    async def test() -> None:
        watch = Watch()
        no = StartFailed("no")
        script = Script("well", no, no, no, no, "well")
        client = watch.client(script, limits(most_failures=3, cooldown_s=0.2))
        await client.start()
        script.links[0].peer.abort()  # a short life is the first
        await watch.times("open", 1)
        assert str(client.unavailable()) == "w is not started again for a while, because it ended too often: no"
        assert 0 < (client.unavailable().retry_after or 0) <= 0.2
        assert len(script.starts) == 3
        await watch.times("ready", 2)
        assert watch.states == ["ready", *["restarting", "open"] * 3, "restarting", "ready"]
        gaps = [b - a for a, b in zip(script.starts, script.starts[1:], strict=False)]
        assert all(gap > 0.19 for gap in gaps[2:])
        script.links[1].peer.abort()  # a trial that did not stay
        await watch.times("open", 4)
        await client.close()

    run(test(), "virtual")


def test_g14_a_steady_life_closes_the_breaker() -> None:
    async def test() -> None:
        watch, script = Watch(), Script("well")
        client = watch.client(script, limits(most_failures=1, steady_s=0, cooldown_s=1000))
        await client.start()
        for n in range(2, 6):
            script.links[-1].peer.abort()
            await watch.times("ready", n)
        assert client.stats()["failures"] == 0
        await client.close()

    run(test())


def test_g10_another_runtime_may_be_able_to_do_something_else() -> None:
    async def test() -> None:
        watch, script = Watch(), Script("well", "plain")
        client = watch.client(script)
        await client.start()
        script.links[0].peer.abort()
        await watch.times("ready", 2)
        assert client.capabilities == frozenset()
        await client.close()

    run(test())


def test_g14_each_process_is_prepared() -> None:
    async def test() -> None:
        async def prepare(client: RuntimeClient) -> None:
            states.append(client.state)

        states: list[str] = []
        watch, script = Watch(), Script("well")
        client = watch.client(script, prepare=prepare)
        await client.start()
        script.links[0].peer.abort()
        await watch.times("ready", 2)
        assert states == ["starting", "restarting"]
        await client.close()

    run(test())


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("behaviour", ["mute", "garbage", "exits", "well"])
def test_g14_close_while_it_starts_leaves_nothing(behaviour: str, loop: str) -> None:
    async def test() -> None:
        for turns in (0, 1, 3, 10):
            client = Watch().client(child(behaviour))
            start = asyncio.create_task(client.start())
            for _ in range(turns):
                await asyncio.sleep(0)
            closes = [asyncio.create_task(client.close()) for _ in range(2)]
            [error] = await asyncio.gather(start, return_exceptions=True)
            if turns < 10 or behaviour == "mute":  # else the process may have been faster
                assert isinstance(error, Closed if turns else ConfigError | Closed)
            await asyncio.gather(*closes)
            assert client.state == "stopped"
            assert client.pid is None

    run(test(), loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_g14_a_start_that_is_cancelled_leaves_nothing(loop: str) -> None:
    async def test() -> None:
        for turns in (1, 3, 10):
            client = Watch().client(child("mute"))
            start = asyncio.create_task(client.start())
            for _ in range(turns):
                await asyncio.sleep(0)
            start.cancel()
            await asyncio.wait({start})
            assert start.cancelled()
            assert client.state == "stopped"

    run(test(), loop)


def test_g14_a_start_that_is_cancelled_while_it_is_closed_is_cancelled() -> None:
    async def test() -> None:
        began = asyncio.Event()

        async def opener(handler: Any) -> Any:
            began.set()
            await asyncio.Event().wait()

        client = Watch().client(opener)
        start = asyncio.create_task(client.start())
        await began.wait()
        close = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        start.cancel()
        await asyncio.wait({start, close})
        assert start.cancelled()
        assert client.state == "stopped"

    run(test())


def test_g14_close_while_it_is_prepared_leaves_nothing() -> None:
    async def test() -> None:
        prepares = asyncio.Event()

        async def prepare(client: RuntimeClient) -> None:
            prepares.set()
            await client.request("never", {})

        client = Watch().client(child("well"), prepare=prepare)
        start = asyncio.create_task(client.start())
        await asyncio.wait_for(prepares.wait(), PATIENCE)
        await client.close()
        assert isinstance(await failure(start), Closed)

    run(test())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("where", ["waits", "starts", "just_lost"])
def test_g14_close_while_it_is_started_again_leaves_nothing(where: str, loop: str) -> None:
    async def test() -> None:
        watch = Watch()
        opened: list[Any] = []
        began = asyncio.Event()

        async def opener(handler: Any) -> Any:
            if opened:
                began.set()
            opened.append(child("mute" if opened else "well"))
            return await opened[-1](handler)

        far = limits(most_failures=1, cooldown_s=1000)
        client = watch.client(opener, far if where == "waits" else QUICK)
        await client.start()
        os.kill(client.pid or 0, signal.SIGKILL)
        await watch.times("restarting", 1)
        if where == "starts":
            await asyncio.wait_for(began.wait(), PATIENCE)
        elif where == "waits":
            await watch.times("open", 1)
        await client.close()
        assert len(watch.losses) == 1
        assert watch.states == ["ready", "restarting", *["open"] * (where == "waits"), "stopped"]

    run(test(), loop)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("hung", [True, False])
def test_g14_close_ends_who_does_not_end_by_itself(loop: str, hung: bool) -> None:
    async def test() -> None:
        watch = Watch()
        client = watch.client(child("well" if hung else "deaf_to_end"))
        await client.start()
        pid = client.pid or 0
        if hung:
            os.kill(pid, signal.SIGSTOP)
        waiting = client.call("never", {})
        since = now()
        closing = asyncio.create_task(client.close(0.2))
        assert isinstance(await failure(waiting), ConnectionLost)
        await closing
        assert now() - since >= 0.18
        assert not alive(pid)
        assert [type(error) for error in watch.losses] == [CutShort]

    run(test(), loop)


def test_g14_who_takes_longer_to_end_than_its_connection_is_let() -> None:
    async def test() -> None:
        client = Watch().client(child("lingers"))
        await client.start()
        link = client._link
        await client.close(PATIENCE)
        assert link is not None
        assert link.process is not None
        assert link.process.ended.result() == 0

    run(test())


@pytest.mark.parametrize("drain", [True, False])
def test_g14_close_says_whether_streams_may_finish_and_within_which_time(drain: bool) -> None:
    async def test() -> None:
        watch = Watch()
        client = watch.client(child("well"))
        await client.start()
        await client.close(PATIENCE, drain)
        assert watch.notes == [("stream.event", {"told": {"drain": drain, "timeout_s": 0.8 * PATIENCE}})]

    run(test())


def test_g14_close_in_no_time_kills() -> None:
    async def test() -> None:
        watch = Watch()
        client = watch.client(child("well"))
        await client.start()
        await client.close(0)
        assert "shutdown" not in client.stats()["sent"]
        assert len(watch.losses) == 1
        await client.close()
        assert client.state == "stopped"

    run(test())


def test_g14_while_it_closes_notes_still_come_and_new_calls_are_refused() -> None:
    async def test() -> None:
        watch = Watch()
        script = Script("deaf_to_end")
        client = watch.client(script)
        await client.start()
        waiting = client.request("echo", {"early": 1})
        early = asyncio.ensure_future(waiting)
        await asyncio.sleep(0)
        closing = asyncio.create_task(client.close(PATIENCE))
        await asyncio.sleep(0)
        assert not client.ready
        assert isinstance(await failure(client.call("echo", {})), WorkerUnavailable)
        client.notify("stream.credit", {"tokens": 1})
        assert (await early)["params"] == {"early": 1}
        await watch.until(lambda: watch.notes)
        script.links[0].peer.abort()
        await closing
        assert watch.notes == [("stream.event", {"heard": {"tokens": 1}})]
        client.notify("stream.credit", {})  # nobody hears it

    run(test())


def test_g14_who_closes_and_is_cancelled_leaves_the_closing_to_itself() -> None:
    async def test() -> None:
        client = Watch().client(child("well"))
        await client.start()
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        assert closing.cancelled()
        await client.close()
        assert client.pid is None

    run(test())


def test_g14_a_loop_that_ends_takes_the_process_with_it() -> None:
    pids: list[Any] = []

    async def test() -> None:
        client = Watch().client(child("well"))
        await client.start()
        pids.append(client.pid)

    run(test())
    assert not alive(pids[0])
