"""The policies that come with the package: two versions, each whole or split in prefix and denoise step.

v1 and v2 differ in training only, so that an A/B split, a ramp or a rollback between them has something true to find.
How they were made and how good they are stands in `tools/demo_policy/README.md`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final, Literal, get_args

from reflex_runtime.core.errors import ConfigError

Variant = Literal["v1", "v2"]
Kind = Literal["monolithic", "decomposed"]

VARIANTS: Final[tuple[Variant, ...]] = get_args(Variant)
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_BUNDLED = Path(__file__).parent / "exports"


def export_dir(variant: Variant = "v2", kind: Kind = "monolithic") -> Path:
    """Where the bundled export lies. It belongs to the installation: read it; to change it, `write_export` a copy."""
    if variant not in VARIANTS:
        raise ConfigError(f"variant: {variant!r} is none of {', '.join(VARIANTS)}")
    if kind not in KINDS:
        raise ConfigError(f"kind: {kind!r} is none of {', '.join(KINDS)}")
    return _BUNDLED / variant / kind


def write_export(dest: Path, variant: Variant = "v2", kind: Kind = "monolithic", force: bool = False) -> Path:
    """Copy a bundled export to `dest` and return `dest`, which is created with its parents.

    A `dest` that holds anything is a ConfigError, unless `force`: then files of any bundled export are removed first (a
    model file left over would count in the model's hash) and everything else stays.
    """
    source = export_dir(variant, kind)
    if dest.exists() and not dest.is_dir():
        raise ConfigError(f"{dest} is a file; name a directory")
    if dest.is_dir() and any(dest.iterdir()) and not force:
        raise ConfigError(f"{dest} is not empty; name another directory, or use --force to write over it")
    dest.mkdir(parents=True, exist_ok=True)
    for name in {file.name for kind_ in KINDS for file in export_dir(variant, kind_).iterdir()}:
        (dest / name).unlink(missing_ok=True)
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, dest / file.name)
    return dest
