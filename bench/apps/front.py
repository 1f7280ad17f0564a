"""`reflex serve` with one runtime process whose model costs next to nothing: `python -m bench.apps.front PORT`.

Steps take BENCH_STEP_MS milliseconds, as in `runtime_process`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial

from reflex_runtime.ipc.spawn import spawned
from reflex_runtime.llm.app import serving
from reflex_runtime.llm.engine.toy import ByteTokenizer
from reflex_runtime.llm.server.model_host import ModelPlan
from reflex_runtime.llm.server.workers import WorkersConfig, open_workers
from reflex_runtime.settings import LLMServeConfig
from reflex_runtime.web.serve import serve
from reflex_runtime.web.supervisor import bind


def main() -> None:
    """Serve until a signal."""
    command = [sys.executable, "-m", "bench.apps.runtime_process"]
    workers = WorkersConfig(lambda number: spawned(command), lambda config, number, restarts: {})
    config = LLMServeConfig(served_model_name="toy", workers=1)
    make = partial(serving, ModelPlan("toy", config), partial(open_workers, workers, ByteTokenizer()))
    status, clean = asyncio.run(serve(make, [bind("127.0.0.1", int(sys.argv[1]))], config))
    os._exit(status if clean else 1)


if __name__ == "__main__":
    main()
