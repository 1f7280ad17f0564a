"""Token generation: continuous batching over a paged cache, on the same scheduler core as everything else."""

from reflex_runtime.ipc.messages import SamplingParams, TokenOutput
from reflex_runtime.llm.engine.llm_engine import LLMEngine, trace_batches
from reflex_runtime.llm.engine.processor import EngineConfig, LLMProcessor
from reflex_runtime.llm.engine.sequence import RequestOutput

__all__ = [
    "EngineConfig",
    "LLMEngine",
    "LLMProcessor",
    "RequestOutput",
    "SamplingParams",
    "TokenOutput",
    "trace_batches",
]
