"""What the parameters of a request change in the logits of its next token: penalties, a bias, no early end, a form.

A sequence has a `Shaping` only if its parameters need one. It is read when a token is chosen, and changed when that
token is kept: a step that fails in between leaves no trace.

The form of an output is a JSON Schema, a regular expression, one of several texts, or a grammar. The library
`llguidance` computes the tokens that may come next. A form is first checked in a process of its own (`form_check.py`),
then compiled once for a tokenizer, off the event loop. Each sequence has its own copy. The mask of the next token is
computed while the model runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.extras import needed_by
from reflex_runtime.ipc.messages import Constraint, SamplingParams
from reflex_runtime.llm.engine import form_check

Row = npt.NDArray[np.float32]
_ROOM: Final = 64  # different output tokens before the arrays of `_Counts` grow
_FORBIDDEN: Final = np.where(  # [256, 8]: for each byte of a mask, what is added to the logits of its 8 tokens
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)
# Without a bound a model may write spaces until its tokens are used up; line ends and indents would cost tokens.
SPACES: Final = r"\x20?"
_KEPT: Final = 64  # compiled forms: clients send the same one again and again
_PLAIN: Final = 2000  # characters of a schema that is checked in this process, if it has no costly word
_COSTLY: Final = re.compile(r"\$|x-|attern|multipleOf|format|allOf|not|\\u00[0-7]")  # escapes can spell the others
_TOO_COMPLEX: Final = "is too complex: it takes too much time, memory or depth to compile"
_NAMES: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # their keys are names
_VALUES: Final = ("const", "enum", "default", "examples", "example")  # hold values, no schemas
_ALL: Final[tuple[Any, ...]] = (True, {})
_VAIN: Final[dict[str, tuple[Any, ...]]] = {  # keywords that the library lacks, with their values that demand nothing
    **dict.fromkeys(("then", "else", "propertyNames", "unevaluatedItems", "unevaluatedProperties"), _ALL),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
    **dict.fromkeys(("not", "uniqueItems"), (False,)),
}
_BESIDE: Final = {  # keywords that demand nothing without one of these
    "if": {"then", "else"}, "then": {"if"}, "else": {"if"}, "minContains": {"contains"}, "maxContains": {"contains"},
}  # fmt: skip
_AROUND: Final = "look-around and references ((?=, (?!, (?<, \\b, \\1) are not supported"
_ENDLESS: Final = "no text can have it; perhaps a $ref refers to itself without an alternative that ends"
_CASES: Final = "write anyOf, with a whole schema for each case"
_INSTEAD: Final = {
    **dict.fromkeys(("if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"), _CASES),
    "not": "say what is allowed, with enum, const or anyOf",
    "oneOf": "write anyOf, or cases that exclude each other",
    "pattern": "say what may stand there, as ^-?[0-9]+([.][0-9]+)?$ for a number",
}
_BROKEN: Final = re.compile(  # the library's error also shows the expression, in several lines
    r"(at \S+: )?(?:invalid regex \".*\" \(in [^)]*\): )?regex parse error:.*\nerror: ([^\n]*).*", re.DOTALL
)
_LONGEST: Final = 60.0  # seconds for the check of a form, on a very busy machine


class Matcher:
    """How far one output has come in its form. Made by `Constraints.compile`; `copy` it for each sequence."""

    __slots__ = ("_core", "_penalty")

    def __init__(self, core: Any) -> None:
        """core: an `llguidance.LLMatcher`."""
        self._core = core
        self._penalty: Row | None = None

    def copy(self) -> Matcher:
        return Matcher(self._core.deep_copy())

    def prepare(self) -> None:
        """Compute the tokens that may come next, for `penalty`. Releases the interpreter's lock meanwhile."""
        if self._penalty is None:
            bits = np.frombuffer(self._core.compute_bitmask(), np.uint8)
            self._penalty = np.take(_FORBIDDEN, bits, axis=0).reshape(-1)

    def penalty(self) -> Row:
        """What to add to the logits: 0 for a token that may come next, else minus infinity. Tokens beyond its end may
        not come next. Raises ProcessorError for a form that is too complex."""
        self.prepare()
        penalty = self._penalty
        if self._core.is_error() or penalty is None:
            raise self._error()
        return penalty

    def sampled(self, token: int) -> None:
        """Add a token of the output. Raises ProcessorError for one that was not allowed."""
        self._penalty = None
        if not self._core.consume_token(token):
            raise self._error()

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._core.is_stopped())

    def _error(self) -> ProcessorError:
        return ProcessorError(f"the form of the output: {_first_line(self._core.get_error())}")


class Constraints:
    """Compiles forms for one tokenizer. vocabulary: `Tokenizer.vocabulary`. Thread-safe."""

    def __init__(self, vocabulary: Callable[[], Any]) -> None:
        self._read, self._vocabulary = vocabulary, None
        self._compiled = lru_cache(_KEPT)(self._compile)

    def compile(self, constraint: Constraint) -> Matcher:
        """A matcher at the beginning of an output. Raises ConfigError, with the kind, for an invalid form."""
        return self._compiled(constraint).copy()

    def _compile(self, constraint: Constraint) -> Matcher:
        check_constraint(constraint)
        library = _library()
        if self._vocabulary is None:  # two threads may build it at once; both are equal
            self._vocabulary = self._read()
        core = library.LLMatcher(self._vocabulary, _grammar(library, constraint), log_level=0)
        if core.is_error():
            raise _wrong(constraint, core.get_error())
        return Matcher(core)


