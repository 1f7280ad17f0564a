"""Imports MODULE:NAME of a user's own code. Its errors are one line."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.run.processor import place_of
from reflex_runtime.settings.declare import did_you_mean

_FORM: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

_PACKAGES: Final = {"sklearn": "scikit-learn", "PIL": "pillow", "cv2": "opencv-python-headless", "yaml": "pyyaml"}
"""Names of packages that differ from their modules'."""


def imported(text: str, where: str, form: str) -> Any:
    """The object MODULE:NAME, from the current directory or installed. ConfigError begins with `where`.

    form: how to write it, for the error.
    """
    module, _, name = text.partition(":")
    if not _FORM.fullmatch(text):
        raise ConfigError(f"{where}: must be {form}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current directory, as with `python -m`
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        own = error.name is not None and (module == error.name or module.startswith(f"{error.name}."))
        package = _PACKAGES.get(error.name or "")
        hint = f"pip install {package}" if package else "install it with pip"
        if own:
            hint = f"run reflex in the directory that contains it, or {hint}"
        if module.endswith(".py"):
            hint = f"leave .py out, {module.removesuffix('.py')}:{name}"
        raise ConfigError(f"{where}: there is no module {error.name!r}: {hint}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {module} cannot be imported: {told(error)}") from error
    for part in name.split("."):
        there = [text for text in getattr(found, "__dict__", ()) if not text.startswith("_")]
        if not hasattr(found, part):
            raise ConfigError(f"{where}: {module} has no {name!r}{did_you_mean(part, there)}")
        found = getattr(found, part)
    return found


def made(make: Callable[[], Any], where: str, what: str) -> Any:
    """The result of a user's class or function. ConfigError begins with `where` and names `what`."""
    try:
        return make()
    except ConfigError as error:
        if error.message.startswith(where):
            raise
        raise ConfigError(f"{where}: {error.message}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {what} failed: {told(error)}") from error


LONGEST: Final = 1000  # characters of a foreign text


def in_one_line(text: object) -> str:
    """A foreign text as one line without control characters."""
    words = "".join(c if c.isprintable() else " " for c in str(text)[:LONGEST])
    return " ".join(words.split())


def told(error: BaseException) -> str:
    """An exception of foreign code as one line: its class, its text, and where it was raised."""
    words = in_one_line(f"{type(error).__name__}: {error}").removesuffix(":")
    place = place_of(error)
    return f"{words} ({place})" if place else words
