"""The policy of type `reflex`: no weights; its actions come from a server."""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from numpy.typing import NDArray
from torch import Tensor

from lerobot_policy_reflex.configuration_reflex import ReflexConfig
from lerobot_policy_reflex.connection import Connection, ReflexError

_PREFIXES: Final = ("observation/", "observation.images.", "observation.", "images/", "vision/", "video.")
_STATE: Final = "observation.state"
_IMAGE: Final = "observation.image"  # also that of cameras: observation.images.…


class ReflexPolicy(PreTrainedPolicy):
    """Gets chunks of actions from `reflex serve`, and returns them one by one.

    A batch of B rows is B requests: each row is a robot with an episode of its own. `reset` begins new episodes. Errors
    are `ReflexError`s, with the remedy in one line.
    """

    config_class = ReflexConfig
    name = "reflex"

    def __init__(self, config: ReflexConfig, **kwargs: Any) -> None:
        """Connect, and wait until the server's policy is ready. kwargs: of LeRobot's factories, not needed."""
        super().__init__(config)
        said = {"robot_id": config.robot_id, "deadline_ms": config.deadline_ms, "priority": config.priority}
        self._connection = Connection(
            config.url,
            {name: value for name, value in said.items() if value is not None},
            os.environ.get("REFLEX_API_KEY", ""),
            config.timeout_s,
            config.connect_timeout_s,
            config.retries,
        )
        self._action_queue: deque[Tensor] = deque()  # LeRobot's name, for `drop_queued_actions`
        self._taken: int | None = None  # actions taken of the last chunk; None before the first
        self._chunks = 0  # of this episode
        self._connection.open()
        self._check_actions()
        self.reset()

    @classmethod
    def from_pretrained(cls, *args: Any, config: ReflexConfig | None = None, **kwargs: Any) -> ReflexPolicy:
        """A policy for `config`, without weights to load. Some of LeRobot's programs make every policy by this."""
        if config is None:
            raise ValueError("--policy.path: a policy of type reflex has no files; use --policy.type=reflex")
        policy = cls(config)
        policy.eval()
        return policy

    def reset(self) -> None:
        """Begin a new episode, and drop the actions that are left of the last one."""
        self._action_queue.clear()
        self._taken, self._chunks = None, 0
        self._episode = f"{self.config.robot_id or 'lerobot'}-{uuid.uuid4().hex[:12]}"

    def select_action(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """The next action, float32 [B, dim]; of a new chunk when the last one has no more."""
        if not self._action_queue:
            chunk = self._chunk(batch, self._taken)
            self._action_queue.extend(chunk.transpose(0, 1)[: self.config.n_action_steps])
            self._taken = 0
        self._taken = (self._taken or 0) + 1
        return self._action_queue.popleft()

    def predict_action_chunk(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """A chunk of actions, float32 [B, steps, dim]."""
        return self._chunk(batch, None)

    def close(self) -> None:
        """Disconnect. The next observation connects again."""
        self._connection.close()

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any] | None]:
        """Raises ValueError: there is nothing to train."""
        self.config.get_optimizer_preset()
        raise AssertionError("unreachable")

    def get_optim_params(self) -> dict[str, Any]:
        """Raises ValueError: there is nothing to train."""
        self.config.get_optimizer_preset()
        raise AssertionError("unreachable")

    def _chunk(self, batch: Mapping[str, Any], executed: int | None) -> Tensor:
        """executed: number of executed actions of the last chunk, if known."""
        rows = observations(batch, self._connection.metadata, self.config.names)
        self._chunks += 1
        for place, row in enumerate(rows):
            part = f"/{place}" if len(rows) > 1 else ""
            row["reflex/episode_id"] = self._episode + part
            row["reflex/request_id"] = f"{self._episode}{part}.{self._chunks}"
            if executed is not None:
                row["reflex/executed"] = executed
        actions = self._connection.ask(rows)
        steps = min(len(chunk) for chunk in actions)
        return torch.from_numpy(np.stack([chunk[:steps] for chunk in actions]))

    def _check_actions(self) -> None:
        """Compare the size of an action before anything moves."""
        feature, told = self.config.action_feature, self._connection.metadata.get("actions")
        if feature is not None and isinstance(told, list) and feature.shape[0] != told[-1]:
            model = self._connection.metadata.get("model_id")
            self.close()
            raise ReflexError(
                "invalid_request", f"actions of {model} have {told[-1]} numbers, those here have {feature.shape[0]}"
            )


