"""Shrinks π0 and π0.5 of LeRobot: their sizes and the vocabulary are constants of its code, not of config.json.

Call `shrink` in the process that makes or loads one. Nothing but sizes changes.
"""

from __future__ import annotations

import importlib
from typing import Any

_WIDTH, _VOCABULARY = 32, 272
_VISION = {
    "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14,
    "projection_dim": _WIDTH,
}  # fmt: skip


def shrink() -> None:
    """From now on both are a few hundred kilobytes."""
    from transformers.models.auto import CONFIG_MAPPING

    for name in ("pi0", "pi05"):
        module: Any = importlib.import_module(f"lerobot.policies.{name}.modeling_{name}")

        def small(variant: str, module: Any = module) -> Any:
            width = _WIDTH if variant == "gemma_2b" else _WIDTH // 2
            return module.GemmaConfig(width=width, depth=2, mlp_dim=64, num_heads=2, num_kv_heads=1, head_dim=16)

        module.get_gemma_config = small
        module.CONFIG_MAPPING = _Small(CONFIG_MAPPING)


class _Small:
    """CONFIG_MAPPING, but the two classes it is asked for ignore the sizes that the code assigns."""

    def __init__(self, mapping: Any) -> None:
        self._mapping = mapping._mapping if isinstance(mapping, _Small) else mapping

    def __getitem__(self, name: str) -> Any:
        kind = self._mapping[name]
        if name == "gemma":
            return lambda **told: kind(**{**told, "vocab_size": _VOCABULARY})

        def paligemma(**told: Any) -> Any:
            config = kind(
                vision_config={"model_type": "siglip_vision_model", **_VISION},
                text_config={"model_type": "gemma", "vocab_size": _VOCABULARY},
                **told,
            )
            config.text_config = _pinned(config.text_config, vocab_size=_VOCABULARY)
            config.vision_config = _pinned(config.vision_config, **_VISION)
            return config

        return paligemma


def _pinned(config: Any, **values: Any) -> Any:
    """A configuration with attributes that later assignments leave alone."""
    base = type(config)

    def assign(self: Any, key: str, value: Any) -> None:
        base.__setattr__(self, key, values.get(key, value))

    config.__class__ = type(base.__name__, (base,), {"__setattr__": assign})
    for key, value in values.items():
        setattr(config, key, value)
    return config
