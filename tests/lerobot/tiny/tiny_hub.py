"""A cache of the Hugging Face hub with the two repositories that LeRobot's VLAs name, tiny and made here.

Both tokenizers are byte-level without merges: one token a byte, so that any text can be encoded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PALIGEMMA = "google/paligemma-3b-pt-224"
SMOLVLM = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
_COMMIT = "0" * 40

_SMOLVLM_CONFIG = {
    "model_type": "smolvlm",
    "architectures": ["SmolVLMForConditionalGeneration"],
    "image_token_id": 5,
    "scale_factor": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "smolvlm_vision", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 8, "num_channels": 3,
    },
    "text_config": {
        "model_type": "llama", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 272,
        "max_position_embeddings": 1024, "rope_theta": 100000.0, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    },
}  # fmt: skip


def fill(cache: Path) -> None:
    """Write both repositories in the layout of HF_HUB_CACHE."""
    _paligemma(_snapshot(cache, PALIGEMMA))
    _smolvlm(_snapshot(cache, SMOLVLM))


def _snapshot(cache: Path, repository: str) -> Path:
    base = cache / ("models--" + repository.replace("/", "--"))
    (base / "refs").mkdir(parents=True, exist_ok=True)
    (base / "refs" / "main").write_text(_COMMIT)
    path = base / "snapshots" / _COMMIT
    path.mkdir(parents=True, exist_ok=True)
    return path


def _tokenizer(path: Path, special: list[str], first: str | None, **config: Any) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if first is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, words[first])]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    # As transformers 4 writes it: version 5 reads that too.
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(told))


def _paligemma(path: Path) -> None:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<image>"]
    _tokenizer(path, special, "<bos>", pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>")
    (path / "config.json").write_text(json.dumps({"model_type": "paligemma"}))


def _smolvlm(path: Path) -> None:
    fake, glob, image = "<fake_token_around_image>", "<global-img>", "<image>"
    end = "<end_of_utterance>"
    more = {"fake_image_token": fake, "global_image_token": glob, "image_token": image, "end_of_utterance_token": end}
    _tokenizer(
        path, ["<|im_end|>", "<|im_start|>", end, fake, glob, image], None,
        pad_token="<|im_end|>", eos_token=end, bos_token="<|im_start|>", extra_special_tokens=more,
    )  # fmt: skip
    (path / "config.json").write_text(json.dumps(_SMOLVLM_CONFIG))
    size = {"longest_edge": 32}
    pictures = {
        "image_processor_type": "SmolVLMImageProcessor", "do_convert_rgb": True, "do_image_splitting": True,
        "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3, "max_image_size": size, "resample": 1, "rescale_factor": 1 / 255, "size": size,
        "processor_class": "SmolVLMProcessor", "video_sampling": {"fps": 1, "max_frames": 8, "video_size": size},
    }  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(pictures))
    (path / "processor_config.json").write_text(json.dumps({"image_seq_len": 4, "processor_class": "SmolVLMProcessor"}))
