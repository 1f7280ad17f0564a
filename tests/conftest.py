"""Lets tests of one part use the helpers of another: `from policies.tiny import write_export`.

No test sends telemetry, and none asks a server on this machine through the environment's proxy. A failure is shown when
it happens, and not only at the end of a run of minutes.
"""

import gc
import os
from collections.abc import Iterator

import pytest

from reflex_runtime.processors.quiet import telemetry_off

telemetry_off()
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost,::1"

_terminal: list[pytest.TerminalReporter] = []  # of the process that shows what the others found


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What was imported for the tests is never looked through again: each collection of it takes 0.15 s, and there are
    hundreds in a run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before a test of times all objects are frozen, as a server does."""
    if item.get_closest_marker("timing") is not None:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)  # once there is a reporter
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(reporter, pytest.TerminalReporter) and not hasattr(config, "workerinput"):
        _terminal[:] = [reporter]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and _terminal:
        _terminal[0].write_line("")
        _terminal[0].write_line(f"FAILED {report.nodeid} ({report.when})", red=True)
        _terminal[0].write_line(report.longreprtext)
