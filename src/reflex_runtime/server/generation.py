"""Token generation under the asyncio driver: requests go in, streams of tokens come out.

The device thread runs steps and knows nothing of readers; a stream is where its tokens wait for one. What is read
slowly is held at the scheduler, alone: its memory here is bounded and its neighbours go on. Everything in this module
happens on the event loop, but for the tokenising of long texts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from reflex_runtime.core.batch import Done
from reflex_runtime.core.errors import Cancelled, ReflexError
from reflex_runtime.core.events import BatchFinished, Event, RequestProgressed
from reflex_runtime.core.request import Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.drivers.batcher import Batcher, Sink
from reflex_runtime.llm.engine import LLMProcessor
from reflex_runtime.llm.sequence import TokenOutput

log = logging.getLogger("reflex.server")

T = TypeVar("T")

UNREAD = 64  # outputs of a stream that may wait for its reader before it is held
PATIENCE = 120.0  # seconds that a held stream may wait for its reader: it has a place and blocks that others want
_CLOSED = "closed before all of it was read"
LONG_TEXT = 2000  # characters; what is longer in all is tokenised beside the loop
MESSAGE = 20  # characters that a message counts for beside its text: a template walks through all of them


class GenerationStream:
    """One request's tokens: an async iterator of `TokenOutput`, the last of which has `finish` set.

    A request that ends otherwise raises its ReflexError here, after what it had said until then. Whoever stops reading
    before the end calls `close`, else the request is held for ever.

    prompt_tokens, cached_tokens: of the prompt, and those of them that the prefix cache had, known once it has begun.
    completion_tokens: so far. ended: whether no more will come; what came may still be unread.
    """

    __slots__ = (
        "_bell",
        "_error",
        "_followers",
        "_held",
        "_outputs",
        "_runtime",
        "_stalls",
        "_ticket",
        "cached_tokens",
        "completion_tokens",
        "ended",
        "prompt_tokens",
    )  # fmt: skip

    def __init__(self, runtime: GenerationRuntime, bell: asyncio.Event, prompt_tokens: int) -> None:
        self._runtime, self._bell = runtime, bell
        self._outputs: deque[TokenOutput] = deque()
        self._ticket: Ticket | None = None  # None before it is submitted, and once nobody cares for it any more
        self._followers: tuple[GenerationStream, ...] = ()
        self._error: ReflexError | None = None
        self._stalls: asyncio.TimerHandle | None = None
        self._held = self.ended = False
        self.prompt_tokens, self.cached_tokens, self.completion_tokens = prompt_tokens, 0, 0

    @property
    def unread(self) -> int:
        """Outputs that wait for the reader."""
        return len(self._outputs)

    @property
    def held(self) -> bool:
        """Whether it makes no tokens until it is read, or until the request it follows has begun."""
        return self._held

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenOutput:
        if not self._outputs and not await self._more():
            raise StopAsyncIteration
        output = self._outputs.popleft()
        if self._held and len(self._outputs) <= self._runtime.unread // 2:
            self._runtime.resume(self)
        return output

    async def read(self) -> list[TokenOutput]:
        """Everything that has come, at least one output; empty at the end."""
        return self.take() if self._outputs or await self._more() else []

    def take(self) -> list[TokenOutput]:
        """Everything that has come, without waiting. Raises the error of a stream that ended with one and is read."""
        if not self._outputs and self._error is not None:
            raise self._error
        outputs = list(self._outputs)
        if outputs:  # one that follows another is held without having said anything
            self._outputs.clear()
            if self._held:
                self._runtime.resume(self)
        return outputs

    def close(self) -> None:
        """Take the request back unless it has ended: its blocks are free at the next step at the latest. Who reads on
        gets no half of an answer for a whole one, but `Cancelled`."""
        ticket, self._ticket = self._ticket, None
        if self._outputs and self._error is None:
            self._error = Cancelled(_CLOSED)
        self._outputs.clear()
        if ticket is not None:
            self._runtime.batcher.cancel(ticket)

    async def _more(self) -> bool:
        """Wait for an output; False at the end."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if self.ended:
                return False
            self._bell.clear()
            await self._bell.wait()
        return True

    # -- the runtime's -------------------------------------------------------------------------------------------------

    def push(self, output: TokenOutput) -> None:
        """A token came."""
        if self._ticket is None:  # closed while it was being made
            return
        self.completion_tokens += 1
        self._outputs.append(output)
        self._bell.set()
        if self._followers:
            self._go_on()
        if not self._held and len(self._outputs) >= self._runtime.unread and not self.ended:
            self._runtime.hold(self)

    def settled(self, ticket: Ticket) -> None:
        """It has ended; called exactly once."""
        assert not self.ended, ticket
        self.ended = True
        self.cached_tokens = ticket.request.payload.cached_tokens or 0
        outcome = ticket.outcome
        if not isinstance(outcome, Done):
            self._error = outcome.error
        elif self._ticket is not None:
            self.push(outcome.value)
        else:  # closed when it was done and nobody had been told
            self._error = Cancelled(_CLOSED)
        self._ticket = None
        if self._stalls is not None:
            self._stalls.cancel()
        self._go_on()
        self._bell.set()

    def _go_on(self) -> None:
        followers, self._followers = self._followers, ()
        for stream in followers:
            self._runtime.resume(stream)


