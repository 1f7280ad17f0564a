"""LeRobot's asynchronous inference over gRPC: a robot sends what it sees, and asks for actions in another call.

    Ready                    a new episode of this robot, and of no other
    SendPolicyInstructions   what its observations hold; checked against the export, and nothing is loaded
    SendObservations         one observation; the newest of a robot takes the place of one that waits
    GetActions               the actions for it, as soon as there is one; empty data after a while without

A robot is a connection. See `lerobot_pickle` for what its messages hold.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np

from reflex_runtime.core.errors import Closed, ReflexError
from reflex_runtime.core.request import Priority
from reflex_runtime.policies.serving.ask import LEROBOT, Ask
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.policies.serving.question import ActAnswer, Question
from reflex_runtime.policies.wires.lerobot_pickle import OBSERVATION, SETUP, PickledArray, read_pickle, write_actions
from reflex_runtime.policies.wires.observations import Reading, Readings
from reflex_runtime.policies.wires.openpi import Episodes
from reflex_runtime.policies.wires.protobuf import Field, Message, parse, serialize
from reflex_runtime.web.bodies import Bodies
from reflex_runtime.web.errors import ClientError, Conflict
from reflex_runtime.web.fields import invalid
from reflex_runtime.web.grpc_listener import GrpcCall, Reported, settle
from reflex_runtime.web.json import printable

SERVICE: Final = "transport.AsyncInference"
WAIT: Final = 2.0  # seconds that GetActions waits for an observation
STALE: Final = 10.0  # seconds after which an observation that nothing asked for is dropped
MAX_ROBOTS: Final = 4096  # that are kept: the one that was silent for longest is forgotten
MAX_MOTORS: Final = 1024  # of a robot: a pickle may name one list of them in every feature
MAX_NAME: Final = 256  # characters of a motor's name
RATE_HZ: Final = 30.0  # of actions, where the export does not say
TYPES: Final = ("act", "smolvla", "diffusion", "tdmpc", "vqbet", "pi0", "pi0_fast", "pi05", "groot")
_BEGIN, _MIDDLE, _END = 1, 2, 3
_BYTES: Final[Message] = {1: Field("data", "bytes")}
_PART: Final[Message] = {1: Field("state", "uint"), 2: Field("data", "bytes")}
_STATE, _IMAGES = "observation.state", "observation.images."


class LerobotSetup:
    """What the observations of a robot hold: motors in the order of the state, and cameras."""

    def __init__(self, sent: Mapping[str, Any]) -> None:
        features = _of(sent, "lerobot_features", dict)
        rename = _of(sent, "rename_map", dict) if "rename_map" in sent else {}
        if not all(isinstance(name, str) for name in rename.values()):
            raise invalid("rename_map", "rename_map: must be texts")
        self.policy_type: str = _of(sent, "policy_type", str)
        self.steps: int = _of(sent, "actions_per_chunk", int)
        if self.steps < 1:
            raise invalid("actions_per_chunk", "actions_per_chunk: must be at least 1")
        self.motors: dict[str, list[str]] = {}  # by the name of the feature
        self.cameras: dict[str, str] = {}  # the robot's name, by that of the feature
        for name, feature in features.items():
            own = rename.get(name, name)
            dtype, names = _of(feature, "dtype", str, name), feature.get("names")
            if dtype in ("image", "video"):
                self.cameras[own] = name.removeprefix(_IMAGES)
            elif isinstance(names, (list, tuple)) and all(isinstance(motor, str) for motor in names):
                self.motors[own] = _bounded(names, MAX_MOTORS - sum(map(len, self.motors.values())))

    def check(self, reading: Reading) -> None:
        """422 for what differs from the export."""
        spec = reading.spec
        if spec.model_type in TYPES and self.policy_type != spec.model_type:
            wrong = f"policy_type: is {self.policy_type}, the export has {spec.model_type}"
            raise invalid("policy_type", printable(wrong))
        known, motors = spec.embodiment.state_names, self.motors.get(_STATE, [])
        if known is not None and _plain(motors) != _plain(known):
            raise invalid(
                "lerobot_features",
                printable(f"lerobot_features: the motors are {', '.join(motors)}; the export has {', '.join(known)}"),
            )
        pictures = dict.fromkeys(self.cameras, np.zeros((1, 1, 3), np.uint8))
        reading.read({name: np.zeros(len(names)) for name, names in self.motors.items()} | pictures | {"task": ""})

    def observation(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """What a robot sees, by the names of the features; 422 for what is missing."""
        found: dict[str, Any] = {}
        for name, motors in self.motors.items():
            found[name] = np.array([_number(raw, motor) for motor in motors], np.float64)
        for name, camera in self.cameras.items():
            picture = _seen(raw, camera)
            if not isinstance(picture, PickledArray) or picture.array is None:
                raise invalid(printable(camera), printable(f"{camera}: must be an array"))
            found[name] = picture.array
        return found | ({"task": _of(raw, "task", str)} if "task" in raw else {})


class LerobotSeen:
    """An observation that waits for its robot to ask. held: bytes that are counted. started: when it came."""

    def __init__(self, question: Question, steps: int, timestamp: float, timestep: int, call: GrpcCall) -> None:
        self.question, self.steps, self.timestamp, self.timestep = question, steps, timestamp, timestep
        self.started = call.started
        self.held = 0


class LerobotRobot:
    """One connection. seen: the newest observation that was not asked for."""

    def __init__(self, name: str, bodies: Bodies) -> None:
        self.name, self.episodes = name, Episodes(name)
        self.setup: LerobotSetup | None = None
        self._bodies = bodies
        self._seen: LerobotSeen | None = None
        self._came = asyncio.Event()
        self._stale: asyncio.TimerHandle | None = None
        self._ends = False

    def put(self, seen: LerobotSeen, call: GrpcCall) -> None:
        """It takes the place of one that waits, and the bytes of its call."""
        self.drop()
        seen.held, call.held = call.held, 0
        self._seen = seen
        self._came.set()
        self._stale = asyncio.get_running_loop().call_later(STALE, self.drop)

    def take(self) -> LerobotSeen | None:
        """The observation that waits, with the bytes that are counted."""
        seen, self._seen = self._seen, None
        if not self._ends:
            self._came.clear()
        if self._stale is not None:
            self._stale.cancel()
        return seen

    def drop(self) -> None:
        """Forget the observation that waits."""
        seen = self.take()
        if seen is not None:
            self._bodies.release(seen)

    def end(self) -> None:
        """The server ends: nothing will come."""
        self._ends = True
        self._came.set()

    async def next(self) -> LerobotSeen | None:
        """The newest observation, once there is one; None after a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT):
                while self._seen is None:
                    if self._ends:
                        raise Closed("the server is shutting down", retry_after=1.0)
                    await self._came.wait()
        return self.take()


