"""Two versions behind one door: who may be started, which one answers, and what each has of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

import reflex_runtime.robots.sources.export_directory as export_module
from forked import reflex
from reflex_runtime.cli import main
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.robots import load_policy
from reflex_runtime.robots.sources import load as memory
from reflex_runtime.robots.versions.router import bucket
from reflex_runtime.web import supervisor
from robots.tiny import write_export
from robots.wires.callers import CALLERS
from serving.exports import write_tiny
from serving.harness import STATE, Server
from serving.pair import WEIGHTS_OF, Pair, admin, episodes, rollout, two, version_of
from serving.requests import busy, grey, numbered, queued

# -- V1, V8: what is refused -------------------------------------------------------------------------------------------


class Refusals:
    """Calls the command in this process, where a port that is opened fails the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        for name in [n for n in os.environ if n.startswith("REFLEX_")]:
            monkeypatch.delenv(name)

        def bind(host: str, port: int, uds: str = "") -> Any:
            raise AssertionError("the port was opened")

        monkeypatch.setattr(supervisor, "bind", bind)
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> str:
        """The one line on stderr."""
        assert main(["serve", "--no-supervise", *map(str, arguments)]) == 2
        told = self._capsys.readouterr()
        lines = told.err.splitlines()
        assert len(lines) == 1, lines
        assert told.out == ""
        return lines[0]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusals:
    return Refusals(monkeypatch, capsys)


def test_v1_two_policies_come_together_and_the_positional_agrees(refused: Refusals, pair: Pair, tmp_path: Path) -> None:
    a, b = ("--policy-a", pair.v1), ("--policy-b", pair.v2)
    assert "--policy-a needs --policy-b" in refused(*a)
    assert "--policy-b needs --policy-a" in refused(pair.v2, *b)
    assert "SOURCE is missing" in refused()
    assert f"SOURCE={pair.v3}: must be that of --policy-a" in refused(pair.v3, *a, *b, "--no-rtc")
    assert f"--policy-a={tmp_path / 'no'}: no such directory" in refused(
        "--policy-a", tmp_path / "no", *b, "--no-rtc"
    )
    assert f"--policy-b={tmp_path / 'no'}: no such directory" in refused(*a, "--policy-b", tmp_path / "no", "--no-rtc")
    assert "--shadow-policy: not with --policy-b" in refused(*a, *b, "--no-rtc", "--shadow-policy", pair.v3)
    assert "--shadow-policy" in refused(pair.v1, "--shadow-policy", tmp_path / "no")


def test_v1_carried_over_chunks_have_to_be_decided_about(refused: Refusals, pair: Pair, tmp_path: Path) -> None:
    both = ("--policy-a", pair.v1, "--policy-b", pair.v2)
    assert "need --no-rtc, or --rtc with --rtc-per-episode" in refused(*both)
    assert "needs --rtc-per-episode" in refused(*both, "--rtc")
    assert "--rtc-per-episode needs --rtc" in refused(*both, "--no-rtc", "--rtc-per-episode")
    assert "monolithic" in refused(*both, "--rtc", "--rtc-per-episode")
    decomposed = [write_export(tmp_path / name, "decomposed") for name in ("x", "y")]
    both = ("--policy-a", decomposed[0], "--policy-b", decomposed[1])
    with pytest.raises(AssertionError, match="the port was opened"):  # as far as it gets: nothing is wrong
        refused(*both, "--rtc", "--rtc-per-episode")


