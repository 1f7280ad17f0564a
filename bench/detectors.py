"""Cameras on a detector as it is exported: what decoding its head and preparing its frames cost, and the whole path.

The model has the form of a YOLO head, [n, 84, 8400] for 640 × 640, and random weights: three convolutions, so that it
is fast, and what is beside it shows. The loop by hand reads the same files, one frame or one batch after the other, and
uses OpenCV's own suppression.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.report import Row, row, say
from reflex_runtime import BatchConfig, Runtime
from reflex_runtime.feeds import JsonLines, Pipeline, source_of
from reflex_runtime.feeds.detectors.heads import LETTERBOX, DetectionLimits, RawHead
from reflex_runtime.feeds.detectors.onnx import OnnxFrames
from reflex_runtime.feeds.detectors.picture_input import Fit, PictureInput, result_of
from reflex_runtime.run.onnx_session import CPU, OnnxSession

SIDE: Final = 640
FILES: Final = 4
LIMITS: Final = DetectionLimits(0.25, 0.7, 300)


def detectors(scale: float) -> list[Row]:
    return [*_heads(scale), *_preparing(scale), *_paths(scale)]


# -- parts -------------------------------------------------------------------------------------------------------------


def _heads(scale: float) -> list[Row]:
    names = {i: f"class {i}" for i in range(80)}
    fit = Fit(1 / 3, 1 / 3, 0.0, 140.0, 1920, 1080)
    head = RawHead("head", 80)
    rows = []
    for candidates in (0, 80, 1000):
        for n in (1, 4, 8):
            outputs = {"head": _crowd(n, candidates)}

            def call(outputs: Any = outputs) -> None:
                for array in outputs["head"]:
                    result_of(head.found({"head": array}, LIMITS), fit, names, (SIDE, SIDE))

            what = f"decoding 84 × 8400, {candidates} places above the score, batch of {n}: ms a frame"
            rows.append(row("detectors", what, [ms / n for ms in _timed(call, scale)], "ms"))
    return rows


def _preparing(scale: float) -> list[Row]:
    random = np.random.default_rng(0)
    frame = random.integers(0, 256, (720, 1280, 3), dtype=np.uint8)
    entry = PictureInput("images", np.float32, False, (SIDE, SIDE), False)
    rows = []
    for n in (1, 4, 8):

        def call(n: int = n) -> None:
            entry.tensors([entry.fitted(frame, LETTERBOX) for _ in range(n)], None)

        times = _timed(call, scale)
        what = f"letterbox of 1280 × 720 and tensor, batch of {n}: ms a frame"
        rows.append(row("detectors", what, [ms / n for ms in times], "ms"))
    return rows


def _crowd(n: int, candidates: int) -> NDArray[np.float32]:
    """Heads with so many places that may score enough, eight around each thing."""
    random = np.random.default_rng(0)
    heads = np.zeros((n, 84, 8400), np.float32)
    heads[:, :2] = random.uniform(0, SIDE, (n, 2, 8400))
    heads[:, 2:4] = random.uniform(10, 200, (n, 2, 8400))
    heads[:, 4:] = random.uniform(0, 0.02, (n, 80, 8400))
    things = max(1, candidates // 8)
    for head in heads if candidates else ():
        at, thing = random.choice(8400, candidates, replace=False), random.integers(0, things, candidates)
        head[:2, at] = random.uniform(50, 590, (2, things))[:, thing] + random.normal(0, 3, (2, candidates))
        head[2:4, at] = random.uniform(30, 150, (2, things))[:, thing] * random.uniform(0.9, 1.1, (2, candidates))
        head[4 + random.integers(0, 80, things)[thing], at] = random.uniform(0.25, 0.95, candidates)
    return heads


def _timed(call: Callable[[], object], scale: float) -> list[float]:
    """Milliseconds of a call: the medians of five rounds."""
    call()
    rounds = []
    for _ in range(5):
        taken, end = [], time.perf_counter() + 0.2 * scale
        while not taken or time.perf_counter() < end:
            began = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - began))
        rounds.append(median(taken))
    return rounds


# -- the whole path ----------------------------------------------------------------------------------------------------


def _paths(scale: float) -> list[Row]:
    frames = max(8, round(60 * scale))
    kinds: dict[str, Callable[[Path, Sequence[Path]], float]] = {
        "reflex": _through_feeds,
        "by hand, frame by frame": lambda model, files: _by_hand(model, files, 1),
        "by hand, a batch of all": lambda model, files: _by_hand(model, files, len(files)),
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="reflex-detectors-") as root:
        model = write_model(Path(root, "yolo.onnx"))
        files = [write_video(Path(root, f"{k}.mp4"), k, frames) for k in range(FILES)]
        for number in range(5):
            say(f"detectors: round {number + 1} of 5")
            for kind in list(kinds)[:: 1 if number % 2 else -1]:
                rates[kind].append(kinds[kind](model, files))
    what = f"{FILES} files of 1280 × 720"
    found = [row("detectors", f"{what}, {kind}: frames a second", rates[kind], "/s") for kind in kinds]
    for kind in list(kinds)[1:]:
        over = [a / b for a, b in zip(rates["reflex"], rates[kind], strict=True)]
        found.append(row("detectors", f"{what}: reflex over {kind}", over, "x", least=0.95))
    return found


def _through_feeds(model: Path, files: Sequence[Path]) -> float:
    times: list[float] = []

    def took(_: object) -> None:
        times.append(time.perf_counter())

    with Runtime() as runtime:
        config = BatchConfig(max_batch_size=len(files), response_timeout=60.0)
        detector = runtime.coordinator(OnnxFrames(model), config)
        lines = JsonLines(model.parent / "found.jsonl")
        for k, file in enumerate(files):
            runtime.feed(f"cam{k}", source_of(str(file)), Pipeline(batch=detector), sinks=[lines, took])
        began = time.perf_counter()
        runtime.wait()
    return len(times) / (times[-1] - began)


def _by_hand(model: Path, files: Sequence[Path], size: int) -> float:
    import av
    import cv2

    session = OnnxSession(model, provider=CPU)
    session.run({"images": np.zeros((size, 3, SIDE, SIDE), np.float32)})
    began, answered = time.perf_counter(), 0
    with (model.parent / "by-hand.jsonl").open("w", encoding="utf-8") as lines:
        streams: list[Iterator[Any]] = [av.open(str(file)).decode(video=0) for file in files]
        for group in zip(*streams, strict=True):
            pictures = [frame.to_ndarray(format="rgb24") for frame in group]
            for first in range(0, len(pictures), size):
                part = pictures[first : first + size]
                for k, value in enumerate(answers_by_hand(session, part, cv2)):
                    lines.write(json.dumps({"feed": first + k, "value": value}) + "\n")
                    answered += 1
    return answered / (time.perf_counter() - began)


def answers_by_hand(
    session: OnnxSession, pictures: Sequence[NDArray[np.uint8]], cv2: Any, side: int = SIDE
) -> list[list[list[float]]]:
    """What one writes for a batch: letterbox, the model, and OpenCV's suppression."""
    tensor = np.empty((len(pictures), 3, side, side), np.float32)
    for i, picture in enumerate(pictures):
        height, width = picture.shape[:2]
        scale = min(side / width, side / height)
        new_w, new_h = round(width * scale), round(height * scale)
        top, left = (side - new_h) // 2, (side - new_w) // 2
        place = np.full((side, side, 3), 114, np.uint8)
        place[top : top + new_h, left : left + new_w] = cv2.resize(picture, (new_w, new_h))
        tensor[i] = place.transpose(2, 0, 1)
    tensor /= 255
    answers = []
    for head in session.run({"images": tensor})["output0"]:
        scores = head[4:].max(axis=0)
        rows = head[:, scores >= LIMITS.score].T
        labels, best = rows[:, 4:].argmax(axis=1), rows[:, 4:].max(axis=1)
        boxes = np.concatenate([rows[:, :2] - rows[:, 2:4] / 2, rows[:, 2:4]], axis=1)
        kept = cv2.dnn.NMSBoxesBatched(boxes.tolist(), best.tolist(), labels.tolist(), LIMITS.score, LIMITS.iou)
        answers.append([[*boxes[k].tolist(), float(best[k]), int(labels[k])] for k in list(kept)[: LIMITS.most]])
    return answers


