"""Several policies behind one port, on a real server: an arm and a hand of other sizes (docs/several-policies.md)."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from openpi_client import msgpack_numpy
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from reflex_runtime.cli import main
from reflex_runtime.client import Client
from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.robots import Policy
from reflex_runtime.robots.versions.slots import group_of
from reflex_runtime.settings import OWN_SETTINGS, ServeConfig
from reflex_runtime.settings.read import own_settings
from robots.wires.callers import VlaEval
from robots.wires.groot_clients import GrootRobot, port_of
from serving.exports import WEIGHTS, expected, write_tiny
from serving.harness import STATE, Answer, Server, reflex, refusal
from serving.pair import SLOW_LOAD, episodes, in_background, until
from serving.requests import measured

HAND = np.array([[1.0, 0.0, 0.5, -1.0], [0.0, 1.0, 0.5, 0.25], [0.5, 0.5, 0.0, 1.0]], np.float32)
TOUCH = [0.3, -0.1, 0.2]  # a state of the hand


class Robots(NamedTuple):
    """Exports of an arm (state of 2, actions of 2) in two versions, and of a hand (3, 4) in two."""

    arm: Path
    arm2: Path
    hand: Path
    hand2: Path


@pytest.fixture(scope="module")
def robots(tmp_path_factory: pytest.TempPathFactory) -> Robots:
    root = tmp_path_factory.mktemp("robots")

    def hand(name: str, weights: Any) -> Path:
        export = write_tiny(root / name, weights=weights, model_id=name, embodiment="embodiment.json")
        (export / "embodiment.json").write_text(json.dumps({"name": "hand"}))
        return export

    return Robots(
        write_tiny(root / "arm", model_id="arm-model"),
        write_tiny(root / "arm2", model_id="arm-2", weights=-WEIGHTS),
        hand("hand-model", HAND),
        hand("hand-2", -HAND),
    )


def both(robots: Robots, *options: str, **more: Any) -> Server:
    """A server of the arm and the hand, none of them the default."""
    return Server(f"--policy=arm={robots.arm}", "--policy", f"hand={robots.hand}", *options, **more)


@pytest.fixture(scope="module")
def server(robots: Robots) -> Iterator[Server]:
    with both(robots, "--gr00t", "tcp://127.0.0.1:0") as server:
        yield server


def post(server: Server, where: str, **fields: Any) -> Answer:
    return server.ask("POST", where, json.dumps(fields).encode(), {"Content-Type": "application/json"})


def arm(answer: Answer, seed: int = 1, weights: Any = WEIGHTS) -> bool:
    assert answer.status == 200, answer.body
    return np.allclose(answer.json["actions"], expected(STATE, seed, weights), atol=1e-5)


def hand(answer: Answer, seed: int = 1, weights: Any = HAND) -> bool:
    assert answer.status == 200, answer.body
    found = np.array(answer.json["actions"])
    return found.shape[1] == 4 and np.allclose(found, expected(TOUCH, seed, weights), atol=1e-5)


def ask_arm(server: Server, **fields: Any) -> Answer:
    return post(server, "/policies/arm/act", **({"state": STATE, "seed": 1} | fields))


def ask_hand(server: Server, **fields: Any) -> Answer:
    return post(server, "/policies/hand/act", **({"state": TOUCH, "seed": 1} | fields))


# -- P30: what is served -----------------------------------------------------------------------------------------------


def test_p30_a_policy_beside_source_and_source_is_the_default(robots: Robots) -> None:
    with Server(robots.arm, "--policy", f"hand={robots.hand}") as server:
        assert arm(server.act(seed=1))
        assert arm(post(server, "/policies/default/act", state=STATE, seed=1))
        assert hand(ask_hand(server))
        assert list(server.get("/health").json["policies"]) == ["default", "hand"]
        assert any(line.startswith(" policy hand ") for line in server.log)


def test_p30_what_cannot_be_served_is_one_line_before_the_port_opens(robots: Robots, tmp_path: Path) -> None:
    hand, config = f"hand={robots.hand}", tmp_path / "reflex.toml"

    def refused(*options: str, toml: str = "") -> str:
        config.write_text(toml)
        return refusal(*options, *(("--config", str(config)) if toml else ())).removeprefix("reflex serve: ")

    assert refused("--policy=hand") == "--policy=hand: must be NAME=SOURCE, such as arm=./my-export"
    assert refused(f"--policy={hand}", "--policy", hand) == f"--policy={hand}: hand is named twice"
    assert "the name must be 1 to 32 letters, digits" in refused(f"--policy=a.b={robots.hand}")
    assert "SOURCE has this name already" in refused(str(robots.arm), "--policy", f"default={robots.hand}")
    many = [f"--policy=p{i}={robots.arm}" for i in range(33)]
    assert refused(*many) == "--policy: 33 policies are named, at most 32 are served"
    assert refused(str(robots.arm), f"--policy=hand={tmp_path / 'none'}").startswith("policy hand: ")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "reflex_config.json").write_text("{")
    assert refused(str(robots.arm), f"--policy=hand={tmp_path / 'broken'}").startswith("policy hand: ")
    assert "[policies.hand] budget: no such setting" in refused(f"--policy={hand}", toml="[policies.hand]\nbudget = 1")
    found = refused(f"--policy={hand}", toml="[policies.hand]\nport = 1")
    assert found.endswith("[policies.hand] port: is a setting of the whole server; write it into [serve]")
    found = refused(f"--policy={hand}", toml="[policies.hand]\nmax_queue = 0")
    assert found.endswith("[policies.hand]: --max-queue=0: must be in [1, 100000]")
    found = refused(f"--policy={hand}", toml="[policies.hand]\nweight = 0")
    assert found.endswith("[policies.hand]: policy.weight=0.0: must be in [0.01, 100]")
    assert refused(f"--policy={hand}", toml="[policies.arm]\nweight = 2").startswith("policy arm: SOURCE is missing")
    assert "must only have tables [policies.NAME]" in refused(f"--policy={hand}", toml="policies = 1")
    found = refused(str(robots.arm), "--policy", hand, "--inject-fault", "prod:raise:1")
    assert found == "--inject-fault=prod:raise:1: must begin with NAME.SLOT; names: default, hand"


# -- P31: one policy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
def test_p31_one_policy_looks_as_it_always_did(robots: Robots, tmp_path: Path, named: bool) -> None:
    source = f"--policy=only={robots.arm}" if named else str(robots.arm)
    with Server(source, "--record", str(tmp_path)) as server:
        assert arm(server.act(seed=1))
        assert set(server.get("/health").json) == {
            "status", "state", "model_loaded", "inference_mode", "export_dir", "consecutive_crashes",
            "max_consecutive_crashes", "robot_id", "verdict", "slots", "hung_batches", "recording",
        }  # fmt: skip
        text = server.get("/metrics").body.decode()
        assert 'policy_slot="prod"' in text
        assert 'policy="' not in text
        name = "only" if named else "default"
        assert "x-reflex-policy" not in post(server, f"/policies/{name}/act", state=STATE).headers
        assert server.act(policy=name).status == 200
        assert server.stop() == 0
    (file,) = tmp_path.iterdir()
    journal = read_journal(file)
    assert (list(journal.groups), journal.slots, journal.header.policies) == (["prod"], ["prod"], None)
    assert not journal.header.served
    assert {note.fields.get("policy") for note in journal.notes} <= {None}


# -- P32: which policy is asked ----------------------------------------------------------------------------------------


def test_p32_by_path_and_by_field(server: Server) -> None:
    for answer, name in ((ask_arm(server), "arm"), (server.act(seed=1, policy="arm"), "arm")):
        assert arm(answer)
        assert answer.headers["x-reflex-policy"] == name
    assert hand(ask_hand(server))
    assert hand(ask_hand(server, policy="hand"))
    assert hand(post(server, "/act", state=TOUCH, seed=1, policy="hand"))


def test_p32_a_wrong_name_or_none_is_refused_with_the_names(server: Server) -> None:
    none = server.act()
    assert (none.status, none.json["field"]) == (422, "policy")
    assert none.json["message"] == (
        "policy: missing; served are arm, hand; name one, or begin the path with /policies/arm"
    )
    wrong = server.act(policy="hant")
    assert (wrong.status, wrong.json["field"]) == (422, "policy")
    assert wrong.json["message"] == "policy: 'hant' is not served, only arm, hand; did you mean hand?"
    other = ask_arm(server, policy="hand")
    assert (other.status, other.json["field"]) == (422, "policy")
    assert "'hand' is named, and 'arm' by the path" in other.json["message"]
    for name in ("", "\0", "ä" * 100_000, "Arm"):
        assert (server.act(policy=name).status, server.act(policy=name).json["field"]) == (422, "policy")
    for path in ("//act", "/%00/act", "/arm%2Fact%2F", "/arm/act/", "/arm//act", "/" + "x" * 3000):
        assert post(server, "/policies" + path, state=STATE).status == 404, path
    lost = post(server, "/policies/leg/act", state=STATE)
    assert (lost.status, lost.code) == (404, "not_found")
    assert lost.json["message"] == "policy 'leg' is not served, only arm, hand"
    assert server.get("/policies/arm/nothing").json["message"].startswith("no such path: /policies/arm/nothing; ")
    for path in ("/diagnostics/rollout", "/diagnostics/shadow", "/diagnostics/cost-model"):
        assert server.get(path).json["field"] == "policy"


@pytest.mark.parametrize("path", ["/policies/hand/", "/policies/hand/openpi/policy", "/?policy=hand", "/policies/hand"])
def test_p32_openpi_asks_by_path_or_query(server: Server, path: str) -> None:
    with connect(f"ws://127.0.0.1:{server.port}{path}") as socket:
        told = msgpack_numpy.unpackb(socket.recv())
        assert told["reflex"]["actions"] == [3, 4]
        pack = msgpack_numpy.Packer().pack
        socket.send(pack({"state": np.array(TOUCH), "reflex/seed": 1}))
        found = msgpack_numpy.unpackb(socket.recv())
        assert np.allclose(found["actions"], expected(TOUCH, 1, HAND), atol=1e-5)
        socket.send(pack({"state": np.array(TOUCH), "reflex/policy": "arm"}))
        assert "'arm' is named, and 'hand' by the path or the connection" in socket.recv()


@pytest.mark.parametrize("path", ["/", "/vla-eval", "/?policy=leg", "/policies/arm/?policy=hand"])
def test_p32_a_websocket_without_a_policy_or_with_a_wrong_one_is_refused(server: Server, path: str) -> None:
    with pytest.raises(InvalidStatus) as info, connect(f"ws://127.0.0.1:{server.port}{path}"):
        pass
    assert info.value.response.status_code == 422
    assert json.loads(info.value.response.body or b"")["field"] == "policy"


@pytest.mark.parametrize("path", ["/{wire}?policy=arm", "/policies/arm/{wire}"])
def test_p32_benchmarks_ask_by_path_or_query(
    server: Server, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VlaEval, "path", path.format(wire=VlaEval.wire))
    one = VlaEval(server)
    found = one.ask(STATE, seed=1)
    assert np.allclose(found, expected(STATE, 1)[: len(found)], atol=1e-5)
    one.leave()


def test_p32_oip_has_a_model_for_each_policy(server: Server) -> None:
    told = server.get("/v2/models/hand").json
    assert (told["name"], told["inputs"][0]["shape"], told["outputs"][0]["shape"]) == ("hand", [-1, 3], [-1, 3, 4])
    seen = [
        {"name": "state", "datatype": "FP32", "shape": [1, 3], "data": TOUCH},
        {"name": "seed", "datatype": "INT64", "shape": [1, 1], "data": [1]},
    ]
    below = "/policies/hand/v2/models/hand-model/infer"
    for path in ("/v2/models/hand/infer", "/v2/models/hand/versions/1/infer", below):
        answer = post(server, path, inputs=seen)
        assert answer.status == 200, answer.body
        (actions,) = answer.json["outputs"]
        assert np.allclose(np.reshape(actions["data"], (3, 4)), expected(TOUCH, 1, HAND), atol=1e-5)
        assert answer.json["model_name"] == path.split("/models/")[1].split("/")[0]
    lost = server.get("/v2/models/hand-model")
    assert (lost.status, lost.json["error"]) == (404, "model 'hand-model' is not served, only arm, hand")
    assert server.get("/v2/models/arm/ready").json == {"ready": True}


def test_p32_groot_asks_by_option(server: Server) -> None:
    with GrootRobot(port_of(server)) as robot:
        assert robot.call("ping")["status"] == "ok"
        seen = {"state": {"all": np.array([[TOUCH]])}}
        actions, _ = robot.act(seen, policy="hand", seed=1)
        assert np.allclose(actions["actions"], expected(TOUCH, 1, HAND)[None], atol=1e-5)
        assert "served are arm, hand" in robot.act(seen)["error"]
        assert "served are" in robot.call("get_modality_config")["error"]
        robot.call("reset", {"options": {"policy": "hand"}})
        actions, _ = robot.act(seen, seed=1)
        assert np.allclose(actions["actions"], expected(TOUCH, 1, HAND)[None], atol=1e-5)
        assert "action" in robot.call("get_modality_config")


def test_p32_json_numpy_asks_by_field_or_path(server: Server) -> None:
    data = base64.b64encode(np.array(TOUCH).tobytes()).decode()
    seen = {"state": {"__numpy__": data, "dtype": "<f8", "shape": [3]}, "seed": 1}
    for answer in (post(server, "/act", **seen, policy="hand"), post(server, "/policies/hand/act", **seen)):
        found = np.frombuffer(base64.b64decode(answer.json["__numpy__"]), "<f8")
        assert np.allclose(found, expected(TOUCH, 1, HAND)[0], atol=1e-5)
    assert post(server, "/act", **seen).json["field"] == "policy"


# -- P33: each answers as it does alone --------------------------------------------------------------------------------


def test_p33_each_policy_has_its_own_sizes_and_description(server: Server) -> None:
    wrong = ask_hand(server, state=STATE)
    assert (wrong.status, wrong.json["field"]) == (422, "state")
    assert ask_arm(server, state=TOUCH).status == 422
    for name, dim in (("arm", 2), ("hand", 3)):
        schema = server.get(f"/policies/{name}/openapi.json").json["paths"][f"/policies/{name}/act"]["post"]
        fields = schema["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert fields["state"]["minItems"] == dim
        assert fields["policy"]["anyOf"][0] == {"enum": [name]}
        assert server.get(f"/policies/{name}/config").json["export"]["state_dim"] == dim
        assert server.get(f"/policies/{name}/docs").status == 200
    paths = server.get("/openapi.json").json["paths"]
    assert {"/health", "/v2/models/{model}/infer", "/policies/arm/act", "/policies/hand/admin/load"} <= set(paths)
    assert "/act" not in paths
    assert paths["/v2/models/{model}"]["parameters"][0]["schema"] == {"enum": ["arm", "hand"]}
    told = server.get("/config").json
    assert {name: part["export"]["state_dim"] for name, part in told["policies"].items()} == {"arm": 2, "hand": 3}


def test_p33_episodes_of_the_same_name_are_apart(server: Server) -> None:
    assert ask_arm(server, episode_id="ep").status == ask_hand(server, episode_id="ep").status == 200
    for name in ("arm", "hand"):
        told = post(server, f"/policies/{name}/episodes/ep/outcome", success=name == "arm").json
        assert (told["counted"], told["repeated"], told["success"]) == (True, False, name == "arm")
    assert post(server, "/episodes/ep/outcome", success=True).json["field"] == "policy"


# -- P34: settings of its own ------------------------------------------------------------------------------------------


def test_p34_a_table_has_the_settings_of_one_policy(robots: Robots, tmp_path: Path) -> None:
    config = tmp_path / "reflex.toml"
    config.write_text(
        f"[serve]\nmax_queue = 7\nport = 0\n[policies.arm]\nsource = '{robots.arm}'\nweight = 2.5\n"
        "max-batch-cost-ms = 50\nbatch_timeout_ms = 0\nslo = 'p99=1000ms'\n"
        f"[policies.hand]\nsource = '{robots.hand}'\nmax_queue = 9\nmax_batch_size = 3\ndeadline_ms = 5000\n"
    )
    with Server(f"--config={config}", "--record", str(tmp_path / "recordings")) as server:
        told = server.get("/config").json["policies"]
        assert (told["arm"]["weight"], told["hand"]["weight"]) == (2.5, 1.0)
        assert (told["arm"]["settings"]["max_queue"], told["hand"]["settings"]["max_queue"]) == (7, 9)
        assert hand(ask_hand(server))
        assert arm(ask_arm(server))
        health = server.get("/health").json["policies"]
        assert "slo" in health["arm"]
        assert "slo" not in health["hand"]
        assert server.get("/policies/arm/health").json["slo"]["value_ms"] >= 0.0
        assert server.stop() == 0
    (file,) = (tmp_path / "recordings").iterdir()
    journal = read_journal(file)
    arm_group, hand_group = journal.groups["arm.prod"], journal.groups["hand.prod"]
    assert (arm_group.budget, arm_group.capacity, arm_group.weight, arm_group.tenant) == (0.05, 7, 2.5, "arm")
    assert (hand_group.budget, hand_group.capacity, hand_group.weight, hand_group.max_size) == (0.1, 9, 1.0, 3)
    assert (arm_group.flush["returns"], hand_group.flush["returns"]) == (0.0, None)


# -- P35: one device ---------------------------------------------------------------------------------------------------


def test_p35_a_policy_with_deadlines_meets_them_beside_a_backlog_of_another() -> None:
    """In virtual time: batches last 10 ms, the arm has 300 waiting, the hand asks every 40 ms and has 35 ms for it."""
    config = ServeConfig(max_batch_size=1, max_queue_s=0)
    plain = {"stages": ("",), "captured_sizes": (), "padded_stages": ()}
    groups = [
        group_of(config, "prod", cast("Policy", SimpleNamespace(slot=f"{name}.prod", **plain)), weight, name)
        for name, weight in (("arm", 3.0), ("hand", 1.0))
    ]  # fmt: skip
    scheduler, now, asked = Scheduler(groups), 0.0, []
    for _ in range(300):
        scheduler.submit(Request(group="arm.prod"), now)
    while now < 2.0:
        if now >= 0.040 * len(asked):
            asked.append(scheduler.submit(Request(group="hand.prod", time_limit=0.035), now))
        batch = scheduler.next_batch(now)
        assert batch is not None
        now += 0.010
        scheduler.complete(batch, [Done()] * len(batch), 0.010, now)
    assert len(asked) == 50
    assert {type(ticket.outcome) for ticket in asked[:-1]} == {Done}


def test_p35_a_policy_with_a_large_fixed_part_makes_another_wait_for_twice_that() -> None:
    """In virtual time: the arm has 64 callers and takes 190 + 10 n ms, the hand asks now and then and takes 5 ms."""
    plain = {"stages": ("",), "captured_sizes": (), "padded_stages": ()}
    scheduler = Scheduler(
        group_of(ServeConfig(), "prod", cast("Policy", SimpleNamespace(slot=f"{name}.prod", **plain)), 1.0, name)
        for name in ("arm", "hand")
    )
    now, waits, asked = 0.0, list[float](), scheduler.submit(Request(group="hand.prod"), 0.0)
    for i in range(64):
        scheduler.submit(Request(group="arm.prod", client=i), now)
    while now < 20.0:
        batch = scheduler.next_batch(now)
        assert batch is not None
        took = 0.005 if batch.group == "hand.prod" else 0.190 + 0.010 * len(batch)
        now += took
        scheduler.complete(batch, [Done()] * len(batch), took, now)
        for ticket in batch.grants:
            if ticket is not asked:
                scheduler.submit(Request(group="arm.prod", client=ticket.request.client), now)
        if asked.outcome is not None:
            waits.append(now - asked.arrived)
            asked = scheduler.submit(Request(group="hand.prod"), now)
    assert max(waits[len(waits) // 2 :]) <= 2 * 0.190 + 0.005  # with sixteen times it waits for all 64, 0.835 s


def test_p35_both_with_a_backlog_share_the_device_by_weight(robots: Robots, tmp_path: Path) -> None:
    """Each batch is one request and lasts 20 ms: three of the arm for each of the hand."""
    config, trace = tmp_path / "reflex.toml", tmp_path / "trace.jsonl"
    config.write_text("[policies.arm]\nweight = 3\n")
    options = ("--config", str(config), "--max-batch-size", "1", "--trace", str(trace))
    with both(robots, "--policy", f"held={robots.arm2}", *options, held=True, before=measured(0.02)) as server:
        bodies: list[Any] = [{"policy": "held", "state": STATE, "request_id": "plug"}]
        bodies += [{"policy": "arm", "state": STATE} for _ in range(24)]
        bodies += [{"policy": "hand", "state": TOUCH} for _ in range(24)]
        with server.burst(bodies) as burst:
            burst.send()
            # One may be in a batch that was formed ahead, or have run before the plug came.
            server.reach(lambda m: m("reflex_in_flight_requests") + m("reflex_requests_total", outcome="ok") == 49)
            server.release()
            assert {answer.status for answer in burst.answers()} == {200}
        assert server.stop() == 0
    ran = [batch.group for batch in read_journal(trace).batches if batch.group != "held.prod"]
    assert abs(ran[:24].count("arm.prod") - 18) <= 3, ran


# -- P36: versions within each -----------------------------------------------------------------------------------------


def test_p36_a_and_b_of_one_policy_beside_another_with_a_shadow(robots: Robots, tmp_path: Path) -> None:
    config = tmp_path / "reflex.toml"
    config.write_text(
        f"[policies.arm]\npolicy_a = '{robots.arm}'\npolicy_b = '{robots.arm2}'\nsplit = 30\nrtc = false\n"
        f"[policies.hand]\nsource = '{robots.hand}'\nshadow_policy = '{robots.hand2}'\nshadow_sample = 1.0\n"
    )
    with Server(f"--config={config}") as server:
        (a,), (b,) = episodes("a", 1, 30), episodes("b", 1, 30)
        answer = ask_arm(server, episode_id=a)
        assert arm(answer)
        assert answer.headers["x-reflex-policy-slot"] == "a"
        answer = ask_arm(server, episode_id=b)
        assert arm(answer, weights=-WEIGHTS)
        assert (answer.headers["x-reflex-policy"], answer.headers["x-reflex-policy-slot"]) == ("arm", "b")
        answer = ask_hand(server, episode_id=b)
        assert hand(answer)
        assert "x-reflex-policy-slot" not in answer.headers
        until(lambda: server.get("/policies/hand/diagnostics/shadow").json["compared"] == 1)
        assert server.get("/policies/arm/diagnostics/shadow").status == 404
        assert post(server, "/policies/arm/admin/split", split=100).json == {"split": 100}
        assert arm(ask_arm(server, episode_id=episodes("b", 2, 30)[1]))
        refused = post(server, "/policies/hand/admin/split", split=10)
        assert refused.status == 409, refused.body
        assert post(server, f"/policies/arm/episodes/{b}/outcome", success=True).json["slot"] == "b"
        metrics = server.metrics()
        assert metrics("reflex_act_latency_seconds_count", policy="arm", policy_slot="b") == 1
        assert metrics("reflex_requests_total", policy="hand", policy_slot="shadow", outcome="ok") == 1
        assert metrics("reflex_shadow_divergence_count", policy="hand") == 1


def test_p36_a_ramp_of_one_policy_leaves_the_other_alone(robots: Robots, tmp_path: Path) -> None:
    config = tmp_path / "reflex.toml"
    config.write_text(
        f"[policies.arm]\npolicy_a = '{robots.arm}'\npolicy_b = '{robots.arm2}'\nrtc = false\nramp = '5,100'\n"
        f"ramp_every = '1s'\n[policies.hand]\nsource = '{robots.hand}'\n"
    )
    with Server(f"--config={config}") as server:
        until(lambda: server.get("/policies/arm/diagnostics/rollout").json["ramp"]["state"] == "finished")
        assert "ramp" not in server.get("/policies/hand/diagnostics/rollout").json
        assert arm(ask_arm(server, episode_id="any"), weights=-WEIGHTS)
        assert hand(ask_hand(server, episode_id="any"))


# -- P37: failures -----------------------------------------------------------------------------------------------------


def test_p37_a_policy_that_crashes_is_degraded_and_the_other_serves(
    robots: Robots, capsys: pytest.CaptureFixture[str]
) -> None:
    with both(robots, "--inject-fault", "hand.prod:raise:1", "--max-consecutive-crashes", "2") as server:
        for _ in range(2):
            assert ask_hand(server).status == 500
        assert (ask_hand(server).status, ask_hand(server).code) == (503, "degraded")
        assert arm(ask_arm(server))
        health = server.get("/health")
        assert (health.status, health.json["state"]) == (200, "ready")
        told = health.json["policies"]
        assert (told["arm"]["state"], told["hand"]["state"]) == ("ready", "degraded")
        assert told["hand"]["injected"]["faults"] == ["prod:raise:1"]
        assert "injected" not in told["arm"]
        assert server.get("/policies/hand/health").status == 503
        assert server.get("/policies/arm/health").status == 200
        assert server.get("/policies/hand/healthz").status == 503
        assert server.get("/v2/models/hand/ready").status == 503
        assert server.get("/healthz").status == server.get("/v2/health/ready").status == 200
        assert main(["top", "--once", f"http://127.0.0.1:{server.port}"]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"^arm +ready +prod +ok ", shown, re.MULTILINE), shown
        assert re.search(r"^hand +degraded +prod +drained ", shown, re.MULTILINE), shown
        assert post(server, "/policies/hand/admin/faults", faults=[]).json == {"faults": []}
        assert post(server, "/policies/hand/admin/reset", slot="prod").json["verdict"] == "ok"
        assert hand(ask_hand(server))


def test_p37_the_server_is_degraded_once_no_policy_answers(robots: Robots) -> None:
    faults = ("--inject-fault", "hand.prod:raise:1", "--inject-fault", "arm.prod:raise:1")
    with both(robots, *faults, "--max-consecutive-crashes", "1") as server:
        assert ask_hand(server).status == 500
        assert server.get("/health").status == 200
        assert ask_arm(server).status == 500
        assert (server.get("/health").status, server.get("/health").json["state"]) == (503, "degraded")


def test_p37_a_key_guards_every_policy_and_health_is_open(robots: Robots) -> None:
    with both(robots, "--api-key", "secret") as server:
        for path in ("/policies/arm/config", "/policies/leg/config", "/config"):
            assert (server.get(path).status, server.get(path).code) == (401, "unauthorized")
        assert ask_arm(server).status == 401
        assert server.get("/policies/arm/health").status == server.get("/health").status == 200
        assert server.get("/policies/arm/config", Authorization="Bearer secret").status == 200


# -- P38: operators ----------------------------------------------------------------------------------------------------


def test_p38_a_load_names_policy_and_slot(robots: Robots) -> None:
    with both(robots) as server:
        answer = post(server, "/policies/hand/admin/load", slot="prod", path=str(robots.hand2))
        assert answer.json["model_version"].startswith("hand-2@")
        assert hand(ask_hand(server), weights=-HAND)
        assert arm(ask_arm(server))
        wrong = post(server, "/policies/hand/admin/load", slot="prod", path=str(robots.arm))
        assert wrong.status == 422
        assert "state_dim: found 2" in wrong.json["message"]
        assert post(server, "/admin/load", slot="prod", path=str(robots.hand)).json["field"] == "policy"
        assert post(server, "/policies/hand/admin/load", slot="b", path=str(robots.hand)).status == 404


def test_p38_one_load_at_a_time_whatever_the_policy(robots: Robots, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with both(robots, before=SLOW_LOAD.format(gate=str(gate))) as server:

        def load(name: str, path: Path, while_status: int) -> Answer:
            """The first answer with another status: the question whether another load may begin can come first."""
            found: Answer = until(
                lambda: (a := post(server, f"/policies/{name}/admin/load", slot="prod", path=str(path))).status
                != while_status
                and a
            )
            return found

        gate.touch()
        with in_background(lambda: load("hand", robots.hand2, 409)) as loading:
            assert "another policy is being loaded" in load("arm", tmp_path, 422).json["message"]
            gate.unlink()
        assert loading[0].status == 200


def test_p38_the_memory_of_all_policies_is_checked_before_any_is_loaded(robots: Robots) -> None:
    before = "import reflex_runtime.robots.sources.load as m; m.host_memory = lambda: 600\n"
    with both(robots, before=before, until="reflex serve: ") as server:
        said = server.wait_log("reflex serve: ")
        assert re.search(r"all policies together require .*\d GB of memory, .*\d GB beside this one, but only", said)
        assert server.wait() == 2


# -- P39: what is written ----------------------------------------------------------------------------------------------


def test_p39_metrics_and_journals_tell_the_policies_apart(robots: Robots, tmp_path: Path) -> None:
    with both(robots, "--record", str(tmp_path)) as server:
        assert arm(ask_arm(server))
        assert hand(ask_hand(server, episode_id="ep"))
        assert post(server, "/policies/hand/episodes/ep/outcome", success=True).status == 200
        assert server.act().status == 422
        assert post(server, "/act", state=STATE, policy="hand").status == 422
        metrics = server.metrics()
        assert metrics("reflex_requests_total", policy="hand", outcome="client_error") == 1
        assert metrics("reflex_requests_total", policy="arm", policy_slot="prod", outcome="ok") == 1
        assert metrics("reflex_requests_total", policy="hand", embodiment="hand", outcome="ok", wire="act") == 1
        assert metrics("reflex_requests_total", policy="arm", outcome="client_error") == 1  # the first one's
        assert all('policy="' in line for line in server.get("/metrics").body.decode().splitlines() if line[0] != "#")
        assert server.stop() == 0
    (file,) = tmp_path.iterdir()
    journal = read_journal(file)
    assert journal.slots == ["arm.prod", "hand.prod"]
    assert {p.slot: p.model_id for p in journal.header.policies or ()} == {
        "arm.prod": "arm-model", "hand.prod": "hand-model",
    }
    assert isinstance(journal.header.served, dict)
    assert journal.header.served["hand"].embodiment == "hand"
    (outcome,) = journal.noted("outcome")
    assert (outcome.fields["policy"], outcome.fields["slot"]) == ("hand", "prod")
    assert re.fullmatch("[0-9a-f]{16}", journal.header.hash_of("hand.prod"))


def test_p39_a_report_is_of_one_policy(robots: Robots, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, recordings = tmp_path / "reflex.toml", tmp_path / "recordings"
    config.write_text(
        f"[policies.arm]\npolicy_a = '{robots.arm}'\npolicy_b = '{robots.arm2}'\nsplit = 30\nrtc = false\n"
        f"[policies.hand]\nsource = '{robots.hand}'\n"
    )
    with Server(f"--config={config}", "--record", str(recordings)) as server:
        for slot in ("a", "b"):
            for episode in episodes(slot, 2, 30):
                assert ask_arm(server, episode_id=episode).status == 200
                assert post(server, f"/policies/arm/episodes/{episode}/outcome", success=slot == "b").status == 200
        assert ask_hand(server, episode_id="ep").status == 200
        assert post(server, "/policies/arm/admin/split", split=40).status == 200
        assert server.stop() == 0
    assert main(["report", str(recordings), "--policy", "arm", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {slot: part["requests"] for slot, part in told["slots"].items()} == {"a": 2, "b": 2}
    assert {slot: part["episodes"]["successes"] for slot, part in told["slots"].items()} == {"a": 0, "b": 2}
    assert told["slots"]["b"]["models"][0].startswith("arm-2@")
    assert [event["action"] for event in told["timeline"]] == ["split"]
    assert main(["report", str(recordings), "--policy", "hand"]) == 0
    shown = capsys.readouterr().out
    assert "prod" in shown
    assert "arm" not in shown
    assert main(["report", str(recordings)]) == 2
    assert "has several policies: choose arm or hand with --policy NAME" in capsys.readouterr().err
    assert main(["report", str(recordings), "--policy", "leg"]) == 2
    assert "--policy=leg: not in " in capsys.readouterr().err
    (file,) = recordings.iterdir()
    assert main(["replay", str(file), "--model", str(robots.hand), "--slot", "hand.prod", "--fail-on", "actions"]) == 0
    assert "hand.prod: 1 replayed" in capsys.readouterr().out
    assert main(["replay", str(file), "--schedule"]) == 0


def test_p33_our_client_asks_one_policy_by_its_url(server: Server) -> None:
    with Client(f"http://127.0.0.1:{server.port}/policies/hand") as client:
        with client.episode(robot_id="hand-1") as episode:
            chunk = episode.act(state=TOUCH, seed=1)
            episode.success = True
        assert np.allclose(chunk.actions, expected(TOUCH, 1, HAND), atol=1e-5)
        assert client.get("/diagnostics/rollout")["outcomes"]["prod"]["episodes"] >= 1


def test_p34_every_setting_of_a_policy_can_stand_in_its_table() -> None:
    known = {field.name: field for field in fields(ServeConfig)}
    assert known.keys() >= OWN_SETTINGS
    texts = {"cuda_graphs": "1,2", "slo": "p99=1s", "guard": "p99=1s", "ramp": "5,100", "ramp_every": "1m"}
    texts["default_prompt"] = "go"
    for name in OWN_SETTINGS:
        meta, default = known[name].metadata, known[name].default
        other = texts.get(name) or next((c for c in meta["choices"] if c != default), None)
        if other is None and meta["low"] is not None:
            other = meta["low"] if meta["low"] != default else meta["high"]
        value = other if other is not None else (not default) if isinstance(default, bool | None) else "text"
        _, config, places = own_settings(
            Path("reflex.toml"), "policies", "arm", {name.replace("_", "-"): value}, ServeConfig(), OWN_SETTINGS
        )
        assert getattr(config, name) == value != default, name
        assert places == {name: f"reflex.toml: [policies.arm] {name.replace('_', '-')}"}
    for name in known.keys() - OWN_SETTINGS:
        with pytest.raises(ConfigError, match="is a setting of the whole server"):
            own_settings(Path("reflex.toml"), "policies", "arm", {name: 1}, ServeConfig(), OWN_SETTINGS)


def test_p37_a_policy_that_fails_its_warm_up_ends_the_start_of_all(robots: Robots, tmp_path: Path) -> None:
    broken = write_tiny(tmp_path / "broken", fails=True)
    with Server(robots.arm, "--policy", f"broken={broken}", until="not serving on") as server:
        assert server.get("/health").json["state"] == "warmup_failed"
        assert f"policy broken: {broken}: it does not answer: " in server.get("/health").json["error"]
        assert server.get("/policies/default/health").status == 503
        assert (server.act().status, server.act().code) == (503, "not_ready")


def test_p37_a_damaged_graph_is_told_with_its_policy(robots: Robots, tmp_path: Path) -> None:
    damaged = write_tiny(tmp_path / "damaged", inputs={"state": "no_such_input", "noise": "x"})
    done = reflex("serve", robots.arm, "--policy", f"hand={damaged}", "--port", "0")
    assert done.returncode == 2
    assert "warmup_failed: policy hand: " in done.stderr
    assert refusal(f"--policy=hand={tmp_path / 'none'}").startswith("reflex serve: policy hand: ")
