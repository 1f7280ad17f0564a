"""Runs rows through one graph of ONNX Runtime, in one call where its batch axis is dynamic.

The only module that imports onnxruntime, and only when needed. It also checks execution providers, and a graph's inputs
and outputs against a caller's expectations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, current_thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.run.process import telemetry_off
from reflex_runtime.settings.declare import did_you_mean

# -- execution providers -----------------------------------------------------------------------------------------------


CPU, CUDA, OPENVINO = "CPUExecutionProvider", "CUDAExecutionProvider", "OpenVINOExecutionProvider"
PROVIDERS = {"cpu": CPU, "cuda": CUDA, "openvino": OPENVINO}  # by the names of command lines
_PACKAGES = {CUDA: "onnxruntime-gpu", OPENVINO: "onnxruntime-openvino"}  # each in place of onnxruntime


def onnxruntime_here() -> Any:
    """The package, or a ConfigError with the command that installs it."""
    telemetry_off()
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            "onnxruntime is not installed: pip install onnxruntime, or onnxruntime-gpu for CUDA"
        ) from error
    return onnxruntime


def check_provider(provider: str) -> None:
    """ConfigError when this onnxruntime does not have the provider. Only a session shows whether it starts."""
    available = onnxruntime_here().get_available_providers()
    if provider not in available:
        hint = did_you_mean(provider, available)
        if provider in _PACKAGES:
            hint = f"; pip install {_PACKAGES[provider]} in place of onnxruntime"
        short = {name: f"{name} ({alias})" for alias, name in PROVIDERS.items()}
        there = ", ".join(short.get(name, name) for name in available)
        raise ConfigError(f"provider={provider!r}: not in this onnxruntime, which has {there}{hint}")


# -- inputs and outputs of a graph -------------------------------------------------------------------------------------


_NAMES = {"float": "float32", "double": "float64"}  # numpy's names of types


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An expected input or output of a graph.

    kind: numpy's letters for its allowed types: "f" float, "i" integer, "u" unsigned (images), "b" bool, "" any.
    dims: sizes after the batch axis, None in a place for any; None instead of all: not known.
    """

    name: str
    kind: str = ""
    dims: tuple[int | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output as the graph declares it. dims: sizes with the batch axis, None where symbolic."""

    name: str
    dtype: Any
    dims: tuple[int | None, ...]


def port_of(path: Path, arg: Any) -> Port:
    """An input or output from onnxruntime's description. ConfigError for one that is no tensor of numbers."""
    name = arg.type.removeprefix("tensor(").removesuffix(")")
    try:
        dtype = np.dtype(_NAMES.get(name, name))
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biuf":
        raise ConfigError(f"{path}: {arg.name!r}: found type {arg.type}, expected a tensor of numbers")
    return Port(arg.name, dtype, tuple(d if isinstance(d, int) else None for d in arg.shape))


class PortMismatch(ConfigError):
    """The inputs or outputs of a graph differ from those that its caller expects."""


class BatchAxisError(ConfigError):
    """The first axes of a graph's inputs and outputs are no batch axis."""


def match(path: Path, what: str, specs: Sequence[TensorSpec], ports: Mapping[str, Port]) -> None:
    """PortMismatch, with every difference, where the ports of a graph are not as expected. what: "input" or "output".

    Inputs must be all of the graph's, outputs may be some of them."""
    problems = [f"{what} {spec.name!r}: {found}" for spec in specs if (found := _mismatch(spec, ports))]
    names = [spec.name for spec in specs]
    expected = ", ".join(map(repr, names))
    unknown = sorted(set(ports) - set(names)) if what == "input" and not problems else ()
    problems += [f"input {name!r}: unknown, expected only {expected}" for name in unknown]
    if problems:
        raise PortMismatch(f"{path}: {'; '.join(problems)}")


def _mismatch(spec: TensorSpec, ports: Mapping[str, Port]) -> str:
    port = ports.get(spec.name)
    if port is None:
        return f"not in the graph, which has {', '.join(map(repr, ports))}"
    if spec.kind and port.dtype.kind not in spec.kind:
        words = {"f": "float", "i": "int32 or int64", "u": "uint8", "b": "bool"}
        return f"found {port.dtype}, expected {', '.join(map(words.__getitem__, spec.kind))}"
    if spec.dims is not None and not fits(spec.dims, port.dims[1:]):
        return f"found {shown(port.dims[1:])} after the batch axis, expected {shown(spec.dims)}"
    return ""


def fits(dims: Sequence[int | None], declared: Sequence[int | None]) -> bool:
    """Whether sizes agree with those that a graph declares."""
    return len(dims) == len(declared) and all(
        a is None or b is None or a == b for a, b in zip(dims, declared, strict=True)
    )


def shown(dims: Sequence[int | None]) -> str:
    """Sizes as errors show them."""
    return "[" + ", ".join("any" if d is None else str(d) for d in dims) + "]"


# -- a session ---------------------------------------------------------------------------------------------------------


Rows = Mapping[str, Any]  # tensor name → array [rows, …], or the result of `OnnxSession.place`

# TF32 rounds the factors of float32 products to 10 bits, which moves actions of the bundled policies by 1.4e-3. A graph
# that prefers speed is float16.
_OPTIONS = {CUDA: {"use_tf32": "0"}}

# ONNX Runtime captures one CUDA graph per id; -1 runs without. Sizes are the ids here.
_GRAPH_ID, _NO_GRAPH = "gpu_graph_id", -1


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """One captured batch size. A replay uses the addresses of the capture, so the buffers stay for good.

    inputs: on the GPU, [size, …] by name. binding: these and the outputs. options: name the CUDA graph.
    """

    size: int
    inputs: Mapping[str, Any]
    binding: Any
    options: Any

    def put(self, name: str, rows: Any) -> Any:
        """Copy rows into the buffer of an input, padded, unless they are the buffer; returns it."""
        buffer = self.inputs[name]
        if rows is not buffer:
            buffer.update_inplace(_padded(rows, self.size))
        return buffer


class OnnxSession:
    """One graph. Its first axis is the batch axis of every input and output.

    path: the .onnx file; external data lies beside it.
    metadata: of the file, by key. half: whether an input or output has 16 bits.
    inputs, outputs: as `match` checks them; only these outputs are computed. None: any, and all.
    provider: the execution provider; another one is never used instead. threads: intra-op threads.
    captured_sizes: batch sizes to capture as CUDA graphs, ascending; needs the CUDA provider, a symbolic batch axis
        and calls that differ in their rows alone. Rows are padded to the next size with copies of the last one, and
        results trimmed; beyond the largest size the call runs without a graph. A size is captured at its first call.
        ONNX Runtime keeps CUDA graphs per thread: only the first thread that calls has graphs, calls on others run
        without. Calls from several threads at once are not safe.
    any_batch: whether the batch axis of the inputs may have any fixed size; without it a size other than 1 is a
        ConfigError. whole: the graph has no batch axis, and `call` runs it once.
    batch_size: the fixed size of the batch axis, None if it is symbolic. `run` calls the graph once per so many rows,
        the last ones padded with copies.
    """

    def __init__(
        self,
        path: Path,
        inputs: Sequence[TensorSpec] | None = None,
        outputs: Sequence[TensorSpec] | None = None,
        provider: str = CPU,
        threads: int = 1,
        captured_sizes: Sequence[int] = (),
        any_batch: bool = False,
        whole: bool = False,
    ) -> None:
        if not threads >= 1:
            raise ConfigError(f"OnnxSession.threads={threads!r}: must be >= 1")
        if captured_sizes and provider != CUDA:
            raise ConfigError(f"captured_sizes={tuple(captured_sizes)}: {provider} has no graphs to capture")
        self.path, self.provider = path, provider
        self.captured_sizes = tuple(captured_sizes)
        self._session, self._ort = _open(path, provider, threads, bool(captured_sizes))
        self.inputs = {p.name: p for p in (port_of(path, arg) for arg in self._session.get_inputs())}
        self.outputs = {p.name: p for p in (port_of(path, arg) for arg in self._session.get_outputs())}
        self.half = any(port.dtype == np.float16 for port in (*self.inputs.values(), *self.outputs.values()))
        self.metadata: dict[str, str] = dict(self._session.get_modelmeta().custom_metadata_map)
        if inputs is not None:
            match(path, "input", inputs, self.inputs)
        if outputs is not None:
            match(path, "output", outputs, self.outputs)
        self._wanted = [spec.name for spec in outputs] if outputs is not None else list(self.outputs)
        self.batch_size = 1 if whole else self._batch_size(any_batch)
        if captured_sizes and not self.dynamic_batch:
            size = self.batch_size
            raise ConfigError(f"{path}: its batch axis is fixed at {size}, so no batch sizes can be captured")
        self._captured: dict[int, _Captured] = {}
        self._capturer: Thread | None = None
        self._no_graph = self._options(_NO_GRAPH) if captured_sizes else None

    def run(self, rows: Rows, notes: dict[str, Any] | None = None) -> dict[str, NDArray[Any]]:
        """Output arrays [rows, …] by name. All inputs have the same number of rows; one at least is an array. They are
        converted to the graph's types.

        notes: gets `fanout: sequential` when the rows ran one by one, and with captured sizes `captured`: whether they
        ran at one.
        """
        n = next(len(array) for array in rows.values() if isinstance(array, np.ndarray))
        size = self._captured_size(n)
        if self.captured_sizes and notes is not None:
            notes["captured"] = size is not None
        if size is not None:
            return self._replay(size, n, rows)
        if self.dynamic_batch:
            return self._checked(self.call(rows), n)
        return self._in_parts(n, rows, self.batch_size or 1, notes)

    @property
    def dynamic_batch(self) -> bool:
        """Whether the batch axis is symbolic."""
        return self.batch_size is None

    def _in_parts(self, n: int, rows: Rows, size: int, notes: dict[str, Any] | None) -> dict[str, NDArray[Any]]:
        """Calls of `size` rows."""
        if notes is not None and (n > size or size == 1):
            notes["fanout"] = "sequential"
        parts = []
        for start in range(0, n, size):
            part = {name: array[start : start + size] for name, array in rows.items()}
            parts.append(self._checked(self.call({name: _padded(array, size) for name, array in part.items()}), size))
        return {name: np.concatenate([part[name] for part in parts])[:n] for name in self._wanted}

    def _checked(self, results: dict[str, NDArray[Any]], size: int) -> dict[str, NDArray[Any]]:
        """BatchAxisError unless each result has `size` rows: a caller would get those of another one."""
        for name, array in results.items():
            if array.shape[:1] != (size,):
                found = array.shape[0] if array.ndim else "none"
                raise BatchAxisError(
                    f"{self.path}: output {name!r}: leading axis: found {found}, expected {size} as that of its inputs"
                )
        return results

    def place(self, array: NDArray[Any], name: str) -> Any:
        """The rows of input `name` on the GPU, so that one upload serves many calls.

        On the CPU, and where rows run one by one, the array itself. At a captured size it lasts until the next rows are
        placed or run at that size.
        """
        array = np.ascontiguousarray(array, self.inputs[name].dtype)
        if self.provider != CUDA or not self.dynamic_batch:
            return array
        captured = self._captured.get(self._captured_size(len(array)) or 0)
        if captured is not None:
            return captured.put(name, array)
        return self._ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0)

    def call(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """Output arrays by name of one call with these inputs as they are."""
        if self.provider == CUDA:
            results = self._call_bound(rows)
        else:
            feeds = {name: np.ascontiguousarray(array, self.inputs[name].dtype) for name, array in rows.items()}
            results = self._session.run(self._wanted, feeds)
        return dict(zip(self._wanted, results, strict=True))

    def _call_bound(self, rows: Rows) -> Any:
        """A call on the GPU: placed rows are read in place, results come back together."""
        binding = self._bound({name: self._upload(value, name) for name, value in rows.items()})
        self._session.run_with_iobinding(binding, self._no_graph)
        return binding.copy_outputs_to_cpu()

    def _bound(self, inputs: Mapping[str, Any], outputs: Sequence[Any] = ()) -> Any:
        """A binding of inputs on the GPU to outputs there, by default new ones at every run."""
        binding = self._session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for i, name in enumerate(self._wanted):
            if outputs:
                binding.bind_ortvalue_output(name, outputs[i])
            else:
                binding.bind_output(name, "cuda", 0)
        return binding

    def _upload(self, rows: Any, name: str) -> Any:
        if isinstance(rows, self._ort.OrtValue):
            return rows
        return self._ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(rows, self.inputs[name].dtype), "cuda", 0)

    # -- captured sizes ------------------------------------------------------------------------------------------------

    def _captured_size(self, n: int) -> int | None:
        """The size n rows are padded to on this thread, or None to run them as they are."""
        if not self.captured_sizes:
            return None
        self._capturer = self._capturer or current_thread()
        if current_thread() is not self._capturer:
            return None
        return next((size for size in self.captured_sizes if size >= n), None)

    def _replay(self, size: int, n: int, rows: Rows) -> dict[str, NDArray[Any]]:
        captured = self._captured.get(size)
        if captured is None:
            captured = self._captured[size] = self._capture(size, rows)
        for name, value in rows.items():
            if isinstance(value, np.ndarray):
                value = np.ascontiguousarray(value, self.inputs[name].dtype)
            captured.put(name, value)
        self._session.run_with_iobinding(captured.binding, captured.options)
        results = dict(zip(self._wanted, captured.binding.copy_outputs_to_cpu(), strict=True))
        return {name: array[:n] for name, array in self._checked(results, size).items()}

    def _capture(self, size: int, rows: Rows) -> _Captured:
        inputs = {name: self._upload(_padded(value, size), name) for name, value in rows.items()}
        shaped = self._bound(inputs)
        self._session.run_with_iobinding(shaped, self._no_graph)  # its outputs become the buffers: now sizes are known
        binding, options = self._bound(inputs, shaped.get_outputs()), self._options(size)
        self._session.run_with_iobinding(binding, options)  # onnxruntime repeats it until it is captured
        return _Captured(size, inputs, binding, options)

    def _options(self, graph: int) -> Any:
        options = self._ort.RunOptions()
        options.add_run_config_entry(_GRAPH_ID, str(graph))
        return options

    # -- the graph's ports ---------------------------------------------------------------------------------------------

    def _batch_size(self, any_batch: bool) -> int | None:
        """The size at which the leading axis is fixed; None if it is symbolic everywhere.

        It must be symbolic everywhere, or 1 everywhere. any_batch: or of one size in all inputs, and that or symbolic
        in the outputs.
        """
        axes = {f"input {name!r}": port.dims[:1] for name, port in self.inputs.items()}
        heads = set(axes.values())
        axes |= {f"output {name!r}": self.outputs[name].dims[:1] for name in self._wanted}
        size: int | None = 1
        fixed = any_batch and len(heads) == 1 and heads.isdisjoint({(), (None,)})
        if fixed:
            ((size,),) = heads
        for port, dims in axes.items():
            if dims not in ((None,), (size,)):
                found = f"a fixed size of {dims[0]}" if dims else "no axis at all"
                wanted = f"{size} as that of its inputs" if fixed else "a symbolic size, or 1"
                raise BatchAxisError(f"{self.path}: {port}: leading axis: found {found}, expected {wanted}")
        symbolic = [port for port, dims in axes.items() if dims == (None,)]
        if fixed or not symbolic:
            return size
        if len(symbolic) < len(axes):
            one = next(port for port in axes if port not in symbolic)
            raise BatchAxisError(
                f"{self.path}: {one}: leading axis is 1 but that of {symbolic[0]} is symbolic; make them agree"
            )
        return None


def _padded(rows: Any, size: int) -> NDArray[Any]:
    """Rows, an array or placed, with the last one repeated up to `size`."""
    array: NDArray[Any] = rows if isinstance(rows, np.ndarray) else rows.numpy()
    return array if len(array) == size else array.take(range(size), 0, mode="clip")


def _open(path: Path, provider: str, threads: int, graphs: bool) -> tuple[Any, Any]:
    ort = onnxruntime_here()
    check_provider(provider)
    if not path.is_file():
        raise ConfigError(f"{path}: not found, expected an ONNX file")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors only: they are raised as well
    chosen = _OPTIONS.get(provider, {}) | ({"enable_cuda_graph": "1"} if graphs else {})
    try:
        session = ort.InferenceSession(str(path), options, providers=[(provider, chosen)])
    except Exception as error:  # onnxruntime raises a dozen classes of its own
        raise ConfigError(f"{path}: onnxruntime cannot load it: {error}") from error
    if session.get_providers()[0] != provider:  # without drivers it falls back to the CPU silently
        raise ConfigError(f"provider={provider!r}: onnxruntime could not start it here; check driver and libraries")
    return session, ort