def observations(
    batch: Mapping[str, Any], expected: Mapping[str, Any], names: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The rows of a batch by the server's names. names: LeRobot's names → the server's, where they differ. ReflexError
    for a missing part."""
    found: dict[str, list[Any]] = {}
    for name in expected["images"]:
        found[name] = _pictures(name, batch[_found(name, batch, expected, names)])
    if "state" in expected:
        found |= _state(batch, expected, names)
    rows = {len(values) for values in found.values()} or {1}
    if len(rows) > 1:
        raise ReflexError("invalid_request", f"the parts of the batch have different numbers of rows: {sorted(rows)}")
    if "prompt" in expected:
        found[expected["prompt"]] = _tasks(batch, max(rows))
    return [{name: values[row] for name, values in found.items()} for row in range(max(rows))]


def _found(wanted: str, batch: Mapping[str, Any], expected: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """LeRobot's name of a camera."""
    pictures = [name for name in batch if name.startswith(_IMAGE)]
    for name in pictures:
        if name in names and names[name] == wanted:
            return name
    free = [name for name in pictures if name not in names]
    for name in free:
        if _plain(name) == _plain(wanted):
            return name
    if len(free) == 1 and len(expected["images"]) == 1:
        return free[0]
    came, wants = ", ".join(pictures) or "none", ", ".join(expected["images"])
    example = json_of(free[0] if free else "observation.images.front", wanted)
    message = f"{wanted}: no picture of this name; came: {came}; expected: {wants}; give --policy.names='{example}'"
    raise ReflexError("invalid_request", message)


def json_of(name: str, wanted: str) -> str:
    """An example of `--policy.names`."""
    return f'{{"{name}": "{wanted}"}}'


def _plain(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _pictures(name: str, value: Any) -> list[NDArray[np.uint8]]:
    """uint8 [height, width, 3] for each row, out of [B, 3, height, width], uint8 or floats in [0, 1]."""
    pictures = _array(name, value)
    if pictures.ndim == 3:
        pictures = pictures[None]
    if pictures.ndim != 4 or 3 not in (pictures.shape[1], pictures.shape[3]):
        raise ReflexError("invalid_request", f"{name}: must be [rows, 3, height, width], came {list(pictures.shape)}")
    if pictures.shape[1] == 3:
        pictures = pictures.transpose(0, 2, 3, 1)
    if pictures.dtype != np.uint8:
        if not (pictures.size == 0 or (pictures.min() >= 0.0 and pictures.max() <= 1.0)):
            raise ReflexError("invalid_request", f"{name}: must be uint8, or floats in [0, 1]: is it normalised?")
        pictures = np.rint(pictures * 255.0).astype(np.uint8)
    return list(np.ascontiguousarray(pictures))


def _state(batch: Mapping[str, Any], expected: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, list[Any]]:
    """The state in the server's parts: whole for one name, split by the sizes for several."""
    wanted = expected["state"]
    source = next((name for name, told in names.items() if told in wanted["names"] and name in batch), _STATE)
    if source not in batch:
        came = ", ".join(sorted(batch)) or "nothing"
        raise ReflexError("invalid_request", f"{source}: missing; came: {came}")
    state = _array(source, batch[source])
    state = state[None] if state.ndim == 1 else state
    if state.ndim != 2 or state.shape[1] != wanted["dim"]:
        message = f"{source}: must be [rows, {wanted['dim']}], came {list(state.shape)}"
        raise ReflexError("invalid_request", message)
    parts, last = wanted["names"], len(wanted["names"]) - 1
    sizes = list(wanted.get("sizes") or [wanted["dim"] - last] + [1] * last)
    ends = np.cumsum(sizes)[:-1]
    return {name: list(part) for name, part in zip(parts, np.split(state, ends, axis=1), strict=True)}


def _tasks(batch: Mapping[str, Any], rows: int) -> list[str]:
    task = batch.get("task", "")
    tasks = [task] * rows if isinstance(task, str) else list(task)
    tasks = tasks * rows if len(tasks) == 1 else tasks
    if len(tasks) != rows or not all(isinstance(text, str) for text in tasks):
        raise ReflexError("invalid_request", f"task: must be a text for each of {rows} rows")
    return tasks


def _array(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        raise ReflexError("invalid_request", f"{name}: must be a tensor of numbers")
    return value
