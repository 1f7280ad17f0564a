"""Robot policies: a source becomes a processor that answers requests with chunks of actions.

Public names, and how a server uses them:

    spec    = read_source("path/to/export")                      its inputs and outputs; ConfigError names file and key
    policy  = load_policy(spec, slot="prod", cache_bytes=…)      MonolithicPolicy or DecomposedPolicy
    served  = served_by(policy, guard=…, faults=…, latency=…)    the Processor for the driver: policy, faults, guard

    GroupConfig(name=policy.slot, cost=policy.cost_model)        the scheduler's group of this slot
    policy.warm_up((1, 2, 4)).teach(scheduler.cost_model(slot))  on the device, before serving

    observation = policy.prepare(images=…, instruction=…, state=…, episode_id=…, request_id=…)
                                                                 in a worker thread; InvalidRequest names the field
    request = policy.request(observation, client=…, time_limit=…)          on the event loop: a core Request to submit
    chunk: ActionChunk = the value of its Done                             actions, denoising_steps, cache, guard

The layers under them: `sources` (files → a `PolicySpec` and its model: ONNX graphs, PyTorch or anything else), and in
`policy`: `observation` (input and output), `base` (both kinds of policies), `decomposed` (policies with denoise steps),
`episodes` (chunks and prefixes kept between requests), `processors` (guard and faults around a policy).
"""

from __future__ import annotations

from reflex_runtime.robots.policy.base import MonolithicPolicy, Policy, PolicySource, StagedModel, WholeModel
from reflex_runtime.robots.policy.decomposed import DecomposedPolicy
from reflex_runtime.robots.policy.observation import ActionChunk, Observation
from reflex_runtime.robots.policy.processors import served_by
from reflex_runtime.robots.policy.spec import DeviceOptions, Embodiment, PolicySpec
from reflex_runtime.robots.policy.tokenizer import PromptTemplate, WordTokenizer
from reflex_runtime.robots.policy.units import Norm
from reflex_runtime.robots.sources.export_directory import Export
from reflex_runtime.robots.sources.load import load_policy, read_source
from reflex_runtime.web.errors import InvalidRequest

__all__ = [
    "ActionChunk", "DecomposedPolicy", "DeviceOptions", "Embodiment", "Export", "InvalidRequest", "MonolithicPolicy",
    "Norm", "Observation", "Policy", "PolicySource", "PolicySpec", "PromptTemplate", "StagedModel", "WholeModel",
    "WordTokenizer", "load_policy", "read_source", "served_by",
]  # fmt: skip
