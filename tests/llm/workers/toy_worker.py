"""A runtime process with the toy model, run as a file with its connection as standard input."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np
import numpy.typing as npt

from reflex_runtime.ipc.worker import serve
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.llm.runners.runner import Step
from reflex_runtime.llm.server.local_model import loading
from reflex_runtime.llm.server.model_host import ModelPlan


class Paced(ToyRunner):
    """The toy, with steps that take a moment where TOY_STEP_MS says so. With its adapter it says a's."""

    adapters = ("poet",)

    def __init__(self) -> None:
        super().__init__(4096, 16, 8192)

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        time.sleep(float(os.environ.get("TOY_STEP_MS", "0")) / 1e3)
        logits = super().forward(step)
        if step.adapters is not None:
            logits[step.adapters > 0, ord("a")] = 1000.0
        return logits


def make(plan: ModelPlan) -> tuple[ToyRunner, ByteTokenizer]:
    return Paced(), ByteTokenizer()


if __name__ == "__main__":
    load = loading(make, lambda: os._exit(1))
    status, clean = asyncio.run(serve(load))
    os._exit(status)
