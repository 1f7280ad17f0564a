"""The common part of `reflex serve` for all kinds of sources: which kind it is, settings, sockets and supervisor."""

from __future__ import annotations

import argparse
import ast
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from reflex_runtime.cli.console import status_of
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import model_directory
from reflex_runtime.extras import not_installed
from reflex_runtime.observe import files, logs
from reflex_runtime.run.model_files import CHECKPOINT_KEYS, json_keys
from reflex_runtime.settings import FunctionsConfig, LLMServeConfig, ServeConfig
from reflex_runtime.settings.declare import Places, add_options, flag, one_line, table
from reflex_runtime.settings.read import environment, read
from reflex_runtime.web.access import is_loopback, warn_if_open
from reflex_runtime.web.replicas import settings_of

if TYPE_CHECKING:
    from reflex_runtime.web.serve import Make
    from reflex_runtime.web.supervisor import Parent

C = TypeVar("C", ServeConfig, FunctionsConfig, LLMServeConfig)
PYTHON: Final = "python:"
UNKNOWN: Final = "unknown"
_CLOSING: Final = """
Every option can also be set in a TOML file (--config, table [serve]) and in the environment (REFLEX_MAX_QUEUE=64).
Ctrl-C or SIGTERM finishes what was received and ends the server; a second Ctrl-C does not wait.
Exit status: 0 after a drain, 1 when the model could not be started or was lost again and again (with --no-supervise:
when it was lost), 2 for a wrong option or directory, 130 after a second Ctrl-C.
"""


# -- which kind of source ----------------------------------------------------------------------------------------------


def kind_of(words: Sequence[str]) -> str:
    """What `reflex serve` serves with these words: a "policy", a language "model", or "functions"."""
    kinds = {_kind_of(word) for word in words if not word.startswith("-")}
    if UNKNOWN in kinds:  # the import will report the fault, for either kind: choose one that has these options
        of_policies = options_of(ServeConfig, "").keys() - options_of(FunctionsConfig, "").keys()
        options = {"--" + word.partition("=")[0].removeprefix("--").removeprefix("no-") for word in words}
        kinds.add("policy" if options & of_policies else "functions")
    return next((kind for kind in ("policy", "model", "functions") if kind in kinds), "policy")


def _kind_of(word: str) -> str:
    """The kind of source that a word names, or is most like, so that errors are that kind's; "" if it may be any, and
    UNKNOWN if it is a name in Python that the module's file does not define."""
    if os.path.isfile(os.path.join(word, "reflex_config.json")):
        return "policy"
    if os.path.isfile(config := os.path.join(model_directory(word), "config.json")):
        return "" if json_keys(Path(config)) >= CHECKPOINT_KEYS else "model"
    source = word.partition("=")[2] if "=python:" in word else word
    if source.startswith(PYTHON):
        return _kind_in_python(source)
    names = os.listdir(word) if os.path.isdir(word) else [word]
    if "snapshots" in names and (found := [file.parent for file in Path(word).glob("snapshots/*/*config.json")]):
        raise ConfigError(f"{one_line(word)}: is a cache of Hugging Face; name {max(found, key=os.path.getmtime)}")
    if "adapter_config.json" in names or any(name.endswith(".gguf") and os.path.exists(word) for name in names):
        return "model"
    return "functions" if any(name.endswith(".onnx") for name in names) else ""


def _kind_in_python(source: str) -> str:
    """As `_kind_of`: "" for what may be a factory of policies: it takes nothing, a `device` or DeviceOptions. Reads
    the source file: an import here would load the model's libraries before the server does."""
    module, _, name = source.removeprefix(PYTHON).partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        spec = find_spec(module)
        tree = ast.parse(Path(spec.origin).read_bytes()) if spec is not None and spec.origin else None
    except (ImportError, ValueError, SyntaxError, OSError):
        return UNKNOWN
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first, *_ = [ast.unparse(one) for one in ast.walk(node.args) if isinstance(one, ast.arg)] or ["device"]
            return "" if first.partition(":")[0] == "device" or "DeviceOptions" in first else "functions"
        if isinstance(node, ast.ClassDef) and node.name == name:
            return "functions"
    return UNKNOWN


