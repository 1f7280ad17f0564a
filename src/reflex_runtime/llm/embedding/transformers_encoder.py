"""An encoder of `transformers` itself, on PyTorch. Import it only where it is needed: it imports both libraries.

OpenVINO's graph is traced from the same model, with attention written out: that form has no other kernels for texts
with padding, so that a text's vector does not depend on what it is beside.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.embedding.directory import EmbeddingModel

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import AttentionMaskInterface

_ATTENTION: Final = "eager"  # written out


def load(model: EmbeddingModel, dtype: Any = torch.float32) -> Any:
    """The model of `transformers`, without a head. ConfigError for one that it cannot load."""
    transformers.logging.set_verbosity_error()
    with suppress(AttributeError):
        transformers.utils.logging.disable_progress_bar()
    try:
        loaded = transformers.AutoModel.from_pretrained(
            model.transformer, dtype=dtype, attn_implementation=_ATTENTION, local_files_only=True,
            trust_remote_code=False,
        )  # fmt: skip
    except Exception as error:  # a model's code can raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = (lines or [type(error).__name__])[0][:300]
        raise ConfigError(f"{model.transformer}: transformers cannot load it: {told}") from error
    return loaded.eval().requires_grad_(False)


class States(torch.nn.Module):  # type: ignore[misc]
    """The model as a function of ids and mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._more = {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, return_dict=False, **self._more
        )[0]  # fmt: skip


@contextmanager
def masks_by_broadcasting() -> Iterator[None]:
    """While it is open, masks are made without `torch.vmap`, which cannot be traced. Gemma 3 asks for it where tokens
    see both ways. Masks that need it come out wrong: compare what was traced with what the model gives outside."""
    usual = AttentionMaskInterface()[_ATTENTION]

    def broadcast(*given: Any, **more: Any) -> Any:
        return usual(*given, **more | {"use_vmap": False})

    AttentionMaskInterface.register(_ATTENTION, broadcast)
    try:
        yield
    finally:
        AttentionMaskInterface.register(_ATTENTION, usual)


class TorchEncoder:
    """An `Encoder` on PyTorch."""

    def __init__(self, model: EmbeddingModel, device: str, dtype: str, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._states: Any = States(load(model, getattr(torch, dtype)).to(self._device))
        self.name = f"torch {device} {dtype}"

    def states(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            given = (torch.from_numpy(ids).to(self._device), torch.from_numpy(mask).to(self._device))
            found: npt.NDArray[np.float32] = self._states(*given).float().cpu().numpy()
        return found

    def close(self) -> None:
        self._states = None
