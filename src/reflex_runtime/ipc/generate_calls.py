"""The messages of a batch of requests to the runtime, and the outcome of each request by its answer.

Nothing is sent twice once it was written: a runtime that has read a request may be computing it.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any, Protocol

from reflex_runtime.core.batch import Batch, Done, Failed, Outcome
from reflex_runtime.core.errors import ProcessorHung, ReflexError
from reflex_runtime.core.request import Ticket
from reflex_runtime.ipc.batcher_stats import FALLBACK
from reflex_runtime.ipc.frames import INTERNAL_ERROR, OversizeFrame, ProtocolError, Reader, RpcError, raised
from reflex_runtime.ipc.messages import BATCH_GENERATE, GENERATE, BatchResult, GenerateParams, Started
from reflex_runtime.ipc.peer import ConnectionLost, RawAnswer
from reflex_runtime.ipc.registry import StreamHandle

_RESULT, _STARTED = Reader(BatchResult), Reader(Started)
_UNEXPLAINED = RpcError(INTERNAL_ERROR, "the runtime did not start it, and gave no reason")


class RuntimeConnection(Protocol):
    """The connection to a runtime process; `RuntimeClient` is one."""

    @property
    def capabilities(self) -> frozenset[str]: ...

    @property
    def ready(self) -> bool: ...

    def call(self, method: str, params: Any) -> asyncio.Future[RawAnswer]: ...

    def notify(self, method: str, params: Any) -> None: ...

    def flush(self) -> None: ...

    def unavailable(self) -> ReflexError: ...


class Call:
    """One request from `enqueue` to the answer of its message.

    params: until it has settled. answer: for the caller; None once it has settled or was taken back. out: whether it
    was put into a message. refused: whether the runtime answered that it did not start. timer: of its time limit, when
    out.
    """

    __slots__ = ("answer", "handle", "out", "params", "priority", "refused", "ticket", "timer")

    def __init__(self, params: GenerateParams, handle: StreamHandle, answer: asyncio.Future[dict[str, Any]]) -> None:
        self.params, self.handle = params, handle
        self.priority: str = params.priority
        self.answer: asyncio.Future[dict[str, Any]] | None = answer
        self.ticket: Ticket | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.out = self.refused = False


class SentBatch:
    """A batch that was sent. alone: each of its requests is a call of its own. sent: answers that are awaited."""

    __slots__ = ("alone", "batch", "calls", "sent")

    def __init__(self, batch: Batch, alone: bool) -> None:
        self.batch, self.alone = batch, alone
        self.sent: list[asyncio.Future[RawAnswer]] = []
        self.calls: list[Call] = [ticket.request.payload for ticket in batch.grants]

    def fall_back(self, reason: str) -> None:
        """Send each of its requests as a call of its own, although they should share a message."""
        self.batch.notes[FALLBACK] = reason
        self.alone = True

    def forget(self, _: object = None) -> None:
        """Drop its answers."""
        for call in self.sent:
            if not call.cancel() and not call.cancelled():
                call.exception()  # retrieved: asyncio would log it
        self.sent = []  # their errors have this message in their tracebacks: break the reference cycle


class RuntimeMessages:
    """Messages to one runtime and their answers. limit: seconds for an answer.

    errors: messages that failed as a whole, and requests by themselves that never got an answer.
    """

    def __init__(self, client: RuntimeConnection, limit: float) -> None:
        self._client, self._limit = client, limit
        self.errors = 0

    def write(self, message: SentBatch) -> None:
        if not message.alone and BATCH_GENERATE not in self._client.capabilities:  # it was ready when they were queued
            message.fall_back("capability")
        params = [call.params for call in message.calls]
        if message.alone:
            message.sent = [self._client.call(GENERATE, one) for one in params]
        else:
            message.sent = [self._client.call(BATCH_GENERATE, {"requests": params})]

    async def read(self, message: SentBatch) -> list[Outcome]:
        """The outcome of each of its requests. Raises the error of the whole message."""
        try:
            async with asyncio.timeout(self._limit):
                return await (self._each(message) if message.alone else self._all(message))
        except TimeoutError:
            self.errors += 1
            raise ProcessorHung(f"the runtime did not answer within {1000.0 * self._limit:g} ms") from None
        except ConnectionLost as lost:
            self.errors += 1
            raise self._unheard(lost) from None
        except ReflexError:
            self.errors += 1
            raise

    async def _all(self, message: SentBatch) -> list[Outcome]:
        try:
            answer = await message.sent[0]
        except OversizeFrame:  # nothing was written; each by itself may fit
            if len(message.calls) == 1:
                raise
            message.fall_back("oversize")
            self.write(message)
            return await self._each(message)
        results = _RESULT.read(answer.raw, answer.codec).results
        if len(results) != len(message.calls):
            raise ProtocolError(f"the runtime answered {len(results)} requests of {len(message.calls)}", INTERNAL_ERROR)
        return [
            _outcome(call, item.result if item.success else item.error or _UNEXPLAINED)
            for call, item in zip(message.calls, results, strict=True)
        ]

    async def _each(self, message: SentBatch) -> list[Outcome]:
        answers = await asyncio.gather(*message.sent, return_exceptions=True)
        return [self._one(call, answer) for call, answer in zip(message.calls, answers, strict=True)]

    def _one(self, call: Call, answer: RawAnswer | BaseException) -> Outcome:
        """The outcome of a request that went by itself."""
        if isinstance(answer, ConnectionLost):
            self.errors += 1
            return Failed(self._unheard(answer))
        if isinstance(answer, BaseException):
            call.refused = True
            return Failed(answer)
        try:
            return _outcome(call, _STARTED.read(answer.raw, answer.codec))
        except ProtocolError as error:
            return Failed(copy.copy(error))

    def _unheard(self, lost: ConnectionLost) -> ReflexError:
        """The error for its callers: a retry is safe where nothing was written."""
        return lost if lost.written else self._client.unavailable()


def _outcome(call: Call, said: Started | RpcError | None) -> Outcome:
    """The outcome of one request."""
    if isinstance(said, RpcError):
        call.refused = True
        return Failed(raised(said))
    if said is None or said.stream_id != call.handle.id:
        other = "nothing" if said is None else f"stream {said.stream_id!r:.220}"
        return Failed(ProtocolError(f"the answer to stream {call.handle.id!r} is about {other}"))
    return Done({"stream_id": said.stream_id, "prompt_tokens": said.prompt_tokens})
