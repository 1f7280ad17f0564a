"""What `reflex serve` does for policies and language models alike: tells them apart, shows settings and address."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reflex_runtime.cli.exit_status import status_of
from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.demo.scribe import model_directory
from reflex_runtime.settings.declare import add_options, flag, one_line, table
from reflex_runtime.settings.json_files import CHECKPOINT_KEYS, json_keys
from reflex_runtime.telemetry import files

if TYPE_CHECKING:
    from reflex_runtime.web.form import ErrorForm
    from reflex_runtime.web.serve import Door, Make
    from reflex_runtime.web.supervisor import Parent

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
    """The verb with the options of that configuration. tables: of its file. more: see `Parser`."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "serve",
        description=description,
        epilog=examples + _CLOSING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **more,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"TOML file with {tables}")
    add_options(parser, config)
    return parser


def names_model(args: Sequence[str]) -> bool:
    """Whether one of the words is the directory of a language model, and none that of a policy."""
    words = [word for word in args if not word.startswith("-")]
    if any(os.path.isfile(os.path.join(word, "reflex_config.json")) for word in words):  # whatever the others are
        return False
    files = [os.path.join(model_directory(word), "config.json") for word in words]
    if any(os.path.isfile(file) for file in files):
        return any(os.path.isfile(file) and not json_keys(file) >= CHECKPOINT_KEYS for file in files)
    return any(_resembles_model(word) for word in words)


def supervised(
    config: Any,
    check: Callable[[], object],
    serve: Callable[..., int],
    form: Callable[[], ErrorForm],
) -> int:
    """Serve below a supervisor, unless the settings say otherwise. check: raises what is wrong with what is served.
    serve: the server itself, alone or with the socket and the supervisor. form: makes that of errors meanwhile."""
    if not config.supervise:
        return serve()
    from reflex_runtime.web import listen
    from reflex_runtime.web.supervisor import supervise

    try:
        sock = listen.bind(config.host, config.port)
    except ConfigError:
        check()  # what is wrong besides is said first: another port would not mend it
        raise
    told = ("reflex", "serve")
    return supervise(sock, listen.BACKLOG, lambda parent: status_of(lambda: serve(sock, parent), told), form())


def api_form() -> ErrorForm:
    """Errors in the OpenAI API's form, for the supervisor, which does not import the model."""
    from reflex_runtime.web.errors import api_error
    from reflex_runtime.web.form import ErrorForm, Refusal
    from reflex_runtime.web.json import encode

    def refuse(error: ReflexError, request_id: str, packed: bool) -> Refusal:
        body = encode(api_error(error.message, "server_error", error.code))
        return Refusal(error.http_status, body, headers=[(b"x-should-retry", b"true")])

    return ErrorForm(refuse, keeps_id=True)


def plain_form() -> ErrorForm:
    """Errors in the policies' form, for the supervisor."""
    from reflex_runtime.web.form import PLAIN

    return PLAIN


def run_server(
    config: Any,
    make: Make,
    door: socket.socket | Door,
    address: Any,
    loading: str,
    ready: Callable[[Any, str], None],
    parent: Parent | None,
    warn: bool = True,
) -> int:
    """Serve until a signal; the exit status. loading: what is. ready: logs what is ready, and at which address. Where a
    thread hangs in a model, leave at once, because the interpreter's end may crash; warn: say so."""
    from reflex_runtime.web.serve import serve

    def settled(served: Any) -> None:
        if served.state == "ready":
            ready(served, url(address))
        else:
            logging.error("not serving on %s: %s: %s", url(address), served.state, served.error)

    def listening() -> None:
        logging.info("listening on %s, loading %s", url(address), loading)

    status, clean = serve(make, door, config.drain_timeout_s, listening, settled, parent)
    if not clean:
        if warn:
            logging.warning("the model is still at work; leaving without it")
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)
    return status


def _resembles_model(word: str) -> bool:
    """Whether people take it for a language model: what is wrong with it is said by what serves those."""
    if os.path.isfile(word):
        return word.endswith(".gguf")
    names = os.listdir(word) if os.path.isdir(word) else []
    return "adapter_config.json" in names or any(name.endswith(".gguf") for name in names)


def options_of(kind: type[Any], served: str) -> dict[str, str]:
    """What to say of each option where it is not known. served: what has these options."""
    return {flag(field.name): f"; {flag(field.name)} is an option of {served}" for field in fields(kind)}


def show_settings(config: Any, name: str, more: Iterable[tuple[str, str]] = ()) -> None:
    """The effective configuration: a table of what is not a default, or all of it in a line of a log in JSON.

    name: of what is served. more: rows.
    """
    settings = dict(table(config))
    if config.log_format == "json":
        logging.info("reflex serve %s", name, extra={"settings": settings | dict(more)})
        return
    defaults = dict(table(type(config)()))
    told = {setting: value for setting, value in settings.items() if value != defaults[setting]} | dict(more)
    width = max(map(len, told), default=0)
    shown = {setting: value if value.isprintable() else repr(value) for setting, value in told.items()}
    rows = [f" {setting:<{width}}  {value}" for setting, value in shown.items()]
    rest = sum(settings[setting] == default for setting, default in defaults.items())
    rows.append(f" {rest} settings have their defaults, see --help")
    print(f"reflex serve {name}", *rows, sep="\n", file=sys.stderr, flush=True)


def warn_if_open(config: Any, address: Any) -> None:
    """Warn when a server without a key can be reached from other machines."""
    from reflex_runtime.web.trust import is_loopback

    if not is_loopback(address[0]) and not config.api_key:
        logging.warning("--host=%s is reachable from outside and there is no --api-key", config.host)


def url(address: Any) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}"


def check_trace(path: str) -> None:
    """ConfigError when --trace cannot be written."""
    if path:
        try:
            files.check(path)
        except OSError as error:
            raise ConfigError(f"--trace={one_line(path)}: cannot be written: {error.strerror}") from None


@contextmanager
def told_of(where: str) -> Iterator[None]:
    """Errors from within begin with that."""
    try:
        yield
    except ConfigError as error:
        raise (ConfigError(where + error.message) if where else error) from None