@pytest.mark.parametrize("split", ["-1", "101", "50.5", "half", ""])
def test_v1_the_split_is_a_percentage(split: str, refused: Refusals, pair: Pair) -> None:
    both = ("--policy-a", pair.v1, "--policy-b", pair.v2, "--no-rtc")
    assert "--split" in refused(*both, f"--split={split}")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--ramp", "50,20"), "--ramp='50,20'"),
        (("--ramp", "0,50"), "--ramp='0,50'"),
        (("--ramp", "5,20", "--ramp-every", "0s"), "--ramp-every='0s'"),
        (("--ramp", "5,20", "--guard", "p99=fast"), "--guard='p99=fast'"),
        (("--inject-fault", "prod:raise:1"), "slot prod is not served"),
        (("--inject-fault", "shadow:raise:1"), "slot shadow is not served"),
    ],
)
def test_v12_a_ramp_that_cannot_be_run_is_refused(
    options: tuple[str, ...], names: str, refused: Refusals, pair: Pair
) -> None:
    assert names in refused("--policy-a", pair.v1, "--policy-b", pair.v2, "--no-rtc", *options)


def test_v12_a_ramp_needs_two_policies(refused: Refusals, pair: Pair) -> None:
    assert "--ramp needs --policy-b" in refused(pair.v1, "--ramp", "5,100")


def test_v1_versions_of_other_robots_are_refused(refused: Refusals, pair: Pair, tmp_path: Path) -> None:
    other = write_export(tmp_path / "other", change=lambda c: c.update(action_dim=2))
    wide = write_tiny(tmp_path / "wide", state_dim=5)
    assert "state_dim: found 5" in refused("--policy-a", pair.v1, "--policy-b", wide, "--no-rtc")
    assert "state_dim: found 5" in refused(pair.v1, "--shadow-policy", wide)
    both = ("--policy-a", pair.v1, "--policy-b", other, "--no-rtc")
    (other / "model.onnx").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert "model.onnx: a Git LFS pointer" in refused(*both)
    (other / "model.onnx").unlink()
    assert "model.onnx" in refused(*both)
    (other / "reflex_config.json").write_text("{")
    assert "reflex_config.json" in refused(*both)


def test_v8_two_policies_that_do_not_fit_the_memory_are_refused(
    refused: Refusals, pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: 100)
    for given in (("--policy-a", pair.v1, "--policy-b", pair.v2, "--no-rtc"), (pair.v1, "--shadow-policy", pair.v2)):
        line = refused(*given)
        assert "2-policy mode requires" in line
        assert all(f"{way}" in line for way in ("smaller models", "larger machine", "single-policy mode", "GB"))
    monkeypatch.setenv("REFLEX_SKIP_2POLICY_MEMORY_CHECK", "1")
    with pytest.raises(AssertionError, match="the port was opened"):
        refused("--policy-a", pair.v1, "--policy-b", pair.v2, "--no-rtc")
    assert "REFLEX_SKIP_2POLICY_MEMORY_CHECK=1" in caplog.text
    monkeypatch.delenv("REFLEX_SKIP_2POLICY_MEMORY_CHECK")
    with pytest.raises(AssertionError, match="the port was opened"):  # one policy is never refused
        refused(pair.v1)


def test_v8_the_sizes_are_compared_before_a_byte_of_a_model_is_read(
    refused: Refusals, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: 100)
    monkeypatch.setattr(export_module, "model_hash", lambda root: pytest.fail(f"{root} was read"))
    assert "2-policy mode requires" in refused("--policy-a", pair.v1, "--policy-b", pair.v2, "--no-rtc")


def test_v8_a_real_process_refuses_by_the_memory_of_the_machine(pair: Pair, tmp_path: Path) -> None:
    """The size of an export is that of its files; a hole of a file is as good as a full one."""
    export = write_tiny(tmp_path / "huge")
    with open(export / "model.onnx.data", "wb") as file:
        file.truncate(64 << 20)
    small = "import reflex_runtime.robots.sources.load as m; m.host_memory = lambda: 180 << 20"
    options = ("--policy-a", pair.v1, "--policy-b", export, "--no-rtc", "--port", "0")
    done = reflex("serve", *options, before=small)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert f"{export}: 2-policy mode requires 0.125 GB" in line
    assert "0.123 GB" in line


