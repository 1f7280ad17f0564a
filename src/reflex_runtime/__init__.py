"""Reflex: one pure scheduler decides which requests share the next forward pass."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reflex_runtime.version import __version__

if TYPE_CHECKING:
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
    from reflex_runtime.feeds.runtime import Runtime
    from reflex_runtime.processors.function import FunctionProcessor

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

_MODULES = {
    "core.errors": ("ConfigError", "Dropped", "ProcessorError", "ReflexError", "Rejected", "WaitTimeout"),
    "core.flush": ("FlushPolicy",),
    "core.group": ("GroupConfig",),
    "core.request": ("Priority", "Request"),
    "core.scheduler": ("Scheduler",),
    "drivers.batch_processor": ("BatchConfig", "BatchEntry", "BatchProcessor"),
    "drivers.batcher": ("Batcher",),
    "drivers.coordinator": ("BatchCoordinator", "BatchHandle"),
    "drivers.decorator": ("batched",),
    "feeds.runtime": ("Runtime",),
    "processors.function": ("FunctionProcessor",),
}


def __getattr__(name: str) -> Any:
    """Names are imported when they are asked for: the command starts at once, and a client needs no scheduler."""
    for module, names in _MODULES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f"reflex_runtime.{module}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
