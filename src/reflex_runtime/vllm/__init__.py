"""Our scheduling inside vLLM: who goes first, how much of a prompt, what is too late, and every step seen.

    vllm serve MODEL --scheduler-cls reflex_runtime.vllm.Scheduler --middleware reflex_runtime.vllm.Middleware

vLLM is the user's, and keeps memory, preemption, speculation and everything of the model. The classes are imported when
they are asked for: a version of vLLM that does not fit may lack what they import.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from reflex_runtime.vllm import versions

CLASSES: Final = {
    "Middleware": ("middleware", "Middleware"),
    "Scheduler": ("scheduler", "FairScheduler"),
    "Traced": ("step_log", "TracedScheduler"),
}


def __getattr__(name: str) -> Any:
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    versions.check()
    module, found = CLASSES[name]
    return getattr(import_module(f"{__name__}.{module}"), found)