# -- V1 to V5 and V9: two that are served ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def duo(pair: Pair) -> Iterator[Server]:
    """Split 51, so that bucket 50 is on a and 52 on b. No positional: it is optional."""
    options = ("--port", "0", "--policy-a", str(pair.v1), "--policy-b", str(pair.v2), "--split", "51")
    with Server("--no-rtc", *options) as server:
        yield server


@pytest.mark.parametrize(("key", "number", "slot"), [("ep_xyz", 77, "b"), ("ep_abc", 50, "a"), ("a", 50, "a")])
def test_v2_an_episode_is_where_its_bucket_says(key: str, number: int, slot: str, duo: Server) -> None:
    assert bucket(key) == number
    for seed in range(3):
        answer = duo.act(episode_id=key, seed=seed)
        assert answer.headers["x-reflex-policy-slot"] == slot
        assert version_of(answer, seed) == {"a": "v1", "b": "v2"}[slot]


def test_v2_a_restart_does_not_move_anybody(duo: Server, pair: Pair) -> None:
    ids = [f"episode {i}" for i in range(40)]
    before = [duo.act(episode_id=i).headers["x-reflex-policy-slot"] for i in ids]
    with two(pair, split=51) as again:
        assert [again.act(episode_id=i).headers["x-reflex-policy-slot"] for i in ids] == before
    assert {"a", "b"} == set(before)


def test_v3_without_an_episode_or_a_robot_a_connection_is_routed_and_one_line_says_so(pair: Pair) -> None:
    with two(pair) as server:
        made = [server.act(seed=i, request_id="req_42", episode_id="") for i in range(30)]  # on a connection each
        assert {a.headers["x-reflex-policy-slot"] for a in made} == {"a", "b"}
        for a in made:
            key = a.headers["x-reflex-routing-key"]
            assert key.startswith("127.0.0.1:")
            assert a.headers["x-reflex-policy-slot"] == ("a" if bucket(key) < 50 else "b")
            assert a.headers["x-reflex-routing-degraded"] == "true"
        assert server.stop() == 0
        lines = [line for line in server.log if "policy_router.degraded_mode" in line]
        assert len(lines) == 1
        assert "policy_router.degraded_mode request_id=req_42" in lines[0]
        assert "episode_id" in lines[0]


def test_v3_a_robot_without_an_episode_keeps_its_version_on_any_connection(pair: Pair) -> None:
    with two(pair) as server:
        names = [f"arm-{i}" for i in range(12)]
        before = [server.act(robot_id=name).headers for name in names]
        admin(server, "split", split=0)
        for name, first in zip(names, before, strict=True):
            again = server.act(robot_id=name).headers
            assert again["x-reflex-policy-slot"] == first["x-reflex-policy-slot"] == ("a" if bucket(name) < 50 else "b")
            assert again["x-reflex-routing-key"] == name
            assert "x-reflex-routing-degraded" not in again
        assert server.act(robot_id="new").headers["x-reflex-policy-slot"] == "b"


def test_v3_on_every_wire_a_client_without_ids_keeps_its_version(pair: Pair, tmp_path: Path) -> None:
    listening = [word for caller in CALLERS.values() for word in caller.options]
    one_step = {"vla-eval": {"execute": 1}}
    versions = Pair(*(write_tiny(tmp_path / v, weights=WEIGHTS_OF[v], wires=one_step) for v in ("v1", "v2", "v3")))
    journal = tmp_path / "recordings"
    with two(versions, "--record", str(journal), *listening) as server:
        for kind in CALLERS.values():
            caller = kind(server)
            for split in (50, 0, 100):
                admin(server, "split", split=split)
                for _ in range(2):
                    caller.ask([0.1, 0.2])
            caller.leave()
        server.stop()
    (file,) = journal.iterdir()
    slots = [line.slot for line in read_journal(file).requests]
    for i, name in enumerate(CALLERS):
        assert len(set(slots[6 * i : 6 * i + 6])) == 1, name
    assert len(slots) == 6 * len(CALLERS)


