"""Directories of embedding models as sentence-transformers writes them, made small and random; and its formula."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCABULARY = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "robot", "arm", "##s"]
WIDTH = 32
FLAGS = {
    "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens", "weightedmean": "pooling_mode_weightedmean_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
}  # fmt: skip


def write_json(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))


def write_modules(
    root: Path,
    pooling: Sequence[str] = ("mean",),
    normalise: bool = True,
    dense: int = 0,
    longest: int | None = 64,
    ends_with: str = "[CLS] $A [SEP]",
) -> Path:
    """Everything but the model: modules, tokenizer, limits. dense: size of a layer behind the pooling, 0 for none."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    modules = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalise else [])]
    folders = ["", *(f"{i}_{kind}" for i, kind in enumerate(modules) if i)]
    kinds = [f"sentence_transformers.models.{kind}" for kind in modules]
    listed = [{"idx": i, "name": str(i), "path": path, "type": kinds[i]} for i, path in enumerate(folders)]
    write_json(root / "modules.json", listed)
    write_json(root / "1_Pooling" / "config.json", {name: way in pooling for way, name in FLAGS.items()})
    if dense:
        from safetensors.numpy import save_file

        width, random = WIDTH * len(pooling), np.random.default_rng(1)
        activation = "torch.nn.modules.activation.Tanh"
        shape = {"in_features": width, "out_features": dense, "bias": True, "activation_function": activation}
        write_json(root / "2_Dense" / "config.json", shape)
        layer = {"linear.weight": (dense, width), "linear.bias": (dense,)}
        tensors = {name: random.normal(size=size).astype(np.float32) for name, size in layer.items()}
        save_file(tensors, root / "2_Dense" / "model.safetensors")
    if longest is not None:
        write_json(root / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": True})
    core = Tokenizer(models.WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Whitespace()
    ends = [(word, VOCABULARY.index(word)) for word in SPECIAL[2:]]
    core.post_processor = processors.TemplateProcessing(single=ends_with, special_tokens=ends)
    core.save(str(root / "tokenizer.json"))
    settings = {"model_max_length": 10**30, "pad_token": "[PAD]", "add_bos_token": False}
    write_json(root / "tokenizer_config.json", settings)
    return root


def write_random(root: Path, kind: str, **modules: Any) -> Path:
    """A random model of `transformers` with its modules."""
    import torch
    import transformers

    common = {
        "vocab_size": len(VOCABULARY), "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 66, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    both_ways = {"use_bidirectional_attention": True, "sliding_window": 9, "query_pre_attn_scalar": 8}
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    more = {
        "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},
        "ModernBert": {"local_attention": 8},
        "Gemma3Text": {"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, **both_ways, **layers},
    }
    config = getattr(transformers, f"{kind}Config")(**common | more.get(kind, {}))
    torch.manual_seed(3)
    getattr(transformers, f"{kind}Model")(config).eval().save_pretrained(root)
    return write_modules(root, **modules)


def write_graph(root: Path, width: int = 8, **modules: Any) -> Path:
    """A directory whose model is a graph in ONNX: a token's state is a random row, and the sum of those of its text."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    table = np.random.default_rng(0).normal(size=(len(VOCABULARY), width)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["seen"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["seen", "last"], ["column"]),
        helper.make_node("Mul", ["rows", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "places"], ["sum"], keepdims=1),
        helper.make_node("Add", ["rows", "sum"], ["last_hidden_state"]),
    ]
    constants = [
        numpy_helper.from_array(table, "table"),
        numpy_helper.from_array(np.array([2], np.int64), "last"),
        numpy_helper.from_array(np.array([1], np.int64), "places"),
    ]
    shape = ["texts", "tokens"]
    given = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ("input_ids", "attention_mask")]
    states = [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*shape, width])]
    graph = helper.make_graph(nodes, "encoder", given, states, constants)
    (root / "onnx").mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, root / "onnx" / "model.onnx")
    sizes = {"hidden_size": width, "vocab_size": len(VOCABULARY), "max_position_embeddings": 512, "pad_token_id": 0}
    sizes |= {"num_attention_heads": 2}
    write_json(root / "config.json", {"model_type": "bert", "architectures": ["BertModel"], **sizes})
    return write_modules(root, **modules)


def formula(root: Path, texts: Sequence[str], pooling: Sequence[str], normalise: bool = True) -> npt.NDArray[Any]:
    """What sentence-transformers makes of texts, by its own formula, on PyTorch; without a layer behind the pooling."""
    import torch
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(root / "tokenizer.json"), pad_token="[PAD]")
    model = transformers.AutoModel.from_pretrained(root, attn_implementation="eager").eval()
    found = []
    for text in texts:
        given = tokenizer([text.strip().lower()], return_tensors="pt")
        mask = given["attention_mask"]
        with torch.no_grad():
            states = model(input_ids=given["input_ids"], attention_mask=mask)[0]
        weights = mask.unsqueeze(-1).expand(states.size()).float()
        places = torch.arange(1, states.shape[1] + 1).unsqueeze(0).unsqueeze(-1).expand(states.size()).float()
        ways = {
            "cls": states[:, 0],
            "last": states[:, -1],
            "max": states.max(1)[0],
            "mean": (states * weights).sum(1) / weights.sum(1),
            "mean_sqrt_len": (states * weights).sum(1) / torch.sqrt(weights.sum(1)),
            "weightedmean": (states * weights * places).sum(1) / (weights * places).sum(1),
        }
        pooled = torch.cat([ways[way] for way in FLAGS_IN_ORDER if way in pooling], 1)
        found.append((torch.nn.functional.normalize(pooled) if normalise else pooled)[0].numpy())
    return np.stack(found)


FLAGS_IN_ORDER = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last")
