"""PyTorch on CUDA: whether the GPU can still be reached, and launches recorded once, launched again as one.

Some errors of CUDA end it for the whole process. The recorder of graphs is a plain function, so that everything around
it (buffers, padding, which graphs there are) runs without a GPU: a test passes one that calls the work again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

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


# -- cuda graphs -------------------------------------------------------------------------------------------------------


Record = Callable[[Callable[[], None]], Callable[[], None]]
"""What launches work → what launches it again, on the same tensors."""


def recorder() -> Record:
    """What records the graphs of one model.

    They share the memory of what they compute in between. So two of them must not run at the same time, and each must
    leave its results in tensors made outside.

    A graph is recorded after two plain runs, in which libraries choose kernels and make workspaces. While it is
    recorded, the work must neither wait for the device nor copy from the host's memory: torch raises then.
    """
    import torch

    aside, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def record(run: Callable[[], None]) -> Callable[[], None]:
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run()
            run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    return record
