"""An ONNX detector for the callers of many cameras: `reflex serve python:detector:Detector` in this directory.

curl localhost:8000/predict --data-binary @frame.jpg
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnxruntime
from PIL.Image import Image

from reflex_runtime.feeds.sources.shapes import DETECTOR  # the bundled one; put your file here

KINDS = ("circle", "square", "triangle")


@dataclass
class Box:
    kind: str
    score: float
    xyxy: list[float]  # in pixels of the picture


class Detector:
    def setup(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(DETECTOR, options, providers=["CPUExecutionProvider"])

    def predict(self, pictures: list[Image]) -> list[list[Box]]:
        """The shapes in a picture."""
        pixels = np.stack([np.asarray(picture.resize((320, 240))) for picture in pictures])
        found = zip(pictures, *self.session.run(["boxes", "scores", "labels"], {"image": pixels}), strict=True)
        return [list(boxes_of(*one)) for one in found]


def boxes_of(picture: Image, boxes: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> Iterator[Box]:
    scale = np.array([picture.width / 320, picture.height / 240] * 2)
    for box, score, label in zip(boxes, scores, labels, strict=True):
        if score > 0.5:
            yield Box(KINDS[label], round(float(score), 3), (box * scale).round(1).tolist())
