"""gRPC takes no more than its share: connections, calls and their bytes, whatever callers send or leave unsent."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from reflex_runtime.settings import ServeConfig
from reflex_runtime.web import messages
from reflex_runtime.web.app import App
from reflex_runtime.web.errors import PLAIN, ClientError
from reflex_runtime.web.grpc_listener import GrpcCall, GrpcListener, serialize
from serving.harness import PATIENCE, Server

HERE = ("--lerobot", "127.0.0.1:0")
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)) + bytes((0, 0, 0, 4, 1, 0, 0, 0, 0))

# Run in the server's process: it logs each connection that it counts for an address.
COUNTS = """
from reflex_runtime.web import access
def opened(self, client, opens=access.AddressShares.opened):
    opens(self, client)
    access.log.warning("counted: %s", client)
access.AddressShares.opened = opened
"""


def address_of(server: Server) -> tuple[str, int]:
    host, _, port = server.wait_log("clients of LeRobot: ").rpartition(" ")[2].rpartition(":")
    return host, int(port)


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has closed it."""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            del data
    return True


def never(unsent: threading.Event) -> Iterator[bytes]:
    """A message that does not come before the event."""
    unsent.wait(PATIENCE)
    yield b""


def test_w44_the_key_is_checked_before_a_message_is_read(tiny: Path) -> None:
    unsent = threading.Event()
    with Server(tiny, *HERE, "--api-key", "secret") as server:
        with grpc.insecure_channel("{}:{}".format(*address_of(server))) as channel:
            for method in ("Ready", "SendPolicyInstructions", "SendObservations"):
                with pytest.raises(grpc.RpcError) as caught:
                    channel.stream_unary(f"/transport.AsyncInference/{method}")(never(unsent), timeout=PATIENCE)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            unsent.set()


def test_w44_a_key_is_not_sent_twice(tiny: Path) -> None:
    with Server(tiny, *HERE, "--api-key", "secret") as server:
        with grpc.insecure_channel("{}:{}".format(*address_of(server))) as channel:
            ready = channel.unary_unary("/transport.AsyncInference/Ready")
            right, wrong = ("authorization", "Bearer secret"), ("authorization", "Bearer wrong")
            ready(b"", metadata=[right], timeout=PATIENCE)
            for sent in ([right, wrong], [wrong, right], [right, right]):
                with pytest.raises(grpc.RpcError) as caught:
                    ready(b"", metadata=sent, timeout=PATIENCE)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "the request has 2 authorization headers" in str(caught.value.details())


def test_w44_metadata_of_ours_that_no_call_reads_is_refused_by_name(tiny: Path) -> None:
    with Server(tiny, *HERE) as server:
        with grpc.insecure_channel("{}:{}".format(*address_of(server))) as channel:
            ready = channel.unary_unary("/transport.AsyncInference/Ready")
            ready(b"", metadata=[("x-reflex-robot", "arm")], timeout=PATIENCE)
            with pytest.raises(grpc.RpcError, match="x-reflex-robt: this path reads no such header") as caught:
                ready(b"", metadata=[("x-reflex-robt", "arm")], timeout=PATIENCE)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_w44_a_call_with_a_header_twice_is_refused_and_counts_no_more(tiny: Path) -> None:
    options = ("--oip-grpc", "127.0.0.1:0", "--otel", "http://127.0.0.1:1", "--max-concurrent", "1")
    sent = messages.ModelInferRequest(model_name="tiny")
    sent.inputs.add(name="state", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1.0, 2.0])
    with Server(tiny, *options) as server:
        with grpc.insecure_channel(server.wait_log("clients of OIP over gRPC: ").rpartition(" ")[2]) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for _ in range(2):
                with pytest.raises(grpc.RpcError, match="2 authorization headers"):
                    infer(serialize(sent), metadata=2 * [("authorization", "Bearer a")], timeout=PATIENCE)
            infer(serialize(sent), timeout=PATIENCE)


