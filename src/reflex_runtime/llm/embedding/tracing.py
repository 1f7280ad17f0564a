"""Converts an embedding model of `transformers` to OpenVINO, by tracing it.

    python -m reflex_runtime.llm.embedding.tracing MODEL_DIR NEW_DIR

A program of its own, because PyTorch and the traced model take memory that a server does not need afterwards. It leaves
openvino_model.xml and .bin and `probe.npy`: the states of transformers for `probe_texts`, which the graph must give.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np

from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.embedding.encoder import laid_out
from reflex_runtime.llm.embedding.openvino_encoder import probe_texts
from reflex_runtime.llm.openvino_export import MODEL_FILE, PROBE_FILE
from reflex_runtime.processors.quiet import telemetry_off

telemetry_off()
import openvino as ov  # noqa: E402
import torch  # noqa: E402

from reflex_runtime.llm.embedding.transformers_encoder import States, load, masks_by_broadcasting  # noqa: E402
from reflex_runtime.llm.openvino_tracing import converting  # noqa: E402


def convert(directory: Path, target: Path) -> None:
    """Leave the converted model in `target`, which exists. ConfigError for what cannot be converted."""
    model = EmbeddingModel.open(directory)
    states = States(load(model)).eval()
    ids, mask = map(torch.from_numpy, laid_out(probe_texts(model), model.pad_id))
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer, and of models that are traced
        expected = states(ids, mask).float().numpy()  # with the masks of transformers, so that it shows if ours differ
        with masks_by_broadcasting():
            traced = ov.convert_model(  # with another length than the probe's: one that was built in would show there
                states,
                example_input={"input_ids": ids[:, :3], "attention_mask": mask[:, :3]},
                input=[(ov.PartialShape([-1, -1]), ov.Type.i64)] * 2,
            )
    traced.inputs[0].get_tensor().set_names({"input_ids"})
    traced.inputs[1].get_tensor().set_names({"attention_mask"})
    traced.outputs[0].get_tensor().set_names({"last_hidden_state"})
    ov.save_model(traced, target / MODEL_FILE, compress_to_fp16=False)
    np.save(target / PROBE_FILE, expected)


if __name__ == "__main__":
    sys.exit(converting(convert))
