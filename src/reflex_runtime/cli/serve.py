"""`reflex serve SOURCE`: serve a robot policy over HTTP, batched by cost. Language models are in `serve_llm`."""

from __future__ import annotations

import argparse
import logging
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reflex_runtime.cli.serving import (
    check_outputs,
    options_of,
    run_server,
    serve_parser,
    show_settings,
    supervised,
)
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.core.statistics import DEFAULT_COST
from reflex_runtime.demo import policy_source, told_apart
from reflex_runtime.extras import not_installed
from reflex_runtime.observe import logs
from reflex_runtime.settings import (
    DEFAULT_POLICY,
    MAX_POLICIES,
    OWN_SETTINGS,
    LLMServeConfig,
    PolicyAsked,
    ServeConfig,
)
from reflex_runtime.settings.declare import Places, one_line
from reflex_runtime.settings.read import POLICIES, environment, own_settings, read, tables_of
from reflex_runtime.web.access import warn_if_open
from reflex_runtime.web.replicas import devices_of, settings_of

if TYPE_CHECKING:
    from reflex_runtime.robots.serving.runtime import PolicyPlan
    from reflex_runtime.web.supervisor import Parent

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_EXAMPLES = """\
examples:
  reflex serve demo                                 the bundled policy; reflex demo-export DIR writes it as files
  reflex serve ./my-export --max-batch-cost-ms 50   smaller batches, shorter tail
  reflex serve ./my-export --trace batches.jsonl    then: reflex trace batches.jsonl
  reflex serve lerobot:./outputs/pretrained_model   a checkpoint of LeRobot
  reflex serve openpi:./pi05_droid_pytorch          a PyTorch checkpoint of openpi
  reflex serve python:my_robot.policy:make          a model in PyTorch, or anything else that Python can call

Functions (python:my_module:embed), ONNX models (FILE.onnx) and language models (a directory with a config.json) have
options of their own: reflex serve python:my_module:embed --help and reflex serve MODEL_DIR --help show them.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb for a policy."""
    what = "Serve a robot policy over HTTP. Concurrent requests share forward passes, within a cost budget."
    elsewhere = options_of(LLMServeConfig, "language models")
    parser = serve_parser(verbs, ServeConfig, what, _EXAMPLES, elsewhere=elsewhere)
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="export directory (docs/exports.md), demo (the bundled policy), lerobot:DIR, openpi:DIR, or "
        "python:package.module:make for a policy of your own (docs/policies.md); may be left out with --policy-a",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then open the port, then load."""
    logs.begin()
    config, places = read(ServeConfig, "serve", args.config, environment(), vars(args), (POLICIES,))
    logs.use(config.log_format)
    asked = policies_of(config, args.source, args.config)
    devices = devices_of(config, places)
    serve = partial(_serve, config, places, asked, devices)
    return supervised(config, lambda: _checked(config, places, asked), serve, len(devices))


def _serve(
    config: ServeConfig,
    places: Places,
    asked: Sequence[PolicyAsked],
    devices: Sequence[str],
    sockets: Sequence[socket.socket],
    parent: Parent | None,
) -> int:
    """The server itself: alone, or one of the workers below a supervisor."""
    from reflex_runtime.robots.app import serving

    number = 0 if parent is None else parent.number
    changed, env = settings_of(config, devices, number)
    if changed or env:
        os.environ.update(env)
        config = replace(config, **changed)
        asked = [replace(policy, config=replace(policy.config, **changed)) for policy in asked]
    plans = _checked(config, places, asked)
    if number == 0:
        models = [spec.model_id for plan in plans for spec in plan.specs.values()]
        _announce(config, asked, ", ".join(dict.fromkeys(models)))
    sources = ", ".join(told_apart(source) for policy in asked for source in policy.sources.values())
    return run_server(config, serving(config, plans), sockets, sources, _ready, parent, warn=False)  # the runtime warns


def _checked(config: ServeConfig, places: Places, asked: Sequence[PolicyAsked]) -> list[PolicyPlan]:
    """The policies to serve. ConfigError for every fault that can be found before a model is loaded."""
    from reflex_runtime.robots.app import plans_of

    plans = plans_of(config, places, asked)
    check_outputs(config)
    check_listener("gr00t", config.gr00t, config.api_key, "zmq")
    check_listener("oip-grpc", config.oip_grpc, config.api_key, "grpc")
    check_listener("lerobot", config.lerobot, config.api_key, "grpc")
    return plans


def check_listener(name: str, address: str, key: str, module: str) -> None:
    """ConfigError unless a further listener has a loopback address or a key, and its package is installed."""
    from reflex_runtime.web.access import is_loopback

    if not address:
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not (key or host == "localhost" or is_loopback(host)):
        raise ConfigError(f"--{name}={address}: needs --api-key, or a loopback address: other machines can reach it")
    if find_spec(module) is None:
        raise not_installed(module, f"--{name}")


def _announce(config: ServeConfig, asked: Sequence[PolicyAsked], model_id: str) -> None:
    """Print the settings in force, and warn of risky ones."""
    show_settings(config, model_id, _own(asked) if len(asked) > 1 else ())
    if config.max_batch > 1:
        budget = config.max_batch * DEFAULT_COST * 1e3
        logging.warning(
            "--max-batch=%d is ignored: batches are bounded by cost; use --max-batch-cost-ms %g (about N x 50)",
            config.max_batch,
            budget,
        )
    warn_if_open(config)
    for fault in config.inject_fault:
        logging.warning("FAULT INJECTION IS ON: --inject-fault %s", fault)
    if config.inject_latency_ms:
        logging.warning("FAULT INJECTION IS ON: --inject-latency-ms %g", config.inject_latency_ms)


def _own(asked: Sequence[PolicyAsked]) -> Iterator[tuple[str, str]]:
    """A row for each policy: its sources, its weight and its own settings."""
    for policy in asked:
        parts = [f"{slot} {source}" for slot, source in policy.sources.items()]
        parts += [f"weight {policy.weight:g}"]
        parts += [f"{name} {getattr(policy.config, name)}" for name in policy.places if name in OWN_SETTINGS]
        yield f"policy {policy.name}", ", ".join(parts)


def _ready(runtime: Any, where: str) -> None:
    modes = ", ".join(dict.fromkeys(served.spec.inference_mode for served in runtime.policies.values()))
    logging.info("ready on %s (%s), pages: %s/dashboard and /docs", where, modes, where)


# -- which policies: SOURCE, --policy NAME=SOURCE and the tables [policies.NAME] ---------------------------------------


def policies_of(config: ServeConfig, source: str | None, file: Path | None = None) -> list[PolicyAsked]:
    """Every policy, that of SOURCE first. ConfigError if options contradict each other."""
    tables = tables_of(file, POLICIES)
    plain = source is not None or bool(config.policy_a or config.policy_b)
    named = _named(config.policy)
    if plain and DEFAULT_POLICY in named:
        raise ConfigError(f"--policy={DEFAULT_POLICY}=…: SOURCE has this name already; leave one of the two out")
    names = list(dict.fromkeys([*([DEFAULT_POLICY] if plain else []), *named, *tables])) or [DEFAULT_POLICY]
    if len(names) > MAX_POLICIES:
        raise ConfigError(f"--policy: {len(names)} policies are named, at most {MAX_POLICIES} are served")
    found = []
    for name in names:
        where = f"policy {_checked_name(name)}: " if len(names) > 1 else ""
        base = config
        if not (plain and name == DEFAULT_POLICY):
            base = replace(config, policy_a="", policy_b="", shadow_policy="")
        own, settings, places = own_settings(file, POLICIES, name, tables.get(name, {}), base, OWN_SETTINGS)
        settings = replace(settings, inject_fault=_faults(config.inject_fault, name, names))
        given = source if plain and name == DEFAULT_POLICY else named.get(name) or own.source or None
        asked = PolicyAsked(name, {}, settings, places, own.weight, where)
        with asked.named():
            found.append(replace(asked, sources=slots_of(settings, given)))
    return found


def _named(texts: Sequence[str]) -> dict[str, str]:
    """The sources of --policy, by name."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not (equals and name and source):
            raise ConfigError(f"--policy={one_line(text)}: must be NAME=SOURCE, such as arm=./my-export")
        if _checked_name(name) in found:
            raise ConfigError(f"--policy={one_line(text)}: {name} is named twice")
        found[name] = source
    return found


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--policy={one_line(name)}=…: the name must be 1 to 32 letters, digits, - and _, not begin with - or _"
        )
    return name


