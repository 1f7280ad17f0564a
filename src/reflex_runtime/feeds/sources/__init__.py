"""The source that a text names, and directories of pictures as a source."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.pipeline import Picture, Source, SourceError
from reflex_runtime.feeds.sources.shapes import shapes_source
from reflex_runtime.feeds.sources.video import NETWORK, VideoSource, without_secrets
from reflex_runtime.run.processor import WALL
from reflex_runtime.settings.declare import one_line
from reflex_runtime.web.pictures import upright

log = logging.getLogger("reflex.feeds")

# Makers of sources without files, by the word before the colon; each gets the whole text. Programs may add some.
DRAWN: Final[dict[str, Callable[[str], Source]]] = {"shapes": shapes_source}

VIDEO, FOLDER, CAMERA, DRAWING = "a file", "a directory of pictures", "a camera", "drawn"


def kind_of(text: str) -> str:
    """What kind of source a text names, in words: `VIDEO` is every path that is no directory."""
    scheme, colon, _ = text.partition(":")
    if colon and scheme.lower() in DRAWN:
        return DRAWING
    if "://" in text or text.startswith("/dev/video"):
        return CAMERA
    return FOLDER if os.path.isdir(text) else VIDEO


def source_of(
    text: str, *, realtime: bool = False, loop: bool = False, read_timeout: float = 5.0, hwaccel: str = ""
) -> Source:
    """The source that a text names. Raises ConfigError; only `open` finds out whether it exists.

    text: a path to a file; an address with rtsp, rtsps, http or https; a device like /dev/video0; a directory of
        pictures; one of `DRAWN` with options, as in shapes:seed=7,fps=15.
    realtime, loop, read_timeout, hwaccel: see VideoSource; read_timeout is also for connecting.
    """
    kind, scheme = kind_of(text), text.partition(":")[0].lower()
    if kind in (DRAWING, FOLDER):
        if realtime or loop:
            what = f"{scheme}:, which is no file" if kind == DRAWING else f"{one_line(text)}, a directory of pictures"
            raise ConfigError(f"realtime={realtime}, loop={loop}: must be False for {what}")
        return DRAWN[scheme](text) if kind == DRAWING else PictureFolder(text)
    if not text or ("://" in text and scheme not in NETWORK):
        known = ", ".join([*(f"{name}://" for name in NETWORK), *(f"{name}:" for name in DRAWN)])
        raise ConfigError(f"source={without_secrets(text)!r}: must be a path, /dev/video*, or start with {known}")
    return VideoSource(
        text, realtime=realtime, loop=loop, open_timeout=read_timeout, read_timeout=read_timeout, hwaccel=hwaccel
    )


# -- a directory of pictures -------------------------------------------------------------------------------------------


ENDINGS: Final = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # no others: Pillow starts Ghostscript for some of them
MOST_PIXELS: Final = 8192 * 8192  # of a picture: a header with more is an error or an attack


class PictureFolder:
    """The pictures in a directory, as a `Source`: files whose names end in one of `ENDINGS`, in natural order, without
    hidden files and sub-directories.

    Pictures are decoded as for `/act` (see `web.pictures`), of an animation the first one. A file that cannot be
    decoded is left out, and counted by `corrupt`. file: the name of the last picture that was read.
    """

    live = False

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self._where = Path(where)
        self.name = os.fspath(where)
        if not self.name or "\0" in self.name:
            raise ConfigError(f"PictureFolder.where={self.name!r}: must be a directory")
        self._stop = threading.Event()
        self._files: Iterator[str] = iter(())
        self.total: int | None = None
        self.corrupt, self.file = 0, ""

    def open(self) -> None:
        """List the pictures. Raises SourceError if there are none."""
        try:
            found = pictures_in(self._where)
        except ConfigError as error:
            raise SourceError(error.message, retryable=False) from None
        self._files, self.total = iter(found), len(found)

    def read(self) -> Picture | None:
        """The next picture; None after the last one."""
        for file in self._files:
            if self._stop.is_set():
                raise SourceError(f"{self.name}: interrupted", retryable=False)
            if (image := self._decoded(file)) is not None:
                self.file = file
                return image, None
            if not self.corrupt:
                log.warning("%s: cannot be decoded: left out, like others after it", self._where / file)
            self.corrupt += 1
        return None

    def close(self) -> None:
        self._files = iter(())

    def interrupt(self) -> None:
        """Read no further picture."""
        self._stop.set()

    def _decoded(self, file: str) -> NDArray[np.uint8] | None:
        try:
            with WALL, Image.open(self._where / file, formats=FORMATS) as picture:
                if picture.width * picture.height > MOST_PIXELS:
                    return None
                return np.array(upright(picture))
        except Exception:  # Pillow's decoders raise a dozen classes, SyntaxError among them
            return None


def pictures_in(where: Path) -> list[str]:
    """The names of the pictures in a directory, in natural order: 2 before 10. Raises ConfigError if there are none."""
    try:
        found = sorted((entry.name for entry in os.scandir(where) if _is_picture(entry)), key=_natural)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"{where}: holds no pictures ({', '.join(sorted(ENDINGS))})")
    return found


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that compares runs of digits as numbers, then the names as text."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), 0, "") if at % 2 else (0, 1, part) for at, part in enumerate(parts)] + [(0, 2, name)]


def _is_picture(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in ENDINGS and entry.is_file()
