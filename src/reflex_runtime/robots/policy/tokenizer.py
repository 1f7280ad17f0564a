"""From an instruction to the model's text input: the prompt, and its token ids."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.extras import needed_by
from reflex_runtime.robots.policy.units import Floats

Cleaning = Literal["strip", "lower", "underscores", "newlines", "end_newline"]

_CLEAN: Final[Mapping[Cleaning, Callable[[str], str]]] = {
    "strip": str.strip,
    "lower": str.lower,
    "underscores": lambda text: text.replace("_", " "),
    "newlines": lambda text: text.replace("\n", " "),
    "end_newline": lambda text: text.removesuffix("\n") + "\n",
}
PROMPT, STATE_BINS = "{prompt}", "{state_bins}"
_EDGES: Final = np.linspace(-1.0, 1.0, 257)[:-1]  # of 256 bins; a number below -1 is in bin -1


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A text with `{prompt}`, and perhaps `{state_bins}`: for each number of the normalised state its bin of 256 in
    [-1, 1], with spaces between.

    clean: changes of the instruction, in this order: "strip" white space, "lower" case, "underscores" or "newlines" to
    spaces, "end_newline" adds a newline unless it ends with one.
    """

    template: str = PROMPT
    clean: tuple[Cleaning, ...] = ()

    @property
    def reads_state(self) -> bool:
        return STATE_BINS in self.template

    def render(self, instruction: str, state: Floats | None) -> str:
        """The text to tokenize. state: float32 [state_dim], normalised; needed if the template reads it."""
        before, _, after = self.template.partition(PROMPT)
        if self.reads_state:
            assert state is not None
            bins = " ".join(map(str, (np.digitize(state.astype(np.float64), _EDGES) - 1).tolist()))
            before, after = before.replace(STATE_BINS, bins), after.replace(STATE_BINS, bins)
        for step in self.clean:
            instruction = _CLEAN[step](instruction)
        return before + instruction + after


# -- tokens ------------------------------------------------------------------------------------------------------------


class InstructionTokenizer:
    """Turns an instruction into ids. padding: the id that fills the rest of a row."""

    padding: int = 0

    def ids(self, text: str) -> Sequence[int]:
        """The ids of the text."""
        raise NotImplementedError

    def unknown(self, text: str) -> list[str]:
        """The words of the text of which a part has no token, except mere punctuation."""
        raise NotImplementedError

    def row(self, text: str, max_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.bool_], int]:
        """int64 [max_tokens], padded at its end; bool [max_tokens]: which of them are the text's; and the number of
        tokens that are cut off a longer text."""
        found = self.ids(text)
        ids, row = found[:max_tokens], np.full(max_tokens, self.padding, np.int64)
        row[: len(ids)] = ids
        return row, np.arange(max_tokens) < len(ids), len(found) - len(ids)


class WordTokenizer(InstructionTokenizer):
    """A fixed vocabulary of words with white space between.

    words: id of each word. unknown, padding: ids for unknown words, and for the rest of the row.
    lower: whether text is lowercased first. example: a known word, for the warm-up.
    """

    def __init__(self, words: Mapping[str, int], unknown: int = 0, padding: int = 0, lower: bool = True) -> None:
        self.words, self._unknown, self.padding, self._lower = dict(words), unknown, padding, lower
        self.example = next((word for word in words if word.isalnum() and not self.unknown(word)), "warm up")

    def ids(self, text: str) -> Sequence[int]:
        return [self.words.get(word, self._unknown) for word in self._split(text)]

    def unknown(self, text: str) -> list[str]:
        return _words(word for word in self._split(text) if self.words.get(word, self._unknown) == self._unknown)

    def _split(self, text: str) -> list[str]:
        return text.lower().split() if self._lower else text.split()


class PackagedTokenizer(InstructionTokenizer):
    """A `tokenizer.json`, through the `tokenizers` package, with the special tokens that the file adds."""

    def __init__(self, tokenizer: Any) -> None:
        self.padding = (tokenizer.padding or {}).get("pad_id", 0)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer

    def ids(self, text: str) -> Sequence[int]:
        found: Sequence[int] = self._tokenizer.encode(text).ids
        return found

    def unknown(self, text: str) -> list[str]:
        token = getattr(self._tokenizer.model, "unk_token", None)
        missing = None if token is None else self._tokenizer.token_to_id(token)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return _words(text[begin:end] for i, (begin, end) in zip(found.ids, found.offsets, strict=True) if i == missing)


class SentencePieceTokenizer(InstructionTokenizer):
    """PaliGemma's tokenizer as openpi calls it: a beginning of text, and a newline at the end as tokens of its own."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def ids(self, text: str) -> Sequence[int]:
        found: list[int] = self._processor.encode(text.removesuffix("\n"), add_bos=True)
        return [*found, *self._processor.encode("\n")] if text.endswith("\n") else found

    def unknown(self, text: str) -> list[str]:
        missing = self._processor.unk_id()
        if missing not in self.ids(text):
            return []
        return _words(word for word in text.split() if missing in self.ids(word))


def _words(found: Iterable[str]) -> list[str]:
    return [word for word in dict.fromkeys(found) if any(map(str.isalnum, word))]


def read_sentencepiece(file: Path) -> SentencePieceTokenizer:
    """A SentencePiece model. ConfigError without the package `sentencepiece`, or for another file."""
    with needed_by(f"{file}:"):
        package: Any = importlib.import_module("sentencepiece")
    try:
        return SentencePieceTokenizer(package.SentencePieceProcessor(model_file=str(file)))
    except Exception as error:  # the package raises RuntimeError, OSError and others
        raise ConfigError(f"{file}: is no SentencePiece model; copy it again") from error


def read_tokenizer(file: Path) -> PackagedTokenizer:
    """A `tokenizer.json` in the Hugging Face format. ConfigError without the package `tokenizers`."""
    with needed_by(f"{file}, without words of your instructions under `tokenizer` in reflex_config.json,"):
        package: Any = importlib.import_module("tokenizers")
    try:
        tokenizer = package.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception
        raise ConfigError(f"{file}: the tokenizers package cannot read it: {error}") from error
    return PackagedTokenizer(tokenizer)
