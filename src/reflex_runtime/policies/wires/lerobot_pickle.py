"""The pickles of LeRobot's clients, read without `pickle`: no name in them is ever looked up or called.

A small machine reads the opcodes that its two messages have and makes numbers, texts, lists, maps, arrays and
`Pickled` objects of them. Any other opcode or name is refused. Bytes are views of the message, arrays views of those.
The answer, a list of `TimedAction`s with tensors, is written opcode by opcode, without torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.policies.wires.arrays import array_in
from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.json import printable

MAX_OPCODES: Final = 5000
HELPERS: Final = "lerobot.async_inference.helpers"
SETUP, OBSERVATION = "RemotePolicyConfig", "TimedObservation"
_NUMPY: Final = {  # of numpy 1 and 2
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    **{(f"numpy.{core}.multiarray", "_reconstruct"): "reconstruct" for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): "scalar" for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): "frombuffer" for core in ("core", "_core")},
}
_NAMES: Final = _NUMPY | {(HELPERS, SETUP): SETUP, (HELPERS, OBSERVATION): OBSERVATION}


@dataclass(frozen=True, slots=True)
class _Name:
    """A name of the closed set."""

    name: str


@dataclass(slots=True, eq=False)
class Pickled:
    """An object of LeRobot with its fields."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PickledArray:
    """An array; a later opcode gives its contents."""

    array: NDArray[Any] | None = None


@dataclass(slots=True, eq=False)
class _Dtype:
    """A numpy type. name: with the byte order that a later opcode gives."""

    name: str


class _Mark:
    pass


_MARK: Final = _Mark()


def read_pickle(data: bytes, kind: str) -> dict[str, Any]:
    """The fields of an object of this kind; ClientError if the pickle holds anything else."""
    try:
        found = _Machine(data).run()
    except ClientError:
        raise
    except (IndexError, KeyError, ValueError, TypeError, UnicodeDecodeError):
        wrong = "the message is no pickle of LeRobot's: it breaks off, or has something else where an array is expected"
        raise ClientError(wrong) from None
    if not isinstance(found, Pickled) or found.kind != kind:
        raise ClientError(f"the message must be a pickled {kind}")
    return found.fields


class _Machine:
    """Reads one pickle. stack: values so far. at: read position."""

    def __init__(self, data: bytes) -> None:
        self._data, self._view = data, memoryview(data).toreadonly()
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.at = 0

    def run(self) -> Any:
        """The value of the pickle."""
        for _ in range(MAX_OPCODES):
            opcode = self._data[self.at]
            self.at += 1
            if opcode == 0x2E:  # STOP
                return self._stack.pop()
            step = _OPCODES.get(opcode)
            if step is None:
                raise ClientError(f"the pickle has an opcode that is not read here: {opcode:#04x}")
            step(self)
        raise ClientError(f"the pickle has over {MAX_OPCODES} opcodes: send arrays as arrays")

    # -- what opcodes read ---------------------------------------------------------------------------------------------

    def take(self, size: int) -> memoryview:
        self.at += size
        if self.at > len(self._data):
            raise IndexError
        return self._view[self.at - size : self.at]

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def length(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def line(self) -> str:
        end = self._data.index(b"\n", self.at, self.at + 200)
        return bytes(self.take(end + 1 - self.at))[:-1].decode()

    # -- what they do --------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop_to_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError
        found = self._stack[at + 1 :]
        del self._stack[at:]
        return found

    def pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError
        found = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return found

    def memoize(self, place: int | None = None) -> None:
        self._memo[len(self._memo) if place is None else place] = self._stack[-1]

    def recall(self, place: int) -> None:
        self.push(self._memo[place])

    def append(self, values: list[Any]) -> None:
        self._into(list).extend(values)

    def set_items(self, flat: list[Any]) -> None:
        target = self._into(dict)
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            if not isinstance(key, str):
                raise ClientError("the pickle holds a map whose keys are not texts")
            target[key] = value

    def _into(self, kind: type[Any]) -> Any:
        if type(self._stack[-1]) is not kind:
            raise TypeError
        return self._stack[-1]

    def name(self, module: Any, name: Any) -> None:
        known = _NAMES.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
        if known is None:
            raise ClientError(printable(f"the pickle names {str(module)[:80]}.{str(name)[:80]}, which is never loaded"))
        self.push(_Name(known))

    def make(self) -> None:
        """NEWOBJ: an object of LeRobot without its fields."""
        kind, arguments = self.pop(2)
        if not isinstance(kind, _Name) or kind.name not in (SETUP, OBSERVATION) or arguments != ():
            raise TypeError
        self.push(Pickled(kind.name))

    def call(self) -> None:
        """REDUCE: numpy's arrays, types and numbers."""
        target, arguments = self.pop(2)
        if not isinstance(target, _Name) or not isinstance(arguments, tuple):
            raise TypeError
        if target.name == "reconstruct":
            self.push(PickledArray())
        elif target.name == "dtype":
            self.push(_Dtype(_text(arguments[0])))
        elif target.name == "frombuffer":
            data, dtype, shape, order = arguments
            self.push(PickledArray(_array(data, dtype, shape, order == "F")))
        elif target.name == "scalar":
            dtype, data = arguments
            number = _array(data, dtype, (), False)
            if number.dtype.kind not in "biuf":
                raise TypeError
            self.push(number.item())
        else:
            raise TypeError

    def build(self) -> None:
        """BUILD: the contents of an object."""
        target, state = self.pop(2)
        if isinstance(target, Pickled) and type(state) is dict:
            target.fields = state
        elif isinstance(target, PickledArray):
            _, shape, dtype, fortran, data = state
            target.array = _array(data, dtype, shape, fortran is True)
        elif isinstance(target, _Dtype):
            order = _text(state[1])
            target.name = ("|" if order not in ("<", ">", "|") else order) + target.name
        else:
            raise TypeError
        self.push(target)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _array(data: Any, dtype: Any, shape: Any, fortran: bool) -> NDArray[Any]:
    if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple):
        raise TypeError
    if not fortran:
        return array_in(data, dtype.name, list(shape))
    return array_in(data, dtype.name, list(reversed(shape))).T


