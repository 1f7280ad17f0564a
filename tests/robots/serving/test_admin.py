"""The doors of operators: who may enter, and what they may not say."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import psutil
import pytest

from serving.harness import PATIENCE, STATE, Server
from serving.pair import SLOW_LOAD, Pair, admin, episodes, outcome, rollout, two, version_of

PATHS = ("split", "rollback", "reset", "load", "faults")


@pytest.fixture(scope="module")
def duo(pair: Pair) -> Iterator[Server]:
    with two(pair) as server:
        yield server


# -- H5: who may -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*(f"/admin/{p}" for p in PATHS), "/episodes/e/outcome"])
def test_h5_with_a_key_nobody_gets_in_without_it(path: str, keyed: Server) -> None:
    for headers in ({}, {"X-Reflex-Key": "wrong"}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        answer = keyed.ask("POST", path, b"{}", headers)
        assert (answer.status, answer.code) == (401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"
    for headers in ({"X-Reflex-Key": "secret"}, {"Authorization": "Bearer secret"}):
        assert keyed.ask("POST", path, b"{}", headers).status not in (401, 500)


@pytest.mark.parametrize("path", ["/diagnostics/rollout", "/diagnostics/shadow", "/config"])
def test_h5_what_is_told_of_the_versions_needs_the_key_too(path: str, keyed: Server) -> None:
    assert keyed.get(path).status == 401
    assert keyed.ask("GET", path, headers={"X-Reflex-Key": "secret"}).status != 401


@pytest.fixture(scope="module")
def keyed(pair: Pair) -> Iterator[Server]:
    with Server(pair.v1, env={"REFLEX_API_KEY": "secret"}) as server:
        yield server


def _elsewhere() -> str:
    """An address of this machine that is not its loopback."""
    for addresses in psutil.net_if_addrs().values():
        for found in addresses:
            if found.family == socket.AF_INET and not found.address.startswith("127."):
                return found.address
    pytest.skip("this machine has no other address than its loopback")


def test_h5_without_a_key_only_this_machine_may(pair: Pair) -> None:
    address = _elsewhere()
    with two(pair, "--host", "0.0.0.0") as server:
        (b,) = episodes("b", 1)
        assert server.act(episode_id=b).status == 200

        def from_outside(path: str, body: Any) -> tuple[int, Any]:
            connection = http.client.HTTPConnection(address, server.port, timeout=PATIENCE)
            try:
                connection.request("POST", path, json.dumps(body))
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())
            finally:
                connection.close()

        for path in (*(f"/admin/{p}" for p in PATHS), f"/episodes/{b}/outcome"):
            status, body = from_outside(path, {"split": 0, "success": True})
            assert (status, body["error"]) == (401, "unauthorized"), path
            assert "loopback" in body["message"]
        assert from_outside("/act", {"state": STATE, "episode_id": b})[0] == 200  # robots may
        assert rollout(server)["split"] == 50
        assert admin(server, "split", split=10).status == 200
        assert outcome(server, b).status == 200


@pytest.mark.parametrize(
    ("origin", "may"),
    [("http://evil.example", False), ("null", False), ("http://[", False), ("http://127.0.0.1:3000", True),
     ("http://localhost", True), ("http://[::1]:8", True)],
)  # fmt: skip
def test_h5_without_a_key_a_page_of_another_site_may_not(origin: str, may: bool, duo: Server) -> None:
    """A browser on this machine is on loopback, whoever wrote the page it shows."""
    answer = duo.ask("POST", "/admin/split", b'{"split": 50}', {"Origin": origin, "Content-Type": "text/plain"})
    assert answer.status == (200 if may else 403)


# -- what is no request ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
def test_other_methods_are_405(method: str, duo: Server) -> None:
    for path in (*(f"/admin/{p}" for p in PATHS), "/episodes/e/outcome"):
        answer = duo.ask(method, path)
        assert answer.status == 405
        assert answer.headers["allow"] == "POST"
    for path in ("/diagnostics/rollout", "/diagnostics/shadow"):
        answer = duo.ask("POST", path, b"{}")
        assert (answer.status, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "path", ["/admin", "/admin/", "/admin/split/x", "/admin/nothing", "/episodes", "/episodes/", "/episodes/e",
             "/episodes//outcome", "/episodes/outcome", "/episodes/e/outcomes"],
)  # fmt: skip
def test_other_paths_are_404(path: str, duo: Server) -> None:
    answer = duo.ask("POST", path, b"{}")
    assert (answer.status, answer.code) == (404, "not_found")


BROKEN = [b"", b"{", b"\xff\xfe", b"nothing", b'{"split": 1', b'{"split": NaN}', b"[" * 50_000]


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
def test_what_is_not_json_is_a_4xx(body: bytes, duo: Server) -> None:
    for path in ("/admin/split", "/admin/reset", "/admin/load", "/admin/faults", "/episodes/e/outcome"):
        answer = duo.ask("POST", path, body)
        assert answer.status in (400, 422), (path, answer.body)
        assert answer.code in ("invalid_json", "invalid_request")
        assert answer.json["retry_safe"] is False


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/admin/split", "{}", "split"),
        ("/admin/split", "[]", "body"),
        ("/admin/split", '"50"', "body"),
        ("/admin/split", '{"split": "50"}', "split"),
        ("/admin/split", '{"split": true}', "split"),
        ("/admin/split", '{"split": null}', "split"),
        ("/admin/split", '{"split": 50.5}', "split"),
        ("/admin/split", '{"split": -1}', "split"),
        ("/admin/split", '{"split": 101}', "split"),
        ("/admin/split", f'{{"split": 1{"0" * 40}}}', "split"),
        ("/admin/split", f'{{"split": 1{"0" * 9000}}}', "split"),
        ("/admin/split", '{"split": 50, "more": 1}', "more"),
        ("/admin/rollback", '{"slot": "b"}', "slot"),
        ("/admin/rollback", "[]", "body"),
        ("/admin/reset", "{}", "slot"),
        ("/admin/reset", '{"slot": 1}', "slot"),
        ("/admin/load", '{"slot": "b"}', "path"),
        ("/admin/load", '{"slot": "b", "path": 1}', "path"),
        ("/admin/load", '{"slot": "b", "path": "\\u0000"}', "path"),
        ("/admin/faults", "{}", "faults"),
        ("/admin/faults", '{"faults": "b:raise:1"}', "faults"),
        ("/admin/faults", '{"faults": ["b:raise:2"]}', "faults"),
        ("/admin/faults", '{"faults": ["prod:raise:1"]}', "faults"),
        ("/admin/faults", '{"faults": ["b:explode:1"]}', "faults"),
        ("/admin/faults", json.dumps({"faults": ["b:raise:0"] * 101}), "faults"),
        ("/episodes/e/outcome", "{}", "success"),
        ("/episodes/e/outcome", '{"success": 1}', "success"),
        ("/episodes/e/outcome", '{"success": "yes"}', "success"),
        ("/episodes/e/outcome", '{"success": true, "reward": "much"}', "reward"),
        ("/episodes/e/outcome", '{"success": true, "note": ""}', "note"),
        (f"/episodes/{'x' * 257}/outcome", '{"success": true}', "episode_id"),
        ("/episodes/%00/outcome", '{"success": true}', "episode_id"),
        ("/episodes/a%0Ab/outcome", '{"success": true}', "episode_id"),
    ],
)
def test_what_is_wrong_is_a_422_that_names_the_field(path: str, body: str, field: str, duo: Server) -> None:
    answer = duo.ask("POST", path, body.encode())
    assert (answer.status, answer.code, answer.json["field"]) == (422, "invalid_request", field)
    assert rollout(duo)["split"] == 50


def test_unknown_slots_are_404(duo: Server) -> None:
    for slot in ("prod", "shadow", "c", "", "A", "é\u2028"):
        answer = admin(duo, "reset", slot=slot)
        assert (answer.status, answer.code) == (404, "not_found")
        assert answer.json["message"].endswith("a, b")


def test_text_that_is_no_unicode_is_a_4xx(duo: Server) -> None:
    for path, body in (
        ("/admin/reset", b'{"slot": "\\ud800"}'),
        ("/admin/load", b'{"slot": "b", "path": "\\ud800"}'),
        ("/admin/faults", b'{"faults": ["\\ud800"]}'),
        ("/episodes/%ff%fe/outcome", b'{"success": true}'),
    ):
        assert duo.ask("POST", path, body).status in (400, 404, 422), path


def test_huge_bodies_are_413(pair: Pair) -> None:
    with two(pair, "--max-body-bytes", "2000") as server:
        for size in (2_001, 500_000, 5_000_000):
            body = json.dumps({"slot": "b", "path": "x" * size}).encode()
            for path in ("/admin/load", "/admin/split", "/episodes/e/outcome"):
                answer = server.ask("POST", path, body)
                assert (answer.status, answer.code) == (413, "too_large"), (path, size)
        assert admin(server, "split", split=40).status == 200


def test_with_one_policy_there_is_nothing_to_split(tiny: Any) -> None:
    with Server(tiny) as server:
        for answer in (admin(server, "split", split=20), admin(server, "rollback")):
            assert (answer.status, answer.code) == (409, "invalid_request")
            assert "--policy-b" in answer.json["message"]
        told = rollout(server)
        assert set(told["slots"]) == {"prod"}
        assert "split" not in told
        assert server.act(episode_id="e").json["policy_changed"] is False
        assert outcome(server, "e").json == {
            "episode_id": "e", "slot": "prod", "success": True, "counted": True, "repeated": False,
        }


def test_while_it_loads_and_while_it_drains_nothing_is_changed(pair: Pair, tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    with two(pair, before=SLOW_LOAD.format(gate=str(gate)), until="listening on") as server:
        answer = admin(server, "split", split=10)
        assert (answer.status, answer.code, answer.json["retry_safe"]) == (503, "not_ready", True)
        assert server.get("/diagnostics/rollout").status == 200
        assert server.get("/diagnostics/shadow").status == 404
        gate.unlink()
        server.wait_log("ready on")
        assert rollout(server)["split"] == 50


# -- outcomes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "episode", ["ep_1", "a/b", "a%2Fb", "50%", "a b", "épisode", "x/outcome", "q?x=1#y", "/", "..", "%25"]
)
def test_the_outcome_of_any_episode_can_be_told(episode: str, duo: Server) -> None:
    assert duo.act(episode_id=episode).status == 200
    answer = outcome(duo, quote(episode, safe=""))
    assert answer.status == 200, answer.body
    assert answer.json["episode_id"] == episode
    assert (answer.json["counted"], answer.json["repeated"]) == (True, False)


def test_the_first_word_about_an_episode_counts(duo: Server) -> None:
    (episode,) = episodes("b", 1, name="twice")
    duo.act(episode_id=episode)
    before = rollout(duo)["outcomes"]["b"]["episodes"]
    first, second = outcome(duo, episode, False), outcome(duo, episode, True)
    assert first.json == {"episode_id": episode, "slot": "b", "success": False, "counted": True, "repeated": False}
    assert (second.json["counted"], second.json["repeated"]) == (False, True)
    told = rollout(duo)
    assert told["outcomes"]["b"]["episodes"] == before + 1
    metrics = duo.metrics()
    assert metrics("reflex_episode_outcomes_total", policy_slot="b", success="false") == 1


def test_the_outcome_of_an_episode_nobody_asked_for_is_404(duo: Server) -> None:
    answer = outcome(duo, "never-seen")
    assert (answer.status, answer.code) == (404, "not_found")


def test_an_episode_of_two_policies_counts_for_neither(pair: Pair) -> None:
    with two(pair) as server:
        moved, stays, swapped, new = *episodes("b", 1), *episodes("a", 1), *episodes("b", 2, name="later")
        server.act(episode_id=moved)
        server.act(episode_id=stays)
        admin(server, "rollback")
        server.act(episode_id=moved)
        server.act(episode_id=stays)
        assert outcome(server, moved).json["slot"] is None
        assert outcome(server, stays).json["counted"] is True
        admin(server, "split", split=50)
        server.act(episode_id=swapped)
        assert admin(server, "load", slot="b", path=str(pair.v3)).status == 200
        assert version_of(server.act(episode_id=swapped, seed=1), 1) == "v3"  # and this one, within its slot
        server.act(episode_id=new)
        assert (outcome(server, swapped).json["counted"], outcome(server, new).json["counted"]) == (False, True)
        told = rollout(server)
        assert {slot: t["episodes"] for slot, t in told["outcomes"].items()} == {"a": 1, "b": 1}
        compared = told["comparison"]["slots"]
        assert {slot: t["episodes"] for slot, t in compared.items()} == {"a": 0, "b": 1}  # it began anew
