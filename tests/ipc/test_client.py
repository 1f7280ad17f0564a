"""The front's end of a runtime: real processes where they are lost, runtimes in this process where that is enough."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ipc.watching import LOOPS, PATIENCE, QUICK, Script, Watch, alive, child, failure, nothing_left, run
from reflex_runtime.core.errors import ConfigError, CutShort, ReflexError, WaitTimeout
from reflex_runtime.ipc.client import ClientConfig, RuntimeClient, WorkerUnavailable
from reflex_runtime.ipc.frames import METHOD_NOT_FOUND, ProtocolError
from reflex_runtime.ipc.messages import Info
from reflex_runtime.ipc.spawn import StartFailed


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    with nothing_left(tmp_path):
        yield


def limits(**given: Any) -> ClientConfig:
    return ClientConfig(**{name: getattr(QUICK, name) for name in ClientConfig.__slots__} | given)


def now() -> float:
    return asyncio.get_running_loop().time()


# -- what is said ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_g10_a_client_that_started_knows_what_its_runtime_can(loop: str) -> None:
    async def test() -> None:
        watch = Watch()
        client = watch.client(child("well"))
        assert (client.state, client.ready, client.info, client.capabilities) == ("starting", False, None, frozenset())
        await client.start()
        assert client.ready
        assert client.capabilities == {"batch_generate"}
        assert isinstance(client.info, Info)
        assert client.info.pid == client.pid
        assert await client.request("echo", {"a": [1]}) == {"params": {"a": [1]}}
        large = "x" * 3 * 2**20
        assert (await client.request("echo", large))["params"] == large
        await client.close()
        assert client.pid is None
        assert watch.states == ["ready", "stopped"]
        assert watch.notes == [("stream.event", {"told": {"drain": True, "timeout_s": 8.0}})]
        assert [type(error) for error in watch.losses] == [CutShort]

    run(test(), loop)


def test_results_are_read_as_their_kind_and_errors_are_those_of_the_runtime() -> None:
    class Echo(msgspec.Struct):
        params: dict[str, int]

    async def test() -> None:
        client = Watch().client(Script("well"))
        await client.start()
        assert await client.request("echo", {}, Echo) == Echo({})
        assert isinstance(await failure(client.request("echo", {}, list[int])), ProtocolError)
        refused = await failure(client.request("fail", {}))
        assert isinstance(refused, ConfigError)
        assert "must be a path" in str(refused)
        unknown = await failure(client.request("nothing", {}))
        assert isinstance(unknown, ProtocolError)
        assert unknown.rpc_code == METHOD_NOT_FOUND
        assert "a front answers no calls" in await client.request("ask", {})
        await client.close()

    run(test())


def test_g12_stats_count_messages_by_method_over_all_processes() -> None:
    async def test() -> None:
        watch, script = Watch(), Script("well")
        client = watch.client(script)
        await client.start()
        for _ in range(3):
            await client.request("echo", {})
        client.notify("cancel", {"stream_id": "x"})
        await client.request("flood", {"n": 5})
        await client.request("flood", {"n": 2, "method": "made.up"})
        first = client.stats()
        assert {name: first["sent"][name] for name in ("echo", "cancel", "flood")} == {
            "echo": 3,
            "cancel": 1,
            "flood": 2,
        }
        assert first["received"] == {"stream.chunk": 5, "stream.event": 1, "other": 2}
        assert first["frames"] == first["sent"]["runtime/info"] + 5  # what is said in one turn is one frame
        script.links[0].peer.abort()
        await watch.times("ready", 2)
        await client.request("echo", {})
        second = client.stats()
        assert second["sent"]["echo"] == 4
        assert second["frames"] == first["frames"] + 2
        assert (second["restarts"], second["failures"], second["state"]) == (1, 1, "ready")
        assert second["up_s"] >= 0
        assert second["last_error"] == "its connection ended"
        json.dumps(second)
        await client.close()
        third = client.stats()
        assert third["sent"]["echo"] == 4
        assert third["sent"]["shutdown"] == 1
        assert (third["state"], third["up_s"], third["pid"]) == ("stopped", 0.0, None)

    run(test())


def test_a_listener_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        got: list[str] = []

        def listens(note: Any) -> None:
            got.append(note.method)
            raise RuntimeError("note")

        def fails(what: Any) -> None:
            raise RuntimeError("loss")

        script = Script("well")
        client = RuntimeClient(script, QUICK, on_note=listens, on_lost=fails)
        await client.start()
        await client.request("flood", {"n": 2})
        assert got == ["stream.chunk"] * 2
        await client.close()

    with caplog.at_level(logging.ERROR):
        run(test())
    assert len(caplog.records) == 3 + 1  # notes, a loss


# -- time limits -------------------------------------------------------------------------------------------------------


def test_g14_a_request_has_a_time_limit_and_its_late_answer_is_nobodys() -> None:
    async def test() -> None:
        client = Watch().client(Script("well"), limits(call_timeout_s=0.05))
        await client.start()
        for limit in (None, 0.01):
            error = await failure(client.request("never", {}, timeout=limit))
            assert isinstance(error, WaitTimeout)
            assert f"w did not answer never within {limit or 0.05} s" == str(error)
        assert not client._link.peer._waiting  # type: ignore[union-attr]
        assert await client.request("echo", {}, timeout=PATIENCE)
        waiting = client.call("never", {})  # has none
        assert isinstance(await failure(client.request("never", {})), WaitTimeout)
        assert not waiting.done()
        waiting.cancel()
        await client.close()

    run(test(), "virtual")


# -- starts ------------------------------------------------------------------------------------------------------------


def test_g14_only_who_prepares_may_call_before_it_is_ready() -> None:
    async def test() -> None:
        seen: list[Any] = []

        async def prepare(client: RuntimeClient) -> None:
            seen.append((client.state, client.capabilities))
            seen.append(type(await failure(other)))
            seen.append((await client.request("echo", 1))["params"])
            seen.append((await asyncio.create_task(client.request("echo", 2)))["params"])

        client = Watch().client(Script("well"), prepare=prepare)
        allowed = asyncio.Event()

        async def from_outside() -> Any:
            await allowed.wait()
            return await client.request("echo", 3)

        async def when_connected(_: RuntimeClient) -> None:
            allowed.set()
            await prepare(_)

        client._prepare = when_connected
        other = asyncio.create_task(from_outside())
        await client.start()
        assert seen == [("starting", {"batch_generate"}), WorkerUnavailable, 1, 2]
        assert (await client.request("echo", 4))["params"] == 4
        await client.close()

    run(test())


def test_g14_a_process_that_is_not_ready_hears_nothing_that_was_for_the_last_one() -> None:
    async def test() -> None:
        async def from_outside() -> None:
            while True:
                await asked.get()
                client.notify("stream.credit", {})
                asked.task_done()

        async def prepare(client: RuntimeClient) -> None:
            client.notify("mine", {})
            asked.put_nowait(None)
            await asked.join()

        asked: asyncio.Queue[None] = asyncio.Queue()
        other = asyncio.create_task(from_outside())
        watch, script = Watch(), Script("well")
        client = watch.client(script, prepare=prepare)
        await client.start()
        script.links[0].peer.abort()
        client.notify("stream.credit", {})
        await watch.times("ready", 2)
        sent = client.stats()["sent"]
        assert (sent["mine"], sent.get("stream.credit", 0)) == (2, 0)
        client.notify("stream.credit", {})
        assert client.stats()["sent"]["stream.credit"] == 1
        await client.close()
        other.cancel()

    run(test())


def test_g14_preparing_has_the_time_of_the_start_and_not_that_of_a_call() -> None:
    async def test() -> None:
        async def prepare(client: RuntimeClient) -> None:
            told.append(type(await failure(client.request("never", {}, timeout=0.01))))
            await client.request("never", {})

        told: list[type] = []
        client = Watch().client(Script("well"), limits(call_timeout_s=0.001, start_timeout_s=0.5), prepare=prepare)
        error = await failure(client.start())
        assert isinstance(error, StartFailed)
        assert "w was not ready within 0.5 s (start_timeout_s)" in str(error)
        assert told == [WaitTimeout]
        await client.close()

    run(test(), "virtual")


class Mine(Exception):
    """Of who prepares."""


@pytest.mark.parametrize("wrong", [ConfigError("path='x': no such model"), Mine("what"), TimeoutError("another")])
def test_g14_a_first_start_that_fails_raises_why_and_leaves_nothing(wrong: Exception) -> None:
    async def test() -> None:
        async def prepare(client: RuntimeClient) -> None:
            pids.append(client.pid)
            raise wrong

        pids: list[Any] = []
        watch = Watch()
        client = watch.client(child("well"), prepare=prepare)
        assert await failure(client.start()) is wrong
        assert not alive(pids[0])
        assert (client.state, client.pid, watch.states, watch.losses) == ("stopped", None, ["stopped"], [])
        assert client.last_error == str(wrong)
        assert isinstance(await failure(client.request("echo", {})), WorkerUnavailable)
        await client.close()

    run(test())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("behaviour", "kind", "says"),
    [
        ("exits", StartFailed, "exited with status 3"),
        ("older", ProtocolError, "w speaks protocol 2, but this server protocol 1"),
        ("mute", StartFailed, "was not ready within 0.3 s"),
        ("garbage", StartFailed, "a frame begins with J, not with the byte 72, before it was ready"),
    ],
)
def test_g14_a_runtime_that_does_not_come_up_is_a_failed_start(
    behaviour: str, kind: type[Exception], says: str, loop: str
) -> None:
    async def test() -> None:
        slow = behaviour == "mute"
        client = Watch().client(child(behaviour), limits(start_timeout_s=0.3 if slow else PATIENCE))
        error = await failure(client.start())
        assert isinstance(error, kind)
        assert says in str(error)
        await client.close()

    run(test(), loop)


@pytest.mark.parametrize("waits", [True, False])
def test_g14_a_process_that_is_lost_while_it_is_prepared_is_a_failed_start(waits: bool) -> None:
    async def test() -> None:
        async def prepare(client: RuntimeClient) -> None:
            os.kill(client.pid or 0, signal.SIGKILL)
            if waits:
                await client.request("never", {})
            else:
                await asyncio.wait({client._link.peer.ended})  # type: ignore[union-attr]

        watch = Watch()
        client = watch.client(child("well"), prepare=prepare)
        told = await failure(client.start())
        assert isinstance(told, StartFailed)
        assert "its process was ended by SIGKILL" in told.message
        assert not watch.losses, "it had never been ready"

    run(test())


def test_a_client_is_started_once() -> None:
    async def test() -> None:
        client = Watch().client(Script("well"))
        await client.start()
        assert isinstance(await failure(client.start()), ConfigError)
        await client.close()
        assert isinstance(await failure(client.start()), ConfigError)
        never = Watch().client(Script("well"))
        await never.close()
        assert never.state == "stopped"
        assert isinstance(await failure(never.start()), ConfigError)

    run(test())


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"call_timeout_s": 0}, r"ClientConfig.call_timeout_s=0: must be in \(0, 86400\] seconds"),
        ({"heartbeat_s": -1.0}, r"ClientConfig.heartbeat_s=-1.0: must be in \[0, 86400\] seconds"),
        ({"backoff_s": float("nan")}, "ClientConfig.backoff_s=nan"),
        ({"hung_after_s": True}, "hung_after_s=True"),
        ({"most_failures": 2.0}, "most_failures=2.0"),
        ({"heartbeat_s": 21}, "heartbeat_s=21: must be at most hung_after_s=20.0"),
    ],
)
def test_a_wrong_setting_is_named_with_its_range(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ClientConfig(**given)


def test_errors_say_what_a_server_answers() -> None:
    for error, code, status, safe in (
        (StartFailed("x"), "worker_start_failed", 503, False),
        (WorkerUnavailable("x"), "worker_unavailable", 503, True),
    ):
        assert isinstance(error, ReflexError)
        assert (error.code, error.http_status, error.retry_safe) == (code, status, safe)