@pytest.mark.parametrize("key", ["épisode-7", "回", "a b", " padded ", "tab%09", "x/y?z#", "\u2028", "é" * 128])
def test_v4_any_id_comes_back_in_a_header(key: str, duo: Server) -> None:
    answer = duo.act(episode_id=key, seed=3)
    assert answer.status == 200
    told = answer.headers["x-reflex-routing-key"]
    assert told.isascii()
    assert told == key or unquote(told) == key
    assert "x-reflex-routing-degraded" not in answer.headers
    assert answer.headers["x-reflex-policy-slot"] == ("a" if bucket(key) < 51 else "b")


def test_v4_headers_name_the_version_and_stand_on_errors_too(duo: Server) -> None:
    for slot, name in (("a", "v1"), ("b", "v2")):
        (episode,) = episodes(slot, 1, 51)
        answer = duo.act(episode_id=episode)
        assert answer.headers["x-reflex-model-version"] == f"{name}@{answer.json['model_hash']}"
        wrong = duo.post({"state": [1.0], "episode_id": episode})
        assert wrong.status == 422
        assert wrong.headers["x-reflex-policy-slot"] == slot
        assert wrong.headers["x-reflex-model-version"] == answer.headers["x-reflex-model-version"]
        assert wrong.headers["x-reflex-routing-key"] == episode
    assert "x-reflex-policy-slot" not in duo.post(b"{").headers  # nobody knows whose it was
    hashes = {duo.act(episode_id=episodes(s, 1, 51)[0]).json["model_hash"] for s in "ab"}
    assert len(hashes) == 2


def test_v4_with_one_policy_there_are_no_such_headers(tiny: Path) -> None:
    with Server(tiny) as server:
        assert not [name for name in server.act(episode_id="e").headers if "policy" in name or "routing" in name]


def test_v5_each_slot_answers_as_its_export_does_by_itself(duo: Server, pair: Pair) -> None:
    for slot, export in (("a", pair.v1), ("b", pair.v2)):
        policy = load_policy(export, slot)
        for seed in (1, 2**63):
            answer = duo.act(episode_id=episodes(slot, 1, 51)[0], seed=seed)
            seen = policy.prepare(state=STATE, request_id="r", seed=seed)
            rows = {"pose": seen.row("state")[None], "x": policy._noise(seen)[None]}
            alone = policy.model._session.run(rows, {})["chunk"][0]  # the graph itself, on no server
            assert np.array_equal(np.float32(answer.json["actions"]), alone)


def test_v5_and_v9_requests_batches_and_costs_of_a_slot_are_its_own(pair: Pair) -> None:
    with two(pair) as server:
        costs = server.get("/diagnostics/cost-model").json["slots"]
        assert set(costs) == {"a", "b"}
        for slot, other in (("a", "b"), ("b", "a")):
            before = server.metrics()
            rows = server.get("/diagnostics/cost-model").json["slots"]
            for i, episode in enumerate(episodes(slot, 5)):
                server.act(episode_id=episode, seed=i)
            after = server.reach(lambda m: m("reflex_in_flight_requests") == 0)

            def moved(name: str, of: str) -> float:
                return after(name, policy_slot=of) - before(name, policy_slot=of)  # noqa: B023

            for name in (
                "reflex_act_latency_seconds_count", "reflex_denoise_steps_total", "reflex_requests_total",
                "reflex_batch_flush_total", "reflex_batch_size_per_flush_count", "reflex_queue_wait_seconds_count",
            ):
                assert (moved(name, slot), moved(name, other)) == (5, 0), name
            now = server.get("/diagnostics/cost-model").json["slots"]
            assert now[slot] != rows[slot]
            assert now[other] == rows[other]


