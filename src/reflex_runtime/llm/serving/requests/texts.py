"""Tokenises prompts without blocking the event loop: long texts are tokenised in another thread or process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any, TypeVar

from reflex_runtime.ipc.sampling import Constraint
from reflex_runtime.llm.tokenizer import Conversation, Tokenizer

T = TypeVar("T")

LONG_TEXT = 2000  # characters; what is longer in all is tokenised beside the loop
VERY_LONG = 20_000  # what is longer by itself is tokenised in another process, where there is one
MESSAGE = 20  # characters that a message counts for beside its text: a template walks through all of them


Elsewhere = Callable[[str | Conversation], Awaitable[list[int] | None]]


class Texts:
    """Tokenises for one event loop. elsewhere: does it in another process; None from it: not now. most: tokens that a
    prompt can have; one that certainly has more is refused with TooLarge, before all of it is tokenised."""

    def __init__(self, tokenizer: Tokenizer, elsewhere: Elsewhere | None = None, most: int | None = None) -> None:
        self.tokenizer, self.most, self._elsewhere = tokenizer, most, elsewhere
        self._beside = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reflex-tokenise")
        self._forms = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reflex-forms")

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""
        encode = self._encode
        long = VERY_LONG if self._elsewhere is not None else inf
        short = [text for text in texts if len(text) <= long]  # together: many short ones are long, too
        found = iter(await self.run(sum(map(len, short)), lambda texts: [encode(text) for text in texts], short))
        return [next(found) if len(text) <= long else await self._long(len(text), encode, text) for text in texts]

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """The tokens of a conversation in the model's own form. ConfigError when it has none."""
        length = sum(MESSAGE + len(str(part)) for message in conversation.messages for part in message.values())
        length += sum(MESSAGE + len(str(part)) for part in (*conversation.tools, *conversation.more.values()))
        return await self._long(length, self._chat, conversation)

    def _chat(self, conversation: Conversation) -> list[int]:
        return self.tokenizer.chat(conversation, self.most)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, self.most)

    def close(self) -> None:
        """Forget the texts that are still being tokenised."""
        self._beside.shutdown(wait=False, cancel_futures=True)
        self._forms.shutdown(wait=False, cancel_futures=True)

    async def _long(self, length: int, function: Callable[[Any], list[int]], argument: Any) -> list[int]:
        if self._elsewhere is not None and length > VERY_LONG:
            found = await self._elsewhere(argument)
            if found is not None:
                return found
        return await self.run(length, function, argument)

    async def run(self, length: int, function: Callable[[Any], T], argument: Any) -> T:
        """What the function makes of texts of so many characters: in a thread, unless they are brief."""
        if length <= LONG_TEXT:
            return function(argument)
        return await asyncio.get_running_loop().run_in_executor(self._beside, function, argument)

    async def compiled(self, function: Callable[[Constraint], T], constraint: Constraint) -> T:
        """What the function makes of the form of an output, which can take seconds: in a thread for forms alone."""
        return await asyncio.get_running_loop().run_in_executor(self._forms, function, constraint)
