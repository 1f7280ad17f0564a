"""Thoughts are told from answers, wherever the text is cut."""

from __future__ import annotations

import pytest

from reflex_runtime.llm.engine.output_parsers import ThoughtParser
from reflex_runtime.llm.engine.tokenizer import in_thought
from reflex_runtime.llm.engine.toy import ByteTokenizer


def read(text: str, begun: bool, size: int) -> tuple[str, str]:
    """What a parser says of a text that comes in pieces of this size."""
    parser, pieces = ThoughtParser(begun), [text[at : at + size] for at in range(0, len(text), size)]
    found = [*map(parser.feed, pieces), parser.end()]
    return "".join(thought for thought, _ in found), "".join(said for _, said in found)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "begun", "thought", "said"),
    [
        ("<think>\nLet me see.\n</think>\n\nFour.", False, "Let me see.", "Four."),
        ("\n <think>a</think>b", False, "a", "b"),
        ("Let me see.\n</think>\n\nFour.\n", True, "Let me see.", "Four.\n"),
        ("<think>\nagain</think>x", True, "again", "x"),
        ("Four. <think>no</think>", False, "", "Four. <think>no</think>"),
        ("  Four.", False, "", "  Four."),
        ("<thin", False, "", "<thin"),
        ("<think>", False, "", ""),
        ("<think>cut o", False, "cut o", ""),
        ("cut </thi", True, "cut </thi", ""),
        ("<think>\n\n</think>\n\nFour.", False, "", "Four."),
        ("a < b </ c </think>yes </think>", True, "a < b </ c", "yes </think>"),
        ("a  \n  b</think>c", True, "a  \n  b", "c"),
        ("", True, "", ""),
        ("a</think>", True, "a", ""),
    ],
)
def test_a_thought_is_told_from_the_answer(text: str, begun: bool, size: int, thought: str, said: str) -> None:
    assert read(text, begun, size) == (thought, said)


def test_a_thought_is_said_as_it_comes() -> None:
    parser = ThoughtParser(begun=False)
    assert [parser.feed(piece) for piece in ("<think>", "One ", "two", " </", "b </think>", "\n", " yes")] == [
        ("", ""), ("One", ""), (" two", ""), ("", ""), (" </b", ""), ("", ""), ("", "yes"),
    ]  # fmt: skip
    assert not parser.thinking
    assert ThoughtParser(begun=True).thinking


def test_a_prompt_may_begin_the_thought() -> None:
    tokenizer = ByteTokenizer()
    for prompt, begun in (("a: <think>\n", True), ("<think>", True), ("<think>\n</think>\n", False), ("think>", False)):
        assert in_thought(tokenizer, tokenizer.encode(prompt)) is begun
