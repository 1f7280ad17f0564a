"""The models that come with the package: a robot policy and a language model, small enough to try everything with.

`demo` is a policy for six Meta-World tasks, an export directory of a prefix and a denoise step: how it was made and how
good it is stands in `tools/demo_policy/README.md`. `scribe` is a Hugging Face directory: a Llama that tells stories and
knows this project's words. Both belong to the installation: read them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from reflex_runtime.core.errors import ConfigError

POLICY: Final = Path(__file__).parent / "policy"
SCRIBE: Final = Path(__file__).parent / "scribe"


def policy_source(source: str) -> str:
    """What a command line means by a policy: `demo` is the bundled one where no directory is called so."""
    return str(POLICY) if source == "demo" and not Path(source).exists() else source


def model_directory(name: str) -> Path:
    """What a command line means by a language model: `scribe` is the bundled one where no directory is called so."""
    directory = Path(name)
    return SCRIBE if name == "scribe" and not directory.exists() else directory


def told_apart(source: str) -> str:
    """A source as the start of a server says it: a directory that is called like a bundled model is not that one."""
    return f"./{source}, the directory here, not the bundled model" if source in ("demo", "scribe") else source


def write_policy(dest: Path, force: bool = False) -> Path:
    """Copy the bundled policy to `dest` and return `dest`, which is created with its parents.

    A `dest` that holds anything is a ConfigError, unless `force`: then its model files are removed first (one left over
    would count in the model's hash) and everything else stays.
    """
    if dest.exists() and not dest.is_dir():
        raise ConfigError(f"{dest} is a file; name a directory")
    if dest.is_dir() and any(dest.iterdir()) and not force:
        raise ConfigError(f"{dest} is not empty; name another directory, or use --force to write over it")
    dest.mkdir(parents=True, exist_ok=True)
    for left in dest.glob("*.onnx"):
        left.unlink()
    for file in sorted(POLICY.iterdir()):
        shutil.copyfile(file, dest / file.name)
    return dest
