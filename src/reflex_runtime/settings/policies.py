"""The settings of `reflex serve` for policies, and for functions and ONNX models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from reflex_runtime.core.cost import CostModel, TimeCost
from reflex_runtime.core.errors import ConfigError, ProcessorError
from reflex_runtime.core.flush import TIMES_FIXED, FlushPolicy, Planner
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.settings.declare import Places, again, one_line, option, validate
from reflex_runtime.settings.server import ServerConfig, check_address, sizes_of

DEFAULT_POLICY = "default"  # the name of SOURCE; its policy answers requests that name none
MAX_POLICIES = 32
WATCHED = 4.0  # how many times a batch's longest planned time a watchdog must allow
_ZMQ_ADDRESS = r"tcp://(localhost|127(\.[0-9]{1,3}){3}|\[::1\]):(?P<port>[0-9]{1,5})"


@dataclass(frozen=True)
class DeviceConfig(ServerConfig):
    """The settings that servers of policies and of functions share: those of a device, its batches and its queue."""

    provider: str = option("cpu", "cpu, cuda or an ONNX Runtime provider name", group="what is served")
    threads: int = option(1, "threads of the model per call", (1, 256))
    replicas: int = option(1, "worker processes on one port, each with a copy of the model", (1, 64))
    devices: str = option("", "a worker for each device, such as cuda:0,cuda:1", metavar="DEVICES")
    max_concurrent: int = option(
        0, "most HTTP requests in progress; beyond it 429; 0 is off", (0, 1_000_000), group="listening and trust"
    )
    oip_grpc: str = option("", "OIP (Triton, KServe) over gRPC; beyond loopback with --api-key", metavar="HOST:PORT")
    max_batch_cost_ms: float | None = option(
        None,
        "most predicted device time of a batch; by default 100, or sixteen times the model's fixed part if that is "
        "more (twice beside other policies)",
        (10, 10_000, "ms"),
        group="batching",
    )
    batch_timeout_ms: float | None = option(
        None,
        "longest wait of a free device for clients that are due; by default as long as a batch may take; 0: never",
        (0, 1000, "ms"),
    )
    max_batch_size: int = option(256, "most requests in a batch", (1, 4096))
    brief_ms: float = option(0.3, "batches proven to be this brief run on the event loop; 0: none", (0, 5, "ms"))
    deadline_ms: float = option(
        0.0, "time limit of requests without one; 0: none", (0, 600_000, "ms"), group="deadlines and queue"
    )
    max_queue: int = option(1000, "most waiting requests per slot; beyond it 503 queue_full", (1, 100_000))
    max_queue_s: float = option(
        2.0,
        "most predicted device time that waits per slot, without background; beyond it 503 queue_full; 0 is no limit",
        (0, 3600, "s"),
    )
    max_in_flight_per_client: int = option(0, "most unanswered requests per robot; then 429; 0 is off", (0, 100_000))
    watchdog_s: float = option(
        10.0, "give up a batch that runs longer; 0 is off", (0, 3600, "s"), group="faults and the end"
    )
    drain_timeout_s: float = option(10.0, "time to finish queued requests after SIGTERM", (0, 600, "s"))
    trace: str = option("", "write every batch to FILE, for reflex trace", metavar="FILE", group="recording and trace")
    record: str = option("", "write every request and answer to DIR, for reflex replay and report", metavar="DIR")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address("oip_grpc", self.oip_grpc)

    def group(
        self, name: str, cost: Callable[..., CostModel] = TimeCost, weight: float = 1.0, tenant: str = ""
    ) -> GroupConfig:
        """The scheduler's group of a policy or function, for `reflex serve` and for simulations.

        weight, tenant: if there are several.
        """
        budget = None if self.max_batch_cost_ms is None else self.max_batch_cost_ms / 1e3
        hold = inf if self.batch_timeout_ms is None else self.batch_timeout_ms / 1e3
        flush = FlushPolicy.window(budget, hold, self.max_batch_size)
        if budget is None:
            flush = replace(flush, times_fixed=self._times_fixed(alone=not tenant))
        return GroupConfig(
            name=name,
            flush=flush,
            capacity=self.max_queue,
            max_queued_seconds=self.max_queue_s or inf,
            max_in_flight_per_client=self.max_in_flight_per_client,
            weight=weight,
            tenant=tenant,
            cost=cost,
            controller=Planner(),
        )

    def _times_fixed(self, alone: bool) -> float:
        """How many times its fixed time a batch may take; 0: only the budget counts. alone: no other policy waits."""
        if 0.0 < self.watchdog_s < WATCHED * Planner.LONGEST:
            return 0.0
        return TIMES_FIXED if alone else Planner.SHARED


@dataclass(frozen=True)
class ServeConfig(DeviceConfig):
    """The settings of `reflex serve` for a policy."""

    dtype: str = option(
        "stored",
        "number format; by default that of the file",
        choices=("stored", "float32", "bfloat16", "float16"),
        needs="a model in PyTorch",
        group="what is served",
    )
    compile: bool = option(False, "torch.compile; the warm-up takes minutes", needs="a model in PyTorch")
    cuda_graphs: str = option(
        "", "batch sizes to capture as CUDA graphs; without SIZES 1,2,4,8,16,32", metavar="SIZES", bare="1,2,4,8,16,32"
    )
    robot_id: str = option("", "name of this server's robot, for /health")
    default_prompt: str | None = option(
        None, "instruction of requests without one; an empty text is one", needs="a policy that takes an instruction"
    )
    on_bad_action: str = option(
        "error", "if actions are not finite: an error, or the episode's last good one again", choices=("error", "hold")
    )
    policy: tuple[str, ...] = option(
        (), "a further policy: its name and its source", metavar="NAME=SOURCE", repeat=True, group="several policies"
    )
    policy_a: str = option("", "export of slot a, beside that of --policy-b", metavar="DIR", group="two versions")
    policy_b: str = option("", "export of slot b", metavar="DIR")
    split: int = option(50, "percent of the episodes that go to a", (0, 100), needs="policy_b", unless="ramp")
    shadow_policy: str = option("", "export that answers copies of requests in idle time", metavar="DIR")
    shadow_sample: float = option(0.1, "share of requests that the shadow gets", (0, 1), needs="shadow_policy")
    ramp: str = option("", "b's share in percent, by stages, such as 5,20,50,100", metavar="PERCENTS", needs="policy_b")
    ramp_every: str = option("10m", "length of a stage, and of a hot swap's guard", metavar="TIME", needs="ramp|guard")
    guard: str = option("", "limits on a ramp and a hot swap; beyond them roll back", metavar="p99=150ms,error=1%")
    gr00t: str = option(
        "", "GR00T over ZeroMQ, on loopback", metavar="tcp://127.0.0.1:5555", group="listening and trust"
    )
    gr00t_config: str = option("n1.6", "form of get_modality_config", choices=("n1.6", "n1.5"), needs="gr00t")
    lerobot: str = option("", "LeRobot's clients over gRPC; beyond loopback with --api-key", metavar="HOST:PORT")
    max_batch_size: int = again(DeviceConfig, "max_batch_size", 256, unless="deterministic")
    deterministic: int = option(
        0,
        "rows of every call, filled up with copies, so that answers do not depend on what shares the batch; without "
        "ROWS 8; 0: off",
        (0, 256),
        metavar="ROWS",
        bare="8",
        group="batching",
    )
    cost_model: str = option(
        "affine", "prediction of batch time: affine, or the median of time / size", choices=("affine", "median")
    )
    max_batch: int = option(1, "ignored, for old scripts; use --max-batch-cost-ms", (1, 100_000))
    latest_only: bool = option(
        False, "a robot's newer request replaces its waiting one (409 superseded)", group="deadlines and queue"
    )
    slo: str = option("", "latency objective, such as p99=150ms", metavar="pNN=MSms")
    slo_mode: str = option("log_only", "if violated: log it, or answer 503", choices=("log_only", "503"), needs="slo")
    rtc: bool | None = option(
        None, "real-time chunking: a chunk continues the episode's last one", group="chunks and the prefix cache"
    )
    rtc_per_episode: bool = option(False, "allow --rtc with two versions; chunks continue their own", needs="rtc")
    rtc_schedule: str = option(
        "LINEAR", "how the old chunk's weight falls", choices=("ZEROS", "ONES", "LINEAR", "EXP"), needs="rtc"
    )
    rtc_horizon: int = option(10, "actions of a chunk that the last one affects", (1, 1000), needs="rtc")
    adaptive_steps: bool = option(False, "stop denoising when the velocity changes by less than 1 %")
    prefix_cache_mb: float = option(
        256.0, "memory for cached prefixes; 0 is off", (0, 1_000_000, "MB"), needs="a decomposed export"
    )
    prefix_max_age_chunks: int = option(
        0, "chunks for which a cached prefix is used though images changed", (0, 1000), needs="prefix_cache_mb"
    )
    max_consecutive_crashes: int = option(
        5, "crashed batches in a row until it is degraded; 0 is off", (0, 10_000), group="faults and the end"
    )
    probe_cooldown_s: float = option(
        30.0,
        "while degraded, time until a probe; doubled if it crashes too, up to 16 times",
        (0, 480, "s"),
        needs="max_consecutive_crashes",
    )
    record_images: str = option(
        "hash_only",
        "what is recorded of images; a replay of a model that sees them needs full",
        choices=("full", "hash_only", "none"),
        needs="record",
        group="recording and trace",
    )
    record_no_gzip: bool = option(False, "do not compress recordings", needs="record")
    record_max_mb: int = option(
        0, "size of a file until the next; 0 is no limit", (0, 1_000_000, "MiB"), needs="record"
    )
    inject_latency_ms: float = option(0.0, "latency added to every batch", (0, 60_000, "ms"), group="drills")
    inject_fault: tuple[str, ...] = option(
        (), "SLOT:KIND:RATE[:MS], where KIND is raise, nan, hang, slow or die", metavar="FAULT", repeat=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.captured_sizes
        found = re.fullmatch(_ZMQ_ADDRESS, self.gr00t)
        if self.gr00t and (found is None or int(found["port"]) > 65535):
            expected = (
                "tcp://ADDRESS:PORT with a loopback address, because ZeroMQ is not encrypted "
                "(from elsewhere: ssh -L 5555:127.0.0.1:5555 HOST), and a port up to 65535"
            )
            raise ConfigError(f"--gr00t={one_line(self.gr00t)}: must be {expected}", field="gr00t")
        check_address("lerobot", self.lerobot)

    def group(
        self, name: str, cost: Callable[..., CostModel] = TimeCost, weight: float = 1.0, tenant: str = ""
    ) -> GroupConfig:
        found = super().group(name, partial(cost, affine=self.cost_model == "affine"), weight, tenant)
        flush = replace(found.flush, max_batch_size=self.deterministic or self.max_batch_size)
        return replace(found, flush=flush, latest_only=self.latest_only)

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """The batch sizes of `cuda_graphs`."""
        return sizes_of(self.cuda_graphs) if self.cuda_graphs else ()


OWN_SETTINGS = frozenset({
    "provider", "threads", "dtype", "compile", "cuda_graphs", "default_prompt", "on_bad_action",
    "policy_a", "policy_b", "split", "shadow_policy", "shadow_sample",
    "ramp", "ramp_every", "guard",
    "max_batch_cost_ms", "batch_timeout_ms", "max_batch_size", "deterministic", "cost_model",
    "deadline_ms", "max_queue", "max_queue_s", "latest_only", "max_in_flight_per_client", "slo", "slo_mode",
    "rtc", "rtc_per_episode", "rtc_schedule", "rtc_horizon", "adaptive_steps",
    "prefix_cache_mb", "prefix_max_age_chunks", "max_consecutive_crashes", "probe_cooldown_s",
})  # fmt: skip
"""The settings that each of several policies may have of its own, in its table [policies.NAME]."""


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """Options of a table [policies.NAME] in addition to `OWN_SETTINGS`."""

    source: str = option("", "where the policy comes from, as SOURCE")
    weight: float = option(1.0, "share of the device's time against the others", (0.01, 100))

    def __post_init__(self) -> None:
        validate(self, "policy")


@dataclass(frozen=True, slots=True)
class PolicyAsked:
    """One policy of the command line and the file.

    sources: by slot, served ones first. config: with the policy's own settings. places: where these were given. where:
    the prefix of its errors, "" if only SOURCE is served.
    """

    name: str
    sources: Mapping[str, str]
    config: ServeConfig
    places: Places
    weight: float
    where: str

    def named(self) -> AbstractContextManager[None]:
        """Adds `where` to errors from within."""
        return named(self.where)


@contextmanager
def named(where: str) -> Iterator[None]:
    """Puts `where` before errors from within."""
    try:
        yield
    except (ConfigError, ProcessorError) as error:
        raise (type(error)(where + error.message) if where else error) from error.__cause__


@dataclass(frozen=True)
class FunctionsConfig(DeviceConfig):
    """The settings of `reflex serve python:module:function`, and of an ONNX model."""

    weight: tuple[str, ...] = option(
        (), "a function's share of the device's time; 1 by default", metavar="NAME=NUMBER", repeat=True,
        group="what is served",
    )  # fmt: skip
    reload: bool = option(False, "start again when a Python file in this directory changes")
