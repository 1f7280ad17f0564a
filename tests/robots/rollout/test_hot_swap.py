"""A policy is exchanged while it serves, and nobody notices but by what it answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_runtime.demo import POLICY
from robots.bundled import V1
from robots.tiny import write_export
from serving.exports import expected, write_tiny
from serving.harness import STATE, Server
from serving.pair import SLOW_LOAD, WEIGHTS_OF, Pair, admin, episodes, in_background, rollout, two, until, version_of
from serving.requests import busy, grey, numbered

# -- V13 ---------------------------------------------------------------------------------------------------------------


async def _closed_loop(
    port: int, episode: str, seed: int, done: asyncio.Event, answered: asyncio.Event, found: list[Any]
) -> None:
    """One robot that asks as soon as it is answered, on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"state": STATE, "episode_id": episode, "seed": seed}).encode()
    head = f"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    while not done.is_set():
        writer.write(head + body)
        top = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in top[1:] if line)
        content = await reader.readexactly(int(headers["content-length"]))
        found.append((seed, int(top[0].split()[1]), headers, json.loads(content)))
        answered.set()
    writer.close()


def test_v13_no_request_of_32_callers_fails_or_is_answered_by_a_mixture(pair: Pair) -> None:
    """Five exchanges of b under load, each answered as soon as it is done."""

    async def run(server: Server) -> list[Any]:
        done, answered, found = asyncio.Event(), asyncio.Event(), []
        keys = episodes("a", 16) + episodes("b", 16)
        async with asyncio.TaskGroup() as group:
            for seed, key in enumerate(keys):
                group.create_task(_closed_loop(server.port, key, seed, done, answered, found))
            for path in (pair.v3, pair.v2, pair.v3, pair.v1, pair.v3):
                answer = await asyncio.to_thread(admin, server, "load", slot="b", path=str(path))
                assert answer.status == 200, answer.body
                seen = len(found)
                while len(found) < seen + 64:
                    answered.clear()
                    await answered.wait()
            done.set()
        return found

    with two(pair) as server:
        found = asyncio.run(run(server))
        hashes = {}
        for name, path in (("v1", pair.v1), ("v2", pair.v2), ("v3", pair.v3)):
            assert admin(server, "load", slot="b", path=str(path)).status == 200
            hashes[name] = server.act(episode_id=episodes("b", 1)[0]).json["model_hash"]
        wanted = {(s, n): expected(STATE, s, w) for s in range(32) for n, w in WEIGHTS_OF.items()}
        answered_by: dict[str, set[str]] = {"a": set(), "b": set()}
        for seed, status, headers, body in found:
            assert status == 200, body
            name = headers["x-reflex-model-version"].split("@")[0]
            assert np.allclose(body["actions"], wanted[seed, name], atol=1e-5)  # what it says it is, it is
            assert body["model_hash"] == hashes[name]
            slot = headers["x-reflex-policy-slot"]
            assert slot == ("a" if seed < 16 else "b")
            answered_by[slot].add(name)
        assert answered_by == {"a": {"v1"}, "b": {"v1", "v2", "v3"}}
        until(lambda: sum("is unloaded" in line for line in server.log) == 8)
        told = server.metrics()
        assert told("reflex_requests_total", outcome="failed") == told("reflex_requests_total", outcome="rejected") == 0


def test_v13_the_answer_says_what_is_served_now_and_so_do_the_pages(pair: Pair) -> None:
    with Server(pair.v1) as server:
        before = server.act(seed=1)
        answer = admin(server, "load", slot="prod", path=str(pair.v2))
        after = server.act(seed=1)
        assert (version_of(before, 1), version_of(after, 1)) == ("v1", "v2")
        assert answer.json == {
            "slot": "prod", "model_version": f"v2@{after.json['model_hash']}", "path": str(pair.v2),
        }
        assert server.get("/health").json["export_dir"] == str(pair.v2)
        assert server.get("/config").json["policy"]["model_id"] == "v2"
        assert rollout(server)["versions"] == {"prod": answer.json["model_version"]}
        assert "v1@" in server.wait_log("is unloaded")
        assert server.stop() == 0
        assert not any("leaving without it" in line for line in server.log)  # the thread that loaded has ended


