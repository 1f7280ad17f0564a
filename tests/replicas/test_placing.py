"""Whose a request is, where it goes, and how several pages become one: without processes."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from reflex_runtime.placing import MAX_HEAD, SCANNED, Begun, begun, identity_of
from reflex_runtime.rendezvous import owner
from reflex_runtime.replicas.fair_table import Caller, FairTable
from reflex_runtime.replicas.merging import PageSum
from reflex_runtime.replicas.placing_table import EPISODES, LONGEST, SETTLED, ReplicaTable

ARM = Caller("10.0.0.1", "robot:arm")


def request(path: str, body: bytes = b"", headers: str = "", method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    ("path", "fields", "identity", "episode"),
    [
        ("/act", {"state": [1.0], "robot_id": "r1", "episode_id": "e1"}, "robot:r1", "e1"),
        ("/act?policy=arm", {"episode_id": "e1"}, "episode:e1", "e1"),
        ("/policies/arm/act", {"robot_id": 'a"b\u00e9'}, 'robot:a"b\u00e9', ""),
        ("/v2/models/arm/infer", {"parameters": {"sequence_id": 7}}, "episode:7", "7"),
        ("/act", {"episode_id": "\u00e9" * 128}, "episode:" + "\u00e9" * 128, "\u00e9" * 128),
        ("/reset", {"episode_id": None}, "", ""),
    ],
)
def test_x7_the_front_reads_who_sent_a_request_from_its_first_bytes(
    path: str, fields: dict[str, Any], identity: str, episode: str
) -> None:
    assert begun(request(path, json.dumps(fields).encode())) == Begun(True, identity, episode)
    if path.endswith("act"):
        packed = request(path, msgspec.msgpack.encode(fields), "Content-Type: application/msgpack\r\n")
        assert begun(packed) == Begun(True, identity, episode)


def test_x7_it_waits_for_no_more_than_it_needs() -> None:
    body = json.dumps({"robot_id": "r", "episode_id": "e", "image": "x" * 2 * SCANNED}).encode()
    whole = request("/act", body)
    head = len(whole) - len(body)
    assert begun(whole[: head - 1]) is None
    for cut, enough in ((0, False), (12, False), (17, False), (50, True), (SCANNED, True)):
        found = begun(whole[: head + cut])
        assert found is not None
        assert found.enough is enough
    late = b"{" + b" " * SCANNED + body[1:]
    found = begun(request("/act", late))  # behind what is looked at
    assert found == Begun(True)


def test_x7_a_header_names_the_episode_where_the_body_shows_nobody() -> None:
    headers = "X-Reflex-Episode: e%20%C3%A9\r\n"
    assert begun(request("/act", b'{"state": [1]}', headers)) == Begun(True, "episode:e \u00e9", "e \u00e9")
    late = b'{"image": "' + b"A" * SCANNED + b'", "episode_id": "e"}'
    assert begun(request("/act", late, headers)) == Begun(True, "episode:e \u00e9", "e \u00e9")
    robot = request("/act", b'{"robot_id": "r"}', headers)  # Reflex's client names its robot there, without an episode
    assert begun(robot) == Begun(True, "robot:r", "")


def test_x7_the_front_answers_all_that_asks_no_policy() -> None:
    asked = (("GET", "/health"), ("POST", "/admin/split"), ("POST", "/episodes/e/outcome"), ("GET", "/act"))
    for method, path in asked:
        assert begun(request(path, method=method)) == Begun(False)
    assert begun(request("/", headers="Upgrade: websocket\r\n", method="GET")) == Begun(True)
    for path in ("/admin/split", "/act/x"):  # only a GET opens a websocket
        assert begun(request(path, headers="Upgrade: websocket\r\n")) == Begun(False)
    assert begun(b"x" * (MAX_HEAD + 1)) == Begun(False)
    assert begun(b"\xff\x00\r\n\r\n") == Begun(False)
    for early in (b"\x16\x03\x01", b"POST /act HTTP/1.1\n", b"\n"):  # which no further bytes make a request
        assert begun(early) == Begun(False)
    assert begun(b"POST /act HTTP/1.1\r") is begun(b"P") is None


def test_x7_an_episode_stays_where_it_began_and_only_a_lost_replicas_move() -> None:
    table, names = ReplicaTable(), ["r0", "r1", "r2"]
    table.began_with(names)
    episodes = [f"e{i}" for i in range(300)]

    def places() -> dict[str, str | None]:
        return {episode: table.place(identity_of(None, episode), episode, ARM) for episode in episodes}

    first = places()
    assert min(Counter(first.values()).values()) > 60
    assert set(table.leave("r1")) == set(table.moved) == {e for e in episodes if first[e] == "r1"}
    second = places()
    assert not table.moved
    assert all(second[e] == first[e] for e in episodes if first[e] != "r1")
    assert "r1" not in second.values()
    assert table.settled(0.0)
    table.join("r1", 10.0)
    assert places() == second  # what runs stays
    new = {f"n{i}": table.place(f"episode:n{i}", f"n{i}", ARM) for i in range(60)}
    assert new == {name: owner(f"episode:{name}", names) for name in new}
    assert not table.settled(10.0 + SETTLED)
    assert table.settled(10.1 + SETTLED)


@pytest.mark.parametrize("name", ["robot_id", "episode_id", "sequence_id"])
def test_x7_a_name_that_is_no_unicode_names_nobody(name: str) -> None:
    """A message to a replica could not hold it: the caller's connection would stay open, answered by nobody."""
    for text in ('"\\ud800"', '"a\\udfffb"'):
        found = begun(request("/act", b'{"%b": %b}' % (name.encode(), text.encode())))
        assert found == Begun(True)
    found = begun(request("/act", b'{"%b": "\\ud83d\\ude00"}' % name.encode()))
    assert found is not None
    assert found.identity.endswith(":\U0001f600")


