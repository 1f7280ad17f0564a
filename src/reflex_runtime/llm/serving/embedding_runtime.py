"""An embedding model in this process: its texts are tokenised beside the loop, queued, and waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import Cancelled, ConfigError
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.drivers.batcher import Batcher
from reflex_runtime.drivers.slices import Slices
from reflex_runtime.llm.embedding.directory import EmbeddingModel
from reflex_runtime.llm.embedding.processor import EmbeddingProcessor
from reflex_runtime.llm.embedding.series import EmbeddingSeries
from reflex_runtime.llm.serving.model_device import ModelDevice
from reflex_runtime.llm.serving.requests.texts import Texts
from reflex_runtime.llm.tokenizer import Conversation, Tokenizer
from reflex_runtime.telemetry.trace_context import SpanContext

_PER_TOKEN: Final = 16  # characters of a text that is to be cut, for each token: so much of it is tokenised first
_CUT_WORD: Final = 128  # tokens that the half of a word may have, where the word is one


@dataclass(frozen=True, slots=True)
class TextTokens:
    """A text to embed. span: see `StepSpans`."""

    tokens: Sequence[int]
    span: SpanContext | None = None


class EmbeddingRuntime:
    """One embedding model of this process: its texts are tokenised here, and queued on the device.

    processor: of the model, one of `device`'s.
    """

    def __init__(
        self, processor: EmbeddingProcessor, tokenizer: Tokenizer, device: ModelDevice, registry: CollectorRegistry
    ) -> None:
        self.model, self.tokenizer, self.batcher = processor.model, tokenizer, device.batcher
        self.group, self.queueing = processor.name, asyncio.Lock()
        self._encoder = processor.encoder
        self._texts = Texts(tokenizer)
        empty, brief = tokenizer.encode(""), tokenizer.encode("a")
        self._ending = _common_end(empty, brief)
        series = EmbeddingSeries(self.group, lambda: self.waiting, lambda: self.running, registry)
        device.batcher.add_sink(series)

    @property
    def limits(self) -> EmbeddingModel:
        """What texts are measured against."""
        return self.model

    @property
    def waiting(self) -> int:
        """Texts that are in no batch."""
        return self.batcher.scheduler.queued(self.group)

    @property
    def running(self) -> int:
        """Texts that are being computed."""
        return self.batcher.scheduler.unsettled(self.group) - self.waiting

    def health(self) -> dict[str, Any]:
        """What /health says of it."""
        return {
            "runner": self._encoder.name,
            "max_model_len": self.model.max_model_len,
            "dimensions": self.model.dimensions,
            "running": self.running,
            "waiting": self.waiting,
        }

    def refresh(self) -> None:
        """Its series are up to date."""

    def close(self) -> None:
        """Tokenise nothing more. The device is closed by itself."""
        self._texts.close()

    def request(
        self,
        tokens: Sequence[int],
        *,
        id: str,
        priority: Priority,
        client: str,
        time_limit: float | None,
        span: SpanContext | None = None,
    ) -> Request:
        """The request of one text, for `EmbeddingWait.submit`."""
        return Request(
            TextTokens(tokens, span), id=id, group=self.group, priority=priority, client=client, time_limit=time_limit,
            wants=float(len(tokens)),
        )  # fmt: skip

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """ConfigError: it has no form for conversations."""
        raise ConfigError("messages: this model makes vectors of texts, and has no form of conversations; send prompt")

    async def encode(self, texts: Sequence[str], most: int | None = None) -> list[list[int]]:
        """The tokens of each text, with what the model has before and around every text.

        most: cut longer ones to so many tokens; None: TooLarge for one that surely has more than the model takes.
        """
        return await self._texts.run(sum(map(len, texts)), partial(self._encode, most=most), texts)

    def _encode(self, texts: Sequence[str], most: int | None) -> list[list[int]]:
        model, found = self.model, []
        for text in texts:
            whole = (model.prompt + text).strip()
            whole = whole.lower() if model.lower else whole
            if most is None:
                found.append(self.tokenizer.encode(whole, model.max_model_len))
            else:
                found.append(self.cut(self._beginning(whole, most), most))
        return found

    def _beginning(self, text: str, most: int) -> list[int]:
        """The tokens of the text, or of a beginning of it whose first `most` are those of the text.

        How much of it that takes is not known: a word of any length, or a run of spaces, may be one token, or none.
        """
        enough = most + _CUT_WORD
        end = _PER_TOKEN * enough
        while end < len(text):
            ids = self.tokenizer.encode(text[:end])
            if len(ids) > enough:
                return ids
            end *= 4
        return self.tokenizer.encode(text)

    def cut(self, ids: list[int], most: int) -> list[int]:
        """The first tokens, so that there are at most so many; those that end every text stay at the end."""
        if len(ids) <= most:
            return ids
        ending = ids[len(ids) - self._ending :] if self._ending < most else []
        return ids[: most - len(ending)] + ending


class EmbeddingWait:
    """The texts of one request: queued together, waited for together."""

    def __init__(self, batcher: Batcher[Any]) -> None:
        self._batcher = batcher
        self._tickets: list[Ticket] = []
        self._rows: list[Any] = []
        self._left = 0
        self._done: asyncio.Future[None] | None = None

    async def submit(self, requests: Iterable[Request], count: int) -> None:
        """Queue all of them, or none. Raises `Rejected`, or the error of one that has ended meanwhile.

        requests: so many, made as they are queued. Thousands are queued in slices, and the loop does other work in
        between.
        """
        self._done = asyncio.get_running_loop().create_future()
        self._rows, self._left = [None] * count, count
        slices = Slices()
        try:
            for place, request in enumerate(requests):
                if await slices.next() and self._done.done():  # the caller left, or a text that was queued has failed
                    self._done.result()
                self._tickets.append(self._batcher.submit(request, partial(self._settled, place)))
        except BaseException:
            self.take_back()
            raise

    async def rows(self) -> list[npt.NDArray[np.float32]]:
        """The vector of each. Raises the first error that one of them ends with; the others are then taken back."""
        assert self._done is not None
        try:
            await self._done
        finally:
            self.take_back()
        return self._rows

    def take_back(self) -> None:
        """The answer is not wanted any more: cancel what is not answered."""
        tickets, self._tickets = self._tickets, []
        if self._left:
            for ticket in tickets:
                self._batcher.cancel(ticket)
        if self._done is not None and not self._done.done():
            self._done.set_exception(Cancelled("its caller left"))
            self._done.exception()  # it may be that nothing waits for it

    def _settled(self, place: int, ticket: Ticket) -> None:
        self._left -= 1
        outcome, done = ticket.outcome, self._done
        if isinstance(outcome, Done):
            self._rows[place] = outcome.value
        assert done is not None
        if done.done():
            return
        if not isinstance(outcome, Done):
            done.set_exception(outcome.error)
        elif not self._left:
            done.set_result(None)


def _common_end(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both end with."""
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return count
