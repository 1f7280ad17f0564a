"""A version that crashes: who notices, who does not, and how it comes back."""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.observe.journal import read_journal
from serving.harness import PATIENCE, STATE, Server
from serving.pair import Pair, admin, episodes, rollout, two, until, version_of
from serving.requests import busy, numbered, queued

LONG = ("--probe-cooldown-s", "480")  # nothing comes back by itself


def of(server: Server, slot: str) -> Any:
    """What the breaker says of a slot."""
    return rollout(server)["breaker"]["slots"][slot]


def health(server: Server) -> tuple[int, str, dict[str, str]]:
    told = server.get("/health")
    return told.status, told.json["verdict"], {slot: of["verdict"] for slot, of in told.json["slots"].items()}


# -- V6 ----------------------------------------------------------------------------------------------------------------


def test_v6_b_raising_on_every_call_is_nothing_to_the_callers_of_a(pair: Pair) -> None:
    with two(pair, "--inject-fault", "b:raise:1", *LONG) as server:
        done = threading.Event()
        seen: list[Any] = []

        def ask(episode: str) -> None:
            while not done.is_set():
                seen.append(server.act(episode_id=episode, seed=1))

        others = [threading.Thread(target=ask, args=(e,)) for e in episodes("a", 4)]
        for thread in others:
            thread.start()
        b = episodes("b", 8)
        answers = [server.act(episode_id=e, seed=2) for e in b]
        until(lambda: len(seen) > 40)
        done.set()
        for thread in others:
            thread.join()
        assert [a.status for a in answers] == [500] * 5 + [200] * 3  # one at a time: five calls, then the drain
        assert {version_of(a, 2) for a in answers[5:]} == {"v1"}
        assert {a.headers["x-reflex-policy-slot"] for a in answers[5:]} == {"a"}
        assert {a.status for a in seen} == {200}
        assert {version_of(a, 1) for a in seen} == {"v1"}
        assert not any(a.json["policy_changed"] for a in seen + answers[5:])  # these had not begun elsewhere
        again = [server.act(episode_id=b[0]) for _ in range(2)]  # this one had
        assert [a.json["policy_changed"] for a in again] == [True, False]
        assert health(server) == (200, "drain-b", {"a": "ok", "b": "drained"})
        assert server.wait_log("drain: b crashes: drain-b")
        assert "5 calls crashed in a row" in of(server, "b")["why"]
        assert server.metrics()("reflex_requests_total", policy_slot="b", outcome="failed") == 5


