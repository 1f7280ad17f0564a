"""LeRobot's asynchronous inference over gRPC: a robot sends observations in one call and gets actions in another.

    Ready                    begins a new episode of this robot only
    SendPolicyInstructions   describes observations; compared with the export, nothing is loaded
    SendObservations         sends one observation; it replaces an older one that still waits
    GetActions               waits for an observation and returns its actions; empty data after 2 s without one

Messages name neither robots nor observations, so a connection counts as one robot, and a second robot on it is refused.
Clients of one process share a connection if their channels have equal options, and so do clients behind a proxy that
pools connections; with the metadata `x-reflex-robot` each has a name.

A client sends its instructions once. If its connection breaks, gRPC makes another, and the client continues without
instructions: then those of earlier robots with the same names hold, else the export's motors and cameras. The order of
motors in an observation need not be that of the state: HopeJR's arm reads its shoulder last, and names it first.

Messages hold pickles. Nothing that they name is imported or called. Answers are written by opcodes, without torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import pickletools
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import Closed, ReflexError
from reflex_runtime.robots.policy.episodes import Lru
from reflex_runtime.robots.policy.spec import PolicySpec
from reflex_runtime.robots.serving.handler import PendingRequest, RequestHandler
from reflex_runtime.robots.serving.question import LARGEST, LEROBOT, ObservationReader, Question
from reflex_runtime.robots.wires.common import Episodes
from reflex_runtime.web import messages
from reflex_runtime.web.app import App
from reflex_runtime.web.arrays import array_in
from reflex_runtime.web.errors import ClientError, Conflict, InvalidRequest
from reflex_runtime.web.fields import check_id, invalid_field, invalid_input, printable
from reflex_runtime.web.grpc_listener import GrpcCall, GrpcListener, parse, serialize
from reflex_runtime.web.request import Bodies

log = logging.getLogger("reflex.server")

SERVICE: Final = "transport.AsyncInference"
HELPERS: Final = "lerobot.async_inference.helpers"
SETUP, OBSERVATION = "RemotePolicyConfig", "TimedObservation"
STATE, IMAGES, TASK = "observation.state", "observation.images.", "task"
BEGIN, MIDDLE, END = 1, 2, 3
PART: Final = 2 << 20  # bytes of an observation in one message

WAIT: Final = 2.0  # seconds that GetActions waits for an observation
STALE: Final = 10.0  # seconds without a GetActions after which an observation is dropped
LEFT: Final = 10.0  # seconds of silence after which another robot may use the connection
PAUSE: Final = 1.0  # seconds until a refusal of GetActions is sent: clients repeat it at once
NAME: Final = b"x-reflex-robot"
MAX_SETUPS: Final = 64  # kinds of robots remembered
APART: Final = (
    "run each client in a process of its own, or give its channel the option grpc.use_local_subchannel_pool=1, or send"
    " the metadata x-reflex-robot: NAME with every call"
)
MAX_ROBOTS: Final = 4096  # beyond it the least recently used one is forgotten
MAX_MOTORS: Final = 1024  # of a robot; a small pickle can refer to one list in every feature
MAX_NAME: Final = 256  # characters of a motor's name
RATE_HZ: Final = 30.0  # of actions, if the export gives no rate
TYPES: Final = ("act", "smolvla", "diffusion", "tdmpc", "vqbet", "pi0", "pi0_fast", "pi05", "groot")
MOTOR: Final = ".pos"
MAX_EXECUTED: Final = 1_000_000  # as in `Question`

MAX_OPCODES: Final = 5000  # of a pickle
VIEWED: Final = 1 << 14  # bytes from which a part is not copied
_AS_PYTHON_READS: Final = (
    "\x80\x95.N\x88\x89)]}(t\x85\x86\x87aeqr\x94hjc\x93"  # PROTO … STACK_GLOBAL: structure, memo and names
    "JKM\x8aGX\x8c\x8dCB\x8e"  # numbers, texts and bytes
)
"""Codes of the opcodes from protocol 2 on that Python's methods read; `_PickleReader` has methods for the others."""
_GLOBALS: Final = {
    (HELPERS, SETUP), (HELPERS, OBSERVATION), ("numpy", "ndarray"), ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),  # of numpy 1 and 2
}  # fmt: skip