def test_v13_what_cannot_be_served_is_a_4xx_and_nothing_has_changed(pair: Pair, tmp_path: Path) -> None:
    corrupt = write_tiny(tmp_path / "corrupt", weights=WEIGHTS_OF["v3"])
    (corrupt / "model.onnx").write_bytes((corrupt / "model.onnx").read_bytes()[:200])
    no_config = write_tiny(tmp_path / "no_config")
    (no_config / "reflex_config.json").write_text("{")
    wide = write_tiny(tmp_path / "wide", state_dim=7)
    fails = write_tiny(tmp_path / "fails", fails=True)
    unwell = write_tiny(tmp_path / "unwell", weights=WEIGHTS_OF["v3"] * np.float32("nan"))
    other_kind = write_export(tmp_path / "other_kind", "decomposed", embodiment=None)
    file = tmp_path / "file"
    file.write_text("")
    wrong = {
        str(tmp_path / "missing"): "no such directory",
        str(file): "no such directory",
        str(corrupt): "model.onnx",
        str(no_config): "reflex_config.json",
        str(wide): "state_dim: found 7",
        str(fails): "does not answer",
        str(unwell): "NaN or infinity in all its answers",
        str(other_kind): "export_kind",
        "": "path",
        "a\0b": "path",
        "x" * 5000: "no such directory",
    }
    with two(pair) as server:
        (b,) = episodes("b", 1)
        for path, names in wrong.items():
            answer = admin(server, "load", slot="b", path=path)
            known = (404, "not_found") if names == "no such directory" else (422, "invalid_request")
            assert (answer.status, answer.code) == known, (path, answer.body)
            assert answer.json["field"] == "path"
            assert names in answer.json["message"], answer.json
            assert version_of(server.act(episode_id=b, seed=2), 2) == "v2"
        for slot in ("prod", "shadow", "", "c"):
            answer = admin(server, "load", slot=slot, path=str(pair.v3))
            assert (answer.status, answer.code) == (404, "not_found")
        assert not any("is unloaded" in line or "is now" in line for line in server.log)
        assert not any("Traceback" in line for line in server.log)
        # A drill still reaches what runs, after loads that failed.
        admin(server, "faults", faults=["b:raise:1"])
        assert server.act(episode_id=b).status == 500
        admin(server, "faults", faults=[])
        assert admin(server, "load", slot="b", path=str(pair.v3)).status == 200
        assert version_of(server.act(episode_id=b, seed=2), 2) == "v3"
        admin(server, "faults", faults=["b:raise:1"])
        assert server.act(episode_id=b).status == 500


def test_v13_too_large_beside_the_others_is_refused(pair: Pair, tmp_path: Path) -> None:
    """Two are served, so three are in memory for a moment."""
    large = write_tiny(tmp_path / "large", weights=WEIGHTS_OF["v3"])
    (large / "model.onnx.data").write_bytes(bytes(1 << 20))
    before = "import reflex_runtime.robots.sources.load as m; m.host_memory = lambda: 4 << 20"
    with two(pair, before=before) as server:
        answer = admin(server, "load", slot="b", path=str(large))
        assert answer.status == 422
        assert "3-policy mode requires 0.00293 GB" in answer.json["message"]
        assert version_of(server.act(episode_id=episodes("b", 1)[0], seed=1), 1) == "v2"
    with Server(pair.v1, before=before) as server:  # with one it is two
        assert admin(server, "load", slot="prod", path=str(large)).status == 200


