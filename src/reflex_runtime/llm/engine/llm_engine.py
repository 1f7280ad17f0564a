"""The engine for programs: prompts in, outputs out; the caller makes every step.

`LLMEngine` drives the same processor as a server (`processor.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from reflex_runtime.core.batch import BatchScheduled, Event, Failed, RequestSettled
from reflex_runtime.core.errors import ConfigError, ProcessorError, ReflexError
from reflex_runtime.core.request import Priority, Request, Ticket
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.ipc.messages import GenerateParams, SamplingParams
from reflex_runtime.llm.engine.processor import EngineConfig, LLMProcessor, next_id
from reflex_runtime.llm.engine.sequence import RequestOutput, Sequence
from reflex_runtime.llm.engine.tokenizer import Tokenizer
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.llm.runners.runner import Runner
from reflex_runtime.run.device import complete
from reflex_runtime.run.processor import run_batch

_PLAIN = SamplingParams()


def output_of(ticket: Ticket, prompt: str | None = None) -> RequestOutput:
    """The output of a settled ticket. prompt: its text, if it was one."""
    sequence: Sequence = ticket.request.payload
    error = ticket.outcome.error if isinstance(ticket.outcome, Failed) else None
    if error is not None and not isinstance(error, ReflexError):
        error = ProcessorError(f"{type(error).__name__}: {error}")
    return RequestOutput(
        request_id=ticket.id,
        prompt=prompt,
        prompt_token_ids=tuple(sequence.tokens[: sequence.num_prompt_tokens]),
        prompt_logprobs=tuple(sequence.prompt_choices),
        token_ids=sequence.output_ids,
        text=sequence.text,
        finish_reason=error.code if error is not None else str(sequence.finish_reason),
        logprobs=tuple(sequence.choices),
        cached_tokens=sequence.cached_tokens or 0,
        error=error,
    )


class LLMEngine:
    """Generates tokens in the calling thread, one step at a time.

        engine = LLMEngine("path/to/model", max_num_batched_tokens=512)
        for output in engine.generate(["Robots that", "Cameras that"], SamplingParams.greedy(32)):
            print(output.text)

    model: a Hugging Face directory, a `Runner`, or None for the toy. tokenizer: required with a runner other than the
    toy. block_size, num_blocks: of the cache; None is the runner's default. adapters: directories of LoRA adapters of a
    Hugging Face directory, by the names in requests. Further keywords are `EngineConfig`'s. sinks: called with every
    event of the scheduler, in order; their exceptions reach the caller of `step`. scheduler: the core's.
    """

    def __init__(
        self,
        model: Any = None,
        tokenizer: Tokenizer | None = None,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        sinks: Iterable[Callable[[Event], object]] = (),
        clock: Callable[[], float] = time.monotonic,
        **config: Any,
    ) -> None:
        settings = EngineConfig(**config)
        runner, tokenizer = _model(model, tokenizer, block_size, num_blocks, adapters)
        self._plain = _PLAIN
        if model and runner is not model:
            from reflex_runtime.llm.engine.load import sampling_defaults

            self._plain = sampling_defaults(model)
        self.processor = LLMProcessor(runner, tokenizer, settings)
        self.scheduler = Scheduler([self.processor.group])
        self._sinks, self._clock = [self._settled, *sinks], clock
        self._tickets: dict[str, tuple[Ticket, str | None]] = {}
        self._ended: list[RequestOutput] = []
        self.processor.start()

    def add_request(
        self,
        prompt: str | Seq[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: Priority = Priority.DEFAULT,
        client: str = "",
        time_limit: float | None = None,
        adapter: str = "",
        prompt_logprobs: int | None = None,
    ) -> str:
        """Queue a prompt (text or token ids); returns the request's id. Raises `Rejected` for one that may not enter.

        params: None for the defaults of the model's authors. adapter: the name of one of `adapters`, "" for none.
        prompt_logprobs: see `GenerateParams`.
        """
        if request_id in self._tickets:
            raise ConfigError(f"request_id={request_id!r}: is still being generated")
        name = self._free_id() if request_id is None else request_id
        asked = GenerateParams.of(
            params or self._plain, request_id=name, priority=priority.name.lower(), client=client, adapter=adapter,
            timeout_ms=None if time_limit is None else time_limit * 1e3, prompt_logprobs=prompt_logprobs,
        )  # fmt: skip
        request = self.processor.request(prompt, asked)
        self._submit(request, prompt)
        return request.id

    def step(self) -> list[RequestOutput]:
        """Make one step; returns the outputs of requests that ended with it, or since the step before."""
        batch = self.scheduler.next_batch(self._clock())
        self._deliver()
        if batch is not None:
            start = self._clock()
            outcomes = run_batch(self.processor, batch)
            end = self._clock()
            complete(self.scheduler, batch, outcomes, end - start, end)
            self._deliver()
        ended, self._ended = self._ended, []
        return ended

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._tickets)

    def abort(self, request_id: str) -> bool:
        """Cancel a request; its blocks are free when this returns. False if it has already ended."""
        found = self._tickets.get(request_id)
        if found is None:
            return False
        self.scheduler.cancel(found[0], self._clock())
        self._deliver()
        return True

    def generate(
        self, prompts: str | Seq[str | Seq[int]], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Generate for all prompts, or for one text, as many at a time as fit; returns their outputs in order.

        params: one for all, or one each; None for the defaults of the model's authors. The output of a request that
        fails has its `error` set. A request that can never run raises before any is queued.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        params = self._plain if params is None else params
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(f"params: {len(each)} for {len(prompts)} prompts; give one, or one each")
        asked = zip(prompts, each, strict=True)
        requests = [self.processor.request(p, GenerateParams.of(one, request_id=self._free_id())) for p, one in asked]
        todo = list(zip(requests, prompts, strict=True))[::-1]
        found: dict[str, RequestOutput] = {}
        others: list[RequestOutput] = []
        ours = {request.id for request in requests}
        while len(found) < len(requests):
            while todo and self._may_wait(todo[-1][0]):
                self._submit(*todo.pop())
            for output in self.step():
                if output.request_id in ours:
                    found[output.request_id] = output
                else:
                    others.append(output)
        self._ended = others + self._ended
        return [found[request.id] for request in requests]

    def close(self) -> None:
        """End all requests, and free the model."""
        while self.scheduler.close(self._clock(), drain=False):
            pass
        self._deliver()
        self.processor.stop()

    def _deliver(self) -> None:
        """Call the sinks with the events since the last call."""
        for event in self.scheduler.take_events():
            for sink in self._sinks:
                sink(event)

    def _free_id(self) -> str:
        """An id that is not in use."""
        return next(id for id in iter(next_id, None) if id not in self._tickets)

    def _may_wait(self, request: Request) -> bool:
        """Whether the queue has room for the request."""
        config, waiting = self.processor.config, self.scheduler.queued("default")
        if not waiting:
            return True
        units = self.scheduler.queued_units("default") + request.wants
        return waiting < min(config.max_num_seqs, config.max_queue) and units <= config.max_queued_tokens

    def _submit(self, request: Request, prompt: str | Seq[int]) -> None:
        ticket = self.scheduler.submit(request, self._clock())
        self._tickets[request.id] = ticket, prompt if isinstance(prompt, str) else None

    def _settled(self, event: Event) -> None:
        if isinstance(event, RequestSettled):
            _, prompt = self._tickets.pop(event.ticket.id)
            self._ended.append(output_of(event.ticket, prompt))


def _model(
    model: Any,
    tokenizer: Tokenizer | None,
    block_size: int | None,
    num_blocks: int | None,
    adapters: Mapping[str, str | Path] | None,
) -> tuple[Runner, Tokenizer]:
    cache: dict[str, Any] = {"block_size": block_size, "num_blocks": num_blocks}
    given = {name: value for name, value in cache.items() if value is not None}
    if adapters and (model is None or hasattr(model, "forward")):
        raise ConfigError("adapters: only for a Hugging Face directory; give a runner its adapters when you make it")
    if model is None:
        return ToyRunner(**given), tokenizer or ByteTokenizer()
    if isinstance(model, ToyRunner) and tokenizer is None:
        tokenizer = ByteTokenizer()
    if hasattr(model, "forward"):
        if given:
            raise ConfigError(f"{', '.join(given)}: only for a Hugging Face directory; set it when you make the runner")
        if tokenizer is None:
            raise ConfigError("LLMEngine.tokenizer: is missing; a runner needs one")
        return model, tokenizer
    from reflex_runtime.llm.engine.load import load

    directories = {name: Path(directory) for name, directory in (adapters or {}).items()}
    return load(model, block_size=block_size, num_blocks=num_blocks, adapters=directories)


def trace_batches(
    prompts: Seq[str | Seq[int]], max_tokens: int = 4, **engine_kwargs: Any
) -> tuple[list[str], list[dict[str, int]]]:
    """Run all prompts to the end on a new engine, greedy, each for exactly max_tokens.

    Returns the requests' ids, and for each step a mapping from id to the number of tokens that the scheduler granted.
    """
    steps: list[dict[str, int]] = []

    def probe(event: Event) -> None:
        if isinstance(event, BatchScheduled):
            steps.append({ticket.id: int(units) for ticket, units in event.batch.grants.items()})

    engine = LLMEngine(**engine_kwargs, sinks=[probe])
    params = SamplingParams.greedy(max_tokens, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.unfinished:
        engine.step()
    engine.close()
    return ids, steps
