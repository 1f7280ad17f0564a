"""LeRobot's own asynchronous client, two in a process: each robot gets its actions, through cuts too, or is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
    """A robot that stands still. got: the actions that it was sent."""

    observation_features = action_features = dict.fromkeys(MOTORS, float)

    def __init__(self, place: float) -> None:
        self.place = place
        self.got: list[Any] = []
        self.moved = threading.Condition()

    def connect(self) -> None:
        pass

    disconnect = connect

    def get_observation(self) -> dict[str, float]:
        return dict.fromkeys(MOTORS, self.place)

    def send_action(self, action: dict[str, float]) -> None:
        with self.moved:
            self.got.append([action[name] for name in MOTORS])
            self.moved.notify_all()

    def moves(self, count: int) -> None:
        """Wait for so many more actions; all are those for its own place."""
        with self.moved:
            done = len(self.got) + count
            assert self.moved.wait_for(lambda: len(self.got) >= done, PATIENCE)
        own = np.tanh(np.float32([self.place] * 2) @ WEIGHTS)
        assert np.allclose(self.got, own, atol=1e-5)


@contextmanager
def client_of(arm: Arm, address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(robot_client, "make_robot_from_config", lambda config: arm)
    config = configs.RobotClientConfig(
        policy_type="act", pretrained_name_or_path="lab/act", robot=None, actions_per_chunk=3,
        server_address=address, policy_device="cpu", client_device="cpu", fps=100,
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
