"""Connections: kept, replaced, broken off, too slow, not there yet."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from reflex_runtime.client import AsyncClient, BadAnswer, Client, TimedOut, Unreachable
from serving.place import Place

from .callers import Make, Time
from .stub import ANSWER, NAMED, PATIENCE, Stub, reply


def authority(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What trusts a new certificate of 127.0.0.1, and what serves it."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=robot", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate, key)
    return ssl.create_default_context(cafile=certificate), served


def test_a_connection_is_kept(make: Make) -> None:
    with Stub([reply(), reply({"state": "ready"}), reply()]) as stub:
        caller = make(stub.url)
        caller.act()
        caller.health()
        caller.act()
        assert stub.connections == 1


def test_a_connection_that_the_server_closes_is_not_used_again(make: Make) -> None:
    with Stub([reply(headers={"connection": "close"}), b"", reply(), b"", reply()]) as stub:
        caller = make(stub.url)
        for _ in range(3):
            assert caller.act().attempts == 1
            assert not stub.script or stub.idle.wait(PATIENCE)
            stub.idle.clear()
        assert [seen.connection for seen in stub.seen] == [1, 2, 3]


def test_a_connection_that_is_to_be_closed_is_not_used_again(make: Make) -> None:
    with Stub([reply(headers={"connection": "close"}), reply()]) as stub:
        caller = make(stub.url)
        caller.act()
        caller.act()
        assert [seen.connection for seen in stub.seen] == [1, 2]


def test_what_nobody_asked_for_answers_nothing(make: Make) -> None:
    with Stub([reply(), reply()]) as stub:
        caller = make(stub.url)
        caller.act()
        stub.say(reply({"error": "timeout", "message": "idle too long"}, 408))  # as proxies say before they close
        assert caller.act().attempts == 1
        assert [seen.connection for seen in stub.seen] == [1, 2]


def test_the_answer_to_another_request_reaches_no_motor(make: Make) -> None:
    with Stub([reply() + reply(ANSWER | {"request_id": "another"}), reply()]) as stub:
        caller = make(stub.url)
        caller.act()
        with pytest.raises(BadAnswer, match="answer to request 'another'"):
            caller.act()


@pytest.mark.parametrize("kept", [False, True])
def test_a_connection_that_closes_under_a_request_may_have_run_it(make: Make, kept: bool) -> None:
    with Stub([reply()] * kept + ["close", reply()]) as stub:
        caller = make(stub.url)
        if kept:
            caller.act()
        with pytest.raises(Unreachable, match="before it had answered") as caught:
            caller.act(request_id="mine")
        assert not caught.value.retry_safe
        assert caught.value.request_id == "mine"
        assert len(stub.seen) == 1 + kept


def test_an_answer_that_breaks_off_is_not_asked_again(make: Make) -> None:
    with Stub([reply(), reply()[:-5], b"", reply()]) as stub:
        caller = make(stub.url)
        caller.act()
        with pytest.raises(Unreachable) as caught:
            caller.act()
        assert not caught.value.retry_safe
        assert len(stub.seen) == 2


def test_a_server_that_is_not_there_yet_is_waited_for(make: Make) -> None:
    time = Time()
    with Place() as place, ExitStack() as stack:
        time.during = lambda number: number == 3 and stack.enter_context(Stub([reply()], place.port))
        assert make(f"http://127.0.0.1:{place.port}", time).act().attempts == 4
    assert time.pauses == pytest.approx([0.1, 0.2, 0.4])


def test_a_server_that_does_not_come_is_an_error_that_says_where(make: Make) -> None:
    with Place() as place:
        url = f"http://127.0.0.1:{place.port}"
        with pytest.raises(Unreachable, match=f"cannot connect to {url}") as caught:
            make(url, retries=1).act()
    assert caught.value.retry_safe


def test_no_answer_in_time(make: Make) -> None:
    with Stub([reply(), "hang"]) as stub:
        caller = make(stub.url)
        caller.act()  # the time is not that of a new connection: that may be tried again
        caller.client._timeout = 0.05
        with pytest.raises(TimedOut, match=r"within 0\.05 s") as caught:
            caller.act()
        assert not caught.value.retry_safe
    with Stub([reply(), "hang"]) as stub:
        caller = make(stub.url)
        caller.act()
        with pytest.raises(TimedOut, match=r"within 0\.501 s"):
            caller.act(deadline_ms=1.0)  # the server is given a moment to say itself that it is too late


@pytest.mark.timeout(30)
def test_what_sending_took_is_not_waited_for_again(make: Make) -> None:
    time = Time()
    with Stub(["hang"]) as stub:
        stub.before_body = lambda: time.sleep(89.9)  # while the body, which fits into no buffer, is sent
        with pytest.raises(TimedOut, match="within 90 s"):
            make(stub.url, time, timeout=90.0).act(images={"top": np.zeros((3000, 3600, 3), np.uint8)})


def test_a_cancelled_task_hangs_up() -> None:
    async def run(stub: Stub) -> None:
        async with AsyncClient(stub.url) as client:
            task = asyncio.create_task(client.act())
            await asyncio.to_thread(stub.asked.wait, PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(stub.idle.wait, PATIENCE)

    with Stub(["hang"]) as stub:
        asyncio.run(run(stub))


def test_several_at_once_have_a_connection_each() -> None:
    with Stub([reply()] * 8) as stub, Client(stub.url) as client, ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(lambda i: client.act(state=[i], **NAMED), range(8)))) == 8
        assert stub.connections <= 4

    async def together(url: str) -> int:
        async with AsyncClient(url) as client:
            return len(await asyncio.gather(*(client.act(state=[i], **NAMED) for i in range(8))))

    with Stub([reply()] * 8) as stub:
        assert asyncio.run(together(stub.url)) == 8
        assert stub.connections == 8


def test_a_unix_socket_carries_calls_too(make: Make, tmp_path: Path) -> None:
    with Stub([reply(), reply(), "close"], path=tmp_path / "reflex.sock") as stub:
        caller = make("http://robot/arm", uds=str(stub.path))
        assert [caller.act().attempts for _ in range(2)] == [1, 1]
        assert [(seen.path, seen.headers["host"], seen.connection) for seen in stub.seen] == [
            ("/arm/act", "robot", 1)
        ] * 2
        with pytest.raises(Unreachable, match=f"^unreachable: {stub.path} closed the connection"):
            caller.act()


def test_a_proxy_is_asked_with_the_whole_address(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stub([reply(), reply()]) as stub:
        make("http://robot.invalid:8000", proxy=stub.url).act()
        monkeypatch.setenv("HTTP_PROXY", stub.url)
        make("http://robot.invalid:8000").act()
    assert [seen.path for seen in stub.seen] == ["http://robot.invalid:8000/act"] * 2


def test_a_server_on_this_machine_is_not_asked_through_the_environments_proxy(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with Stub([]) as proxy, Stub([reply()]) as stub:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        make(stub.url).act()
        assert (proxy.connections, stub.connections) == (0, 1)


def test_tls_is_checked_against_the_given_authority(make: Make, tmp_path: Path) -> None:
    trusted, served = authority(tmp_path)
    with Stub([reply(), reply()], tls=served) as stub:
        url = stub.url.replace("http", "https")
        assert make(url, verify=trusted).act().attempts == 1
        with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
            make(url, retries=0).act()