T = TypeVar("T", bound=msgspec.Struct)


class LerobotFeature(msgspec.Struct):
    """A part of observations: a picture, or named numbers."""

    dtype: str
    names: Any = None


class LerobotSetup(msgspec.Struct):
    """Describes the observations of a robot.

    motors: in the order of the state, by feature. cameras: the robot's names, by feature. policy: the one that its
    checkpoint names, if that is served.
    """

    policy_type: str
    actions_per_chunk: Annotated[int, msgspec.Meta(ge=1)]
    lerobot_features: dict[str, LerobotFeature]
    rename_map: dict[str, str] = {}
    pretrained_name_or_path: Any = ""
    motors: dict[str, list[str]] = {}
    cameras: dict[str, str] = {}
    policy: str | None = None

    def __post_init__(self) -> None:
        self.motors, self.cameras, self.policy = {}, {}, None
        for name, feature in self.lerobot_features.items():
            own, names = self.rename_map.get(name, name), feature.names
            if feature.dtype in ("image", "video"):
                self.cameras[own] = name.removeprefix(IMAGES)
            elif not isinstance(names, (list, tuple)) or not all(isinstance(motor, str) for motor in names):
                raise invalid_input(f"lerobot_features.{name}", "names must be a list of texts")
            else:
                self.motors[own] = list(names)
                count = sum(map(len, self.motors.values()))
                if count > MAX_MOTORS or any(len(motor) > MAX_NAME for motor in names):
                    why = f"at most {MAX_MOTORS} motors may be named, each in {MAX_NAME} characters"
                    raise invalid_input("lerobot_features", why)
        self.lerobot_features = {}  # a setup is kept, and these may hold the whole message

    @property
    def names(self) -> frozenset[str]:
        """The names in an observation, without the task."""
        return frozenset(name for motors in self.motors.values() for name in motors).union(self.cameras.values())

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is equal for robots of one kind; the length of chunks may differ."""
        return self.policy, self.motors, self.cameras

    def check(self, reading: ObservationReader) -> None:
        """Raise the 422 if the setup differs from the export."""
        spec = reading.spec
        if spec.model_type in TYPES and self.policy_type != spec.model_type:
            raise invalid_input("policy_type", f"is {self.policy_type}, the export has {spec.model_type}")
        known, motors = spec.embodiment.state_names, self.motors.get(STATE, [])
        if known is not None and _plain(motors) != _plain(known):
            why = f"the motors are {', '.join(motors)}; the export has {', '.join(known)}"
            raise invalid_input("lerobot_features", why)
        pictures = dict.fromkeys(self.cameras, np.zeros((1, 1, 3), np.uint8))
        reading.read({name: np.zeros(len(names)) for name, names in self.motors.items()} | pictures | {"task": ""})

    def observation(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """An observation by the names of its features; 422 if one is missing."""
        found: dict[str, Any] = {}
        for name, motors in self.motors.items():
            found[name] = np.array([_number(raw, motor) for motor in motors], np.float64)
        for name, camera in self.cameras.items():
            picture = _seen(raw, camera)
            if not isinstance(picture, np.ndarray):
                raise invalid_input(camera, "must be an array")
            found[name] = picture
        if not isinstance(raw.get(TASK, ""), str):
            raise invalid_input(TASK, "must be a text")
        return found | ({TASK: raw[TASK]} if TASK in raw else {})


class LerobotObservation(msgspec.Struct):
    """One observation. Set while it waits for GetActions: question; steps: actions that its robot takes of a chunk;
    started: when it arrived; held: its bytes that `Bodies` counts."""

    timestamp: float
    timestep: Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]
    observation: dict[str, Any]
    must_go: Any = False
    question: Any = None
    steps: Any = 0
    started: Any = 0.0
    held: Any = 0


def read(kind: type[T], sent: Mapping[str, Any]) -> T:
    """The fields of a message; the 422 names a wrong one."""
    try:
        return msgspec.convert(sent, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
    except (AttributeError, OverflowError, UnicodeEncodeError):  # msgspec's own: of an array or a lone surrogate
        raise ClientError("a field has an array, or text that is not Unicode, where another type is expected") from None


class LerobotRobot:
    """One robot, with its newest observation while that waits for GetActions. named: whether metadata give its name."""

    def __init__(self, name: str, named: bool, bodies: Bodies) -> None:
        self.name, self.named, self.episodes = name, named, Episodes(name)
        self.setup: LerobotSetup | None = None
        self.shared = False  # two robots have been seen on its connection
        self._bodies = bodies
        self._seen: LerobotObservation | None = None
        self._came = asyncio.Event()
        self._stale: asyncio.TimerHandle | None = None
        self._ends = False
        # The GetActions that waits: its connection, and a future that is set at its end: True if the client gave it up.
        self._turn: tuple[str, asyncio.Future[bool]] | None = None
        self._used = 0.0  # time of its last call
        self._timestep = 0  # of its last observation
        self._answered: tuple[str | None, int] | None = None  # episode and timestep of its last chunk

    @property
    def left(self) -> bool:
        """Whether it has been silent for `LEFT` seconds since its last observation or GetActions."""
        return bool(self._used) and self._turn is None and time.monotonic() - self._used > LEFT

    def check_alone(self) -> None:
        """Raise if its connection is shared."""
        if self.shared:
            raise Conflict(f"two robots use this connection, and their calls cannot be told apart: {APART}")

    def at(self, timestep: int) -> None:
        """Note the timestep of an observation. A smaller one than before begins a new episode."""
        self._used = time.monotonic()
        if timestep < self._timestep:
            self.episodes.reset()
        self._timestep = timestep

    def executed(self, seen: LerobotObservation) -> int | None:
        """The number of executed actions of the episode's last chunk, by the timesteps."""
        if self._answered is None or self._answered[0] != seen.question.episode_id:
            return None
        return min(max(0, seen.timestep - self._answered[1]), MAX_EXECUTED)

    def answered(self, seen: LerobotObservation) -> None:
        self._answered = seen.question.episode_id, seen.timestep

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[None]:
        """The turn of one GetActions. A robot sends one at a time, unless it gave up the last or lost its connection:
        two that wait on one connection come from two robots."""
        while self._turn is not None:
            other, ends = self._turn
            await asyncio.wait([ends], timeout=WAIT)
            if other == peer and not (ends.done() and ends.result()):
                self.shared = True
                self.check_alone()
        end: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._turn, self._used, gone = (peer, end), time.monotonic(), False
        try:
            yield
        except asyncio.CancelledError:
            gone = True
            raise
        finally:
            self._turn, self._used = None, time.monotonic()
            end.set_result(gone)

    def put(self, seen: LerobotObservation) -> None:
        """Store an observation in place of an older one."""
        self.drop()
        self._seen = seen
        self._came.set()
        self._stale = asyncio.get_running_loop().call_later(STALE, self.drop)

    def take(self) -> LerobotObservation | None:
        """Remove and return the waiting observation; the caller releases its bytes."""
        seen, self._seen = self._seen, None
        if self._stale is not None:
            self._stale.cancel()
        return seen

    def drop(self) -> None:
        """Remove the waiting observation and release its bytes."""
        seen = self.take()
        if seen is not None:
            self._bodies.release(seen)

    def end(self) -> None:
        """End the wait in `next`: the server shuts down."""
        self._ends = True
        self._came.set()

    async def next(self) -> LerobotObservation | None:
        """Wait for the newest observation; None after `WAIT` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT):
                while self._seen is None:
                    if self._ends:
                        raise Closed("the server is shutting down", retry_after=1.0)
                    self._came.clear()
                    await self._came.wait()
        return self.take()


def listener(app: App, handler: RequestHandler) -> GrpcListener:
    service = LerobotService(handler, app.bodies)
    made = GrpcListener(app, "--lerobot", handler.config.lerobot, handler.config)
    made.serve(SERVICE, service.methods, service.streams, service.failed)
    handler.runtime.on_drain.append(service.end)
    return made


class LerobotService:
    """The four calls, for all robots of a listener."""

    def __init__(self, handler: RequestHandler, bodies: Bodies) -> None:
        self._handler, self._bodies = handler, bodies
        self._robots: Lru[tuple[bool, str], LerobotRobot] = Lru(MAX_ROBOTS, LerobotRobot.drop)
        # By the names in observations: the setup with the shortest chunks; None if two kinds of robots have them.
        self._setups: Lru[frozenset[str], LerobotSetup | None] = Lru(MAX_SETUPS)
        self.methods = {"Ready": self.ready, "SendPolicyInstructions": self.instruct, "GetActions": self.actions}
        self.streams = {"SendObservations": self.observe}

    def failed(self, call: GrpcCall, error: ReflexError) -> None:
        """Count the error of a call."""
        self._handler.refused(PendingRequest(LEROBOT, call.request_id, call.client, call.started, call), error)

    def end(self) -> None:
        """Answer the calls that wait for an observation: the server shuts down."""
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
        setup = read(LerobotSetup, sent)
        await self._handler.runtime.wait_started()
        self._handler.runtime.need_loaded()
        checkpoint = setup.pretrained_name_or_path
        if isinstance(checkpoint, str) and checkpoint in self._handler.runtime.policies:
            setup.policy = checkpoint
        reading = self._handler.one(setup.policy).reading(LEROBOT)
        setup.check(reading)
        if reading.spec.embodiment.state_names is None and STATE in setup.motors and setup.names not in self._setups:
            log.warning(
                "the export names no motors: after a restart of this server robots are refused until their clients "
                'start again. In its embodiment.json: "state_names": %s', json.dumps(setup.motors[STATE]),
            )  # fmt: skip
        robot = self._robot(call)
        if robot.setup is not None and robot.left:
            robot.drop()
            del self._robots[self._key(call)]
            robot = self._robot(call)
        if robot.setup is not None and not robot.named:
            raise Conflict(f"another robot was set up on this connection, and answers could not be told apart: {APART}")
        robot.setup = setup
        known = self._setups.get(setup.names, setup)
        alike = known is not None and known.kind == setup.kind
        self._setups[setup.names] = min(known, setup, key=lambda one: one.actions_per_chunk) if alike else None
        return b""

    async def observe(self, call: GrpcCall, parts: AsyncIterator[bytes]) -> bytes:
        seen = read(LerobotObservation, read_pickle(await _joined(parts), OBSERVATION))
        robot = self._robot(call)
        robot.check_alone()
        if robot.setup is None:
            robot.setup = self._setup_of(seen.observation)
        robot.at(seen.timestep)
        seen.question, seen.steps = self._question(robot, robot.setup, seen), robot.setup.actions_per_chunk
        seen.started, seen.held, seen.observation = call.started, call.held, {}
        call.held = 0
        robot.put(seen)
        return b""

    async def actions(self, call: GrpcCall, data: bytes) -> bytes:
        robot = self._robot(call)
        if robot.shared:
            await asyncio.sleep(PAUSE)
        robot.check_alone()
        async with robot.turn(call.client):
            seen = await robot.next()
            if seen is None:
                return b""
            try:
                assert robot.setup is not None
                handler = self._handler.one(robot.setup.policy)
                pending = PendingRequest(LEROBOT, call.request_id, robot.name, seen.started, call)
                seen.question.executed = robot.executed(seen)
                answer = await handler.infer_row(pending, 0, seen.question)
                robot.answered(seen)
            finally:
                self._bodies.release(seen)
        step = 1.0 / (handler.served.spec.embodiment.control_rate_hz or RATE_HZ)
        pickled = write_actions(answer.actions[: seen.steps], seen.timestamp, seen.timestep, step)
        return serialize(messages.Pickle(data=pickled))

    def _setup_of(self, seen: Mapping[str, Any]) -> LerobotSetup:
        """The setup for an observation that came without one: that of robots with the same names, else the export's."""
        missing = "SendPolicyInstructions, which describes observations, has not come on this connection"
        names = frozenset(seen.keys() - {TASK})
        if names in self._setups:
            if (known := self._setups[names]) is None:
                raise Conflict(f"{missing}, and robots of two kinds have these names: start the client again")
            return known
        try:
            reading = self._handler.one(None).reading(LEROBOT)
            setup = read(LerobotSetup, _instructions(reading.spec, seen))
            setup.check(reading)
        except InvalidRequest as error:
            raise Conflict(f"{missing}; without it: {error.message}. Start the client again") from None
        return setup

    def _question(self, robot: LerobotRobot, setup: LerobotSetup, seen: LerobotObservation) -> Question:
        reading = self._handler.one(setup.policy).reading(LEROBOT)
        images, state, instruction = reading.read(setup.observation(seen.observation))
        return Question(
            images=images,
            state=state,
            instruction=instruction,
            robot_id=robot.name,
            episode_id=robot.episodes.of(None, instruction),
            priority="urgent" if seen.must_go is True else "default",
        )

    def _key(self, call: GrpcCall) -> tuple[bool, str]:
        """(whether metadata name the robot of a call, that name or the connection)."""
        name = call.headers.get(NAME)
        if name is None:
            return False, call.client
        robot = name.decode("utf-8", "replace")
        check_id(NAME.decode(), robot)
        return True, robot

    def _robot(self, call: GrpcCall) -> LerobotRobot:
        """The robot of a call. Without a name it is named after its first call, because ports are reused."""
        named, key = place = self._key(call)
        return self._robots.use(
            place, lambda: LerobotRobot(key if named else f"lerobot-{call.request_id}", named, self._bodies)
        )


