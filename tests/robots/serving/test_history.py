"""Policies that see several observations, on real servers: episodes, resets, versions, recordings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from reflex_runtime.cli import main
from reflex_runtime.observe.journal import read_journal
from reflex_runtime.robots import load_policy
from reflex_runtime.robots.serving.runtime import PolicyRuntime
from reflex_runtime.web.app import App
from robots import means
from robots.serving.test_decode_pool import BIG, HELD, SMALL
from serving.harness import Answer, Latch, Server
from serving.in_process import with_app
from serving.pair import admin

pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")

PORTS: Any = {"state": ("f", [2, 2])}


def write(root: Path, ports: Any = PORTS, **keys: Any) -> Path:
    """The first number of an action is the mean of the two states that the policy sees."""
    return means.write_export(root, ports, max(2, len(ports)), observation_steps=2, wires={"openpi": {}}, **keys)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("history") / "export")


@pytest.fixture(scope="module")
def server(export: Path) -> Iterator[Server]:
    with Server(export) as running:
        yield running


def act(server: Server, number: float, **fields: Any) -> float:
    answer: Answer = server.post({"state": [number, number]} | fields)
    assert answer.status == 200, answer.body
    return float(answer.json["actions"][0][0])


def test_p21_a_server_keeps_the_past_of_each_episode(server: Server) -> None:
    assert [act(server, n, episode_id="one") for n in (1.0, 3.0, 5.0)] == [1.0, 2.0, 4.0]
    assert [act(server, n, episode_id="two") for n in (7.0, 9.0)] == [7.0, 8.0]
    assert [act(server, n) for n in (1.0, 3.0)] == [1.0, 3.0]  # of no episode
    again = {"episode_id": "one", "request_id": "again"}
    assert [act(server, 7.0, **again), act(server, 7.0, **again)] == [6.0, 6.0]
    fields = server.get("/openapi.json").json["paths"]["/act"]["post"]["requestBody"]["content"]["application/json"]
    assert "sees its last 2 observations" in fields["schema"]["properties"]["episode_id"]["description"]
    told = server.get("/config").json
    assert told["policy"]["history"]["episodes"] == 2
    assert told["wires"]["openpi"]["observation_steps"] == 2


def test_p21_a_reset_of_openpi_begins_anew(server: Server) -> None:
    client = WebsocketClientPolicy(f"ws://127.0.0.1:{server.port}")
    with closing(client._ws):
        assert client.get_server_metadata()["reflex"]["observation_steps"] == 2

        def ask(number: float, **more: Any) -> float:
            return float(client.infer({"state": np.full(2, number)} | more)["actions"][0, 0])

        assert [ask(1.0), ask(3.0), ask(5.0, reset=True), ask(7.0)] == [1.0, 2.0, 5.0, 6.0]


def test_p22_pictures_that_are_decoded_later_keep_their_place(tmp_path: Path) -> None:
    """The first request of the episode has a large picture, and is decoded after the second was answered."""
    ports: Any = PORTS | {"front": ("u", [2, 4, 6, 3])}
    latch = Latch(tmp_path / "latch")
    latch.shut()
    before = HELD.format(began=str(tmp_path / "began"), wait=latch.wait)
    export = write(tmp_path / "export", ports, images={"front": [4, 6]})
    with Server(export, before=before) as server:
        fields = {"episode_id": "e", "robot_id": "arm", "image": BIG, "state": [1.0, 1.0]}
        with server.burst([fields]) as first:
            first.send()
            server.reach(lambda metrics: (tmp_path / "began").exists())
            assert act(server, 3.0, episode_id="e", robot_id="arm", image=SMALL) == 3.0
            latch.close()
            (answer,) = first.answers()
        assert answer.json["actions"][0][0] == 1.0
        assert act(server, 5.0, episode_id="e", robot_id="arm", image=SMALL) == 4.0


def test_p22_a_refused_request_leaves_nothing_behind(server: Server) -> None:
    act(server, 1.0, episode_id="refused")
    late = server.post({"state": [9.0, 9.0], "episode_id": "refused", "deadline_ms": 1e-6})
    assert late.status in (408, 503, 504), late.body
    assert server.post({"state": [9.0], "episode_id": "refused"}).status == 422
    assert act(server, 3.0, episode_id="refused") == 2.0


def test_p23_an_episode_whose_outcome_is_reported_is_forgotten(server: Server) -> None:
    assert [act(server, n, episode_id="over") for n in (1.0, 3.0)] == [1.0, 2.0]
    for _ in range(2):  # a report may be repeated, also while the next one runs under the same name
        assert server.ask("POST", "/episodes/over/outcome", b'{"success": true}').status == 200
        assert act(server, 5.0, episode_id="over", request_id="next") == 5.0
    assert act(server, 7.0, episode_id="over") == 6.0


def test_p23_another_version_begins_anew(tmp_path: Path, export: Path) -> None:
    with Server(export) as server:
        assert [act(server, n, episode_id="e") for n in (1.0, 3.0)] == [1.0, 2.0]
        assert admin(server, "load", slot="prod", path=str(write(tmp_path / "next"))).status == 200
        assert [act(server, n, episode_id="e") for n in (5.0, 7.0)] == [5.0, 6.0]


def test_p23_an_episode_that_moves_is_forgotten(export: Path) -> None:
    async def check(app: App, runtime: PolicyRuntime) -> None:
        policy = runtime.first.policy
        assert policy.history is not None
        for episode in ("stays", "moves"):
            moment = policy.prepare(state=[1.0, 1.0], episode_id=episode, request_id=episode).moment
            assert moment is not None
            policy.history.remember(episode, moment)
        runtime.first.rollout._on_moved(["moves"])
        later = policy.prepare(state=[3.0, 3.0], episode_id="stays", request_id="later")
        assert later.past == ("stays",)
        assert policy.prepare(state=[3.0, 3.0], episode_id="moves", request_id="later").past == ()

    with_app(export, check)


def test_p23_a_version_that_comes_back_begins_anew(export: Path) -> None:
    """Its observations are from before the exchange."""

    async def check(app: App, runtime: PolicyRuntime) -> None:
        slot = runtime.first.slots["prod"]
        policy = slot.policy
        moment = policy.prepare(state=[1.0, 1.0], episode_id="e", request_id="one").moment
        assert policy.history is not None
        assert moment is not None
        policy.history.remember("e", moment)
        slot.exchange(slot.made(load_policy(export)), keep=True)
        assert slot.policy is not policy
        slot.go_back()
        assert slot.policy is policy
        assert policy.prepare(state=[3.0, 3.0], episode_id="e", request_id="two").past == ()

    with_app(export, check)


def test_p24_the_command_replays_what_a_server_recorded(export: Path, tmp_path: Path) -> None:
    with Server(export, "--record", str(tmp_path / "there"), "--record-no-gzip") as server:
        for i in range(5):
            act(server, float(i), episode_id="e", request_id=f"r{i}")
        server.stop()
    (path,) = (tmp_path / "there").glob("*.jsonl")
    asked = [line.request.past for line in read_journal(path).requests]
    assert asked == [None, ["r0"], ["r1"], ["r2"], ["r3"]]
    out = tmp_path / "out.json"
    words = ["replay", str(path), "--model", str(export), "--output", str(out), "--fail-on", "actions"]
    assert main(words) == 0
    assert json.loads(out.read_text())
