"""The front's end of one runtime process: its client, and for each model what waits for it there and its streams.

Models wait apart, as in one process: each has its own queue and its own places, so that many requests of one model do
not fill those of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Final

from prometheus_client import CollectorRegistry

from reflex_runtime.config import LLMServeConfig
from reflex_runtime.core.errors import ReflexError
from reflex_runtime.ipc.client import RuntimeClient
from reflex_runtime.ipc.client_config import ClientConfig
from reflex_runtime.ipc.frames import Codec, Notification, ProtocolError, Reader
from reflex_runtime.ipc.generate_batcher import GenerateBatcher
from reflex_runtime.ipc.generate_config import GenerateBatcherConfig
from reflex_runtime.ipc.messages import LOAD, LOAD_MODELS, LoadModel, LoadModels, StreamId
from reflex_runtime.ipc.registry import StreamRegistry
from reflex_runtime.ipc.spawn import Opener
from reflex_runtime.llm.limits import Limits
from reflex_runtime.llm.serving.model_host import ModelPlan, Opening
from reflex_runtime.telemetry.merged_live import added
from reflex_runtime.telemetry.processes import LiveProcess, live_process

ASKED_WITHIN: Final = 2.0  # seconds for an answer for /status or /metrics; a process that takes longer is left out
_ID: Final = Reader(StreamId)


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """count: processes. spawn: starts one, by its number. options: settings of `reflex serve MODEL_DIR` for a model's
    copy in a process, by the number of the process and its restarts. batcher, client: settings of each line."""

    count: int
    spawn: Callable[[int], Opener]
    options: Callable[[LLMServeConfig, int, int], dict[str, Any]]
    batcher: GenerateBatcherConfig = field(default_factory=GenerateBatcherConfig)
    client: ClientConfig = field(default_factory=ClientConfig)


def one_bound(config: LLMServeConfig, batcher: GenerateBatcherConfig) -> tuple[LLMServeConfig, GenerateBatcherConfig]:
    """Bounds of a queue stand in two places; the smaller one holds, and is the one shown everywhere."""
    requests = min(config.max_queue, batcher.max_pending)
    tokens = min(config.max_queued_tokens, batcher.max_pending_tokens)
    return (
        replace(config, max_queue=requests, max_queued_tokens=tokens),
        replace(batcher, max_pending=requests, max_pending_tokens=tokens),
    )


class ModelLane:
    """What waits for one model in one process, and its streams there. limits, about: what the process has answered when
    the model was loaded; None, and empty, before."""

    def __init__(self, client: RuntimeClient, batcher: GenerateBatcherConfig, series: CollectorRegistry) -> None:
        self.limits: Limits | None = None
        self.about: dict[str, Any] = {}
        self.registry = StreamRegistry(batcher.stream_limit)
        self.batcher = GenerateBatcher(client, self.registry, batcher, registry_of_series=series)

    def loaded(self, about: dict[str, Any]) -> None:
        """The process has the model."""
        self.limits = Limits(**{name: about.pop(name) for name in Limits.__dataclass_fields__})
        self.about = about

    @property
    def running(self) -> int:
        """Requests that hold a place."""
        return self.registry.active_count()

    @property
    def waiting(self) -> int:
        """Requests that hold none."""
        return self.registry.unfinished - self.running


class Line:
    """One runtime process with its client. lanes: by the name of their model."""

    def __init__(self, number: int, config: WorkersConfig, opening: Opening) -> None:
        self.name = f"worker-{number}"
        self._plans, self._options, self._number = opening.plans, config.options, number
        self.client = RuntimeClient(
            config.spawn(number), config.client, name=self.name, prepare=self._prepare,
            on_note=self._note, on_lost=self._lost,
        )  # fmt: skip
        self.lanes = {
            plan.name: ModelLane(self.client, one_bound(plan.config, config.batcher)[1], opening.registry)
            for plan in opening.plans
        }
        self._by_prefix = {lane.registry.prefix: lane.registry for lane in self.lanes.values()}
        self._first = next(iter(self._by_prefix.values()))

    @property
    def unfinished(self) -> int:
        """Its requests that have not ended."""
        return sum(lane.registry.unfinished for lane in self.lanes.values())

    @property
    def running(self) -> int:
        """Those that hold a place."""
        return sum(lane.running for lane in self.lanes.values())

    # -- the client's --------------------------------------------------------------------------------------------------

    async def _prepare(self, client: RuntimeClient) -> None:
        """Load the models: after every start of the process."""
        asked = [self._asked(plan, client.restarts) for plan in self._plans]
        if len(asked) == 1:
            self.lanes[asked[0].model_id].loaded(await client.request(LOAD, asked[0], timeout=None))
            return
        answer = await client.request(LOAD_MODELS, LoadModels(asked), dict[str, dict[str, Any]], timeout=None)
        for name, lane in self.lanes.items():
            lane.loaded(answer["models"][name])

    def _asked(self, plan: ModelPlan, restarts: int) -> LoadModel:
        options = self._options(plan.config, self._number, restarts)
        return LoadModel(plan.name, str(plan.directory.resolve()), options, weight=plan.weight)

    def _note(self, note: Notification, codec: Codec) -> None:
        """Hand a notification to the model's registry; what is none's is counted by the first."""
        registry = self._first
        if len(self._by_prefix) > 1:
            try:
                prefix = _ID.read(note.params, codec).stream_id.partition("-")[0]
            except ProtocolError:
                prefix = ""
            registry = self._by_prefix.get(prefix, registry)
        registry.note(note, codec)

    def _lost(self, error: ReflexError) -> None:
        for lane in self.lanes.values():
            lane.registry.lost(error)

    # -- what is asked of it -------------------------------------------------------------------------------------------

    async def ask(self, method: str) -> Any:
        """The result of a call without params; None when the process does not answer."""
        try:
            return await self.client.request(method, {}, timeout=ASKED_WITHIN) if self.client.ready else None
        except ReflexError:
            return None

    def health(self) -> dict[str, Any]:
        client = self.client
        found = {"name": self.name, "state": client.state, "pid": client.pid, "restarts": client.restarts}
        found |= {"running": self.running, "waiting": self.unfinished - self.running}
        return found | ({"last_error": client.last_error} if client.last_error else {})

    def process(self) -> LiveProcess:
        client, running = self.client, self.running
        state, why = client.state, client.last_error or ""
        return live_process(self.name, client.pid, state, client.restarts, running, self.unfinished - running, why)

    def streams(self) -> dict[str, Any]:
        """The snapshots of its registries, added."""
        told: dict[str, Any] = reduce(added, (lane.registry.snapshot() for lane in self.lanes.values()))
        return told

    def generate(self) -> dict[str, Any]:
        """The statistics of its batchers, added, with the partitions of all."""
        each = [lane.batcher.get_stats() for lane in self.lanes.values()]
        told: dict[str, Any] = reduce(added, each)
        return told | {"partitions": [partition for one in each for partition in one["partitions"]]}

    def queue(self) -> dict[str, Any]:
        """What waits for the process, of all models."""
        told: dict[str, Any] = reduce(added, (lane.batcher.queue() for lane in self.lanes.values()))
        return told
