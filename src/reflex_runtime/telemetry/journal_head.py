"""The first lines of a journal: the settings of groups, the cost models after warm-up, the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from math import inf
from typing import Any

import msgspec

from reflex_runtime.core.batch import Batch
from reflex_runtime.core.group import GroupConfig
from reflex_runtime.core.request import Ticket
from reflex_runtime.core.time_cost import TimeCost
from reflex_runtime.telemetry.journal import GroupInfo, Warm


def info_of(group: GroupConfig) -> GroupInfo:
    """The units of a group's numbers, and the settings from which a replay builds it again."""
    model, budget = group.cost(), group.flush.max_batch_cost
    return GroupInfo(
        unit=model.unit,
        budget=budget if budget < inf else None,
        max_size=group.flush.max_batch_size,
        flush={name: None if value == inf else value for name, value in asdict(group.flush).items()},
        capacity=group.capacity,
        max_queued_seconds=group.max_queued_seconds if group.max_queued_seconds < inf else None,
        max_in_flight_per_client=group.max_in_flight_per_client,
        weight=group.weight,
        tenant=group.tenant or msgspec.UNSET,
        latest_only=group.latest_only,
        promote_after=group.promote_after,
        planned=group.controller is not None,
        cost=_cost(model) if isinstance(model, TimeCost) else None,
    )


def _cost(model: TimeCost) -> dict[str, Any]:
    found = {"stages": list(model.stages), "affine": model.affine, "sizes": list(model.sizes)}
    if model.sizes:
        found["padded_stages"] = list(model.padded_stages)
    return found


def warmed(slot: str, batches: Iterable[tuple[Batch, float]], finished: Iterable[Ticket]) -> Warm | None:
    """A slot's warm-up: its (batch, seconds) and the tickets that ran to their end; None when it was empty."""
    ran = [(batch.stage, len(batch), elapsed) for batch, elapsed in batches]
    tickets = list(finished)
    if not ran or not tickets:
        return None
    one = tickets[0].request
    return Warm(slot, str(one.shape), str(one.cost_class), one.wants, ran, [t.shared for t in tickets])


def hardware() -> dict[str, Any]:
    """The facts of this machine that decide a model's speed; a server adds its accelerator."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        model = platform.processor()
    return {"system": platform.system(), "machine": platform.machine(), "cpu": model, "cores": os.cpu_count() or 0}
