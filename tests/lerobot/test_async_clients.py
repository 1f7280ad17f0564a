"""LeRobot's own asynchronous client, two in a process: each robot gets its actions, whatever happens, or is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.exports import WEIGHTS, write_tiny
from serving.harness import PATIENCE, Server
from serving.relay import relay

robot_client = pytest.importorskip("lerobot.async_inference.robot_client", exc_type=ImportError)
configs = pytest.importorskip("lerobot.async_inference.configs", exc_type=ImportError)
MOTORS = ("shoulder.pos", "elbow.pos")


class Arm:
    """A robot that is a little further each time it looks, or stands still. got: the actions that it was sent."""

    observation_features = action_features = dict.fromkeys(MOTORS, float)

    def __init__(self, place: float, step: float = 0.0) -> None:
        self.place, self.step = place, step
        self.places: list[float] = []
        self.got: list[Any] = []
        self.moved = threading.Condition()
        self.paused = False

    def connect(self) -> None:
        pass

    disconnect = connect

    def get_observation(self) -> dict[str, float]:
        with self.moved:
            assert self.moved.wait_for(lambda: not self.paused, PATIENCE)
            self.place += self.step
            self.places.append(self.place)
            return dict.fromkeys(MOTORS, self.place)

    def pauses(self, paused: bool) -> None:
        with self.moved:
            self.paused = paused
            self.moved.notify_all()

    def send_action(self, action: dict[str, float]) -> None:
        with self.moved:
            self.got.append([action[name] for name in MOTORS])
            self.moved.notify_all()

    def moves(self, count: int) -> None:
        """Wait for so many more actions, and for one of a place seen since; each is that for a place of its own."""
        with self.moved:
            done, seen = len(self.got) + count, len(self.places)
            assert self.moved.wait_for(lambda: len(self.got) >= done and self._newest() >= seen, PATIENCE)
            own = self._actions(self.places)
            away = np.abs(np.array(self.got)[:, None] - own).max(axis=2).min(axis=1)
        assert away.max() < 1e-5

    def _actions(self, places: list[float]) -> Any:
        return np.tanh(np.float32([[place] * 2 for place in places]) @ WEIGHTS)

    def _newest(self) -> int:
        """The number of the last place that the last action is for."""
        near = np.abs(self._actions(self.places) - self.got[-1]).max(axis=1) < 1e-5
        return int(np.flatnonzero(near)[-1]) if near.any() else -1


@contextmanager
def client_of(arm: Arm, address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(robot_client, "make_robot_from_config", lambda config: arm)
    config = configs.RobotClientConfig(
        policy_type="act", pretrained_name_or_path="lab/act", robot=None, actions_per_chunk=3,
        server_address=address, policy_device="cpu", client_device="cpu", fps=100, aggregate_fn_name="latest_only",
    )  # fmt: skip
    client = robot_client.RobotClient(config)
    client.shutdown_event.set()
    threads: list[threading.Thread] = []

    def run() -> None:
        threads.extend(
            threading.Thread(target=function, args=arguments)
            for function, arguments in ((client.receive_actions, ()), (client.control_loop, ("go",)))
        )
        for thread in threads:
            thread.start()

    client.run = run
    try:
        yield client
    finally:
        client.shutdown_event.set()
        for thread in threads:
            thread.join(PATIENCE)
        client.stop()


def test_w42_two_clients_in_a_process_never_get_each_others_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = write_tiny(tmp_path / "export", noise=False, model_type="act")
    monkeypatch.chdir(tmp_path)  # it writes logs
    first, second = Arm(0.1), Arm(2.0)
    with Server(export, "--lerobot", "127.0.0.1:0", cold=True) as server:
        address = server.wait_log("clients of LeRobot: ").rpartition(" ")[2]
        with relay(address) as between, client_of(first, between.address, monkeypatch) as one:
            assert one.start()
            with client_of(second, between.address, monkeypatch) as two:
                assert not two.start()  # it shares the connection
                one.run()
                first.moves(20)
            between.cut()
            first.moves(20)
            with client_of(second, address, monkeypatch) as two:  # another address is another connection
                assert two.start()
                two.run()
                second.moves(20)
                first.moves(20)


def test_w42_two_clients_in_a_process_go_on_after_pauses_cuts_and_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = write_tiny(tmp_path / "export", noise=False, model_type="act")
    (export / "embodiment.json").write_text(json.dumps({"name": "so101", "state_names": ["shoulder", "elbow"]}))
    monkeypatch.chdir(tmp_path)  # it writes logs
    arms = Arm(-1.0, 1e-3), Arm(1.0, 1e-3)
    soon = "import reflex_runtime.robots.wires.lerobot as wire; wire.STALE = wire.LEFT = 0.2\n"

    def begun() -> tuple[Server, str]:
        server = stack.enter_context(Server(export, "--lerobot", "127.0.0.1:0", cold=True, before=soon))
        return server, server.wait_log("clients of LeRobot: ").rpartition(" ")[2]

    with ExitStack() as stack:
        server, address = begun()
        relays = [stack.enter_context(relay(address)) for _ in arms]  # each its own connection
        for arm, between in zip(arms, relays, strict=True):
            client = stack.enter_context(client_of(arm, between.address, monkeypatch))
            assert client.start()
            client.run()

        def both_move() -> None:
            for arm in arms:
                arm.moves(20)

        both_move()
        for arm, other in (arms, arms[::-1]):
            arm.pauses(True)
            other.moves(100)  # a second at least
            arm.pauses(False)
            both_move()
        for _ in range(3):
            for between in relays:
                between.cut()
            both_move()
        for end in (Server.stop, Server.kill):
            end(server)
            server, address = begun()
            for between in relays:
                between.target = address
                between.cut()
            both_move()
