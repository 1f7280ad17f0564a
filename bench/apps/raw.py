"""ONNX Runtime alone: no server, no thread, no queue. Answers `n seconds` on standard input with call times."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pybase64

from bench.models import STATE


def open_session(export: str) -> Any:
    """The model of an export, with the options `reflex serve` uses."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(Path(export) / "model.onnx"), options, providers=["CPUExecutionProvider"])


class Model:
    """The model of an export behind a server: one row for a request, one call for many rows."""

    def __init__(self, export: str) -> None:
        self.session = open_session(export)
        self.cameras = [found.name for found in self.session.get_inputs() if found.name != "state"]

    def row(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request's inputs. Its pictures are decoded by the libraries that `reflex serve` uses."""
        return {"state": body["state"], **{name: _decoded(pybase64.b64decode(body[name])) for name in self.cameras}}

    def feeds(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The inputs of one call."""
        states = np.array([row["state"] for row in rows], np.float32)
        return {"state": states, **{name: np.stack([row[name] for row in rows]) for name in self.cameras}}

    def run(self, feeds: dict[str, Any]) -> Any:
        """One chunk for each row, as lists."""
        return self.session.run(None, feeds)[0].tolist()

    def answer(self, chunk: Any, size: int) -> dict[str, Any]:
        """The body of an answer from a batch of `size`."""
        return {"actions": chunk, "batch": {"size": size}}


def _decoded(data: bytes) -> Any:
    if data.startswith(b"\xff\xd8"):
        import simplejpeg

        return simplejpeg.decode_jpeg(data, "RGB")
    import kornia_rs

    return kornia_rs.io.decode_image_png_u8(data, struct.unpack(">II", data[16:24])[::-1], "rgb")


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