def write_model(path: Path, side: int = SIDE) -> Path:
    """A graph of the form of a YOLO head for pictures of that side: each box lies in or near its cell."""
    import onnx
    from onnx import helper, numpy_helper, parser

    from reflex_runtime.feeds.detectors.heads import cells_of

    random = np.random.default_rng(0)
    lines, tensors = [], {"flat": np.array([0, 84, -1], np.int64)}
    for stride in (8, 16, 32):
        weights = random.normal(0, 0.1 / stride, (84, 3, stride, stride)).astype(np.float32)
        weights[:4] *= 300  # boxes in pixels
        tensors[f"w{stride}"] = weights
        tensors[f"b{stride}"] = np.array([0, 0, 80, 80, *[0.0] * 80], np.float32)
        sizes = f"strides=[{stride}, {stride}], kernel_shape=[{stride}, {stride}]"
        lines.append(f"c{stride} = Conv<{sizes}>(images, w{stride}, b{stride})")
        lines.append(f"r{stride} = Reshape(c{stride}, flat)")
    places = sum((side // stride) ** 2 for stride in (8, 16, 32))
    cells = cells_of((side, side), places)
    assert cells is not None
    tensors["middles"] = np.zeros((84, places), np.float32)
    tensors["middles"][:2] = cells[:, :2].T
    lines.append("all = Concat<axis=2>(r8, r16, r32)")
    lines.append("output0 = Add(all, middles)")
    ports = f"float[n, 3, {side}, {side}] images) => (float[n, 84, {places}] output0"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g ({ports}) {{{"".join(lines)}}}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    helper.set_model_props(model, {"names": str({i: f"class {i}" for i in range(80)})})
    onnx.save(model, path)
    return path


def write_video(
    path: Path, number: int, frames: int, size: tuple[int, int] = (1280, 720), rate: int = 25
) -> Path:
    """Blurred noise that moves."""
    import av
    import cv2

    random = np.random.default_rng(number)
    ground = cv2.resize(random.integers(0, 256, (60, 100, 3), dtype=np.uint8), (1600, 960))
    width, height = size
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for k in range(frames):
            picture = np.ascontiguousarray(ground[k : k + height, 2 * k : 2 * k + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return path
