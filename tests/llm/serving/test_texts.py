"""Where prompts are tokenised: short ones at once, longer ones beside the loop, the longest in another process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from reflex_runtime.llm.engine.tokenizer import LONG_TEXT, VERY_LONG, Texts
from reflex_runtime.llm.engine.toy import ByteTokenizer


class Told(ByteTokenizer):
    """Remembers which lengths were tokenised on the thread of the test, and which beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.here: list[int] = []
        self.beside: list[int] = []
        self._thread = threading.current_thread()

    def encode(self, text: str, most: int | None = None) -> list[int]:
        (self.here if threading.current_thread() is self._thread else self.beside).append(len(text))
        return [len(text)]


@pytest.mark.parametrize("there", [True, False])
def test_every_prompt_is_tokenised_where_it_keeps_nobody_waiting(there: bool) -> None:
    tokenizer = Told()
    asked: list[int] = []

    async def elsewhere(what: str | list[dict[str, Any]]) -> list[int] | None:
        asked.append(len(what))
        return [-len(what)] if there else None

    async def encode(lengths: list[int]) -> list[int]:
        texts = Texts(tokenizer, elsewhere)
        try:
            return [ids[0] for ids in await texts.encode(["x" * n for n in lengths])]
        finally:
            texts.close()

    assert asyncio.run(encode([5, 7])) == [5, 7]
    assert (tokenizer.here, tokenizer.beside) == ([5, 7], [])
    long, several = VERY_LONG + 1, [LONG_TEXT - 1] * 4
    found = asyncio.run(encode([*several[:2], long, *several[2:]]))
    assert found == [*several[:2], -long if there else long, *several[2:]]
    assert tokenizer.here == [5, 7]
    assert tokenizer.beside == [*several, *([] if there else [long])]
    assert asked == [long]
