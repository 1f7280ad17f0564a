"""What a robot of LeRobot sends and gets: the side of `reflex probe` and of the load generator.

Messages are written without LeRobot's package, and answers counted without loading them."""

from __future__ import annotations

import pickle
import pickletools
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from reflex_runtime.web import messages_pb2 as messages

SERVICE: Final = "transport.AsyncInference"
HELPERS: Final = "lerobot.async_inference.helpers"
SETUP, OBSERVATION = "RemotePolicyConfig", "TimedObservation"
STATE, IMAGES, TASK = "observation.state", "observation.images.", "task"
BEGIN, MIDDLE, END = 1, 2, 3
PART: Final = 2 << 20  # bytes of an observation in one message
STEPS: Final = 1000  # actions that are asked for: the whole chunk


def sent_by_robot(observed: Mapping[str, Any], policy_type: str) -> tuple[bytes, list[bytes]]:
    """The setup of a robot that sees this, and its observation in parts.

    observed: pictures, numbers and a text. Single numbers are motors of one state, in order; a vector is a state of its
    own, whose motors get names.
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
        "actions_per_chunk": STEPS, "device": "cpu", "rename_map": {},
    }  # fmt: skip
    timed = _pickled(OBSERVATION, {"timestamp": 0.0, "timestep": 0, "observation": seen, "must_go": True})
    parts = []
    for at in range(0, len(timed), PART):
        place = END if at + PART >= len(timed) else BEGIN if at == 0 else MIDDLE
        part = messages.ObservationPart(transfer_state=place, data=timed[at : at + PART])
        parts.append(bytes(part.SerializeToString()))
    return bytes(messages.Pickle(data=_pickled(SETUP, setup)).SerializeToString()), parts


def shape_of(answer: bytes) -> tuple[int, ...]:
    """How many actions an answer has, and of how many numbers; the latter only from servers of ours. () without any.

    ValueError for what is no answer.
    """
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
