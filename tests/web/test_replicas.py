"""Replicas: worker processes that accept from one port, each with a device and pages of its own (contract X7)."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving.harness import STATE, Answer, Latch, Server, encode, parse_answers, refusal
from web.test_supervisor import held

REPLICAS = ("--replicas", "2")


def own_urls(server: Server) -> list[str]:
    """The addresses of the workers' own pages, as the log names them."""
    server.wait_log_while_fewer("its own pages on", 2)
    found = {int(m[1]): m[2] for line in server.log if (m := re.search(r"worker (\d): its own pages on (\S+)", line))}
    return [found[number] for number in sorted(found)]


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as answer:
        return json.loads(answer.read())


def ask(server: Server, connections: int) -> list[Answer]:
    """The answers to requests on so many connections, all open at once."""
    with ExitStack() as stack:
        socks = [stack.enter_context(server.connect()) for _ in range(connections)]
        for sock in socks:
            sock.sendall(encode({"state": STATE}))
        return [parse_answers(sock.recv(65536))[0] for sock in socks]


@pytest.fixture
def latch(tmp_path: Path) -> Iterator[Latch]:
    made = Latch(tmp_path / "latch")
    yield made
    made.close()


def answered(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as page:
        text = page.read().decode()
    return sum(float(found) for found in re.findall(r'(?m)^reflex_requests_total\{.*outcome="ok".*\} (.*)$', text))


def test_x7_replicas_accept_from_one_port_and_each_has_pages_of_its_own(tiny: Path) -> None:
    with Server(tiny, *REPLICAS, supervised=True) as server:
        urls = own_urls(server)
        server.wait_log_while_fewer("ready on", 2)
        assert len({*urls, f"http://127.0.0.1:{server.port}"}) == 3
        assert all(url.startswith("http://127.0.0.1:") for url in urls)
        for number, url in enumerate(urls):
            health = get(f"{url}/health")
            assert (health["worker"], health["workers"], health["state"]) == (number, urls, "ready")
        assert server.get("/health").json["workers"] == urls
        workers = psutil.Process(server.process.pid).children()
        assert len(workers) == 2
        assert [answer.status for answer in ask(server, 8)] == [200] * 8
        assert sum(answered(url) for url in urls) == 8  # each counts its own
        assert server.stop() == 0
        assert not any(worker.is_running() for worker in workers)


def test_x7_one_that_is_killed_is_replaced_and_the_other_answers_meanwhile(tiny: Path, latch: Latch) -> None:
    with Server(tiny, *REPLICAS, before=held(latch), supervised=True) as server:
        urls = own_urls(server)
        server.wait_log_while_fewer("ready on", 2)
        latch.shut()
        first, _ = psutil.Process(server.process.pid).children()
        first.send_signal(signal.SIGKILL)
        killed = int(server.wait_log(" was ended by SIGKILL; restart 1 in").partition(" was ended")[0][-1])
        assert [answer.status for answer in ask(server, 4)] == [200] * 4
        assert get(f"{urls[1 - killed]}/health")["restarts"] == 0
        latch.open()
        server.wait_log_while_fewer("ready on", 3)
        again = get(f"{urls[killed]}/health")
        assert (again["restarts"], again["last_exit"], again["worker"]) == (1, "was ended by SIGKILL", killed)


def test_x7_devices_are_a_replica_each(tiny: Path) -> None:
    with Server(tiny, "--devices", "cpu,cpu", supervised=True) as server:
        urls = own_urls(server)
        server.wait_log_while_fewer("ready on", 2)
        assert [get(f"{url}/config")["server"]["provider"] for url in urls] == ["cpu", "cpu"]
        assert server.act().status == 200


def test_x7_each_replica_writes_files_of_its_own(tiny: Path, tmp_path: Path) -> None:
    options = ("--trace", str(tmp_path / "run.jsonl"), "--record", str(tmp_path / "there"))
    with Server(tiny, *REPLICAS, *options, supervised=True) as server:
        server.wait_log_while_fewer("ready on", 2)
        assert server.act().status == 200
        assert server.stop() == 0
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run-0.jsonl", "run-1.jsonl"]
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["worker-0", "worker-1"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--devices", "cpu,tpu"), "--devices=cpu,tpu: must be devices with commas"),
        (("--devices", "cpu,cpu", "--replicas", "3"), "there is a replica for each device"),
        (("--devices", "cpu,cpu", "--provider", "cpu"), "both choose the device"),
        (("--replicas", "2", "--no-supervise"), "--no-supervise: several replicas need the supervisor"),
        (("--replicas", "2", "--gr00t", "tcp://127.0.0.1:65535"), "replica 1 would have port 65536"),
    ],
)
def test_x7_what_replicas_cannot_have_is_refused(tiny: Path, options: tuple[str, ...], said: str) -> None:
    assert said in refusal(tiny, *options)
