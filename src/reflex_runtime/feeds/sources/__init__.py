"""Sources, and which one a text names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.frame import Source
from reflex_runtime.feeds.sources.folder import PictureFolder
from reflex_runtime.feeds.sources.shapes import shapes_source
from reflex_runtime.feeds.sources.video import NETWORK, VideoSource, without_secrets
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