def _instructions(spec: PolicySpec, seen: Mapping[str, Any]) -> dict[str, Any]:
    """The instructions that an observation implies: its motors in the order of the export, and its cameras."""
    motors = {name.removesuffix(MOTOR): name for name, value in seen.items() if type(value) in (int, float)}
    known = _plain(spec.embodiment.state_names or ())
    if spec.takes_state and set(known) != set(motors):
        there = f"the export has the motors {', '.join(known)}"
        why = there if known else "the export names no motors (state_names in its embodiment.json)"
        raise invalid_input("observation", why)
    pictures = [name for name, value in seen.items() if isinstance(value, np.ndarray)]
    features: dict[str, Any] = {IMAGES + name: {"dtype": "image"} for name in pictures}
    if spec.takes_state:
        features[STATE] = {"dtype": "float32", "names": [motors[name] for name in known]}
    return {"policy_type": spec.model_type, "actions_per_chunk": spec.chunk_size, "lerobot_features": features}


async def _joined(parts: AsyncIterator[bytes]) -> bytes:
    """Join the parts of a message, from BEGIN to END."""
    found: list[bytes] = []
    async for sent in parts:
        part = parse(messages.ObservationPart, sent)
        state = part.transfer_state
        if state not in (BEGIN, MIDDLE, END):
            raise ClientError(f"transfer_state: {state} is not one of {BEGIN}, {MIDDLE}, {END}")
        found = [] if state == BEGIN else found
        found.append(part.data)
        if state == END:
            return b"".join(found)
    raise ClientError("the observation breaks off before its last part")


