"""The engine of a runtime process: `LocalModel` behind the methods of `ipc.worker`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc import messages as wire
from reflex_runtime.ipc.engine import Engine, Load
from reflex_runtime.llm.engine.tokenizer import Conversation, Tokenizer
from reflex_runtime.llm.runners.runner import Runner
from reflex_runtime.llm.server.local_model import GenerationStream, LocalModel, opened
from reflex_runtime.llm.server.model_host import ModelPlan, Opening
from reflex_runtime.observe.live import LiveSnapshot, OnDemandLive
from reflex_runtime.observe.spans import Spans, StepSpans, spans_of
from reflex_runtime.run.process import freeze_loaded, in_thread
from reflex_runtime.settings import LLMServeConfig
from reflex_runtime.settings.declare import convert, hints_of

Make = Callable[[Path, LLMServeConfig], tuple[Runner, Tokenizer]]


class WorkerEngine(Engine):
    """The model of a runtime process."""

    def __init__(self, model: LocalModel, registry: CollectorRegistry, spans: Spans | None = None) -> None:
        """spans: of its steps; closed with the engine."""
        self._model, self._registry, self._spans = model, registry, spans
        self._live = OnDemandLive(model.batcher.add_sink, model.batcher.remove_sink, self._told)
        if spans is not None:
            model.batcher.add_sink(spans)

    def info(self) -> dict[str, Any]:
        """The limits, by which a front checks requests, and the runner's name."""
        return asdict(self._model.limits) | {"runner": self._model.processor.runner.name}

    def state(self) -> dict[str, Any]:
        """As /health of a server without workers."""
        return {"state": self._model.state} | self._model.health()

    def metrics(self) -> str:
        """Prometheus text."""
        self._model.refresh()
        return generate_latest(self._registry).decode()

    def live(self) -> LiveSnapshot:
        """See `Engine.live`."""
        return self._live.snapshot()

    def _told(self) -> dict[str, Any]:
        return {"queues": self._model.queues()} | self._model.health()  # the first has events delivered

    async def tokenize(self, params: wire.Tokenize) -> list[int]:
        """A text, or a conversation in the model's own form."""
        texts = self._model.texts
        if params.text is not None:
            return (await texts.encode([params.text]))[0]
        return await texts.encode_chat(Conversation(params.messages or [], params.tools, params.template_kwargs))

    async def submit(
        self, params: wire.GenerateParams, bell: asyncio.Event, leader: GenerationStream | None
    ) -> GenerationStream:
        """Queue a request. leader: a stream with the same prompt: this one waits until that has computed it."""
        model = self._model
        prompt, matcher = await self._prompt(params), await model.compiled(params.constraint)
        _check_scores(params, prompt)
        params = msgspec.structs.replace(params, prompt=None, prompt_token_ids=None, messages=None)  # they are large
        return model.submit(model.request(prompt, params, matcher), bell, leader)

    async def close(self, drain: bool, timeout: float) -> bool:
        """Every stream has ended when it returns; whether the device thread has, too."""
        self._live.close()
        closed = await self._model.close(drain, timeout)
        if self._spans is not None:
            await in_thread(self._spans.close)
        return closed

    async def _prompt(self, params: wire.GenerateParams) -> list[int]:
        given = [p for p in (params.prompt, params.prompt_token_ids, params.messages) if p is not None]
        if len(given) != 1:
            raise ConfigError(f"prompt: give one of prompt, prompt_token_ids and messages, not {len(given)}")
        if params.prompt_token_ids is not None:
            return params.prompt_token_ids
        return await self.tokenize(wire.Tokenize(params.model_id, params.prompt, params.messages))


def _check_scores(params: wire.GenerateParams, prompt: Sequence[int]) -> None:
    """Raises ConfigError where more would be told of the prompt than a front takes."""
    told = 0 if params.prompt_logprobs is None else len(prompt) * (1 + params.prompt_logprobs)
    if told > (most := wire.MOST_SCORES):
        raise ConfigError(f"prompt_logprobs: {told} numbers of the prompt would be told, at most {most} are")


def loading(make: Make, lost: Callable[[], None]) -> Load:
    """The `Load` of a runtime process: `make` loads a model. lost: called on the loop when it is lost for good.

    It raises ConfigError for options that `reflex serve MODEL_DIR` does not have, and for a directory without a model.
    """

    async def load(asked: wire.LoadModel) -> WorkerEngine:
        if not asked.path:
            raise ConfigError("load_model: needs path, the directory of the model")
        plan = ModelPlan(asked.model_id, _config(asked.options), Path(asked.path))
        registry = CollectorRegistry()
        spans = spans_of(plan.config.otel, registry, StepSpans)
        model = await opened(lambda plan: make(plan.directory, plan.config))(Opening(plan, registry, lost))
        freeze_loaded()
        return WorkerEngine(model, registry, spans)

    return load


def _config(options: dict[str, Any]) -> LLMServeConfig:
    hints = hints_of(LLMServeConfig)
    unknown = next((name for name in options if name not in hints), None)
    if unknown is not None:
        raise ConfigError(f"load_model: options.{unknown[:100]}: no such setting")
    return LLMServeConfig(
        **{name: convert(value, hints[name], f"load_model: options.{name}") for name, value in options.items()}
    )