# -- options and settings ----------------------------------------------------------------------------------------------


def serve_parser(
    verbs: argparse._SubParsersAction[Any],
    run: Callable[[argparse.Namespace], int],
    config: type[Any],
    description: str,
    examples: str,
    tables: str = "a table [serve]",
    **more: Any,
) -> argparse.ArgumentParser:
    """Add the verb with the options of `config`. tables: what its TOML file may have. more: arguments of `Parser`."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "serve", description=description, epilog=examples + _CLOSING, **more
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"TOML file with {tables}")
    add_options(parser, config)
    parser.set_defaults(run=run)
    return parser


def options_of(kind: type[Any], served: str) -> dict[str, str]:
    """A hint for each option of `kind`, for commands that do not have it. served: what is served with these options."""
    return {flag(field.name): f"; {flag(field.name)} is an option of {served}" for field in fields(kind)}


def settings(kind: type[C], args: argparse.Namespace, beside: tuple[str, ...] = ()) -> tuple[C, Places]:
    """The settings from the command line, its file and the environment. Starts the log in the form that they set."""
    logs.begin()
    given = vars(args)
    if given.get("uds") and given.get("port", "0") != "0":
        raise ConfigError(f"--uds={one_line(given['uds'])} and --port={given['port']}: give one of them, not both")
    found = read(kind, "serve", args.config, environment(), given, beside)
    logs.use(found[0].log_format)
    return found


def check_listener(name: str, address: str, key: str, module: str) -> None:
    """Raise ConfigError unless a further listener has a loopback address or a key, and its package is installed."""
    if not address:
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not (key or host == "localhost" or is_loopback(host)):
        raise ConfigError(f"--{name}={address}: needs --api-key, or a loopback address: other machines can reach it")
    if find_spec(module) is None:
        raise not_installed(module, f"--{name}")


def check_outputs(config: Any) -> None:
    """Raise ConfigError if a recording, a trace or spans cannot be written."""
    from reflex_runtime.observe.tracing import check_otel

    if record := getattr(config, "record", ""):
        with files.refused(f"--record={one_line(record)}", "be made"):
            Path(record).mkdir(parents=True, exist_ok=True)
    if config.trace:
        with files.refused(f"--trace={one_line(config.trace)}"):
            files.check(config.trace)
    check_otel(config.otel)


def show_settings(config: Any, name: str, more: Iterable[tuple[str, str]] = ()) -> None:
    """Print the settings that are not defaults, or log all of them in one line of JSON.

    name: of the served models. more: further rows.
    """
    settings = dict(table(config))
    if config.log_format == "json":
        logging.info("reflex serve %s", name, extra={"settings": settings | dict(more)})
        return
    defaults = dict(table(type(config)()))
    changed = {setting: value for setting, value in settings.items() if value != defaults[setting]} | dict(more)
    width = max(map(len, changed), default=0)
    shown = {setting: value if value.isprintable() else repr(value) for setting, value in changed.items()}
    rows = [f" {setting:<{width}}  {value}" for setting, value in shown.items()]
    rest = sum(settings[setting] == default for setting, default in defaults.items())
    rows.append(f" {rest} settings have their defaults, see --help")
    print(f"reflex serve {name}", *rows, sep="\n", file=sys.stderr, flush=True)


# -- the server --------------------------------------------------------------------------------------------------------


class Served(NamedTuple):
    """The server of one process, with its settings. names: of what it serves; loading: names in the log while it loads.
    ready: the end of the log's line when it is ready. rows: further settings in force. notes: for the log."""

    config: ServeConfig | FunctionsConfig | LLMServeConfig
    make: Make
    names: str
    loading: str
    ready: Callable[[Any], str]
    rows: Sequence[tuple[str, str]] = ()
    notes: Sequence[tuple[int, str]] = ()