def _seen(raw: Mapping[str, Any], name: str) -> Any:
    if name not in raw:
        there = ", ".join(map(str, list(raw)[:50])) or "nothing"
        raise invalid_input(name, f"missing; came: {there}")
    return raw[name]


def _number(raw: Mapping[str, Any], name: str) -> float:
    value = _seen(raw, name)
    if type(value) not in (int, float) or abs(value) > LARGEST:
        raise invalid_input(name, f"must be a number, at most {LARGEST:g}")
    return float(value)


def _plain(names: Any) -> list[str]:
    return [name.removesuffix(MOTOR) for name in names]


# -- pickles -----------------------------------------------------------------------------------------------------------


def read_pickle(data: bytes, kind: str) -> dict[str, Any]:
    """The fields of an object of this kind, with the arrays and numbers among them and in its observation; ClientError
    if the pickle holds anything else."""
    try:
        found = _PickleReader(data).load()
        if isinstance(found, _Part) and found.name == kind and isinstance(found.state, dict):
            fields = {name: _value(value) for name, value in found.state.items()}
            if isinstance(seen := fields.get("observation"), dict):
                fields["observation"] = {name: _value(value) for name, value in seen.items()}
            return fields
    except ClientError:
        raise
    except Exception:  # a broken pickle raises whatever its opcodes meet
        wrong = "the message is no pickle of LeRobot's: it breaks off, or has something else where an array is expected"
        raise ClientError(wrong) from None
    raise ClientError(f"the message must be a pickled {kind}")


