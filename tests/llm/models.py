"""Models for the tests: real configurations scaled down, weights at random, and the outputs `transformers` gives."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from reflex_runtime.llm.runners.checkpoint import Checkpoint

MLP = ("gate_proj", "up_proj", "down_proj")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", *MLP)
KINDS = ("llama", "qwen2", "qwen3", "mistral")
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # large enough for logits that differ by more than rounding
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 11, "head_dim": 16},
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
ANY: dict[str, dict[str, Any]] = {  # architectures that are not ours, by the name of their class in transformers
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0},
    "Gemma3": {"head_dim": 16, "sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi3": {"partial_rotary_factor": 0.5},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Granite": {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "Olmo2": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 48, **MOE},
    "Qwen3Moe": {"num_experts": 4, "head_dim": 16, **MOE},
    "GPT2": {"n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "Cohere2": {"sliding_window": 11},
    "Glm4": {"head_dim": 16},
    "GPTNeoX": {},
    "Olmo3": {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi": {},
    "StableLm": {},
    "Starcoder2": {"sliding_window": 11},
    "Mamba": {},
}


@functools.cache
def library() -> Any:
    """`transformers`, imported once; what it says about itself while importing is no warning of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    return transformers


def random_model(kind: str, directory: Path, *, dtype: str = "float32", seed: int = 0, **config: Any) -> Path:
    """Save a small model of a kind in KINDS; `config` overrides single keys. The directory is returned."""
    import torch

    lib = library()
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}[kind]
    settings = getattr(lib, f"{name}Config")(**{**SIZES, **SPECIAL[kind], **config})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(lib, f"{name}ForCausalLM")(settings).eval()
        for key, parameter in model.named_parameters():  # norms start at 1 and biases at 0, which would hide both
            if key.endswith("bias") or "norm" in key:
                parameter.data += 0.3 * torch.randn_like(parameter)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return directory


def random_checkpoint(kind: str, directory: Path) -> Path:
    """Save a small model of a kind in ANY, with random weights; the directory is returned."""
    import torch

    lib = library()
    config = getattr(lib, {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = lib.AutoModelForCausalLM.from_config(config(**{**SIZES, "pad_token_id": 0, **ANY[kind]})).eval()
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.data += 0.3 * torch.randn_like(parameter)
            elif not 0 < float(parameter.data.std()) < 10:  # some experts are not initialised
                parameter.data = 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory


def random_adapter(
    directory: Path, model: Path, seed: int = 0, rank: int = 4, targets: tuple[str, ...] = LINEAR, **config: Any
) -> Path:
    """A LoRA adapter of a checkpoint as peft writes it, with random matrices; the directory is returned."""
    draw, tensors = np.random.default_rng(seed), {}
    for name, shape in Checkpoint.open(model).config.tensors().items():
        if name.endswith(tuple(f".{target}.weight" for target in targets)):
            stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            tensors[f"{stem}A.weight"] = draw.normal(0, 0.3, (rank, shape[1])).astype(np.float32)
            tensors[f"{stem}B.weight"] = draw.normal(0, 0.3, (shape[0], rank)).astype(np.float32)
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(said | config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


class Oracle:
    """The reference: a saved model run by `transformers` in float32, one sequence at a time and without any cache."""

    def __init__(self, directory: Path) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch
        model = library().AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        self._model = model.to(torch.float32).eval()

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """[len(tokens), vocab]: the logits after each token."""
        with self._torch.inference_mode():
            result: npt.NDArray[np.float32] = self._model(self._torch.tensor([tokens])).logits[0].float().numpy()
        return result

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens by `generate`, whatever the end token is."""
        with self._torch.inference_mode():
            given = self._torch.tensor([tokens])
            output = self._model.generate(
                given,
                attention_mask=self._torch.ones_like(given),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [int(token) for token in output[0, len(tokens) :]]
