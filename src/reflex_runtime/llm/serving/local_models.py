"""Models in this process, of any kind: loaded in a thread of their own, warmed, with their series and their trace.

`reflex serve` has them when it runs without workers, and every runtime process has one behind its connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry

from reflex_runtime.config import LLMServeConfig
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.drivers.in_thread import in_thread
from reflex_runtime.llm.embedding.load import LoadedEncoder
from reflex_runtime.llm.embedding.processor import EmbeddingProcessor, measure
from reflex_runtime.llm.labelled_series import labelled
from reflex_runtime.llm.processor import EngineConfig, LLMProcessor
from reflex_runtime.llm.runner import Runner, Step
from reflex_runtime.llm.series import EngineSeries
from reflex_runtime.llm.serving.embedding_runtime import EmbeddingRuntime
from reflex_runtime.llm.serving.generation import GenerationRuntime
from reflex_runtime.llm.serving.local_host import LocalHost
from reflex_runtime.llm.serving.model_device import GroupProcessor, ModelDevice
from reflex_runtime.llm.serving.model_host import EmbeddingPlan, ModelPlan, Opening
from reflex_runtime.llm.tokenizer import Tokenizer
from reflex_runtime.telemetry.series import Counter

Load = Callable[[ModelPlan], tuple[Runner, Tokenizer]]
LoadEncoder = Callable[[EmbeddingPlan], LoadedEncoder]

T = TypeVar("T")
ALONE = "default"  # the group of a model that is alone


class LocalModel:
    """One language model: its runtime, and its series in `registry`."""

    def __init__(self, runtime: GenerationRuntime, registry: CollectorRegistry) -> None:
        self.runtime = runtime
        self._holds = Counter(
            "reflex_stream_holds_total", "Times a stream was held for its slow reader", (), registry=registry
        ).labels()
        runtime.batcher.add_sink(EngineSeries(runtime.processor, lambda: runtime.waiting, registry))

    def health(self) -> dict[str, Any]:
        """What /health says of it."""
        runtime = self.runtime
        processor, limits = runtime.processor, runtime.limits
        body = {
            "runner": processor.runner.name,
            "max_model_len": limits.max_model_len,
            "running": runtime.running,
            "waiting": runtime.waiting,
            "kv_cache_usage": round(processor.pool.usage, 6),
            "kv_cache_tokens": limits.cache_tokens,
        }
        if processor.config.speculate != "off" or processor.drafted:
            body["speculation"] = {"draft_tokens": processor.drafted, "accepted_tokens": processor.accepted}
        return body

    def refresh(self) -> None:
        """Bring its series up to date."""
        self._holds.value = float(self.runtime.holds)

    def close(self) -> None:
        """Tokenise nothing more."""
        self.runtime.close()


class LocalModels(LocalHost):
    """A `ModelHost` of the models of this process, on one device. Made by `opened`.

    The series of a model that is alone are in the server's registry; those of several have the label `model`.
    """

    def __init__(
        self,
        device: ModelDevice,
        runtimes: Mapping[str, GenerationRuntime],
        opening: Opening,
        encoders: Mapping[str, tuple[EmbeddingProcessor, Tokenizer]] | None = None,
    ) -> None:
        """runtimes, encoders: of the models that generate and of those that make vectors, by name."""
        super().__init__(device, opening.config.trace)
        encoders = encoders or {}
        names = [*runtimes, *encoders]
        own = {name: opening.registry if len(names) == 1 else CollectorRegistry() for name in names}
        self._registries = own if len(names) > 1 else {}
        self._generating = {name: LocalModel(runtime, own[name]) for name, runtime in runtimes.items()}
        self._embedding = {
            name: EmbeddingRuntime(processor, tokenizer, device, own[name])
            for name, (processor, tokenizer) in encoders.items()
        }
        self._models: dict[str, LocalModel | EmbeddingRuntime] = {**self._generating, **self._embedding}

    def generator(self, name: str) -> GenerationRuntime:
        """See `ModelHost.generator`."""
        return self._generating[name].runtime

    def embedder(self, name: str) -> EmbeddingRuntime:
        """What makes vectors, of the embedding model of this name."""
        return self._embedding[name]

    def health(self) -> dict[str, Any]:
        """What /health says of the model; of several, what it says of each, and of all together."""
        each = {name: model.health() for name, model in self._models.items()}
        if len(each) == 1:
            (body,) = each.values()
        else:
            told = each.values()
            body = {"models": each} | {name: sum(one[name] for one in told) for name in ("running", "waiting")}
            usages = [one["kv_cache_usage"] for one in told if "kv_cache_usage" in one]
            if usages:
                body["kv_cache_usage"] = max(usages)
        return body | self.of_device()

    def health_of(self, name: str) -> dict[str, Any]:
        """What /health says of one model, and of the device."""
        return self._models[name].health() | self.of_device()

    def refresh(self) -> None:
        """Bring the series up to date."""
        super().refresh()
        for model in self._models.values():
            model.refresh()

    async def metrics(self) -> bytes:
        """See `ServingHost.metrics`."""
        return self.of_each()

    def of_each(self) -> bytes:
        """The series of several models, up to date; those of one are in the server's registry."""
        self.refresh()
        pages = {name: registry.collect() for name, registry in self._registries.items()}
        return labelled("model", pages) if pages else b""

    async def close(self, timeout: float, drain: bool = True) -> bool:
        """See `ServingHost.close`."""
        clean = await super().close(timeout, drain)
        for model in self._models.values():
            model.close()
        return clean


