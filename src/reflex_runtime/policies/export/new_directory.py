"""A directory that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.policies.export.config_file import CONFIG_FILE


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
