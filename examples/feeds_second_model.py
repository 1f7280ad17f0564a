"""A second model on crops of what the first found. reflex feeds … --processor feeds_second_model:Processor"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from reflex_runtime import BatchEntry, Runtime
from reflex_runtime.feeds import Pipeline, Result
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.sources.shapes import DETECTOR, ShapesSource


class Processor:
    """`then` of a result is what the second model says of each box, None for one without a pixel in the frame."""

    id = "detector and second"

    def __init__(self) -> None:
        self.first, self.second = OnnxFrames(DETECTOR, id="first"), OnnxFrames(DETECTOR, id="second")

    def on_start(self) -> None:
        self.first.on_start()
        self.second.on_start()

    def process(self, entries: Sequence[BatchEntry]) -> list[Any]:
        results, crops, places = self.first.process(entries), [], []
        for entry, result in zip(entries, results, strict=True):
            if isinstance(result, dict):  # else this frame failed
                result["then"] = [None] * len(result["boxes"])
                for box, (x0, y0, x1, y1) in enumerate(np.array(result["boxes"], int).reshape(-1, 4)):
                    crop = np.ascontiguousarray(entry.frame[max(0, y0) : y1 + 1, max(0, x0) : x1 + 1])
                    if crop.size:
                        crops.append(BatchEntry(entry.feed_id, crop))
                        places.append((result["then"], box))
        for (then, box), answer in zip(places, self.second.process(crops), strict=True):
            then[box] = answer
        return results

    def on_stop(self) -> None:  # the models go with this object
        pass


def main() -> None:
    results: list[Result] = []
    with Runtime() as runtime:
        both = runtime.coordinator(Processor())
        for seed in (3, 4):
            source = ShapesSource(seed, seconds=2.0, realtime=False)
            runtime.feed(f"door {seed}", source, Pipeline(batch=both), [results.append])
        runtime.wait()
    boxes = [pair for one in results for pair in zip(one.value["labels"], one.value["then"], strict=True)]
    agree = sum(label in then["labels"] for label, then in boxes)
    assert agree > len(boxes) / 2
    print(f"in {agree} of {len(boxes)} crops the second model sees what the first one saw")


if __name__ == "__main__":
    main()