def test_v6_the_verdict_stands_in_headers_metrics_and_trace(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    options = ("--inject-fault", "b:raise:1", "--max-consecutive-crashes", "1", "--trace", str(file), *LONG)
    with two(pair, *options) as server:
        on_a, on_b = episodes("a", 1)[0], episodes("b", 2)
        before = server.act(episode_id=on_a)
        assert "x-reflex-verdict" not in before.headers
        assert server.metrics()("reflex_slot_drained") == 0
        server.act(episode_id=on_b[0])
        after = server.act(episode_id=on_b[1])
        assert after.headers["x-reflex-verdict"] == "drain-b"
        seen = server.metrics()
        assert [seen("reflex_slot_drained", policy_slot=slot) for slot in "ab"] == [0, 1]
        assert admin(server, "reset", slot="b").status == 200
        assert server.metrics()("reflex_slot_drained") == 0
        assert server.stop() == 0
    verdicts = [batch.notes.get("verdict") for batch in read_journal(file).batches]
    assert verdicts == [None, "drain-b", "drain-b"]


def test_v6_a_failed_batch_counts_once_however_many_were_in_it(pair: Pair) -> None:
    with two(pair, *LONG, held=True) as server:
        assert admin(server, "faults", faults=["b:raise:1"]).status == 200
        (plug,) = episodes("a", 1)
        with busy(server, episode_id=plug):
            bodies = [r | {"episode_id": e} for r, e in zip(numbered(16), episodes("b", 16), strict=True)]
            assert {a.status for a in server.behind(bodies)} == {500}
        metrics = server.reach(lambda m: m("reflex_in_flight_requests") == 0)
        calls = metrics("reflex_batch_flush_total", policy_slot="b")
        assert calls < 5
        assert of(server, "b")["consecutive"] == calls
        assert health(server)[1] == "ok"


def test_v6_one_answer_of_a_batch_makes_it_no_crash(pair: Pair) -> None:
    def bad(name: str) -> bool:
        return int.from_bytes(hashlib.sha256(f"0:b:raise:{name}".encode()).digest()[:8], "big") < 0.1 * 2.0**64

    names = [f"r{i}" for i in range(400)]
    one, good = [n for n in names if bad(n)], [n for n in names if not bad(n)]
    (a,), (b,) = episodes("a", 1), episodes("b", 1)
    options = ("--inject-fault", "b:raise:0.1", "--max-consecutive-crashes", "1")
    bodies = [{"state": STATE, "episode_id": b, "request_id": n, "robot_id": n} for n in (*good[:8], one[0])]
    with two(pair, *options, *LONG, held=True) as server:
        with busy(server, episode_id=a) as plug:
            assert [x.status for x in server.behind(bodies)] == [200] * 8 + [500]
            assert plug.answers()[0].status == 200
        assert health(server)[1] == "ok"


def test_v6_both_drained_is_degraded_and_is_left_by_itself(pair: Pair) -> None:
    options = ("--max-consecutive-crashes", "2", "--probe-cooldown-s", "0.3")
    with two(pair, "--inject-fault", "a:raise:1", "--inject-fault", "b:raise:1", *options) as server:
        told = until(
            lambda: (h := health(server))[1] == "degraded" and h,
            lambda: [server.act(episode_id=episodes(s, 1)[0]) for s in "ab"],
        )
        assert told[0] == 503
        refused = until(lambda: (a := server.act(episode_id="x")).code == "degraded" and a)
        assert (refused.status, refused.headers["retry-after"]) == (503, "60")
        assert refused.json["retry_safe"] is True
        assert server.get("/metrics").status == 200
        admin(server, "faults", faults=[])
        keys = iter(range(10**6))
        found = until(
            lambda: (h := health(server))[1] == "ok" and h,
            lambda: [server.act(episode_id=episodes(s, 1, name=f"again {next(keys)}")[0]) for s in "ab"],
        )
        assert found == (200, "ok", {"a": "ok", "b": "ok"})
        kinds = [c["kind"] for c in rollout(server)["changes"]]
        assert kinds.count("drain") == kinds.count("return") == 2


# -- V6: what never counts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shaken(pair: Pair) -> Iterator[Server]:
    """A server whose b is one crash away from its drain, and would be back to none by one answer."""
    with two(pair, "--max-queue", "2000", "--max-consecutive-crashes", "2", *LONG, held=True) as server:
        yield server


BRINKS = count()


def brink(server: Server) -> None:
    """One crash of b, by a client that is not known for it."""
    admin(server, "reset", slot="b")
    admin(server, "faults", faults=["b:raise:1"])
    assert server.act(episode_id=episodes("b", 1, name=f"brink {next(BRINKS)}")[0]).status == 500
    admin(server, "faults", faults=[])
    assert of(server, "b")["consecutive"] == 1


def not_counted(server: Server) -> None:
    """Neither way: it has not been drained, and has not been taken for a clean answer either."""
    assert of(server, "b")["consecutive"] == 1
    assert health(server)[1] == "ok"


def many(server: Server, body: Any, n: int) -> list[tuple[int, str]]:
    """The same request n times, one after the other, on one connection: status and code of each answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    found = []
    for _ in range(n):
        connection.request("POST", "/act", data)
        answer = connection.getresponse()
        found.append((answer.status, json.loads(answer.read())["error"]))
    connection.close()
    return found


@pytest.mark.long  # many requests
def test_v6_1000_client_errors_in_a_row_never_drain(shaken: Server) -> None:
    brink(shaken)
    (episode,) = episodes("b", 1)
    assert set(many(shaken, {"state": [1.0], "episode_id": episode}, 500)) == {(422, "invalid_request")}
    assert set(many(shaken, {"state": STATE, "episode_id": episode, "image": "no"}, 250)) == {(422, "invalid_request")}
    assert set(many(shaken, b"{", 250)) == {(400, "invalid_json")}
    not_counted(shaken)


def test_v6_1000_deadlines_in_a_row_never_drain(shaken: Server) -> None:
    brink(shaken)
    (plug,) = episodes("a", 1)
    (episode,) = episodes("b", 1)
    late = [{"state": STATE, "episode_id": episode, "deadline_ms": 300}] * 1000
    with shaken.burst(late) as burst, busy(shaken, episode_id=plug) as first:
        burst.send()
        codes = [(a.status, a.code) for a in burst.answers()]
        assert set(codes) <= {(504, "deadline_exceeded"), (503, "deadline_unreachable")}
        not_counted(shaken)
        shaken.release()
        assert first.answers()[0].status == 200


def test_v6_1000_cancels_in_a_row_never_drain(shaken: Server) -> None:
    brink(shaken)
    before = shaken.metrics()("reflex_requests_total", policy_slot="b", outcome="cancelled")
    (plug,) = episodes("a", 1)
    (episode,) = episodes("b", 1)
    body = {"state": STATE, "episode_id": episode}
    with shaken.burst([body] * 1000) as burst, busy(shaken, episode_id=plug) as first:
        burst.send()
        burst.hang_up(range(1000))
        shaken.reach(lambda m: m("reflex_requests_total", policy_slot="b", outcome="cancelled") >= before + 1000)
        not_counted(shaken)
        shaken.release()
        assert first.answers()[0].status == 200


def test_v6_a_cancel_while_it_runs_counts_for_nothing(shaken: Server) -> None:
    brink(shaken)
    (episode,) = episodes("b", 1)
    busy(shaken, episode_id=episode).hang_up([0])
    assert shaken.get("/health").status == 200  # the loop has met the end of the other connection before this
    shaken.release()
    shaken.reach(lambda m: m("reflex_in_flight_requests") == 0)
    not_counted(shaken)


@pytest.mark.long  # many requests
def test_v6_1000_times_queue_full_in_a_row_never_drain(pair: Pair) -> None:
    with two(pair, "--max-queue", "1", "--max-consecutive-crashes", "1", *LONG, held=True) as server:
        (plug,) = episodes("a", 1)
        (episode,) = episodes("b", 1)
        body = {"state": STATE, "episode_id": episode}
        with busy(server, episode_id=plug), server.burst([body]) as waiting:
            waiting.send()
            server.reach(queued(1))
            assert many(server, body, 1000) == [(503, "queue_full")] * 1000
            server.release()
            assert waiting.answers()[0].status == 200
        assert health(server)[1] == "ok"
        assert of(server, "b")["consecutive"] == 0


# -- V7 ----------------------------------------------------------------------------------------------------------------


def test_v7_a_probe_at_a_time_doubling_and_it_returns(pair: Pair) -> None:
    options = ("--max-consecutive-crashes", "2", "--probe-cooldown-s", "0.2")
    with two(pair, "--inject-fault", "b:raise:1", *options) as server:
        names = iter(episodes("b", 5000))
        until(lambda: health(server)[1] == "drain-b", lambda: server.act(episode_id=next(names)))
        failed = []
        for cooldown in (0.4, 0.8):  # a probe is let in, crashes, and the next one waits twice as long
            statuses = []
            until(
                lambda: of(server, "b")["cooldown_s"] == cooldown,  # noqa: B023
                lambda: statuses.append(server.act(episode_id=next(names)).status),  # noqa: B023
            )
            failed.append(statuses.count(500))
            assert set(statuses) <= {200, 500}
        assert failed == [1, 1]  # nobody else noticed
        admin(server, "faults", faults=[])
        until(lambda: health(server)[1] == "ok", lambda: server.act(episode_id=next(names)))
        back = server.act(episode_id=next(names), seed=4)
        assert (version_of(back, 4), back.headers["x-reflex-policy-slot"]) == ("v2", "b")
        assert of(server, "b")["cooldown_s"] == 0.2
        assert server.wait_log("return: b answers again")


def test_v7_episodes_that_were_moved_stay_when_it_returns(pair: Pair) -> None:
    with two(pair, "--max-consecutive-crashes", "1", *LONG) as server:
        running, other = episodes("b", 2)
        assert version_of(server.act(episode_id=running, seed=1), 1) == "v2"
        admin(server, "faults", faults=["b:raise:1"])
        assert server.act(episode_id=other).status == 500
        admin(server, "faults", faults=[])
        moved = [server.act(episode_id=running, seed=1) for _ in range(2)]
        assert [m.json["policy_changed"] for m in moved] == [True, False]
        answer = admin(server, "reset", slot="b")
        assert answer.json == {"verdict": "ok", "slots": {"a": "ok", "b": "ok"}}
        told = server.act(episode_id=running, seed=1)
        assert (version_of(told, 1), told.json["policy_changed"]) == ("v1", False)
        assert version_of(server.act(episode_id=episodes("b", 3)[-1], seed=1), 1) == "v2"


def test_v6_a_crash_rate_that_cannot_be_chance_drains_without_a_run(pair: Pair) -> None:
    with two(pair, "--inject-fault", "b:raise:0.4", "--max-consecutive-crashes", "1000", *LONG) as server:
        names = iter(range(10**6))
        (episode,) = episodes("b", 1)
        until(
            lambda: health(server)[1] == "drain-b",
            lambda: [server.act(episode_id=episode, request_id=f"r{next(names)}") for _ in range(10)],
        )
        assert "crash rate above 1%" in of(server, "b")["why"]
