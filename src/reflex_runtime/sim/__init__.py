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

from reflex_runtime.core.statistics import percentile as percentile
from reflex_runtime.sim.report import Report as Report
from reflex_runtime.sim.report import fair_shares as fair_shares
from reflex_runtime.sim.report import jain as jain
from reflex_runtime.sim.run import Affine as Affine
from reflex_runtime.sim.run import Noisy as Noisy
from reflex_runtime.sim.run import Ran as Ran
from reflex_runtime.sim.run import RequestEnd as RequestEnd
from reflex_runtime.sim.run import Run as Run
from reflex_runtime.sim.run import Service as Service
from reflex_runtime.sim.run import simulate as simulate
from reflex_runtime.sim.workload import Around as Around
from reflex_runtime.sim.workload import Arrival as Arrival
from reflex_runtime.sim.workload import Arrivals as Arrivals
from reflex_runtime.sim.workload import Bursty as Bursty
from reflex_runtime.sim.workload import Callers as Callers
from reflex_runtime.sim.workload import Diurnal as Diurnal
from reflex_runtime.sim.workload import Exponential as Exponential
from reflex_runtime.sim.workload import Fixed as Fixed
from reflex_runtime.sim.workload import Heavy as Heavy
from reflex_runtime.sim.workload import Mixture as Mixture
from reflex_runtime.sim.workload import Open as Open
from reflex_runtime.sim.workload import Poisson as Poisson
from reflex_runtime.sim.workload import RecordedArrivals as RecordedArrivals
from reflex_runtime.sim.workload import RequestStream as RequestStream
from reflex_runtime.sim.workload import Think as Think
from reflex_runtime.sim.workload import WorkloadPart as WorkloadPart