_INT, _FLOAT = struct.Struct("<i"), struct.Struct(">d")


def _long(machine: _Machine) -> None:
    size = machine.length(1)
    if size > 9:
        raise ClientError("the pickle holds a number of more than 64 bits")
    machine.push(int.from_bytes(machine.take(size), "little", signed=True))


def _tuple(count: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(tuple(m.pop(count)))


def _texts(width: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(bytes(m.take(m.length(width))).decode())


def _data(width: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.take(m.length(width)))


def _map(machine: _Machine) -> None:
    flat = machine.pop_to_mark()
    machine.push({})
    machine.set_items(flat)


_OPCODES: Final[dict[int, Callable[[_Machine], Any]]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("("): lambda m: m.push(_MARK),
    ord("0"): lambda m: m.pop(1),
    ord("1"): lambda m: m.pop_to_mark(),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m.number(_INT)),
    ord("K"): lambda m: m.push(m.length(1)),
    ord("M"): lambda m: m.push(m.length(2)),
    0x8A: _long,
    ord("G"): lambda m: m.push(m.number(_FLOAT)),
    0x8C: _texts(1), ord("X"): _texts(4), 0x8D: _texts(8),
    ord("C"): _data(1), ord("B"): _data(4), 0x8E: _data(8), 0x96: _data(8),
    ord(")"): lambda m: m.push(()),
    0x85: _tuple(1), 0x86: _tuple(2), 0x87: _tuple(3),
    ord("t"): lambda m: m.push(tuple(m.pop_to_mark())),
    ord("]"): lambda m: m.push([]),
    ord("l"): lambda m: m.push(m.pop_to_mark()),
    ord("a"): lambda m: m.append(m.pop(1)),
    ord("e"): lambda m: m.append(m.pop_to_mark()),
    ord("}"): lambda m: m.push({}),
    ord("d"): _map,
    ord("s"): lambda m: m.set_items(m.pop(2)),
    ord("u"): lambda m: m.set_items(m.pop_to_mark()),
    0x94: lambda m: m.memoize(),
    ord("q"): lambda m: m.memoize(m.length(1)),
    ord("r"): lambda m: m.memoize(m.length(4)),
    ord("h"): lambda m: m.recall(m.length(1)),
    ord("j"): lambda m: m.recall(m.length(4)),
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: lambda m: m.name(*m.pop(2)),
    ord("R"): lambda m: m.call(),
    0x81: lambda m: m.make(),
    ord("b"): lambda m: m.build(),
}  # fmt: skip


# -- the answer --------------------------------------------------------------------------------------------------------

_ACTION: Final = f"c{HELPERS}\nTimedAction\nq\0".encode()  # the class, memoised as 0
_TENSOR: Final = b"ctorch\ntensor\nq\1"


def write_actions(actions: NDArray[np.floating[Any]], timestamp: float, timestep: int, seconds: float) -> bytes:
    """The pickle of a list of TimedActions. seconds: between two of them."""
    parts = [b"\x80\2", _ACTION, b"0", _TENSOR, b"0](" if len(actions) else b"0]"]
    for i, action in enumerate(np.asarray(actions, np.float64)):
        parts += [b"h\0", _float(timestamp + i * seconds), _whole(timestep + i), b"h\1]("]
        parts += [_float(float(value)) for value in action]
        parts.append(b"e\x85R\x87R")  # torch.tensor([…]), then TimedAction(timestamp, timestep, tensor)
    return b"".join((*parts, b"e." if len(actions) else b"."))


def _float(value: float) -> bytes:
    return b"G" + _FLOAT.pack(value)


def _whole(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
