"""What several tests of the demo use: a bundled policy as a callable, and how a server reads a robot's request."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from demo.tasks import RobotView

Answer = tuple[int, dict[str, str], Any]
"""Status, extra headers, body (an object to encode as the request was, or bytes to send as they are)."""


def error(code: str, status: int, retry_safe: bool = False, retry_after: str | None = None) -> Answer:
    """An error as the server words it."""
    body = {"error": code, "message": "as the test wants it", "retry_safe": retry_safe, "request_id": "x"}
    return status, {} if retry_after is None else {"Retry-After": retry_after}, body


def one_thread(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class BundledPolicy:
    """A decomposed export called as the runtime would: normalisation outside the graph, its numbers from the config."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.config = json.loads((directory / "reflex_config.json").read_text())
        names = (self.config["decomposed"][key] for key in ("vlm_prefix_onnx", "expert_denoise_onnx"))
        self.prefix, self.step = (one_thread(directory / name) for name in names)
        self.rng = np.random.default_rng(seed)
        self.lock = threading.Lock()

    def __call__(self, seen: RobotView) -> NDArray[np.float32]:
        c = self.config
        norm = {k: np.array(c[k][m], np.float32) for k, m in (("state_norm", "mean"), ("action_norm", "mean"))}
        std = {k: np.array(c[k]["std"], np.float32) for k in norm}
        words = [c["tokenizer"].get(w, 0) for w in seen.instruction.split()]
        tokens = np.array([words + [0] * (c["max_tokens"] - len(words))], np.int64)
        state = ((seen.state - norm["state_norm"]) / std["state_norm"])[None]
        with self.lock:
            x: NDArray[np.float32] = self.rng.standard_normal((1, c["chunk_size"], c["action_dim"])).astype(np.float32)
            (past_kv,) = self.prefix.run(None, {"image": seen.image[None], "tokens": tokens})
            for k in range(c["num_denoising_steps"]):
                time = np.full(1, k / c["num_denoising_steps"], np.float32)
                (x,) = self.step.run(None, {"x": x, "time": time, "state": state, "past_kv": past_kv})
        return x[0] * std["action_norm"] + norm["action_norm"]


@dataclass
class Stub:
    """`POST /act` answered by a function of the request, all else with a fixed answer; keeps what it heard."""

    url: str
    answer: Callable[[dict[str, Any]], Answer]
    requests: list[dict[str, Any]] = field(default_factory=list)
    outcomes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # path and body
    outcome: Answer = (200, {}, {})
    connections: int = 0
    hang_up: bool = False  # close each connection after its answer without having said so
    hung_up: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # released by each that closed


def seen_in(request: dict[str, Any]) -> RobotView:
    """The observation as a server reads it, whatever form the picture came in."""
    image, state = request["image"], request["state"]
    if isinstance(image, str):
        image = base64.b64decode(image)
    if isinstance(image, bytes):
        pixels = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    else:
        pixels = np.frombuffer(image["data"], image["dtype"]).reshape(image["shape"])
    numbers = np.frombuffer(state["data"], state["dtype"]) if isinstance(state, dict) else np.array(state)
    return RobotView(pixels, numbers.astype(np.float32), request["instruction"], request["episode_id"])
