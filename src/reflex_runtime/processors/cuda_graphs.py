"""CUDA graphs of PyTorch: launches recorded once, and launched again as one.

The recorder is a plain function, so that everything around it (buffers, padding, which graphs there are) runs without a
GPU: a test passes one that calls the work again.
"""

from __future__ import annotations

from collections.abc import Callable

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""What launches work → what launches it again, on the same tensors."""


def cuda_graph(run: Callable[[], None]) -> Callable[[], None]:
    """Record the launches of `run`, after two plain runs in which libraries choose kernels and make workspaces.

    While it is recorded, `run` must neither wait for the device nor copy from the host's memory: torch raises then.
    """
    import torch

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
        run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay
