"""Lets tests of one part use the helpers of another: `from policies.tiny import write_export`.

No test sends telemetry. A failure is shown when it happens, and not only at the end of a run of minutes.
"""

import pytest

from reflex_runtime.processors.quiet import telemetry_off

telemetry_off()

_terminal: list[pytest.TerminalReporter] = []  # of the process that shows what the others found


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
