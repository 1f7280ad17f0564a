"""`reflex ray SOURCE`: replicas of a policy server on Ray Serve, behind one port."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reflex_runtime.cli import logs
from reflex_runtime.cli.serve_policies import plans_of, policies_of
from reflex_runtime.cli.serving import show_settings, url, warn_if_open
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.settings import RayConfig, ServeConfig
from reflex_runtime.settings.declare import Places, add_options, check_needs, flag, table
from reflex_runtime.settings.read import POLICIES, environment, read

if TYPE_CHECKING:
    from reflex_runtime.web.serve import Make

_EPILOG = """\
examples:
  reflex ray ./my-export --replicas 2                     two replicas on this machine, behind one port
  reflex ray ./my-export --replicas 2 --max-replicas 8    more of them while more work waits, and fewer again
  reflex ray ./my-export --provider cuda --replicas 4     a GPU for each

Starts Ray on this machine, and ends it with Ctrl-C or SIGTERM. docs/deploying.md has the rest; deploy/ray/ has a
configuration for a cluster. It needs the extra [ray]. Every option of reflex serve that concerns the policy is here.
"""

ELSEWHERE: Final = {
    "gr00t": "its clients cannot be shared out by Ray",
    "gr00t_config": "its clients cannot be shared out by Ray",
    "oip_grpc": "Ray's port speaks HTTP and websockets; OIP over HTTP is there",
    "lerobot": "Ray's port speaks HTTP and websockets",
    "supervise": "Ray itself starts a replica again",
    "max_connections": "connections are those of Ray's proxy",
    "idle_timeout_s": "connections are those of Ray's proxy",
    "head_timeout_s": "connections are those of Ray's proxy",
    "body_timeout_s": "connections are those of Ray's proxy",
    "trace": "replicas cannot write one file; use --record DIR",
    "replicas": "how many replicas Ray starts is a setting of the table [ray]",
    "devices": "Ray gives each replica its device; see --replica-gpus",
}
"""Settings of `reflex serve` that have no effect here, and why."""
_OWN: Final = frozenset(field.name for field in fields(RayConfig))


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "ray",
        description="Serve a robot policy from several replicas on Ray Serve. An episode stays with its replica.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        elsewhere={
            flag(name): f"; {flag(name)} is of reflex serve alone: {why}"
            for name, why in ELSEWHERE.items()
            if name not in _OWN
        },
    )
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="what reflex serve takes")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with tables [serve] and [ray]")
    add_options(parser, RayConfig)
    add_options(parser, ServeConfig, without=ELSEWHERE)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check what can be checked, then start Ray."""
    logs.begin()
    settings = {name: value for name, value in vars(args).items() if name not in ("run", "verb")}
    config, places, scale = _read(settings)
    logs.use(config.log_format)
    _check_ray()
    asked = policies_of(config, args.source, args.config)
    plans = plans_of(config, places, asked)
    from reflex_runtime.cluster import application
    from reflex_runtime.web import listen

    sock = listen.bind(config.host, config.port)  # a free port, or what is wrong with this one
    address = sock.getsockname()
    sock.close()
    names = ", ".join(dict.fromkeys(spec.model_id for plan in plans for spec in plan.specs.values()))
    show_settings(config, names, table(scale))
    warn_if_open(config, address)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    where = url(address)
    logging.info("starting Ray for %s", where)
    make = partial(made, settings, os.getcwd())
    why = application.run(make, config, scale, address[1], stop, lambda: logging.info("ready on %s", where))
    if why:
        logging.error("not serving: %s", why)
    return 1 if why else 0


def _read(settings: Mapping[str, Any]) -> tuple[ServeConfig, Places, RayConfig]:
    file = settings.get("config")
    others = {name: value for name, value in settings.items() if name not in _OWN}
    around = {name: value for name, value in environment().items() if name.removeprefix("REFLEX_").lower() not in _OWN}
    config, places = read(ServeConfig, "serve", file, around, others, (POLICIES, "ray"))
    scale, scaled = read(RayConfig, "ray", file, environment(), settings, (POLICIES, "serve"))
    check_needs(scale, scaled)
    for name, why in ELSEWHERE.items():
        if name in places:
            raise ConfigError(f"{places[name]} has no effect in reflex ray: {why}", field=name)
    return config, places, scale


def _check_ray() -> None:
    if find_spec("ray") is None:
        raise ConfigError("reflex ray needs Ray Serve: pip install 'reflex-runtime[ray]', in a clone '.[ray]'")


def made(settings: Mapping[str, Any], folder: str) -> tuple[Make, float]:
    """In the process of a replica: what it serves, read again from the same settings. folder: of relative sources;
    "" for the process's own."""
    from reflex_runtime.policies.serving.app import serving

    if folder:
        os.chdir(folder)
    config, places, _ = _read(settings)
    logs.begin()
    logs.use(config.log_format)
    plans = plans_of(config, places, policies_of(config, settings.get("source"), settings.get("config")))
    return serving(config, plans), config.drain_timeout_s


def deployed(args: Mapping[str, Any]) -> Any:
    """For a cluster: the application that `import_path: reflex_runtime.cli.ray:deployed` names.

    args: `source`, and settings of `reflex serve` and `reflex ray` by the names they have in a file. Raises
    ConfigError for one that is unknown or wrong.
    """
    from reflex_runtime.cluster import application

    known = {"source", *(field.name for kind in (ServeConfig, RayConfig) for field in fields(kind))}
    settings = {name.replace("-", "_"): value for name, value in args.items()}
    for name in settings:
        if name not in known:
            raise ConfigError(f"args: {name}: no such setting")
    config, _, scale = _read(settings)
    return application.application(partial(made, settings, ""), config, scale)  # nodes need not have the same folders
