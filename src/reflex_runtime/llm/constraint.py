"""Output that must have a form: a JSON Schema, a regular expression, one of several texts, a grammar.

The library `llguidance` knows which tokens may come next; here is what the engine needs of it. A form is compiled once
for a tokenizer, off the event loop, and each sequence works on its own copy. What may come next is computed while the
model runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.ipc.sampling import Constraint

Mask = npt.NDArray[np.bool_]
# A model that is allowed any number of spaces may write nothing else until its tokens are used up.
SPACES: Final = r"[\x20\x0A\x0D\x09]{0,32}"
_KEPT: Final = 64  # compiled forms: clients send the same one again and again


class Matcher:
    """Where one output is in its form. Made by `Constraints.compile`; `copy` it for each sequence."""

    __slots__ = ("_core", "_mask")

    def __init__(self, core: Any) -> None:
        """core: an `llguidance.LLMatcher`."""
        self._core = core
        self._mask: Mask | None = None

    def copy(self) -> Matcher:
        return Matcher(self._core.deep_copy())

    def prepare(self) -> None:
        """Find out which tokens may come next, for `allowed`. It releases the interpreter meanwhile."""
        if self._mask is None:
            bits = np.frombuffer(self._core.compute_bitmask(), np.uint8)
            self._mask = np.unpackbits(bits, bitorder="little").view(np.bool_)

    def allowed(self) -> Mask:
        """Whether each token may come next. Tokens beyond its end may not. Raises ProcessorError when the form turns
        out to be too complex."""
        self.prepare()
        mask = self._mask
        if self._core.is_error() or mask is None:
            raise self._error()
        return mask

    def sampled(self, token: int) -> None:
        """The output has a new token. Raises ProcessorError for one that was not allowed."""
        self._mask = None
        if not self._core.consume_token(token):
            raise self._error()

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._core.is_stopped())

    def _error(self) -> ProcessorError:
        return ProcessorError(f"the form of the output: {_first_line(self._core.get_error())}")


class Constraints:
    """Compiles forms for one tokenizer. vocabulary: `Tokenizer.vocabulary`. Any thread may call it."""

    def __init__(self, vocabulary: Callable[[], Any]) -> None:
        self._read, self._vocabulary = vocabulary, None
        self._compiled = lru_cache(_KEPT)(self._compile)

    def compile(self, constraint: Constraint) -> Matcher:
        """At the beginning of an output. ConfigError for a form that is none; it begins with its kind."""
        return self._compiled(constraint).copy()

    def _compile(self, constraint: Constraint) -> Matcher:
        library = _library()
        if self._vocabulary is None:  # built twice if two threads come at once: the same
            self._vocabulary = self._read()
        core = library.LLMatcher(self._vocabulary, _grammar(library, constraint), log_level=0)
        if core.is_error():
            raise _wrong(constraint, core.get_error())
        return Matcher(core)


def check_constraint(constraint: Constraint) -> None:
    """Raise what `Constraints.compile` would, where there is no tokenizer."""
    library = _library()
    error = library.LLMatcher.validate_grammar(_grammar(library, constraint))
    if error and not error.startswith("WARNING"):
        raise _wrong(constraint, error)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError("output of a given form needs the library llguidance: pip install llguidance") from error
    return llguidance


def _grammar(library: Any, constraint: Constraint) -> str:
    """In the words of the library."""
    text = constraint.text
    matcher = library.LLMatcher
    if constraint.kind == "regex":
        found = matcher.grammar_from_regex(text)
    elif constraint.kind == "grammar":
        found = matcher.grammar_from_lark(text)
    elif constraint.kind == "choice":
        found = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in json.loads(text)))
    else:
        try:
            found = matcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": SPACES})
        except ValueError as error:
            raise _wrong(constraint, str(error)) from None
    return str(found)


def _wrong(constraint: Constraint, why: str) -> ConfigError:
    return ConfigError(f"{constraint.kind}: {_first_line(why)}")


def _first_line(text: str) -> str:
    """A message without the picture of where in the text it is."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip(" ^|"))[:300]
