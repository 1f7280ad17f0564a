"""LeRobot's asynchronous inference over gRPC: a robot sends what it sees, and asks for actions in another call.

    Ready                    begins a new episode of this robot only
    SendPolicyInstructions   describes observations; compared with the export, nothing is loaded
    SendObservations         sends one observation; it replaces an older one that still waits
    GetActions               waits for an observation and returns its actions; empty data after 2 s without one

A robot is a connection. See `lerobot_pickle` for what its messages hold.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from reflex_runtime.core.errors import Closed, ReflexError
from reflex_runtime.core.request import Priority
from reflex_runtime.policies.serving.handler import RequestHandler
from reflex_runtime.policies.serving.pending import PendingRequest
from reflex_runtime.policies.serving.question import ActAnswer, Question
from reflex_runtime.policies.serving.wire_names import LEROBOT
from reflex_runtime.policies.wires import messages_pb2 as messages
from reflex_runtime.policies.wires.lerobot_pickle import OBSERVATION, SETUP, read_pickle, write_actions
from reflex_runtime.policies.wires.observations import Reading
from reflex_runtime.policies.wires.openpi import Episodes
from reflex_runtime.web.bodies import Bodies
from reflex_runtime.web.errors import ClientError, Conflict, Reported
from reflex_runtime.web.fields import invalid
from reflex_runtime.web.grpc_listener import GrpcCall, parse, serialize
from reflex_runtime.web.json import printable

SERVICE: Final = "transport.AsyncInference"
WAIT: Final = 2.0  # seconds that GetActions waits for an observation
STALE: Final = 10.0  # seconds after which an observation without a GetActions is dropped
MAX_ROBOTS: Final = 4096  # beyond it the least recently used one is forgotten
MAX_MOTORS: Final = 1024  # of a robot; a small pickle can repeat one list in every feature
MAX_NAME: Final = 256  # characters of a motor's name
RATE_HZ: Final = 30.0  # of actions, if the export gives no rate
TYPES: Final = ("act", "smolvla", "diffusion", "tdmpc", "vqbet", "pi0", "pi0_fast", "pi05", "groot")
_BEGIN, _MIDDLE, _END = 1, 2, 3
_STATE, _IMAGES = "observation.state", "observation.images."


class LerobotSetup:
    """Describes the observations of a robot: motors in the order of the state, and cameras."""

    def __init__(self, sent: Mapping[str, Any]) -> None:
        features = _of(sent, "lerobot_features", dict)
        rename = _of(sent, "rename_map", dict) if "rename_map" in sent else {}
        if not all(isinstance(name, str) for name in rename.values()):
            raise invalid("rename_map", "rename_map: must be texts")
        self.policy_type: str = _of(sent, "policy_type", str)
        self.checkpoint = sent.get("pretrained_name_or_path")  # may name a policy that is served
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
        """Raises 422 for a difference from the export."""
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
        """An observation under the names of its features; 422 for what is missing."""
        found: dict[str, Any] = {}
        for name, motors in self.motors.items():
            found[name] = np.array([_number(raw, motor) for motor in motors], np.float64)
        for name, camera in self.cameras.items():
            picture = _seen(raw, camera)
            if not isinstance(picture, np.ndarray):
                raise invalid(printable(camera), printable(f"{camera}: must be an array"))
            found[name] = picture
        return found | ({"task": _of(raw, "task", str)} if "task" in raw else {})


class LerobotSeen:
    """An observation that waits for GetActions. held: bytes counted in `Bodies`. started: when it arrived."""

    def __init__(self, question: Question, steps: int, timestamp: float, timestep: int, call: GrpcCall) -> None:
        self.question, self.steps, self.timestamp, self.timestep = question, steps, timestamp, timestep
        self.started = call.started
        self.held = 0


class LerobotRobot:
    """One connection, with its newest observation that still waits for GetActions."""

    def __init__(self, name: str, bodies: Bodies, handler: RequestHandler) -> None:
        self.name, self.episodes = name, Episodes(name)
        self.setup: LerobotSetup | None = None
        self.handler = handler  # for the policy that its instructions name
        self._bodies = bodies
        self._seen: LerobotSeen | None = None
        self._came = asyncio.Event()
        self._stale: asyncio.TimerHandle | None = None
        self._ends = False

    def put(self, seen: LerobotSeen, call: GrpcCall) -> None:
        """Store an observation in place of an older one, and take over the counted bytes of its call."""
        self.drop()
        seen.held, call.held = call.held, 0
        self._seen = seen
        self._came.set()
        self._stale = asyncio.get_running_loop().call_later(STALE, self.drop)

    def take(self) -> LerobotSeen | None:
        """Remove and return the waiting observation; the caller releases its bytes."""
        seen, self._seen = self._seen, None
        if not self._ends:
            self._came.clear()
        if self._stale is not None:
            self._stale.cancel()
        return seen

    def drop(self) -> None:
        """Remove the waiting observation and release its bytes."""
        seen = self.take()
        if seen is not None:
            self._bodies.release(seen)

    def end(self) -> None:
        """The server shuts down: wake `next`."""
        self._ends = True
        self._came.set()

    async def next(self) -> LerobotSeen | None:
        """Wait for the newest observation; None after `WAIT` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT):
                while self._seen is None:
                    if self._ends:
                        raise Closed("the server is shutting down", retry_after=1.0)
                    await self._came.wait()
        return self.take()