class _Global(NamedTuple):
    """A class or function that a pickle names."""

    name: str


class _Part:
    """An object that a pickle describes: name of its class or function, arguments, and the state from BUILD."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, called: Any, arguments: Any) -> None:
        if not isinstance(called, _Global) or not isinstance(arguments, tuple):
            raise TypeError
        self.name, self.arguments, self.state = called.name, arguments, cast(Any, None)


class _Opcodes(dict[int, Any]):
    """The function that reads each opcode. ClientError after `MAX_OPCODES` look-ups."""

    left = MAX_OPCODES

    def __getitem__(self, code: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ClientError(f"the pickle has over {MAX_OPCODES} opcodes: send arrays as arrays")
        return super().__getitem__(code)


class _Message(BytesIO):
    """The bytes of a pickle as a file. Large parts, such as pictures, are read as views."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._view = memoryview(data)

    def read(self, size: int | None = -1, /) -> Any:
        if size is None or size < VIEWED:
            return super().read(size)
        at = self.tell()
        self.seek(at + size)
        return self._view[at : at + size]


class _PickleReader(pickle._Unpickler):
    """Python's unpickler (the one in Python) with few opcodes. It makes numbers, texts, lists, maps and `_Part`s, and
    neither imports nor calls what a pickle names. (The one in C would set attributes, and hash nested tuples.)

    Lists and maps may share parts, or contain themselves: 60 lists, each with the one before twice, have 2^60 parts. So
    code that reads a value looks for fields of known types, and never walks through all of it.
    """

    stack: list[Any]

    def __init__(self, data: bytes) -> None:
        super().__init__(_Message(data))
        self.dispatch = _Opcodes(self._READS)  # type: ignore[misc]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise ClientError(printable(f"the pickle names {module[:80]}.{name[:80]}, which is never loaded"))
        return _Global(name)

    def _call(self) -> None:
        """REDUCE and NEWOBJ."""
        arguments = self.stack.pop()
        self.stack[-1] = _Part(self.stack[-1], arguments)

    def _build(self) -> None:
        state = self.stack.pop()
        self.stack[-1].state = state  # AttributeError unless it is a `_Part`

    def _set_items(self, items: list[Any]) -> None:
        if not all(isinstance(key, str) for key in items[::2]):
            raise ClientError("the pickle holds a map whose keys are not texts")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    _READS: ClassVar[dict[int, Any]] = {
        **{ord(code): pickle._Unpickler.dispatch[ord(code)] for code in _AS_PYTHON_READS},
        **dict.fromkeys(b"R\x81", _call),
        ord("b"): _build,
        ord("s"): _set_item,
        ord("u"): lambda self: self._set_items(self.pop_mark()),
        0x96: pickle._Unpickler.dispatch[0x8E],  # BYTEARRAY8 as BINBYTES8: arrays are read-only
    }


