"""Questions to a policy and their answers, the same on every wire.

A wire decodes a `Question` and encodes an `ActAnswer`; `RequestHandler` does everything in between. `ObservationReader`
finds the cameras, state and instruction of a policy in the observations of a wire, where they have other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.observe.journal import episode_key
from reflex_runtime.robots.policy.spec import PolicySpec, WireMap
from reflex_runtime.web.arrays import array_in
from reflex_runtime.web.errors import ClientError, InvalidRequest
from reflex_runtime.web.fields import (
    ID,
    MAX_VALUES,
    Whole,
    check_id,
    invalid,
    invalid_input,
    is_unicode,
    printable,
    whole,
)
from reflex_runtime.web.pictures import JPEG_START, PNG_START

# Names of wires: keys of `WIRES` in `policy/spec.py`.
ACT: Final = "act"
OPENPI: Final = "openpi"
JSON_NUMPY: Final = "json-numpy"
OIP: Final = "oip"
VLA_EVAL: Final = "vla-eval"
GROOT: Final = "gr00t"
LEROBOT: Final = "lerobot"

MAX_INSTRUCTION = 16_384  # characters
MAX_TEXT: Final = 64 * 1024  # bytes of a text in a frame
LARGEST = 1e30  # absolute value of a number of the state; a larger one could overflow in the model's units


class Array(msgspec.Struct, forbid_unknown_fields=True):
    """An array as bytes: little-endian, C order."""

    dtype: str
    shape: Annotated[list[int], msgspec.Meta(max_length=4)]
    data: bytes


Image = str | bytes | Array | NDArray[Any]
"""A picture as it came: base64 text, PNG or JPEG bytes, or an array. It is decoded after the request is admitted."""

_MOST: Final = {"seed": 2**64 - 1, "executed": 1_000_000, "delay": 1_000_000}
MAX_DEADLINE_MS: Final = 600_000.0


def says(description: str, **checked: Any) -> msgspec.Meta:
    """The description of a field for /openapi.json. checked: what `Question` checks of the field, as JSON Schema."""
    return msgspec.Meta(description=description, extra_json_schema=checked)


Id = Annotated[str, msgspec.Meta(extra_json_schema=ID)] | None
Level = Literal["urgent", "default", "background"]

_SEED: Final = "of the noise; else the first 8 bytes of SHA-256 of request_id"
_DEADLINE: Final = "refused before it runs when it cannot be answered within this"
_EXECUTED: Final = "actions of the episode's last chunk that the robot had executed at this observation; for --rtc"
_DELAY: Final = "actions that the robot executes until the answer arrives, 0 for no delay; for --rtc"


class RequestLimits(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a request other than its observation, named alike on every wire. `Question` checks the values."""

    episode_id: Annotated[Id, says("owner of cached prefixes and held actions, with robot_id")] = None
    request_id: Annotated[Id, says("repeated in the answer and as X-Request-Id; by default made here")] = None
    robot_id: Annotated[Id, says("owner of the fair share; by default the episode, else the connection")] = None
    seed: Annotated[Whole | None, says(_SEED, minimum=0, maximum=_MOST["seed"])] = None
    priority: Annotated[Level | None, says("urgent goes first and at once, background fills free places")] = None
    deadline_ms: Annotated[float | None, says(_DEADLINE, exclusiveMinimum=0, maximum=MAX_DEADLINE_MS)] = None
    executed: Annotated[Whole | None, says(_EXECUTED, minimum=0, maximum=_MOST["executed"])] = None
    delay: Annotated[Whole | None, says(_DELAY, minimum=0, maximum=_MOST["delay"])] = None
    policy: Annotated[str | None, says("the name of one of several policies")] = None


