"""Generates with the model in runtime processes: tokenised and measured here, computed there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf

import msgspec

from reflex_runtime.core.errors import Cancelled, ReflexError
from reflex_runtime.ipc.messages import Constraint, GenerateParams, SamplingParams
from reflex_runtime.ipc.registry import StreamHandle
from reflex_runtime.llm.engine.constraint import Matcher, check_constraint
from reflex_runtime.llm.engine.generation_options import GenerationOptions, Limits
from reflex_runtime.llm.engine.tokenizer import Conversation, Texts, Tokenizer
from reflex_runtime.llm.server.worker_line import Line, TokenizerProcess


class RemoteGenerator:
    """The `Generator` of a model of this name. lines: of all processes, each of which has the model."""

    def __init__(self, name: str, lines: Sequence[Line], tokenizer: Tokenizer, tokenizing: TokenizerProcess) -> None:
        self._name, self._lines, self.queueing = name, lines, asyncio.Lock()
        self._texts = Texts(tokenizer, lambda what: tokenizing.tokenize(what, self.limits.max_model_len))
        self._sending: set[asyncio.Task[None]] = set()

    def loaded(self) -> None:
        """The processes have the model."""
        self._texts.most = self.limits.max_model_len

    def close(self) -> None:
        """Tokenise nothing more."""
        self._texts.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The server's own: tokenising here delays no step."""
        return self._texts.tokenizer

    @property
    def limits(self) -> Limits:
        """Those of the model in every process."""
        found = self._lines[0].limits
        assert found is not None, "Workers.start was not awaited"
        return found

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each prompt."""
        return await self._texts.encode(texts)

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """The tokens of a conversation in the model's own form. ConfigError when it has none."""
        return await self._texts.encode_chat(conversation)

    async def compiled(self, constraint: Constraint | None) -> None:
        """See `Generator.compiled`: checked here, compiled in the process that generates."""
        if constraint is not None:
            await self._texts.compiled(check_constraint, constraint)

    def request(
        self, prompt: Sequence[int], params: SamplingParams, options: GenerationOptions, matcher: Matcher | None = None
    ) -> GenerateParams:
        """See `Generator.request`: checked here, so that a request that can never run is not sent."""
        self.limits.check(prompt, params.max_tokens)
        self.limits.check_sampling(params)
        sampling = {name: getattr(params, name) for name in SamplingParams.__struct_fields__}
        ids = prompt if isinstance(prompt, list) else list(prompt)  # not a copy for each choice
        return GenerateParams(
            **sampling, model_id=self._name, adapter=options.adapter, prompt_token_ids=ids,
            priority=options.priority.name.lower(), client=str(options.client), request_id=options.id,
            timeout_ms=None if options.time_limit is None else options.time_limit * 1e3,
            max_gap_ms=None if options.max_gap is None else options.max_gap * 1e3,
            prompt_logprobs=options.prompt_logprobs,
            traceparent="" if options.span is None else options.span.traceparent,
        )  # fmt: skip

    def submit_alike(self, requests: Sequence[GenerateParams], bell: asyncio.Event) -> list[StreamHandle]:
        """See `Generator.submit_alike`. All go to the same process, whose cache then has their prompt."""
        line = self._line()
        handles: list[StreamHandle] = []
        for request in requests:
            handle = line.registry.register(bell=bell)
            follows = handles[0].id if handles else None
            handles.append(handle)
            params = msgspec.structs.replace(request, stream_id=handle.id, follows=follows)
            task = asyncio.create_task(self._send(line, handle, params))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        return handles

    def _line(self) -> Line:
        """The ready process with the fewest unfinished requests."""
        ready = [line for line in self._lines if line.client.ready]
        if not ready:
            raise min((line.client.unavailable() for line in self._lines), key=_soonest)
        return min(ready, key=lambda line: line.unfinished)

    @staticmethod
    async def _send(line: Line, handle: StreamHandle, params: GenerateParams) -> None:
        """Send a request; an error before it begins ends its stream."""
        if handle.closed:  # its reader left before this task began
            return
        try:
            await line.batcher.enqueue(params, params.priority)
        except Cancelled:
            pass  # its reader left
        except ReflexError as error:
            if not handle.ended:
                line.registry.release(handle, error)


def _soonest(error: ReflexError) -> float:
    return inf if error.retry_after is None else error.retry_after
