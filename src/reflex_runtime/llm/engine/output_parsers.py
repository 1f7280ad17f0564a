"""The parts of an output's text: thoughts, text and calls of tools (`tool_calls.py`), read as it comes.

A reasoning model writes a thought before its answer, between marks. Some templates leave it to the model to begin a
thought, others begin it in the prompt: the output is inside of it then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from reflex_runtime.llm.engine import tool_calls
from reflex_runtime.llm.engine.detokenizer import overlap
from reflex_runtime.llm.engine.tool_calls import ToolCall, ToolParser

THOUGHT, ANSWER = "<think>", "</think>"  # a thought begins, and ends
MARKS: Final = tool_calls.MARKS | {THOUGHT, ANSWER}  # tokens that are text, also where a file has them as special ones


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of what a model thought."""

    text: str


class ThoughtParser:
    """Reads the thought at the beginning of one output's text as it comes. thinking: whether it is inside of one.

    An output that does not begin with a thought is an answer from its first character on.
    """

    def __init__(self, begun: bool, marks: tuple[str, str] = (THOUGHT, ANSWER)) -> None:
        """begun: the prompt began the thought. marks: with which one begins, and ends."""
        self._open, self._close = marks
        # An answer without a thought may begin as one behind it does: of several marks with the last of them.
        self._silent = [self._close[at:] for at, letter in enumerate(self._close) if at and letter in "<["]
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
            return rest.rstrip() if self._said or not self._open.startswith(rest.strip()) else "", ""
        return "", rest if self._state == "before" else ""

    def _begin(self) -> None:
        begun = self._text.lstrip()
        if begun.startswith(self._open):
            self._state, self._text = "inside", begun[len(self._open) :]
        elif mark := next(filter(begun.startswith, self._silent), ""):
            self._state, self._text = "behind", begun[len(mark) :]
        elif not any(mark.startswith(begun) for mark in (self._open, *self._silent)):
            self._state = "answer"

    def _inside(self) -> str:
        if not self._said:  # a model may repeat the mark that the prompt ends with
            begun = self._text.lstrip()
            if not begun or (begun != self._open and self._open.startswith(begun)):
                return ""
            self._text = begun.removeprefix(self._open).lstrip()
        before, closed, after = self._text.partition(self._close)
        if closed:
            self._state, self._text = "behind", after
            return before.rstrip()
        sure = self._text[: len(self._text) - overlap(self._text, self._close)].rstrip()
        self._text = self._text[len(sure) :]
        self._said = self._said or bool(sure)
        return sure

    def _rest(self) -> str:
        rest, self._text = self._text, ""
        return rest


class PartReader:
    """Reads one output's text as it comes: thoughts, text and calls. thinking: whether it is inside of a thought.
    called: calls so far."""

    def __init__(self, thoughts: ThoughtParser | None = None, tools: ToolParser | None = None) -> None:
        self._thoughts, self._tools = thoughts, tools

    @property
    def thinking(self) -> bool:
        return self._thoughts is not None and self._thoughts.thinking

    @property
    def called(self) -> int:
        return 0 if self._tools is None else self._tools.called

    def feed(self, text: str, last: bool) -> list[str | Thought | ToolCall]:
        """What is complete with this text. last: no more comes."""
        found: list[str | Thought | ToolCall] = []
        if self._thoughts is not None:
            thought, text = self._thoughts.feed(text)
            if last:
                more, rest = self._thoughts.end()
                thought, text = thought + more, text + rest
            if thought:
                found.append(Thought(thought))
        if self._tools is None:
            return [*found, text] if text else found
        return found + self._tools.feed(text) + (self._tools.end() if last else [])
