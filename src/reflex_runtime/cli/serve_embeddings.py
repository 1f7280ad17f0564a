"""`reflex serve MODEL_DIR`, where the directory is that of an embedding model: serve it with the OpenAI API.

The verb is that of `serve`, with options of its own: `reflex_runtime.cli` registers it when it gets such a directory.
"""

from __future__ import annotations

import argparse
import logging
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflex_runtime.cli import logs
from reflex_runtime.cli.serving import (
    api_form,
    check_trace,
    leave_if_hung,
    options_of,
    show_settings,
    supervised,
    url,
    warn_if_open,
)
from reflex_runtime.config import EmbeddingServeConfig, LLMServeConfig
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.options import add_options, flag
from reflex_runtime.sources import environment, load

if TYPE_CHECKING:
    from reflex_runtime.llm.embedding.directory import EmbeddingModel
    from reflex_runtime.llm.serving.embedding_server import EmbeddingService
    from reflex_runtime.web.supervisor import Parent

_EPILOG = """\
examples:
  reflex serve ./all-MiniLM-L6-v2
  reflex serve ./bge-small-en-v1.5 --max-batch-cost-ms 30    shorter batches: short texts wait less behind long ones
  reflex serve ./my-bert --pooling cls                       a bare encoder, which does not say how it pools

then, with any client of the OpenAI API:
  curl localhost:8000/v1/embeddings -H 'Content-Type: application/json' \\
    -d '{"model": "all-MiniLM-L6-v2", "input": ["a robot arm", "a camera"]}'

Every option also stands in a TOML file (--config, table [serve]) and in the environment (REFLEX_MAX_QUEUE=64).
Ctrl-C or SIGTERM finishes what was received and leaves; a second Ctrl-C does not wait.
Exit status: 0 after a drain, 1 when the model could not be started or was lost again and again (with --no-supervise:
when it was lost), 2 for a wrong option or directory, 130 after a second Ctrl-C.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb for an embedding model."""
    parser = verbs.add_parser(
        "serve",
        description="Serve an embedding model over HTTP with the OpenAI API. Texts share batches within a cost budget.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        elsewhere=options_of(LLMServeConfig, "models that generate"),
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL_DIR",
        help="directory of sentence-transformers (modules.json), or of an encoder (BERT, RoBERTa and others)",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with a table [serve]")
    add_options(parser, EmbeddingServeConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then open the port, then load."""
    from reflex_runtime.cli import status_of

    logs.begin()
    config = load(EmbeddingServeConfig, "serve", args.config, environment(), vars(args))
    logs.use(config.log_format)
    serve = partial(_serve, config, args.model)
    return supervised(config, lambda: _checked(config, args.model), serve, api_form, status_of)


def _checked(config: EmbeddingServeConfig, directory: Path) -> EmbeddingModel:
    """The directory as it is to be served. ConfigError for what can be found before the model is loaded."""
    from reflex_runtime.llm.embedding.directory import EmbeddingModel
    from reflex_runtime.llm.embedding.load import check
    from reflex_runtime.telemetry.tracing import check_otel

    check_trace(config.trace)
    check_otel(config.otel)
    model = EmbeddingModel.open(directory, config.pooling)
    try:
        check(model, config.device, config.runner, config.dtype, config.max_model_len)
    except ConfigError as error:
        name = str(error.details.get("field", ""))
        if name not in EmbeddingServeConfig.__dataclass_fields__:
            raise
        why = error.message.partition(": ")[2]
        raise ConfigError(f"{flag(name)}={getattr(config, name)}: {why}", field=name) from None
    return replace(model, max_model_len=config.max_model_len or model.max_model_len)


def _serve(
    config: EmbeddingServeConfig, directory: Path, sock: socket.socket | None = None, parent: Parent | None = None
) -> int:
    """The server itself: alone, or below a supervisor that has bound its socket."""
    from reflex_runtime.llm.embedding.load import load as load_encoder
    from reflex_runtime.llm.serving.embedding_server import serving_embeddings
    from reflex_runtime.web import listen
    from reflex_runtime.web.serve import serve

    model = _checked(config, directory)
    name = config.served_model_name or directory.resolve().name
    sock = sock or listen.bind(config.host, config.port)
    address = sock.getsockname()
    show_settings(config, name)
    warn_if_open(config, address)
    loading = partial(
        load_encoder, model, config.device, config.runner, config.dtype, config.threads or None, config.cache_dir
    )
    status, clean = serve(
        serving_embeddings(config, name, model, loading),
        sock,
        config.drain_timeout_s,
        lambda: logging.info("listening on %s, loading %s", url(address), directory),
        lambda service: _ready(service, address),
        parent,
    )
    return leave_if_hung(status, clean)


def _ready(service: EmbeddingService, address: Any) -> None:
    if service.host is not None and service.state == "ready":
        model, where = service.model, url(address)
        ways = " + ".join(model.pooling)
        told = f"{ways} of {model.max_model_len:,} tokens at most, {model.dimensions:,} dimensions"
        runner = service.host.health()["runner"]
        pages = f"{where}/dashboard and /docs"
        logging.info("ready on %s (%s, %s), as %s, pages: %s", where, told, runner, service.name, pages)
    else:
        logging.error("not serving on %s: %s: %s", url(address), service.state, service.error)
