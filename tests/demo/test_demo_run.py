"""The fleet: processes against a real server, added up, and never left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from demo_support import BundledPolicy, Stub, error, seen_in

import demo
from demo.robot import Event
from demo.run import Percentiles, planned, run_demo
from reflex_runtime.core.errors import ConfigError

EXAMPLES = Path(demo.__file__).parents[1]
TASKS = ("drawer-close-v3", "drawer-open-v3")


def test_a_fleet_is_served_and_added_up(stub: Stub, v2: BundledPolicy) -> None:
    opened: list[str] = []

    @contextmanager
    def server() -> Iterator[str]:
        opened.append("up")
        yield stub.url
        opened.append("down")

    stub.answer = lambda request: (200, {}, {"actions": v2(seen_in(request)).tolist(), "batch": {"size": 2}})
    events: list[Event] = []
    result = run_demo(server, robots=3, episodes=1, tasks=TASKS, run="run7", on_progress=events.append)
    assert opened == ["up", "down"]
    assert result.failures == ()
    assert [r.task for r in result.robots] == [TASKS[0], TASKS[1], TASKS[0]]
    assert result.by_task[TASKS[0]] == (2, 2)
    assert result.by_task[TASKS[1]][1] == 1
    assert result.calls == len(stub.requests) == sum(e.calls for e in result.episodes)
    assert (result.refused, result.failed, result.mean_batch_size) == (0, 0, 2.0)
    assert result.latency_ms is not None
    assert 0 < result.latency_ms.p50 <= result.latency_ms.p99 <= result.latency_ms.max
    assert [e["event"] for e in events].count("done") == 3
    names = {r["episode_id"] for r in stub.requests}
    assert names == {"r0:run7:drawer-close-v3/7/0", "r1:run7:drawer-open-v3/7/0", "r2:run7:drawer-close-v3/7/1"}
    assert names == set(planned("run7", 3, 1, TASKS))
    assert {path.removeprefix("/episodes/").removesuffix("/outcome") for path, _ in stub.outcomes} == names
    assert sum(told["success"] for _, told in stub.outcomes) == sum(e.success for e in result.episodes)


@pytest.mark.long
def test_every_run_names_its_episodes_anew(stub: Stub) -> None:
    for _ in range(2):
        run_demo(stub.url, robots=1, episodes=2, tasks=TASKS, max_steps=1)
    assert len({r["episode_id"] for r in stub.requests}) == 4


def test_a_failing_server_is_told_not_hidden(stub: Stub) -> None:
    stub.answer = lambda request: error("processor_failed", 500)
    result = run_demo(stub.url, robots=1, episodes=1, tasks=TASKS)
    assert result.by_task == {TASKS[0]: (0, 1)}
    assert result.latency_ms is None
    (failure,) = result.failures
    assert failure.startswith("r0 (drawer-close-v3) ended with code 1: processor_failed (500)")


def test_robots_over_the_time_limit_are_late_and_have_not_failed(stub: Stub) -> None:
    result = run_demo(stub.url, robots=1, episodes=1, time_limit=0.0)
    assert (result.episodes, result.late, result.failures) == ((), 1, ())


def test_a_robot_that_cannot_start_shows_its_message(stub: Stub) -> None:
    result = run_demo(stub.url, robots=1, episodes=1, execute="many")  # type: ignore[arg-type]
    assert result.robots[0].exit_code == 2
    assert "invalid int value: 'many'" in result.failures[0]


@pytest.mark.long
def test_an_exception_in_the_parent_leaves_no_child(stub: Stub) -> None:
    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    before = psutil.Process().children()  # of other tests
    with pytest.raises(KeyboardInterrupt):
        run_demo(stub.url, robots=2, on_progress=stop)
    assert set(psutil.Process().children()) <= set(before)


def test_robots_die_with_a_killed_parent(stub: Stub) -> None:
    """Not even SIGKILL leaves robots: they watch the pipe whose other end dies with the parent."""
    script = (
        "import sys; from demo.run import run_demo; "
        f"run_demo({stub.url!r}, robots=2, episodes=1000, on_progress=lambda e: print(e['event'], flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=EXAMPLES) as parent:
        assert parent.stdout is not None
        while "act" not in parent.stdout.readline():
            pass
        robots = psutil.Process(parent.pid).children()
        assert len(robots) == 2
        parent.kill()
        _, alive = psutil.wait_procs(robots, timeout=60)
    assert not alive


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"robots": 0}, "robots: 0 is"),
        ({"episodes": 0}, "episodes: 0 is"),
        ({"tasks": ("dance",)}, "tasks: dance; expected"),
        ({"tasks": ()}, "tasks: nothing"),
    ],
)
def test_wrong_options_are_named_before_anything_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_demo("http://127.0.0.1:9", **options)


def test_percentiles_are_values_that_occurred() -> None:
    assert Percentiles.of([]) is None
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 3.0, 3.0)
    assert Percentiles.of([float(v) for v in range(1, 101)]) == Percentiles(50.0, 90.0, 99.0, 100.0)
