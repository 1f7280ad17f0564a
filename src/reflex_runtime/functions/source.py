"""From a source of `reflex serve`, `python:module:function` or an ONNX file, to a `ServedFunction`.

A module is imported and checked before the port opens, so that an error in it gives one line and exit status 2.
"""

from __future__ import annotations

import inspect
import re
from abc import ABCMeta
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypedDict, get_args, get_origin, get_type_hints

import numpy as np

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.functions.processor import ItemCalls, OnnxItems, Streams
from reflex_runtime.functions.values import ArrayType, Values, example_of, unaliased
from reflex_runtime.run.batched import BatchedMethod, Handle
from reflex_runtime.run.modules import imported, made, told
from reflex_runtime.run.onnx_session import PROVIDERS
from reflex_runtime.settings import FunctionsConfig
from reflex_runtime.settings.declare import did_you_mean

PYTHON: Final = "python:"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LISTS: Final = (list, Sequence, Iterable)
_STREAMS: Final = (Iterator, AsyncIterator, Generator, AsyncGenerator)


@dataclass(slots=True, eq=False)
class ServedFunction:
    """One function of a server.

    name: in paths, metrics and journals. items, results: the types of one item and of one result; if it `streams`, of
    one part. example: an item, JSON-safe; None if there is none. note: a line for the log. shaped: whether only items
    of equal shapes may share a batch.
    """

    name: str
    source: str
    processor: ItemCalls | OnnxItems | Streams
    items: Values
    results: Values
    streams: bool = False
    example: Any = None
    weight: float = 1.0
    note: str = ""
    shaped: bool = False
    description: str = ""


def read_functions(sources: Sequence[str], config: FunctionsConfig) -> list[ServedFunction]:
    """The functions to serve. Raises ConfigError with the source and its fault."""
    weights = dict(_weight(text) for text in config.weight)
    found: dict[str, ServedFunction] = {}
    for text in sources:
        name, equals, source = text.partition("=")
        if not (equals and _NAME.fullmatch(name)):
            if equals and not Path(text).exists():
                raise ConfigError(f"{text}: the name {name!r} must be 1 to 64 letters, digits, dots, - and _")
            name, source = "", text
        served = read_python(source, name, config) if source.startswith(PYTHON) else read_onnx(source, name, config)
        if served.name in found:
            raise ConfigError(f"{text}: two functions are called {served.name!r}; write NAME={source}")
        served.weight = weights.pop(served.name, 1.0)
        found[served.name] = served
    for name in weights:
        raise ConfigError(f"--weight={name}=…: no such function{did_you_mean(name, found)}; served: {', '.join(found)}")
    return list(found.values())


