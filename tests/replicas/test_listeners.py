"""Wires that are not HTTP, with replicas: every replica has a port of its own, also once it is started again."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from policies.wires.callers import Caller, Groot, Lerobot, OipGrpc, Refused
from reflex_runtime.cli.replicas import devices_of
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings import ServeConfig
from serving.exports import expected
from serving.harness import STATE, Server, refusal
from serving.pair import until

LINES = {OipGrpc: "clients of OIP over gRPC: ", Groot: "clients of GR00T: ", Lerobot: "clients of LeRobot: "}


def free_ports() -> int:
    """A port that is free, as is the next one."""
    while True:
        with closing(socket.socket()) as one, closing(socket.socket()) as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            try:
                other.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


@contextmanager
def at(kind: type[Caller], server: Server, replica: str) -> Iterator[Caller]:
    """A caller at the port that one replica has for a wire."""
    (line, *_) = [line for line in server.log if LINES[kind] in line and replica in line]
    caller = kind(cast(Any, SimpleNamespace(wait_log=lambda _: line)))
    with closing(SimpleNamespace(close=caller.leave)):
        yield caller


def ask(caller: Caller) -> Any:
    caller.send(STATE, seed=1)
    return caller.answer()


def test_x7_every_replica_has_its_ports_for_wires_that_are_not_http(tiny: Path) -> None:
    port = free_ports()
    wires = ("--oip-grpc", f"127.0.0.1:{port}", "--gr00t", "tcp://127.0.0.1:0", "--lerobot", "127.0.0.1:0")
    with Server(tiny, "--replicas", "2", *wires) as server:
        for kind in LINES:
            for replica in ("replica-0", "replica-1"):
                with at(kind, server, replica) as caller:
                    assert np.shape(ask(caller)) == np.shape(expected(STATE, 1))
        counted = server.metrics()
        assert all(counted("reflex_requests_total", wire=kind.wire, outcome="ok") == 2 for kind in LINES)
        os.kill(server.get("/health").json["replicas"][1]["pid"], signal.SIGKILL)
        with at(OipGrpc, server, "replica-0") as one, at(OipGrpc, server, "replica-1") as other:
            assert np.shape(ask(one)) == np.shape(expected(STATE, 1))

            def answered() -> bool:
                try:
                    return np.shape(ask(other)) == np.shape(expected(STATE, 1))
                except Refused:
                    return False

            until(answered)  # on the same port, once it is there again
        told = {line.rpartition(" ")[2] for line in server.log if LINES[OipGrpc] in line}
        assert told == {f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"}


@pytest.mark.parametrize("flag", ["--oip-grpc", "--lerobot"])
def test_x7_a_port_that_no_replica_may_have_is_refused_by_name(tiny: Path, flag: str) -> None:
    told = refusal(tiny, "--replicas", "2", flag, "127.0.0.1:65535")
    assert f"{flag}=127.0.0.1:65535: replica 1 would have port 65536" in told


def devices(**changed: Any) -> list[str]:
    return devices_of(ServeConfig(replicas=3, **changed), {})


def test_x7_two_wires_of_replicas_may_not_meet_at_one_port() -> None:
    """The replica would say that its port is taken, and not by whom."""
    with pytest.raises(ConfigError) as error:
        devices(gr00t="tcp://127.0.0.1:9000", lerobot="127.0.0.1:9002")
    assert error.value.message == (
        "--gr00t=tcp://127.0.0.1:9000: with 3 replicas port 9002 would be that of --lerobot of replica 0 and of "
        "--gr00t of replica 2; leave 3 ports from each number on"
    )
    for host, given in (("127.0.0.1", "tcp://*:7999"), ("0.0.0.0", "tcp://10.0.0.1:7999"), ("::1", "tcp://[::1]:7998")):
        with pytest.raises(ConfigError, match="port 8000 would be that of the server and of --gr00t of replica"):
            devices(host=host, gr00t=given)
    devices(gr00t="tcp://127.0.0.1:9000", lerobot="127.0.0.1:9003", oip_grpc="10.0.0.1:9000")
    devices(gr00t="tcp://127.0.0.1:0", lerobot="127.0.0.1:0", oip_grpc="127.0.0.1:0")


def test_x7_a_port_that_is_taken_ends_the_start_with_its_address(tiny: Path) -> None:
    port = free_ports()
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        with Server(tiny, "--replicas", "2", "--oip-grpc", f"127.0.0.1:{port}", until="not serving") as server:
            line = server.wait_log("not serving on")
            assert f"--oip-grpc=127.0.0.1:{port + 1}: cannot be bound" in line
            assert server.wait() != 0
