"""Small detectors in ONNX: each finds the lit rectangle of a picture, and says so in a form that exporters use.

What is lit is brighter than 0.5 in any channel. The classes are the channels: 0 red, 1 green, 2 blue; a class scores
the peak of its channel, and 0 in a dark picture. A raw head says it twice, a pixel apart, so that one must be left out.
Keypoints are the upper left corner and the lower right one, which is hardly visible; a mask is what is lit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper, parser

from reflex_runtime.feeds.detectors.heads import DetectionLimits, Dialect, Found

NAMES = "{0: 'red', 1: 'green', 2: 'blue'}"  # as ultralytics writes them
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)

_FOUND = """
    x = Cast<to=1>(images)
    lit = Greater(x, half)
    lit_float = Cast<to=1>(lit)
    flat = ReduceMax<keepdims=0>(lit_float, channels)
    columns = ReduceMax<keepdims=0>(flat, rows_axis)
    rows = ReduceMax<keepdims=0>(flat, columns_axis)
    x0 = ArgMax<axis=1>(columns)
    y0 = ArgMax<axis=1>(rows)
    x_last = ArgMax<axis=1, select_last_index=1>(columns)
    y_last = ArgMax<axis=1, select_last_index=1>(rows)
    x1 = Add(x_last, one)
    y1 = Add(y_last, one)
    corners = Concat<axis=1>(x0, y0, x1, y1)
    box = Cast<to=1>(corners)
    brightest = ReduceMax<keepdims=0>(x, pixels)
    any = ReduceMax<keepdims=1>(flat, all_pixels)
    any_flat = Reshape(any, column)
    peak = Mul(brightest, any_flat)
    middle = MatMul(box, to_middle)
"""  # box [n, 4] as corners, middle [n, 4] as middle and size, peak [n, 3]

_FORMS = {
    "raw": """
    both = Concat<axis=1>(middle, peak)
    first = Unsqueeze(both, two)
    second = Add(first, nudge)
    head = Concat<axis=2>(first, second)
    fine = Relu(head)
    found = Pad(fine, more_places)
    output0 = Add(found, elsewhere)
""",
    "raw rows": """
    both = Concat<axis=1>(middle, peak)
    first = Unsqueeze(both, two)
    second = Add(first, nudge)
    head = Concat<axis=2>(first, second)
    fine = Relu(head)
    found = Pad(fine, more_places)
    padded = Add(found, elsewhere)
    output0 = Transpose<perm=[0, 2, 1]>(padded)
""",
    "objectness": """
    half_peak = Mul(peak, half)
    twice = Add(half_peak, half)
    any_again = Mul(any_flat, most)
    both = Concat<axis=1>(middle, any_again, twice)
    first = Unsqueeze(both, two)
    second = Add(first, nudge_more)
    head = Concat<axis=2>(first, second)
    fine = Relu(head)
    found = Pad(fine, many_places)
    padded = Add(found, elsewhere)
    output0 = Transpose<perm=[0, 2, 1]>(padded)
""",
    "rows": """
    best = ReduceMax<keepdims=1>(peak, channels)
    label_number = ArgMax<axis=1>(peak)
    label = Cast<to=1>(label_number)
    both = Concat<axis=1>(box, best, label)
    first = Unsqueeze(both, channels)
    output0 = Pad(first, more_rows)
""",
    "rows of the first": """
    best = ReduceMax<keepdims=1>(peak, channels)
    label_number = ArgMax<axis=1>(peak)
    label = Cast<to=1>(label_number)
    both = Concat<axis=1>(box, best, label)
    first = Unsqueeze(both, channels)
    padded = Pad(first, more_rows)
    nothing = Sub(padded, padded)
    of_first = Slice(padded, zero, channels, zero)
    of_others = Slice(nothing, channels, far, zero)
    output0 = Concat<axis=0>(of_first, of_others)