class GenerationRuntime:
    """Generates tokens for the requests of one event loop, on one model.

    processor: taken over; closed with the runtime. watchdog: seconds that a step may take until its callers are told;
    a model that has not come back in twice that time is given up (`on_fatal`, on the loop, once). sinks: see `Batcher`.
    unread: outputs of a stream that may wait for its reader. patience: seconds that a stream is held for a reader that
    takes nothing; then it is taken back. holds: how often a stream was held for its reader.
    """

    events = frozenset({RequestProgressed, BatchFinished})  # as a sink; ends come to each stream's own callback

    def __init__(
        self,
        processor: LLMProcessor,
        *,
        watchdog: float = 60.0,
        sinks: Iterable[Sink] = (),
        on_fatal: Callable[[], None] | None = None,
        unread: int = UNREAD,
        patience: float = PATIENCE,
    ) -> None:
        self.processor, self.unread, self._patience = processor, unread, patience
        # A step that hangs may still write to the cache: nobody else may run on it before that one has come back.
        self.batcher = Batcher(
            {"default": processor}, [processor.group], [self, *sinks], watchdog, on_fatal=self._given_up,
            one_thread=True,
        )  # fmt: skip
        self.holds = 0
        self._watchdog, self._on_fatal = watchdog, on_fatal
        self._streams: dict[Ticket, GenerationStream] = {}
        self._tokenising = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reflex-tokenise")
        self._hung: asyncio.TimerHandle | None = None

    async def start(self, prepare: Callable[[], object] | None = None) -> None:
        """Start the device thread. prepare: see `Batcher.start`."""
        await self.batcher.start(prepare)

    async def close(self, drain: bool = True, timeout: float = 10.0) -> bool:
        """Take nothing more, let what was asked finish within `timeout` seconds, end the rest with an error.

        Every stream has ended when it returns. Returns whether the device thread has, too.
        """
        ended = await self.batcher.close(drain, timeout)
        if self._hung is not None:
            self._hung.cancel()
        self._tokenising.shutdown(wait=False, cancel_futures=True)
        return ended and not self.batcher.device.busy

    # -- requests ------------------------------------------------------------------------------------------------------

    async def encode(self, texts: Seq[str]) -> list[list[int]]:
        """The tokens of each prompt."""
        encode = self.processor.tokenizer.encode
        return await self._tokenised(sum(map(len, texts)), lambda texts: [encode(text) for text in texts], texts)

    async def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation in the model's own form. ConfigError when it has none."""
        length = sum(MESSAGE + len(str(message.get("content", ""))) for message in messages)
        return await self._tokenised(length, self.processor.tokenizer.chat, messages)

    def submit(self, request: Request, bell: asyncio.Event | None = None) -> GenerationStream:
        """Admit a request that `processor.request` made. Raises `Rejected`.

        bell: set whenever there is something to read, for who reads several streams.
        """
        stream = GenerationStream(self, bell or asyncio.Event(), request.payload.num_prompt_tokens)
        stream._ticket = ticket = self.batcher.submit(request, self._settled)
        self._streams[ticket] = stream
        return stream

    def submit_alike(self, requests: Seq[Request], bell: asyncio.Event | None = None) -> list[GenerationStream]:
        """Admit requests with the same prompt: all of them or none.

        The others wait until the first has computed the prompt, and find it in the prefix cache.
        """
        streams: list[GenerationStream] = []
        try:
            for request in requests:
                stream = self.submit(request, bell)
                streams.append(stream)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        first, *others = streams
        pool = self.processor.pool
        if others and pool.prefix_caching and first.prompt_tokens > pool.block_size:
            first._followers = tuple(others)
            self._set_held(others)
        return streams

    @property
    def waiting(self) -> int:
        """Requests that hold no place."""
        return self.batcher.scheduler.queued("default")

    @property
    def running(self) -> int:
        """Requests that hold a place."""
        return self.batcher.scheduler.unsettled("default") - self.waiting

    @property
    def hangs(self) -> bool:
        """Whether a step was given up and has not come back."""
        device = self.batcher.device
        return device.busy and device.running_since is None

    # -- streams -------------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """A sink: hand a token to its stream, and see to a step that was given up."""
        if isinstance(event, RequestProgressed):
            stream = self._streams.get(event.ticket)
            if stream is not None and event.value is not None:  # a chunk of a prompt says nothing
                stream.push(event.value)
        elif isinstance(event, BatchFinished) and event.crashed and self.hangs and self._hung is None:
            loop, count = asyncio.get_running_loop(), self.batcher.device.hung
            self._hung = loop.call_later(self._watchdog, self._still_hangs, count)

    def hold(self, stream: GenerationStream) -> None:
        """Its reader is slow: no more tokens of it, until `resume`."""
        self.holds += 1
        stream._stalls = asyncio.get_running_loop().call_later(self._patience, stream.close)
        self._set_held([stream])

    def resume(self, stream: GenerationStream) -> None:
        """It may go on."""
        stream._held = False
        if stream._stalls is not None:
            stream._stalls.cancel()
            stream._stalls = None
        ticket = stream._ticket
        if ticket is not None and not stream.ended:
            self.batcher.device.input(lambda scheduler, now: scheduler.resume(ticket, now))

    def _set_held(self, streams: Seq[GenerationStream]) -> None:
        tickets = [stream._ticket for stream in streams if stream._ticket is not None]
        for stream in streams:
            stream._held = True

        def hold(scheduler: Scheduler, now: float) -> None:
            for ticket in tickets:
                scheduler.hold(ticket, now)

        self.batcher.device.input(hold)

    def _settled(self, ticket: Ticket) -> None:
        self._streams.pop(ticket).settled(ticket)

    def _still_hangs(self, count: int) -> None:
        """As long again after a step was given up: there is nothing to wait for if it has not come back."""
        self._hung = None
        if self.hangs and self.batcher.device.hung == count:
            log.error("a step has not come back in %g s: the model is given up", 2 * self._watchdog)
            self.batcher.device.input(lambda scheduler, now: scheduler.close(now, drain=False))
            self._given_up()

    def _given_up(self) -> None:
        on_fatal, self._on_fatal = self._on_fatal, None
        if on_fatal is not None:
            on_fatal()

    async def _tokenised(self, length: int, function: Callable[[Any], T], argument: Any) -> T:
        if length <= LONG_TEXT:
            return function(argument)
        return await asyncio.get_running_loop().run_in_executor(self._tokenising, function, argument)


async def merged(
    streams: Seq[GenerationStream], bell: asyncio.Event
) -> AsyncIterator[tuple[int, list[TokenOutput]]]:
    """What the streams say, as (number of the stream, its new outputs). bell: the one they were submitted with.

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
            await bell.wait()