def test_x7_an_episode_that_is_longer_than_any_is_not_remembered() -> None:
    """A header holds one of 64 KiB, and comes from callers without a key."""
    table = ReplicaTable()
    table.began_with(["r0"])
    for length in (LONGEST, LONGEST + 1):
        assert table.place("episode:e", "e" * length, ARM) == "r0"
    assert [episode for episode, _ in table._runs.items()] == ["e" * LONGEST]


@pytest.mark.parametrize("names", ["one connection", "many robots", "many connections"])
def test_x7_a_caller_that_begins_episodes_without_end_pushes_out_none_of_another_host(names: str) -> None:
    """Whatever it calls itself, and though it needs no key."""
    table = ReplicaTable()
    table.began_with(["r0", "r1"])
    arms = [Caller.of((f"10.0.0.{i}", 5000), f"arm-{i}") for i in range(4)]
    episodes = {f"{arm.host}/{n}": arm for n in range(500) for arm in arms}
    for episode, arm in episodes.items():
        table.runs(episode, "r0", arm)
    for i in range(2 * EPISODES):
        client, robot = ("10.6.6.6", i if names == "many connections" else 1), f"r{i}" if "robots" in names else None
        assert table.place(f"episode:new-{i}", f"new-{i}", Caller.of(client, robot)) is not None
    assert len(table._runs) == EPISODES
    assert table.leave("r1") != []  # of the flood
    assert all(table._runs.get(episode) == "r0" for episode in episodes)


@pytest.mark.parametrize("client", [("::1", 5000, 0, 0), ("::1", 5000)])  # as a socket has it, and as an exchange does
def test_x7_a_caller_over_ipv6_has_a_host_too(client: tuple[Any, ...]) -> None:
    assert Caller.of(client, None) == Caller("::1", "5000")
    assert Caller.of(client, "arm") == Caller("::1", "robot:arm")


