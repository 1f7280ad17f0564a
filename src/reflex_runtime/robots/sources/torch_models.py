"""PyTorch modules as models: rows go to the device once, prefixes stay there, and only x and actions come back.

Imported only when a PyTorch policy is loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Thread, current_thread
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.extras import needed_by
from reflex_runtime.robots.policy.base import StagedModel, WholeModel
from reflex_runtime.robots.policy.episodes import PrefixTensors
from reflex_runtime.robots.policy.observation import Observation
from reflex_runtime.robots.policy.spec import DeviceOptions, PolicySpec
from reflex_runtime.robots.policy.units import Floats
from reflex_runtime.run.onnx_session import CPU, CUDA
from reflex_runtime.run.processor import Record, recorder

with needed_by("a policy in PyTorch"):
    import torch
    from torch import Tensor
    from torch.overrides import TorchFunctionMode

Tensors = Mapping[str, Tensor]

DEVICES: Final = {CPU: "cpu", CUDA: "cuda"}


class StagedModule(Protocol):
    """The module that `TorchStaged` runs. Tensors are on its device; the first axis is the batch axis.

    prefix: inputs → tensors by name for every step, each [n, …].
    step: (the tensors of `prefix`, with "state" unless the prefix takes it; x [n, chunk_size, x_dim]; k [n], the steps
        done so far; n, the number of all steps) → x after one more step. It must not write to its inputs, nor, for CUDA
        graphs, wait for the device (`.item()`, `.cpu()`, branches on values).
    """

    def prefix(self, inputs: Tensors) -> Tensors: ...

    def step(self, prefix: Tensors, x: Tensor, k: Tensor, n: int) -> Tensor: ...


class _Placed:
    """A module on its device, and the copies of rows to it."""

    def __init__(self, module: Any, device: DeviceOptions, masks: bool) -> None:
        self.masks = masks
        self.device = torch_device(device)
        self.dtype = None if device.dtype == "stored" else getattr(torch, device.dtype)
        torch.set_num_threads(device.threads)
        if isinstance(module, torch.nn.Module):
            module.eval().requires_grad_(False)
            module.to(device=self.device, dtype=self.dtype)
        self.module = module

    def put(self, array: NDArray[Any]) -> Tensor:
        """An array on the device; floats in the type of `--dtype`, if any. Copied from pinned memory to a GPU."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device == "cuda":
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

    def inputs(self, rows: Sequence[Observation], state: bool) -> dict[str, Tensor]:
        """The tensors of rows, each [n, …]: images by name, "image_masks" where some may be missing, "tokens" and
        "token_mask", "state"."""
        roles = [*rows[0].images]
        roles += ["image_masks"] if self.masks else []
        roles += ["tokens", "token_mask"] if rows[0].tokens is not None else []
        roles += ["state"] if state and rows[0].state is not None else []
        return {role: self.put(np.stack([row.row(role) for row in rows])) for role in roles}


class GraphedStaged(StagedModel):
    """A staged model whose step may be captured as CUDA graphs; the prefix never is."""

    pads_prefix = False
    _captured: CapturedStep | None = None

    def capture(self, sizes: Sequence[int], record: Record | None = None) -> None:
        """Run steps as graphs of these batch sizes, ascending, which the warm-up captures."""
        self.captured_sizes = tuple(sizes)
        self._captured = CapturedStep(self.compute_step, sizes, record or recorder())

    def compute_step(self, packed: Tensors, moving: Tensors, n: int) -> Tensor:
        """x after one more of n steps, as a function of tensors [rows, …] alone: this is captured."""
        raise NotImplementedError

    def run_step(self, packed: Tensors, moving: Tensors, n: int) -> Floats:
        """The x of `compute_step` on the host, by a captured graph if there is one."""
        if self._captured is None:
            return to_host(self.compute_step(packed, moving, n))
        try:
            x, self.notes["captured"] = self._captured.run(packed, moving, n, self.warming)
        except ConfigError as error:
            raise ConfigError(f"{self.spec.source}: {error.message}") from error
        return to_host(x)

    def describe(self) -> dict[str, Any]:
        return {} if self._captured is None else {"cuda_graphs": self._captured.snapshot()}


