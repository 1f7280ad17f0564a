"""The vocabulary: every word of the demo's instructions, numbered from 1 in alphabetical order."""

from __future__ import annotations

from demo.tasks import INSTRUCTIONS

TOKENIZER: dict[str, int] = {
    word: index + 1 for index, word in enumerate(sorted({w for text in INSTRUCTIONS.values() for w in text.split()}))
}


MAX_TOKENS = 8


def tokenize(text: str) -> list[int]:
    """Ids of the words, cut or filled with 0 to MAX_TOKENS. A word it does not know is 0 as well."""
    ids = [TOKENIZER.get(word, 0) for word in text.lower().split()][:MAX_TOKENS]
    return ids + [0] * (MAX_TOKENS - len(ids))
