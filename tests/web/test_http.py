"""HTTP as such, on a policy server: framings, what is not HTTP, limits, and keys."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.harness import STATE, Server, encode, parse_answers, read_all
from serving.openai_toy import Toy
from serving.requests import check_error

LIMIT = 4 * 2**20
FIELDS = {"state": STATE}
BODY = json.dumps(FIELDS).encode()


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    with Server(tiny, "--max-body-bytes", str(LIMIT)) as running:
        yield running
        assert running.act().status == 200
        assert not any("Traceback" in line for line in running.log)


# -- framings ----------------------------------------------------------------------------------------------------------


def test_a_chunked_body_is_put_together(server: Server) -> None:
    chunked = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in (BODY[:1], BODY[1:9], BODY[9:]))
    head = b"POST /act HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    (answer,) = parse_answers(server.raw(head + chunked + b"0\r\nX-Trailer: 1\r\n\r\n"))
    assert answer.status == 200


def test_a_body_byte_by_byte_is_put_together(server: Server) -> None:
    data = encode(FIELDS, {"Connection": "close"})
    with server.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in data:
            sock.send(bytes([byte]))
        (answer,) = parse_answers(read_all(sock))
    assert answer.status == 200


def test_a_client_that_waits_for_the_go_ahead_gets_it(server: Server) -> None:
    with server.connect() as sock:
        sock.sendall(b"POST /act HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nConnection: close\r\n")
        sock.sendall(b"Content-Length: %d\r\n\r\n" % len(BODY))
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        (answer,) = parse_answers(read_all(sock))
    assert answer.status == 200


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    sent = b"".join(encode(FIELDS | {"request_id": f"p{i}"}) for i in range(5))
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answers = parse_answers(server.raw(sent + last))
    assert [a.json.get("request_id") for a in answers] == ["p0", "p1", "p2", "p3", "p4", None]
    assert {a.status for a in answers} == {200}


def test_http_1_0_is_answered_and_closed(server: Server) -> None:
    (answer,) = parse_answers(server.raw(b"GET /health HTTP/1.0\r\n\r\n"))
    assert answer.status == 200


def test_a_target_in_absolute_form_is_understood(server: Server) -> None:
    data = b"GET http://elsewhere/health?x=1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert parse_answers(server.raw(data))[0].status == 200


@pytest.mark.parametrize("upgrade", ["h2c", "websocket", "TLS/1.0"])
def test_an_offer_to_upgrade_is_declined_by_answering(server: Server, upgrade: str) -> None:
    more = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": upgrade, "HTTP2-Settings": "AAMAAABk"}
    with server.connect() as sock:
        data = encode(FIELDS, more)
        sock.sendall(data[:-20])
        sock.sendall(data[-20:])
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        first, second = parse_answers(read_all(sock))
    assert first.status == 200
    assert second.json["state"] == "ready"


# -- what is not HTTP --------------------------------------------------------------------------------------------------


NOT_HTTP = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00",
    "garbage": b"\x00" * 100,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/2 line": b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n",
    "HTTP/0.9 line": b"GET /health HTTP/0.9\r\nHost: localhost\r\n\r\n",
    "no version": b"GET /health\r\nHost: localhost\r\n\r\n",
    "no Host": b"GET /health HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /act HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}   \r\n0\r\n\r\n",
    "two Hosts of HTTP/1.0": b"GET /health HTTP/1.0\r\nHost: localhost\r\nhOST: u\r\n\r\n",
    "upgrade with a framing that is none": (
        b"POST /act HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"
        b"Transfer-Encoding: banana\r\n\r\n"
    ),
    "upgrade with two framings": (
        b"POST /act HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
    ),
    "CONNECT": b"CONNECT elsewhere:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a target without a path": b"GET http://localhost HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "negative length": b"POST /act HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "huge length": b"POST /act HTTP/1.1\r\nContent-Length: 99999999999999999999999999\r\n\r\n",
    "two framings": b"POST /act HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "space in a name": b"GET /health HTTP/1.1\r\nA b: 1\r\n\r\n",
    "CONNECT with an offer": (
        b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    ),
    "large head": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 66_000 + b"\r\n\r\n",
    "target not ascii": b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "one header without end": b"GET /health HTTP/1.1\r\nX: " + b"a" * 2_000_000,
    "headers without end": b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 400_000,
    "target without end": b"GET /" + b"a" * 2_000_000,
}


@pytest.mark.parametrize("name", NOT_HTTP)
def test_h14_what_is_not_http_is_answered_before_it_is_closed(server: Server, name: str) -> None:
    with server.connect() as sock:
        try:
            sock.sendall(NOT_HTTP[name])
        except (ConnectionResetError, BrokenPipeError):
            assert len(NOT_HTTP[name]) > 10**6  # closed while it was still sending
        try:
            data = read_all(sock)
        except ConnectionResetError:
            assert len(NOT_HTTP[name]) > 10**6
            return
    (answer,) = parse_answers(data)
    check_error(answer, 400, "invalid_request")
    assert answer.headers["connection"] == "close"
    assert "object has no" not in answer.json["message"]


BROKEN_BEHIND = ["HTTP/2 line", "no Host", "two Hosts", "upgrade with two framings", "two framings", "garbage"]
BROKEN_BEHIND += ["upgrade with a framing that is none", "CONNECT", "chunks in HTTP/1.0"]


@pytest.mark.parametrize("name", BROKEN_BEHIND)
def test_h14_the_answer_to_a_good_request_comes_before_a_broken_one_closes(server: Server, name: str) -> None:
    for good in (encode(FIELDS), b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        first, *others = parse_answers(server.raw(good + NOT_HTTP[name]))
        assert first.status == 200
        assert (others or [first])[-1].headers["connection"] == "close"
        assert [a.status for a in others] == [400] * len(others)


def test_offers_to_upgrade_by_the_thousand_are_answered_in_order(server: Server) -> None:
    more = {"Connection": "Upgrade", "Upgrade": "h2c"}
    sent = b"".join(encode({"request_id": f"u{i}"}, more) for i in range(3000))
    answers = parse_answers(server.raw(sent + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    assert [a.json.get("request_id") for a in answers] == [f"u{i}" for i in range(3000)] + [None]


def test_h14_garbage_behind_a_request_does_not_cut_off_its_answer(server: Server) -> None:
    (answer,) = parse_answers(server.raw(encode(FIELDS) + b"\x00garbage\r\n\r\n"))
    assert answer.status == 200
    assert answer.headers["connection"] == "close"


def test_h14_a_body_that_breaks_off_is_answered(server: Server) -> None:
    head = b"POST /act HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    (answer,) = parse_answers(server.raw(head + b"%x\r\n%s\r\nnonsense\r\n" % (len(BODY), BODY)))
    check_error(answer, 400, "invalid_request")
    assert "broke off" in answer.json["message"]


def test_h14_a_caller_that_closes_its_sending_side_is_answered(server: Server) -> None:
    (answer,) = parse_answers(server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", half_close=True))
    assert answer.status == 200


def test_h14_a_caller_that_closes_its_sending_side_while_it_waits_has_hung_up(tiny: Path) -> None:
    with Server(tiny, held=True) as server:
        assert server.raw(encode(FIELDS | {"request_id": "plug"}), half_close=True) == b""
        server.reach(lambda m: m("reflex_requests_total", outcome="cancelled") == 1)
        server.release()


def test_a_caller_that_leaves_in_the_middle_of_its_body_is_cancelled(server: Server) -> None:
    before = server.metrics()("reflex_requests_total", outcome="cancelled")
    with server.connect() as sock:
        sock.sendall(b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    server.reach(lambda m: m("reflex_requests_total", outcome="cancelled") == before + 1)


ONE_EACH = (
    "Authorization", "X-Reflex-Key", "X-Reflex-Deadline-Ms", "x-api-key", "Origin", "Content-Type", "Content-Encoding",
)  # fmt: skip


@pytest.mark.parametrize("name", ONE_EACH)
def test_h14_a_header_that_says_one_thing_is_not_sent_twice(server: Server, name: str) -> None:
    sent = encode(FIELDS).replace(b"\r\n\r\n", f"\r\n{name}: a\r\n{name.upper()}: b\r\n\r\n".encode(), 1)
    first, second = parse_answers(server.raw(sent + encode(FIELDS, {"Connection": "close", "X-a": "1\r\nx-A: 2"})))
    body = check_error(first, 400, "invalid_request")
    assert body["message"] == f"the request has 2 {name.lower()} headers, there may be one"
    assert second.status == 200


def test_h14_a_header_of_ours_that_no_path_reads_is_refused_by_name(server: Server) -> None:
    for name in ("X-Reflex-Deadline-Ms", "X-Reflex-Episod"):
        body = check_error(server.act_with({name: "5"}), 400, "invalid_request")
        assert body["message"].startswith(f"{name.lower()}: this path reads no such header")
    assert server.act_with({"X-Reflex-Episode": "e1", "X-Reflect": "1"}).status == 200
    with Toy() as toy:
        refused = toy.post("/v1/completions", {"model": "toy", "prompt": "x"}, **{"X-Reflex-Client": "c"})
        assert refused.status == 400
        assert refused.json["error"]["message"] == "x-reflex-client: this path reads no such header"


# -- compressed bodies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gzip", "br", "deflate", "zstd", "identity, gzip", "x" * 1000])
def test_h4_a_compressed_body_is_415(server: Server, name: str) -> None:
    answer = server.post(BODY, {"Content-Encoding": name})
    body = check_error(answer, 415, "unsupported_encoding")
    assert body["message"] == f"Content-Encoding: {name[:100]}: compressed bodies are not read"
    assert answer.headers["accept-encoding"] == "identity"
    assert server.post(BODY, {"Content-Encoding": "identity"}).status == 200


# -- limits ------------------------------------------------------------------------------------------------------------


def test_h4_a_body_over_the_limit_is_413(server: Server) -> None:
    assert server.post(BODY + b" " * (LIMIT // 2)).status == 200
    body = check_error(server.post(b"x" * (LIMIT + 1)), 413, "too_large")
    assert body["max_body_bytes"] == LIMIT


def test_h4_a_client_that_sends_everything_before_it_reads_gets_its_413(server: Server) -> None:
    big = b"x" * (8 * LIMIT)
    chunks = b"".join(b"%x\r\n%s\r\n" % (2**20, big[: 2**20]) for _ in range(32)) + b"0\r\n\r\n"
    for head, body in (
        (b"Content-Length: %d\r\n" % len(big), big),
        (b"Transfer-Encoding: chunked\r\n", chunks),
    ):
        with server.connect() as sock:
            sock.sendall(b"POST /act HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n" + body)
            # and the connection goes on
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            first, second = parse_answers(read_all(sock))
        check_error(first, 413, "too_large")
        assert second.status == 200


def test_h4_a_length_may_begin_with_zeros(server: Server) -> None:
    head = b"POST /act HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %s%d\r\n\r\n"
    for length, status in ((len(BODY), 200), (LIMIT + 1, 413)):
        (answer,) = parse_answers(server.raw(head % (b"0" * 5000, length) + BODY))
        assert answer.status == status


def test_h4_a_body_that_is_only_promised_is_refused_at_once(server: Server) -> None:
    with server.connect() as sock:
        sock.sendall(
            b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n"
        )
        (answer,) = parse_answers(read_all(sock))  # it closes: whether the body follows nobody knows
    check_error(answer, 413, "too_large")


def test_h8_beyond_max_concurrent_is_429_and_health_is_exempt(tiny: Path) -> None:
    with Server(tiny, "--max-concurrent", "2", held=True) as server:
        with server.burst([{"state": [0, 0], "request_id": name} for name in ("plug", "other")]) as burst:
            burst.send()
            server.reach(lambda m: m("reflex_in_flight_requests") == 2)
            refused = server.act()
            body = check_error(refused, 429, "too_many_requests")
            assert (body["concurrent_requests"], body["max_concurrent"]) == (2, 2)
            assert body["retry_safe"] is True
            assert refused.headers["retry-after"] == "1"
            assert server.get("/health").status == server.get("/metrics").status == 200
            server.release()
            assert [a.status for a in burst.answers()] == [200, 200]
        assert server.act().status == 200


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_h5_a_key_guards_everything_but_health_and_metrics(tiny: Path, how: str) -> None:
    key = "s3cret-ü"
    raw = key.encode().decode("latin-1")
    options, env = (["--api-key", key], {}) if how == "flag" else ([], {"REFLEX_API_KEY": key})
    with Server(tiny, *options, env=env) as server:
        assert server.get("/health").status == 200
        assert server.metrics()("reflex_requests_total", outcome="client_error") == 0
        told = "/config", "/diagnostics/cost-model", "/dashboard/stream"
        for path in (*told, "/admin/split", "/episodes/1", "/v1/models"):
            refused = server.get(path)
            check_error(refused, 401, "unauthorized")
            assert refused.headers["www-authenticate"] == "Bearer"
        wrong: list[dict[str, str]] = [
            {},
            {"Authorization": raw},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer " + raw + "x"},
            {"Authorization": "Basic " + raw},
            {"X-Reflex-Key": ""},
            {"X-Reflex-Key": raw[:-1]},
            {"X-Reflex-Key": raw.upper()},
        ]
        for headers in wrong:
            check_error(server.act_with(headers), 401, "unauthorized")
        right: list[dict[str, str]] = [
            {"Authorization": "Bearer " + raw},
            {"authorization": "bearer  " + raw},
            {"X-Reflex-Key": raw},
            {"Authorization": "Basic other", "X-Reflex-Key": raw},
            {"Authorization": "Bearer " + raw, "X-Reflex-Key": "other"},
        ]
        for headers in right:
            assert server.act_with(headers).status == 200
        assert server.metrics()("reflex_requests_total", outcome="client_error") == len(wrong)
        assert not any(key in line for line in server.log)
