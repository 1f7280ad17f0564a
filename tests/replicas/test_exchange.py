"""Hot swap with replicas, in real processes: all of them switch or none does, also those that are started later."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reflex_runtime.placing import identity_of
from reflex_runtime.rendezvous import owner
from serving.harness import STATE, Server
from serving.pair import Pair, admin, in_background, rollout, until, version_of

NAMES = ("replica-0", "replica-1")
ROBOTS = {
    name: next(f"r{i}" for i in range(100) if owner(identity_of(f"r{i}", None), NAMES) == name) for name in NAMES
}


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[Server]:
    options = ("--replicas", "2", "--guard", "p50=10s", "--ramp-every", "1s", "--probe-cooldown-s", "480")
    with Server(pair.v1, *options) as running:
        yield running


@pytest.fixture(autouse=True)
def whole(server: Server) -> None:
    """Both replicas are ready."""
    until(lambda: states(server) == ["ready", "ready"])


def told(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/health").json["replicas"]
    return found


def states(server: Server) -> list[str]:
    return [replica["state"] for replica in told(server)]


def versions(server: Server) -> dict[str, str]:
    """What answers in each replica, told by its actions."""
    found = {}
    for name, robot in ROBOTS.items():
        answer = server.act(robot_id=robot, seed=1)
        assert answer.headers["x-reflex-replica"] == name
        found[name] = version_of(answer, 1)
    return found


def kinds(server: Server) -> list[str]:
    """What has changed, in order."""
    return [change["kind"] for change in rollout(server)["changes"]]


def killed(server: Server, number: int) -> None:
    """Kill a replica, and wait until another process has its place."""
    before = told(server)[number]
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: (now := told(server)[number])["state"] == "ready" and now["pid"] != before["pid"])


def test_v13_x7_every_replica_switches_and_so_does_one_that_starts_later(server: Server, pair: Pair) -> None:
    answer = admin(server, "load", slot="prod", path=str(pair.v2))
    assert answer.status == 200, answer.body
    assert answer.json["path"] == str(pair.v2)
    assert versions(server) == dict.fromkeys(NAMES, "v2")
    shown = rollout(server)
    assert shown["versions"] == {"prod": answer.json["model_version"]}
    assert shown["changes"][-1]["numbers"]["version"] == answer.json["model_version"]
    killed(server, 0)
    assert versions(server) == dict.fromkeys(NAMES, "v2")


def test_v13_x7_where_one_cannot_load_none_switches(server: Server, tmp_path: Path) -> None:
    before = versions(server)
    wrong = admin(server, "load", slot="prod", path=str(tmp_path))
    assert (wrong.status, wrong.json["field"]) == (422, "path")
    assert wrong.json["message"].startswith("replica-0: ")
    assert admin(server, "load", slot="c", path=str(tmp_path)).status == 404
    reads = tmp_path / "reflex_config.json"
    os.mkfifo(reads)  # whoever loads it waits
    with in_background(lambda: admin(server, "load", slot="prod", path=str(tmp_path))) as loading:
        with reads.open("w") as goes_on:  # once one reads it
            assert admin(server, "load", slot="prod", path=str(tmp_path)).status == 409
            killed(server, 1)
            goes_on.write("{}")
        reads.unlink()
    assert loading[0].status == 409
    assert "replica-1: lost" in loading[0].json["message"]
    assert versions(server) == before


def test_v12_x7_a_guard_brings_back_the_version_before_in_every_replica(server: Server, pair: Pair) -> None:
    """Also in one that was started since, and has no earlier version. A drill reaches that one too."""
    before = versions(server)
    assert admin(server, "load", slot="prod", path=str(pair.v3)).status == 200
    assert versions(server) == dict.fromkeys(NAMES, "v3")
    seen = len(kinds(server))
    assert admin(server, "faults", faults=["prod:raise:1"]).status == 200
    killed(server, 0)
    assert server.act(robot_id=ROBOTS["replica-0"]).status == 500
    pid = told(server)[0]["pid"]
    # Nobody asks once the slot is drained, or the fault would strike the old version as well.
    until(lambda: "drain" in kinds(server)[seen:], lambda: server.act(robot_id=ROBOTS["replica-1"]))
    until(lambda: kinds(server)[-2:] == ["guard", "load"])
    until(lambda: states(server) == ["ready", "ready"] and told(server)[0]["pid"] != pid)
    assert admin(server, "faults", faults=[]).json == {"faults": []}
    assert versions(server) == before
    killed(server, 1)
    assert versions(server) == before


def test_v12_x7_a_guard_that_is_kept_lets_every_replica_unload_the_version_before(server: Server, pair: Pair) -> None:
    """It counts the answers of all replicas: none of them has the 30 that it takes."""
    began = len(server.log)
    assert admin(server, "load", slot="prod", path=str(pair.v1)).status == 200

    def unloaded() -> set[str]:
        return {name for line in server.log[began:] if "is unloaded" in line for name in NAMES if name in line}

    for robot in [*ROBOTS.values()] * 18:
        assert server.act(robot_id=robot).status == 200
    until(lambda: unloaded() == set(NAMES))
    assert kinds(server)[-2:] == ["load", "guard"]
    assert versions(server) == dict.fromkeys(NAMES, "v1")


def test_v13_x7_a_replica_that_cannot_start_with_what_it_serves_starts_with_another_version(
    server: Server, pair: Pair, tmp_path: Path
) -> None:
    """Its export is gone. Those that watch are told what to do, and loading another version is no conflict."""
    gone = tmp_path / "gone"
    shutil.copytree(pair.v2, gone)
    assert admin(server, "load", slot="prod", path=str(gone)).status == 200
    shutil.rmtree(gone)
    os.kill(told(server)[1]["pid"], signal.SIGKILL)
    until(lambda: "remedy" in told(server)[1])
    shown = told(server)[1]
    assert str(gone) in shown["last_error"]
    assert "POST /admin/load" in shown["remedy"]
    assert admin(server, "load", slot="prod", path=str(pair.v3)).status == 200
    until(lambda: states(server) == ["ready", "ready"])
    assert "remedy" not in told(server)[1]
    assert versions(server) == dict.fromkeys(NAMES, "v3")
    assert admin(server, "load", slot="prod", path=str(pair.v1)).status == 200


def test_x7_a_name_that_is_no_unicode_is_refused(server: Server) -> None:
    """Whichever process reads it first."""
    for field in ("robot_id", "episode_id"):
        answer = server.act(**{field: "\ud800"})
        assert (answer.status, answer.json["field"]) == (422, field)


def test_v13_x7_a_load_waits_for_all_replicas(server: Server, pair: Pair) -> None:
    """One that is starting has not loaded anything yet: the operator is told which one it is."""

    def killed() -> None:
        now = told(server)[1]
        if now["state"] == "ready":
            with contextlib.suppress(ProcessLookupError):
                os.kill(now["pid"], signal.SIGKILL)

    def refused() -> bool:
        answer = admin(server, "load", slot="prod", path=str(pair.v2))
        return answer.status == 409 and "replica-1: not ready" in answer.json["message"]

    until(refused, killed)
    assert server.act(robot_id=ROBOTS["replica-0"], state=STATE).status == 200
