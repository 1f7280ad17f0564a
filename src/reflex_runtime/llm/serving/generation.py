"""Token generation under the asyncio driver: requests go in, streams of tokens come out.

The device thread runs steps and does not depend on readers: tokens wait in their stream. A stream that is read slowly
is held at the scheduler, and no other: its memory here is bounded. Everything in this module happens on the event loop.
What a server asks of a model is `Generator`; here is the one that runs in its own process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol, TypeVar

from reflex_runtime.core.batch import Done
from reflex_runtime.core.events import Event, RequestProgressed
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.drivers.stream import Bell, Stream
from reflex_runtime.ipc.engine import Output, OutputStream
from reflex_runtime.ipc.sampling import Constraint, SamplingParams
from reflex_runtime.llm.constraint import Matcher
from reflex_runtime.llm.limits import Limits
from reflex_runtime.llm.processor import LLMProcessor
from reflex_runtime.llm.sequence import Sequence, TokenOutput
from reflex_runtime.llm.serving.model_device import ModelDevice
from reflex_runtime.llm.serving.requests.texts import Texts
from reflex_runtime.llm.terms import PLAIN, Terms
from reflex_runtime.llm.tokenizer import Conversation, Tokenizer

R = TypeVar("R")

UNREAD = 64  # outputs of a stream that may wait for its reader before it is held
PATIENCE = 120.0  # seconds that a held stream may wait for its reader: it occupies a place and blocks


class Generator(Protocol[R]):
    """What generates tokens for the requests (R) of one event loop: in this process, or in others. queueing: see
    `in_order`."""

    @property
    def queueing(self) -> asyncio.Lock: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def limits(self) -> Limits: ...

    async def encode(self, texts: Seq[str]) -> list[list[int]]:
        """The tokens of each prompt."""

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """The tokens of a conversation in the model's own form. ConfigError when it has none."""

    async def compiled(self, constraint: Constraint | None) -> Matcher | None:
        """For `request`; None where there is no constraint, or it is compiled elsewhere. ConfigError for one that is
        none."""

    def request(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        terms: Terms,
        matcher: Matcher | None = None,
    ) -> R:
        """A request for `submit_alike`. matcher: what `compiled`
        returned for its constraint. Raises TooLarge, ConfigError."""

    def submit_alike(self, requests: Seq[R], bell: asyncio.Event) -> Seq[OutputStream]:
        """Admit requests with the same prompt, which is computed once: all of them or none. Raises `Rejected`; where
        they are made elsewhere, their streams may end with it. bell: set whenever there is something to read."""