def _faults(texts: Sequence[str], name: str, names: Sequence[str]) -> tuple[str, ...]:
    """The injected faults of one policy; with several policies a slot is written NAME.SLOT."""
    if len(names) == 1:
        return tuple(texts)
    for text in texts:
        of = text.partition(".")[0] if "." in text.partition(":")[0] else ""
        if of not in names:
            raise ConfigError(f"--inject-fault={one_line(text)}: must begin with NAME.SLOT, NAME of {', '.join(names)}")
    return tuple(text.partition(".")[2] for text in texts if text.startswith(f"{name}."))


def slots_of(config: ServeConfig, source: str | None) -> dict[str, str]:
    """The source of every slot, served ones first. ConfigError if options contradict each other."""
    from reflex_runtime.robots.sources.load import directory_of

    a, b, shadow = map(policy_source, (config.policy_a, config.policy_b, config.shadow_policy))
    if bool(a) != bool(b):
        missing, given = ("--policy-b", "--policy-a") if a else ("--policy-a", "--policy-b")
        raise ConfigError(f"{given} needs {missing}: two policies are served side by side, or one as SOURCE")
    if b and shadow:
        raise ConfigError("--shadow-policy does not go with --policy-b: serve a and b, or one policy and its shadow")
    if not a and source is None:
        raise ConfigError(
            "SOURCE is missing: demo or scribe, which are bundled, DIR, FILE.onnx or python:MODULE:NAME; or --policy-a "
            "DIR --policy-b DIR"
        )
    if a and source is not None and not _same(source, a):
        raise ConfigError(f"SOURCE={source}: must be that of --policy-a={a}, or left out")
    for flag, given in (("--policy-a", a), ("--policy-b", b), ("--shadow-policy", shadow)):
        if given and not os.path.isdir(directory_of(given)):
            raise ConfigError(f"{flag}={one_line(given)}: no such directory, expected an export (docs/exports.md)")
    if b and config.rtc is None:
        raise ConfigError(
            "two policies need --no-rtc, or --rtc with --rtc-per-episode: a chunk carried over from one policy to the "
            "other would be a jump"
        )
    if b and config.rtc and not config.rtc_per_episode:
        raise ConfigError("--rtc with two policies needs --rtc-per-episode: nothing may be carried over between them")
    found = {"a": a, "b": b} if b else {"prod": policy_source(source or "")}
    return found | ({"shadow": shadow} if shadow else {})


def _same(one: str, other: str) -> bool:
    """Whether two sources are the same, however their directory is written."""
    from reflex_runtime.robots.sources.load import directory_of

    return one == other or directory_of(one).resolve() == directory_of(other).resolve()
