"""A second policy that nobody hears: whatever it does, those who are served do not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.observe.journal import read_journal
from reflex_runtime.robots.serving.shadow import sampled
from serving.exports import expected
from serving.harness import STATE, Server
from serving.pair import Pair, admin, until, version_of
from serving.requests import busy, numbered, right

# Run in the server's process: no shadow is late because the machine is busy.
PATIENT = "from reflex_runtime.run.device import Device; Device.EXPENDABLE_S = 60.0"


def with_shadow(
    pair: Pair, shadow: Path, *options: str, sample: float = 1.0, before: str = PATIENT, held: bool = False
) -> Server:
    words = ("--shadow-policy", str(shadow), "--shadow-sample", str(sample), *options)
    return Server(pair.v1, *words, before=before + "\n", held=held)


def told(server: Server) -> Any:
    return server.get("/diagnostics/shadow").json


def ask(server: Server, n: int = 10, **more: Any) -> None:
    """n requests, one after the other, each with its right answer."""
    for i, body in enumerate(numbered(n, **more)):
        assert right(server.post(body), i)


def test_v10_divergence_is_nothing_against_itself_and_something_against_another(pair: Pair) -> None:
    with with_shadow(pair, pair.v1) as server:
        ask(server)
        found = until(lambda: (t := told(server))["compared"] == 10 and t)
        assert (found["mean"], found["largest"]) == (0.0, 0.0)
        assert set(found["per_joint"] + found["per_step"]) == {0.0}
        assert (found["dropped"], found["failed"], found["verdict"]) == (0, 0, "ok")
        metrics = server.metrics()
        assert metrics("reflex_shadow_divergence_count", policy_slot="shadow") == 10
        assert metrics("reflex_shadow_divergence_sum", policy_slot="shadow") == 0.0
        assert metrics("reflex_act_latency_seconds_count", policy_slot="shadow") == 10
        assert metrics("reflex_denoise_steps_total", policy_slot="shadow") == 10
        assert metrics("reflex_requests_total", policy_slot="shadow", outcome="ok") == 10
        assert metrics("reflex_act_latency_seconds_count", policy_slot="prod") == 10
        assert admin(server, "load", slot="shadow", path=str(pair.v2)).status == 200
        ask(server)
        found = until(lambda: (t := told(server))["compared"] == 20 and t)
        apart = [np.abs(_answer(i, "v1") - _answer(i, "v2")).mean() for i in range(10)]
        assert found["mean"] == pytest.approx(sum(apart) / 20, abs=1e-5)  # over both halves
        assert found["model"].startswith("v2@")
        assert server.metrics()("reflex_shadow_divergence_sum", policy_slot="shadow") == pytest.approx(
            sum(apart), abs=1e-4
        )
        assert server.get("/health").json["slots"]["shadow"] == {"verdict": "ok", "why": None}


def test_v10_divergence_stands_in_the_trace(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with with_shadow(pair, pair.v2, "--trace", str(file)) as server:
        ask(server, 4)
        until(lambda: told(server)["compared"] == 4)
        assert server.stop() == 0
    trace = read_journal(file)
    assert trace.footer is not None
    assert trace.footer.batches == len(trace.batches) == 8
    divergences = [note.fields for note in trace.noted("shadow")]
    assert len(divergences) == 4
    for i, found in enumerate(sorted(divergences, key=lambda d: d["request_id"])):
        apart = np.abs(_answer(i, "v1") - _answer(i, "v2"))
        assert (found["slot"], found["mean"]) == ("prod", pytest.approx(apart.mean(), abs=1e-5))
        assert found["per_joint"] == pytest.approx(apart.mean(axis=0), abs=1e-5)


def _answer(i: int, version: str) -> Any:
    from serving.pair import WEIGHTS_OF

    return expected([0.1 * i, -0.1 * i], i, WEIGHTS_OF[version])


def test_v10_the_same_request_id_twice_is_no_divergence(pair: Pair) -> None:
    """A client that names all its requests alike is compared request by request all the same."""
    with with_shadow(pair, pair.v1) as server:
        server.at_once([body | {"request_id": "same"} for body in numbered(12)])
        found = until(lambda: (t := told(server))["compared"] + t["dropped"] == 12 and t)
        assert found["compared"] > 0
        assert found["largest"] < 1e-6  # in a batch the last bit may differ


def test_v10_the_sampled_share_is_asked_and_no_other(pair: Pair) -> None:
    ids = [f"r{i}" for i in range(60)]
    with with_shadow(pair, pair.v2, sample=0.3) as server:
        ask(server, 60)
        wanted = sum(sampled(i, 0.3) for i in ids)
        assert 0 < wanted < 60
        until(lambda: (t := told(server))["compared"] + t["dropped"] == wanted)


def test_v10_served_requests_go_first_and_what_finds_no_room_is_dropped(pair: Pair, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    options = ("--inject-fault", "shadow:slow:1:300", "--trace", str(trace))
    with with_shadow(pair, pair.v2, *options, held=True) as server:
        with busy(server):
            for i, answer in enumerate(server.behind(numbered(160))):
                assert right(answer, i)
        server.release()  # the shadow of the plug
        admin(server, "faults", faults=[])
        found = until(lambda: (t := told(server))["compared"] + t["dropped"] == 161 and t)
        assert found["dropped"] >= 60  # at most 16 wait for a gap
        assert found["compared"] >= 1
        metrics = server.metrics()
        assert metrics("reflex_requests_total", policy_slot="shadow", outcome="rejected") == found["dropped"]
        assert metrics("reflex_requests_total", policy_slot="prod", outcome="ok") == 161
        assert server.stop() == 0
    batches = read_journal(trace).batches
    shadows = [b for b in batches if b.group == "shadow"]
    assert {b.size for b in shadows} == {1}  # one request at a time


def test_v10_as_long_as_anybody_served_waits_no_shadow_runs(pair: Pair, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    options = ("--max-batch-size", "1", "--inject-latency-ms", "40", "--trace", str(trace))
    with with_shadow(pair, pair.v2, *options, held=True) as server:
        with busy(server):
            for i, answer in enumerate(server.behind(numbered(16))):
                assert right(answer, i)
        server.release()  # the shadow of the plug
        until(lambda: (t := told(server))["compared"] + t["dropped"] == 17)
        assert server.stop() == 0
    groups = [b.group for b in read_journal(trace).batches]
    assert groups[:17] == ["prod"] * 17
    assert groups.count("shadow") > 2


def test_v10_what_a_shadow_step_costs_who_comes_meanwhile_is_told(pair: Pair, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with with_shadow(pair, pair.v2, "--inject-fault", "shadow:slow:1:300", "--trace", str(trace)) as server:
        ask(server, 1)
        server.reach(lambda m: m("reflex_in_flight_requests", policy_slot="shadow") == 1)

        def delayed() -> bool:
            return server.metrics()("reflex_shadow_delay_seconds_count", policy_slot="shadow") > 0

        until(delayed, lambda: ask(server, 1))
        metrics = server.metrics()
        assert server.stop() == 0
    count, delay = (metrics(f"reflex_shadow_delay_seconds_{of}", policy_slot="shadow") for of in ("count", "sum"))
    longest = max(b.finished - b.at for b in read_journal(trace).batches if b.group == "shadow")
    assert longest >= 0.3
    assert delay <= longest * count  # one step, no more


def test_v10_a_shadow_that_raises_fails_nobody(pair: Pair) -> None:
    with with_shadow(pair, pair.v2, "--inject-fault", "shadow:raise:1", "--max-consecutive-crashes", "2") as server:
        ask(server, 20)
        until(lambda: told(server)["failed"] + told(server)["dropped"] == 20)
        assert told(server)["compared"] == 0
        health = server.get("/health").json
        assert (health["state"], health["verdict"], health["consecutive_crashes"]) == ("ready", "ok", 0)
        assert server.metrics()("reflex_requests_total", policy_slot="prod", outcome="failed") == 0
        server.wait_log("the shadow did not answer")
        assert len([line for line in server.log if "the shadow did not answer" in line]) == 1
        admin(server, "faults", faults=[])
        ask(server, 3)
        until(lambda: told(server)["compared"] > 0)


@pytest.mark.parametrize("kind", ["hang", "die"])
def test_v10_a_shadow_that_hangs_or_dies_stops_being_asked_and_ends_nothing(kind: str, pair: Pair) -> None:
    options = ("--inject-fault", f"shadow:{kind}:1", "--watchdog-s", "60")
    with with_shadow(pair, pair.v2, *options, before="") as server:
        for i, answer in enumerate(server.at_once(numbered(8))):
            assert right(answer, i)
        until(lambda: told(server)["verdict"] == "stopped", lambda: ask(server, 2))  # those behind it wait a little
        server.reach(lambda m: m("reflex_in_flight_requests", policy_slot="shadow") == 0)  # nothing is kept for later
        assert server.wait_log("the shadow took the device thread with it")
        health = server.get("/health").json
        assert health["state"] == "ready"
        assert health["slots"]["shadow"]["verdict"] == "stopped"
        assert health["slots"]["shadow"]["why"]
        before = told(server)["dropped"]
        ask(server, 20)
        assert all(right(server.post(body), i) for i, body in enumerate(numbered(5)))
        until(lambda: told(server)["dropped"] >= before + 20)
        assert told(server)["waiting"] == 0
        # As often as an operator likes: it costs no life of the server.
        for _ in range(2):
            assert admin(server, "reset", slot="shadow").json["slots"] == {"prod": "ok", "shadow": "ok"}
            ask(server, 1)
            until(lambda: told(server)["verdict"] == "stopped", lambda: ask(server, 2))
        admin(server, "faults", faults=[])
        admin(server, "reset", slot="shadow")
        ask(server, 5)
        until(lambda: told(server)["compared"] > 0)
        assert [c["kind"] for c in server.get("/diagnostics/rollout").json["changes"]].count("shadow") == 6
        assert server.stop() == 0


def test_v10_a_stopped_shadow_is_asked_again_once_another_is_loaded(pair: Pair) -> None:
    with with_shadow(pair, pair.v2, "--inject-fault", "shadow:die:1") as server:
        until(lambda: told(server)["verdict"] == "stopped", lambda: ask(server, 2))
        admin(server, "faults", faults=[])
        assert admin(server, "load", slot="shadow", path=str(pair.v1)).status == 200
        ask(server, 5)
        found = until(lambda: (t := told(server))["compared"] and t)
        assert (found["verdict"], found["largest"]) == ("ok", 0.0)


def test_v10_after_a_shadow_has_hung_the_served_policy_still_has_its_one_replacement(pair: Pair) -> None:
    with with_shadow(pair, pair.v2, "--inject-fault", "shadow:die:1") as server:
        until(lambda: told(server)["verdict"] == "stopped", lambda: ask(server, 2))
        admin(server, "faults", faults=["prod:die:1"])
        assert server.act().status == 500
        admin(server, "faults", faults=[])
        assert version_of(server.act(seed=1), 1) == "v1"
        admin(server, "faults", faults=["prod:die:1"])
        assert server.act().status == 500
        assert server.wait() == 1


def test_v10_nobody_waits_for_the_shadow_at_the_end(pair: Pair) -> None:
    with with_shadow(pair, pair.v2, "--inject-fault", "shadow:slow:1:900") as server:
        server.at_once(numbered(16))
        assert {a.status for a in server.at_once([{"state": STATE}] * 3)} == {200}
        server.process.terminate()
        assert server.wait() == 0
        assert [line for line in server.log if "draining" in line] == [], "nobody is waited for"


def test_v10_a_shadow_that_needs_what_is_not_sent_is_dropped(pair: Pair, tmp_path: Path) -> None:
    from robots.tiny import write_export

    sees = write_export(tmp_path / "sees", change=lambda c: c.update(embodiment=c["embodiment"]))
    with with_shadow(pair, sees) as server:
        ask(server, 5)
        until(lambda: told(server)["dropped"] == 5)
        line = server.wait_log("did not answer")
        assert "image" in line or "instruction" in line


def test_v10_without_a_shadow_there_is_no_such_page(tiny: Path) -> None:
    with Server(tiny) as server:
        answer = server.get("/diagnostics/shadow")
        assert (answer.status, answer.code) == (404, "not_found")
        assert "--shadow-policy" in answer.json["message"]
        assert admin(server, "reset", slot="shadow").status == 404