class TorchStaged(GraphedStaged):
    """Runs a `StagedModule`. A subclass may override the three calls for inputs or prefixes of another form; with
    captured sizes, `compute_step` in place of `step`.

    spec: without a model_hash it gets the hash of the module's weights.
    """

    def __init__(self, spec: PolicySpec, module: StagedModule, device: DeviceOptions | None = None) -> None:
        device = device or DeviceOptions()
        super().__init__(_identified(spec, module))
        self._placed = _Placed(module, device, bool(spec.optional_images))
        self.provider, self.half = device.provider, is_half(module)
        self._step = torch.compile(module.step, dynamic=True) if device.compile else module.step
        if device.captured_sizes:
            self.capture(device.captured_sizes)

    def prefix(self, rows: Sequence[Observation]) -> Sequence[PrefixTensors]:
        with torch.inference_mode():
            made = self._placed.module.prefix(self._placed.inputs(rows, self.spec.prefix_takes_state))
            for name, tensor in made.items():
                if tensor.shape[:1] != (len(rows),):
                    wrong = f"the prefix {name!r} has the shape {list(tensor.shape)}"
                    raise ProcessorError(f"{self.spec.source}: {wrong}, expected {len(rows)} rows")
            # Copied out of the batch: a view would keep the tensors of all its rows in memory.
            return [PrefixTensors({name: t[i : i + 1].clone() for name, t in made.items()}) for i in range(len(rows))]

    def pack(self, prefixes: Sequence[PrefixTensors], rows: Sequence[Observation]) -> Tensors:
        with torch.inference_mode():
            packed = {name: torch.cat([p.tensors[name] for p in prefixes]) for name in prefixes[0].tensors}
            if self.spec.takes_state and not self.spec.prefix_takes_state:
                packed["state"] = self._placed.put(np.stack([row.row("state") for row in rows]))
            return packed

    def step(self, packed: Tensors, x: Floats, k: NDArray[np.int64], n: int) -> Floats:
        with torch.inference_mode():
            return self.run_step(packed, {"x": self._placed.put(x), "k": self._placed.put(k)}, n)

    def compute_step(self, packed: Tensors, moving: Tensors, n: int) -> Tensor:
        return self._step(packed, moving["x"], moving["k"], n)


class TorchWhole(WholeModel):
    """Runs a module that is called with (inputs, noise): images, "tokens" and "state" by name, each [n, …], and noise
    [n, chunk_size, x_dim], or None unless `spec.takes_noise`. It returns [n, chunk_size, any].

    spec: as in `TorchStaged`.
    """

    def __init__(self, spec: PolicySpec, module: Any, device: DeviceOptions | None = None) -> None:
        device = device or DeviceOptions()
        if device.captured_sizes:
            what = "captures the steps of staged policies, and this one makes its chunk in one call"
            raise ConfigError(f"--cuda-graphs: {what}; leave the option out")
        super().__init__(_identified(spec, module))
        self._placed = _Placed(module, device, bool(spec.optional_images))
        self.provider, self.half = device.provider, is_half(module)
        self._call = torch.compile(module, dynamic=True) if device.compile else module

    def chunk(self, rows: Sequence[Observation], noise: Floats | None) -> Floats:
        with torch.inference_mode():
            inputs = self._placed.inputs(rows, self.spec.takes_state)
            return to_host(self._call(inputs, None if noise is None else self._placed.put(noise)))


def torch_device(device: DeviceOptions) -> str:
    """The device by torch's name; ConfigError if there is none."""
    name = DEVICES.get(device.provider)
    if name is None:
        raise ConfigError(f"--provider={device.provider}: PyTorch policies run on cpu or cuda")
    if device.captured_sizes and name != "cuda":
        raise ConfigError(f"--cuda-graphs: {device.provider} has no graphs to capture; leave the option out")
    if name == "cuda" and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        among = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise ConfigError(
            f"--provider=cuda: PyTorch sees no GPU here{among}; check nvidia-smi, install a CUDA build of torch, or "
            "use --provider cpu"
        )
    return name


_WHOLE: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def to_host(tensor: Tensor) -> Floats:
    """A tensor as float32 on the host, in memory of its own."""
    if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.dtype in _WHOLE):
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ProcessorError(f"the module answered {kind} where a tensor of numbers is expected")
    array: Floats = tensor.detach().to(device="cpu", dtype=torch.float32, copy=True).numpy()
    return array


def weights_of(module: Any) -> tuple[str, int]:
    """(hash, bytes) of a module's weights: first 16 hex digits of SHA-256 over names, types, shapes and contents."""
    sha, total = hashlib.sha256(), 0
    for name, tensor in sorted(module.state_dict().items()):
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0)
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        for start in range(0, flat.nbytes, 1 << 24):  # in pieces, so that other threads can run between them
            sha.update(flat[start : start + (1 << 24)].data)
        total += flat.nbytes
    return sha.hexdigest()[:16], total


def _identified(spec: PolicySpec, module: Any) -> PolicySpec:
    if spec.model_hash or not isinstance(module, torch.nn.Module):
        return spec
    found, size = weights_of(module)
    return replace(spec, model_hash=found, model_bytes=spec.model_bytes or size)


