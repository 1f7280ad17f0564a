"""Parts of `reflex serve` for all kinds of sources: which kind it is, sockets and supervisor, settings in force."""

from __future__ import annotations

import argparse
import ast
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reflex_runtime.cli.console import status_of
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import model_directory
from reflex_runtime.observe import files
from reflex_runtime.observe.logs import leave
from reflex_runtime.run.model_files import CHECKPOINT_KEYS, json_keys
from reflex_runtime.settings.declare import add_options, flag, one_line, table

if TYPE_CHECKING:
    from reflex_runtime.web.serve import Make
    from reflex_runtime.web.supervisor import Parent

PYTHON: Final = "python:"
_CLOSING: Final = """
Every option also stands in a TOML file (--config, table [serve]) and in the environment (REFLEX_MAX_QUEUE=64).
Ctrl-C or SIGTERM finishes what was received and leaves; a second Ctrl-C does not wait.
Exit status: 0 after a drain, 1 when the model could not be started or was lost again and again (with --no-supervise:
when it was lost), 2 for a wrong option or directory, 130 after a second Ctrl-C.
"""


def serve_parser(
    verbs: argparse._SubParsersAction[Any],
    config: type[Any],
    description: str,
    examples: str,
    tables: str = "a table [serve]",
    **more: Any,
) -> argparse.ArgumentParser:
    """Add the verb with the options of `config`. tables: what its TOML file may have. more: arguments of `Parser`."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "serve",
        description=description,
        epilog=examples + _CLOSING,
        **more,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"TOML file with {tables}")
    add_options(parser, config)
    return parser


def names_model(args: Sequence[str]) -> bool:
    """Whether a word is the directory of a language model, and none that of a policy."""
    words = [word for word in args if not word.startswith("-")]
    if any(os.path.isfile(os.path.join(word, "reflex_config.json")) for word in words):  # whatever the others are
        return False
    files = [os.path.join(model_directory(word), "config.json") for word in words]
    if any(os.path.isfile(file) for file in files):
        return any(os.path.isfile(file) and not json_keys(Path(file)) >= CHECKPOINT_KEYS for file in files)
    return any(_resembles_model(word) for word in words)


def names_functions(words: Sequence[str]) -> bool:
    """Whether a word is an ONNX file or a Python function of items; `make(device)` makes a policy."""
    words = [word.partition("=")[2] if "=python:" in word else word for word in words if not word.startswith("-")]
    sources = [word for word in words if word.startswith(PYTHON)]
    return any(map(_is_graph, words)) or any(not _makes_policy(source) for source in sources)


def _is_graph(word: str) -> bool:
    """Whether it is an ONNX file, or a directory with one that is no export."""
    if os.path.isdir(word):
        names = os.listdir(word)
        return not {"reflex_config.json", "config.json"} & {*names} and any(name.endswith(".onnx") for name in names)
    return word.endswith(".onnx")


def _makes_policy(source: str) -> bool:
    """Whether it is a factory of policies: a function without arguments, or of a `device`. Reads the source file: an
    import here would load the model's libraries before the server does."""
    module, _, name = source.removeprefix(PYTHON).partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        spec = find_spec(module)
        tree = ast.parse(Path(spec.origin).read_bytes()) if spec is not None and spec.origin else None
    except (ImportError, ValueError, SyntaxError, OSError):
        return False  # the import reports the fault
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and node.name == name:
            names = [argument.arg for argument in node.args.args]
            return not names or names[0] == "device"
    return False


def supervised(
    config: Any,
    check: Callable[[], object],
    serve: Callable[[Sequence[socket.socket], Parent | None], int],
    workers: int = 1,
) -> int:
    """Serve below a supervisor, unless `supervise` is off. check: raises ConfigError for what is served.
    serve: the server itself, with its sockets: the one that all workers share first, then, where there are several, a
    loopback port of each worker's own."""
    from reflex_runtime.web.supervisor import bind, check_tls, supervise

    if config.ssl_certfile:
        check_tls(config.ssl_certfile, config.ssl_keyfile)
    if not config.supervise:
        check()
        with bound(config) as sock:
            return serve([sock], None)
    prefix = ("reflex", "serve")
    with ExitStack() as stack:
        try:
            sockets = [stack.enter_context(bound(config))]
        except ConfigError:
            check()  # its faults come first: another port would not help
            raise
        if workers > 1:
            sockets += [bind("127.0.0.1", 0) for _ in range(workers)]
        watched = getattr(config, "watchdog_s", 0.0)
        return supervise(lambda parent: status_of(lambda: serve(sockets, parent), prefix), workers, watched)


@contextmanager
def bound(config: Any) -> Iterator[socket.socket]:
    """The listening socket of these settings. The file of a Unix socket is removed at the end."""
    from reflex_runtime.web.supervisor import bind

    yield bind(config.host, config.port, config.uds)
    if config.uds:
        with suppress(OSError):
            os.unlink(config.uds)


def run_server(
    config: Any,
    make: Make,
    sockets: Sequence[socket.socket],
    loading: str,
    ready: Callable[[Any, str], None],
    parent: Parent | None,
    warn: bool = True,
) -> int:
    """Serve until a signal, and return the exit status. If a thread still hangs in a model then, leave at once: the
    interpreter could crash at its end.

    loading: names of the models, for the log. ready: logs that the server is ready, given its address. warn: of a hang.
    """
    from reflex_runtime.run.process import loop_factory
    from reflex_runtime.web.serve import serve
    from reflex_runtime.web.supervisor import url_of

    where, *own_urls = [url_of(sock, bool(config.ssl_certfile)) for sock in sockets]
    own = [sockets[0]]
    if parent is not None and own_urls:
        parent.own_urls = own_urls
        own.append(sockets[1 + parent.number])
    for sock in sockets:
        if sock not in own:
            sock.close()

    def settled(served: Any) -> None:
        if served.state == "ready":
            ready(served, where)
        else:
            logging.error("not serving on %s: %s: %s", where, served.state, served.error)

    def listening() -> None:
        if parent is not None and own_urls:
            logging.info("worker %d: its own pages on %s", parent.number, own_urls[parent.number])
        logging.info("listening on %s, loading %s", where, loading)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        status, clean = runner.run(serve(make, own, config, listening, settled, parent))
    if not clean:
        if warn:
            logging.warning("the model is still at work; leaving without it")
        leave(status)
    return status


def _resembles_model(word: str) -> bool:
    """Whether it looks like a language model that cannot be served: the errors of models explain it."""
    if os.path.isfile(word):
        return word.endswith(".gguf")
    names = os.listdir(word) if os.path.isdir(word) else []
    return "adapter_config.json" in names or any(name.endswith(".gguf") for name in names)


def options_of(kind: type[Any], served: str) -> dict[str, str]:
    """A hint for each option, for commands without it. served: the kind of model that has these options."""
    return {flag(field.name): f"; {flag(field.name)} is an option of {served}" for field in fields(kind)}


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


def check_trace(path: str) -> None:
    """ConfigError if --trace cannot be written."""
    if path:
        with files.refused(f"--trace={one_line(path)}"):
            files.check(path)


def check_outputs(config: Any) -> None:
    """ConfigError if a recording, a trace or spans cannot be written."""
    from reflex_runtime.observe.tracing import check_otel

    if config.record:
        with files.refused(f"--record={one_line(config.record)}", "be made"):
            Path(config.record).mkdir(parents=True, exist_ok=True)
    check_trace(config.trace)
    check_otel(config.otel)
