"""`reflex serve python:module:function` and `reflex serve FILE.onnx`: your own function or model over HTTP."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from reflex_runtime.cli.console import status_of
from reflex_runtime.cli.serve import check_listener
from reflex_runtime.cli.serving import (
    bound,
    check_outputs,
    options_of,
    run_server,
    serve_parser,
    show_settings,
    supervised,
)
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.observe import logs
from reflex_runtime.settings import FunctionsConfig, ServeConfig
from reflex_runtime.settings.read import environment, read
from reflex_runtime.web.access import warn_if_open
from reflex_runtime.web.replicas import devices_of, settings_of
from reflex_runtime.web.supervisor import die_with

if TYPE_CHECKING:
    from reflex_runtime.functions.source import ServedFunction
    from reflex_runtime.web.supervisor import Parent

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
    elsewhere = options_of(ServeConfig, "policies")
    parser = serve_parser(verbs, FunctionsConfig, what, _EXAMPLES, elsewhere=elsewhere, anywhere="sources")
    parser.add_argument(
        "sources", nargs="+", metavar="[NAME=]SOURCE",
        help="python:module:function, python:module:Class, an ONNX file, or a directory with one",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then open the port, then load."""
    logs.begin()
    given = {name: value for name, value in vars(args).items() if name != "sources"}
    config, places = read(FunctionsConfig, "serve", args.config, environment(), given)
    logs.use(config.log_format)
    devices = devices_of(config, places)
    if config.reload and len(devices) > 1:
        raise ConfigError("--reload: is for one process; leave --devices and --replicas out", field="reload")
    serve = partial(_serve, config, args.sources, devices)
    if config.reload:
        return _again_and_again(config, serve)
    return supervised(config, lambda: _checked(config, args.sources), serve, len(devices))


def _serve(
    config: FunctionsConfig,
    sources: Sequence[str],
    devices: Sequence[str],
    sockets: Sequence[socket.socket],
    parent: Parent | None,
) -> int:
    """The server itself: alone, or one of the workers below a supervisor."""
    from reflex_runtime.functions.app import serving

    number = 0 if parent is None else parent.number
    changed, env = settings_of(config, devices, number)
    os.environ.update(env)
    config = replace(config, **changed)
    functions = _checked(config, sources)
    if number == 0:
        show_settings(config, ", ".join(served.name for served in functions))
        warn_if_open(config)
        for served in functions:
            if served.note:
                logging.info("%s", served.note)
    names = [served.name for served in functions]
    return run_server(config, serving(config, functions), sockets, ", ".join(names), partial(_ready, names), parent)


def _again_and_again(config: FunctionsConfig, serve: Callable[[Sequence[socket.socket], None], int]) -> int:
    """Serve, and restart when a Python file changes. A file that cannot be served waits for its next change."""
    waits = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored the kernel keeps no exit status
    signal.pthread_sigmask(signal.SIG_BLOCK, waits)
    with bound(config) as sock:
        while True:
            seen, above = _changes(), os.getpid()
            pid = os.fork()
            if not pid:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, waits)
                die_with(above)
                logs.leave(status_of(lambda: serve([sock], None), ("reflex", "serve")))
            lives = True
            while _changes() == seen:
                signal.setitimer(signal.ITIMER_REAL, LOOK_EVERY)
                number = signal.sigwait(waits)  # Python's sigtimedwait returns garbage after a suspend
                if number in (signal.SIGTERM, signal.SIGINT):
                    if lives:
                        os.kill(pid, signal.SIGTERM)
                        os.waitpid(pid, 0)
                    return 0
                if number == signal.SIGCHLD and lives and os.waitpid(pid, os.WNOHANG)[0]:
                    lives = False
                    logging.error("--reload: the server has ended; callers wait until a file has changed")
            logging.info("--reload: a file has changed")
            if lives:
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)


def _changes() -> dict[str, float]:
    """The time of change of each Python file below the current directory, without hidden folders."""
    found: dict[str, float] = {}
    for folder, folders, names in os.walk("."):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__", "node_modules"))]
        for name in names:
            if name.endswith(".py"):
                with suppress(OSError):
                    found[os.path.join(folder, name)] = os.stat(os.path.join(folder, name)).st_mtime
    return found


def _checked(config: FunctionsConfig, sources: Sequence[str]) -> list[ServedFunction]:
    """The functions to serve. ConfigError for every fault that can be found before one is loaded."""
    from reflex_runtime.functions.source import read_functions

    check_outputs(config)
    check_listener("oip-grpc", config.oip_grpc, config.api_key, "grpc")
    return read_functions(sources, config)


def _ready(names: Sequence[str], server: Any, where: str) -> None:
    paths = "/predict" if len(names) == 1 else ", ".join(f"/predict/{name}" for name in names)
    logging.info("ready on %s: POST %s, pages: %s/dashboard and /docs", where, paths, where)