class LerobotService:
    """The four calls, for all robots of a listener."""

    def __init__(self, asking: Asking, bodies: Bodies) -> None:
        self._asking, self._bodies = asking, bodies
        self._readings = Readings(asking.served, LEROBOT)
        self._robots: OrderedDict[str, LerobotRobot] = OrderedDict()
        self.methods = {
            "Ready": self.ready,
            "SendPolicyInstructions": self.instruct,
            "GetActions": self.actions,
        }
        self.streams = {"SendObservations": self.observe}

    def failed(self, call: GrpcCall, error: ReflexError) -> None:
        """Count an error of a call."""
        self._asking.fail(Ask(LEROBOT, call.id, call.peer, lambda result: None, call.started), error)

    def end(self) -> None:
        """The server ends: calls that wait for an observation are answered."""
        for robot in self._robots.values():
            robot.end()

    async def ready(self, call: GrpcCall, data: bytes) -> bytes:
        robot = self._robot(call)
        robot.episodes.reset()
        robot.drop()
        return b""

    async def instruct(self, call: GrpcCall, data: bytes) -> bytes:
        """Waits until there is a policy, as clients do whose server loads one now."""
        sent = read_pickle(bytes(parse(data, _BYTES).get("data", b"")), SETUP)
        setup = LerobotSetup(sent)
        await self._started()
        self._asking.runtime.need_policy()
        setup.check(self._readings.now)
        self._robot(call).setup = setup
        return b""

    async def observe(self, call: GrpcCall, parts: AsyncIterator[bytes]) -> bytes:
        sent = read_pickle(await _joined(parts), OBSERVATION)
        robot = self._robot(call)
        if robot.setup is None:
            raise Conflict("SendPolicyInstructions has not come on this connection: it says what observations hold")
        timestep = _of(sent, "timestep", int)
        if not abs(timestep) < 2**62:
            raise invalid("timestep", "timestep: must be below 2^62")
        question = self._question(robot, robot.setup, sent)
        robot.put(LerobotSeen(question, robot.setup.steps, _of(sent, "timestamp", float), timestep, call), call)
        return b""

    async def actions(self, call: GrpcCall, data: bytes) -> bytes:
        robot = self._robot(call)
        seen = await robot.next()
        if seen is None:
            return b""
        try:
            answer = await self._ask(call, robot, seen)
        finally:
            self._bodies.release(seen)
        step = 1.0 / (self._readings.now.spec.embodiment.control_rate_hz or RATE_HZ)
        pickled = write_actions(answer.actions[: seen.steps], seen.timestamp, seen.timestep, step)
        return serialize({"data": pickled}, _BYTES)

    def _question(self, robot: LerobotRobot, setup: LerobotSetup, sent: Mapping[str, Any]) -> Question:
        seen = setup.observation(_of(sent, "observation", dict))
        images, state, instruction = self._readings.now.read(seen)
        return Question(
            images=images,
            state=state,
            instruction=instruction,
            robot_id=robot.name,
            episode_id=robot.episodes.of(None, instruction),
            priority=Priority.URGENT if sent.get("must_go") is True else Priority.DEFAULT,
        )

    async def _ask(self, call: GrpcCall, robot: LerobotRobot, seen: LerobotSeen) -> ActAnswer:
        settled: asyncio.Future[ActAnswer | ReflexError] = asyncio.get_running_loop().create_future()
        ask = Ask(LEROBOT, call.id, robot.name, partial(settle, settled), seen.started)
        if self._asking.enter(ask):
            self._asking.ask(ask, seen.question)
        try:
            result = await settled
        except asyncio.CancelledError:
            self._asking.leave(ask)
            raise
        if isinstance(result, ReflexError):
            raise Reported(result, ask.request_id)
        return result

    async def _started(self) -> None:
        started = asyncio.Event()
        self._asking.runtime.when_started(started.set)
        try:
            await started.wait()
        finally:
            self._asking.runtime.forget(started.set)

    def _robot(self, call: GrpcCall) -> LerobotRobot:
        """That of a connection. Ports come again, ids of calls do not: these name it."""
        robot = self._robots.get(call.peer)
        if robot is None:
            robot = self._robots[call.peer] = LerobotRobot(f"lerobot-{call.id}", self._bodies)
            if len(self._robots) > MAX_ROBOTS:
                self._robots.popitem(last=False)[1].drop()
        self._robots.move_to_end(call.peer)
        return robot


