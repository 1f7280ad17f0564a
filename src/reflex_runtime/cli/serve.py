"""`reflex serve SOURCE`: serve a robot policy over HTTP, batched by cost. Language models are in `serve_llm`."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflex_runtime.cli.serving import check_trace, options_of, show_settings, url, warn_if_open
from reflex_runtime.config import LLMServeConfig, ServeConfig
from reflex_runtime.core.affine import DEFAULT_COST
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.options import add_options, check_needs, one_line
from reflex_runtime.sources import environment, read

if TYPE_CHECKING:
    from reflex_runtime.policies import PolicySource
    from reflex_runtime.web.supervisor import Parent

_EPILOG = """\
examples:
  reflex serve ./my-export
  reflex serve ./my-export --max-batch-cost-ms 250                        deeper batches, longer waits
  reflex serve ./my-export --max-batch-cost-ms 50 --batch-timeout-ms 2    smaller batches, shorter tail
  reflex serve ./my-export --trace batches.jsonl    then: reflex trace batches.jsonl
  reflex serve lerobot:./outputs/pretrained_model   a checkpoint of LeRobot
  reflex serve python:my_robot.policy:make          a model in PyTorch, or anything else that Python can call

A directory with a config.json and no reflex_config.json is a language model: reflex serve MODEL_DIR serves it with the
OpenAI API and has options of its own; reflex serve MODEL_DIR --help shows them.

Every option also stands in a TOML file (--config, table [serve]) and in the environment (REFLEX_MAX_QUEUE=64).
Ctrl-C or SIGTERM finishes what was received and leaves; a second Ctrl-C does not wait.
Exit status: 0 after a drain, 1 when the policy could not be started or was lost again and again (with
--no-supervise: when the device was lost), 2 for a wrong option or export, 130 after a second Ctrl-C.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb for a policy."""
    parser = verbs.add_parser(
        "serve",
        description="Serve a robot policy over HTTP. Concurrent requests share forward passes, within a cost budget.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        elsewhere=options_of(LLMServeConfig, "language models"),
    )
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="export directory (docs/exports.md), lerobot:DIR, or python:package.module:make for a policy of your own "
        "in Python (docs/policies.md); may be left out with --policy-a",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with a table [serve]")
    add_options(parser, ServeConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then open the port, then load."""
    from reflex_runtime.cli import status_of
    from reflex_runtime.web import listen
    from reflex_runtime.web.form import PLAIN
    from reflex_runtime.web.supervisor import supervise

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    config, places = read(ServeConfig, "serve", args.config, environment(), vars(args))
    sources = slots_of(config, args.source)
    serve = partial(_serve, config, places, sources)
    if not config.supervise:
        return serve()
    try:
        sock = listen.bind(config.host, config.port)
    except ConfigError:
        _checked(config, places, sources)  # what is wrong besides is said first: another port would not mend it
        raise
    told = ("reflex", "serve")
    return supervise(sock, listen.BACKLOG, lambda parent: status_of(lambda: serve(sock, parent), told), PLAIN)


def _serve(
    config: ServeConfig,
    places: Mapping[str, str],
    sources: Mapping[str, str],
    sock: socket.socket | None = None,
    parent: Parent | None = None,
) -> int:
    """The server itself: alone, or below a supervisor that has bound its socket."""
    from reflex_runtime.policies.serving.app import serving
    from reflex_runtime.policies.serving.served import DEFAULT, PolicyPlan
    from reflex_runtime.web import listen
    from reflex_runtime.web.serve import serve

    specs = _checked(config, places, sources)
    sock = sock or listen.bind(config.host, config.port)
    address = sock.getsockname()
    _announce(config, ", ".join(dict.fromkeys(spec.model_id for spec in specs.values())), address)
    status, clean = serve(
        serving(config, [PolicyPlan(DEFAULT, config, specs)]),
        sock,
        config.drain_timeout_s,
        lambda: logging.info("listening on %s, loading %s", url(address), ", ".join(sources.values())),
        lambda runtime: _ready(runtime, address),
        parent,
    )
    if not clean:
        logging.warning("a batch is still running; leaving without it")
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)
    return status


def slots_of(config: ServeConfig, source: str | None) -> dict[str, str]:
    """The source of every slot, served ones first; ConfigError when the options contradict each other."""
    from reflex_runtime.policies.source import directory_of

    a, b, shadow = config.policy_a, config.policy_b, config.shadow_policy
    if bool(a) != bool(b):
        missing, given = ("--policy-b", "--policy-a") if a else ("--policy-a", "--policy-b")
        raise ConfigError(f"{given} needs {missing}: two policies are served side by side, or one as SOURCE")
    if b and shadow:
        raise ConfigError("--shadow-policy does not go with --policy-b: serve a and b, or one policy and its shadow")
    if not a and source is None:
        raise ConfigError("SOURCE is missing: reflex serve DIR, or --policy-a DIR --policy-b DIR")
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
    found = {"a": a, "b": b} if b else {"prod": source or ""}
    return found | ({"shadow": shadow} if shadow else {})


def _same(one: str, other: str) -> bool:
    """Whether two sources are the same, however their directory is written."""
    from reflex_runtime.policies.source import directory_of

    return one == other or directory_of(one).resolve() == directory_of(other).resolve()


