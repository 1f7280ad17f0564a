"""Step 3: how good is the exported detector, and what does a batch cost? Prints the figures that the README states."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from scoring import Truth, hits, truth_of, write_scene

from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.sources.shapes import DETECTOR, LABELS, Shapes
from reflex_runtime.run.coordinator import BatchEntry
from reflex_runtime.run.onnx_session import OnnxSession

HELD_OUT = 1_000_000  # seeds from here on were never trained on
Seen = tuple[NDArray[np.uint8], list[Truth]]


def scenes(size: tuple[int, int], count: int) -> Iterator[Seen]:
    for seed in range(HELD_OUT, HELD_OUT + 200):
        scene = Shapes(seed, size, count)
        for i in range(0, 100, 20):
            yield scene.picture(i), truth_of(scene, i)


def videos(directory: Path) -> Iterator[Seen]:
    for seed in range(HELD_OUT, HELD_OUT + 20):
        path, scene = directory / f"{seed}.mp4", Shapes(seed)
        write_scene(path, 50 / 15, seed=seed)
        with av.open(str(path)) as container:
            for i, frame in enumerate(container.decode(video=0)):
                yield frame.to_ndarray(format="rgb24"), truth_of(scene, i)


def figures(detector: OnnxFrames, seen: Iterable[Seen]) -> str:
    """Pictures, shapes, precision, recall, mean overlap of what was found, and recall of each label."""
    pictures = wanted = answered = 0
    overlaps: list[float] = []
    of_label = {label: [0, 0] for label in LABELS}
    for picture, truth in seen:
        (found,) = detector.process([BatchEntry("check", picture, None, 0, None, 0.0)])
        pictures, wanted, answered = pictures + 1, wanted + len(truth), answered + len(found["boxes"])
        overlaps += hits(truth, found["boxes"], found["labels"])
        for label, counts in of_label.items():
            true = [shape for shape in truth if shape[0] == label]
            counts[0] += len(hits(true, found["boxes"], found["labels"]))
            counts[1] += len(true)
    recalls = " | ".join(f"{found / all_:.3f}" for found, all_ in of_label.values())
    share = f"{len(overlaps) / answered:.3f} | {len(overlaps) / wanted:.3f} | {statistics.mean(overlaps):.3f}"
    return f"{pictures} | {wanted} | {share} | {recalls}"


def costs(repeat: int) -> None:
    session = OnnxSession(DETECTOR)
    rng = np.random.default_rng(0)
    print("\n| batch | ms | ms per picture |\n| --- | --- | --- |")
    for n in (1, 2, 4, 8, 16):
        rows = {"image": rng.integers(0, 256, (n, 240, 320, 3), np.uint8)}
        times = []
        for _ in range(repeat):
            began = time.perf_counter()
            session.run(rows)
            times.append(1e3 * (time.perf_counter() - began))
        median = statistics.median(times)
        print(f"| {n} | {median:.2f} | {median / n:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--score", type=float, default=0.5)
    parser.add_argument("--repeat", type=int, default=200)
    args = parser.parse_args()
    detector = OnnxFrames(DETECTOR, score=args.score)
    detector.on_start()
    heads = ["seen", "pictures", "shapes", "precision", "recall", "mean overlap", *(f"{label}s" for label in LABELS)]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    print(f"| as drawn, 320 × 240, 3 shapes | {figures(detector, scenes((320, 240), 3))} |")
    print(f"| 6 shapes | {figures(detector, scenes((320, 240), 6))} |")
    print(f"| 640 × 480 | {figures(detector, scenes((640, 480), 3))} |")
    print(f"| 480 × 270 | {figures(detector, scenes((480, 270), 3))} |")
    print(f"| 160 × 120 | {figures(detector, scenes((160, 120), 3))} |")
    with tempfile.TemporaryDirectory() as directory:
        print(f"| decoded from H.264, 320 × 240 | {figures(detector, videos(Path(directory)))} |")
    costs(args.repeat)


if __name__ == "__main__":
    main()
