"""Language models: continuous batching over a paged cache, on the scheduler core.

From the wire to a step a request has three forms: a body of its dialect (`api`), a `GenerationRequest`, which is the
same for all dialects, and for each choice a `Sequence` of the engine. The engine, in this process or in a runtime
process, gets the `GenerateParams` of the `GenerationRequest`.
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
