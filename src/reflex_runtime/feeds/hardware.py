"""Decoding on a device: which one, and a log line where the CPU decodes in its place."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings.declare import one_line, one_of

if TYPE_CHECKING:
    from av.video.stream import VideoStream

log = logging.getLogger("reflex.feeds")

AUTO: Final = "auto"


class Hardware:
    """The device that one source decodes on. text: its kind as FFmpeg calls it, or `auto`; after a colon which of them.

    name: of the source, for log lines. Raises ConfigError for a kind that this FFmpeg was built without.
    """

    def __init__(self, text: str, name: str) -> None:
        from av.codec.hwaccel import hwdevices_available

        kind, _, which = text.partition(":")
        known = hwdevices_available()
        if kind not in (AUTO, *known) or (which and kind == AUTO):
            raise ConfigError(f"hwaccel={one_line(text)}: {one_of(kind, [AUTO, *known])}, or such as cuda:1")
        self._text, self._name, self._which = text, name, which or None
        self._kinds = known if kind == AUTO else [kind]
        self._kind: str | None = None  # that works
        self._tried = False
        self._said = ""

    def device(self) -> Any:
        """For `av.open`: None if no device works here."""
        from av.codec.hwaccel import HWAccel

        if not self._tried:
            self._kind, self._tried = self._working(), True
        return None if self._kind is None else HWAccel(self._kind, self._which, allow_software_fallback=True)

    def check(self, stream: VideoStream) -> None:
        """Say it if this stream is decoded by the CPU."""
        if self._kind is not None and not stream.codec_context.is_hwaccel:
            self._say(f"{self._kind} does not decode {stream.codec_context.name}")

    def check_picture(self, form: str) -> None:
        """Say it if a picture of this pixel format, the first of a stream, is the CPU's: decoders choose that only when
        they see the stream, and devices give semi-planar pictures, such as nv12."""
        if self._kind is not None and form.startswith("yuv"):
            self._say(f"{self._kind} does not decode this {form} stream")

    def _working(self) -> str | None:
        from av.codec import Codec
        from av.codec.hwaccel import HWAccel

        faults = []
        for kind in self._kinds:
            try:
                HWAccel(kind, self._which).create(Codec("h264", "r"))
                return kind
            except Exception as error:  # NotImplementedError, and what FFmpeg finds missing
                faults.append(f"{kind}: {getattr(error, 'strerror', None) or error}")
        self._say("; ".join(faults))
        return None

    def _say(self, why: str) -> None:
        """Once for each reason: a camera connects many times."""
        if why != self._said:
            self._said = why
            log.warning("%s: hwaccel=%s: decoded by the CPU: %s", self._name, self._text, why)