@lru_cache(_KEPT)
def check_constraint(constraint: Constraint) -> None:
    """Raise the errors of `Constraints.compile` that need no tokenizer. For most forms this starts a process, 0.1 s."""
    library = _library()
    form = _grammar(library, constraint)
    error = form_check.fault(library, form) if _plain(constraint) else _fault_elsewhere(constraint, form)
    if error:
        raise _wrong(constraint, _explained(library, constraint, error))


def _plain(constraint: Constraint) -> bool:
    """Whether the form cannot be costly."""
    text = constraint.text
    return constraint.kind == "choice" or (
        constraint.kind == "json" and len(text) <= _PLAIN and _COSTLY.search(text) is None
    )


def _fault_elsewhere(constraint: Constraint, form: str) -> str:
    """The form's fault, found in another process; "" for none."""
    command = [sys.executable, "-P", str(Path(form_check.__file__))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            command, input=form.encode(), capture_output=True, timeout=_LONGEST, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise _wrong(constraint, _TOO_COMPLEX) from None
    if done.returncode < 0 or done.returncode == form_check.FAILED:
        raise _wrong(constraint, _TOO_COMPLEX)
    if done.returncode:
        raise ProcessorError(f"the form of the output cannot be checked: {_first_line(done.stderr.decode()[-300:])}")
    return done.stdout.decode()


def _library() -> Any:
    with needed_by("output of a given form"):
        import llguidance
    return llguidance


def _grammar(library: Any, constraint: Constraint) -> str:
    """The form in the library's language."""
    text = constraint.text
    matcher = library.LLMatcher
    if constraint.kind == "regex":
        found = matcher.grammar_from_regex(text)
    elif constraint.kind == "grammar":
        found = matcher.grammar_from_lark(text)
    elif constraint.kind == "choice":
        found = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in json.loads(text)))
    else:
        if any(f'"{word}"' in text for word in (*_VAIN, *_BESIDE)):
            with suppress(ValueError, RecursionError):  # the library's error is clearer
                text = json.dumps(demands(json.loads(text)))
        try:
            found = matcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": SPACES, "lenient": True})
        except ValueError as error:
            why = "must be an object; for true write {}" if "Expecting object" in str(error) else str(error)
            raise _wrong(constraint, why) from None
    return str(found)


def demands(schema: Any, names: bool = False) -> Any:
    """A schema without the keywords that demand nothing, which the library would refuse. names: its keys are names."""
    if isinstance(schema, list):
        return [demands(one) for one in schema]
    if names or not isinstance(schema, dict):
        return {name: demands(one) for name, one in schema.items()} if isinstance(schema, dict) else schema
    left = {word: value for word, value in schema.items() if value not in _VAIN.get(word, ())}
    if left.get("minContains") == 0 and "maxContains" not in left:
        left.pop("contains", None)
    left = {word: value for word, value in left.items() if word not in _BESIDE or _BESIDE[word] & left.keys()}
    return {word: value if word in _VALUES else demands(value, word in _NAMES) for word, value in left.items()}


def _explained(library: Any, constraint: Constraint, why: str) -> str:
    """The fault with its place in the schema where that is known, and what to write instead."""
    around, broken = re.search("look-?around|backreference", why), _BROKEN.search(why)
    if constraint.kind != "json":
        why = why.removeprefix("at 1(8): ") if constraint.kind == "regex" else why  # the place in the library's grammar
        return f"{_AROUND}; {_INSTEAD['pattern']}" if around else why
    wrong = f"{_AROUND}; {_INSTEAD['pattern']}" if around else why
    unknown = re.match(r'Unimplemented keys: \["([^"]+)"|(oneOf)', why)
    keyword = "pattern" if around or broken else (unknown[1] or unknown[2]) if unknown else ""
    for where, name, value in _places(json.loads(constraint.text)):
        parent = where.rpartition(".")[0].rpartition(".")[2]
        if (around or broken) and (parent == "patternProperties" or (name == keyword and isinstance(value, str))):
            pattern = value if name == keyword and isinstance(value, str) else name
            if library.LLMatcher.validate_grammar(library.LLMatcher.grammar_from_regex(pattern)):
                return f"{where}: {wrong}"
        elif parent in _NAMES:
            if why.startswith("schema must") and not isinstance(value, dict | bool):
                return f"{where}: {why}"
        elif keyword and name == keyword:
            return f"{where}: is not supported; {_INSTEAD.get(name, 'leave it out, and check the answer')}"
        elif _is_at(why, name, value):
            return f"{where}: {why}"
    return why


