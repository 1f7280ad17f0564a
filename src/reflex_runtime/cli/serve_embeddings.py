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
    options_of,
    run_server,
    serve_parser,
    show_settings,
    supervised,
    warn_if_open,
)
from reflex_runtime.config import EmbeddingServeConfig, LLMServeConfig
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.options import flag
from reflex_runtime.sources import environment, load

if TYPE_CHECKING:
    from reflex_runtime.llm.embedding.directory import EmbeddingModel
    from reflex_runtime.llm.serving.embedding_server import EmbeddingService
    from reflex_runtime.web.supervisor import Parent

_EXAMPLES = """\
examples:
  reflex serve ./all-MiniLM-L6-v2
  reflex serve ./bge-small-en-v1.5 --max-batch-cost-ms 30    shorter batches: short texts wait less behind long ones
  reflex serve ./my-bert --pooling cls                       a bare encoder, which does not say how it pools

then, with any client of the OpenAI API:
  curl localhost:8000/v1/embeddings -H 'Content-Type: application/json' \\
    -d '{"model": "all-MiniLM-L6-v2", "input": ["a robot arm", "a camera"]}'
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb for an embedding model."""
    what = "Serve an embedding model over HTTP with the OpenAI API. Texts share batches within a cost budget."
    elsewhere = options_of(LLMServeConfig, "models that generate")
    parser = serve_parser(verbs, EmbeddingServeConfig, what, _EXAMPLES, elsewhere=elsewhere)
    parser.add_argument(
        "model", type=Path, metavar="MODEL_DIR",
        help="directory of sentence-transformers (modules.json), or of an encoder (BERT, RoBERTa and others)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then open the port, then load."""
    logs.begin()
    config = load(EmbeddingServeConfig, "serve", args.config, environment(), vars(args))
    logs.use(config.log_format)
    serve = partial(_serve, config, args.model)
    return supervised(config, lambda: _checked(config, args.model), serve, api_form)


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

    model = _checked(config, directory)
    name = config.served_model_name or directory.resolve().name
    sock = sock or listen.bind(config.host, config.port)
    address = sock.getsockname()
    show_settings(config, name)
    warn_if_open(config, address)
    loading = partial(
        load_encoder, model, config.device, config.runner, config.dtype, config.threads or None, config.cache_dir
    )
    make = serving_embeddings(config, name, model, loading)
    return run_server(config, make, sock, address, str(directory), _ready, parent)


def _ready(service: EmbeddingService, where: str) -> None:
    assert service.host is not None
    model = service.model
    ways = " + ".join(model.pooling)
    told = f"{ways} of {model.max_model_len:,} tokens at most, {model.dimensions:,} dimensions"
    runner = service.host.health()["runner"]
    logging.info("ready on %s (%s, %s), as %s, pages: %s/dashboard and /docs", where, told, runner, service.name, where)
