"""Code that runs a batch, and the one place that handles its errors.

A processor belongs to one device thread and needs no lock. Whatever it does (raise, return too few results, return
exceptions), `run_batch` turns it into exactly one outcome per ticket.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from reflex_runtime.core.batch import Apart, Batch, Done, Failed, More, Outcome
from reflex_runtime.core.errors import ProcessorError, ProcessorHung, ReflexError, ResultCountMismatch
from reflex_runtime.core.request import Ticket
from reflex_runtime.processors.gpu import lost_gpu

if TYPE_CHECKING:  # with a default, so that `Processor` alone is one of any values
    from typing_extensions import TypeVar

    V_co = TypeVar("V_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    V_co = TypeVar("V_co", covariant=True)


class Processor(Protocol[V_co]):
    """What a driver runs batches on; V is the type of its values. Methods are called on the device thread.

    repeatable: True when a call that raised has changed no ticket's state, so that it may be repeated with fewer
    tickets to find the bad one; if False, the whole batch fails.
    """

    repeatable: bool

    def start(self) -> None:
        """Called once before the first batch."""

    def run(self, batch: Batch) -> Sequence[V_co | Done | More | Failed | BaseException]:
        """One result per ticket, in the order of `batch.grants`.

        A result is a `Done`, `More` or `Failed`; an exception instance counts as that item's failure, and any other
        value as Done(value). State kept for `batch.left` is to be dropped first.
        """

    def drop(self, tickets: Sequence[Ticket]) -> None:
        """Drop the state of these residents; no next batch will list them."""

    def stop(self) -> None:
        """Called once after the last batch."""


_SPECIAL = (Done, More, Failed, BaseException)
_OF_DONE = Done()[1:]  # what follows the value
_outcome = tuple.__new__  # once a request: a NamedTuple's own constructor is a Python function around this


def may_run_anywhere(processor: Any) -> bool:
    """Whether a processor says that its batches may run on any thread, one at a time."""
    return bool(getattr(processor, "any_thread", False))


def run_batch(processor: Processor, batch: Batch) -> list[Outcome]:
    """Run a batch and return one outcome per ticket, whatever the processor does.

    A call that raises is `Apart` for its tickets: the scheduler repeats it in parts until the bad ones run alone.
    A batch of one, or one whose call cannot be repeated, fails. So does one that hung, and one with a wrong number of
    results: whose is missing cannot be known. Raises GpuLost if no further batch can run in this process.
    """
    try:
        return outcomes_of(processor.run(batch), batch)
    except Exception as error:
        if lost := lost_gpu(error):
            raise lost from error
        # What is raised to callers keeps the calls in its traceback, and these would keep the batch in their variables:
        # a cycle, with every picture of it.
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
    known = error if isinstance(error, ReflexError) else wrapped(error)
    apart = len(batch) > 1 and repeatable and not isinstance(known, ResultCountMismatch | ProcessorHung)
    return [Apart(known) if apart else Failed(known)] * len(batch)


def wrapped(error: BaseException) -> ProcessorError:
    """An exception of the model as an error for callers."""
    wrapped = ProcessorError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _special(result: Done | More | Failed | BaseException) -> Outcome:
    if not isinstance(result, BaseException):
        return result
    return Failed(result if isinstance(result, ReflexError) else wrapped(result))


class BaseProcessor:
    """Defaults for what most processors do not need.

    captured_sizes: batch sizes it has captured, as CUDA graphs or the like, and pads to, ascending; its group's cost
        model is `TimeCost(sizes=captured_sizes)`. It sets `batch.notes["captured"]` to whether the batch ran at one,
        except in stages that it never captures (`TimeCost.padded_stages` names the others).
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
