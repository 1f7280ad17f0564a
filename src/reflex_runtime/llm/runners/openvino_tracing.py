"""Converts a checkpoint of any architecture of `transformers` to an ordinary OpenVINO decoder, by tracing it.

    python -m reflex_runtime.llm.runners.openvino_tracing MODEL_DIR NEW_DIR

It is a program of its own, because a server does not need the memory of PyTorch and the traced model afterwards. It
writes openvino_model.xml and .bin, a copy of config.json, `traced.json` (the window of each layer) and `probe.npy`: the
logits of transformers after a few tokens. The runner checks that paged attention gives the same before it serves.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.llm.runners.checkpoint import CONFIG_FILE
from reflex_runtime.llm.runners.openvino_graph import causal_mask, i64, remembered, spread_heads
from reflex_runtime.llm.runners.openvino_source import MODEL_FILE, PROBE_FILE, TRACED_FILE, last_line
from reflex_runtime.llm.runners.runner import probe
from reflex_runtime.llm.runners.transformers_model import Attention, attending, layers_of, load, reference
from reflex_runtime.run.process import telemetry_off

telemetry_off()
import openvino as ov  # noqa: E402
import torch  # noqa: E402
from openvino import opset15 as ops  # noqa: E402
from openvino.frontend.pytorch import ConversionExtension, ModuleExtension  # noqa: E402

_SITE: Final = "reflex_attention"


class _Site(torch.nn.Module):  # type: ignore[misc]
    """Marks the place of a layer's attention, for which OpenVINO's converter calls `_Layer`."""

    def forward(self, query: Any, key: Any, value: Any, mask: Any, beams: Any) -> Any:
        return query.transpose(1, 2).contiguous()


class _Whole(torch.nn.Module):  # type: ignore[misc]
    """The model with the inputs of a graph, of which only attention uses mask and beams."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, beam_idx: Any) -> Any:
        def site(module: Any, asked: Attention, query: Any, key: Any, value: Any) -> Any:
            return getattr(module, _SITE)(query, key, value, attention_mask, beam_idx)

        with attending(site):
            return self.model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, return_dict=False
            )[0]  # fmt: skip


class _Layer:
    """A layer's attention in the graph."""

    def __init__(self, asked: Attention, sinks: list[Any]) -> None:
        self._asked, self._sinks = asked, sinks

    def __call__(self, context: Any) -> Any:
        asked = self._asked
        query, key, value, mask, beams = (context.get_input(place) for place in range(5))
        query = _shaped(query, asked.heads, asked.head_dim)
        states = []
        for name, heads in (("key", key), ("value", value)):
            own = _shaped(heads, asked.kv_heads, asked.head_dim)
            own = remembered(f"{asked.layer}.{name}", own, query, beams, self._sinks)
            states.append(spread_heads(own, asked.heads, asked.kv_heads, asked.head_dim))
        tokens = ops.gather(ops.shape_of(query), i64(2), i64(0))
        seen = causal_mask(mask, tokens, asked.window)
        scale = ops.constant(np.array(asked.scale, np.float32))
        mixed = ops.scaled_dot_product_attention(query, *states, seen, scale)
        return ops.transpose(mixed, i64([0, 2, 1, 3])).outputs()


def convert(directory: Path, target: Path) -> None:
    """Write the converted model to `target`, which exists. ConfigError for a model that cannot be converted."""
    model = load(directory, torch.float32, fixed_shapes=True)
    layers = layers_of(model)
    if any(asked.softcap for asked in layers.values()):
        cap = next(asked.softcap for asked in layers.values() if asked.softcap)
        why = f"bounds its attention scores at {cap:g}, which OpenVINO's paged attention cannot do"
        raise ConfigError(f"{directory}: the model {why}; serve it with --runner torch")
    vocab = model.config.get_text_config(decoder=True).vocab_size
    expected = reference(model, probe(vocab).tolist())[-1].numpy()
    graph = _trace(model, layers)
    ov.save_model(graph, target / MODEL_FILE, compress_to_fp16=False)
    windows = [layers[layer].window for layer in sorted(layers)]
    (target / TRACED_FILE).write_text(json.dumps({"windows": windows}))
    np.save(target / PROBE_FILE, expected)
    shutil.copyfile(directory / CONFIG_FILE, target / CONFIG_FILE)


def _trace(model: Any, layers: dict[int, Attention]) -> Any:
    sinks: list[Any] = []
    extensions: list[Any] = []
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if layer in layers and not hasattr(module, _SITE):
            site = _Site()
            module.add_module(_SITE, site)
            name = f"reflex::attention_{layer}_{len(extensions)}"
            extensions.append(ModuleExtension(site, name, convert=lambda module, target, *given: target(*given)))
            extensions.append(ConversionExtension(name, _Layer(layers[layer], sinks)))
    ids = torch.arange(6).reshape(2, 3)
    example = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(3).expand(2, 3),
        "beam_idx": torch.zeros(2, dtype=torch.int32),
    }
    kinds = [(ov.PartialShape([-1] * (1 + (name != "beam_idx"))), _type(name)) for name in example]
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer, and of models that are traced
        traced = ov.convert_model(_Whole(model).eval(), example_input=example, input=kinds, extension=extensions)
    for port in traced.inputs:
        port.get_node().set_friendly_name(port.get_any_name())  # paging looks for both names
    traced.outputs[0].get_tensor().set_names({"logits"})
    whole = ov.Model(traced.get_results(), sinks, traced.get_parameters(), model.config.model_type)
    whole.validate_nodes_and_infer_types()
    return whole


def _type(name: str) -> Any:
    return ov.Type.i32 if name == "beam_idx" else ov.Type.i64


def _shaped(heads: Any, count: int, size: int) -> Any:
    """[batch, count, tokens, size], with fixed sizes, which a traced graph may lack."""
    return ops.reshape(heads, i64([0, count, -1, size]), True)


def main() -> int:
    """The program; returns its exit status, and prints why it is 1."""
    directory, target = (Path(word) for word in sys.argv[1:])
    try:
        convert(directory, target)
    except ReflexError as error:
        print(error.message, flush=True)
        return 1
    except Exception as error:  # the converter and the models raise anything
        why = f"cannot be converted to OpenVINO: {last_line(error)[:300]}"
        print(f"{directory}: {why}; serve it with --runner torch", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