""",
    "rows of shares": """
    best = ReduceMax<keepdims=1>(peak, channels)
    label_number = ArgMax<axis=1>(peak)
    label = Cast<to=1>(label_number)
    share = Div(middle, whole)
    both = Concat<axis=1>(share, best, label)
    first = Unsqueeze(both, channels)
    output0 = Pad(first, more_rows)
""",
    "pose": """
    placed = MatMul(box, to_points)
    points = Add(placed, visible)
    both = Concat<axis=1>(middle, peak, points)
    first = Unsqueeze(both, two)
    found = Pad(first, more_places)
    output0 = Add(found, elsewhere)
""",
    "segment": """
    weight = Add(any_flat, one_float)
    both = Concat<axis=1>(middle, peak, weight)
    first = Unsqueeze(both, two)
    found = Pad(first, more_places)
    output0 = Add(found, elsewhere)
    picture = Unsqueeze(flat, channels)
    pooled = AveragePool<kernel_shape=[4, 4], strides=[4, 4]>(picture)
    output1 = Sub(pooled, half)
""",
    "classes": """
    output0 = Identity(peak)
""",
    "pair": """
    share = Div(middle, whole)
    pred_boxes = Unsqueeze(share, channels)
    odds_up = Sub(peak, half)
    odds = Mul(odds_up, steep)
    logits = Unsqueeze(odds, channels)
""",
    "named": """
    best = ReduceMax<keepdims=1>(peak, channels)
    scores = Identity(best)
    labels = ArgMax<axis=1>(peak)
    boxes = Unsqueeze(box, channels)
