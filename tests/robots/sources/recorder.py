"""A stand-in for the recorder of CUDA graphs: it replays by calling, and refuses what a capture on a GPU refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Each of these reads a value of the device, or copies one there from the host: a stream that is captured forbids both.
METHODS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"}
OPERATIONS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "lift_fresh"}


def refuse(name: str) -> None:
    raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {name}")


class Methods(TorchFunctionMode):  # type: ignore[misc]
    """What Python calls."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        # `.to(other.device)` is no copy, but here the device of all is the CPU: only one that is named is refused.
        named = [value for value in (*args[1:], *(kwargs or {}).values()) if isinstance(value, str)]
        if name in METHODS or (name == "to" and "cpu" in named):
            refuse(name)
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """What torch itself calls; in inference mode not all of it is seen."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        places = [i for arg in args if isinstance(arg, list | tuple) for i in arg if isinstance(i, torch.Tensor)]
        if name in OPERATIONS or (name.startswith("index") and any(i.dtype is torch.bool for i in places)):
            refuse(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def capturing() -> Iterator[None]:
    """An operation that a capture forbids raises, as torch does on a GPU."""
    with Methods(), Operations():
        yield


class Recorder:
    """recorded: graphs made. replays: how often they were launched."""

    def __init__(self) -> None:
        self.recorded = self.replays = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        run()
        with capturing():
            run()
        self.recorded += 1

        def replay() -> None:
            self.replays += 1
            run()

        return replay
