"""Functions that stream: server-sent events, steps that items join and leave, readers that leave or do not read."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from reflex_runtime.core.batch import Batch, Cause, More
from reflex_runtime.core.errors import ProcessorError
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.functions.processor import MOST_BEHIND, Streams
from serving.harness import PATIENCE, Metrics, changed

from .door import Functions, parts_of, request
from .served import STREAMS, endless_async

ASKS_FOR_JSON = {"Accept": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Functions]:
    with Functions(*STREAMS) as made:
        yield made
        assert made.get("/health").status == 200


def begun(server: Functions, name: str, item: object) -> socket.socket:
    """A stream of which something has come."""
    sock = server.connect()
    sock.sendall(request(server.path(name), item))
    while b"data: " not in sock.recv(65536):
        pass
    return sock


def closed(server: Functions) -> list[str]:
    found: list[str] = server.predict("closed", 0).json
    return found


@pytest.mark.parametrize("name", ["counts", "each", "counts_async"])
def test_parts_come_as_events_and_the_last_says_how_many(server: Functions, name: str) -> None:
    answer = server.predict(name, 4)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    assert [*parts_of(answer.body)] == [
        ("message", 0),
        ("message", 1),
        ("message", 2),
        ("message", 3),
        ("end", {"parts": 4}),
    ]
    assert server.predict(name, 4, ASKS_FOR_JSON).json == [0, 1, 2, 3]
    assert server.predict(name, 0, ASKS_FOR_JSON).json == []
    assert [*parts_of(server.predict(name, 0).body)] == [("end", {"parts": 0})]


@pytest.mark.parametrize("name", ["counts", "each"])
def test_streams_of_different_lengths_share_steps(server: Functions, name: str) -> None:
    lengths = [5, 1, 9, 2, 7, 0, 3, 12]
    with server.together(name, lengths, [ASKS_FOR_JSON] * len(lengths)) as burst:
        burst.send()
        assert [answer.json for answer in burst.answers()] == [[*range(n)] for n in lengths]


def test_an_error_after_the_first_part_is_an_event_and_before_it_a_status(server: Functions) -> None:
    for item, parts, why in ((13, 3, "thirteen"), (15, 1, "SystemExit")):
        found = [*parts_of(server.predict("each", item).body)]
        assert found[:-1] == [("message", i) for i in range(parts)]
        assert found[-1][0] == "error"
        assert why in found[-1][1]["message"]
        assert server.predict("each", item, ASKS_FOR_JSON).status == 500
    assert server.predict("each", 14).status == 500
    assert server.predict("each", "x").status == 422


def test_one_that_fails_ends_no_other(server: Functions) -> None:
    items = [14, 5, 13, 6, 15, 7]
    with server.together("each", items, [ASKS_FOR_JSON] * 6) as burst:
        burst.send()
        answers = burst.answers()
    assert [answer.status for answer in answers] == [500, 200, 500, 200, 500, 200]
    assert [answer.json for answer in answers[1::2]] == [[*range(n)] for n in (5, 6, 7)]


@pytest.mark.parametrize(("name", "told"), [("endless", "endless 5"), ("endless_async", "endless_async [5]")])
def test_who_hangs_up_closes_the_generator(server: Functions, name: str, told: str) -> None:
    with begun(server, name, 5):
        assert told not in closed(server)
    server.wait_until(lambda: told in closed(server))


def test_a_generator_that_does_not_close_harms_nobody(server: Functions) -> None:
    with begun(server, "endless", 16), begun(server, "endless", 17) as other:
        with begun(server, "endless", 18):
            pass
        server.wait_until(lambda: "endless 18" in closed(server))
        got = b""
        while len(got) < 100_000:
            got += other.recv(65536)
        assert b"event: error" not in got
    assert server.get("/health").status == 200


def test_items_join_and_leave_between_steps(server: Functions) -> None:
    with begun(server, "endless", 1):
        before = batched(server.metrics())
        with begun(server, "endless", 2):  # its parts come while the first goes on
            server.wait_until(lambda: batched(server.metrics()) > before)
        server.wait_until(lambda: "endless 2" in closed(server))
        assert "endless 1" not in closed(server)
    server.wait_until(lambda: "endless 1" in closed(server))


def batched(seen: Metrics) -> float:
    """Items of batches beyond the first of each."""
    return seen("reflex_function_batch_size_sum", function="endless") - seen(
        "reflex_function_batch_size_count", function="endless"
    )


def test_a_reader_that_does_not_read_is_held_and_goes_on_once_it_does(server: Functions) -> None:
    def stepped() -> float:
        return server.metrics()("reflex_function_batch_size_sum", function="endless")

    with begun(server, "endless", 20_000) as sock:
        same, last = 0, -1.0
        for _ in range(10_000):
            same, last = (same + 1, last) if (now := stepped()) == last else (0, now)
            if same == 20:
                break
            changed()
        assert same == 20, "it is not held"
        assert server.predict("each", 3, ASKS_FOR_JSON).json == [0, 1, 2]
        sock.settimeout(PATIENCE)
        while stepped() < last + 200:
            sock.recv(1 << 20)


def test_one_that_does_not_read_keeps_no_endless_parts_and_the_others_go_on() -> None:
    processor = Streams(endless_async)
    idle, reader = (Ticket(Request(1, group="f"), n, 0.0) for n in range(2))

    def step(*tickets: Ticket) -> list[object]:
        batch = Batch(1, "f", "", "", Cause.IDLE, 0.0, 0.0, 0.0, dict.fromkeys(tickets, 1.0))
        return [*processor.run(batch)]

    try:
        assert step(idle, reader) == [More("x"), More("x")]
        for _ in range(MOST_BEHIND + 5):
            assert step(reader) == [More("x")]
        (left,) = step(idle)
        assert isinstance(left, ProcessorError)
        assert "behind" in str(left)
        assert step(reader) == [More("x")]
    finally:
        processor.drop([reader])
        processor.stop()


def test_an_error_of_ours_has_no_prefix() -> None:
    processor = Streams(lambda items: iter([[1, 2]]))
    tickets = [Ticket(Request(1, group="f"), 0, 0.0)]
    (wrong,) = processor.run(Batch(1, "f", "", "", Cause.IDLE, 0.0, 0.0, 0.0, dict.fromkeys(tickets, 1.0)))
    assert "returned 2 results for 1 item;" in str(wrong)
    assert "ProcessorError" not in str(wrong)
