"""A runtime process whose model costs next to nothing: `python -m bench.apps.runtime_process`, started by its front.

Its steps take BENCH_STEP_MS milliseconds in which nobody computes, as on a device; what is left is the way there.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time

import numpy as np
import numpy.typing as npt

from reflex_runtime.ipc.worker import serve
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.llm.runners.runner import Step
from reflex_runtime.llm.server.local_model import loading
from reflex_runtime.llm.server.model_host import ModelPlan
from reflex_runtime.run.process import COLLECTIONS, loop_factory

STEP_MS = "BENCH_STEP_MS"


class Paced(ToyRunner):
    """Says the same token for ever, on a device that takes its time and leaves the processor to others."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._logits = np.zeros((1024, self.vocab_size), np.float32)
        self._logits[:, ord("a")] = 1.0

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        if self._seconds:
            time.sleep(self._seconds)
        return self._logits[: len(step.past_lens)]


def main() -> None:
    """Serve the connection until it ends."""
    seconds = float(os.environ.get(STEP_MS, "0")) / 1000.0

    def make(plan: ModelPlan) -> tuple[ToyRunner, ByteTokenizer]:
        return Paced(seconds), ByteTokenizer()

    gc.set_threshold(*COLLECTIONS)  # as `reflex worker` sets it
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        load = loading(make, lambda: os._exit(1))
        status, _ = runner.run(serve(load))
    os._exit(status)


if __name__ == "__main__":
    main()