def _weight(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not 0.01 <= weight <= 100.0:
        raise ConfigError(f"--weight={text}: must be NAME=NUMBER, from 0.01 to 100")
    return name, weight


# -- Python ------------------------------------------------------------------------------------------------------------


def read_python(source: str, name: str, config: FunctionsConfig) -> ServedFunction:
    """A function of a list, plain, `async` or `@batched`, or a class with `predict` and perhaps `setup`."""
    found = imported(source.removeprefix(PYTHON), source, "python:package.module:function")
    if config.provider not in PROVIDERS and not config.provider.endswith("Provider"):
        raise ConfigError(f"--provider={config.provider}: must be cpu or cuda, or a provider of ONNX Runtime")
    named = source.rpartition(":")[2]
    name = name or named.rpartition(".")[2]
    owner, setup = None, None
    called: Any = found
    if inspect.isclass(found) or not callable(found):
        owner = made(found, source, f"{named}()") if inspect.isclass(found) else found
        called, setup = getattr(owner, "predict", None), getattr(owner, "setup", None)
        if not callable(called):
            raise ConfigError(f"{source}: {named} has no method predict(self, items)")
    function = _plain(called, owner)
    hints, streams, each = _signature(source, function)
    processor = (Streams if streams else ItemCalls)(function, setup, "cuda" if config.provider == "cuda" else "cpu")
    if isinstance(processor, Streams):
        processor.each = each
    else:
        processor.any_thread = owner is None and not inspect.iscoroutinefunction(function)
    items = Values(hints[0], f"{source}: its items", prefix=f"{name}.")
    results = Values(hints[1], f"{source}: its results", prefix=f"{name}.")
    given = getattr(owner if owner is not None else function, "example", None)
    doc = (inspect.getdoc(found) or "").partition("\n\n")[0]
    return ServedFunction(name, source, processor, items, results, streams, example_of(items, given), description=doc)


def _plain(called: Any, owner: Any) -> Any:
    """The function of a list that `@batched` wraps. A method is bound to its object again."""
    if not isinstance(called, Handle):
        return called
    method = getattr(type(owner), "predict", None)
    function: Any = getattr(method if isinstance(method, BatchedMethod) else called, "__wrapped__", called)
    return function.__get__(owner) if isinstance(method, BatchedMethod) else function


def _signature(source: str, function: Any) -> tuple[tuple[Any, Any], bool, bool]:
    """((type of an item, type of a result), whether it streams, whether it returns an iterator for each item)."""
    plain = function.func if isinstance(function, partial) else function
    plain = plain if inspect.isroutine(plain) else type(plain).__call__
    try:
        inspect.signature(function).bind([])
    except TypeError:
        shown = f"{getattr(function, '__qualname__', function)}{inspect.signature(function)}"
        raise ConfigError(f"{source}: {shown} must take one argument, the list of items") from None
    except ValueError:  # some built-in functions have no signature
        return (Any, Any), False, False
    try:
        hints = get_type_hints(plain, include_extras=True)
    except Exception as error:
        raise ConfigError(f"{source}: its annotations cannot be read: {told(error)}") from error
    names = list(inspect.signature(function).parameters)
    items = unaliased(hints.get(names[0], list[Any]))
    if items is not Any and (get_origin(items) or items) not in _LISTS:
        shown = items.__name__ if isinstance(items, type) else items
        raise ConfigError(f"{source}: {names[0]} has type {shown}; must be list[ITEM], with one result for each item")
    results = unaliased(hints.get("return", Any))
    generator = inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)
    if generator:
        results = _inner(results)
    result = unaliased(_inner(results))
    each = not generator and get_origin(result) in _STREAMS
    return (_inner(items), _inner(result) if each else result), generator or each, each


def _inner(hint: Any) -> Any:
    """The type of the elements of a list or an iterator."""
    return next(iter(get_args(hint)), Any)


# -- ONNX --------------------------------------------------------------------------------------------------------------


def read_onnx(source: str, name: str, config: FunctionsConfig) -> ServedFunction:
    """An ONNX graph as a function: its inputs are an item, its outputs a result, and its first axis is the batch."""
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.onnx"))
        if len(files) != 1:
            raise ConfigError(f"{source}: holds {len(files)} files *.onnx; name the one to serve")
        path = files[0]
    graph = OnnxItems(path, PROVIDERS.get(config.provider, config.provider), config.threads)
    session, skipped = graph.session, graph.skipped
    tensors: dict[Any, ArrayType] = {}
    name = name or path.stem

    def typed(what: str, ports: Any) -> Any:
        """A TypedDict with a class of its own for each port, because a type carries no shape."""
        kinds = {name: ABCMeta(name, (), {}) for name in ports}
        for kind in kinds.values():
            kind.register(np.ndarray)
        tensors.update({kinds[name]: ArrayType(port.dtype, port.dims[skipped:]) for name, port in ports.items()})
        return TypedDict(what, kinds)  # type: ignore[operator]

    items = Values(typed("inputs", session.inputs), str(path), tensors, f"{name}.")
    results = Values(typed("outputs", session.outputs), str(path), tensors, f"{name}.")
    why = graph.axis.removeprefix(f"{path}: ") or "its first axis is fixed at 1"
    rows = "in one call" if session.dynamic_batch else f"one by one: {why}"
    return ServedFunction(
        name, source, graph, items, results, example=example_of(items),
        note=f"{path.name}: items of a batch run {rows}",
        shaped=any(None in port.dims[skipped:] for port in session.inputs.values()),
    )  # fmt: skip