def test_x7_among_the_callers_of_one_host_the_one_with_most_loses_its_oldest() -> None:
    table, one, two = FairTable(5), Caller("h", "a"), Caller("h", "b")
    for key, caller in (("a1", one), ("b1", two), ("b2", two), ("b3", two), ("a2", one)):
        table.put(key, "v", caller)
    table.put("a3", "w", one)  # 3 and 3: of the one that came to so many first
    assert sorted(key for key, _ in table.items()) == ["a1", "a2", "a3", "b2", "b3"]
    table.put("b2", "v", one)  # it is another's now, and its newest
    table.put("a4", "v", one)
    assert sorted(key for key, _ in table.items()) == ["a2", "a3", "a4", "b2", "b3"]
    assert (table.get("a3"), table.get("a1"), len(table)) == ("w", None, 5)
    for key, _ in list(table.items()):
        table.drop(key)
    table.drop("a2")
    assert len(table) == 0
    assert not table._keys
    assert not table._names


def test_x7_a_table_counts_right_whatever_is_put_and_dropped() -> None:
    rng, table = Random(7), FairTable(40)
    for _ in range(4000):
        caller = Caller(f"h{rng.randrange(3)}", f"n{rng.randrange(4)}")
        key = f"k{rng.randrange(80)}"
        if rng.random() < 0.3:
            table.drop(key)
        else:
            table.put(key, "v", caller)
            assert table.get(key) == "v"
        assert len(table) <= 40
        whose = [whose for _, whose in table._values.values()]
        assert sorted(table._hosts._of.items()) == sorted(Counter(one.host for one in whose).items())
        assert table._hosts._most == max(Counter(one.host for one in whose).values(), default=0)
        for host, counts in table._names.items():
            mine = Counter(one.name for one in whose if one.host == host)
            assert (dict(counts._of), counts._most) == (dict(mine), max(mine.values()))


def test_x7_the_table_is_bounded_and_may_be_empty() -> None:
    table = ReplicaTable()
    assert table.place("robot:r", "e", ARM) is None
    table.began_with(["r0"])
    for i in range(EPISODES + 5):
        table.runs(f"e{i}", "r0", ARM)
    table.runs("other", "no such replica", ARM)
    assert len(table._runs) == EPISODES
    assert len(table.leave("r0")) == EPISODES
    table.began_with(["r1"])
    table.runs("more", "r1", ARM)
    table.leave("r1")
    assert len(table.moved) == EPISODES
    assert "more" in table.moved


PAGE = """\
# HELP reflex_requests_total Requests.
# TYPE reflex_requests_total counter
reflex_requests_total{{policy_slot="a"}} {requests}
# HELP reflex_backlog_seconds Backlog.
# TYPE reflex_backlog_seconds gauge
reflex_backlog_seconds {backlog}
# HELP reflex_slot_drained Drained.
# TYPE reflex_slot_drained gauge
reflex_slot_drained {drained}
"""


def page(requests: int, backlog: float, drained: int) -> bytes:
    return PAGE.format(requests=requests, backlog=backlog, drained=drained).encode()


def values(rendered: bytes) -> dict[str, float]:
    return {s.name: s.value for family in text_string_to_metric_families(rendered.decode()) for s in family.samples}


def test_x7_pages_add_up_and_keep_what_a_lost_replica_counted() -> None:
    pages = PageSum()
    own = page(1, 0.0, 0)
    both = pages.page({"r0": page(10, 0.5, 1), "r1": page(5, 0.25, 1)}, own, [])
    assert values(both) == {"reflex_requests_total": 16, "reflex_backlog_seconds": 0.75, "reflex_slot_drained": 1}
    assert values(pages.page({"r0": page(11, 0.5, 0)}, own, [])) == {  # the other did not answer in time
        "reflex_requests_total": 17, "reflex_backlog_seconds": 0.75, "reflex_slot_drained": 1,
    }  # fmt: skip
    pages.lost("r1")
    pages.lost("r1")
    assert values(pages.page({"r0": page(11, 0.5, 0), "r1": page(2, 0.0, 0)}, own, [])) == {
        "reflex_requests_total": 19, "reflex_backlog_seconds": 0.5, "reflex_slot_drained": 0,
    }  # fmt: skip