def _value(part: Any) -> Any:
    """The array or number that a part describes; another value as it is."""
    if not isinstance(part, _Part):
        return part
    match part.name, part.arguments, part.state:
        case "_frombuffer", (data, dtype, shape, order), None:
            return _array(data, dtype, shape, order == "F")
        case "_reconstruct", _, (_, shape, dtype, fortran, data):
            return _array(data, dtype, shape, fortran is True)
        case "scalar", (dtype, data), None:
            number = _array(data, dtype, (), False)
            if number.dtype.kind in "biuf":
                return number.item()
    raise TypeError


def _array(data: Any, dtype: Any, shape: Any, fortran: bool) -> NDArray[Any]:
    """The array. dtype: the `_Part` of it: an argument has the name without the byte order, the state has the order."""
    if not isinstance(shape, tuple):  # a list of a long text would be eight times as large
        raise TypeError
    order = dtype.state[1] if dtype.state[1] in ("<", ">") else "|"
    turned = shape[::-1] if fortran else shape
    array = array_in(data, order + dtype.arguments[0], list(turned))
    return array.T if fortran else array


# -- the answer's pickle -----------------------------------------------------------------------------------------------

_ACTION: Final = f"c{HELPERS}\nTimedAction\nq\0".encode()  # the class, memoised as 0
_TENSOR: Final = b"ctorch\ntensor\nq\1"


