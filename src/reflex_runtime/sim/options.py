"""`reflex simulate`: its options, the load that they describe, and the scheduler of `reflex serve`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.request import Request
from reflex_runtime.core.scheduler import Scheduler
from reflex_runtime.settings import ServeConfig
from reflex_runtime.settings.declare import again, did_you_mean, one_line, option, validate
from reflex_runtime.sim.report import Report
from reflex_runtime.sim.run import Affine, Noisy, simulate
from reflex_runtime.sim.workload import (
    Around,
    Bursty,
    Callers,
    Diurnal,
    Exponential,
    Fixed,
    Heavy,
    Mixture,
    Open,
    Poisson,
    Think,
    WorkloadPart,
)

WARM_UP_S = 2.0  # virtual seconds at the start that the figures leave out; a tenth of a short run


@dataclass(frozen=True, slots=True)
class SimulateConfig:
    """The settings of `reflex simulate`."""

    rate: float = option(200.0, "requests offered per second", (0.001, 100_000, "1/s"), unless="arrivals=closed")
    arrivals: str = option(
        "poisson",
        "pattern of arrivals; closed: callers that wait for their answer, see --callers and --think",
        choices=("poisson", "bursty", "diurnal", "heavy", "closed"),
    )
    callers: int = option(
        0,
        "clients that the requests come from; 0: 8 with --arrivals closed, else a new one for each request",
        (0, 10_000),
    )
    think: str = option(
        "1",
        "ms between an answer and the caller's next request: 5 | exp:5 | around:100,5 | mix:1,300 (drawn each "
        "time) | half:1,300 (half the callers each)",
        metavar="THINK",
        needs="arrivals=closed",
    )
    fixed_ms: float = option(20.0, "what a batch costs before its first request", (0, 60_000, "ms"))
    marginal_ms: float = option(2.0, "what each request adds to its batch", (0.001, 60_000, "ms"))
    noise: float = option(0.05, "relative spread of batch times", (0, 2), metavar="SHARE")
    deadline_ms: float = option(
        100.0, "time limit of every request; 0 is none (then no request is late and none is shed)", (0, 600_000, "ms")
    )
    max_batch_cost_ms: float | None = again(ServeConfig, "max_batch_cost_ms", None)
    batch_timeout_ms: float | None = again(ServeConfig, "batch_timeout_ms", None)
    max_batch_size: int = again(ServeConfig, "max_batch_size", 256, unless="")
    duration_s: float = option(
        60.0, "virtual seconds; the figures leave out the first two, or a tenth", (0.1, 86_400, "s")
    )
    seed: int = option(0, "same seed, same run", (0, 2**31))

    def __post_init__(self) -> None:
        validate(self)


def simulated(config: SimulateConfig) -> Report:
    """The figures of the simulation."""
    serve = ServeConfig(
        max_batch_cost_ms=config.max_batch_cost_ms,
        batch_timeout_ms=config.batch_timeout_ms,
        max_batch_size=config.max_batch_size,
    )
    done = simulate(
        Scheduler([serve.group("default")]),
        _workload(config),
        Noisy(Affine(config.fixed_ms / 1e3, config.marginal_ms / 1e3), config.noise),
        duration=config.duration_s,
        warmup=min(WARM_UP_S, 0.1 * config.duration_s),
        seed=config.seed,
    )
    return Report.of(done)


def _workload(config: SimulateConfig) -> list[WorkloadPart]:
    request = Request(time_limit=config.deadline_ms / 1e3 or None)
    if config.arrivals == "closed":
        callers = _callers(config.think, config.callers or 8)
        return [replace(part, request=request) for part in callers]
    process = {"poisson": Poisson, "bursty": Bursty, "diurnal": Diurnal, "heavy": Heavy}[config.arrivals]
    robots = [replace(request, client=i) for i in range(config.callers)]
    return [Open(process(config.rate), robots or (request,), strangers=not robots)]


def _callers(think: str, count: int) -> list[Callers]:
    """Read --think."""
    kind, colon, numbers = think.partition(":")
    kinds: dict[str, tuple[int, Any]] = {
        "exp": (1, Exponential),
        "around": (2, Around),
        "mix": (2, lambda a, b: Mixture(((0.5, Fixed(a)), (0.5, Fixed(b))))),
        "half": (2, lambda a, b: (Fixed(a), Fixed(b))),
    }
    if not colon:
        kind, numbers, kinds = "", think, {"": (1, Fixed)}
    try:
        values = [float(n.removesuffix("ms")) / 1e3 for n in numbers.split(",")]
        wanted, make = kinds[kind]
        if len(values) != wanted or not all(0.0 <= v <= 3600.0 for v in values):
            raise ValueError
        made: Think | tuple[Think, Think] = make(*values)
    except (KeyError, ValueError):
        forms = "MS, exp:MS, around:MS,MS, mix:MS,MS or half:MS,MS with MS in [0, 3600000]"
        near = did_you_mean(kind, kinds) if kind not in kinds else ""
        raise ConfigError(f"--think={one_line(think)}: must be {forms}{near}") from None
    if not isinstance(made, tuple):
        return [Callers(count, made)]
    first = count // 2
    parts = [(first, made[0], "first"), (count - first, made[1], "second")]
    return [Callers(n, t, name=name) for n, t, name in parts if n]
