"""What a server of functions promises its callers: one bad item fails alone, shares, deadlines, limits, the end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forked import reflex
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.observe.metrics import FUNCTIONS
from serving.collector import Collector
from serving.harness import Answer, Burst, Metrics

from .door import Functions, source

WAITING, IN_FLIGHT = "reflex_function_waiting", "reflex_function_in_flight"


@pytest.fixture(scope="module")
def server() -> Iterator[Functions]:
    options = ("--max-queue", "24", "--max-batch-size", "16")
    with Functions(
        "result", "double", "computed", options=options, held=True, takes="0.002 + 0.001 * len(batch)"
    ) as made:
        yield made


def plugged(server: Functions, name: str = "double") -> Burst:
    """One request that has the device until `release`."""
    plug = server.together(name, [1], request_id="plug")
    plug.send()
    server.reach(lambda m: m(IN_FLIGHT) == 1 and m(WAITING) == 0)
    return plug


def behind(server: Functions, burst: Burst, first: str = "double") -> list[Answer]:
    """The answers of requests that all waited behind the plug."""
    with plugged(server, first) as plug, burst:
        burst.send()
        server.reach(lambda m: m(WAITING) == len(burst.sockets))
        server.release()
        answers = burst.answers()
        assert plug.answers()[0].status == 200
    return answers


def first_of(server: Functions, who: list[dict[str, str]]) -> list[bool]:
    """Which of 22 requests are in the first batch. It is full, the rest is in the second one."""
    for i in range(3):  # what is not known yet is tried in small batches
        assert server.predict("double", i).status == 200
    answers = behind(server, server.together("double", range(22), who))
    sizes = [answer.headers["x-reflex-batch-size"] for answer in answers]
    assert sorted(sizes) == ["16"] * 16 + ["6"] * 6
    return [size == "16" for size in sizes]


@pytest.mark.parametrize(
    "bad",
    [
        "raises",
        "panic",
        "exit",
        "interrupt",
        "cancelled",
        "stop",
        "short",
        "none",
        "dict",
        "generator",
        "objects",
        "own error",
        "circle",
    ],
)
def test_one_bad_item_of_16_fails_alone(server: Functions, bad: str) -> None:
    items = [bad if i == 7 else f"fine {i}" for i in range(16)]
    answers = behind(server, server.together("result", items))
    assert [answer.status for answer in answers] == [500 if item == bad else 200 for item in items]
    assert [answer.json for answer in answers if answer.status == 200] == [item for item in items if item != bad]
    assert answers[7].code == "processor_failed"


def test_what_raises_once_and_what_empties_its_list_harm_nobody(server: Functions) -> None:
    items = ["once" if i == 7 else f"fine {i}" for i in range(16)]
    assert [answer.json for answer in behind(server, server.together("result", items))] == items
    cleared = behind(server, server.together("result", ["clear", "other"]))
    assert [answer.json for answer in cleared] == [1, 1]
    assert cleared[0].headers["x-reflex-batch-size"] == "2"


def test_a_client_that_sends_much_does_not_delay_one_that_sends_little(server: Functions) -> None:
    who = [{"X-Reflex-Client": "greedy"}] * 20 + [{"X-Reflex-Client": "modest"}] * 2
    assert all(first_of(server, who)[20:])


def test_priority_comes_in_the_query_or_in_a_header(server: Functions) -> None:
    who = [{"X-Reflex-Priority": "background"}] * 20 + [{"X-Reflex-Priority": "urgent"}] * 2
    assert all(first_of(server, who)[20:])
    assert server.predict("double", 1, priority="urgent").status == 200


def test_functions_share_the_device_by_their_weights_in_batches_of_their_size(tmp_path: Path) -> None:
    options = ("--weight", "heavy=100", "--max-batch-size", "2", "--trace", str(tmp_path / "trace.jsonl"))
    sources = [f"{name}={source('slow')}" for name in ("heavy", "light")]
    with Functions(*sources, "double", options=options, held=True, takes="0.01") as server:
        for name in ("heavy", "light", "double"):  # what is not known yet is charged by a guess
            assert [server.predict(name, i).status for i in range(3)] == [200] * 3
        with (
            plugged(server) as plug,
            server.together("heavy", range(16)) as heavy,
            server.together("light", range(16)) as light,
        ):
            for burst in (light, heavy):
                burst.send()
            server.reach(lambda m: m(WAITING) == 32)
            server.release()
            assert plug.answers()[0].status == 200
            answers = [*heavy.answers(), *light.answers()]
        assert server.stop() == 0
    assert {(answer.status, answer.headers["x-reflex-batch-size"]) for answer in answers} == {(200, "2")}
    ran = [batch.group for batch in read_journal(tmp_path / "trace.jsonl").batches][-16:]
    assert ran.count("heavy") == 8
    assert ran[:10].count("heavy") == 8, ran


def test_a_deadline_ends_waiting_wherever_it_is_written(server: Functions) -> None:
    with plugged(server) as plug:
        assert server.predict("double", 1, deadline_ms=20).code == "deadline_exceeded"
        assert server.predict("double", 1, {"X-Reflex-Deadline-Ms": "20"}).status == 504
        server.release()
        assert plug.answers()[0].status == 200


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("deadline_ms=0", "deadline_ms"), ("deadline_ms=nan", "deadline_ms"), ("deadline_ms=1e9", "deadline_ms"),
        ("deadline_ms=soon", "deadline_ms"), ("priority=high", "priority"), ("deadline=1", "deadline"),
        ("client=%00", "client"), ("client=" + "x" * 257, "client"), ("request_id=%0a", "request_id"), ("x", "x"),
        ("deadline_ms=5&deadline_ms=5000", "deadline_ms"), ("client=a&priority=urgent&client=a", "client"),
    ],
)  # fmt: skip
def test_a_wrong_word_about_a_request_is_the_422_that_names_it(server: Functions, query: str, field: str) -> None:
    answer = server.ask("POST", f"/predict/double?{query}", b"1", {"Content-Type": "application/json"})
    assert (answer.status, answer.json.get("field")) == (422, field), answer.body
    name, _, value = query.partition("=")
    if not {"%", "&"} & {*query} and value and name in ("deadline_ms", "priority", "client"):
        header = {f"X-Reflex-{name.replace('_', '-')}": value}
        assert server.predict("double", 1, header).json["field"] == field


def test_a_header_of_ours_that_is_not_read_is_named(server: Functions) -> None:
    for sent, near in (("X-Reflex-Dedline-Ms", "x-reflex-deadline-ms"), ("X-Reflex-Kee", "x-reflex-key")):
        answer = server.predict("double", 1, {sent: "20"})
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert answer.json["message"] == f"{sent.lower()}: this path reads no such header; did you mean {near}?"
    assert server.predict("double", 1, {"X-Reflex-Episode": "e", "X-Reflected": "1"}).status == 200
    assert server.ask("GET", "/health", None, {"X-Reflex-Client": "c"}).status == 200


def test_a_request_has_the_id_that_it_brings(server: Functions) -> None:
    assert server.predict("double", 1, request_id="mine").headers["x-request-id"] == "mine"
    assert server.predict("double", 1, {"X-Reflex-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert server.predict("double", 1, {"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert server.predict("result", "raises", request_id="mine").json["request_id"] == "mine"


def test_a_full_queue_refuses_and_says_when_to_come_again(server: Functions) -> None:
    with plugged(server) as plug, server.together("double", range(24)) as burst:
        burst.send()
        server.reach(lambda m: m(WAITING) == 24)
        answer = server.predict("double", 1)
        assert (answer.status, answer.code) == (503, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        server.release()
        assert [one.json for one in burst.answers()] == [2 * i for i in range(24)]
        assert plug.answers()[0].status == 200


def test_who_hangs_up_is_never_computed(server: Functions) -> None:
    with plugged(server) as plug, server.together("computed", ["leaves", "stays", "leaves too"]) as burst:
        burst.send()
        server.reach(lambda m: m(WAITING) == 3)
        burst.hang_up([0, 2])
        server.reach(lambda m: m(WAITING) == 1)
        server.release()
        assert burst.answers([1])[0].json == "stays"
        assert plug.answers()[0].status == 200
    assert not {"leaves", "leaves too"} & {*server.predict("computed", "?").json}
    seen = server.metrics()
    assert seen("reflex_function_requests_total", function="computed", outcome="cancelled") == 2


def test_every_series_moves(server: Functions) -> None:
    with plugged(server) as plug, server.together("double", [1]) as burst:
        burst.send()
        seen = server.reach(lambda m: m(WAITING) == 1)
        unmoved = [row.name for row in FUNCTIONS if not moved(seen, row.name, function="double")]
        server.release()
        assert plug.answers()[0].status == burst.answers()[0].status == 200
    assert unmoved == []


def moved(seen: Metrics, name: str, **labels: str) -> bool:
    try:
        return seen(name, **labels) > 0
    except AssertionError:
        return seen(f"{name}_sum", **labels) > 0


def test_the_dashboard_shows_the_functions(server: Functions) -> None:
    with server.connect() as sock:
        sock.sendall(b"GET /dashboard/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        text = b""
        while not all(word in text for word in (b'"functions"', b'"result"', b'"double"', b'"computed"')):
            text += sock.recv(65536)
    assert text.startswith(b"HTTP/1.1 200")
    assert server.get("/dashboard").status == 200


# -- files, spans, the end ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Collector, list[Answer], int]]:
    """What is left of a server that was told to end while six requests waited: files, spans, answers, status."""
    folder = tmp_path_factory.mktemp("ended")
    with Collector() as collector:
        options = ("--trace", str(folder / "trace.jsonl"), "--record", str(folder / "records"), "--otel", collector.url)
        with Functions("double", "result", options=options, held=True) as server, plugged(server) as plug:
            with server.together("double", range(6)) as burst, server.together("result", ["raises"]) as bad:
                burst.send()
                bad.send()
                server.reach(lambda m: m(WAITING) == 7)
                server.process.send_signal(signal.SIGTERM)
                server.wait_log("draining")
                assert server.get("/health").status == 503
                assert server.predict("double", 1).code == "shutting_down"
                server.release()
                answers = [*plug.answers(), *burst.answers(), *bad.answers()]
            status = server.wait()
            collector.wait(9, lambda span: True)
        yield folder, collector, answers, status


def test_at_the_end_all_that_waits_is_answered(ended: Any) -> None:
    _, _, answers, status = ended
    assert [answer.status for answer in answers] == [200] * 7 + [500]
    assert [answer.json for answer in answers[1:7]] == [2 * i for i in range(6)]
    assert status == 0


def test_the_trace_is_a_table(ended: Any) -> None:
    done = reflex("trace", ended[0] / "trace.jsonl", "--no-picture")
    assert done.returncode == 0, done.stderr
    assert "double" in done.stdout
    assert "result" in done.stdout


def test_a_recording_is_scheduled_again(ended: Any) -> None:
    (file,) = (ended[0] / "records").iterdir()
    done = reflex("replay", file, "--schedule")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "failed" in done.stdout


def test_requests_and_batches_are_spans(ended: Any) -> None:
    spans = {span.name for span in ended[1].spans}
    assert {"predict double", "predict result", "batch double", "batch result"} <= spans, spans
    assert any(span.status == 2 for span in ended[1].spans if span.name == "predict result")
