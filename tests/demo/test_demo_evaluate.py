"""`python -m demo.evaluate`: every situation is played once, in all environments; a server's error is no failure."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from demo.evaluate import Result, Score, evaluate, main
from demo.tasks import INSTRUCTIONS
from serving.exports import write_tiny
from serving.harness import Server
from serving.place import Place

# The stock client was written for an earlier version of websockets.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")


@pytest.mark.parametrize(
    ("processes", "more"),
    [(1, ("--one-message",)), *(pytest.param(processes, (), marks=pytest.mark.long) for processes in (1, 2))],
)
def test_an_evaluation_plays_every_situation_once(
    processes: int, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with Server("demo") as server:
        options = ["--environments", "2", "--processes", str(processes), "--episodes", "1", "--json", *more]
        assert main([f"ws://127.0.0.1:{server.port}", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert Counter(one["task"] for one in found["scores"]) == Counter(list(INSTRUCTIONS))
        assert sum(one["success"] for one in found["scores"]) >= 5
        assert found["rate"] > 0.0
        assert 0.0 < found["cores"] < 2.0 * processes
        calls = sum(one["calls"] for one in found["scores"])
        server.reach(lambda m: m("reflex_act_latency_seconds_count") == calls)


@pytest.mark.parametrize("one_message", [False, True])
def test_an_error_of_the_server_ends_an_evaluation(one_message: bool, tmp_path: Path) -> None:
    with Server(write_tiny(tmp_path)) as server, pytest.raises(RuntimeError, match="state"):
        evaluate(f"ws://127.0.0.1:{server.port}", 2, 1, one_message=one_message)


def test_a_result_says_the_interval_of_every_task() -> None:
    scores = [Score(task, i > 0, 10, 0.2) for task in INSTRUCTIONS for i in range(4)]
    lines = str(Result(scores, 2.0, 0.5)).splitlines()
    assert lines[2] == "| button-press-topdown-v3 | 3/4 | 30.1–95.4 % |"
    assert lines[-3] == "| all | 18/24 | 55.1–88.0 % |"
    assert lines[-1] == (
        "120 episodes a minute, 10.0 calls each, 20.0 ms until an answer; the environments used 0.50 cores"
    )


def test_too_few_episodes_for_a_rate_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ws://127.0.0.1:1", "--environments", "3", "--episodes", "1"]) == 2
    assert "environments=3: needs one for each of 1 processes, and three episodes or more" in capsys.readouterr().err


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_server_that_is_not_there_is_one_line(processes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Place() as away:
        url = f"ws://127.0.0.1:{away.port}"
        assert main([url, "--environments", "2", "--processes", processes, "--episodes", "2"]) == 2
    assert capsys.readouterr().err == f"evaluate: {url}: Connection refused; start a server there\n"
