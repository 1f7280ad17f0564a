"""Reflex: one pure scheduler decides which requests share the next forward pass."""

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
from reflex_runtime.drivers.batcher import Batcher
from reflex_runtime.drivers.decorator import batched
from reflex_runtime.processors.function import FunctionProcessor
from reflex_runtime.version import __version__

__all__ = [
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
    "Scheduler",
    "WaitTimeout",
    "__version__",
    "batched",
]
