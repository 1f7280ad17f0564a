"""Connections: their number, and the time they may take for each phase, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import select
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.frames import Frame, Opcode
from websockets.sync.client import connect

from reflex_runtime.cli import main
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.run.process import loop_factory
from reflex_runtime.settings import ServeConfig
from reflex_runtime.web import app as application
from reflex_runtime.web import connections as module
from reflex_runtime.web.access import AddressShares
from reflex_runtime.web.app import App
from reflex_runtime.web.connections import most_connections
from reflex_runtime.web.errors import PLAIN
from reflex_runtime.web.request import HttpRequest, HttpResponse, Route, WebSocket
from serving.harness import PATIENCE, STATE, Answer, Server, encode, parse_answers, read_all, refusal
from serving.in_process import with_app
from serving.openai_toy import Toy
from web.listening import Limits, StillLoop, listening
from web.test_http import NOT_HTTP

COMPLETION = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


def test_max_connections_leaves_descriptors_to_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "listdir", lambda path: ["fd"] * 20)
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    no_limit = resource.RLIM_INFINITY
    for soft, hard, asked, most in (
        (1024, 1024, 4096, 940), (1024, 1024, 940, 940), (64, 64, 4096, 16), (no_limit, no_limit, 9, 9),
        (1024, 524288, 4096, 4096), (1024, 2000, 4096, 1916), (1024, no_limit, 4096, 4096),
    ):  # fmt: skip
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=(soft, hard): limits)
        most_connections.cache_clear()
        assert most_connections(asked) == most
    most_connections.cache_clear()
    assert [record.message for record in caplog.records] == [
        "--max-connections=4096: the process may have 1024 open files, so it is 940",
        "--max-connections=4096: the process may have 64 open files, so it is 16",
        "--max-connections=4096: the process may have 2000 open files, so it is 1916",
    ]
    assert set_to[2:] == [(4180, 524288), (2000, 2000), (4180, no_limit)]


def test_max_connections_of_a_system_that_allows_fewer_files_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(module.os, "listdir", lambda path: ["fd"] * 20)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, resource.RLIM_INFINITY))
    most_connections.cache_clear()
    assert most_connections(4096) == 940
    most_connections.cache_clear()


@pytest.fixture(scope="module")
def hasty(tiny: Path) -> Iterator[Server]:
    """A server with little time for heads and bodies."""
    with Server(tiny, "--body-timeout-s", "0.2", "--max-body-bytes", "2000") as running:
        yield running


def _told(data: bytes) -> Answer:
    (answer,) = parse_answers(data)
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert (answer.code, answer.json["retry_safe"]) == ("request_timeout", True)
    assert answer.json["request_id"] == answer.headers["x-request-id"]
    return answer


def test_h10_body_timeout_s_is_the_longest_of_a_head_too(hasty: Server) -> None:
    assert "head of the request did not come within 0.2 s" in _told(hasty.raw(b"GET /health HT")).json["message"]
    line = hasty.wait_log("too slow")
    assert "repeats are not logged" in line
    first, second = parse_answers(hasty.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"))
    assert (first.status, second.status) == (200, 408)


@pytest.mark.parametrize("framing", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"])
def test_h10_body_timeout_s_ends_half_a_body(hasty: Server, framing: bytes) -> None:
    answer = _told(hasty.raw(b"POST /act HTTP/1.1\r\nHost: localhost\r\n" + framing))
    assert "body of the request did not come within 0.2 s" in answer.json["message"]
    hasty.reach(lambda m: m("reflex_in_flight_requests") == 0)


def test_the_rest_of_a_refused_body_is_not_waited_for_either(hasty: Server) -> None:
    (answer,) = parse_answers(hasty.raw(b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{"))
    assert answer.status == 413


def test_h10_idle_timeout_s_closes_without_a_word(tiny: Path) -> None:
    with Server(tiny, "--idle-timeout-s", "0.3") as server:
        assert server.raw(b"") == b""
        while not (data := server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")):
            pass  # this process was paused before it had sent it, and idle itself
        assert [answer.status for answer in parse_answers(data)] == [200]


def test_l9_half_requests_are_ended_in_the_form_of_the_api() -> None:
    with Toy(body_timeout_s=0.2) as toy:
        for half, says in (b"POST /v1/comp", "the head of the request did not come within 0.2 s"), (
            COMPLETION % 9 + b"{", "the body of the request did not come within 0.2 s",
        ):  # fmt: skip
            with socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as sock:
                sock.sendall(half)
                (answer,) = parse_answers(read_all(sock))
            error = toy.error(answer)
            assert (answer.status, error["code"], says in error["message"]) == (408, "request_timeout", True), error
            assert answer.headers["x-should-retry"] == "true"


def test_l9_a_silent_connection_is_closed_without_a_word() -> None:
    with Toy(idle_timeout_s=0.3) as toy:
        with socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as sock:
            assert sock.recv(1) == b""


def test_l9_who_does_not_read_its_answers_is_cut_off_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_S", 0.3)
    request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
    with Toy(send_buffer=4096) as toy, socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as sock:
        sock.setblocking(False)

        def send_on() -> None:
            while select.select([], [sock], [], PATIENCE)[1]:
                sock.send(request)

        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_on()
        assert toy.get("/health").status == 200


@pytest.mark.parametrize("name", NOT_HTTP)
def test_l9_what_is_not_http_is_answered_in_the_form_of_the_api(toy: Toy, name: str) -> None:
    with socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as sock:
        try:
            sock.sendall(NOT_HTTP[name].replace(b"/act", b"/v1/completions"))
            data = read_all(sock)
        except (ConnectionResetError, BrokenPipeError):
            assert len(NOT_HTTP[name]) > 10**6  # closed while it was still being sent
            return
    (answer,) = parse_answers(data)
    assert (answer.status, toy.error(answer)["type"]) == (400, "invalid_request_error")
    assert (answer.headers["connection"], answer.headers["x-should-retry"]) == ("close", "false")


@pytest.fixture(scope="module")
def toy() -> Iterator[Toy]:
    with Toy() as running:
        yield running


def test_h10_max_connections_refuses_the_newest(tiny: Path) -> None:
    with Server(tiny, "--max-connections", "2") as server, server.connect() as held:
        held.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert held.recv(65536).startswith(b"HTTP/1.1 200")
        with server.connect() as second:
            second.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert second.recv(65536).startswith(b"HTTP/1.1 200")
            (refused,) = parse_answers(server.raw(b""))
            assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "overloaded", "1")
            assert refused.headers["connection"] == "close"
        server.wait_log("--max-connections")
        while server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[9:12] != b"200":
            pass  # the server has seen that the second has left
        assert server.act().status == 200


def test_h10_a_connection_that_was_one_too_many_is_served_once_another_has_left(tiny: Path) -> None:
    with Server(tiny, "--max-connections", "1") as server:

        def served_late() -> bool:
            with server.connect() as held, server.connect() as late:
                held.close()
                late.sendall(HEALTH)
                return late.recv(12) == b"HTTP/1.1 200"

        server.wait_until(served_late)


def test_l9_max_connections_refuses_the_newest_in_the_form_of_the_api() -> None:
    with Toy(max_connections=1) as toy, socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as held:
        held.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert held.recv(65536).startswith(b"HTTP/1.1 200")
        with socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as second:
            (refused,) = parse_answers(read_all(second))
        assert (refused.status, toy.error(refused)["code"]) == (503, "overloaded")
        assert refused.headers["x-should-retry"] == "true"


def test_h10_max_connections_per_address_refuses_the_newest_of_that_address_alone(tiny: Path) -> None:
    with Server(tiny, "--max-connections-per-address", "2") as server:
        where = ("127.0.0.1", server.port)
        with connect(f"ws://127.0.0.1:{server.port}/openpi/policy") as robot, server.connect():
            robot.recv()  # a websocket counts as what it was before
            (refused,) = parse_answers(server.raw(b""))
            assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "overloaded", "1")
            assert refused.json["message"].startswith("2 connections of your address are open")
            with socket.create_connection(where, PATIENCE, ("127.0.0.2", 0)) as neighbour:
                neighbour.sendall(HEALTH)
                assert neighbour.recv(12) == b"HTTP/1.1 200"
        assert "of 127.0.0.1 are open (--max-connections-per-address)" in server.wait_log("(--max-conn")
        with server.connect():
            server.wait_until(lambda: server.raw(HEALTH)[9:12] == b"200")  # it has seen that both have left


def test_h10_an_address_far_beyond_its_share_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections that wait to be refused hold file descriptors, too: an address could hold those of all."""
    monkeypatch.setattr(module, "LINGER_S", 3600.0)
    with Toy(max_connections_per_address=1) as toy, contextlib.ExitStack() as held:
        for _ in range(1 + module.RESERVE // 2):
            held.enter_context(socket.create_connection(("127.0.0.1", toy.port)))
        with socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as last:
            (refused,) = parse_answers(read_all(last))
        assert (refused.status, toy.error(refused)["code"]) == (503, "overloaded")


def test_l9_max_connections_per_address_is_the_same_for_a_model() -> None:
    with Toy(max_connections_per_address=1) as toy, socket.create_connection(("127.0.0.1", toy.port)) as held:
        held.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert held.recv(65536).startswith(b"HTTP/1.1 200")
        with socket.create_connection(("127.0.0.1", toy.port), timeout=PATIENCE) as second:
            (refused,) = parse_answers(read_all(second))
        assert (refused.status, toy.error(refused)["code"]) == (503, "overloaded")


def test_h10_the_shares_of_addresses_end_with_their_connections() -> None:
    shares, six = AddressShares(1), "2001:db8:0:0:ffff::2"
    for host in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", six, "2001:db8:0:1::1", "fe80::1%eth0"):
        shares.opened((host, 1))
    over = {host: shares.over((host, 9)) for host in ("10.0.0.1", "2001:db8::7", "2001:db8:0:1::7", "fe80::2%eth0")}
    assert over == {"10.0.0.1": 1, "2001:db8::7": 1, "2001:db8:0:1::7": 0, "fe80::2%eth0": 0}
    for host in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "fe80::1%eth0"):
        shares.closed((host, 1))
    assert not shares._open
    for number in range(3):
        shares.opened(("unix", number))
    assert shares.over(("unix", 3)) == 0


