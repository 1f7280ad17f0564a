"""H9: the latency objective, followed over served requests, and its three modes."""

from __future__ import annotations

import time
from pathlib import Path

from reflex_runtime.core.batch import RequestAnswered
from reflex_runtime.robots.versions.ramp import Objective, SloTracker
from serving.harness import STATE, Server
from serving.requests import busy, queued

LIMIT = 0.1


def tracker(mode: str, percentile: float = 99.0) -> SloTracker:
    return SloTracker(Objective(percentile, LIMIT), mode)


def test_h9_it_is_checked_every_32_and_every_second() -> None:
    by_count = tracker("log_only")
    for _ in range(31):
        by_count.served(1.0, 0.5)
    assert not by_count.violated
    by_count.served(1.0, 0.5)
    assert by_count.violated
    by_time = tracker("log_only")
    by_time.served(1.0, 0.9)
    assert not by_time.violated
    by_time.served(1.0, 1.0)
    assert by_time.violated
    by_clock = tracker("log_only")
    by_clock.served(1.0, 0.1)
    by_clock.check(1.1)  # the server's timer: also when nobody asks
    assert by_clock.violated


def test_h9_it_is_cleared_after_three_checks_clearly_below() -> None:
    slo = tracker("log_only", 50.0)
    for _ in range(32):
        slo.served(1.0, 0.0)
    assert slo.violated
    for i in range(1000):  # below the limit, not below 0.8 of it
        slo.served(0.09, 0.0)
        assert slo.violated or i < 0
    assert slo.value == 0.09
    for _ in range(600):
        slo.served(0.05, 0.0)
    assert not slo.violated


def test_p34_the_answers_of_another_policy_do_not_count() -> None:
    slo = SloTracker(Objective(50.0, LIMIT), "log_only", "arm.")
    for slot in ["hand.prod"] * 32 + ["arm.prod"]:
        slo(RequestAnswered(2.0, slot, "ok", 200, 1.0, None, None, 1.0, "act"))
        assert slo.violated == (slot == "arm.prod")


def test_h9_the_window_is_the_last_1000_served() -> None:
    slo = tracker("log_only")
    for _ in range(11):
        slo.served(1.0, 0.0)
    for _ in range(989):
        slo.served(0.01, 0.0)
    slo.check(0.0)
    assert slo.value == 1.0  # 11 of 1000 are slow: the 99th percentile sees them
    for _ in range(2):
        slo.served(0.01, 0.0)
    slo.check(0.0)
    assert slo.value == 0.01


def test_h9_mode_503_still_admits_1_in_10() -> None:
    slo = tracker("503")
    assert all(slo.admits() for _ in range(100))
    for _ in range(32):
        slo.served(1.0, 0.0)
    assert sum(slo.admits() for _ in range(100)) == 10


def test_h9_log_only_says_it_and_serves_on(tiny: Path) -> None:
    with Server(tiny, "--slo", "p50=20ms", "--inject-latency-ms", "60") as server:
        for _ in range(3):
            server.at_once([{"state": STATE}] * 16)
        line = server.wait_log("slo violated")
        assert "limit 20.0 ms" in line
        assert server.act().status == 200
        told = server.get("/health")
        assert told.status == 200
        assert told.json["slo"]["violated"] is True
        assert told.json["slo"]["value_ms"] > 20


def test_h9_mode_503_refuses_and_lets_some_in(tiny: Path) -> None:
    with Server(tiny, "--slo", "p50=20ms", "--slo-mode", "503", "--inject-latency-ms", "60") as server:
        for _ in range(3):
            server.at_once([{"state": STATE}] * 16)
        server.wait_log("slo violated")
        before = server.metrics()("reflex_requests_total", outcome="rejected")
        answers = server.at_once([{"state": STATE}] * 40)
        refused = [a for a in answers if a.status != 200]
        assert {(a.status, a.code, a.headers["retry-after"]) for a in refused} == {(503, "slo_violated", "1")}
        assert all(a.json["retry_safe"] for a in refused)
        assert len(answers) - len(refused) == 4
        # rejections are no samples: all that was served took longer than the limit, and the percentile says so
        assert server.get("/health").json["slo"]["value_ms"] > 20
        assert server.metrics()("reflex_requests_total", outcome="rejected") - before == len(refused)


def test_h9_mode_503_clears_when_it_is_fast_again(tiny: Path) -> None:
    """One slow batch that many wait for, then fast ones: one in ten is let in until the median has come down."""
    with Server(tiny, "--slo", "p50=1s", "--slo-mode", "503", held=True) as server, busy(server) as plug:
        with server.burst([{"state": STATE}] * 40) as burst:
            burst.send()
            server.reach(queued(40))
            slow = time.monotonic() + 1.2
            server.reach(lambda m: time.monotonic() > slow)
            server.release()
            burst.answers()
        plug.answers()
        server.wait_log("slo violated")
        server.wait_log_while("slo met again", lambda: server.at_once([{"state": STATE}] * 40))
        assert server.act().status == 200
        assert server.get("/health").json["slo"]["violated"] is False
