"""The settings of `reflex serve` for functions and ONNX models: those of a policy that are of a device and a queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reflex_runtime.core.group import GroupConfig
from reflex_runtime.settings.declare import again, option
from reflex_runtime.settings.policies import ServeConfig, serving_group
from reflex_runtime.settings.server import ServerConfig, check_address


def _same(name: str, group: str = "") -> Any:
    """The option of policies, without what only theirs need. group: its heading, where it begins one."""
    return again(ServeConfig, name, ServeConfig.__dataclass_fields__[name].default, group=group, needs="", unless="")


_SCHEDULED = (
    "max_batch_cost_ms", "batch_timeout_ms", "max_batch_size", "max_queue", "max_queue_s", "max_in_flight_per_client",
    "watchdog_s",
)  # fmt: skip


@dataclass(frozen=True)
class FunctionsConfig(ServerConfig):
    """The settings of `reflex serve python:module:function`."""

    provider: str = _same("provider", "what is served")
    threads: int = _same("threads")
    replicas: int = _same("replicas")
    devices: str = _same("devices")
    weight: tuple[str, ...] = option(
        (), "a function's share of the device's time; 1 by default", metavar="NAME=NUMBER", repeat=True
    )
    reload: bool = option(False, "start again when a Python file in this directory changes")
    oip_grpc: str = _same("oip_grpc", "listening and trust")
    max_concurrent: int = _same("max_concurrent")
    max_batch_cost_ms: float | None = _same("max_batch_cost_ms", "batching")
    batch_timeout_ms: float | None = _same("batch_timeout_ms")
    max_batch_size: int = _same("max_batch_size")
    brief_ms: float = _same("brief_ms")
    deadline_ms: float = _same("deadline_ms", "deadlines and queue")
    max_queue: int = _same("max_queue")
    max_queue_s: float = _same("max_queue_s")
    max_in_flight_per_client: int = _same("max_in_flight_per_client")
    watchdog_s: float = _same("watchdog_s", "faults and the end")
    drain_timeout_s: float = _same("drain_timeout_s")
    trace: str = _same("trace", "recording and trace")
    record: str = _same("record")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address("oip_grpc", self.oip_grpc)

    def group(self, name: str, weight: float, alone: bool) -> GroupConfig:
        """How the scheduler treats a function's requests. alone: whether it is the only one."""
        same = ServeConfig(**{setting: getattr(self, setting) for setting in _SCHEDULED})
        return serving_group(same, name, weight=weight, tenant="" if alone else name)
