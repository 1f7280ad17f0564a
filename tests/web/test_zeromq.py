"""ZeroMQ takes no more than its share: raw sockets that speak ZMTP, or not, beside stock ones."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

import msgpack
import pytest
import zmq

from robots.wires.groot_clients import GrootRobot, port_of
from serving.harness import PATIENCE, Server
from serving.requests import WAITING, busy

HERE = ("--gr00t", "tcp://127.0.0.1:0")
SOON = 15.0  # seconds; less than libzmq takes to give up a greeting
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0")
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"
PING = msgpack.packb({"endpoint": "ping"})


def raw(server: Server, *sent: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port_of(server)), SOON)
    for data in sent:
        sock.sendall(data)
    return sock


def comes(sock: socket.socket, wanted: bytes) -> None:
    """Read until it has come."""
    found = b""
    while wanted not in found:
        data = sock.recv(65536)
        assert data, found
        found += data


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed it."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while sock.recv(65536):
            pass
    return True


def observation(size: int) -> dict[str, object]:
    return {"state": {"all": [[[0.1, 0.1]]]}, "more": {"x": bytes(size)}}


def test_w34_connections_are_a_part_of_those_of_http(tiny: Path) -> None:
    """Of eight, two are of ZeroMQ and six of HTTP."""
    with Server(tiny, *HERE, "--max-connections", "8") as server, contextlib.ExitStack() as open_:
        socks = [open_.enter_context(raw(server)) for _ in range(300)]
        assert all(map(is_closed, socks[2:]))
        for _ in range(6):
            held = open_.enter_context(server.connect())
            held.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert held.recv(12) == b"HTTP/1.1 200"
        assert server.raw(b"")[:12] == b"HTTP/1.1 503"


def test_w34_the_client_that_was_silent_for_longest_makes_room(tiny: Path) -> None:
    with Server(tiny, *HERE, "--max-connections", "8", "--idle-timeout-s", "0.1") as server:
        with contextlib.ExitStack() as open_:
            robots = [open_.enter_context(GrootRobot(port_of(server))) for _ in range(3)]
            for robot in robots:  # libzmq connects again where it is not taken at once
                assert robot.call("ping")["status"] == "ok"
            assert robots[2].call("ping")["status"] == "ok"


@pytest.mark.parametrize(
    "said",
    [
        b"", GREETING[:20], GREETING, b"GET / HTTP/1.1\r\n\r\n", GREETING.replace(b"NULL", b"PLAI"),
        GREETING.replace(b"\x7f\x03", b"\x7f\x01"), GREETING + b"\x00\x01a", GREETING + READY.replace(b"REQ", b"PUB"),
        GREETING + b"\x04\x00", GREETING + READY + b"\x08\x00", GREETING + READY + b"\x01\x00" * 100,
        GREETING + READY + struct.pack(">BQ", 2, 1 << 62), GREETING + READY + b"\x00\x05part",
    ],
)  # fmt: skip
def test_w33_what_is_no_zmtp_or_does_not_come_ends_its_connection(hasty: Server, said: bytes) -> None:
    with raw(hasty, said) as sock:
        assert is_closed(sock)
    with GrootRobot(port_of(hasty)) as robot:
        assert robot.call("ping")["status"] == "ok"


@pytest.fixture(scope="module")
def hasty(tiny: Path):  # type: ignore[no-untyped-def]
    with Server(tiny, *HERE, "--head-timeout-s", "0.3", "--body-timeout-s", "0.3") as server:
        yield server


def test_w33_a_ping_of_the_protocol_is_answered(hasty: Server) -> None:
    with raw(hasty, GREETING + READY + b"\x04\x09\x04PING\x00\x00hi") as sock:
        comes(sock, b"\x04\x07\x04PONGhi")


def test_w34_bytes_count_before_their_message_is_whole(tiny: Path) -> None:
    with Server(tiny, *HERE, "--max-bodies-mb", "1") as server, GrootRobot(port_of(server)) as robot:
        begun = struct.pack(">BQ", 2, 900_000) + bytes(800_000)
        with raw(server, GREETING, READY, b"\x01\x00", begun) as sock:
            server.wait_until(lambda: robot.act(observation(600_000)).__contains__("code"))
            assert robot.act(observation(600_000))["code"] == "overloaded"
            assert robot.call("ping")["status"] == "ok"
            sock.sendall(bytes(100_000))  # it is no msgpack, and that is its answer
            comes(sock, b"invalid_request")
            assert isinstance(robot.act(observation(600_000)), list)


def test_w34_a_client_may_send_ahead_and_is_not_read_while_much_waits(tiny: Path) -> None:
    with Server(tiny, *HERE) as server, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVTIMEO, round(1e3 * PATIENCE))
        dealer.connect(f"tcp://127.0.0.1:{port_of(server)}")
        for number in range(500):
            dealer.send_multipart([b"%d" % number, b"", PING])
        assert {int(dealer.recv_multipart()[0]) for _ in range(500)} == set(range(500))


def test_w37_who_leaves_while_queued_is_never_computed(tiny: Path) -> None:
    with Server(tiny, *HERE, held=True) as server, busy(server):
        with GrootRobot(port_of(server)) as robot:
            robot.send("get_action", {"observation": observation(1)})
            server.reach(lambda m: m(WAITING) == 1)
        server.reach(lambda m: m("reflex_requests_total", outcome="cancelled", wire="gr00t") == 1)
        server.release()
        assert server.metrics()("reflex_requests_total", outcome="ok", wire="gr00t") == 0