def test_v9_in_flight_and_queue_depth_are_told_by_slot(pair: Pair) -> None:
    with two(pair, held=True) as server:
        a, b = episodes("a", 1)[0], episodes("b", 3)
        with busy(server, episode_id=a), server.burst([{"state": STATE, "episode_id": e} for e in b]) as burst:
            burst.send()
            found = server.reach(lambda m: m("reflex_policy_runtime_queue_depth", policy_slot="b") == 3)
            assert [found("reflex_in_flight_requests", policy_slot=slot) for slot in "ab"] == [1, 3]
            assert found("reflex_policy_runtime_queue_depth", policy_slot="a") == 0
            server.release()
            assert {x.status for x in burst.answers()} == {200}


def test_v5_and_v9_episode_caches_are_apart(tmp_path: Path) -> None:
    one = write_export(tmp_path / "one", "decomposed")
    other = write_export(tmp_path / "other", "decomposed", lambda c: c.update(num_denoising_steps=3))
    asked = {"image": grey(), "instruction": "open the door", "state": [0.0, 0.0], "seed": 1}
    both = ("--policy-a", str(one), "--policy-b", str(other), "--no-rtc", "--split", "50")
    with Server(one, *both) as server:
        a, b = episodes("a", 1)[0], episodes("b", 1)[0]
        seen = [(server.post(asked | {"episode_id": e}).json) for e in (a, a, b, b, b)]
        assert [s["cache"] for s in seen] == ["miss", "hit", "miss", "hit", "hit"]
        assert [s["denoising_steps"] for s in seen] == [5, 5, 3, 3, 3]
        assert seen[0]["actions"] != seen[2]["actions"]
        metrics = server.metrics()
        for slot, hits, steps in (("a", 1, 10), ("b", 2, 9)):
            assert metrics("reflex_cache_hit_total", policy_slot=slot) == hits
            assert metrics("reflex_cache_miss_total", policy_slot=slot) == 1
            assert metrics("reflex_denoise_steps_total", policy_slot=slot) == steps


def test_v1_at_split_100_b_is_loaded_warm_and_idle(pair: Pair) -> None:
    with two(pair, split=100) as server:
        assert set(server.get("/config").json["slots"]) == {"a", "b"}
        assert server.get("/diagnostics/cost-model").json["slots"]["b"]  # learned at warm-up
        for i, episode in enumerate(episodes("b", 20)):
            assert version_of(server.act(episode_id=episode, seed=i), i) == "v1"
        metrics = server.metrics()
        assert metrics("reflex_requests_total", policy_slot="b") == 0
        assert metrics("reflex_batch_flush_total", policy_slot="b") == 0
        assert admin(server, "split", split=0).status == 200
        assert version_of(server.act(episode_id="new", seed=1), 1) == "v2"


# -- V11: the split changes live ---------------------------------------------------------------------------------------


def test_v11_episodes_that_have_started_keep_their_slot(pair: Pair) -> None:
    with two(pair) as server:
        ids = [f"e{i}" for i in range(40)]
        before = {i: server.act(episode_id=i).headers["x-reflex-policy-slot"] for i in ids}
        for split in (0, 100, 20):
            assert admin(server, "split", split=split).json == {"split": split}
            after = {i: server.act(episode_id=i) for i in ids}
            assert {i: a.headers["x-reflex-policy-slot"] for i, a in after.items()} == before
            assert not any(a.json["policy_changed"] for a in after.values())
            new = [f"new at {split}: {i}" for i in range(30)]
            for i in new:
                slot = server.act(episode_id=i).headers["x-reflex-policy-slot"]
                assert slot == ("a" if bucket(i) < split else "b")
        told = rollout(server)
        assert told["split"] == 20
        assert [c["numbers"]["split"] for c in told["changes"] if c["kind"] == "split"] == [0, 100, 20]