class Question(RequestLimits, kw_only=True, gc=False):
    """One observation with its limits. The constructor checks them: the 422 names the field.

    images: (camera, name of the field for errors, picture). state: in the robot's units. deadline_ms: counted from when
    the request reached this machine. episode: computed; the key of the state that is kept between requests.
    """

    images: Sequence[tuple[str, str, Image]] = ()
    state: Sequence[float] | Array | NDArray[Any] | None = None
    instruction: str | None = None
    episode: str = ""

    def __post_init__(self) -> None:
        for name in ("episode_id", "request_id", "robot_id"):
            if (id := getattr(self, name)) is not None:
                check_id(name, id)
        if (text := self.instruction) is not None:
            if not is_unicode(text):
                raise invalid("instruction", "instruction: holds text that is not Unicode (a lone surrogate)")
            if len(text) > MAX_INSTRUCTION:
                raise invalid("instruction", f"instruction: has more than {MAX_INSTRUCTION} characters")
        for name, most in _MOST.items():
            if (sent := getattr(self, name)) is not None:
                value = whole(name, sent)
                if not 0 <= value <= most:
                    raise invalid(name, f"{name}={value}: must be in [0, {most}]")
                setattr(self, name, value)
        self.episode = episode_key(self.robot_id, self.episode_id)
        limit = self.deadline_ms
        if limit is not None and not 0.0 < limit <= MAX_DEADLINE_MS:
            raise invalid("deadline_ms", f"deadline_ms={limit}: must be in (0, {MAX_DEADLINE_MS:g}]")

    def state_vector(self) -> NDArray[np.float32] | None:
        """The state as float32 [n], finite; 422 otherwise."""
        state = self.state
        if state is None:
            return None
        if isinstance(state, (Array, np.ndarray)):
            values = array_of(state, "state") if isinstance(state, Array) else state
            if values.ndim != 1:
                raise invalid("state", f"state: has shape {list(values.shape)}, must have one dimension")
            wide = values.astype(np.float64)
        else:
            if sum(map(abs, state)) <= LARGEST:  # then each number is; a tenth of the time of the check below
                return np.array(state, np.float32)
            wide = np.asarray(state, dtype=np.float64)
        if not (np.abs(wide) <= LARGEST).all():
            raise invalid("state", f"state: holds NaN, infinity or a number beyond {LARGEST:g}")
        return wide.astype(np.float32)


def array_of(array: Array, field: str) -> NDArray[Any]:
    """An array of numbers as a numpy view; 422 if type, shape and length do not agree."""
    try:
        found = array_in(array.data, array.dtype, array.shape)
    except ClientError as error:
        raise invalid(field, printable(f"{field}: {error.message}")) from None
    if found.dtype.kind not in "iuf":
        raise invalid(field, f"{field}: dtype {array.dtype} is not one of numbers")
    return found


class Timing(msgspec.Struct):
    """queue: until the first batch; batch: from then on; total: since it was read; age: since it came in."""

    queue_ms: float
    batch_ms: float
    total_ms: float
    age_ms: float


_CHUNK = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}


class ActAnswer(msgspec.Struct, omit_defaults=False):
    """The answer to a `Question`. actions: [num_actions, action_dim] in the robot's units."""

    actions: Annotated[Any, msgspec.Meta(extra_json_schema=_CHUNK)]
    num_actions: int
    action_dim: int
    latency_ms: float
    hz: float
    denoising_steps: int
    inference_mode: str
    model_hash: str
    config_hash: str
    reflex_version: str
    request_id: str
    timing: Timing
    batch: dict[str, Any]
    cache: str
    guard: dict[str, Any] | None = None
    rtc: Mapping[str, Any] | None = None
    policy_changed: bool = False
    injected: dict[str, Any] | None = None
    warnings: list[str] = []


# -- observations of a wire --------------------------------------------------------------------------------------------


PREFIXES: Final = ("observation/", "observation.images.", "observation.", "images/", "vision/", "video.")
"""Prefixes of names in other protocols, which are ignored."""
PROMPTS: Final = ("prompt", "instruction", "task", "task_description", "language_instruction")
STATES: Final = ("state", "states", "proprio")
MAX_STATE: Final = 16_384  # numbers
MAX_NAME: Final = 256  # characters of a name with the names of its enclosing maps
MAX_ROWS: Final = 256  # robots in a message, so that one leaves most of a queue (--max-queue) to other callers

