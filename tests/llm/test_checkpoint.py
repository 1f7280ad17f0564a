"""A model directory is read as it is, and refused by name where it is wrong."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm.models import LLAMA3, library, random_model
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.runners.checkpoint import Checkpoint, _float8

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": [2, 3],
    "torch_dtype": "float32",
}
SHAPES = {
    "model.embed_tokens.weight": (12, 8),
    "lm_head.weight": (12, 8),
    "model.norm.weight": (8,),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in {
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8),
            "mlp.gate_proj": (6, 8),
            "mlp.up_proj": (6, 8),
            "mlp.down_proj": (8, 6),
            "input_layernorm": (8,),
            "post_attention_layernorm": (8,),
        }.items()
    },
}
Q = "model.layers.1.self_attn.q_proj.weight"


def write_weights(file: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32", **header: Any) -> None:
    """A safetensors file: the header's length, the header, and count-up numbers for every tensor."""
    width, body, table = (4 if dtype == "F32" else 2), b"", dict(header)
    for name, shape in shapes.items():
        size = math.prod(shape) * width
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + size]}
        body += np.arange(math.prod(shape), dtype=np.float32 if width == 4 else np.float16).tobytes()
    text = json.dumps(table).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_weights(tmp_path / "model.safetensors", SHAPES)
    return tmp_path


def config(root: Path, **changes: Any) -> None:
    values = {key: value for key, value in {**CONFIG, **changes}.items() if value != "absent"}
    (root / "config.json").write_text(json.dumps(values))


def refusal(root: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Checkpoint.open(root)
    assert str(root) in caught.value.message  # every message begins with the file
    return caught.value.message.replace(str(root), "ROOT")


def test_a_directory_is_described_and_its_tensors_are_those_of_the_file(root: Path) -> None:
    checkpoint = Checkpoint.open(root)
    found = checkpoint.config
    assert (found.num_hidden_layers, found.head_dim, found.rms_norm_eps, found.rope_theta) == (2, 4, 1e-5, 10000.0)
    assert (found.torch_dtype, set(found.windows)) == ("float32", {None})
    assert found.tensors() == SHAPES
    assert checkpoint.head == "lm_head.weight"
    np.testing.assert_array_equal(checkpoint.tensor(Q), np.arange(64, dtype=np.float32).reshape(8, 8))
    dtype, data, shape = checkpoint.raw(Q)
    assert (dtype, data.nbytes, shape, data.flags.writeable) == ("F32", 256, (8, 8), False)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_of_every_dtype_and_in_shards_equal_those_of_transformers(tmp_path: Path, dtype: str) -> None:
    random_model("qwen2", tmp_path, dtype=dtype)
    whole = Checkpoint.open(tmp_path)
    model = library().AutoModelForCausalLM.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    shards = Checkpoint.open(tmp_path / "shards")
    assert len(shards.files) > 1
    state = model.state_dict()
    assert whole.config.torch_dtype == dtype
    assert set(whole.config.tensors()) == set(state)
    for name, reference in state.items():
        np.testing.assert_array_equal(whole.tensor(name), reference.float().numpy())
        np.testing.assert_array_equal(shards.tensor(name), reference.float().numpy())


def test_tensors_of_8_bits_equal_those_of_torch(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    random_model("qwen2", tmp_path, dtype="bfloat16")
    file = tmp_path / "model.safetensors"
    small = {name: weight.to(torch.float8_e4m3fn) for name, weight in load_file(file).items()}
    save_file(small, file)
    checkpoint = Checkpoint.open(tmp_path)
    for name, weight in small.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), weight.float().numpy())
        kind, data, _ = checkpoint.raw(name)
        assert (kind, data.tobytes()) == ("BF16", weight.bfloat16().contiguous().view(torch.uint8).numpy().tobytes())
        np.testing.assert_array_equal(checkpoint.tensor(name), weight.float().numpy())
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    np.testing.assert_array_equal(_float8(), every.float().numpy())


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, all keys": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_frequencies_equal_those_of_transformers(tmp_path: Path, kind: str) -> None:
    random_model("llama", tmp_path, rope_parameters=ROPES[kind], head_dim=64)
    found = Checkpoint.open(tmp_path).config
    rotary = library().AutoModelForCausalLM.from_pretrained(tmp_path).model.rotary_emb
    np.testing.assert_allclose(found.inverse_frequencies(), rotary.inv_freq.numpy(), rtol=1e-6)
    assert found.attention_factor == pytest.approx(rotary.attention_scaling)


def test_older_files_say_the_same_with_other_keys(root: Path) -> None:
    values = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    config(root, rope_theta=5e5, rope_scaling={"type": "llama3", **values})
    older = Checkpoint.open(root).config
    config(root, rope_theta="absent", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **values})
    assert Checkpoint.open(root).config == older
    assert older.rope_theta == 5e5


