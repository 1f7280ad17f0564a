"""Processors compute batches; `run_batch` is the one place that handles their errors.

A processor belongs to one device thread and needs no lock. Whatever it does (raise, return too few results, return
exceptions), `run_batch` makes exactly one outcome per ticket of it.

Beside the protocol: the wall around foreign code, a plain function as a processor, and CUDA's lost devices and graphs.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from reflex_runtime.core.batch import Apart, Batch, Done, Failed, More, Outcome
from reflex_runtime.core.errors import GpuLost, ProcessorError, ProcessorHung, ReflexError, ResultCountMismatch
from reflex_runtime.core.request import Ticket

if TYPE_CHECKING:  # with a default, so that `Processor` and `Batcher` alone are those of any values
    from typing_extensions import TypeVar as DefaultTypeVar

    V_co = DefaultTypeVar("V_co", covariant=True, default=Any)
    Value = DefaultTypeVar("Value", default=Any)
else:
    V_co, Value = TypeVar("V_co", covariant=True), TypeVar("Value")


# -- faults of an item -------------------------------------------------------------------------------------------------

# Every exception but an interrupt is an item's fault. Some libraries raise classes that are no `Exception` (Rust's
# `PanicException`): those would pass every `except Exception` and end the thread, the loop or the server.


class Panic(Exception):
    """Stands for an exception that is no `Exception`, its `__cause__`."""


_PASSED: Final = (str(Path(__file__).parents[1]) + os.sep, "<")  # ours, and frozen modules
_LIBRARIES: Final = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


def place_of(error: BaseException) -> str:
    """Where an exception was raised, `good.py, line 3`: the innermost call in the user's own code, else in an installed
    package, else ""."""
    found, trace = "", error.__traceback__
    own = False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        installed = "site-packages" in file or "dist-packages" in file
        if not file.startswith(_PASSED) and (installed or not file.startswith(_LIBRARIES)):
            if not (own and installed):
                found = f"{os.path.basename(file)}, line {trace.tb_lineno}"
            own = own or not installed
        trace = trace.tb_next
    return found


class Wall:
    """Around a call of a user's or a library's code, `with WALL:`. It raises an Exception or an interrupt; any other
    class becomes a `Panic`."""

    def __init__(self, *interrupts: type[BaseException]) -> None:
        self._passes: tuple[type[BaseException], ...] = (Exception, *interrupts)

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, self._passes):
            return
        traceback.clear_frames(trace)  # they hold the items of the call
        raise Panic(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


WALL: Final = Wall(KeyboardInterrupt, SystemExit, GeneratorExit)
"""Around a plain function. It cannot be cancelled, so a CancelledError is its own fault."""
ASYNC_WALL: Final = Wall(KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Around an `await`."""
THREAD_WALL: Final = Wall()
"""Around a user's function on a thread: a SystemExit is the item's failure, and would end only the thread."""


# -- a processor and its batches ---------------------------------------------------------------------------------------


class Processor(Protocol[V_co]):
    """Computes batches; V is the type of its values. Methods are called on the device thread.

    repeatable: whether a call that raised has changed no ticket's state. Then it is repeated with fewer tickets to find
    the bad one; otherwise the whole batch fails.
    """

    repeatable: bool

    def start(self) -> None:
        """Called once before the first batch."""

    def run(self, batch: Batch) -> Sequence[V_co | Done | More | Failed | BaseException]:
        """One result per ticket, in the order of `batch.grants`.

        A result is a `Done`, `More` or `Failed`; an exception instance is that item's failure, and any other value is
        Done(value). Drop the state of `batch.left` first.
        """

    def drop(self, tickets: Sequence[Ticket]) -> None:
        """Drop the state of these residents, which no later batch lists in `left`."""

    def stop(self) -> None:
        """Called once after the last batch."""


_SPECIAL = (Done, More, Failed, BaseException)
_OF_DONE = Done()[1:]  # the fields after the value
_outcome = tuple.__new__  # once a request: a NamedTuple's own constructor is a Python function around this


