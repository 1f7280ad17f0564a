"""The files behind an export's model, the hashes that name its versions, and how a directory is written whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.robots.export.config_file import CONFIG_FILE

MODEL_PATTERNS: Final = ("*.onnx", "*.onnx.data", "*.bin", "*.safetensors")
_LFS: Final = b"version https://git-lfs."  # how a file begins that Git LFS has not fetched


def check_files(root: Path) -> list[Path]:
    """The files of an export; ConfigError for one that cannot be read or was not fetched."""
    files = sorted(file for pattern in (*MODEL_PATTERNS, "*.json") for file in root.rglob(pattern))
    for file in files:
        try:
            with file.open("rb") as stream:
                head = stream.read(len(_LFS))
        except OSError as error:
            raise ConfigError(f"{file}: {'a link to nothing' if file.is_symlink() else error.strerror}") from None
        if head == _LFS:
            raise ConfigError(f"{file}: a Git LFS pointer, not the file itself: run git lfs pull, and copy again")
    return files


def uncounted(root: Path) -> str:
    """The name of a file that a graph names for its weights, and that no pattern matches; "" if there is none."""
    others = [file.name for file in root.iterdir() if not any(file.match(p) for p in (*MODEL_PATTERNS, "*.json"))]
    graphs = [file for file in root.glob("*.onnx") if file.stat().st_size]
    for graph in graphs if others else ():
        with graph.open("rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as data:
            for name in others:
                if data.find(bytes([len(name.encode())]) + name.encode()) >= 0:  # a text has its length before it
                    return name
    return ""


def model_hash(root: Path) -> str:
    """The `files_hash` of the model files, sorted by their path within the directory."""
    return files_hash(root, (name for name, _ in _model_files(root)))


def files_hash(root: Path, names: Iterable[str]) -> str:
    """First 16 hex digits of SHA-256 over files of a directory, without those that are not there.

    Of each file: its path in UTF-8 with forward slashes, a zero byte, its size in 8 bytes (big-endian), its contents.
    """
    sha = hashlib.sha256()
    for name in names:
        file = root / name
        if not file.is_file():
            continue
        sha.update(name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "big"))
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()[:16]


def model_bytes(root: Path) -> int:
    """Total size of the files behind `model_hash`, without reading them; 0 where there is no such directory."""
    return sum(file.stat().st_size for _, file in _model_files(root))


def config_hash(root: Path) -> str:
    """First 16 hex digits of SHA-256 of the bytes of `reflex_config.json`."""
    return hashlib.sha256((root / CONFIG_FILE).read_bytes()).hexdigest()[:16]


def _model_files(root: Path) -> list[tuple[str, Path]]:
    found = {
        file.relative_to(root).as_posix(): file for p in MODEL_PATTERNS for file in root.rglob(p) if file.is_file()
    }
    return sorted(found.items())


# -- writing a directory -----------------------------------------------------------------------------------------------


def check_new(out: Path, force: bool) -> None:
    """ConfigError if `new_directory` must not write there."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out}: is a file; name a directory")
    if not any(out.iterdir()):
        return
    if not force:
        raise ConfigError(f"{out}: is not empty; name another directory, or use --force to replace this export")
    if not (out / CONFIG_FILE).is_file():
        raise ConfigError(f"{out}: --force replaces exports, and this is none (no {CONFIG_FILE}); name another one")


@contextmanager
def new_directory(out: Path, force: bool = False) -> Iterator[Path]:
    """An empty directory beside `out` to write into. At the end of the block it becomes `out`; after an error it is
    removed, and what was at `out` is as it was.

    force: replace an export that is there.
    """
    check_new(out, force)
    target = out.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield making
        making.chmod(0o777 & ~_umask())
        _exchange(making, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _exchange(new: Path, target: Path) -> None:
    """Put `new` in the place of `target`."""
    if not target.is_dir() or not any(target.iterdir()):
        new.rename(target)  # an empty directory gives way
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