def test_windows_lie_where_the_architecture_puts_them(root: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "tie_word_embeddings": True}
    biases = {f"model.layers.{i}.self_attn.{n}_proj.bias": (8 if n == "q" else 4,) for i in (0, 1) for n in "qkv"}
    for changes, windows in [
        ({}, (None, None)),
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 9)),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, (9, None)),
        ({"architectures": ["MistralForCausalLM"]}, (9, 9)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None)),
        ({"architectures": ["LlamaForCausalLM"]}, (None, None)),
    ]:
        config(root, **(said := qwen | changes))
        write_weights(root / "model.safetensors", SHAPES | (biases if "Qwen2" in said["architectures"][0] else {}))
        assert Checkpoint.open(root).config.windows == windows
    assert Checkpoint.open(root).head == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"bits": 4}}, 'quantization_config: found {"bits": 4}, expected nothing: rounded'),
        ({"hidden_act": "gelu"}, "hidden_act: found \"gelu\", expected 'silu'"),
        ({"vocab_size": "absent"}, "vocab_size: found nothing, expected an integer from 1 to"),
        ({"vocab_size": True}, "vocab_size: found true, expected"),
        ({"hidden_size": 10**9}, "hidden_size: found 1000000000, expected an integer from 1 to 131072"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: found 0, expected"),
        ({"num_attention_heads": 3}, "num_attention_heads: found 3, expected a divisor of hidden_size=8"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads: found 3, expected a divisor of n"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: found 4, expected a divisor of num_attention_heads=2"),
        ({"head_dim": 3}, "head_dim: found 3, expected an even number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: found -1, expected a finite number above 0"),
        ({"rms_norm_eps": 10**400}, "…, expected a finite number above 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps: found NaN, expected a finite number above 0"),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings: found "yes", expected true or false'),
        ({"torch_dtype": "float8"}, 'torch_dtype: found "float8", expected one of float32, float16, bfloat16'),
        ({"rope_scaling": {"rope_type": "longrope"}}, 'rope_scaling.rope_type: found "longrope", expected one of'),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, 'rope_scaling.rope_type: found ["yarn"], expected one of default'),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: found nothing, expected a finite number"),
        ({"rope_scaling": 5}, "rope_scaling: found 5, expected an object"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta: found 0, expected a finite number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: found 0.5, expected 1"),
        ({"attention_bias": True}, "tensor model.layers.0.self_attn.q_proj.bias: not found, expected shape [8]"),
        ({"intermediate_size": 7}, "gate_proj.weight: found shape [6, 8], expected [7, 8], from the sizes in config"),
    ],
)
def test_a_wrong_configuration_is_refused_by_key_and_value(root: Path, changes: dict[str, Any], message: str) -> None:
    config(root, **changes)
    assert message in refusal(root)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "[" * 100_000])
def test_a_configuration_that_is_not_json_is_refused(root: Path, text: str) -> None:
    (root / "config.json").write_bytes(text.encode("latin-1"))
    assert refusal(root).startswith("ROOT/config.json: ")


def test_missing_files_are_named(root: Path) -> None:
    (root / "model.safetensors").unlink()
    assert refusal(root).startswith("ROOT: has neither model.safetensors nor model.safetensors.index.json")
    (root / "config.json").unlink()
    assert refusal(root) == "ROOT/config.json: cannot be read: No such file or directory"


def test_a_truncated_file_is_named(root: Path) -> None:
    file = root / "model.safetensors"
    data = file.read_bytes()
    for size in (0, 7, 8, 100, len(data) - 20):
        file.write_bytes(data[:size])
        assert "truncated" in (said := refusal(root))
        assert said.endswith("; copy it again (git lfs pull, where it was cloned)")


def test_wrong_tensors_are_named(root: Path) -> None:
    file = root / "model.safetensors"
    write_weights(file, {name: shape for name, shape in SHAPES.items() if name != Q})
    assert refusal(root) == f"ROOT/model.safetensors: tensor {Q}: not found, expected shape [8, 8]"
    write_weights(file, {**SHAPES, Q: (8, 4)})
    assert f"model.safetensors: tensor {Q}: found shape [8, 4], expected [8, 8]" in refusal(root)
    for more in ("bias", "weight_scale"):
        write_weights(file, SHAPES | {f"model.layers.7.x.{more}": (1,), f"{Q.removesuffix('.weight')}.{more}": (8,)})
        told = f"{Q.removesuffix('.weight')}.{more}: is not of LlamaForCausalLM as config.json describes it"
        assert f"model.safetensors: tensor {told}, and would change the answers" in refusal(root)
    write_weights(file, SHAPES, dtype="I16")
    assert "dtype I16: must be one of F32, F16, BF16, F8_E4M3" in refusal(root)
    for y in (3, {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, {"dtype": "F32", "shape": [-1]}):
        write_weights(file, {**SHAPES, "x": (2,)}, y=y)
        assert "model.safetensors: is truncated, damaged, or not safetensors (invalid" in refusal(root)


def test_an_index_that_leads_nowhere_or_outside_is_refused(root: Path) -> None:
    index = root / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {Q: "gone.safetensors"}}))
    assert f"ROOT/gone.safetensors: not found, but {index.name} places tensor {Q} there" in refusal(root)
    for name in ("../model.safetensors", "/etc/passwd", "", 5):
        index.write_text(json.dumps({"weight_map": {Q: name}}))
        assert "must be a file name within the directory" in refusal(root)
    for table in ({}, [], None):
        index.write_text(json.dumps({"weight_map": table}))
        assert "weight_map: expected an object" in refusal(root)
    index.write_text(json.dumps({"weight_map": {Q: "model.safetensors"}}))
    assert Checkpoint.open(root).tensor(Q).shape == (8, 8)