def _checked(config: ServeConfig, places: Mapping[str, str], sources: Mapping[str, str]) -> dict[str, PolicySource]:
    """What is served, by slot. ConfigError for what can be found before anything is loaded."""
    from reflex_runtime.policies import read_source
    from reflex_runtime.policies.serving.slots import device_of

    _check_memory(config, sources)
    specs = {slot: read_source(source, device_of(config)) for slot, source in sources.items()}
    check_needs(config, places, _missing(specs))
    _check(config)
    _check_specs(config, specs)
    return specs


def _missing(specs: Mapping[str, PolicySource]) -> dict[str, str]:
    """The facts that settings need and that do not hold; see `check_needs`."""
    from reflex_runtime.policies import Export

    told = ", ".join(spec.source for spec in specs.values())
    missing = {}
    if not any(spec.staged for spec in specs.values()):
        missing["a decomposed export"] = f"{told} is monolithic"
    if all(isinstance(spec, Export) for spec in specs.values()):
        missing["a model in PyTorch"] = f"{told} is an ONNX export"
    return missing


def _check_memory(config: ServeConfig, sources: Mapping[str, str]) -> None:
    """Whether two policies fit, by the sizes of their files: nothing of them has been read yet."""
    from reflex_runtime.policies.export.memory import check_two_policies
    from reflex_runtime.policies.source import weight_of
    from reflex_runtime.processors.onnx import PROVIDERS

    if len(sources) > 1:
        provider = PROVIDERS.get(config.provider, config.provider)
        check_two_policies([weight_of(source) for source in sources.values()], environment(), provider)


def _check_specs(config: ServeConfig, specs: Mapping[str, PolicySource]) -> None:
    """What the sources allow, before anything is loaded."""
    from reflex_runtime.policies.serving.slots import check_alike, faults_of

    faults_of(config.inject_fault, tuple(specs), "--inject-fault")
    check_alike(specs)
    for spec in specs.values():
        spec.check()
        for flag, given in (("--rtc", config.rtc), ("--adaptive-steps", config.adaptive_steps)):
            if given and not spec.staged:
                why = "only decomposed policies denoise step by step"
                raise ConfigError(f"{flag}: {spec.source} is monolithic, and {why}; leave {flag} out")


def _check(config: ServeConfig) -> None:
    """What takes more than a range."""
    from reflex_runtime.policies.rollout.comparison import Comparison
    from reflex_runtime.policies.rollout.ramp import Ramp, RampGuard
    from reflex_runtime.policies.rollout.slo import Objective
    from reflex_runtime.processors.onnx import CUDA, PROVIDERS, check_provider

    if config.slo:
        Objective.parse(config.slo)
    if config.guard:
        RampGuard.parse(config.guard)
    Ramp.every_of(config.ramp_every)
    if config.ramp:
        shares, every = Ramp.shares_of(config.ramp), Ramp.every_of(config.ramp_every)
        Ramp(shares, every, None, Comparison(50) if config.ramp_evidence else None, 0.0)
    if config.record:
        try:
            Path(config.record).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--record={one_line(config.record)}: cannot be made: {error.strerror}") from None
    provider = PROVIDERS.get(config.provider, config.provider)
    try:
        check_provider(provider)
    except ConfigError as error:
        raise ConfigError(f"--provider={one_line(config.provider)}: {error.message.partition(': ')[2]}") from None
    if config.cuda_graphs and provider != CUDA:
        raise ConfigError(
            f"--cuda-graphs={config.cuda_graphs}: {provider} has no graphs to capture; leave the option out"
        )
    check_trace(config.trace)
    _check_listener("gr00t", config.gr00t, config.api_key, "zmq", "pyzmq", "gr00t")
    _check_listener("oip-grpc", config.oip_grpc, config.api_key, "grpc", "grpcio", "grpc")
    _check_listener("lerobot", config.lerobot, config.api_key, "grpc", "grpcio", "grpc")


def _check_listener(name: str, address: str, key: str, module: str, package: str, extra: str) -> None:
    """What a listener of its own needs: loopback or a key, and its package."""
    from reflex_runtime.web.trust import is_loopback

    if not address:
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not (key or host == "localhost" or is_loopback(host)):
        raise ConfigError(f"--{name}={address}: needs --api-key, or a loopback address: others could reach it")
    if find_spec(module) is None:
        raise ConfigError(f"--{name} needs {package}: in a clone, pip install '.[{extra}]'")


def _announce(config: ServeConfig, model_id: str, address: Any) -> None:
    """The settings in force, and what deserves a warning."""
    show_settings(config, model_id)
    if config.max_batch > 1:
        budget = config.max_batch * DEFAULT_COST * 1e3
        logging.warning(
            "--max-batch=%d is ignored: batches are bounded by cost; use --max-batch-cost-ms %g (about N x 50)",
            config.max_batch,
            budget,
        )
    warn_if_open(config, address)
    for fault in config.inject_fault:
        logging.warning("FAULT INJECTION IS ON: --inject-fault %s", fault)
    if config.inject_latency_ms:
        logging.warning("FAULT INJECTION IS ON: --inject-latency-ms %g", config.inject_latency_ms)


def _ready(runtime: Any, address: Any) -> None:
    where = url(address)
    if runtime.state == "ready":
        logging.info("ready on %s (%s), page: %s/docs", where, runtime.first.spec.inference_mode, where)
    else:
        logging.error("not serving on %s: %s: %s", where, runtime.state, runtime.error)
