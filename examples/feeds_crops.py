"""What was found, cut out of its frames: a stage of your own. For cameras: reflex feeds … --stage feeds_crops:Crops"""

import re
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import simplejpeg

from reflex_runtime import Runtime
from reflex_runtime.feeds import Pipeline, Result
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.sources.shapes import DETECTOR, ShapesSource


class Crops:
    """Writes FOLDER/FEED/SEQUENCE-PLACE-LABEL.jpg for each box, and keeps the newest of them.

    It runs on the feed's thread: a slow disk makes a camera drop frames before they are computed.
    """

    def __init__(self, folder: str = "crops", keep: int = 200) -> None:
        self.folder, self.keep = Path(folder), keep
        self.kept: list[Path] = []  # a stage belongs to one feed

    def __call__(self, result: Result) -> Result:
        boxes, image = np.asarray(result.value["boxes"]).reshape(-1, 4), result.frame.image
        (self.folder / result.feed).mkdir(parents=True, exist_ok=True)
        for place, (box, label) in enumerate(zip(boxes, result.value["labels"], strict=True)):
            x0, y0, x1, y1 = np.concatenate([np.floor(box[:2]), np.ceil(box[2:])]).clip(0).astype(int)
            crop = np.ascontiguousarray(image[y0:y1, x0:x1])
            if min(crop.shape[:2]) >= 4:
                name = re.sub(r"[^\w.-]+", "_", f"{result.frame.sequence:06}-{place}-{label}.jpg")
                path = self.folder / result.feed / name
                path.write_bytes(simplejpeg.encode_jpeg(crop, 85, colorspace="RGB", colorsubsampling="420"))
                self.kept.append(path)
        while len(self.kept) > self.keep:
            self.kept.pop(0).unlink()
        return result


def main() -> None:
    crops = Crops(mkdtemp(), keep=12)
    with Runtime() as runtime:
        detector = runtime.coordinator(OnnxFrames(DETECTOR))
        source = ShapesSource(seed=3, seconds=2.0, realtime=False)
        runtime.feed("door", source, Pipeline(batch=detector, after=[crops]))
        runtime.wait()
    assert len(crops.kept) == len(list(crops.folder.glob("door/*.jpg"))) == 12
    print(f"{crops.folder}/door: {', '.join(path.name for path in crops.kept[-3:])}")


if __name__ == "__main__":
    main()