def test_v11_rollback_takes_running_episodes_along_and_tells_each_once(pair: Pair) -> None:
    with two(pair) as server:
        a, b = episodes("a", 5), episodes("b", 5)
        for episode in a + b:
            server.act(episode_id=episode)
        answer = admin(server, "rollback")
        assert answer.json == {"split": 100, "episodes_moved": 5}
        for i, episode in enumerate(a + b):
            told = [server.act(episode_id=episode, seed=i) for _ in range(3)]
            assert {version_of(t, i) for t in told} == {"v1"}
            assert {t.headers["x-reflex-policy-slot"] for t in told} == {"a"}
            assert [t.json["policy_changed"] for t in told] == [episode in b, False, False]
        assert "x-reflex-policy-changed" not in told[0].headers
        assert admin(server, "rollback").json["episodes_moved"] == 0
        assert server.act(episode_id=episodes("b", 9)[-1]).headers["x-reflex-policy-slot"] == "a"


def test_v11_rollback_drops_what_chunks_were_to_continue(tmp_path: Path) -> None:
    one, other = (write_export(tmp_path / name, "decomposed") for name in ("one", "other"))
    asked = {"image": grey(), "instruction": "open the door", "state": [0.0, 0.0], "executed": 1}
    options = ("--policy-a", str(one), "--policy-b", str(other), "--rtc", "--rtc-per-episode")
    with Server(one, *options) as server:
        a, b = episodes("a", 1)[0], episodes("b", 1)[0]

        def carried() -> dict[str, int]:
            return {slot: told["rtc"]["episodes"] for slot, told in server.get("/config").json["slots"].items()}

        for episode in (a, b):
            first, second = (server.post(asked | {"episode_id": episode}).json for _ in range(2))
            assert (first["rtc"], second["rtc"]["executed"]) == (None, 1)
        assert carried() == {"a": 1, "b": 1}
        assert admin(server, "rollback").json["episodes_moved"] == 1
        assert carried() == {"a": 1, "b": 0}
        moved, after = (server.post(asked | {"episode_id": b}).json for _ in range(2))
        assert (moved["policy_changed"], moved["rtc"]) == (True, None)
        assert (after["policy_changed"], after["rtc"]["executed"]) == (False, 1)
        assert server.post(asked | {"episode_id": a}).json["rtc"]["executed"] == 1  # who stayed goes on


def test_v11_what_an_error_could_not_tell_the_next_answer_does(pair: Pair) -> None:
    with two(pair) as server:
        (episode,) = episodes("b", 1)
        server.act(episode_id=episode)
        admin(server, "rollback")
        assert server.post({"state": [1.0], "episode_id": episode}).status == 422
        assert server.act(episode_id=episode).json["policy_changed"] is True
        assert server.act(episode_id=episode).json["policy_changed"] is False


def test_v11_rollback_acts_while_both_are_busy(pair: Pair) -> None:
    with two(pair, held=True) as server:
        (episode,) = episodes("b", 1)
        first, second = episodes("a", 2)
        bodies = [{"state": STATE, "episode_id": e} for e in (second, episode)]
        with busy(server, episode_id=first), server.burst(bodies) as burst:
            burst.send()
            server.reach(queued(2))
            assert admin(server, "rollback").status == 200  # while the device is held
            server.release()
            assert {x.status for x in burst.answers()} == {200}  # what was asked before ends where it was
        assert server.act(episode_id=episode).headers["x-reflex-policy-slot"] == "a"


def test_two_policies_share_batches_never(pair: Pair) -> None:
    with two(pair, "--inject-latency-ms", "50") as server:
        keys = episodes("a", 20) + episodes("b", 20)
        bodies = [r | {"episode_id": e} for r, e in zip(numbered(41)[1:], keys, strict=True)]
        answers = server.at_once(bodies)
        for i, (answer, episode) in enumerate(zip(answers, keys, strict=True), 1):
            assert version_of(answer, i, [0.1 * i, -0.1 * i]) == ("v1" if episode in keys[:20] else "v2")
        batches = {(a.json["batch"]["id"], a.headers["x-reflex-policy-slot"]) for a in answers}
        assert len(batches) == len({i for i, _ in batches})