UNSERVED: Final = {
    "noise": "the server draws the noise, by a seed",
    "num_steps": "the export sets the number of denoise steps",
    "num_denoising_steps": "the export sets it",
    "inference_delay": "send delay, a number of actions",
    **dict.fromkeys(("prev_action_chunk", "prev_chunk_left_over"), "with --rtc the server continues the last chunk"),
    "execution_horizon": "--rtc-horizon sets it for all robots",
    **dict.fromkeys(("image_mask", "image_masks"), "leave out the pictures that are missing"),
}
"""Fields that other servers read with an observation. Here they have no effect, but a caller would expect one, so they
are refused. Any other name that a policy does not read is ignored."""

OWN: Final = "reflex/"
EPISODES: Final = (f"{OWN}episode_id", "episode_id", "session_id")
IDS: Final = {"robot_id": "/", "episode_id": "/", "session_id": "/", "request_id": "."}
"""The separator between an id and the number of one of several robots."""

WireObservation = tuple[tuple[tuple[str, str, Image], ...], NDArray[np.float64] | None, str | None]


class ObservationReader:
    """Reads the observations of one wire for one policy.

    others: readers for the other versions that may answer; pictures that only those use are read if they were sent.
    video: prefix of camera names on the wire.
    """

    def __init__(
        self, spec: PolicySpec, wire: WireMap | None, others: Sequence[ObservationReader] = (), video: str = ""
    ) -> None:
        self.spec, self.wire, self._others, self._video = spec, wire or WireMap(), others, video

    def read(self, observation: Mapping[str, Any]) -> WireObservation:
        """(images, state, instruction) for a `Question`; the 422 names a missing or wrong field."""
        came = dict(_flat(observation))
        plain = {_stripped(name): name for name in reversed(came)}
        for name in UNSERVED.keys() & {*plain, *(name.partition("/")[0] for name in came)}:
            if name not in self.spec.images and plain.get(name) not in (*self.wire.images.values(), *self.wire.state):
                raise invalid_input(name, f"is not read here: {UNSERVED[name]}")
        optional = self.spec.optional_images  # for a missing one of the others `_image` raises
        cameras = [name for name in self.spec.images if name not in optional or self._found(name, came, plain) in came]
        images = {camera: self._image(camera, came, plain) for camera in cameras}
        for other in self._others:
            for camera in [camera for camera in other.spec.images if camera not in images]:
                with suppress(InvalidRequest):  # the version that needs it reports the error
                    images[camera] = other._image(camera, came, plain)
        self._check_subset(images, came)
        return tuple(images.values()), self._state(came, plain), self._prompt(came, plain)

    def split(self, observation: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
        """The observations of N robots that came as one with a leading axis: by the ids of their episodes if each has
        one, else by number. None for an observation of one robot.

        N is the length of pictures and states with one dimension too many; those that are read must agree. Any other
        list or array of length N has one value for each robot, also of instructions or limits. Other values apply to
        all robots; the number of the robot is added to an id.
        """
        came = dict(_flat(observation))
        plain = {_stripped(name): name for name in reversed(came)}
        states = self._state_names(plain) if self.spec.takes_state else ()
        cameras = [self._found(camera, came, plain) for camera in self.spec.images]
        axes = {name: _axis(came[name], 3) for name in cameras if name in came}
        pictures = max(axes.values(), default=None)
        axes |= {name: _axis(came[name], 1) for name in states if name in came}
        size = max(axes.values(), default=0)
        if not size or (size == 1 and pictures == 0):  # a state [1, dim] beside plain pictures
            return None
        for name in self._prompt_names(plain):
            if many := _many(text_of(came.get(name))):
                axes[name] = many
        # Parts of a state that are one number have no axis of their own: a list of N numbers has one for each robot.
        differ = [name for name, found in axes.items() if size not in (found, name in states and _axis(came[name], 0))]
        if differ:
            told = ", ".join(f"{name} {found or 'none'}" for name, found in axes.items())
            raise invalid_input(differ[0], f"has another leading axis than the rest of the observation: {told}")
        if size * len(came) > MAX_VALUES:
            raise invalid("observation", f"observation: {len(came)} names of {size} robots: over {MAX_VALUES} values")
        if size > MAX_ROWS:
            raise invalid_input(next(iter(axes)), f"has {size} robots, a message may have {MAX_ROWS}")
        named = next((came[name] for name in EPISODES if _many(came.get(name)) == size), ())
        ids = [text_of(id) for id in named]
        robots = ids if len({id for id in ids if isinstance(id, str)}) == size else [str(row) for row in range(size)]
        parts = [_each(name, value, robots) for name, value in came.items()]
        return {robot: dict(zip(came, row, strict=True)) for robot, *row in zip(robots, *parts, strict=True)}

    def describe(self) -> dict[str, Any]:
        """The expected observation, JSON-safe."""
        spec, wire = self.spec, self.wire
        names = {camera: wire.images.get(camera, self._video + camera) for camera in spec.images}
        found: dict[str, Any] = {"images": {names[camera]: list(size) for camera, size in spec.images.items()}}
        if spec.optional_images:
            found["optional_images"] = [names[camera] for camera in spec.images if camera in spec.optional_images]
        if spec.observation_steps > 1:
            found["observation_steps"] = spec.observation_steps
        if spec.takes_state:
            found["state"] = {"names": list(wire.state or ("state",)), "dim": spec.state_dim}
            if wire.state_sizes:
                found["state"]["sizes"] = list(wire.state_sizes)
        if spec.takes_text:
            found["prompt"] = wire.prompt or PROMPTS[0]
        return found

    def _check_subset(self, images: Mapping[str, tuple[str, str, Image]], came: Mapping[str, Any]) -> None:
        """Where any camera may be left out, a picture under a wrong name must not pass for a missing one."""
        missing = [camera for camera in self.spec.images if camera not in images]
        if missing and self.spec.optional_images >= set(self.spec.images):
            read = {name for _, name, _ in images.values()}
            if not read or any(_is_picture(value) for name, value in came.items() if printable(name) not in read):
                raise self._missing(self.wire.images.get(missing[0], self._video + missing[0]), came)

    def _found(self, camera: str, came: Mapping[str, Any], plain: Mapping[str, str]) -> str | None:
        """The name of a camera's picture in an observation. The only camera takes the only picture."""
        name = self.wire.images.get(camera) or plain.get(camera) or plain.get(self.spec.other_names.get(camera, ""))
        if name is None and len(self.spec.images) == 1:
            only = [name for name in came if name.startswith(("images/", "vision/", "video."))]
            name = plain.get("image") or (only[0] if len(only) == 1 else None)
        return name

    def _image(self, camera: str, came: Mapping[str, Any], plain: Mapping[str, str]) -> tuple[str, str, Image]:
        name = self._found(camera, came, plain)
        if name is None or name not in came:
            raise self._missing(name or self._video + camera, came)
        image = came[name]
        if isinstance(image, bytes):
            return camera, name, image  # PNG or JPEG
        if not isinstance(image, np.ndarray):
            raise invalid_input(name, "must be an array, or a PNG or JPEG")
        if image.ndim == 3 and image.shape[0] == 3 and image.shape[2] != 3:
            image = image.transpose(1, 2, 0)
        return camera, printable(name), image

    def _state_names(self, plain: Mapping[str, str]) -> Sequence[str]:
        return self.wire.state or (next((plain[name] for name in STATES if name in plain), STATES[0]),)

    def _state(self, came: Mapping[str, Any], plain: Mapping[str, str]) -> NDArray[np.float64] | None:
        if not self.spec.takes_state:
            return None
        names, parts = self._state_names(plain), []
        for name in names:
            if name not in came:
                raise self._missing(name, came)
            parts.append(_numbers(name, came[name]))
        for name, part, size in zip(names, parts, self.wire.state_sizes, strict=False):
            if len(part) != size:
                raise invalid_input(name, f"must be {size} numbers, came {len(part)}")
        state = np.concatenate(parts)
        if len(state) != self.spec.state_dim:
            given = ", ".join(f"{name} has {len(part)}" for name, part in zip(names, parts, strict=True))
            raise invalid("state", printable(f"state: must be {self.spec.state_dim} numbers; {given}"))
        return state

    def _prompt_names(self, plain: Mapping[str, str]) -> Sequence[str]:
        return [self.wire.prompt] if self.wire.prompt else [plain.get(name, name) for name in PROMPTS]

    def _prompt(self, came: Mapping[str, Any], plain: Mapping[str, str]) -> str | None:
        names = self._prompt_names(plain)
        name = next((name for name in names if came.get(name) is not None), None)
        if name is None:
            if self.spec.takes_text and self.spec.default_prompt is None:
                raise self._missing(names[0], came)
            return self.spec.default_prompt
        text = text_of(came[name])
        if not isinstance(text, str):
            raise invalid_input(name, "must be a text")
        return text

    def _missing(self, name: str, came: Mapping[str, Any]) -> InvalidRequest:
        expected = self.describe()
        names = [*expected["images"], *expected.get("state", {}).get("names", ())]
        names += [expected["prompt"]] if "prompt" in expected else []
        there = ", ".join(list(came)[:50]) or "nothing"
        return invalid_input(name, f"missing; came: {there}; expected: {', '.join(names)}")


def text_of(value: Any) -> Any:
    """The text in bytes, an array or a list of one; any other value unchanged."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "US":
        value = value.item()
    if isinstance(value, bytes) and len(value) <= MAX_TEXT:
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value


def _is_picture(value: Any) -> bool:
    return (
        value.ndim == 3
        if isinstance(value, np.ndarray)
        else (isinstance(value, bytes) and value.startswith((JPEG_START, PNG_START[:8])))
    )


def _axis(value: Any, dims: int) -> int:
    """The length of the axis before this number of dimensions, of an array or a list; 0 where there is none."""
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim == dims + 1 else 0
    if not isinstance(value, list) or not value:
        return 0
    kinds = {0: (int, float), 1: (list, np.ndarray), 3: (np.ndarray, bytes)}[dims]
    return len(value) if all(isinstance(part, kinds) for part in value) else 0


def _many(value: Any) -> int:
    """The number of values in a list or array, perhaps one for each robot; 0 for a single value."""
    return len(value) if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim) else 0


def _each(name: str, value: Any, robots: Sequence[str]) -> Sequence[Any]:
    """The value of each of several robots."""
    if _many(value) == len(robots):
        each: Sequence[Any] = value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else value
        return each
    id, text = name.removeprefix(OWN), text_of(value)
    if id in IDS and isinstance(text, str):
        return [f"{text}.{row}" if id == "request_id" else f"{text}/{robot}" for row, robot in enumerate(robots)]
    return [value] * len(robots)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested maps to names joined by slashes."""
    for name, value in values.items():
        if len(before) + len(name) > MAX_NAME:
            raise invalid("observation", f"observation: a name in it has more than {MAX_NAME} characters")
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}/")
        else:
            yield before + name, value


def _stripped(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _numbers(name: str, value: Any) -> NDArray[np.float64]:
    """A part of the state as a vector, from an array, a list, or one number."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and value.size <= MAX_STATE:
        return value.astype(np.float64).reshape(-1)
    values = value if isinstance(value, list) else [value]
    if len(values) <= MAX_STATE and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        with suppress(OverflowError):  # a whole number may have thousands of digits
            return np.array(values, np.float64)
    raise invalid_input(name, "must be numbers")