def may_run_anywhere(processor: Any) -> bool:
    """Whether a processor's batches may run on any thread, one at a time."""
    return bool(getattr(processor, "any_thread", False))


def run_batch(processor: Processor, batch: Batch) -> list[Outcome]:
    """Run a batch and return one outcome per ticket, whatever the processor does.

    A call that raises is `Apart` for its tickets: the scheduler repeats it in parts until the bad ones run alone. A
    batch fails if it has one ticket, its call cannot be repeated, hung, or returned a wrong number of results: nobody
    can tell whose is missing. Raises GpuLost if no further batch can run in this process.
    """
    try:
        with WALL:
            return outcomes_of(processor.run(batch), batch)
    except Exception as error:
        if lost := lost_gpu(error):
            raise lost from error
        # The error goes to callers. Frames in its traceback would keep the batch alive, with every picture of it.
        traceback.clear_frames(error.__traceback__)
        try:
            return failure_of(error, batch, processor.repeatable)
        finally:
            del batch


def outcomes_of(results: Sequence[Any], batch: Batch) -> list[Outcome]:
    """One outcome per ticket from the results of a call; see `run_batch`."""
    if len(results) != len(batch.grants):
        wrong = f"the processor returned {len(results)} results for {len(batch.grants)} requests"
        return [Failed(ResultCountMismatch(wrong))] * len(batch)
    return [
        _outcome(Done, (result, *_OF_DONE)) if not isinstance(result, _SPECIAL) else _special(result)
        for result in results
    ]


def failure_of(error: Exception, batch: Batch, repeatable: bool) -> list[Outcome]:
    """One outcome per ticket from the error of a call; see `run_batch`."""
    known = reflex_error(error)
    apart = len(batch) > 1 and repeatable and not isinstance(known, ResultCountMismatch | ProcessorHung)
    return [Apart(known) if apart else Failed(known)] * len(batch)


def reflex_error(error: BaseException) -> ReflexError:
    """The error for callers: a ReflexError as it is, any other one `wrapped`."""
    return error if isinstance(error, ReflexError) else wrapped(error)


def wrapped(error: BaseException) -> ProcessorError:
    """An exception of the model as an error for callers. Its `__cause__` is what the model raised."""
    if isinstance(error, Panic) and error.__cause__ is not None:
        error = error.__cause__
    wrapped = ProcessorError(f"{type(error).__name__}: {error}".removesuffix(": "))
    wrapped.__cause__ = error
    wrapped.place = place_of(error)
    return wrapped


def _special(result: Done | More | Failed | BaseException) -> Outcome:
    if not isinstance(result, BaseException):
        return result
    return Failed(reflex_error(result))


class BaseProcessor:
    """Defaults for processors.

    captured_sizes: batch sizes that are captured, such as CUDA graphs, and padded to, ascending; the group's cost model
        is `TimeCost(sizes=captured_sizes)`. `batch.notes["captured"]` is whether the batch ran at one, except in stages
        that are never captured (`TimeCost.padded_stages` names the others).
    """

    repeatable = True
    any_thread = False
    captured_sizes: tuple[int, ...] = ()

    def start(self) -> None:
        return

    def drop(self, tickets: Sequence[Ticket]) -> None:
        return

    def stop(self) -> None:
        return


# -- a function as a processor -----------------------------------------------------------------------------------------


P = TypeVar("P")
V = TypeVar("V")


class FunctionProcessor(BaseProcessor, Generic[P, V]):
    """Calls `function([payload, …])`, which returns one result per payload, in order.

    repeatable: False for a function that must not see a payload twice. any_thread: True for one that may run on the
    event loop once it has proven to take a fraction of a millisecond. TypeError for a coroutine function, a generator
    function, or one that does not take a single list.
    """

    def __init__(
        self, function: Callable[[list[P]], Sequence[V]], repeatable: bool = True, any_thread: bool = False
    ) -> None:
        name = name_of(function)
        if is_async(function):
            raise TypeError(
                f"{name} is an async function, and a FunctionProcessor runs on a thread: write it with `def`, or put "
                "@batched on it"
            )
        if is_method(function):
            raise TypeError(f"{name} is a method, and there is no object yet to call it on; pass it as `object.method`")
        check_function(function)
        self._function = function
        self.repeatable, self.any_thread = repeatable, any_thread

    def run(self, batch: Batch) -> Sequence[V]:
        with WALL if self.any_thread else THREAD_WALL:
            return checked_results(self._function, self._function(payloads_of(batch)), count=len(batch.grants))


