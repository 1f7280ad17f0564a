"""Ray Serve's autoscaling of replicas: on predicted seconds of waiting work, and on how busy the devices are."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from reflex_runtime.cluster.scaling import BACKLOG, BUSY, replicas_for


class BacklogPolicy:
    """An autoscaling policy of Ray Serve. Ray applies the bounds and the delays of its `AutoscalingConfig` to it.

    target_backlog_s: seconds of waiting work that a replica may have.
    """

    def __init__(self, target_backlog_s: float) -> None:
        self._target = target_backlog_s

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        told = ctx.aggregated_metrics or {}
        backlogs, busy = told.get(BACKLOG, {}), told.get(BUSY, {})
        if not backlogs:  # nothing is known yet: a wrong guess would drain replicas that have just started
            return ctx.target_num_replicas, {}
        return replicas_for(backlogs.values(), busy.values(), self._target), {}
