"""Code of users that settings name as MODULE:NAME."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.messages import told
from reflex_runtime.feeds.runtime.pipeline import Result
from reflex_runtime.run.batch_processor import BatchProcessor
from reflex_runtime.settings.declare import one_line


def processor_of(text: str) -> BatchProcessor:
    """The batch processor that MODULE:NAME names: an object, or a class or function that makes one."""
    flag = f"--processor={one_line(text)}"
    found = imported(text, flag, "mypkg.vision:Detector")
    if not inspect.isclass(found) and not inspect.isfunction(found):
        return _checked(found, flag)
    try:
        return _checked(found(), flag)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{flag}: cannot be made: {told(error)}") from error


def imported(text: str, flag: str, example: str) -> Any:
    """What MODULE:NAME names, from the current directory or installed. Raises ConfigError, which begins with `flag`."""
    module, _, name = text.partition(":")
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", text):
        raise ConfigError(f"{flag}: must be MODULE:NAME, such as {example}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a file beside you, as `python -m` finds it
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{flag}: cannot be imported: {told(error)}") from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ConfigError(f"{flag}: {module} has no {name}") from None
    return found


def _checked(made: Any, flag: str) -> BatchProcessor:
    """Refuse what lacks an attribute of a batch processor."""
    if not isinstance(getattr(made, "id", None), str):
        raise ConfigError(f"{flag}: {type(made).__name__} has no id, a text that names it in the table and in metrics")
    missing = [verb for verb in ("on_start", "process", "on_stop") if not callable(getattr(made, verb, None))]
    if missing:
        raise ConfigError(f"{flag}: {type(made).__name__} has no method {missing[0]}(), which a batch processor needs")
    processor: BatchProcessor = made
    return processor


class OwnStage:
    """A stage that MODULE:NAME names: a function of a `Result`, which all feeds share, or a class, of which each feed
    has an instance. It returns a `Result`, or None to keep this one from the sinks."""

    def __init__(self, name: str, call: Callable[[Result], Any]) -> None:
        self.name, self._call = name, call

    def __call__(self, result: Result) -> Any:
        return self._call(result)


def own_stage(text: str) -> OwnStage:
    """Import a stage. Raises ConfigError."""
    flag = f"--stage={one_line(text)}"
    found = imported(text, flag, "mypkg.rules:only_large")
    if inspect.isclass(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{flag}: cannot be made: {told(error)}") from error
    if not callable(found):
        raise ConfigError(f"{flag}: {type(found).__name__} cannot be called with a result")
    return OwnStage(text, found)
