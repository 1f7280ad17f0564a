"""A language model small enough to come with the package: `reflex serve` and `reflex trace` have words to show."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SCRIBE: Final = Path(__file__).parent / "models" / "scribe"
"""A Hugging Face directory: a Llama that tells stories and knows this project's words. Its README says how."""
