"""Weights of an ONNX graph as integers of 8 bits, widened again when it is loaded: a quarter of the file, or less.

Each large float initializer becomes integers and a scale per output. Cast and Mul make floats of them; they have
constant inputs, so every runtime folds them at load, and a call costs what it did.

    python small_weights.py model.onnx --levels 31
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

LEAST = 256  # numbers of a weight that is worth it


def rounded(weight: NDArray[np.float32], levels: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers within ±levels, and the scale of each output: of convolutions the first axis, else the last."""
    output = 0 if weight.ndim == 4 else weight.ndim - 1
    largest = np.abs(weight).max(tuple(axis for axis in range(weight.ndim) if axis != output), keepdims=True)
    scale = np.where(largest > 0, largest / levels, 1).astype(np.float32)
    return np.rint(weight / scale).astype(np.int8), scale


def shrink(model: onnx.ModelProto, levels: int) -> None:
    graph, widened = model.graph, []
    for held in list(graph.initializer):
        weight, name = numpy_helper.to_array(held), held.name
        if weight.dtype != np.float32 or weight.size < LEAST:
            continue
        small, scale = rounded(weight, levels)
        graph.initializer.remove(held)
        graph.initializer.append(numpy_helper.from_array(small, f"{name}.small"))
        graph.initializer.append(numpy_helper.from_array(scale, f"{name}.scale"))
        widened.append(helper.make_node("Cast", [f"{name}.small"], [f"{name}.whole"], to=TensorProto.FLOAT))
        widened.append(helper.make_node("Mul", [f"{name}.whole", f"{name}.scale"], [name]))
    nodes = [*widened, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def shorten(model: onnx.ModelProto) -> None:
    """Number the tensors inside: where a graph has many small nodes, their names are most of the file."""
    graph = model.graph
    names = {"": ""} | {tensor.name: tensor.name for tensor in (*graph.input, *graph.output)}
    for node in graph.node:
        node.name = ""
        for tensors in (node.input, node.output):
            tensors[:] = [names.setdefault(tensor, f"{len(names):x}") for tensor in tensors]
    for held in graph.initializer:
        held.name = names[held.name]
    del graph.value_info[:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--shorten", action="store_true", help="number the tensors inside, too")
    parser.add_argument("--levels", type=int, default=127, help="fewer are smaller in a wheel, which is compressed")
    args = parser.parse_args()
    for file in args.files:
        model = onnx.load(file)
        shrink(model, args.levels)
        if args.shorten:
            shorten(model)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, file)
        print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