def payloads_of(batch: Batch) -> list[Any]:
    """The payloads of a batch, in order."""
    return [ticket.request.payload for ticket in batch.grants]


def checked_results(
    function: Any, results: Any, wrong: type[ProcessorError] = ResultCountMismatch, count: int | None = None
) -> Sequence[Any]:
    """The function's results. Raises `wrong` for a dict, a text, None, an iterator, a table (of pandas: its elements
    are columns), and for another number than `count`. With a plain ProcessorError the call is repeated in parts."""
    ordered = hasattr(results, "__len__") and hasattr(results, "__getitem__") and getattr(results, "ndim", 1) != 0
    if not ordered or isinstance(results, (Mapping, str, bytes)) or hasattr(results, "columns"):
        if inspect.iscoroutine(results):
            results.close()
        found = kind_of(results)
    elif count not in (None, len(results)):
        found = f"{len(results)} results for {count} item{'s' * (count != 1)}"
    else:
        return results  # type: ignore[no-any-return]
    raise wrong(f"{name_of(function)} returned {found}; it must return a list with one result for each item, in order")


def kind_of(value: object) -> str:
    """The type of a value, with the article."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def is_async(function: Any) -> bool:
    """Whether calling it makes a coroutine."""
    return any(inspect.iscoroutinefunction(called) for called in _called(function))


def is_method(function: Any) -> bool:
    """Whether it is a function whose first parameter is `self`."""
    return inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "self"


def check_function(function: Any, *before: Any) -> None:
    """Raise TypeError unless it can be called with a list of payloads and return a list of results.

    before: arguments before the list, such as the object of a method.
    """
    name = name_of(function)
    if isinstance(function, classmethod):
        raise TypeError(f"{name} is a class method; write a static method, or a function outside of the class")
    if not callable(function):
        raise TypeError(f"{name}: must be a function that takes a list and returns a list")
    if any(inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f) for f in _called(function)):
        raise TypeError(f"{name} is a generator function; it must return a list instead of yielding the results")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions have no signature
    if next(iter(signature.parameters), "") == "cls":
        raise TypeError(f"{name} is a class method; write a static method, or a function outside of the class")
    try:
        signature.bind(*before, [])
    except TypeError:
        besides = f" besides {', '.join(list(signature.parameters)[: len(before)])}" if before else ""
        raise TypeError(f"{name}{signature}: must take one argument{besides}, the list of items") from None


def name_of(function: Any) -> str:
    """The name of a function or callable object in messages."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _called(function: Any) -> tuple[Any, Any]:
    """The callable and its function, which is `__call__` of an object."""
    return function, function if inspect.isroutine(function) else type(function).__call__


# -- CUDA --------------------------------------------------------------------------------------------------------------


def lost_gpu(error: BaseException) -> GpuLost | None:
    """A GpuLost if every later call of this process to the GPU fails too (a failed assertion or a wrong address in a
    kernel), else None (memory ran out)."""
    torch = sys.modules.get("torch")
    if not isinstance(error, RuntimeError) or "CUDA error" not in str(error):
        return None
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception:
        first = " ".join(str(error).split("\n", 1)[0].split())[:200]
        return GpuLost(f"the GPU is lost to this process: {type(error).__name__}: {first}")
    return None


Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a function that launches work, and returns one that launches it again on the same tensors. A test passes one
that needs no GPU."""


def recorder() -> Record:
    """Records the CUDA graphs of one model.

    They share their intermediate memory: two of them must not run at the same time, and each must leave its results in
    tensors made outside. A graph is recorded after two plain runs, in which libraries choose kernels and make
    workspaces. Meanwhile the work must neither wait for the device nor copy from the host's memory: torch raises then.
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
