"""`reflex serve python:module:function` and `reflex serve FILE.onnx`: your own function or model over HTTP."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from reflex_runtime.cli import serving
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe import logs
from reflex_runtime.settings import FunctionsConfig, ServeConfig
from reflex_runtime.settings.declare import check_needs
from reflex_runtime.web.replicas import devices_of
from reflex_runtime.web.supervisor import die_with

LOOK_EVERY: Final = 0.3  # seconds between looks at the files of --reload
_EXAMPLES = """\
examples:
  reflex serve python:my_module:embed           def embed(texts: list[str]) -> list[list[float]]
  reflex serve python:my_module:Classifier      a class with setup(device) and predict(items)
  reflex serve ./detector.onnx                  its inputs and outputs are the types
  reflex serve python:a:one python:b:two        two functions: POST /predict/one and /predict/two

then:
  curl localhost:8000/predict -H 'Content-Type: application/json' -d '"a text"'
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb for functions."""
    what = "Serve functions of your own, or ONNX models, over HTTP. Concurrent requests share calls."
    elsewhere = serving.options_of(ServeConfig, "policies")
    parser = serving.serve_parser(verbs, run, FunctionsConfig, what, _EXAMPLES, elsewhere=elsewhere, anywhere="words")
    parser.add_argument(
        "words", nargs="+", metavar="[NAME=]SOURCE",
        help="python:module:function, python:module:Class, an ONNX file, or a directory with one",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then open the port, then load."""
    config, places = serving.settings(FunctionsConfig, args)
    check_needs(config, places)
    devices = devices_of(config, places)
    plan = partial(_plan, config, args.words)
    if not config.reload:
        return serving.supervised(config, plan, devices)
    if len(devices) > 1:
        raise ConfigError("--reload: works with one process; leave --devices and --replicas out", field="reload")
    return _serve_and_reload(config, plan, devices)


def _plan(config: FunctionsConfig, sources: Sequence[str], changed: Mapping[str, Any]) -> serving.Served:
    """The server of these functions. changed: settings of this process."""
    from reflex_runtime.functions import app
    from reflex_runtime.functions.source import read_functions

    config = replace(config, **changed)
    serving.check_outputs(config)
    serving.check_listener("oip-grpc", config.oip_grpc, config.api_key, "grpc")
    functions = read_functions(sources, config)
    names = [served.name for served in functions]
    joined = ", ".join(names)
    paths = "/predict" if len(names) == 1 else ", ".join(f"/predict/{name}" for name in names)
    notes = [(logging.INFO, served.note) for served in functions if served.note]
    make = partial(app.serving, config, functions)
    return serving.Served(config, make, joined, joined, lambda _: f": POST {paths}", notes=notes)


def _serve_and_reload(config: FunctionsConfig, plan: serving.Plan, devices: Sequence[str]) -> int:
    """Serve, and restart when a Python file changes. If the server fails, wait for the next change."""
    waits = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the kernel keeps no exit status
    signal.pthread_sigmask(signal.SIG_BLOCK, waits)
    with serving.bound(config, plan) as sock:
        while True:
            seen, above = _changes(), os.getpid()
            pid = os.fork()
            if not pid:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, waits)
                die_with(above)
                logs.leave(serving.run_placed(config, plan, devices, [sock]))
            lives = True
            while _changes() == seen:
                signal.setitimer(signal.ITIMER_REAL, LOOK_EVERY)
                number = signal.sigwait(waits)  # Python's sigtimedwait returns garbage after a suspend
                if number in (signal.SIGTERM, signal.SIGINT):
                    if not lives:
                        return 0
                    os.kill(pid, signal.SIGTERM)
                    return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))  # < 0: it had no handler yet
                if number == signal.SIGCHLD and lives and os.waitpid(pid, os.WNOHANG)[0]:
                    lives = False
                    logging.error("--reload: the server has ended; callers wait until a file has changed")
            logging.info("--reload: a file has changed")
            if lives:
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)


def _changes() -> dict[str, float]:
    """The time of the last change of each Python file below the current directory, except in hidden folders."""
    found: dict[str, float] = {}
    for folder, folders, names in os.walk("."):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__", "node_modules"))]
        for name in names:
            if name.endswith(".py"):
                with suppress(OSError):
                    found[os.path.join(folder, name)] = os.stat(os.path.join(folder, name)).st_mtime
    return found
