"""Adapters in an OpenVINO graph: what they add to its products, by the adapter that each token has."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from reflex_runtime.llm.adapters import AdapterStack
from reflex_runtime.processors.quiet import telemetry_off

telemetry_off()
import openvino as ov  # noqa: E402
from openvino import opset15 as ops  # noqa: E402

ADAPTER_IDS: Final = "adapter_ids"


def add_adapters(model: Any, stack: AdapterStack) -> None:
    """Add them to a graph of `openvino_graph`, in place; its products have the names of their layers.

    The graph gets an input `adapter_ids` of the shape of `input_ids`: the number of each token's adapter, 0 for none.
    """
    ids = ops.parameter([-1, -1], ov.Type.i32, name=ADAPTER_IDS)
    ids.output(0).set_names({ADAPTER_IDS})
    rows = ops.gather(ops.constant(stack.table), ids, ops.constant(np.array(0, np.int64)))
    products = {node.get_friendly_name(): node for node in model.get_ops() if node.get_type_name() == "MatMul"}
    for layer, (a, b) in stack.layers.items():
        product = products[layer]
        places = list(product.output(0).get_target_inputs())
        low = ops.multiply(ops.matmul(product.input_value(0), ops.constant(a), False, True), rows)
        total = ops.add(product, ops.matmul(low, ops.constant(b), False, True))
        for place in places:
            place.replace_source_output(total.output(0))
    model.add_parameters([ids])
    model.validate_nodes_and_infer_types()