def test_v13_two_loads_at_once_and_one_at_the_end(pair: Pair, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with two(pair, before=SLOW_LOAD.format(gate=str(gate)), held=True) as server:
        (b,) = episodes("b", 1)
        gate.touch()

        def load(path: Path) -> Any:
            """Once it gets in: the question whether somebody else may can come before it."""
            return until(lambda: (a := admin(server, "load", slot="b", path=str(path))).status != 409 and a)

        with in_background(lambda: load(pair.v3)) as first:
            second = until(
                lambda: (a := admin(server, "load", slot="a", path=str(tmp_path))).status == 409 and a
            )
            assert "another policy is being loaded" in second.json["message"]
            assert version_of(server.act(episode_id=b, seed=1), 1) == "v2"  # meanwhile
            gate.unlink()
        assert first[0].status == 200
        assert version_of(server.act(episode_id=b, seed=1), 1) == "v3"
        gate.touch()
        with busy(server, episode_id=b, seed=1) as running:
            with in_background(lambda: load(pair.v1)) as last:
                until(lambda: admin(server, "load", slot="a", path=str(tmp_path)).status == 409)
                server.process.terminate()
            assert not running.answered  # it is told at once, and not when everything else has ended
            server.release()
            assert version_of(running.answers()[0], 1) == "v3"
        assert server.wait() == 0
        assert (last[0].status, last[0].code, last[0].json["retry_safe"]) == (503, "shutting_down", True)
        assert last[0].headers["connection"] == "close"


def test_v13_what_had_begun_ends_on_the_old_one(pair: Pair) -> None:
    with two(pair, held=True) as server:
        bodies = [r | {"state": STATE, "episode_id": e} for r, e in zip(numbered(8), episodes("b", 8), strict=True)]
        bodies[0]["request_id"] = "plug"
        with server.burst(bodies) as burst:
            burst.send()
            server.reach(lambda m: m("reflex_in_flight_requests", policy_slot="b") == 8)
            assert admin(server, "load", slot="b", path=str(pair.v3)).status == 200
            server.release()
            answers = burst.answers()
        assert [version_of(a, i) for i, a in enumerate(answers)] == ["v2"] * 8
        after = server.act(episode_id=episodes("b", 1)[0], seed=1)
        assert version_of(after, 1) == "v3"


def test_v13_residents_between_two_steps_end_on_the_old_one() -> None:
    """Split policies: some are half-way through their steps when the other comes."""
    with Server(V1, "--inject-latency-ms", "20") as server:
        asked = _demo(server)
        alone = [server.post(asked | {"seed": i}).json["actions"] for i in range(4)]
        with server.burst([asked | {"seed": i} for i in range(4)]) as burst:
            with in_background(lambda: admin(server, "load", slot="prod", path=str(POLICY))) as loaded:
                burst.send()
                answers = burst.answers()
        assert loaded[0].status == 200
        hashes = {True: server.get("/config").json["policy"]["model_hash"]}
        for i, answer in enumerate(answers):
            assert answer.status == 200
            if answer.json["model_hash"] != hashes[True]:
                assert np.allclose(answer.json["actions"], alone[i], atol=1e-4)
        new = server.post(asked | {"seed": 1})
        assert not np.allclose(new.json["actions"], alone[1], atol=1e-4)


def _demo(server: Server) -> dict[str, Any]:
    """A request the bundled policies understand."""
    export = server.get("/config").json["export"]
    words = export.get("tokenizer")
    found: dict[str, Any] = {"state": [0.0] * export["state_dim"], "image": grey()}
    if words:
        found["instruction"] = next(iter(words)) if isinstance(words, dict) else "open the door"
    return found


def test_v13_neither_carried_over_chunks_nor_prefixes_pass_to_the_new_one(tmp_path: Path) -> None:
    one, other = (write_export(tmp_path / name, "decomposed") for name in ("one", "other"))
    settings = json.loads((other / "reflex_config.json").read_text()) | {"model_id": "other"}
    (other / "reflex_config.json").write_text(json.dumps(settings))
    asked = {"image": grey(), "instruction": "open the door", "state": [0.0, 0.0], "episode_id": "e", "executed": 1}
    with Server(one, "--rtc") as server:
        first, second = (server.post(asked | {"seed": 1}).json for _ in range(2))
        assert (first["rtc"], first["cache"], second["cache"]) == (None, "miss", "hit")
        assert second["rtc"]["executed"] == 1
        assert admin(server, "load", slot="prod", path=str(other)).status == 200
        third, fourth = (server.post(asked | {"seed": 1}).json for _ in range(2))
        assert (third["rtc"], third["cache"]) == (None, "miss")
        assert fourth["rtc"] is not None
        assert third["actions"] == first["actions"]  # the same weights: nothing of an old chunk is in them


def kinds(server: Server) -> list[str]:
    """What has changed by itself or by an exchange, in order."""
    return [c["kind"] for c in rollout(server)["changes"] if c["kind"] in ("drain", "return", "guard", "load")]


# -- V12: the guard after a hot swap -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "why"), [("slow:1:200", "p50"), ("raise:1", "was drained")])
def test_v12_a_swapped_in_policy_that_breaks_its_guard_goes_by_itself(fault: str, why: str, pair: Pair) -> None:
    with Server(pair.v1, "--guard", "p50=100ms", "--probe-cooldown-s", "480") as server:
        assert admin(server, "load", slot="prod", path=str(pair.v2)).status == 200
        assert version_of(server.act(seed=1), 1) == "v2"
        assert not any("is unloaded" in line for line in server.log)  # it may be needed again
        admin(server, "faults", faults=[f"prod:{fault}"])
        # The fault is the slot's: once the guard has spoken nobody asks, or it would strike the old one as well.
        until(
            lambda: kinds(server)[-1:] == ["load"] and len(kinds(server)) > 1,
            lambda: {"drain", "guard"} & set(kinds(server)) or server.at_once(numbered(10)),
        )
        admin(server, "faults", faults=[])
        told = rollout(server)
        assert kinds(server)[-2:] == ["guard", "load"]
        assert why in next(c["why"] for c in told["changes"] if c["kind"] == "guard")
        assert server.get("/health").json["verdict"] == "ok"  # its crashes were the other one's
        assert version_of(server.act(seed=1), 1) == "v1"
        until(lambda: any("v2@" in line and "is unloaded" in line for line in server.log))


def test_v12_a_swapped_in_policy_that_keeps_its_guard_stays(pair: Pair) -> None:
    with Server(pair.v1, "--guard", "p50=10s", "--ramp-every", "1s") as server:
        assert admin(server, "load", slot="prod", path=str(pair.v2)).status == 200
        until(
            lambda: any("v1@" in line and "is unloaded" in line for line in server.log),
            lambda: server.at_once(numbered(10)),
        )
        assert version_of(server.act(seed=1), 1) == "v2"
        assert kinds(server) == ["load", "guard"]
        kept = rollout(server)["changes"][-1]
        assert kept["why"] == "prod has kept its guard"
        assert kept["numbers"]["answers"] >= 30  # fewer answers are no verdict: it was watched until then


def test_v13_a_new_policy_starts_with_a_clean_slate(pair: Pair) -> None:
    with two(pair, "--inject-fault", "b:raise:1", "--probe-cooldown-s", "480") as server:
        for episode in episodes("b", 5):
            server.act(episode_id=episode)
        assert server.get("/health").json["verdict"] == "drain-b"
        admin(server, "faults", faults=[])
        assert admin(server, "load", slot="b", path=str(pair.v3)).status == 200
        assert server.get("/health").json["verdict"] == "ok"
        assert version_of(server.act(episode_id=episodes("b", 7)[-1], seed=1), 1) == "v3"
