"""`reflex serve SOURCE`: serve a robot policy over HTTP, batched by cost. Language models are in `serve_llm`."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from reflex_runtime.cli.serve_policies import policies_of
from reflex_runtime.cli.serving import (
    check_outputs,
    options_of,
    run_server,
    serve_parser,
    show_settings,
    supervised,
)
from reflex_runtime.core.errors import ConfigError, not_installed
from reflex_runtime.core.statistics import DEFAULT_COST
from reflex_runtime.demo import told_apart
from reflex_runtime.observe import logs
from reflex_runtime.settings import OWN_SETTINGS, LLMServeConfig, PolicyAsked, ServeConfig
from reflex_runtime.settings.declare import Places
from reflex_runtime.settings.read import POLICIES, environment, read
from reflex_runtime.web.access import warn_if_open
from reflex_runtime.web.replicas import devices_of, settings_of

if TYPE_CHECKING:
    from reflex_runtime.robots.serving.runtime import PolicyPlan
    from reflex_runtime.web.supervisor import Parent


_EXAMPLES = """\
examples:
  reflex serve demo                                 the bundled policy; reflex demo-export DIR writes it as files
  reflex serve ./my-export
  reflex serve ./my-export --max-batch-cost-ms 250                        deeper batches, longer waits
  reflex serve ./my-export --max-batch-cost-ms 50 --batch-timeout-ms 2    smaller batches, shorter tail
  reflex serve ./my-export --trace batches.jsonl    then: reflex trace batches.jsonl
  reflex serve lerobot:./outputs/pretrained_model   a checkpoint of LeRobot
  reflex serve openpi:./pi05_droid_pytorch          a PyTorch checkpoint of openpi
  reflex serve python:my_robot.policy:make          a model in PyTorch, or anything else that Python can call

A function of your own, python:my_module:embed, and an ONNX model, FILE.onnx, have options of their own as well:
reflex serve python:my_module:embed --help shows them.

A directory with a config.json and no reflex_config.json is a language model: reflex serve MODEL_DIR serves it with the
OpenAI API and has options of its own; reflex serve MODEL_DIR --help shows them.
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
    """What is served. ConfigError for what can be found before anything is loaded."""
    from reflex_runtime.robots.app import plans_of

    plans = plans_of(config, places, asked)
    check_outputs(config)
    check_listener("gr00t", config.gr00t, config.api_key, "zmq")
    check_listener("oip-grpc", config.oip_grpc, config.api_key, "grpc")
    check_listener("lerobot", config.lerobot, config.api_key, "grpc")
    return plans


def check_listener(name: str, address: str, key: str, module: str) -> None:
    """What a listener of its own needs: loopback or a key, and its package."""
    from reflex_runtime.web.access import is_loopback

    if not address:
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not (key or host == "localhost" or is_loopback(host)):
        raise ConfigError(f"--{name}={address}: needs --api-key, or a loopback address: others could reach it")
    if find_spec(module) is None:
        raise not_installed(module, f"--{name}")


def _announce(config: ServeConfig, asked: Sequence[PolicyAsked], model_id: str) -> None:
    """The settings in force, and what deserves a warning."""
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
    """A row for each policy: its sources, its weight, and the settings of its own."""
    for policy in asked:
        told = [f"{slot} {source}" for slot, source in policy.sources.items()]
        told += [f"weight {policy.weight:g}"]
        told += [f"{name} {getattr(policy.config, name)}" for name in policy.places if name in OWN_SETTINGS]
        yield f"policy {policy.name}", ", ".join(told)


def _ready(runtime: Any, where: str) -> None:
    modes = ", ".join(dict.fromkeys(served.spec.inference_mode for served in runtime.policies.values()))
    logging.info("ready on %s (%s), pages: %s/dashboard and /docs", where, modes, where)
