"""The real scheduler on a jumping clock: tests, tuning, capacity planning and replay.

    from reflex_runtime.core.flush import FlushPolicy
    from reflex_runtime.core.group import GroupConfig
    from reflex_runtime.core.request import Request
    from reflex_runtime.core.scheduler import Scheduler
    from reflex_runtime.sim import Affine, Open, Poisson, Report, simulate

    scheduler = Scheduler([GroupConfig(flush=FlushPolicy.window(max_batch_cost=0.100))])
    load = Open(Poisson(rate=250), [Request(time_limit=0.100)])
    run = simulate(scheduler, load, Affine(fixed=0.020, marginal=0.002), duration=60)
    assert Report.of(run).on_time > 0.95
"""

from reflex_runtime.core.statistics import percentile
from reflex_runtime.sim.report import Report, fair_shares, jain
from reflex_runtime.sim.run import Decider, Ran, RequestEnd, Run, simulate
from reflex_runtime.sim.service import Affine, Drifting, Noisy, Service, Staged, Table
from reflex_runtime.sim.workload import (
    Around,
    Arrival,
    Arrivals,
    Bursty,
    Callers,
    Camera,
    Diurnal,
    Every,
    Exponential,
    Fixed,
    Heavy,
    Mixture,
    Normal,
    Open,
    Poisson,
    RecordedArrivals,
    RequestStream,
    Think,
    WorkloadPart,
)

__all__ = [
    "Affine",
    "Around",
    "Arrival",
    "Arrivals",
    "Bursty",
    "Callers",
    "Camera",
    "Decider",
    "Diurnal",
    "Drifting",
    "Every",
    "Exponential",
    "Fixed",
    "Heavy",
    "Mixture",
    "Noisy",
    "Normal",
    "Open",
    "Poisson",
    "Ran",
    "RecordedArrivals",
    "Report",
    "RequestEnd",
    "RequestStream",
    "Run",
    "Service",
    "Staged",
    "Table",
    "Think",
    "WorkloadPart",
    "fair_shares",
    "jain",
    "percentile",
    "simulate",
]
