"""`python -m bench.load` against real servers, and what its figures are made of."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.load.__main__ import main, played
from bench.load.figures import figures, generator, ratios
from bench.load.generator import OK, BenchSide, LoadJob, LoadRound, Sample, play, streams
from bench.load.wires.caller import Frames
from bench.load.wires.connection import payload_of
from bench.load.wires.expected import Expected
from bench.load.wires.meet import CALLERS
from bench.load.wires.target import Target

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.robots.wires.openpi import decode
from serving.harness import Server

SILENT = ("json-numpy", "vla-eval", "lerobot")  # answers say nothing of batches
SENT = ("act-json", "act-msgpack", "openpi", "json-numpy", "oip", "oip-grpc", "gr00t")  # deadlines are
MAIN = [name for name, kind in CALLERS.items() if not kind.setting]  # those of the main port
QUICK = ("--rounds", "1", "--round-s", "0.3", "--warmup-s", "0")


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Exit status, and the JSON."""
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("wire", CALLERS)
def test_x5_every_wire_is_measured(server: Server, wire: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = measured(capsys, url(server), "--wire", wire, "--robots", "3", *QUICK)
    (told,) = found["servers"]
    assert (status, told["wire"], told["errors"]) == (0, wire, {})
    assert told["requests"] == told["answers"] >= 3
    assert 0.0 < told["latency_ms"]["p50"] <= told["latency_ms"]["p99"] <= told["latency_ms"]["max"]
    batches = told["batches"]
    if told["per_second"] > 0.0:
        assert 1.0 <= batches["server_mean"] <= 3.0
        assert sum(batches["causes"].values()) == batches["server_batches"]
    else:  # on a busy machine none may come within the round
        assert told["latency_ms"]["p50"] > 300.0
    if wire not in SILENT:
        assert sum(batches["sizes"].values()) == told["answers"]
        assert 1.0 <= batches["mean_of_answers"] <= 3.0


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_x5_a_second_one_is_measured_in_turns(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    words = url(server), "--beside-wire", "openpi", "--rounds", "3", "--round-s", "0.2", "--warmup-s", "0.1"
    status, found = measured(capsys, *words)
    assert (status, [told["wire"] for told in found["servers"]]) == (0, ["act-msgpack", "openpi"])
    assert [len(told["rounds"]) for told in found["servers"]] == [3, 3]
    for name, ratio in found["ratio"].items():
        assert ratio["least"] <= ratio["median"] <= ratio["most"]
        assert ratio["least"] > 0.0 or name == "per_second", "none may come within a short round"
    sides = [BenchSide(url(server), "act-json"), BenchSide(url(server), "openpi")]
    job = LoadJob(sides, "closed", robots=1, rounds=3, seconds=0.05, warmup=0.0)
    rounds = asyncio.run(play(job, lambda told: None))
    assert [r.side for r in rounds] == [0, 1, 1, 0, 0, 1]
    assert [r.at for r in rounds] == sorted(r.at for r in rounds)


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_x5_what_a_stall_keeps_back_is_not_omitted(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One robot, 20 requests a second, and a server that takes 0.1 s for each: the last waits for all before it."""
    with Server(tiny, "--inject-latency-ms", "100", "--max-queue-s", "0") as server:
        words = "--robots", "1", "--arrivals", "constant", "--rate", "20", "--rounds", "1", "--warmup-s", "0"
        status, found = measured(capsys, url(server), *words, "--round-s", "1")
        (told,) = found["servers"]
        assert (status, told["answers"], told["requests"]) == (0, 20, 20)
        assert told["latency_ms"]["max"] > 1_000.0  # 20 · 100 ms of work, of which 950 ms before the last was due
        assert told["latency_ms"]["p50"] > 2 * told["service_ms"]["p50"] > 200.0
        closed = *words[:2], "--rounds", "1", "--warmup-s", "0", "--round-s", "1"
        _, found = measured(capsys, url(server), *closed)
        told = found["servers"][0]
        assert told["answers"] < 12
        assert told["latency_ms"]["p50"] == pytest.approx(told["service_ms"]["p50"], abs=50.0)
        _, found = measured(capsys, url(server), *closed, "--rate-hz", "20")  # a control rate is kept to as well
        assert found["servers"][0]["requests"] == 20
        assert found["servers"][0]["latency_ms"]["max"] > 1_000.0


@pytest.mark.usefixtures("here")
@pytest.mark.long
def test_x5_missed_deadlines_and_errors_are_counted_by_kind(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listens = "--gr00t", "tcp://127.0.0.1:0", "--oip-grpc", "127.0.0.1:0"
    with Server(tiny, "--inject-latency-ms", "60", *listens) as server:
        _, found = measured(capsys, url(server), "--deadline-ms", "10000", *QUICK)
        assert (found["servers"][0]["missed"], found["servers"][0]["errors"]) == (0.0, {})
        for wire in SENT:  # the server, which has learned what a call takes, refuses what cannot be in time
            words = url(server), "--wire", wire, "--robots", "2", "--think-ms", "10", "--deadline-ms", "40"
            status, found = measured(capsys, *words, *QUICK)
            told = found["servers"][0]
            assert told["missed"] == 1.0
            assert told["errors"]
            assert set(told["errors"]) <= {"deadline_exceeded", "deadline_unreachable"}
            assert told["answers"] + sum(told["errors"].values()) == told["requests"]
            assert (status == 0) == (told["answers"] > 0)


@pytest.mark.long
def test_x5_a_recording_gives_the_times(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    with Server(tiny, "--trace", str(trace)) as server:
        for _ in range(5):
            server.act()
        server.stop()
    with Server(tiny) as server:
        status, found = measured(capsys, url(server), "--replay", str(trace), "--rounds", "2")
        assert (status, found["servers"][0]["requests"]) == (0, 10)
    (tmp_path / "no.jsonl").write_text("")
    assert main([url(server), "--replay", str(tmp_path / "no.jsonl")]) == 2
    assert "empty, not even a header" in capsys.readouterr().err


def test_x5_figures_and_picture_are_written(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([url(server), "--beside-wire", "json-numpy", *QUICK, "--out", str(tmp_path / "new")]) == 0
    told = capsys.readouterr()
    for row in ("answers a second", "latency p99", "since it was sent, p50", "first ÷ second", "the load generator: "):
        assert row in told.out
    found = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert found["settings"]["round_s"] == 0.3
    assert (tmp_path / "new" / "bench.png").read_bytes()[:4] == b"\x89PNG"
    picture = (tmp_path / "new" / "bench.svg").read_text()
    assert "requests in the batch" in picture
    assert "json-numpy at http" in picture
    assert "answers do not say" in picture
    assert "mathdefault" not in picture


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["x", "--wire", "opnpi"], "--wire=opnpi: must be one of "),
        (["x", "--beside-wire", "opnpi"], "--beside-wire=opnpi: must be one of "),
        (["http://x", "--rounds", "1", "http://y", "http://z"], "http://z: at most two servers"),
        (["ws://x"], "--wire=act-msgpack: not at ws://; give the URL as http://, https://"),
        (["x", "ftp://y"], "URL='ftp://y': must be like"),
        (["x", "--robots", "0"], "--robots=0: must be in [1, 2000]"),
        (["x", "--rounds", "101"], "--rounds=101: must be in [1, 100]"),
        (["x", "--round-s", "0"], "--round-s=0: must be in [0.1, 600] s"),
        (["x", "--arrivals", "poisson"], "--arrivals=poisson needs --rate"),
        (["x", "--rate", "5"], "--rate needs --arrivals=constant or --arrivals=poisson or --arrivals=bursts"),
        (["x", "--arrivals", "bursts", "--rate", "9000", "--round-s", "100"], "over 2,000,000 requests in all"),
        (["x", "--think-ms", "5", "--rate-hz", "5"], "--think-ms has no effect with --rate-hz"),
        (["x", "--replay", "f", "--round-s", "5"], "--round-s has no effect with --replay"),
        (["x", "--replay", "no.jsonl"], "no.jsonl: No such file"),
        (["x", "--observation", "no.npz"], "--observation=no.npz: cannot be read"),
        (["x", "--out", "/proc/no"], "--out=/proc/no: cannot make this directory"),
        (["127.0.0.1:1"], "127.0.0.1:1: nothing listens there"),
    ],
)
def test_a_wrong_command_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_a_key_is_sent_on_every_wire(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tiny, "--api-key", "s3cret") as server:
        for wire in MAIN:
            assert measured(capsys, url(server), "--wire", wire, "--api-key", "s3cret", *QUICK)[0] == 0
        assert main([url(server)]) == 2
        assert "unauthorized (401): " in (err := capsys.readouterr().err)
        assert "; give the server's key: --api-key KEY" in err


# -- what it is made of ------------------------------------------------------------------------------------------------


def round_of(*samples: Sample, side: int = 0, lags: tuple[float, ...] = (0.0,), cpu: float = 0.1) -> LoadRound:
    answered = sum(s.kind == OK for s in samples)
    return LoadRound(side, 0.0, 2.0, list(samples), answered, {}, list(lags), cpu)


def test_latency_counts_from_when_a_request_was_due() -> None:
    samples = [Sample(due=1.0, sent=3.0, done=4.0, kind=OK, batch=2), Sample(1.0, 1.0, 2.0, OK, 1)]
    samples += [Sample(1.0, 1.0, 9.0, "queue_full", 0)]
    found = figures([round_of(*samples)], deadline=2.5)
    assert found.latency_ms is not None
    assert found.service_ms is not None
    assert (found.latency_ms["p50"], found.latency_ms["max"], found.service_ms["max"]) == (1000.0, 3000.0, 1000.0)
    assert (found.requests, found.answers, found.errors, found.missed) == (3, 2, {"queue_full": 1}, 2 / 3)
    assert found.per_second == 1.0
    assert found.batches == {"mean_of_answers": 2 / 1.5, "sizes": {1: 1, 2: 1}}


def test_a_ratio_is_that_of_each_pair_of_rounds() -> None:
    def side(*latencies: float) -> Any:
        return figures([round_of(Sample(0.0, 0.0, latency, OK, 0)) for latency in latencies], 0.0)

    assert ratios(side(2.0, 3.0, 9.0), side(1.0, 1.0, 3.0))["p50_ms"] == {"median": 3.0, "least": 2.0, "most": 3.0}
    nothing = figures([round_of()] * 3, 0.0)
    assert nothing.latency_ms is None
    assert "p50_ms" not in ratios(nothing, side(1.0, 1.0, 1.0))


@pytest.mark.parametrize(("lag", "cpu", "limits"), [(0.001, 0.5, False), (0.02, 0.5, True), (0.001, 0.95, True)])
def test_a_generator_that_lags_is_told(lag: float, cpu: float, limits: bool) -> None:
    found = generator([round_of(lags=(lag,) * 10, cpu=cpu)])
    assert (found["limits"], found["lag_ms"]["p99"]) == (limits, 1e3 * lag)


def test_the_generators_own_lag_is_measured(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = CALLERS["act-msgpack"]
    ask = caller.ask

    async def slow(self: Any, frame: bytes) -> Any:
        end = time.perf_counter() + 0.03
        while time.perf_counter() < end:  # the loop does nothing else meanwhile
            pass
        return await ask(self, frame)

    monkeypatch.setattr(caller, "ask", slow)
    with Server(tiny) as server:
        job = LoadJob([BenchSide(url(server), "act-msgpack")], "closed", robots=4, rounds=1, seconds=0.5, warmup=0.0)
        found = generator(asyncio.run(play(job, lambda told: None)))
    assert found["limits"]
    assert found["lag_ms"]["p99"] > 15.0


def unmasked(frame: bytes) -> bytes:
    """The payload of a client's frame, whose mask of zeros stands before it."""
    return payload_of(frame)[4:]


def test_no_two_requests_have_the_same_picture() -> None:
    observed = Expected("here", {"image": (8, 8), "wrist": (8, 8)}, {"state": 2}, "prompt").observation()
    caller = CALLERS["openpi"](Target.of("ws://127.0.0.1:1"))
    frames = Frames(caller.frame(observed, 0.0))
    first, second = decode(unmasked(frames.next())), decode(unmasked(frames.next()))
    assert (first["image"] != second["image"]).any()
    assert (first["image"][1:] == observed["image"][1:]).all()
    assert (first["wrist"] == observed["wrist"]).all()


def test_the_same_seed_gives_the_same_times() -> None:
    def times(loop: Any, number: int = 0, robots: int = 2, **more: Any) -> list[list[float]]:
        job = LoadJob([], loop, robots=robots, rounds=1, seconds=1.0, warmup=0.0, rate=100.0, **more)
        found = streams(job, number)
        assert len(found) == robots
        return [[arrival.at for _ in range(3) if (arrival := stream.next(0.0)) is not None] for stream in found]

    for loop in ("paced", "poisson", "bursts"):
        assert times(loop) == times(loop) != times(loop, number=1)
    assert np.allclose(times("constant"), [[0.0, 0.01, 0.02], [0.03, 0.04, 0.05]])  # robots share the times
    assert np.allclose(np.diff(times("paced")), 0.01)  # each has its own
    assert times("replay", arrivals=[0.0, 0.5], robots=1) == [[0.0, 0.5]]


def test_x5_a_load_generator_that_ends_in_the_middle_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = tmp_path / "generator"
    generator.write_text("#!/bin/sh\ncat > /dev/null\nprintf '{\"rounds\": [0.'\nexit 3\n")
    generator.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(generator))
    side = BenchSide("http://127.0.0.1:1", "act-json")
    with pytest.raises(ReflexError, match=r"ended in the middle of its result \(status 3\); run it again"):
        played(LoadJob([side], "closed", robots=1, rounds=1, seconds=0.1, warmup=0.0))