""",
}


def places(size: tuple[int, int]) -> int:
    """Cells of the grids of a head without anchors."""
    return sum(-(-size[0] // stride) * -(-size[1] // stride) for stride in (8, 16, 32))


def elsewhere_of(size: tuple[int, int], columns: int, boxes: int = 1) -> NDArray[np.float32]:
    """A raw head [1, columns, k] that finds nothing: at each place a box of 9 × 9 in the middle of its cell."""
    parts = []
    for stride in (8, 16, 32):
        rows, across = np.indices((-(-size[1] // stride), -(-size[0] // stride))).reshape(2, -1) * stride + stride / 2
        parts += [np.stack([across, rows, np.full_like(rows, 9), np.full_like(rows, 9)])] * boxes
    head = np.zeros((1, columns, places(size) * boxes), np.float32)
    head[:, :4] = np.concatenate(parts, axis=1)
    return head


def bright_graph(
    path: Path,
    form: str = "raw",
    size: tuple[int, int] = (64, 64),
    batch: int | str = "n",
    dtype: str = "float",
    metadata: Mapping[str, str] | None = None,
    open_size: bool | str = False,
    wants_size: bool = False,
) -> Path:
    """Write the graph. size: width and height. open_size: the graph takes any, and only its metadata says it; or its
    height and width as they are written.

    metadata: beside `names`; a value "" leaves it out. wants_size: a second input `orig_target_sizes`, in whose pixels
    boxes are given.
    """
    width, height = size
    k = places(size)
    shapes = {
        "raw": f"[{batch}, 7, {k}] output0",
        "raw rows": f"[{batch}, {k}, 7] output0",
        "objectness": f"[{batch}, {3 * k}, 8] output0",
        "rows": f"[{batch}, 300, 6] output0",
        "rows of the first": f"[{batch}, 300, 6] output0",
        "rows of shares": f"[{batch}, 300, 6] output0",
        "pose": f"[{batch}, 13, {k}] output0",
        "segment": f"[{batch}, 8, {k}] output0, float[{batch}, 1, {height // 4}, {width // 4}] output1",
        "classes": f"[{batch}, 3] output0",
        "pair": f"[{batch}, 1, 3] logits, {dtype}[{batch}, 1, 4] pred_boxes",
        "named": f"[{batch}, 1, 4] boxes, float[{batch}, 1] scores, int64[{batch}, 1] labels",
    }
    sides = open_size if isinstance(open_size, str) else "h, w" if open_size else f"{height}, {width}"
    inputs = f"{dtype}[{batch}, 3, {sides}] images" + (f", int64[{batch}, 2] orig_target_sizes" if wants_size else "")
    body = _FOUND + _FORMS[form]
    if wants_size:
        body = body.replace("boxes = Unsqueeze(box, channels)", _IN_ORIGINAL)
    if dtype != "float":
        body = body.replace("output0 = ", "wide = ") + "    output0 = Cast<to=10>(wide)\n"
    text = f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => ({dtype}{shapes[form]}) {{{body}}}'
    model = parser.parse_model(text)
    constants = _constants(form, width, height, k)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants)
    said = {"names": NAMES, "stride": "32", "imgsz": f"[{height}, {width}]", **(metadata or {})}
    helper.set_model_props(model, {key: value for key, value in said.items() if value})
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


_IN_ORIGINAL = """sizes = Cast<to=1>(orig_target_sizes)
    sizes_twice = Concat<axis=1>(sizes, sizes)
    stretched = Mul(box, sizes_twice)
    original = Div(stretched, whole)
    boxes = Unsqueeze(original, channels)"""


def _constants(form: str, width: int, height: int, k: int) -> list[tuple[str, NDArray[Any]]]:
    f, i = np.float32, np.int64
    columns = {"objectness": 8, "pose": 13, "segment": 8}.get(form, 7)
    elsewhere = elsewhere_of((width, height), columns, 3 if form == "objectness" else 1)
    elsewhere[..., : 1 if form in ("pose", "segment") else 2] = 0
    to_middle = np.array([[0.5, 0, -1, 0], [0, 0.5, 0, -1], [0.5, 0, 1, 0], [0, 0.5, 0, 1]], f)
    nudge = np.array([1, 0, 0, 0, -0.1, -0.1, -0.1], f)[None, :, None]
    nudge_more = np.array([1, 0, 0, 0, -0.1, 0, 0, 0], f)[None, :, None]
    return [
        ("elsewhere", elsewhere),
        ("half", np.array(0.5, f)),
        ("one", np.array(1, i)),
        ("zero", np.array([0], i)),
        ("far", np.array([999], i)),
        ("channels", np.array([1], i)),
        ("two", np.array([2], i)),
        ("rows_axis", np.array([1], i)),
        ("columns_axis", np.array([2], i)),
        ("pixels", np.array([2, 3], i)),
        ("all_pixels", np.array([1, 2], i)),
        ("column", np.array([-1, 1], i)),
        ("to_middle", to_middle),
        ("nudge", nudge),
        ("nudge_more", nudge_more),
        ("most", np.array(0.9, f)),
        ("steep", np.array(8, f)),
        ("to_points", np.array([[1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0]], f)),
        ("visible", np.array([[0, 0, 0.9, 0, 0, 0.2]], f)),
        ("one_float", np.array([[1]], f)),
        ("whole", np.array([width, height, width, height], f)),
        ("more_places", np.array([0, 0, 0, 0, 0, k - (1 if form in ("pose", "segment") else 2)], i)),
        ("many_places", np.array([0, 0, 0, 0, 0, 3 * k - 2], i)),
        ("more_rows", np.array([0, 0, 0, 0, 299, 0], i)),
    ]


def lit(box: tuple[int, int, int, int], colour: tuple[int, int, int], size: tuple[int, int]) -> NDArray[np.uint8]:
    """A dark picture [h, w, 3] with one rectangle. box: x0, y0, x1, y1. size: width and height."""
    picture = np.zeros((size[1], size[0], 3), np.uint8)
    x0, y0, x1, y1 = box
    picture[y0:y1, x0:x1] = colour
    return picture


def found_in(dialect: Dialect, outputs: Mapping[str, NDArray[Any]], limits: DetectionLimits) -> list[Found]:
    """What a dialect finds in each picture of outputs [n, …]."""
    count = len(next(iter(outputs.values())))
    return [dialect.found({name: array[i] for name, array in outputs.items()}, limits) for i in range(count)]
