"""The program of a replica: `python -m reflex_runtime.cli.replica CHANNEL PARENT`, which only a front starts.

Its standard input is the connection to the front, CHANNEL the descriptor on which connections come, and PARENT the
front's process id.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec
from prometheus_client import disable_created_metrics

from reflex_runtime.cli import logs
from reflex_runtime.cli.serve_policies import PolicyAsked, plans_of
from reflex_runtime.drivers.loop import loop_factory
from reflex_runtime.drivers.process_memory import prepare_memory
from reflex_runtime.ipc.worker import inherited
from reflex_runtime.policies.serving.served import PolicyPlan
from reflex_runtime.replicas.inside import serve_replica
from reflex_runtime.replicas.messages import Serve
from reflex_runtime.settings import ServeConfig
from reflex_runtime.web.supervisor import die_with


def planned(told: Serve) -> tuple[ServeConfig, Sequence[PolicyPlan]]:
    """What a front tells, as `reflex serve` would have read it."""
    config = msgspec.convert(told.config, ServeConfig)
    asked = msgspec.convert(told.asked, list[PolicyAsked])
    logs.begin(f"%(asctime)s %(levelname)s {told.name} %(name)s %(message)s")
    logs.use(config.log_format)
    return config, plans_of(config, told.places, asked)


def main(words: Sequence[str]) -> int:
    """Serve until the front says so, or is gone."""
    channel, parent = int(words[0]), int(words[1])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when to end
    disable_created_metrics()  # type: ignore[no-untyped-call]
    prepare_memory()
    control, handed = inherited(), socket.socket(fileno=channel)
    handed.set_inheritable(False)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        status, clean = runner.run(serve_replica(planned, control, handed))
    if not clean:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
