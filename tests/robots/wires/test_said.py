"""What a client says is used or refused: fields that say where a robot is in its chunk, and how long it waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from reflex_runtime.demo import POLICY
from serving.harness import Server
from serving.requests import observe, recorded

from . import test_openpi
from .groot_clients import GrootRobot, port_of
from .lerobot_robot import Robot, features
from .test_lerobot import serving, tensors

__all__ = ["tensors"]  # used by all tests here
pytestmark = test_openpi.pytestmark
MOTORS = ("x", "y", "z", "gripper_open")
SETUP = {"features": features(("image",), MOTORS), "policy_type": "smolvla"}


def step(robot: Robot, timestep: int) -> None:
    """An observation of the bundled policy, and its chunk."""
    picture = np.zeros((64, 64, 3), np.uint8)
    robot.see([0.0, 0.0], timestep, task="open the door", image=picture, **dict.fromkeys(MOTORS, 0.1))
    assert robot.act()[0].timestep == timestep


def test_w54_lerobots_timesteps_say_how_much_of_the_last_chunk_was_executed(tmp_path: Path) -> None:
    """Whatever time it took: a simulator may be fast, and a robot may be held up."""
    with serving(POLICY, "--rtc", "--record", str(tmp_path)) as (server, robot):
        one = robot(**SETUP)
        for timestep in (0, 9, 9, 12, 40, 3, 5):
            step(one, timestep)
        server.stop()
    asked = recorded(tmp_path)
    assert [request.executed for request in asked] == [None, 9, 0, 3, 28, None, 2]
    assert len({request.episode_id for request in asked[:5]} | {request.episode_id for request in asked[5:]}) == 2


# -- RTC: how long the answer takes -----------------------------------------------------------------------------------

Ask = Callable[..., Any]
PICTURE = np.full((64, 64, 3), 10, np.uint8)


def by_act(server: Server) -> Ask:
    return lambda **said: observe(server, 10, **said)["rtc"]


def by_openpi(server: Server) -> Ask:
    def ask(**said: Any) -> Any:
        own = {f"reflex/{name}": value for name, value in ({"episode_id": "e"} | said).items()}
        seen = {"image": PICTURE, "state": np.zeros(4), "prompt": "open the door"}
        with test_openpi.robot(server) as client:
            return client.infer(seen | own)["rtc"]

    return ask


def by_groot(server: Server) -> Ask:
    def ask(**said: Any) -> Any:
        seen = {
            "video": {"image": PICTURE[None, None]},
            "state": {"all": np.zeros((1, 1, 4))},
            "language": {"task": [["open the door"]]},
        }
        with GrootRobot(port_of(server)) as client:
            (told,) = client.act(seen, episode_id="e", **said)[1]["reflex"]
        return told["rtc"]

    return ask


def by_oip(server: Server) -> Ask:
    def ask(seed: int | None = None, **said: Any) -> Any:
        values: list[tuple[str, Any, str]] = [
            ("image", PICTURE[None], "UINT8"), ("state", np.zeros((1, 4), np.float32), "FP32"),
            ("instruction", np.array([[b"open the door"]], object), "BYTES"),
        ]  # fmt: skip
        values += [] if seed is None else [("seed", np.array([[seed]]), "INT64")]
        inputs = [triton.InferInput(name, value.shape, kind).set_data_from_numpy(value) for name, value, kind in values]
        with closing(triton.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60)) as client:
            found = client.infer("demo-metaworld-v2", inputs, parameters={"episode_id": "e"} | said).get_response()
        return json.loads(found["parameters"]["reflex"])[0]["rtc"]

    return ask


@pytest.mark.parametrize("by", [by_act, by_openpi, by_groot, by_oip])
def test_w54_the_delay_is_said_or_estimated_and_with_a_seed_there_is_none(by: Callable[[Server], Ask]) -> None:
    with Server(POLICY, "--rtc", "--inject-latency-ms", "8", "--gr00t", "tcp://127.0.0.1:0") as server:
        ask = by(server)
        assert ask(seed=1) is None
        found = [ask(executed=4, **said) for said in ({"seed": 1}, {"seed": 1, "delay": 3}, {"delay": 2})]
        assert [told["delay"] for told in found] == [told["frozen"] for told in found] == [0, 3, 2]
        assert {told["executed"] for told in found} == {4}
        if by is not by_act:
            assert ask(executed=4)["delay"] > 0  # it took five steps of 8 ms
