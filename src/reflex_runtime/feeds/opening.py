"""Texts of a command line made into sources and processors."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.folder import PictureFolder
from reflex_runtime.feeds.shapes import shapes_source
from reflex_runtime.feeds.source import Source
from reflex_runtime.feeds.video import NETWORK, VideoSource, without_secrets
from reflex_runtime.feeds.words import told
from reflex_runtime.run.batch_processor import BatchProcessor
from reflex_runtime.settings.declare import one_line

# Sources that draw their own pictures, by the word before the colon. Each gets the whole text. A program may add some.
DRAWN: Final[dict[str, Callable[[str], Source]]] = {"shapes": shapes_source}


def source_of(
    text: str,
    *,
    realtime: bool = False,
    loop: bool = False,
    size: tuple[int, int] | None = None,
    read_timeout: float = 5.0,
    hwaccel: str = "",
) -> Source:
    """The source that a text names. Raises ConfigError; whether anything is there shows at `open`.

    text: a path to a file; an address with rtsp, rtsps, http or https; a device like /dev/video0; a directory of
        pictures; one of `DRAWN` with options, as in shapes:seed=7,fps=15.
    realtime, loop, size, read_timeout, hwaccel: see VideoSource; read_timeout counts for connecting, too.
    """
    scheme = match[1].lower() if (match := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", text)) else ""
    if scheme in DRAWN:
        if realtime or loop:
            raise ConfigError(f"realtime={realtime}, loop={loop}: must be False for {scheme}:, which is no file")
        return DRAWN[scheme](text)
    if os.path.isdir(text):
        if realtime or loop or size:
            found = f"realtime={realtime}, loop={loop}, size={size}"
            raise ConfigError(f"{found}: must be False and None for {one_line(text)}, a directory of pictures")
        return PictureFolder(text)
    if not text or ("://" in text and scheme not in NETWORK):
        known = ", ".join([*(f"{name}://" for name in NETWORK), *(f"{name}:" for name in DRAWN)])
        name = without_secrets(text)
        raise ConfigError(f"source={name!r}: must be a path, a device /dev/video*, or start with {known}")
    return VideoSource(
        text,
        realtime=realtime,
        loop=loop,
        size=size,
        open_timeout=read_timeout,
        read_timeout=read_timeout,
        hwaccel=hwaccel,
    )


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