def _is_at(why: str, name: str, value: Any) -> bool:
    """Whether a fault that the library reports without a place is in this keyword."""
    if found := re.fullmatch("Invalid type: (.*)", why):
        return name == "type" and found[1] in (value if isinstance(value, list) else [value])
    if found := re.fullmatch("Expected .* for '(.*)', got (.*)", why):
        return name == found[1] and json.dumps(value) == found[2]
    if found := re.fullmatch(r"(\w+) must be an (array|object).*", why):
        return name == found[1] and not isinstance(value, list if found[2] == "array" else dict)
    if found := re.fullmatch("Pointer '(.*)' does not exist", why):
        return name == "$ref" and value == f"#{found[1]}"
    return why == "invalid multiple of" and name == "multipleOf" and isinstance(value, int | float) and value <= 0


def _places(schema: Any, inside: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every place in a schema, with its keyword or name and its value."""
    if isinstance(schema, list):
        entries = {f"{inside}[{i}]": ("", value) for i, value in enumerate(schema)}
    else:
        found = schema.items() if isinstance(schema, dict) else ()
        entries = {f"{inside}.{name}" if inside else name: (name, value) for name, value in found}
    for where, (name, value) in entries.items():
        yield where, name, value
        yield from _places(value, where)


def _wrong(constraint: Constraint, why: str) -> ConfigError:
    return ConfigError(f"{constraint.kind}: {_first_line(why)}")


def _first_line(text: str) -> str:
    """A message of the library as one line, without its state and the source lines that it shows."""
    message = text.partition("<state>")[0].replace("NoExtensionBias", _ENDLESS)
    message = _BROKEN.sub(r"\1invalid regex: \2", message)
    message = re.sub(r"\n +\d+ \|.*", "", message)
    return " ".join(line.strip() for line in message.splitlines() if line.strip(" ^|"))[:300]


class _Counts:
    """Tokens and their counts, as arrays, so that numpy changes a row of logits in one operation."""

    __slots__ = ("_at", "_ids", "_times")

    def __init__(self, tokens: Seq[int] = ()) -> None:
        """tokens: each counts once."""
        first = list(dict.fromkeys(tokens))
        self._at = {token: at for at, token in enumerate(first)}
        self._ids = np.array([*first, *[0] * _ROOM], np.int64)
        self._times = np.ones(len(self._ids), np.float32)
        self._times[len(first) :] = 0.0

    def add(self, token: int) -> None:
        """Count it once more."""
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._ids):
            self._ids, self._times = np.resize(self._ids, 2 * at), np.append(self._times, np.zeros(at, np.float32))
        self._ids[at] = token
        self._times[at] += 1.0

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: len(self._at)]

    @property
    def times(self) -> npt.NDArray[np.float32]:
        return self._times[: len(self._at)]


class Shaping:
    """The changes for one sequence. ends: tokens that end it. matcher: of its constraint."""

    __slots__ = ("_bias", "_biased", "_ends", "_known", "_output", "_params", "_sampled", "matcher")

    def __init__(
        self, params: SamplingParams, prompt: Seq[int], ends: Collection[int], matcher: Matcher | None = None
    ) -> None:
        self._params, self.matcher = params, matcher
        self._biased = np.array([token for token, _ in params.logit_bias], np.int64)
        self._bias = np.array([by for _, by in params.logit_bias], np.float32)
        self._ends = np.array(sorted(ends), np.int64)
        self._known = _Counts(prompt) if params.repetition_penalty != 1.0 else None
        self._output = _Counts() if params.presence_penalty or params.frequency_penalty else None
        self._sampled = 0

    def shape(self, row: Row) -> None:
        """Change the logits [vocab_size] of the next token, in place. Raises ProcessorError if no token is left."""
        params, known, output = self._params, self._known, self._output
        if known is not None:
            own, by = row[known.ids], params.repetition_penalty
            row[known.ids] = np.where(own > 0.0, own / by, own * by)
        if output is not None:
            row[output.ids] -= params.frequency_penalty * output.times + params.presence_penalty
        if len(self._biased):
            row[self._biased] += self._bias
        if self.matcher is not None:
            penalty = self.matcher.penalty()
            n = min(len(row), len(penalty))  # a model may have more rows than its tokenizer has tokens, or fewer
            row[:n] += penalty[:n]
            row[n:] = -np.inf
        if self._sampled < params.min_tokens:
            ends = row[self._ends]
            row[self._ends] = -np.inf
            if self.matcher is not None and row.max() == -np.inf:
                row[self._ends] = ends  # the form ends here: min_tokens cannot hold
        if row.max() == -np.inf:
            raise ProcessorError("no token is left that both the form of the output and min_tokens allow")

    @property
    def complete(self) -> bool:
        """Whether the output has its form, and nothing can follow."""
        return self.matcher is not None and self.matcher.complete

    def sampled(self, token: int) -> None:
        """Count a token of the output. Raises ProcessorError for one that its form does not allow."""
        self._sampled += 1
        if self.matcher is not None:
            self.matcher.sampled(token)
        for counts in (self._known, self._output):
            if counts is not None:
                counts.add(token)
