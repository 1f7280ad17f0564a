"""`reflex serve EXPORT`: serve a robot policy over HTTP, batched by cost."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from reflex_runtime.config import ServeConfig, add_options, environment, load, one_line, table
from reflex_runtime.core.affine import DEFAULT_COST
from reflex_runtime.core.errors import ConfigError

_EPILOG = """\
examples:
  reflex serve ./my-export
  reflex serve ./my-export --max-batch-cost-ms 250                        deeper batches, longer waits
  reflex serve ./my-export --max-batch-cost-ms 50 --batch-timeout-ms 2    smaller batches, shorter tail
  reflex serve ./my-export --trace batches.jsonl    then: reflex trace batches.jsonl

Every option also stands in a TOML file (--config, table [serve]) and in the environment (REFLEX_MAX_QUEUE=64).
Exit status: 0 after a drain, 1 when the policy or the device was lost, 2 for a wrong option or export.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb."""
    parser = verbs.add_parser(
        "serve",
        help="serve a robot policy over HTTP (POST /act)",
        description="Serve a robot policy over HTTP. Requests that can share a forward pass do, within a cost budget.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("export", type=Path, metavar="EXPORT", help="export directory (see docs/exports.md)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with a table [serve]")
    add_options(parser, ServeConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then open the port, then load."""
    from reflex_runtime.policies import Export
    from reflex_runtime.server.serve import bind, serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    config = load(ServeConfig, "serve", args.config, environment(), vars(args))
    _check(config)
    export = Export.load(args.export)
    sock = bind(config.host, config.port)
    address = sock.getsockname()
    _announce(config, export.model_id, address)
    status, clean = serve(
        config,
        export,
        sock,
        lambda: logging.info("listening on %s, loading %s", _url(address), export.path),
        lambda runtime: _ready(runtime, address),
    )
    if not clean:
        logging.warning("a batch is still running; leaving without it")
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)
    return status


def _check(config: ServeConfig) -> None:
    """What takes more than a range."""
    from reflex_runtime.policies import parse_fault
    from reflex_runtime.processors.onnx import CUDA, check_provider
    from reflex_runtime.server.runtime import PROVIDERS, SLOT
    from reflex_runtime.server.slo import Objective

    if config.slo:
        Objective.parse(config.slo)
    for text in config.inject_fault:
        if (fault := parse_fault(text)).slot != SLOT:
            raise ConfigError(f"--inject-fault={text}: slot {fault.slot} is not served, only {SLOT} is")
    provider = PROVIDERS.get(config.provider, config.provider)
    try:
        check_provider(provider)
    except ConfigError as error:
        raise ConfigError(f"--provider={one_line(config.provider)}: {error.message}") from None
    if config.cuda_graphs and provider != CUDA:
        raise ConfigError(
            f"--cuda-graphs={config.cuda_graphs}: {provider} has no graphs to capture; leave the option out"
        )
    if config.trace:
        try:
            open(config.trace, "ab").close()
        except OSError as error:
            raise ConfigError(f"--trace={one_line(config.trace)}: cannot be written: {error.strerror}") from None


def _announce(config: ServeConfig, model_id: str, address: Any) -> None:
    """The settings in force, and what deserves a warning."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    shown = Table(title=f"reflex serve {model_id}", title_justify="left", show_header=False, box=None)
    for name, value in table(config):
        shown.add_row(name, value)
    console.print(shown)
    if config.max_batch > 1:
        budget = config.max_batch * DEFAULT_COST * 1e3
        logging.warning(
            "--max-batch=%d is ignored: batches are bounded by cost; use --max-batch-cost-ms %g (about N x 50)",
            config.max_batch, budget,
        )
    if not _loopback(address[0]) and not config.api_key:
        logging.warning("--host=%s is reachable from outside and there is no --api-key", config.host)
    for fault in config.inject_fault:
        logging.warning("FAULT INJECTION IS ON: --inject-fault %s", fault)
    if config.inject_latency_ms:
        logging.warning("FAULT INJECTION IS ON: --inject-latency-ms %g", config.inject_latency_ms)


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _url(address: Any) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}"


def _ready(runtime: Any, address: Any) -> None:
    where = _url(address)
    if runtime.state == "ready":
        logging.info("ready on %s (%s), page: %s/docs", where, runtime.policy.inference_mode, where)
    else:
        logging.error("not serving on %s: %s: %s", where, runtime.state, runtime.error)
