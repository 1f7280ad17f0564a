"""How a text on the command line becomes a source."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.chaos import ChaosSource
from reflex_runtime.feeds.source import Source
from reflex_runtime.feeds.video import NETWORK, VideoSource, without_secrets

SourceMaker = Callable[[str], Source]  # gets the whole text, scheme included


def source_of(
    text: str,
    *,
    realtime: bool = False,
    loop: bool = False,
    size: tuple[int, int] | None = None,
    read_timeout: float = 5.0,
    schemes: Mapping[str, SourceMaker] | None = None,
) -> Source:
    """The source that a text names. Raises ConfigError; whether anything is there shows at `open`.

    text: a path to a file; an address with rtsp, rtsps, http or https; a device like /dev/video0; `chaos:` with
        options, as in chaos:seed=7,length=200. Text before a colon that is in `schemes` goes to its maker.
    realtime, loop, size, read_timeout: see VideoSource; read_timeout counts for connecting, too.
    """
    scheme = match[1].lower() if (match := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", text)) else ""
    makers: dict[str, SourceMaker] = {"chaos": ChaosSource.of, **(schemes or {})}
    if scheme in makers:
        if realtime or loop:
            raise ConfigError(f"realtime={realtime}, loop={loop}: must be False for {scheme}:, which is no file")
        return makers[scheme](text)
    if not text or ("://" in text and scheme not in NETWORK):
        known = ", ".join([*(f"{name}://" for name in NETWORK), *(f"{name}:" for name in makers)])
        name = without_secrets(text)
        raise ConfigError(f"source={name!r}: must be a path, a device /dev/video*, or start with {known}")
    return VideoSource(
        text, realtime=realtime, loop=loop, size=size, open_timeout=read_timeout, read_timeout=read_timeout
    )
