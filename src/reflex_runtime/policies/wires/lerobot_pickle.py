"""The pickles of LeRobot's clients, read by an `Unpickler` that knows ten names, each a class of this file.

A pickle of a few hundred bytes can still claim gigabytes, and lists that hold the one before twice double with every
line. So its opcodes are checked before it is loaded: which they are, how many, and how large the value would be with
every shared part counted each time. The answer, a list of `TimedAction`s with tensors, is written opcode by opcode,
without torch.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.policies.wires.arrays import array_in
from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.json import printable

MAX_OPCODES: Final = 5000
MAX_PARTS: Final = 20_000  # of a value; a part that is shared counts each time
MAX_DEPTH: Final = 20
HELPERS: Final = "lerobot.async_inference.helpers"
SETUP, OBSERVATION = "RemotePolicyConfig", "TimedObservation"
# What Python's pickler writes from protocol 2 on, for values that a message may hold.
_OPCODES: Final = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
    "BYTEARRAY8", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT",
    "SETITEM", "SETITEMS", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL",
    "REDUCE", "NEWOBJ", "BUILD",
}  # fmt: skip
_MEMO: Final = ("MEMOIZE", "BINPUT", "LONG_BINPUT")
_CHANGES: Final = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD")  # the value below what they take


def read_pickle(data: bytes, kind: str) -> dict[str, Any]:
    """The fields of an object of this kind; ClientError if the pickle holds anything else."""
    try:
        _check(data)
        found = _Unpickler(io.BytesIO(data)).load()
        if type(found) is _CLASSES[HELPERS, kind] and found.value is not None:
            fields: dict[str, Any] = _plain(found.value)
            return fields
    except ClientError:
        raise
    except Exception:  # a broken pickle raises whatever its opcodes meet
        wrong = "the message is no pickle of LeRobot's: it breaks off, or has something else where an array is expected"
        raise ClientError(wrong) from None
    raise ClientError(f"the message must be a pickled {kind}")


# -- before it is loaded -----------------------------------------------------------------------------------------------


class _Part:
    """A value on the stack of a pickle. parts, depth: of the value. used: it is in another one, and may not change."""

    __slots__ = ("depth", "parts", "used")

    def __init__(self) -> None:
        self.parts, self.depth, self.used = 1, 1, False

    def hold(self, taken: list[_Part]) -> None:
        for part in taken:
            part.used = True
            self.parts += part.parts
            self.depth = max(self.depth, part.depth + 1)
        if self.used or self.parts > MAX_PARTS or self.depth > MAX_DEPTH:
            wrong = f"over {MAX_PARTS} parts, over {MAX_DEPTH} levels, or a part that changes after it is used"
            raise ClientError(f"the pickle has {wrong}: send arrays as arrays")


def _check(data: bytes) -> None:
    """Follow the opcodes without making their values; ClientError for what may not be loaded."""
    stack: list[_Part] = []
    marks: list[int] = []
    memo: dict[int, _Part] = {}
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name, before = opcode.name, opcode.stack_before
        if name not in _OPCODES:
            raise ClientError(f"the pickle has an opcode that is not read here: {name}")
        place = argument if name in _MEMO and argument is not None else len(memo)
        if count >= MAX_OPCODES or place > MAX_OPCODES:  # the Unpickler makes its memo as long as the largest place
            raise ClientError(f"the pickle has over {MAX_OPCODES} opcodes: send arrays as arrays")
        if name == "LONG1" and argument.bit_length() > 64:
            raise ClientError("the pickle holds a number of more than 64 bits")
        if name == "MARK":
            marks.append(len(stack))
        elif name in _MEMO:
            memo[place] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        else:
            changed = name in _CHANGES
            at = marks.pop() if pickletools.stackslice in before else len(stack) - len(before) + changed
            if at < changed:
                raise IndexError
            taken, stack[at:] = stack[at:], ()
            if changed or opcode.stack_after:
                stack += () if changed else (_Part(),)
                stack[-1].hold(taken)


# -- while it is loaded ------------------------------------------------------------------------------------------------


class _Built:
    """What a pickle may build. It may call each of these classes with anything, and give it any state.

    `__setstate__` is on all of them: without it a pickle could set attributes of the classes themselves.
    """

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        raise TypeError


class _Fields(_Built):
    def __setstate__(self, state: Any) -> None:
        self.value = dict(state)


class _Setup(_Fields):
    pass


class _Observation(_Fields):
    pass


class _Dtype(_Built):
    def __init__(self, name: str, *_: Any) -> None:
        self.value = name

    def __setstate__(self, state: Any) -> None:
        self.value = (state[1] if state[1] in ("<", ">") else "|") + self.value


class _Array(_Built):
    def __init__(self, data: Any, dtype: Any, shape: Any, order: Any) -> None:
        self.value = _array(data, dtype, shape, order == "F")


class _EmptyArray(_Built):
    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.value = _array(data, dtype, shape, fortran is True)


class _Scalar(_Built):
    def __init__(self, dtype: Any, data: Any) -> None:
        number = _array(data, dtype, (), False)
        if number.dtype.kind not in "biuf":
            raise TypeError
        self.value = number.item()


_CLASSES: Final[dict[tuple[str, str], type[_Built]]] = {
    (HELPERS, SETUP): _Setup,
    (HELPERS, OBSERVATION): _Observation,
    ("numpy", "ndarray"): _Built,
    ("numpy", "dtype"): _Dtype,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _EmptyArray for core in ("core", "_core")},  # of numpy 1 and 2
    **{(f"numpy.{core}.multiarray", "scalar"): _Scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Array for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Built]:
        if (module, name) not in _CLASSES:
            raise ClientError(printable(f"the pickle names {module[:80]}.{name[:80]}, which is never loaded"))
        return _CLASSES[module, name]


def _array(data: Any, dtype: Any, shape: Any, fortran: bool) -> NDArray[Any]:
    if type(dtype) is not _Dtype or not isinstance(shape, tuple):
        raise TypeError
    if isinstance(data, bytearray):
        data = memoryview(data).toreadonly()
    if not fortran:
        return array_in(data, dtype.value, list(shape))
    return array_in(data, dtype.value, list(reversed(shape))).T


def _plain(value: Any) -> Any:
    """A loaded value with numbers and arrays in place of what stands for them."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ClientError("the pickle holds a map whose keys are not texts")
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if type(value) in (_Array, _EmptyArray, _Scalar) and value.value is not None:
        return value.value
    if isinstance(value, (_Built, type)):
        raise TypeError
    return value


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
    return b"G" + struct.pack(">d", value)


def _whole(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
