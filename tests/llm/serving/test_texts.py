"""Where prompts are tokenised: short ones at once, longer ones beside the loop."""

from __future__ import annotations

import asyncio
import threading

from reflex_runtime.llm.engine.tokenizer import LONG_TEXT, Texts
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


def test_every_prompt_is_tokenised_where_it_keeps_nobody_waiting() -> None:
    tokenizer = Told()

    async def encode(lengths: list[int]) -> list[int]:
        texts = Texts(tokenizer)
        try:
            return [ids[0] for ids in await texts.encode(["x" * n for n in lengths])]
        finally:
            texts.close()

    assert asyncio.run(encode([5, 7])) == [5, 7]
    assert (tokenizer.here, tokenizer.beside) == ([5, 7], [])
    several = [LONG_TEXT - 1, LONG_TEXT - 2]  # together they are long
    assert asyncio.run(encode(several)) == several
    assert (tokenizer.here, tokenizer.beside) == ([5, 7], several)
