"""ONNX Runtime alone: no server, no thread, no queue. Answers `n seconds` on standard input with call times."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from bench.models import STATE


def open_session(export: str) -> Any:
    """The model of an export, with the options `reflex serve` uses."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(Path(export) / "model.onnx"), options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Serve standard input."""
    session = open_session(sys.argv[1])
    for line in sys.stdin:
        n, seconds = int(line.split()[0]), float(line.split()[1])
        feeds = {"state": np.random.default_rng(0).normal(size=(n, STATE)).astype(np.float32)}
        session.run(None, feeds)
        times: list[float] = []
        end = time.perf_counter() + seconds
        while (now := time.perf_counter()) < end or len(times) < 3:
            session.run(None, feeds)
            times.append(time.perf_counter() - now)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