def write_actions(actions: NDArray[np.floating[Any]], timestamp: float, timestep: int, seconds: float) -> bytes:
    """The pickle of a list of TimedActions. seconds: between two of them."""
    parts = [b"\x80\2", _ACTION, b"0", _TENSOR, b"0](" if len(actions) else b"0]"]
    for i, action in enumerate(np.asarray(actions, np.float64)):
        parts += [b"h\0", _float(timestamp + i * seconds), _whole(timestep + i), b"h\1]("]
        parts += [_float(float(value)) for value in action]
        parts.append(b"e\x85R\x87R")  # torch.tensor([…]), then TimedAction(timestamp, timestep, tensor)
    return b"".join((*parts, b"e." if len(actions) else b"."))


def _float(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def _whole(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


# -- a client without LeRobot's package, for `reflex probe` and the load generator -------------------------------------


def sent_by_robot(observed: Mapping[str, Any], policy_type: str) -> tuple[bytes, list[bytes]]:
    """The messages of a robot with this observation: its setup, and the observation in parts.

    observed: pictures, numbers and a text. Single numbers are motors of one state, in order; a vector is another state,
    whose motors get names.
    """
    features: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    for name, value in observed.items():
        plain = name.removeprefix(IMAGES).removeprefix("observation.")
        if isinstance(value, str):
            seen[TASK] = value
        elif value.ndim == 3:
            features[IMAGES + plain] = {"dtype": "image", "shape": value.shape, "names": None}
            seen[plain] = value
        else:
            own = [plain] if value.size == 1 else [f"{plain}.m{i}" for i in range(value.size)]
            state = STATE if value.size == 1 else f"observation.{plain}"
            features.setdefault(state, {"dtype": "float32", "names": []})["names"] += own
            seen |= dict(zip(own, value.reshape(-1).tolist(), strict=True))
    setup = {
        "policy_type": policy_type, "pretrained_name_or_path": "", "lerobot_features": features,
        "actions_per_chunk": 1000, "device": "cpu", "rename_map": {},
    }  # fmt: skip
    timed = _pickled(OBSERVATION, {"timestamp": 0.0, "timestep": 0, "observation": seen, "must_go": True})
    parts = []
    for at in range(0, len(timed), PART):
        place = END if at + PART >= len(timed) else BEGIN if at == 0 else MIDDLE
        part = messages.ObservationPart(transfer_state=place, data=timed[at : at + PART])
        parts.append(serialize(part))
    return serialize(messages.Pickle(data=_pickled(SETUP, setup))), parts


def shape_of(answer: bytes) -> tuple[int, ...]:
    """(actions, numbers of each) in an answer, () for none; one number from other servers. ValueError: broken."""
    try:
        data = messages.Pickle.FromString(answer).data
        count = Counter(opcode.name for opcode, _, _ in pickletools.genops(data)) if data else Counter()
    except Exception as error:  # of protobuf, or whatever a broken pickle's opcodes meet
        raise ValueError(f"no answer of LeRobot's: {error!r:.200}") from None
    if actions := count["TUPLE3"]:
        return actions, count["BINFLOAT"] // actions - 1
    return (count["NEWOBJ"],) if count["NEWOBJ"] else ()


def _pickled(name: str, fields: Mapping[str, Any]) -> bytes:
    """The pickle of an object of LeRobot's class `name` with these fields."""
    state = pickle.dumps(dict(fields), 3)
    return b"\x80\x03c" + f"{HELPERS}\n{name}\n".encode() + b")\x81" + state[2:-1] + b"b."
