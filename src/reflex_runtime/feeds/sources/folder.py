"""A directory of pictures as a source: each picture once, in the order of their names."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.feeds.runtime.frame import SourceError

ENDINGS: Final = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
MOST_PIXELS: Final = 8192 * 8192  # of a picture; a header that says more is an error or an attack


class FilePicture(tuple[NDArray[np.uint8], float | None]):
    """A picture without a time. file: its name in the directory."""

    file: str

    @classmethod
    def of(cls, image: NDArray[np.uint8], file: str) -> FilePicture:
        """The picture that this file holds."""
        picture = cls((image, None))
        picture.file = file
        return picture


class PictureFolder:
    """The pictures in a directory, as a `Source`: files whose names end in one of `ENDINGS`, sorted by name, without
    hidden ones and without those in directories below it.

    An orientation that a camera wrote into a picture is applied. Of an animation the first picture is taken. A file
    that cannot be decoded is passed over, and counted by `corrupt`.
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
        self.corrupt = 0

    def open(self) -> None:
        """List the pictures. Raises SourceError if there are none."""
        try:
            found = pictures_in(self._where)
        except ConfigError as error:
            raise SourceError(error.message, retryable=False) from None
        self._files, self.total = iter(found), len(found)

    def read(self) -> FilePicture | None:
        """The next picture that can be decoded; None after the last one."""
        for file in self._files:
            if self._stop.is_set():
                raise SourceError(f"{self.name}: interrupted", retryable=False)
            image = self._decoded(file)
            if image is not None:
                return FilePicture.of(image, file)
            self.corrupt += 1
        return None

    def close(self) -> None:
        self._files = iter(())

    def interrupt(self) -> None:
        """No picture after the one that is being decoded."""
        self._stop.set()

    def _decoded(self, file: str) -> NDArray[np.uint8] | None:
        try:
            with Image.open(self._where / file) as picture:
                if picture.width * picture.height > MOST_PIXELS:
                    return None
                upright = ImageOps.exif_transpose(picture)
                return np.array(upright.convert("RGB"))
        except Exception:  # Pillow's decoders raise a dozen classes, SyntaxError among them
            return None


def pictures_in(where: Path) -> list[str]:
    """The names of the pictures in a directory, sorted. ConfigError if there are none."""
    try:
        found = sorted(entry.name for entry in os.scandir(where) if _is_picture(entry))
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"{where}: holds no pictures ({', '.join(sorted(ENDINGS))})")
    return found


def _is_picture(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in ENDINGS and entry.is_file()
