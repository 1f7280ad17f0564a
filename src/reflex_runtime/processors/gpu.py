"""Whether PyTorch can still reach its GPU after an error: some errors of CUDA end it for the whole process."""

from __future__ import annotations

import sys

from reflex_runtime.core.errors import GpuLost


def lost_gpu(error: BaseException) -> GpuLost | None:
    """The error that ends the device, if every later call of this process to the GPU fails too; None for any other one.

    A failed assertion or a wrong address in a kernel is such an error. Memory that ran out is not.
    """
    torch = sys.modules.get("torch")
    if not isinstance(error, RuntimeError) or "CUDA error" not in str(error):
        return None
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception:
        first = " ".join(str(error).split("\n", 1)[0].split())[:200]
        return GpuLost(f"the GPU is lost to this process: {type(error).__name__}: {first}")
    return None