def is_half(module: Any) -> bool:
    """Whether a module computes in 16 bits."""
    kinds = {p.dtype for p in module.parameters()} if isinstance(module, torch.nn.Module) else set()
    return bool(kinds & {torch.float16, torch.bfloat16})


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


_Shape = tuple[Any, ...]  # n, and (name, shape without the batch axis, type) of every input

MOST_SHAPES: Final = 4  # sets of row shapes that are captured, each with its own buffers and a graph for every size

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """A captured call: fill `packed` and `moving`, call `replay`, read `moved`. All tensors are [size, …].

    constants: other tensors that the graph reads at their addresses, so that they must live as long as the graph.
    """

    packed: Tensors
    moving: Tensors
    moved: Tensor
    constants: UploadedOnce
    replay: Callable[[], None]


class CapturedStep:
    """A step on rows, captured at batch sizes.

    call: (packed, moving, all steps n) → x after one more step, [rows, …]; see `run`. It neither writes to its inputs
        nor waits for the device, and no row depends on another.
    sizes: batch sizes, ascending. Rows are padded to the next size with copies of the last row.
    record: makes a graph of a function, as `recorder()` does.

    A graph is for one size, one n and one set of row shapes and types. Graphs of equal row shapes share their input
    buffers, as large as the largest size. Graphs are captured in the warm-up and never later: capturing takes as long
    as several steps, and requests may have deadlines. Other calls run without a graph and count in `missed`: those with
    more rows than the largest size; with shapes or an n that the warm-up did not have; with shapes beyond
    `MOST_SHAPES`; and on another thread than the one that captured, as a thread that hung may still use the buffers.
    """

    def __init__(self, call: Callable[[Tensors, Tensors, int], Tensor], sizes: Sequence[int], record: Record) -> None:
        self.sizes = tuple(sizes)
        self.replayed = self.missed = 0
        self._call, self._record = call, record
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._graphs: dict[_Shape, dict[int, _Graph]] = {}  # by shapes and size
        self._filled: tuple[Any, Any] = (None, None)  # the packed rows that are copied into the inputs of a graph
        self._capturer: Thread | None = None
        self._warned = False

    def run(self, packed: Tensors, moving: Tensors, n: int, warming: bool) -> tuple[Tensor, bool]:
        """(x after one more step, whether a graph made it). x is valid until the next call.

        packed: tensors [rows, …] by name; the same mapping while the same rows step, so that it is copied once.
        moving: tensors [rows, …] that change at every step. warming: capture a missing graph, or raise ConfigError.
        """
        rows = len(next(iter(moving.values())))
        graph = self._graph(packed, moving, rows, n, warming)
        if graph is None:
            self.missed += not warming
            return self._call(packed, moving, n), False
        if self._filled[0] is not packed or self._filled[1] is not graph:
            self._filled = (None, None)  # if a copy fails, the inputs are not filled
            _fill(graph.packed, packed)
            self._filled = (packed, graph)
        _fill(graph.moving, moving)
        graph.replay()
        self.replayed += not warming
        return graph.moved[:rows], True

    def snapshot(self) -> dict[str, int]:
        """The number of graphs and of sets of shapes, and of steps with and without a graph since the warm-up."""
        graphs = sum(map(len, self._graphs.values()))
        return {"graphs": graphs, "shapes": len(self._graphs), "replayed": self.replayed, "missed": self.missed}

    def _graph(self, packed: Tensors, moving: Tensors, rows: int, n: int, warming: bool) -> _Graph | None:
        size = next((size for size in self.sizes if size >= rows), None)
        if size is None or (self._capturer is not None and current_thread() is not self._capturer):
            return None
        shape = (n, *map(_kind, packed.items()), *map(_kind, moving.items()))
        graphs = self._graphs.get(shape, {})
        if size in graphs:
            return graphs[size]
        if not warming or (not graphs and len(self._graphs) == MOST_SHAPES):
            if not self._warned:
                self._warned = True
                log.warning("a step runs without a CUDA graph: the warm-up captured none of %d rows of %s", size, shape)
            return None
        self._capturer = current_thread()
        self._filled = (None, None)
        graph = self._captured(packed, moving, size, n)
        self._graphs.setdefault(shape, {})[size] = graph
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
    """A block in which `torch.tensor` of an equal list, type and device copies from the host only once.

    Models make small constants (masks, for example) from lists at every call. A capture allows no copy from the host,
    only copies on the device.
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
    """Copy rows into buffers of at least as many rows; copies of the last row fill the rest."""
    for name, rows in given.items():
        buffer, n = buffers[name], len(rows)
        buffer[:n].copy_(rows)
        if n < len(buffer):
            buffer[n:].copy_(rows[-1:].expand_as(buffer[n:]))
