"""Step 2: a checkpoint becomes the ONNX file that comes with the package."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import onnx
import torch
from model import BOXES, HEIGHT, LABELS, WIDTH, Detector, Grid

from small_weights import shorten, shrink

OPSET = 17
OUTPUTS = {"boxes": [BOXES, 4], "scores": [BOXES], "labels": [BOXES]}


def write_onnx(detector: Detector, path: Path) -> None:
    """The leading axis of input and outputs is the batch, and the only symbolic one."""
    image = torch.randint(0, 256, (2, HEIGHT, WIDTH, 3), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracing exporter is deprecated but gives the smaller graph here
        torch.onnx.export(
            detector.eval(),
            (image,),
            str(path),
            input_names=["image"],
            output_names=list(OUTPUTS),
            dynamic_axes={name: {0: "batch"} for name in ("image", *OUTPUTS)},
            opset_version=OPSET,
            dynamo=False,
        )
    model = onnx.load(path)
    for output in model.graph.output:  # the tracer leaves some sizes symbolic, and a reader would take them for free
        for dim, size in zip(output.type.tensor_type.shape.dim[1:], OUTPUTS[output.name], strict=True):
            dim.dim_value = size
    onnx.helper.set_model_props(model, {"names": json.dumps(LABELS)})
    for node in model.graph.node:  # where in the training code it comes from interests nobody here
        node.doc_string = ""
        del node.metadata_props[:]
    shrink(model, 127)
    shorten(model)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, {len(model.graph.node)} nodes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="of train.py; `none` gives an untrained one")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    grid = Grid()
    if args.checkpoint.name != "none":
        grid.load_state_dict(torch.load(args.checkpoint, weights_only=True))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_onnx(Detector(grid), args.out)


if __name__ == "__main__":
    main()
