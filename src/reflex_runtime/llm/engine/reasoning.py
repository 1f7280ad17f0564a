"""Thoughts: what a reasoning model writes before its answer, between marks that its chat template knows.

Some templates leave it to the model to begin a thought, others begin it in the prompt: the output is inside of it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from reflex_runtime.llm.engine.tokenizer import END_OF_THOUGHT, Tokenizer

THOUGHT, ANSWER = "<think>", END_OF_THOUGHT
_TAIL: Final = 16  # tokens of a prompt in which it may begin a thought


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of what a model thought."""

    text: str


def in_thought(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends with the beginning of a thought."""
    return "".join(map(tokenizer.token, prompt[-_TAIL:])).rstrip().endswith(THOUGHT)


class ThoughtParser:
    """Reads the thought at the beginning of one output's text as it comes. thinking: whether it is inside of one.

    An output that does not begin with a thought is an answer from its first character on.
    """

    def __init__(self, begun: bool) -> None:
        """begun: the prompt began the thought."""
        self._state: Literal["before", "inside", "behind", "answer"] = "inside" if begun else "before"
        self._text = ""  # not yet said
        self._said = False  # whether any of the thought was said

    @property
    def thinking(self) -> bool:
        return self._state == "inside"

    def feed(self, text: str) -> tuple[str, str]:
        """What is complete with this text: of the thought, and of the answer."""
        if self._state == "answer":
            return "", text
        self._text += text
        if self._state == "before":
            self._begin()
        thought = self._inside() if self._state == "inside" else ""
        if self._state == "behind" and (found := self._text.lstrip()):
            self._state, self._text = "answer", found
        return thought, self._rest() if self._state == "answer" else ""

    def end(self) -> tuple[str, str]:
        """What is left when the output has ended."""
        rest = self._rest()
        if self._state == "inside":
            return rest.rstrip() if self._said or not THOUGHT.startswith(rest.strip()) else "", ""
        return "", rest if self._state == "before" else ""

    def _begin(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(THOUGHT):
            self._state, self._text = "inside", begun[len(THOUGHT) :]
        elif not THOUGHT.startswith(begun):
            self._state = "answer"

    def _inside(self) -> str:
        if not self._said:  # a model may repeat the mark that the prompt ends with
            begun = self._text.lstrip()
            if not begun or (begun != THOUGHT and THOUGHT.startswith(begun)):
                return ""
            self._text = begun.removeprefix(THOUGHT).lstrip()
        before, closed, after = self._text.partition(ANSWER)
        if closed:
            self._state, self._text = "behind", after
            return before.rstrip()
        sure = self._text[: len(self._text) - _overlap(self._text)].rstrip()
        self._text = self._text[len(sure) :]
        self._said = self._said or bool(sure)
        return sure

    def _rest(self) -> str:
        rest, self._text = self._text, ""
        return rest


def _overlap(text: str) -> int:
    """How many characters at the end may be the beginning of the mark that ends a thought."""
    return next((n for n in range(min(len(text), len(ANSWER) - 1), 0, -1) if text.endswith(ANSWER[:n])), 0)
