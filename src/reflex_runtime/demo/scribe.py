"""A language model small enough to come with the package: `reflex serve` and `reflex trace` have words to show."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SCRIBE: Final = Path(__file__).parent / "models" / "scribe"
"""A Hugging Face directory: a Llama that tells stories and knows this project's words. Its README says how."""


def model_directory(name: str) -> Path:
    """What a command line means by a model: a directory, or `scribe` for the bundled one where none is called so."""
    directory = Path(name)
    return SCRIBE if name == "scribe" and not directory.exists() else directory
