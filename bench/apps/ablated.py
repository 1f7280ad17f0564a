"""`reflex serve` without some of its stages: what stands behind a stage is replaced by an answer made beforehand.

`python -m bench.apps.ablated EXPORT PORT STAGE`: all stages up to this one, see `STAGES`. Each server does what the one
before does, and one thing more, so that the difference is what that costs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np

from bench.models import CHUNK, JOINTS
from reflex_runtime.cli import main
from reflex_runtime.core.batch import Done
from reflex_runtime.drivers.audience import Audience
from reflex_runtime.drivers.brief import BriefBatches
from reflex_runtime.policies import ActionChunk
from reflex_runtime.policies.rollout.versions import SlotProcessor
from reflex_runtime.policies.serving import act, asking, ends, fields
from reflex_runtime.policies.serving.question import ActAnswer, Timing
from reflex_runtime.web.form import JSON

ACTIONS = np.linspace(-1.0, 1.0, CHUNK * JOINTS, dtype=np.float32).reshape(CHUNK, JOINTS)
ANSWER = ActAnswer(
    actions=ACTIONS, num_actions=CHUNK, action_dim=JOINTS, latency_ms=0.123, hz=8130.081, denoising_steps=1,
    inference_mode="monolithic", model_hash="0" * 16, config_hash="0" * 16, reflex_version="0.0.0",
    request_id="0123456789ab-1234", timing=Timing(0.012, 0.123, 0.123, 0.234),
    batch={"id": 12345, "size": 32, "reason": "timeout", "cost_ms": 0.123}, cache="off",
    guard={"clamped": 0, "clamped_joints": [], "held": False},
)  # fmt: skip
BODY = fields.encode_json(copy(ANSWER))  # encoding changes it


def _replace(owner: type[Any], name: str, by: Callable[..., Any]) -> None:
    """A method by another. One that is not there would replace nothing, and the figures would be of something else."""
    if name not in vars(owner):
        raise AttributeError(f"{owner.__name__}.{name}: there is no such method to be replaced")
    setattr(owner, name, by)


def _http() -> None:
    _replace(act.Act, "enter", lambda self, exchange: None)
    _replace(act.Act, "run", lambda self, exchange, body: exchange.answer(200, BODY, JSON))


def _json() -> None:
    def run(self: act.Act, exchange: Any, body: bytes) -> None:
        act._decode(body, exchange.sent_msgpack)
        exchange.answer(200, fields.encode_json(copy(ANSWER)), JSON)

    _http()
    _replace(act.Act, "run", run)


def _request() -> None:
    def submit(self: asking.Asking, ask: Any, request: Any) -> None:
        ask.settle(copy(ANSWER))
        self._ends.end(ask)

    _replace(asking.Asking, "_submit", submit)


def _on_loop(on: bool = True) -> None:
    _replace(BriefBatches, "group", lambda self, name: on)
    _replace(BriefBatches, "fits", lambda self, batch: on)


def _without_answer() -> None:
    def answer(self: ends.Ends) -> None:
        over, self._over = self._over, []
        for ask, _ in over:
            ask.settle(copy(ANSWER))
            self.end(ask)

    _replace(ends.Ends, "_answer", answer)
    _without_sinks()


def _without_sinks() -> None:
    _replace(ends.Ends, "_publish", lambda self, *args, **named: None)
    _replace(Audience, "_listening", lambda self, kind: [])
    _on_loop()


def _core() -> None:
    chunk = Done(ActionChunk(ACTIONS, 1, "off"))
    _replace(SlotProcessor, "run", lambda self, batch: [chunk] * len(batch))
    _without_answer()


STAGES: dict[str, tuple[str, Callable[[], None]]] = {
    "http": ("sockets, HTTP and the answer's head", _http),
    "json": ("JSON in and out, checked", _json),
    "request": ("version, state checked and normalised, request", _request),
    "core": ("admission, queue, batch, completion", _core),
    "model": ("model: rows into one array, ONNX Runtime, action guard", _without_answer),
    "answer": ("answer: fields and times of each request", _without_sinks),
    "sinks": ("metrics, verdicts, failure log", _on_loop),
    "thread": ("hand-over to the device thread and back", lambda: _on_loop(False)),
}
"""Every stage by its short name: what it is, and how a server is made of it and those before."""


if __name__ == "__main__":
    export, port, stage = sys.argv[1:]
    STAGES[stage][1]()
    sys.exit(main(["serve", export, "--port", port, "--no-supervise"]))
