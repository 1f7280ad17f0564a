"""Reflex: one pure scheduler decides which requests share the next forward pass."""

from typing import TYPE_CHECKING, Any

from reflex_runtime.core.errors import (
    ConfigError,
    Dropped,
    ProcessorError,
    ReflexError,
    Rejected,
    WaitTimeout,
)
from reflex_runtime.core.flush import FlushPolicy
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Priority, Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.drivers.batch_processor import BatchConfig, BatchEntry, BatchProcessor
from reflex_runtime.drivers.batcher import Batcher
from reflex_runtime.drivers.coordinator import BatchCoordinator, BatchHandle
from reflex_runtime.drivers.decorator import batched
from reflex_runtime.processors.function import FunctionProcessor
from reflex_runtime.version import __version__

if TYPE_CHECKING:
    from reflex_runtime.feeds.runtime import Runtime

__all__ = [
    "BatchConfig",
    "BatchCoordinator",
    "BatchEntry",
    "BatchHandle",
    "BatchProcessor",
    "Batcher",
    "ConfigError",
    "Dropped",
    "FlushPolicy",
    "FunctionProcessor",
    "GroupConfig",
    "Priority",
    "ProcessorError",
    "ReflexError",
    "Rejected",
    "Request",
    "Runtime",
    "Scheduler",
    "WaitTimeout",
    "__version__",
    "batched",
]


def __getattr__(name: str) -> Any:
    """`Runtime` brings numpy, which nothing else here needs: it is imported when it is asked for."""
    if name == "Runtime":
        from reflex_runtime.feeds.runtime import Runtime

        return Runtime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
