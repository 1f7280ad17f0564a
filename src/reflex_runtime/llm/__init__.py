"""Language models: continuous batching over a paged cache, on the scheduler core.

A request has three shapes from the wire to a step: the body of its dialect (`api`), the `GenerationRequest` of all
dialects, and a `Sequence` of the engine for each choice. The `GenerateParams` of a `GenerationRequest` are what the
engine gets, in this process or in a runtime process.
"""

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