def opened(load: Load, load_encoder: LoadEncoder | None = None) -> Callable[[Opening], Awaitable[LocalModels]]:
    """How to open the models that these make of their plans: one after the other, in a thread of their own.

    load_encoder: of embedding models, where there are any.
    """

    async def open(opening: Opening) -> LocalModels:
        opening.reached("loading")
        several, made = len(opening.plans) + len(opening.embeddings) > 1, list[GroupProcessor]()
        generating, encoders = dict[str, LLMProcessor](), dict[str, LoadedEncoder]()
        embedding = dict[str, tuple[EmbeddingProcessor, Tokenizer]]()
        try:
            for plan in opening.plans:
                generating[plan.name] = await in_thread(partial(_processor, load, plan, several))
                made.append(generating[plan.name])
            for of in opening.embeddings:
                assert load_encoder is not None
                encoders[of.name] = await in_thread(partial(_told, load_encoder, of, several))
            opening.reached("warming")
            for of in opening.embeddings:
                found = encoders[of.name]
                embedder = await in_thread(partial(_embedder, found, of, several))
                embedding[of.name] = embedder, encoders.pop(of.name).tokenizer
                made.append(embedder)
        except BaseException:
            for left in encoders.values():
                left.encoder.close()
            for processor in made:
                processor.stop()
            raise
        device = ModelDevice(made, watchdog=opening.config.watchdog_s, on_fatal=opening.lost)
        runtimes = {name: GenerationRuntime(of, device) for name, of in generating.items()}
        models = LocalModels(device, runtimes, opening, embedding)

        def prepare() -> None:
            for processor in generating.values():
                warm_up(processor.runner)

        try:
            await device.start(prepare)
        except Exception:
            await models.close(0.0, drain=False)
            raise
        return models

    return open


P = TypeVar("P", ModelPlan, EmbeddingPlan)


def _told(load: Callable[[P], T], plan: P, several: bool) -> T:
    """What it loads; of several models an error says which one it is of."""
    try:
        return load(plan)
    except ConfigError as error:
        raise (ConfigError(f"model {plan.name}: {error.message}") if several else error) from None


def _processor(load: Load, plan: ModelPlan, several: bool) -> LLMProcessor:
    runner, tokenizer = _told(load, plan, several)
    return LLMProcessor(runner, tokenizer, engine_config(plan.config), plan.name if several else ALONE, plan.weight)


def _embedder(loaded: LoadedEncoder, plan: EmbeddingPlan, several: bool) -> EmbeddingProcessor:
    """Measures what the model's calls take."""
    config, measured = plan.config, measure(loaded.model, loaded.encoder)
    return EmbeddingProcessor(
        loaded.model, loaded.encoder, measured, max_batch_cost=config.max_batch_cost_ms / 1e3,
        capacity=config.max_queue, max_queued_tokens=config.max_queued_tokens,
        name=plan.name if several else ALONE, weight=plan.weight,
    )  # fmt: skip


def engine_config(config: LLMServeConfig) -> EngineConfig:
    """The engine's part of the settings."""
    return EngineConfig(
        max_gap_ms=config.max_gap_ms,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        speculate=config.speculate,
        enable_prefix_caching=config.prefix_caching,
        max_queue=config.max_queue,
        max_queued_tokens=config.max_queued_tokens,
    )


def warm_up(runner: Runner) -> None:
    """Run steps of a few shapes, so that the first request does not wait for one-off work.

    They write to block 0, whose rows are written again before they are read.
    """
    whole = min(runner.block_size, runner.max_model_len)
    for past, new in ((0, whole - 1), (whole - 1, 1)):
        if new:
            ids, positions = np.zeros(new, np.int64), np.arange(past, past + new, dtype=np.int64)
            begins, table = np.array([0, new], np.int32), np.zeros(1, np.int32)
            runner.forward(Step(ids, positions, np.array([past], np.int32), begins, table, np.array([0, 1], np.int32)))
