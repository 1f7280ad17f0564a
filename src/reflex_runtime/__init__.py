"""Reflex: one pure scheduler decides which requests share the next forward pass."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reflex_runtime.version import __version__ as __version__

if TYPE_CHECKING:  # the same names as in _NAMES, for type checkers and editors
    from reflex_runtime.core.batch import Batch as Batch
    from reflex_runtime.core.batch import BatchFinished as BatchFinished
    from reflex_runtime.core.batch import BatchScheduled as BatchScheduled
    from reflex_runtime.core.batch import Cause as Cause
    from reflex_runtime.core.batch import DeviceLost as DeviceLost
    from reflex_runtime.core.batch import Done as Done
    from reflex_runtime.core.batch import Event as Event
    from reflex_runtime.core.batch import Failed as Failed
    from reflex_runtime.core.batch import FlushReason as FlushReason
    from reflex_runtime.core.batch import More as More
    from reflex_runtime.core.batch import RequestAbandoned as RequestAbandoned
    from reflex_runtime.core.batch import RequestAnswered as RequestAnswered
    from reflex_runtime.core.batch import RequestPreempted as RequestPreempted
    from reflex_runtime.core.batch import RequestProgressed as RequestProgressed
    from reflex_runtime.core.batch import RequestQueued as RequestQueued
    from reflex_runtime.core.batch import RequestRejected as RequestRejected
    from reflex_runtime.core.batch import RequestSettled as RequestSettled
    from reflex_runtime.core.batch import SchedulerPaused as SchedulerPaused
    from reflex_runtime.core.cost import CostModel as CostModel
    from reflex_runtime.core.cost import TimeCost as TimeCost
    from reflex_runtime.core.cost import TokenCost as TokenCost
    from reflex_runtime.core.cost import UnitCost as UnitCost
    from reflex_runtime.core.errors import Cancelled as Cancelled
    from reflex_runtime.core.errors import Closed as Closed
    from reflex_runtime.core.errors import ConfigError as ConfigError
    from reflex_runtime.core.errors import CutShort as CutShort
    from reflex_runtime.core.errors import Displaced as Displaced
    from reflex_runtime.core.errors import Drained as Drained
    from reflex_runtime.core.errors import Dropped as Dropped
    from reflex_runtime.core.errors import Expired as Expired
    from reflex_runtime.core.errors import GpuLost as GpuLost
    from reflex_runtime.core.errors import InFlightCapReached as InFlightCapReached
    from reflex_runtime.core.errors import NonFiniteResult as NonFiniteResult
    from reflex_runtime.core.errors import ProcessorError as ProcessorError
    from reflex_runtime.core.errors import ProcessorHung as ProcessorHung
    from reflex_runtime.core.errors import QueueFull as QueueFull
    from reflex_runtime.core.errors import ReflexError as ReflexError
    from reflex_runtime.core.errors import Rejected as Rejected
    from reflex_runtime.core.errors import ResultCountMismatch as ResultCountMismatch
    from reflex_runtime.core.errors import Shed as Shed
    from reflex_runtime.core.errors import Superseded as Superseded
    from reflex_runtime.core.errors import TooLarge as TooLarge
    from reflex_runtime.core.errors import TooLate as TooLate
    from reflex_runtime.core.errors import WaitTimeout as WaitTimeout
    from reflex_runtime.core.flush import Controller as Controller
    from reflex_runtime.core.flush import FlushPolicy as FlushPolicy
    from reflex_runtime.core.flush import Planner as Planner
    from reflex_runtime.core.group import GroupConfig as GroupConfig
    from reflex_runtime.core.group import Resources as Resources
    from reflex_runtime.core.request import Priority as Priority
    from reflex_runtime.core.request import Request as Request
    from reflex_runtime.core.request import Ticket as Ticket
    from reflex_runtime.core.request import TicketState as TicketState
    from reflex_runtime.core.scheduler import Scheduler as Scheduler
    from reflex_runtime.core.token_budget import TimedTokens as TimedTokens
    from reflex_runtime.feeds.runtime.runtime import Runtime as Runtime
    from reflex_runtime.observe.batch_metrics import BatchMetrics as BatchMetrics
    from reflex_runtime.observe.journal import read_journal as read_journal
    from reflex_runtime.observe.journal_writer import JournalWriter as JournalWriter
    from reflex_runtime.run.audience import Audience as Audience
    from reflex_runtime.run.batched import BatchedCoroutine as BatchedCoroutine
    from reflex_runtime.run.batched import BatchedFunction as BatchedFunction
    from reflex_runtime.run.batched import batched as batched
    from reflex_runtime.run.batcher import Batcher as Batcher
    from reflex_runtime.run.coordinator import BatchConfig as BatchConfig
    from reflex_runtime.run.coordinator import BatchCoordinator as BatchCoordinator
    from reflex_runtime.run.coordinator import BatchEntry as BatchEntry
    from reflex_runtime.run.coordinator import BatchProcessor as BatchProcessor
    from reflex_runtime.run.coordinator import NewestFrame as NewestFrame
    from reflex_runtime.run.processor import BaseProcessor as BaseProcessor
    from reflex_runtime.run.processor import FunctionProcessor as FunctionProcessor
    from reflex_runtime.run.processor import Processor as Processor

_NAMES = {
    "core.flush": "Controller FlushPolicy Planner",
    "core.batch": (
        "Batch BatchFinished BatchScheduled Cause DeviceLost Done Event Failed FlushReason More RequestAbandoned "
        "RequestAnswered RequestPreempted RequestProgressed RequestQueued RequestRejected RequestSettled "
        "SchedulerPaused"
    ),
    "core.cost": "CostModel TimeCost TokenCost UnitCost",
    "core.errors": (
        "Cancelled Closed ConfigError CutShort Displaced Drained Dropped Expired GpuLost "
        "InFlightCapReached NonFiniteResult ProcessorError ProcessorHung QueueFull ReflexError Rejected "
        "ResultCountMismatch Shed Superseded TooLarge TooLate WaitTimeout"
    ),
    "core.group": "GroupConfig Resources",
    "core.request": "Priority Request Ticket TicketState",
    "core.scheduler": "Scheduler",
    "core.token_budget": "TimedTokens",
    "run.audience": "Audience",
    "observe.batch_metrics": "BatchMetrics",
    "run.batched": "BatchedCoroutine BatchedFunction batched",
    "run.batcher": "Batcher",
    "run.coordinator": "BatchConfig BatchCoordinator BatchEntry BatchProcessor NewestFrame",
    "feeds.runtime.runtime": "Runtime",
    "run.processor": "BaseProcessor FunctionProcessor Processor",
    "observe.journal": "read_journal",
    "observe.journal_writer": "JournalWriter",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_MODULES])


def __getattr__(name: str) -> Any:
    """Names are imported on first use: the command starts at once, and a client does not load the scheduler."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"reflex_runtime.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return __all__
