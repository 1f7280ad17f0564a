"""Why frames of fast cameras give way: the sixteen cameras of `bench.cameras` with a light model, each loss beside how
long the threads of this process had waited for a core just before it.

    python -m bench.stalls [SECONDS]      files that are played at their own pace; Linux
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from bench.cameras import EACH, LOADS, MOST, RATES
from bench.detectors import write_model, write_video
from reflex_runtime.core.statistics import percentile
from reflex_runtime.feeds import Pipeline, Result, Runtime, source_of
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.run.coordinator import BatchConfig

EVERY_S: Final = 0.02  # between two looks at the threads
BEFORE_S: Final = 0.06  # of a loss
WARM_S: Final = 3.0

Frames = dict[str, list[tuple[int, float]]]  # of each camera, in order: the number and the time of what was answered


def main(seconds: float) -> None:
    taken: Frames = defaultdict(list)
    waits: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="reflex-stalls-") as root, Runtime() as runtime:
        side, size = LOADS["a light model"]
        detector = OnnxFrames(write_model(Path(root, "yolo.onnx"), side))
        batch = runtime.coordinator(detector, BatchConfig(max_batch_size=MOST))

        def took(result: Result) -> None:
            taken[result.feed].append((result.frame.sequence, result.frame.captured))

        for k, rate in enumerate(RATES * EACH):
            video = write_video(Path(root, f"{k}.mp4"), k, 2 * rate, size, rate)
            source = source_of(str(video), realtime=True, loop=True)
            runtime.feed(f"cam{rate}-{k}", source, Pipeline(batch=batch), sinks=[took])
        end = time.monotonic() + WARM_S + seconds
        waits += _waits(end)
    _say(taken, waits, end - seconds)


def _waits(end: float) -> Iterator[tuple[float, float]]:
    """(time, seconds that all threads of this process have waited for a core), now and then."""
    rest = threading.Event()
    while (now := time.monotonic()) < end:
        waited = 0
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has ended
                waited += int(Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()[1])
        yield now, waited / 1e9
        rest.wait(EVERY_S)


def _say(taken: Frames, waits: list[tuple[float, float]], since: float) -> None:
    lost: list[float] = []
    for rate in RATES:
        answered = gone = 0
        for name, frames in taken.items():
            frames = [frame for frame in frames if frame[1] >= since and name.startswith(f"cam{rate}-")]
            answered += len(frames)
            for (first, _), (last, at) in pairwise(frames):
                gone += last - first - 1
                lost += [at] * (last - first - 1)
        share = 100 * gone / (answered + gone)
        print(f"cameras of {rate} fps: {gone} of {answered + gone} frames gave way, {share:.2f} %")
    times = [at for at, _ in waits]

    def waited(at: float) -> float:
        first, last = max(0, bisect(times, at - BEFORE_S) - 1), min(len(times) - 1, bisect(times, at))
        return 1e3 * (waits[last][1] - waits[first][1])

    usual = sorted(waited(random.uniform(since, times[-1])) for _ in range(1000))
    most = percentile(usual, 0.95)
    print(f"waits for a core in {1e3 * BEFORE_S:.0f} ms, of all threads: p50 {median(usual):.0f}, p95 {most:.0f} ms")
    if lost:
        before = [waited(at) for at in lost]
        above = sum(each > most for each in before) / len(before)
        print(f"the same before a frame that gave way: p50 {median(before):.0f} ms, above that p95 {100 * above:.0f} %")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
