"""What a client says is used or refused: fields that say where a robot is in its chunk, and how long it waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.http as triton

from reflex_runtime.demo import POLICY
from reflex_runtime.robots import Export
from reflex_runtime.robots.serving.question import ObservationReader
from reflex_runtime.robots.wires.groot import GrootObservation
from reflex_runtime.web.errors import InvalidRequest
from serving.exports import write_tiny
from serving.harness import Server
from serving.requests import observe, recorded

from . import test_openpi
from .callers import CALLERS, Refused
from .groot_clients import GrootRobot, port_of
from .lerobot_robot import Robot, features
from .test_lerobot import refused, serving, tensors

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


# -- instructions ------------------------------------------------------------------------------------------------------

READER = """
import numpy as np
from reflex_runtime.robots import PolicySpec, WholeModel

class Reader(WholeModel):
    def chunk(self, rows, noise):
        return np.stack([np.full((3, 2), len(row.instruction), np.float32) for row in rows])

def make(device):
    return Reader(PolicySpec(model_id="tiny", staged=False, takes_state=True, state_dim=2, takes_text=True,
                             takes_noise=False, chunk_size=3, action_dim=2))
"""


LISTENING = [word for options in {caller.options: None for caller in CALLERS.values()} for word in options]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A policy that answers the length of its instruction."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("reader")
        (root / "instruction_reader.py").write_text(READER)
        patch.chdir(root)
        yield root


def test_w55_without_an_instruction_the_default_is_used_and_an_empty_one_is_a_text(
    reader: Path, tmp_path: Path
) -> None:
    options = (*LISTENING, "--default-prompt", "ab", "--record", str(tmp_path))
    with Server("python:instruction_reader:make", *options) as server:
        for name, kind in CALLERS.items():
            caller = kind(server)
            for prompt, number in ((None, 2), ("", 0), ("c", 1), (None, 2)):
                caller.prompt = prompt
                assert np.allclose(caller.ask([0.1, 0.2]), number), (name, prompt)
            caller.leave()
        server.stop()
    assert [one.instruction for one in recorded(tmp_path)] == ["ab", "", "c", "ab"] * len(CALLERS)


def test_w55_without_a_default_a_missing_instruction_is_named_and_an_empty_one_is_used(reader: Path) -> None:
    with Server("python:instruction_reader:make", *LISTENING) as server:
        for name, kind in CALLERS.items():
            caller = kind(server)
            caller.prompt = None
            with pytest.raises(Refused, match="missing"):
                caller.ask([0.1, 0.2])
            caller.prompt = ""
            assert np.allclose(caller.ask([0.1, 0.2]), 0.0), name
            caller.leave()


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
def test_w56_two_robots_with_one_name_for_their_episodes_do_not_continue_each_others_chunks(
    by: Callable[[Server], Ask],
) -> None:
    with Server(POLICY, "--rtc", "--gr00t", "tcp://127.0.0.1:0") as server:
        ask = by(server)
        own = {"seed": 1, "executed": 2, "delay": 0}  # however long the robots take
        found = [ask(robot_id=name, **own) is not None for name in ("one", "two", "one", "two", "three")]
        assert found == [False, False, True, True, False]
        if by is by_openpi:  # a socket that names no robot is one
            assert [ask(seed=1) for _ in range(2)] == [None, None]


@pytest.mark.parametrize("by", [by_act, by_openpi, by_groot, by_oip])
def test_w54_the_delay_is_said_or_estimated_and_with_a_seed_there_is_none(by: Callable[[Server], Ask]) -> None:
    with Server(POLICY, "--rtc", "--inject-latency-ms", "8", "--gr00t", "tcp://127.0.0.1:0") as server:
        ask = partial(by(server), robot_id="arm")  # each asks on a connection of its own
        assert ask(seed=1) is None
        found = [ask(executed=4, **said) for said in ({"seed": 1}, {"seed": 1, "delay": 3}, {"delay": 2})]
        assert [told["delay"] for told in found] == [told["frozen"] for told in found] == [0, 3, 2]
        assert {told["executed"] for told in found} == {4}
        if by is not by_act:
            assert ask(executed=4)["delay"] > 0  # it took five steps of 8 ms


# -- what is not used is refused ---------------------------------------------------------------------------------------


def as_json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


NUMBERS = {"__numpy__": "AAAAAAAAAAAAAAAAAAAAAA==", "dtype": "<f8", "shape": [2]}
GROOT = {"state.all": NUMBERS}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/act?deadline_ms=5", as_json(state=[0, 0]), "query"),
        ("/act", as_json(state=NUMBERS, num_steps=10), "num_steps"),
        ("/act", as_json(state=NUMBERS, unnorm_key="fractal"), "unnorm_key"),
        ("/act", as_json(state=NUMBERS, unnorm_key=NUMBERS), "unnorm_key"),
        ("/act", as_json(observation=GROOT, nonsense=1), "nonsense"),
        ("/act", as_json(observation=GROOT, options={"nonsense": 1}), "options.nonsense"),
        ("/act", as_json(observation=GROOT, options={"deadline_ms": -1}), "deadline_ms"),
        ("/v2/models/tiny/infer", as_json(parameters={"nonsense": 1}), "nonsense"),
        ("/v2/models/tiny/infer", as_json(parameters={"sequence_id": 1, "sequence_start": 1}), "sequence_start"),
        ("/v2/models/tiny/infer?deadline_ms=5", as_json(), "query"),
    ],
)
def test_w54_over_http_what_is_said_and_not_used_is_refused(path: str, body: bytes, field: str, keyed: Server) -> None:
    if "/infer" in path:
        body = json.dumps({"inputs": [STATE_TENSOR]} | json.loads(body)).encode()
    answer = keyed.ask("POST", path, body)
    assert answer.status == 422, answer.body
    assert field in answer.json["message"]


STATE_TENSOR = {"name": "state", "datatype": "FP32", "shape": [1, 2], "data": [0, 0]}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A policy whose statistics have a name, for clients of OpenVLA."""
    wires = {"json-numpy": {"metadata": {"unnorm_key": "bridge_orig"}}}
    with Server(write_tiny(tmp_path_factory.mktemp("keyed") / "export", wires=wires), *GROOT_HERE) as server:
        yield server