async def _joined(parts: AsyncIterator[bytes]) -> bytes:
    """The message that comes in parts: from the first, to the one that ends it."""
    found: list[memoryview] = []
    async for part in parts:
        values = parse(part, _PART)
        state = values.get("state", 0)
        if state not in (_BEGIN, _MIDDLE, _END):
            raise ClientError(f"transfer_state: {state} is not one of {_BEGIN}, {_MIDDLE}, {_END}")
        found = [] if state == _BEGIN else found
        found.append(values.get("data", memoryview(b"")))
        if state == _END:
            return b"".join(found)
    raise ClientError("the observation breaks off before its last part")


def _of(values: Any, name: str, kind: type[Any], where: str = "") -> Any:
    found = values.get(name) if isinstance(values, dict) else None
    if type(found) is int and kind is float:
        return float(found)
    if type(found) is not kind:
        raise invalid(name, printable(f"{where and where + '.'}{name}: must be a {kind.__name__}"))
    return found


def _bounded(motors: Sequence[str], most: int) -> list[str]:
    if len(motors) > most or any(len(motor) > MAX_NAME for motor in motors):
        wrong = f"lerobot_features: at most {MAX_MOTORS} motors may be named, each in {MAX_NAME} characters"
        raise invalid("lerobot_features", wrong)
    return list(motors)


def _seen(raw: Mapping[str, Any], name: str) -> Any:
    if name not in raw:
        there = ", ".join(map(str, list(raw)[:50])) or "nothing"
        raise invalid(printable(name), printable(f"{name}: missing; came: {there}"))
    return raw[name]


def _number(raw: Mapping[str, Any], name: str) -> float:
    value = _seen(raw, name)
    if type(value) not in (int, float):
        raise invalid(printable(name), printable(f"{name}: must be a number"))
    return float(value)


def _plain(names: Any) -> list[str]:
    return [name.removesuffix(".pos") for name in names]
