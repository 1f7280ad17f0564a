"""Tiny export directories built in place: real graphs of a dozen nodes, so that a test shows the whole path."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.robots import Policy
from reflex_runtime.run.processor import Processor, run_batch

HEIGHT, WIDTH, TOKENS, STATE, CHUNK, ACTIONS, STEPS = 4, 6, 3, 2, 4, 2, 5
OPSET, IR = 17, 8
WORDS = {"open": 1, "close": 2, "the": 3, "door": 4, "drawer": 5}

_FLOAT, _INT64, _UINT8 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8
_PORTS: dict[str, tuple[int, list[int]]] = {
    "rgb": (_UINT8, [HEIGHT, WIDTH, 3]),
    "left": (_UINT8, [HEIGHT, WIDTH, 3]),
    "right": (_UINT8, [HEIGHT, WIDTH, 3]),
    "ids": (_INT64, [TOKENS]),
    "pose": (_FLOAT, [STATE]),
    "x": (_FLOAT, [CHUNK, ACTIONS]),
    "t": (_FLOAT, []),
    "keys": (_FLOAT, [2, 3]),
    "values": (_FLOAT, [3]),
    "chunk": (_FLOAT, [CHUNK, ACTIONS]),
}


def _constant(name: str, values: Any, dtype: Any = np.float32) -> Any:
    return numpy_helper.from_array(np.array(values, dtype), name)


_CONSTANTS = [
    _constant("pose_weights", [[0.5, -0.25], [0.125, 1.0]]),
    _constant("key_weights", np.linspace(-1, 1, 6).reshape(1, 2, 3)),
    _constant("value_weights", [[0.25, 0.5, -1.0]]),
    _constant("word_scale", 0.1),
    _constant("pixel_scale", 1 / 255),
    _constant("dt", 1 / STEPS),
    _constant("one", [1], np.int64),
    _constant("one_two", [1, 2], np.int64),
]
_SEE = [  # picture and words → one number a row, "scene" [batch]
    helper.make_node("Cast", ["rgb"], ["pixels"], to=_FLOAT),
    helper.make_node("ReduceMean", ["pixels"], ["grey"], axes=[1, 2, 3], keepdims=0),
    helper.make_node("Mul", ["grey", "pixel_scale"], ["light"]),
    helper.make_node("Cast", ["ids"], ["numbers"], to=_FLOAT),
    helper.make_node("ReduceSum", ["numbers", "one"], ["sum"], keepdims=0),
    helper.make_node("Mul", ["sum", "word_scale"], ["words"]),
    helper.make_node("Add", ["light", "words"], ["scene"]),
]
_POSE = [
    helper.make_node("MatMul", ["pose", "pose_weights"], ["moved"]),
    helper.make_node("Unsqueeze", ["moved", "one"], ["pose_term"]),
]

_SCENE_AND_TIME = [  # the prefix and the flow time → "kvt_term" [batch, 1, 1]
    helper.make_node("ReduceMax", ["keys"], ["k"], axes=[1, 2], keepdims=0),
    helper.make_node("ReduceSum", ["values", "one"], ["v"], keepdims=0),
    helper.make_node("Add", ["k", "v"], ["kv"]),
    helper.make_node("Add", ["kv", "t"], ["kvt"]),
    helper.make_node("Unsqueeze", ["kvt", "one_two"], ["kvt_term"]),
]


def write_graph(
    file: Path, nodes: list[Any], inputs: list[str], outputs: list[str], batch: str | int = "batch"
) -> None:
    """Write one graph; `batch` is the leading axis of all its inputs and outputs: a name, or a fixed size."""

    def ports(names: list[str]) -> list[Any]:
        return [helper.make_tensor_value_info(n, _PORTS[n][0], [batch, *_PORTS[n][1]]) for n in names]

    used = {name for node in nodes for name in node.input}
    constants = [c for c in _CONSTANTS if c.name in used]
    graph = helper.make_graph(nodes, "tiny", ports(inputs), ports(outputs), constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    onnx.checker.check_model(model)
    file.write_bytes(model.SerializeToString())


def write_monolithic(file: Path, batch: str | int = "batch") -> None:
    nodes = [
        *_SEE,
        *_POSE,
        helper.make_node("Unsqueeze", ["scene", "one_two"], ["scene_term"]),
        helper.make_node("Add", ["x", "pose_term"], ["a"]),
        helper.make_node("Add", ["a", "scene_term"], ["b"]),
        helper.make_node("Tanh", ["b"], ["chunk"]),
    ]
    write_graph(file, nodes, ["rgb", "ids", "pose", "x"], ["chunk"], batch)


def write_prefix(file: Path, batch: str | int = "batch") -> None:
    nodes = [
        *_SEE,
        helper.make_node("Unsqueeze", ["scene", "one_two"], ["wide"]),
        helper.make_node("Mul", ["wide", "key_weights"], ["keys"]),
        helper.make_node("Unsqueeze", ["scene", "one"], ["narrow"]),
        helper.make_node("Mul", ["narrow", "value_weights"], ["values"]),
    ]
    write_graph(file, nodes, ["rgb", "ids"], ["keys", "values"], batch)


def write_expert(file: Path, batch: str | int = "batch") -> None:
    """One Euler step: chunk = x + dt · (tanh(pose + Σ keys + Σ values + t) − x)."""
    nodes = [
        *_POSE,
        *_SCENE_AND_TIME,
        helper.make_node("Add", ["pose_term", "kvt_term"], ["drive"]),
        helper.make_node("Tanh", ["drive"], ["target"]),
        helper.make_node("Sub", ["target", "x"], ["velocity"]),
        helper.make_node("Mul", ["velocity", "dt"], ["change"]),
        helper.make_node("Add", ["x", "change"], ["chunk"]),
    ]
    write_graph(file, nodes, ["x", "t", "pose", "keys", "values"], ["chunk"], batch)


EMBODIMENT: dict[str, Any] = {
    "name": "bench-arm",
    "action_space": "absolute",
    "action_ranges": [[-1.0, 1.0], [-0.5, 0.5]],
    "action_names": ["shoulder", "gripper"],
    "action_units": ["rad", "1"],
    "state_names": ["shoulder", "gripper"],
    "gripper_index": 1,
    "cameras": {"front": [480, 640]},
    "control_rate_hz": 50,
}


def config(kind: str = "monolithic") -> dict[str, Any]:
    shared: dict[str, Any] = {
        "model_id": "tiny",
        "model_type": "flow_matching",
        "export_kind": kind,
        "state_dim": STATE,
        "action_dim": ACTIONS,
        "chunk_size": CHUNK,
        "num_denoising_steps": STEPS,
        "opset": OPSET,
        "image_size": [HEIGHT, WIDTH],
        "images": {"front": [HEIGHT, WIDTH]},
        "inputs": {"front": "rgb", "tokens": "ids", "state": "pose", "noise": "x"},
        "outputs": {"actions": "chunk"},
        "tokenizer": WORDS,
        "max_tokens": TOKENS,
        "state_norm": {"mean": [1.0, -1.0], "std": [2.0, 0.5]},
        "action_norm": {"mean": [0.25, 0.0], "std": [0.5, 0.125]},
        "embodiment": "embodiment.json",
    }
    if kind == "decomposed":
        shared["inputs"] |= {"time": "t"}
        shared["decomposed"] = {
            "vlm_prefix_onnx": "vlm_prefix.onnx",
            "expert_denoise_onnx": "expert_denoise.onnx",
            "past_kv_tensor_names": ["keys", "values"],
            "expert_takes_state": True,
        }
    return shared


def write_export(
    root: Path,
    kind: str = "monolithic",
    change: Callable[[dict[str, Any]], Any] = lambda c: None,
    embodiment: Mapping[str, Any] | None = EMBODIMENT,
    batch: str | int = "batch",
) -> Path:
    """An export directory at `root`; `change` edits the configuration before it is written."""
    root.mkdir(parents=True, exist_ok=True)
    settings = config(kind)
    if kind == "monolithic":
        write_monolithic(root / "model.onnx", batch)
    else:
        write_prefix(root / "vlm_prefix.onnx", batch)
        write_expert(root / "expert_denoise.onnx", batch)
    if embodiment is None:
        del settings["embodiment"]
    else:
        (root / "embodiment.json").write_text(json.dumps(embodiment))
    change(settings)
    (root / "reflex_config.json").write_text(json.dumps(settings))
    return root


def picture(seed: int, height: int = HEIGHT, width: int = WIDTH) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def asked(policy: Policy, i: int, **changes: Any) -> Request:
    """A request that differs from every other i in all it sends."""
    fields: dict[str, Any] = {
        "images": {"image": picture(i)},
        "instruction": "open the door" if i % 2 else "close the drawer",
        "state": [0.1 * i, -0.2 * i, 0.3, 0.4][: policy.spec.state_dim],
        "episode_id": f"episode-{i}",
        "request_id": f"request-{i}",
    }
    return policy.request(policy.prepare(**(fields | changes)), client=i)


class Bench:
    """The real scheduler on virtual time: a prefix takes 20 ms, a step or a whole call 10 ms."""

    def __init__(self, policy: Policy, processor: Processor | None = None) -> None:
        self.scheduler = Scheduler(
            [GroupConfig(name=policy.slot, cost=policy.cost_model, flush=FlushPolicy.window(10.0))]
        )
        self.policy, self.processor = policy, processor or policy
        self.now = 0.0
        self.batches: list[Batch] = []
        policy.warm_up((1, 2), clock=self._clock(iter(range(10**6)))).teach(self.scheduler.cost_model(policy.slot))

    @staticmethod
    def _clock(ticks: Any) -> Callable[[], float]:
        return lambda: 0.01 * next(ticks)

    def submit(self, request: Request) -> Ticket:
        return self.scheduler.submit(request, self.now)

    def step(self) -> Batch | None:
        """Run the next batch, if there is one."""
        batch = self.scheduler.next_batch(self.now)
        if batch is None:
            self.processor.drop(self.scheduler.take_left(self.policy.slot))
            return None
        self.batches.append(batch)
        outcomes = run_batch(self.processor, batch)
        elapsed = 0.020 if batch.stage == "prefix" else 0.010
        self.now += elapsed
        self.scheduler.complete(batch, outcomes, elapsed, self.now)
        return batch

    def drain(self) -> None:
        """Run until every ticket has settled."""
        while not self.scheduler.idle:
            if self.step() is None:
                self.now = max(self.now, self.scheduler.wake_at())

    def answer(self, request: Request) -> Any:
        """The value of one request run to its end; its error is raised."""
        ticket = self.submit(request)
        self.drain()
        return value(ticket)


def value(ticket: Ticket) -> Any:
    if hasattr(ticket.outcome, "error"):
        raise ticket.outcome.error
    return ticket.outcome.value


def run_alone(processor: Processor, request: Request) -> Any:
    """The value of a request by itself, without any scheduler: the slow obvious way."""
    ticket = Ticket(request, 0, 0.0)
    while True:
        batch = Batch(1, request.group, "", ticket.stage, None, 0.0, 0.0, 0.0, {ticket: 1.0})  # type: ignore[arg-type]
        (outcome,) = run_batch(processor, batch)
        if hasattr(outcome, "error"):
            raise outcome.error
        if not hasattr(outcome, "wants"):
            return outcome.value
        ticket.stage = outcome.stage or ticket.stage
