"""What a robot asks of a policy and what it is answered, on whatever wire.

A wire makes a `Question` of what it reads, and writes an `ActAnswer`. `RequestHandler` does everything in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from reflex_runtime.observe.journal import episode_key
from reflex_runtime.web.arrays import array_in
from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.fields import ID, Whole, check_id, invalid, is_unicode, printable, whole

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
LARGEST = 1e30  # of a number of the state: larger ones need not be finite in the model's units


class Array(msgspec.Struct, forbid_unknown_fields=True):
    """An array as bytes: little-endian, C order."""

    dtype: str
    shape: Annotated[list[int], msgspec.Meta(max_length=4)]
    data: bytes


Image = str | bytes | Array | NDArray[Any]
"""A picture as it came: base64 text, PNG or JPEG bytes, or an array. It is decoded once the request is admitted."""

_MOST: Final = {"seed": 2**64 - 1, "executed": 1_000_000, "delay": 1_000_000}
MAX_DEADLINE_MS: Final = 600_000.0


def says(description: str, **checked: Any) -> msgspec.Meta:
    """What a field means, for /openapi.json and /docs. checked: what `Question` looks at, as JSON Schema has it."""
    return msgspec.Meta(description=description, extra_json_schema=checked)


def _whole(name: str, description: str) -> msgspec.Meta:
    return says(description, minimum=0, maximum=_MOST[name])


Id = Annotated[str, msgspec.Meta(extra_json_schema=ID)] | None
Level = Literal["urgent", "default", "background"]


class RequestLimits(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a request says beside its observation, by the same names on every wire. `Question` looks at the values."""

    episode_id: Annotated[Id, says("what cached prefixes and held actions belong to, with robot_id")] = None
    request_id: Annotated[Id, says("comes back in the answer and as X-Request-Id; made when absent")] = None
    robot_id: Annotated[Id, says("whose fair share it takes; else the episode's, else the connection's")] = None
    seed: Annotated[Whole | None, _whole("seed", "of the noise; else the first 8 bytes of SHA-256 of request_id")] = (
        None
    )
    priority: Annotated[Level | None, says("urgent goes first and at once, background fills free places")] = None
    deadline_ms: Annotated[
        float | None,
        says(
            "refused before it runs when it cannot be answered within this", exclusiveMinimum=0, maximum=MAX_DEADLINE_MS
        ),
    ] = None
    executed: Annotated[
        Whole | None, _whole("executed", "actions of the episode's last chunk executed when this was seen; for --rtc")
    ] = None
    delay: Annotated[
        Whole | None, _whole("delay", "actions executed until the answer arrives, 0 for no delay; for --rtc")
    ] = None
    policy: Annotated[str | None, says("which of several policies is asked, by its name")] = None


class Question(RequestLimits, kw_only=True, gc=False):
    """What a robot asks. Checked when it is made: the 422 names the field.

    images: (camera, field to name in errors, picture). state: in the robot's units. deadline_ms: from when the request
    reached this machine. episode: by which things are kept of it; set.
    """

    images: Sequence[tuple[str, str, Image]] = ()
    state: Sequence[float] | Array | NDArray[Any] | None = None
    instruction: str | None = None
    episode: str = ""

    def __post_init__(self) -> None:
        if self.episode_id is not None:
            check_id("episode_id", self.episode_id)
        if self.request_id is not None:
            check_id("request_id", self.request_id)
        if self.robot_id is not None:
            check_id("robot_id", self.robot_id)
        if self.instruction is not None and not is_unicode(self.instruction):
            raise invalid("instruction", "instruction: holds text that is not Unicode (a lone surrogate)")
        if self.instruction is not None and len(self.instruction) > MAX_INSTRUCTION:
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
            if sum(map(abs, state)) <= LARGEST:  # the usual case in a tenth of the time: each is finite and within it
                return np.array(state, np.float32)
            wide = np.asarray(state, dtype=np.float64)
        if not (np.abs(wide) <= LARGEST).all():
            raise invalid("state", f"state: holds NaN, infinity or a number beyond {LARGEST:g}")
        return wide.astype(np.float32)


def array_of(array: Array, field: str) -> NDArray[Any]:
    """A numpy view of an array of numbers; 422 when type, shape and length do not agree."""
    try:
        found = array_in(array.data, array.dtype, array.shape)
    except ClientError as error:
        raise invalid(field, printable(f"{field}: {error.message}")) from None
    if found.dtype.kind not in "iuf":
        raise invalid(field, f"{field}: dtype {array.dtype} is not one of numbers")
    return found


class Timing(msgspec.Struct):
    """Where the time of a request went."""

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