def test_b19_a_server_with_128_descriptors_refuses_what_it_cannot_hold_and_goes_on(tiny: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
    with Server(tiny, before=limit) as server:
        with contextlib.ExitStack() as open_:
            held = [open_.enter_context(server.connect()) for _ in range(120)]
            assert held[-1].recv(12) == b"HTTP/1.1 503"
            server.wait_log("--max-connections=4096: the process may have 128 open files")

        def answers() -> bool:
            with contextlib.suppress(ConnectionResetError):  # far beyond the number the refusal itself may be lost
                return server.raw(HEALTH)[9:12] == b"200"
            return False

        server.wait_until(answers)
        assert server.act().status == 200


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("value", [b"y\r\nx-more: z", b"y\nx-more: z", b"y\rx-more: z"])
def test_a_header_of_two_lines_is_not_sent(value: bytes) -> None:
    async def main() -> None:
        async def run(request: HttpRequest) -> HttpResponse:
            return HttpResponse(200, b"x", headers=[(b"x-one", value)])

        app = App(ServeConfig(), {"/": Route("/", run)}, PLAIN)
        async with listening(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


def test_h4_a_body_that_stopped_coming_makes_room_for_others(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "STALLED", 0.0)
    half = b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n" + bytes(800_000)

    async def check(app: App, runtime: PolicyRuntime) -> None:
        async with listening(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(half)
            while app.bodies.held < 800_000:  # noqa: ASYNC110
                await asyncio.sleep(0)
            other, theirs = await asyncio.open_connection("127.0.0.1", port)
            theirs.write(encode(json.dumps({"state": STATE}).encode() + b" " * 600_000, {"Connection": "close"}))
            (answer,) = parse_answers(await other.read())
            assert answer.status == 200
            (cut,) = parse_answers(await reader.read())
            assert (cut.status, cut.code) == (408, "request_timeout")
            assert "others need its memory" in cut.json["message"]
            writer.close()
            theirs.close()

    with_app(tiny, check, max_bodies_mb=1.0)


def test_a_request_takes_no_time_limit_while_it_is_answered() -> None:
    async def check(loop: StillLoop) -> None:
        slow, go = asyncio.Event(), asyncio.Event()

        async def answer(request: HttpRequest) -> HttpResponse:
            slow.set()
            await go.wait()
            return HttpResponse(200, b"{}")

        app = App(ServeConfig(), {"/slow": Route("/slow", answer)}, PLAIN)
        limits = Limits(idle_timeout_s=0.2, body_timeout_s=0.2)
        async with listening(app, limits) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await slow.wait()
            idle, theirs = await asyncio.open_connection("127.0.0.1", port)
            await loop.pass_until(idle.at_eof)
            theirs.close()
            go.set()
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            rest = asyncio.ensure_future(reader.read())
            await loop.pass_until(rest.done)  # and then it is idle itself
            assert rest.result().endswith(b"{}")
            writer.close()

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(check(runner.get_loop()))  # type: ignore[arg-type]


def test_h10_uds_is_a_socket_of_this_user_alone(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "reflex.sock"
    with Server(tiny, "--uds", str(path), until="ready on unix:") as server, socket.socket(socket.AF_UNIX) as sock:
        assert path.stat().st_mode & 0o777 == 0o600
        sock.connect(str(path))
        sock.sendall(encode({"state": STATE}, {"Connection": "close"}))
        (answer,) = parse_answers(read_all(sock))
        assert answer.status == 200
        with socket.socket(socket.AF_UNIX) as operator:
            operator.connect(str(path))
            body = b'{"faults": []}'
            head = b"POST /admin/faults HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            operator.sendall(head % len(body) + body)
            (answer,) = parse_answers(read_all(operator))
            assert answer.status == 200  # whoever may open the socket is this machine's own
        assert server.stop() == 0
        assert not path.exists()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key), made for this machine's own name."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_h10_ssl_certfile_and_ssl_keyfile_serve_tls(tiny: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with Server(tiny, "--ssl-certfile", str(cert), "--ssl-keyfile", str(key)) as server:
        assert "INFO reflex ready on https://" in server.wait_log("ready on")
        trusts = ssl.create_default_context(cafile=str(cert))
        with server.connect() as plain, trusts.wrap_socket(plain, server_hostname="localhost") as sock:
            sock.sendall(encode({"state": STATE}, {"Connection": "close"}))
            (answer,) = parse_answers(read_all(sock))
            assert answer.status == 200


def test_l9_a_model_server_has_a_unix_socket_and_tls_too(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    small = ("--kv-cache-gb", "0.05")
    (cert, key), path = certificate, tmp_path / "model.sock"
    with Server("scribe", *small, "--uds", str(path), until="ready on unix:"), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
    with Server("scribe", *small, "--ssl-certfile", str(cert), "--ssl-keyfile", str(key)) as server:
        assert "ready on https://" in server.wait_log("ready on")


def test_h10_a_handshake_has_the_time_of_a_head(tiny: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    options = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--body-timeout-s", "0.2")
    with Server(tiny, *options) as server, server.connect() as silent:
        silent.settimeout(PATIENCE / 2)
        assert silent.recv(1) == b""


def test_h10_the_same_files_serve_tls_over_grpc(
    tiny: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = certificate
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(cert))
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    tls = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    with Server(tiny, *tls, "--oip-grpc", "localhost:0") as server:
        port = server.wait_log("clients of OIP over gRPC: ").rpartition(":")[2]
        for url in (f"grpcs://localhost:{port}", f"https://localhost:{server.port}"):
            assert main(["probe", url, "--wire", "oip-grpc", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["wires"][0]["works"]
        assert main(["probe", f"grpc://localhost:{port}", "--wire", "oip-grpc", "--timeout-s", "1"]) == 1


def test_h10_files_that_are_no_certificate_and_key_are_refused(tiny: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    nothing = tiny / "reflex_config.json"
    assert f"--ssl-certfile={nothing}: cannot be used: " in refusal(tiny, "--ssl-certfile", str(nothing))
    assert "No such file or directory" in refusal(tiny, "--ssl-certfile", str(cert) + "x", "--ssl-keyfile", str(key))
    assert f"--ssl-certfile={cert}: cannot be used: " in refusal(tiny, "--ssl-certfile", str(cert))  # without its key
    assert "--ssl-certfile" in refusal(tiny, "--ssl-keyfile", str(key))


REQUEST = b"GET /no HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /whole HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("kind", ["requests", "chunks"])
def test_others_are_served_between_requests_and_parts_that_came_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []  # bytes in each turn of the loop

    class Counting(module.HttpConnection):
        def _parse(self) -> None:
            before = len(self.unparsed)
            super()._parse()
            parsed.append(before - len(self.unparsed))

    async def whole(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, b"%d" % len(await request.body()))

    async def check() -> list[Answer]:
        app = App(ServeConfig(), {"/whole": Route("/whole", whole, method="POST", most=10**6)}, PLAIN)
        async with listening(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            all_of_it = (
                REQUEST * 4_000 + LAST if kind == "requests" else CHUNKED + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n"
            )
            writer.write(all_of_it)
            data = await reader.read()
            writer.close()
        return parse_answers(data)

    monkeypatch.setattr("reflex_runtime.web.serve.HttpConnection", Counting)
    monkeypatch.setattr(module, "TURN_S", 0.0)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        answers = runner.run(check())
    if kind == "requests":
        assert [answer.status for answer in answers] == [404] * 4_001
    else:
        assert [answer.body for answer in answers] == [b"20000"]
    assert sum(parsed) >= 100_000
    assert max(parsed) <= module.SLICE


def test_a_websocket_takes_over_what_was_not_parsed() -> None:
    """More came with its handshake than is parsed in one turn."""

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        async for message in socket:
            await socket.send(message.data)

    async def check() -> bytes:
        app = App(ServeConfig(), {"/echo": Route("/echo", echo, socket=echo)}, PLAIN)  # type: ignore[arg-type]
        async with listening(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            shake = b"GET /echo HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            shake += b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: cmVmbGV4LWJlbmNoLTEyMw==\r\n\r\n"
            message = Frame(Opcode.TEXT, bytes(40_000) + b"end").serialize(mask=True)
            writer.write(shake + message)
            data = await reader.readuntil(b"end")
            writer.close()
            return data

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        data = runner.run(check())
    assert data.startswith(b"HTTP/1.1 101 ")
    assert data.endswith(bytes(40_000) + b"end")