def test_w44_connections_are_a_part_of_those_of_http(tiny: Path) -> None:
    """Of eight, two are of gRPC and six of HTTP."""
    with Server(tiny, *HERE, "--max-connections", "8") as server, contextlib.ExitStack() as open_:
        socks = [open_.enter_context(socket.create_connection(address_of(server), PATIENCE)) for _ in range(300)]
        assert all(map(is_closed, socks[2:]))
        assert server.act().status == 200
        for _ in range(6):
            held = open_.enter_context(server.connect())
            held.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert held.recv(12) == b"HTTP/1.1 200"
        assert server.raw(b"")[:12] == b"HTTP/1.1 503"


def test_w44_connections_with_a_call_are_among_those_of_their_address(tiny: Path) -> None:
    unsent, apart = threading.Event(), (("grpc.use_local_subchannel_pool", 1),)
    with Server(tiny, *HERE, "--max-connections-per-address", "2", before=COUNTS) as server:
        target = "{}:{}".format(*address_of(server))
        with grpc.insecure_channel(target) as first, grpc.insecure_channel(target, apart) as second:
            first.unary_unary("/transport.AsyncInference/Ready")(b"", timeout=PATIENCE)
            held = first.stream_unary("/transport.AsyncInference/Ready").future(never(unsent), timeout=PATIENCE)
            server.wait_log_while_fewer("counted: ", 2)  # a connection of ours could take the place of the held call
            with server.connect():
                assert server.raw(HEALTH)[9:12] == b"503"
                with pytest.raises(grpc.RpcError) as caught:
                    second.unary_unary("/transport.AsyncInference/Ready")(b"", timeout=PATIENCE)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "2 connections of your address are open" in str(caught.value.details())
                first.unary_unary("/transport.AsyncInference/Ready")(b"", timeout=PATIENCE)  # it is one already
                unsent.set()
                held.result()
                second.unary_unary("/transport.AsyncInference/Ready")(b"", timeout=PATIENCE)


def test_w44_a_connection_without_a_call_is_closed(tiny: Path) -> None:
    with Server(tiny, *HERE, "--idle-timeout-s", "0.2", "--body-timeout-s", "0.2") as server:
        for said in (b"", GREETING):
            with socket.create_connection(address_of(server), 15.0) as sock:  # gRPC itself gives up after 60 s
                sock.sendall(said)
                assert is_closed(sock)


def test_w44_a_message_that_does_not_come_ends_its_call(tiny: Path) -> None:
    unsent = threading.Event()
    with Server(tiny, *HERE, "--body-timeout-s", "0.2") as server:
        with grpc.insecure_channel("{}:{}".format(*address_of(server))) as channel:
            grpc.channel_ready_future(channel).result(PATIENCE)  # a handshake has as little time, and is repeated
            with pytest.raises(grpc.RpcError) as caught:
                channel.stream_unary("/transport.AsyncInference/Ready")(never(unsent), timeout=PATIENCE)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "did not come in time" in str(caught.value.details())
            unsent.set()


async def _kept(message: bytes) -> int:
    """Ask a service that reads messages and fails; how many copies of the message something still refers to."""

    async def fails(call: GrpcCall, data: bytes) -> bytes:
        try:
            raise ValueError(len(data))
        except ValueError:
            raise ClientError("no") from None

    async def part(call: GrpcCall, parts: AsyncIterator[bytes]) -> bytes:
        async for _ in parts:
            return b""
        raise AssertionError

    settings = ServeConfig()
    listener = GrpcListener(App(settings, {}, PLAIN), "--here", "127.0.0.1:0", settings)
    listener.serve("s", {"fails": fails}, {"part": part}, lambda call, error: None)
    async with grpc.aio.insecure_channel(listener.address) as channel:
        with contextlib.suppress(grpc.RpcError):
            await channel.unary_unary("/s/fails")(message)
        assert await channel.stream_unary("/s/part")(iter([message])) == b""
    await listener.close()
    refers = [one for tracked in gc.get_objects() for one in gc.get_referents(tracked)]
    return sum(type(one) is bytes and len(one) == len(message) and one is not message for one in refers)


def test_w43_a_message_goes_with_its_call_and_not_with_the_next_collection() -> None:
    gc.disable()
    try:
        assert asyncio.run(_kept(bytes(3_000_017))) == 0
    finally:
        gc.enable()
