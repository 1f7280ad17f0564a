"""The inputs and outputs of a graph: what it declares, and what its caller expects of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reflex_runtime.core.errors import ConfigError

_DTYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
    "tensor(uint64)": np.uint64,
    "tensor(uint32)": np.uint32,
    "tensor(uint16)": np.uint16,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a caller expects of a graph's input or output.

    kind: numpy's letters for the types it may have: "f" float, "i" integer, "u" unsigned (images), "b" bool, "" any.
    dims: sizes after the batch axis, None in a place for any; None altogether: not known.
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
    """An input or output as onnxruntime tells it. ConfigError for one that is no tensor of numbers."""
    dtype = _DTYPES.get(arg.type)
    if dtype is None:
        raise ConfigError(f"{path}: {arg.name!r}: found type {arg.type}, expected a tensor of numbers")
    return Port(arg.name, np.dtype(dtype), tuple(d if isinstance(d, int) else None for d in arg.shape))


class PortMismatch(ConfigError):
    """The inputs or outputs of a graph are not those that its caller expects."""


class BatchAxisError(ConfigError):
    """The first axes of a graph's inputs and outputs are no batch axis."""


def match(path: Path, what: str, specs: Sequence[TensorSpec], ports: Mapping[str, Port]) -> None:
    """PortMismatch, with every difference, where the ports of a graph are not as expected. what: input or output.

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
        return f"found {port.dtype}, expected {kinds_of(spec)}"
    if spec.dims is not None and not fits(spec.dims, port.dims[1:]):
        return f"found {shown(port.dims[1:])} after the batch axis, expected {shown(spec.dims)}"
    return ""


def kinds_of(spec: TensorSpec) -> str:
    """The types that a tensor may have, in words."""
    words = {"f": "float", "i": "int32 or int64", "u": "uint8", "b": "bool"}
    return ", ".join(words[letter] for letter in spec.kind)


def fits(dims: Sequence[int | None], declared: Sequence[int | None]) -> bool:
    """Whether sizes agree with those that a graph declares."""
    return len(dims) == len(declared) and all(
        a is None or b is None or a == b for a, b in zip(dims, declared, strict=True)
    )


def shown(dims: Sequence[int | None]) -> str:
    """Sizes as errors show them."""
    return "[" + ", ".join("any" if d is None else str(d) for d in dims) + "]"