Plan = Callable[[Mapping[str, Any]], Served]  # argument: changed settings. Raises ConfigError before anything loads


def supervised(config: Any, plan: Plan, devices: Sequence[str] = ("",)) -> int:
    """Serve below a supervisor, unless `supervise` is off; returns the exit status. devices: one for each worker."""
    from reflex_runtime.web.supervisor import bind, supervise

    if not config.supervise:
        served = _placed(config, plan, devices)  # before the port opens, so that its errors come first
        with bound(config, plan) as sock:
            return run_server(served, [sock])
    with bound(config, plan) as sock:
        sockets = [sock]
        if len(devices) > 1:
            sockets += [bind("127.0.0.1", 0) for _ in devices]
        return supervise(partial(run_placed, config, plan, devices, sockets), len(devices), config.watchdog_s)


def run_placed(
    config: Any, plan: Plan, devices: Sequence[str], sockets: Sequence[socket.socket], parent: Parent | None = None
) -> int:
    """Run the server of one worker, and return its exit status."""
    number = 0 if parent is None else parent.number
    return status_of(lambda: run_server(_placed(config, plan, devices, number), sockets, parent), ("reflex", "serve"))


def _placed(config: Any, plan: Plan, devices: Sequence[str], number: int = 0) -> Served:
    """The server of a worker. Sets the environment, so that this process uses the worker's device."""
    changed, env = settings_of(config, devices, number)
    os.environ.update(env)
    return plan(changed)


@contextmanager
def bound(config: Any, plan: Plan) -> Iterator[socket.socket]:
    """The listening socket of these settings. The file of a Unix socket is removed at the end."""
    from reflex_runtime.web.supervisor import bind, check_tls

    if config.ssl_certfile:
        check_tls(config.ssl_certfile, config.ssl_keyfile)
    try:
        sock = bind(config.host, config.port, config.uds)
    except ConfigError:
        plan({})  # its errors are more important: another port would not help
        raise
    with sock:
        yield sock
    if config.uds:
        with suppress(OSError):
            os.unlink(config.uds)


def run_server(served: Served, sockets: Sequence[socket.socket], parent: Parent | None = None) -> int:
    """Serve until a signal, and return the exit status. If a thread then still hangs in a model, end the process at
    once: the interpreter could crash when it ends.

    sockets: first the one that all workers share; then, if they are several, a loopback port for each worker.
    """
    from reflex_runtime.run.process import loop_factory
    from reflex_runtime.web.serve import serve
    from reflex_runtime.web.supervisor import url_of

    number = 0 if parent is None else parent.number
    if number == 0:
        _announce(served)
    where, *own_urls = [url_of(sock, bool(served.config.ssl_certfile)) for sock in sockets]
    own = [sockets[0]]
    if parent is not None and own_urls:
        parent.own_urls = own_urls
        own.append(sockets[1 + number])
    for sock in [other for other in sockets if other not in own]:
        sock.close()

    def settled(host: Any) -> None:
        if host.state == "ready":
            logging.info("ready on %s%s, pages: %s/dashboard and /docs", where, served.ready(host), where)
        else:
            logging.error("not serving on %s: %s: %s", where, host.state, host.error)

    def listening() -> None:
        if own_urls:
            logging.info("worker %d: its own pages on %s", number, own_urls[number])
        logging.info("listening on %s, loading %s", where, served.loading)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        status, clean = runner.run(serve(served.make, own, served.config, listening, settled, parent))
    if not clean:
        logs.leave(status)
    return status


def _announce(served: Served) -> None:
    """Print the settings in force, and warn of risky ones."""
    show_settings(served.config, served.names, served.rows)
    warn_if_open(served.config)
    for level, note in served.notes:
        logging.log(level, "%s", note)