class LerobotService:
    """The four calls, for all robots of a listener."""

    def __init__(self, handler: RequestHandler, bodies: Bodies) -> None:
        self._handler, self._bodies = handler, bodies
        self._robots: OrderedDict[str, LerobotRobot] = OrderedDict()
        self.methods = {
            "Ready": self.ready,
            "SendPolicyInstructions": self.instruct,
            "GetActions": self.actions,
        }
        self.streams = {"SendObservations": self.observe}

    def failed(self, call: GrpcCall, error: ReflexError) -> None:
        """Count the error of a call."""
        self._handler.refused(PendingRequest(LEROBOT, call.id, call.peer, call.started, call), error)

    def end(self) -> None:
        """The server shuts down: answer the calls that wait for an observation."""
        for robot in self._robots.values():
            robot.end()

    async def ready(self, call: GrpcCall, data: bytes) -> bytes:
        robot = self._robot(call)
        robot.episodes.reset()
        robot.drop()
        return b""

    async def instruct(self, call: GrpcCall, data: bytes) -> bytes:
        """Wait until the policy is ready, then compare the setup with it."""
        sent = read_pickle(parse(messages.Pickle, data).data, SETUP)
        setup = LerobotSetup(sent)
        await self._handler.runtime.wait_started()
        self._handler.runtime.need_policy()
        named = isinstance(setup.checkpoint, str) and setup.checkpoint in self._handler.runtime.policies
        handler = self._handler.one(setup.checkpoint if named else None)
        setup.check(handler.reading(LEROBOT))
        robot = self._robot(call)
        robot.setup, robot.handler = setup, handler
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
        step = 1.0 / (robot.handler.served.spec.embodiment.control_rate_hz or RATE_HZ)
        pickled = write_actions(answer.actions[: seen.steps], seen.timestamp, seen.timestep, step)
        return serialize(messages.Pickle(data=pickled))

    def _question(self, robot: LerobotRobot, setup: LerobotSetup, sent: Mapping[str, Any]) -> Question:
        seen = setup.observation(_of(sent, "observation", dict))
        images, state, instruction = robot.handler.reading(LEROBOT).read(seen)
        return Question(
            images=images,
            state=state,
            instruction=instruction,
            robot_id=robot.name,
            episode_id=robot.episodes.of(None, instruction),
            priority=Priority.URGENT if sent.get("must_go") is True else Priority.DEFAULT,
        )

    async def _ask(self, call: GrpcCall, robot: LerobotRobot, seen: LerobotSeen) -> ActAnswer:
        pending = PendingRequest(LEROBOT, call.id, robot.name, seen.started, call)
        try:
            with robot.handler.admit(pending):
                return await robot.handler.infer(pending, seen.question)
        except ReflexError as error:
            raise Reported(error, pending.request_id) from None

    def _robot(self, call: GrpcCall) -> LerobotRobot:
        """The robot of a connection. Named after its first call, because ports repeat."""
        robot = self._robots.get(call.peer)
        if robot is None:
            robot = self._robots[call.peer] = LerobotRobot(f"lerobot-{call.id}", self._bodies, self._handler)
            if len(self._robots) > MAX_ROBOTS:
                self._robots.popitem(last=False)[1].drop()
        self._robots.move_to_end(call.peer)
        return robot


async def _joined(parts: AsyncIterator[bytes]) -> bytes:
    """Join the parts of a message, from BEGIN to END."""
    found: list[bytes] = []
    async for sent in parts:
        part = parse(messages.ObservationPart, sent)
        state = part.transfer_state
        if state not in (_BEGIN, _MIDDLE, _END):
            raise ClientError(f"transfer_state: {state} is not one of {_BEGIN}, {_MIDDLE}, {_END}")
        found = [] if state == _BEGIN else found
        found.append(part.data)
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
