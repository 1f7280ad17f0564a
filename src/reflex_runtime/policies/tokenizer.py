"""Words to ids, for policies small enough to have a vocabulary instead of a language model's tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError


class Tokenizer(Protocol):
    """Turns an instruction into ids."""

    def encode(self, text: str, max_tokens: int) -> NDArray[np.int64]:
        """int64 [max_tokens]: cut where the text is longer, padded where it is shorter."""


class WordTokenizer:
    """A fixed vocabulary.

    words: id of each word. unknown, padding: ids for what is not in it, and for the rest of the row.
    lower: whether text is lowercased first. pattern: what counts as a word; None splits at white space.
    """

    def __init__(
        self,
        words: Mapping[str, int],
        unknown: int = 0,
        padding: int = 0,
        lower: bool = True,
        pattern: str | None = None,
    ) -> None:
        self._words, self._unknown, self._padding, self._lower = dict(words), unknown, padding, lower
        self._pattern = re.compile(pattern) if pattern else None

    def encode(self, text: str, max_tokens: int) -> NDArray[np.int64]:
        text = text.lower() if self._lower else text
        words = self._pattern.findall(text) if self._pattern else text.split()
        ids = [self._words.get(word, self._unknown) for word in words[:max_tokens]]
        row = np.full(max_tokens, self._padding, np.int64)
        row[: len(ids)] = ids
        return row


def read_tokenizer(file: Path) -> Tokenizer:
    """A `tokenizer.json` in the Hugging Face format: word-level models without post-processing.

    Understood: model WordLevel; normalizer none or Lowercase; pre_tokenizer Whitespace or WhitespaceSplit;
    post_processor none. Everything else is a ConfigError that says how to convert it.
    """

    def wrong(key: str, found: Any, expected: str) -> NoReturn:
        advice = "write the words of your instructions as {word: id} under `tokenizer` in reflex_config.json instead"
        raise ConfigError(f"{file}: {key}: found {found!r}, expected {expected}; or {advice}")

    try:
        parsed = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file}: is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        wrong("file", type(parsed).__name__, "an object")

    def kind(key: str, *allowed: str | None) -> str | None:
        part = parsed.get(key)
        found = part.get("type") if isinstance(part, dict) else part
        if found not in allowed:
            wrong(f"{key}.type", found, " or ".join(str(a) for a in allowed))
        return found

    kind("model", "WordLevel")
    lower = kind("normalizer", None, "Lowercase") == "Lowercase"
    whitespace = kind("pre_tokenizer", "Whitespace", "WhitespaceSplit")
    kind("post_processor", None)
    words = parsed["model"].get("vocab")
    if not isinstance(words, dict) or not words or not all(type(v) is int and v >= 0 for v in words.values()):
        wrong("model.vocab", words if not isinstance(words, dict) else "other values", "an object {word: id >= 0}")
    unknown = parsed["model"].get("unk_token")
    if unknown not in words:
        wrong("model.unk_token", unknown, "a word of model.vocab")
    padding = parsed.get("padding")
    pad_id = padding.get("pad_id", 0) if isinstance(padding, dict) else 0
    if type(pad_id) is not int or pad_id < 0:
        wrong("padding.pad_id", pad_id, "an integer >= 0")
    # The format's own definition of Whitespace: runs of word characters, and runs of other visible ones.
    pattern = r"\w+|[^\w\s]+" if whitespace == "Whitespace" else None
    return WordTokenizer(words, words[unknown], pad_id, lower, pattern)