GROOT_HERE = ("--gr00t", "tcp://127.0.0.1:0")


def test_w54_what_openvlas_and_groots_clients_say_over_http_is_used(keyed: Server) -> None:
    assert keyed.ask("POST", "/act", as_json(state=NUMBERS, unnorm_key="bridge_orig")).status == 200
    seeded = [keyed.ask("POST", "/act", as_json(observation=GROOT, options={"seed": 5})).json for _ in range(2)]
    assert seeded[0] == seeded[1]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"reset": 1}, "reset: must be true or false"),
        ({"endpoint": "kill"}, "endpoint: must be infer or reset"),
        ({"noise": np.zeros(4)}, "noise: is not read here: the server draws the noise"),
        ({"observation/inference_delay": 4}, "send delay, a number"),
        ({"image_mask": {"base": True}}, "image_mask: is not read here: leave out"),
    ],
)
def test_w54_openpis_words_are_used_or_refused(said: dict[str, Any], words: str, keyed: Server) -> None:
    with test_openpi.robot(keyed) as client:
        with pytest.raises(RuntimeError, match=words):
            client.infer(test_openpi.seen() | said)
        assert test_openpi.right(client.infer(test_openpi.seen() | {"endpoint": "infer", "reset": False}))


def test_w54_roboarenas_reset_is_known_in_every_dialect(tiny: Path, tmp_path: Path) -> None:
    with Server(tiny, "--record", str(tmp_path)) as server:
        with test_openpi.robot(server) as client:
            client.infer(test_openpi.seen())
            with pytest.raises(RuntimeError, match="reset successful"):  # to openpi's client any text is an error
                client.infer({"endpoint": "reset"})
            client.infer(test_openpi.seen())
        server.stop()
    first, second = recorded(tmp_path)
    assert second.episode_id == f"{first.episode_id}#1"


def test_w54_groots_options_and_names_are_used_or_refused(keyed: Server) -> None:
    seen = {"state": {"all": np.zeros((1, 1, 2))}}
    with GrootRobot(port_of(keyed)) as robot:
        for endpoint, data, field in [
            ("get_action", {"observation": seen, "options": {"nonsense": 1}}, "options.nonsense"),
            ("get_action", {"observation": seen, "seed": 1}, "seed"),
            ("reset", {"options": {"seed": 5}}, "options.seed"),
            ("reset", {"options": None, "env_id": 5}, "env_id"),
        ]:
            assert robot.call(endpoint, data)["error"].startswith(f"{field}: is not read here")
        assert robot.act(seen)[0]["actions"].shape == (1, 3, 2)


def test_w54_groots_frames_of_several_times_are_refused_by_a_policy_that_keeps_them_itself(tmp_path: Path) -> None:
    spec = Export.load(write_tiny(tmp_path / "export"))
    seen = GrootObservation({"state": {"all": np.zeros((1, 2, 2))}})
    assert len(seen.rows(ObservationReader(spec, None))) == 1
    with pytest.raises(InvalidRequest, match="has several steps: send the newest"):
        seen.rows(ObservationReader(replace(spec, observation_steps=2), None))


def test_w54_lerobots_features_without_names_are_refused(tiny: Path) -> None:
    named = {"observation.state": {"dtype": "float32", "shape": (2,), "names": {"motors": ["a", "b"]}}}
    with serving(tiny) as (_, robot), refused(grpc.StatusCode.INVALID_ARGUMENT) as error:
        robot(features=named)
    assert error["message"] == "lerobot_features.observation.state: names must be a list of texts"