class GenerationStream(Stream[TokenOutput]):
    """A request's tokens in this process: see `OutputStream`. scores: whether its prompt is scored. held: whether it
    makes no tokens until it is read, or until the request it follows has begun."""

    __slots__ = (
        "_followers",
        "_runtime",
        "_stalls",
        "_ticket",
        "cached_tokens",
        "completion_tokens",
        "held",
        "prompt_scores",
        "prompt_tokens",
        "scores",
    )

    def __init__(self, runtime: GenerationRuntime, bell: asyncio.Event | None, sequence: Sequence) -> None:
        super().__init__(bell)
        self._runtime = runtime
        self._ticket: Ticket | None = None  # None before it is submitted, and once it is not wanted
        self._followers: tuple[GenerationStream, ...] = ()
        self._stalls: asyncio.TimerHandle | None = None
        self.held = False
        self.prompt_tokens, self.cached_tokens, self.completion_tokens = sequence.num_prompt_tokens, 0, 0
        self.prompt_scores, self.scores = sequence.prompt_choices, sequence.scores_from is not None

    # -- the runtime's -------------------------------------------------------------------------------------------------

    def said(self, output: TokenOutput) -> None:
        if self._ticket is not None:  # not closed while it was being made
            self.completion_tokens += 1
            self.push([output])

    def settled(self, ticket: Ticket) -> None:
        """It has ended; called exactly once."""
        self.cached_tokens = ticket.request.payload.cached_tokens or 0
        outcome, wanted = ticket.outcome, self._ticket is not None
        self._ticket = None  # first: nothing is held any more
        if isinstance(outcome, Done) and wanted:
            self.completion_tokens += 1
            self.push([outcome.value])
        if self._stalls is not None:
            self._stalls.cancel()
        self._go_on()
        self.end(None if isinstance(outcome, Done) else outcome.error)

    def follow(self, others: Iterable[GenerationStream]) -> None:
        """Hold these streams until this one has its first token, or has ended."""
        self._followers += tuple(others)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _pushed(self, n: int) -> None:
        if self._followers:
            self._go_on()
        if not self.held and self.unread >= self._runtime.unread and self._ticket is not None:
            self._runtime.hold(self)

    def _taken(self, n: int) -> None:
        if self.held and self.unread <= self._runtime.unread // 2:
            self._runtime.resume(self)

    def _left(self) -> None:
        """Its blocks are free at the next step at the latest."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._runtime.batcher.cancel(ticket)

    def _go_on(self) -> None:
        followers, self._followers = self._followers, ()
        for stream in followers:
            self._runtime.resume(stream)


class GenerationRuntime:
    """Generates tokens for the requests of one event loop, on one model.

    processor: of the model, one of `device`'s. unread: outputs of a stream that may wait for its reader. patience:
    seconds that a stream is held for a reader that takes nothing; then it is taken back. holds: how often a stream was
    held for its reader.
    """

    events = frozenset({RequestProgressed})  # as a sink; ends come to each stream's own callback

    def __init__(
        self, processor: LLMProcessor, device: ModelDevice, *, unread: int = UNREAD, patience: float = PATIENCE
    ) -> None:
        self.processor, self.device, self.batcher = processor, device, device.batcher
        self.unread, self._patience = unread, patience
        self.holds = 0
        self.queueing = asyncio.Lock()
        self._streams: dict[Ticket, GenerationStream] = {}
        self._texts = Texts(processor.tokenizer, most=processor.limits.max_model_len)
        self.batcher.add_sink(self)

    def close(self) -> None:
        """Tokenise nothing more. The device is closed by itself."""
        self._texts.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        return self.processor.tokenizer

    @property
    def limits(self) -> Limits:
        """What requests are measured against."""
        return self.processor.limits

    async def encode(self, texts: Seq[str]) -> list[list[int]]:
        """The tokens of each prompt."""
        return await self._texts.encode(texts)

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """The tokens of a conversation in the model's own form. ConfigError when it has none."""
        return await self._texts.encode_chat(conversation)

    async def compiled(self, constraint: Constraint | None) -> Matcher | None:
        """See `Generator.compiled`."""
        if constraint is None:
            return None
        return await self._texts.compiled(self.processor.constraints.compile, constraint)

    def request(
        self, prompt: Seq[int], params: SamplingParams, terms: Terms = PLAIN, matcher: Matcher | None = None
    ) -> Request:
        """A request for `submit`: see `LLMProcessor.request`."""
        return self.processor.request(prompt, params, terms, matcher)

    def submit(
        self, request: Request, bell: asyncio.Event | None = None, first: GenerationStream | None = None
    ) -> GenerationStream:
        """Admit a request that `processor.request` made. Raises `Rejected`.

        bell: set whenever there is something to read, for a reader of several streams. first: one with the same prompt.
        This one waits until that has computed it, and finds it in the prefix cache; where that is asked what the model
        says of the prompt, it is known before this one has a token.
        """
        stream = GenerationStream(self, bell, request.payload)
        waits = first is not None and self._computes(first)
        stream._ticket = ticket = self.batcher.submit(request, self._settled, held=waits)
        self._streams[ticket] = stream
        if first is not None and waits:
            stream.held = True
            first.follow([stream])
        return stream

    def submit_alike(self, requests: Seq[Request], bell: asyncio.Event | None = None) -> list[GenerationStream]:
        """Admit requests with the same prompt: all of them or none. Raises `Rejected`."""
        streams: list[GenerationStream] = []
        try:
            for request in requests:
                streams.append(self.submit(request, bell, streams[0] if streams else None))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    def _computes(self, first: GenerationStream) -> bool:
        """Whether it is to compute its prompt still, and others have something of that."""
        pool = self.processor.pool
        cached = pool.prefix_caching and first.prompt_tokens > pool.block_size
        return not (first.ended or first.completion_tokens) and (cached or first.scores)

    @property
    def waiting(self) -> int:
        """Requests that hold no place."""
        return self.batcher.scheduler.queued(self.processor.name)

    @property
    def running(self) -> int:
        """Requests that hold a place."""
        return self.batcher.scheduler.unsettled(self.processor.name) - self.waiting

    # -- streams -------------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """A sink: hand a token to its stream."""
        if isinstance(event, RequestProgressed) and event.value is not None:  # a chunk of a prompt gives no token
            stream = self._streams.get(event.ticket)
            if stream is not None:  # else it is another model's
                stream.said(event.value)

    def hold(self, stream: GenerationStream) -> None:
        """Its reader is slow: grant it no more tokens until `resume`."""
        self.holds += 1
        stream._stalls = asyncio.get_running_loop().call_later(self._patience, stream.close)
        stream.held = True
        ticket = stream._ticket
        if ticket is not None:
            self.batcher.device.input(lambda scheduler, now: scheduler.hold(ticket, now))

    def resume(self, stream: GenerationStream) -> None:
        stream.held = False
        if stream._stalls is not None:
            stream._stalls.cancel()
            stream._stalls = None
        ticket = stream._ticket
        if ticket is not None and not stream.ended:
            self.batcher.device.input(lambda scheduler, now: scheduler.resume(ticket, now))

    def _settled(self, ticket: Ticket) -> None:
        self._streams.pop(ticket).settled(ticket)


async def merged(
    streams: Seq[OutputStream], bell: Bell, aside: Callable[[], bool] | None = None
) -> AsyncIterator[tuple[int, Seq[Output]]]:
    """What the streams say, as (number of the stream, its new outputs). bell: the one they were submitted with.
    aside: see `Bell`; what it reads is not said here.

    Raises the first error that one of them ends with.
    """
    still = dict(enumerate(streams))
    while still:
        bell.clear()
        for number, stream in list(still.items()):
            ended = stream.ended  # asked first: what comes later rings again
            outputs = stream.take()
            if outputs:
                yield number, outputs
            if ended:
                stream.take()
                del still[number]
        if still:
            await bell.wait_aside(aside)
