"""CUDA graphs of PyTorch: launches recorded once, and launched again as one.

The recorder is a plain function, so that everything around it (buffers, padding, which graphs there are) runs without a
GPU: a test passes one that calls the work again.
"""

from __future__ import annotations

from collections.abc import Callable

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
