"""Lets tests of one part use the helpers of another: `from robots.tiny import write_export`.

No test sends telemetry, and none asks a server on this machine through the environment's proxy. A failure is shown when
it happens, and not only at the end of a run of minutes.
"""

import contextlib
import gc
import os
import socketserver
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from reflex_runtime.observe import trace_tables
from reflex_runtime.run.process import telemetry_off

telemetry_off()
trace_tables.DPI = 50  # a PNG in a third of the time; what commands draw in processes of their own has the usual size
for _library in ("OMP", "OPENBLAS"):  # as many processes run as there are cores: threads would wait for each other
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
gc.set_threshold(20_000, 5, 20)  # simulations make many objects and hardly a cycle: 8 % of their time
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost,::1"

# What a server of a test prints about a client that left would come into the output of a later test.
socketserver.BaseServer.handle_error = lambda *_: None  # type: ignore[method-assign]

APART = ("demo", "lerobot", "on_ray", "on_vllm")  # what they import is found, or set up, by their `conftest.py`
_module = [""]  # of the test before
_terminal: list[pytest.TerminalReporter] = []  # of the process that shows what the others found


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """No collection of garbage while the tests are imported: it would find none."""
    gc.disable()
    try:
        if not session.config.option.file_or_dir:
            _import_share(session.config)
        return (yield)
    finally:
        gc.enable()


def _import_share(config: pytest.Config) -> None:
    """Each process of several imports a share of the modules first, so that two do not rewrite the assertions of the
    same module at the same time, which takes a third of the time that collecting for the first time takes."""
    worker = getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    if number == 0:
        return  # collecting begins with its share
    here = Path(__file__).parent
    files = sorted(file.relative_to(here) for file in here.rglob("test_*.py") if file.parts[-2] not in APART)
    for file in files[len(files) * number // count : len(files) * (number + 1) // count]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # it is said when the module is collected
            import_module(".".join(file.with_suffix("").parts))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A collection looks only at what the tests of a module have made, and in a test of times at nothing, as in a
    server: all that was imported before them takes 0.15 s each time, and there are hundreds in a run."""
    module = item.nodeid.partition("::")[0]
    if module != _module[0] or item.get_closest_marker("timing") is not None:
        _module[0] = module
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
