"""The denoise step of a model in PyTorch as CUDA graphs: captured at batch sizes, replayed on buffers that stay.

Import it only when a PyTorch policy is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread, current_thread
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.run.cuda import Record

Tensors = Mapping[str, Tensor]
_Call = Callable[[Tensors, Tensors, int], Tensor]
_Shape = tuple[Any, ...]  # n, and (name, shape without the batch axis, type) of every input

MOST_SHAPES: Final = 4  # sets of row shapes that are captured; each has its own buffers and a graph for every size

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """A captured call: fill `packed` and `moving`, replay, read `moved`. All are [size, …].

    constants: what the graph reads besides; kept because it reads it at these addresses.
    """

    packed: Tensors
    moving: Tensors
    moved: Tensor
    constants: UploadedOnce
    replay: Callable[[], None]


class CapturedStep:
    """A step on rows, captured at batch sizes.

    call: (packed, moving, all steps n) → x after one more step, [rows, …]; see `run`. It neither writes to its inputs
        nor waits for the device, and what it computes of a row depends on that row alone.
    sizes: batch sizes, ascending. Rows are padded to the next one with copies of the last.
    record: makes a graph, as that of `recorder` does.

    A graph is for one size, one n and one set of row shapes and types. Graphs of all sizes share their input buffers,
    which are as large as the largest size. Graphs are captured while the policy warms up and never later: capturing
    takes several steps' time, and requests may have deadlines. So these calls run as they are, and are counted in
    `missed`: more rows than the largest size; shapes or an n that no warm-up had; shapes beyond `MOST_SHAPES`; and
    calls on another thread than the one that captured, as a thread that was given up may still use the buffers.
    """

    def __init__(self, call: _Call, sizes: Sequence[int], record: Record) -> None:
        self.sizes = tuple(sizes)
        self.replayed = self.missed = 0
        self._call, self._record = call, record
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._graphs: dict[tuple[int, _Shape], _Graph] = {}
        self._shapes: set[_Shape] = set()
        self._filled: tuple[Any, Any] = (None, None)  # the packed rows whose copies are in the inputs of that graph
        self._capturer: Thread | None = None
        self._warned = False

    def run(self, packed: Tensors, moving: Tensors, n: int, warming: bool) -> tuple[Tensor, bool]:
        """(x after one more step, whether a graph made it). x is valid until the next call.

        packed: tensors [rows, …] by name; the same mapping for as long as the same rows step, so that it is copied in
        once. moving: tensors [rows, …] that every step has anew. warming: a graph that is missing is captured.
        ConfigError if it cannot be.
        """
        rows = len(next(iter(moving.values())))
        graph = self._graph(packed, moving, rows, n, warming)
        if graph is None:
            self.missed += not warming
            return self._call(packed, moving, n), False
        if self._filled[0] is not packed or self._filled[1] is not graph:
            self._filled = (None, None)  # should a copy fail
            _fill(graph.packed, packed)
            self._filled = (packed, graph)
        _fill(graph.moving, moving)
        graph.replay()
        self.replayed += not warming
        return graph.moved[:rows], True

    def snapshot(self) -> dict[str, int]:
        """For people: graphs, sets of shapes, and since the warm-up steps with a graph and without."""
        counts = {"graphs": len(self._graphs), "shapes": len(self._shapes)}
        return counts | {"replayed": self.replayed, "missed": self.missed}

    def _graph(self, packed: Tensors, moving: Tensors, rows: int, n: int, warming: bool) -> _Graph | None:
        size = next((size for size in self.sizes if size >= rows), None)
        if size is None or (self._capturer is not None and current_thread() is not self._capturer):
            return None
        shape = (n, *map(_kind, packed.items()), *map(_kind, moving.items()))
        graph = self._graphs.get((size, shape))
        if graph is not None:
            return graph
        if not warming or (shape not in self._shapes and len(self._shapes) == MOST_SHAPES):
            if not self._warned:
                self._warned = True
                log.warning("a step runs without a CUDA graph: the warm-up captured none of %d rows of %s", size, shape)
            return None
        self._capturer = current_thread()
        self._shapes.add(shape)
        self._filled = (None, None)
        graph = self._graphs[size, shape] = self._captured(packed, moving, size, n)
        return graph

    def _captured(self, packed: Tensors, moving: Tensors, size: int, n: int) -> _Graph:
        own, new = (
            {name: self._buffer(place, name, tensor)[:size] for name, tensor in given.items()}
            for place, given in enumerate((packed, moving))
        )
        _fill(own, packed)
        _fill(new, moving)
        constants = UploadedOnce()
        try:
            with constants:
                moved = torch.empty_like(self._call(own, new, n))

                def step() -> None:
                    moved.copy_(self._call(own, new, n))

                return _Graph(own, new, moved, constants, self._record(step))
        except ConfigError:
            raise
        except Exception as error:  # torch raises several classes, and a step any
            text = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"--cuda-graphs: the step cannot be captured at batch size {size} ({type(error).__name__}: {text}). It "
                "must not wait for the device, copy from the host, depend on values, or need more memory than there "
                "is; give fewer sizes, or leave --cuda-graphs out"
            ) from error

    def _buffer(self, place: int, name: str, tensor: Tensor) -> Tensor:
        key = (place, _kind((name, tensor)))
        if key not in self._buffers:
            self._buffers[key] = tensor.new_empty((self.sizes[-1], *tensor.shape[1:]))
        return self._buffers[key]


class UploadedOnce(TorchFunctionMode):  # type: ignore[misc]
    """While it is entered, `torch.tensor` of an equal list, type and device copies from the host only once.

    Models make small constants (masks, for example) from lists at every call. While a graph is captured a copy from the
    host is not allowed; one on the device is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[str, Tensor] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if function is not torch.tensor or not args or not isinstance(args[0], list | tuple | int | float):
            return function(*args, **options)
        key = repr((args, sorted(options.items())))
        if key not in self._made:
            self._made[key] = function(*args, **options)
        return self._made[key].clone()


def _kind(item: tuple[str, Tensor]) -> tuple[str, tuple[int, ...], Any]:
    name, tensor = item
    return name, tuple(tensor.shape[1:]), tensor.dtype


def _fill(buffers: Tensors, given: Tensors) -> None:
    """Copy rows into buffers that have at least as many, padded with the last."""
    for name, rows in given.items():
        buffer, n = buffers[name], len(rows)
        buffer[:n].copy_(rows)
        if n < len(buffer):
            buffer[n:].copy_(rows[-1:].expand_as(buffer[n:]))
