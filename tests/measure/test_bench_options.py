"""The effect of each option of `python -m bench.load` that no other test of the command shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.load.__main__ import main
from bench.load.generator import LoadJob, streams

from serving.harness import Server

ONE = ("--robots", "1", "--rounds", "1", "--warmup-s", "0")


def measured(server: Server, capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    """The figures of the one server."""
    assert main([f"http://127.0.0.1:{server.port}", *words, "--json"]) == status
    (told,) = json.loads(capsys.readouterr().out)["servers"]
    return told


@pytest.mark.long
def test_x5_robots_are_how_many_ask_at_once(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tiny, "--inject-latency-ms", "50") as server:
        told = measured(server, capsys, "--robots", "2", "--rounds", "1", "--round-s", "0.5")
    assert max(map(int, told["batches"]["sizes"])) <= 2


@pytest.mark.long
def test_x5_think_ms_is_the_pause_before_the_next_request(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    told = measured(server, capsys, *ONE, "--round-s", "0.5", "--think-ms", "300")
    assert 1 <= told["requests"] <= 2  # hundreds without the pause; one where the machine was busy


@pytest.mark.long
def test_x5_round_s_and_warmup_s_are_counted_and_not(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    def answered() -> float:
        return float(server.metrics()("reflex_requests_total", outcome="ok"))

    before = answered()
    told = measured(server, capsys, *ONE[:4], "--rate-hz", "20", "--round-s", "0.5", "--warmup-s", "1")
    assert told["requests"] == 10  # of 20 Hz
    assert answered() - before == pytest.approx(30.0, abs=2.0)  # 20 of the warm-up, and one that looks


@pytest.mark.long
def test_x5_timeout_s_is_how_long_an_answer_is_waited_for(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tiny, "--inject-latency-ms", "2000") as server:
        assert main([f"http://127.0.0.1:{server.port}", *ONE, "--round-s", "1", "--timeout-s", "0.2"]) != 0
    assert "0.2" in capsys.readouterr().err


def test_x5_observation_is_what_is_sent(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "wrong.npz", state=np.zeros(99))
    url = f"http://127.0.0.1:{server.port}"
    assert main([url, *ONE, "--observation", str(tmp_path / "wrong.npz")]) == 2
    assert "invalid_request" in capsys.readouterr().err


@pytest.mark.long
def test_x5_seed_decides_when_requests_come(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    def times(seed: int) -> int:
        job = LoadJob([], "poisson", robots=1, rounds=1, seconds=0.5, warmup=0.0, rate=100.0, seed=seed)
        (stream,) = streams(job, 0)
        count = 0
        while (arrival := stream.next(0.0)) is not None and arrival.at < 0.5:
            count += 1
        return count

    seed = next(seed for seed in range(1, 100) if abs(times(seed) - times(0)) > 5)
    words = "--arrivals", "poisson", "--rate", "100", "--rounds", "1", "--warmup-s", "0", "--round-s", "0.5"
    told = measured(server, capsys, *words, "--robots", "8", "--seed", str(seed))
    assert told["requests"] == times(seed)
