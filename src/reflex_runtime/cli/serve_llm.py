"""`reflex serve MODEL_DIR`: serve a language model over HTTP with the OpenAI API.

The verb is that of `serve`, with options of its own: `reflex_runtime.cli` registers it when it gets the directory of
a model.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from reflex_runtime.cli import logs
from reflex_runtime.cli.embedding_settings import load_encoder
from reflex_runtime.cli.serve_models import ModelAsked, models_of, plans_of, rows_of
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
from reflex_runtime.cli.worker_settings import gpu_of, load_model, settings_of, trace_of
from reflex_runtime.config import EmbeddingServeConfig, LLMServeConfig, ServeConfig
from reflex_runtime.options import one_line
from reflex_runtime.sources import MODELS, environment, load

if TYPE_CHECKING:
    from reflex_runtime.ipc.generate_config import GenerateBatcherConfig
    from reflex_runtime.llm.serving.model_host import EmbeddingPlan, ModelHost, ModelPlan, Open
    from reflex_runtime.llm.serving.model_runtime import ModelRuntime
    from reflex_runtime.llm.serving.served_model import ServedEmbedding, ServedModel
    from reflex_runtime.web.supervisor import Parent

BATCHER = "generate_batcher"  # the table of the configuration file that is about the way to runtime processes

_EXAMPLES = """\
examples:
  reflex serve scribe                                          the bundled model: stories, and this project's words
  reflex serve ./my-model
  reflex serve ./my-model --max-num-batched-tokens 512         shorter steps: more even gaps between tokens
  reflex serve ./my-model --long-prefill-token-threshold 256   long prompts leave room for others beside them
  reflex serve small=./my-model large=./my-large-model         two models on one device; a request's model says which
  reflex serve chat=./my-model embed=./all-MiniLM-L6-v2        a language model, and one that makes vectors of texts
  reflex serve ./my-model --workers 1                          the model in a process of its own: reflex status shows it
  reflex serve ./my-model --trace steps.jsonl                  then: reflex trace steps.jsonl

then, with any client of the OpenAI API:
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "scribe", "prompt": "Once there was", "max_tokens": 60}'
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb for a language model."""
    what = "Serve a language model over HTTP with the OpenAI API, by continuous batching."
    tables = "a table [serve], [models.NAME] for several models, [generate_batcher] for --workers"
    elsewhere = options_of(ServeConfig, "policies")
    elsewhere |= options_of(EmbeddingServeConfig, "embedding models, for their table [models.NAME]")
    parser = serve_parser(verbs, LLMServeConfig, what, _EXAMPLES, tables, elsewhere=elsewhere, anywhere="model")
    parser.add_argument(
        "model", nargs="*", metavar="[NAME=]MODEL_DIR",
        help="directory: config.json, tokenizer.json, and safetensors or an export to OpenVINO (openvino_model.xml); "
        "scribe is the bundled model. Several are served together, each by its name; none is named where the file of "
        "--config has tables [models.NAME]",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then open the port, then load."""
    from reflex_runtime.ipc.generate_config import GenerateBatcherConfig

    logs.begin()
    config = load(LLMServeConfig, "serve", args.config, environment(), vars(args), (BATCHER, MODELS))
    logs.use(config.log_format)
    if config.log_format != "text":
        os.environ["REFLEX_LOG_FORMAT"] = config.log_format  # for the runtime processes, from their first line on
    batcher = load(GenerateBatcherConfig, BATCHER, args.config, {}, {}, beside=("serve", MODELS))
    if batcher != GenerateBatcherConfig() and not config.workers:
        logging.warning("%s: [%s] has no effect without --workers", args.config, BATCHER)
    asked = models_of(config, args.model, args.config)
    serve = partial(serve_models, config, batcher, asked)
    return supervised(config, lambda: checked(config, asked), serve, api_form)


def checked(
    config: LLMServeConfig | EmbeddingServeConfig, asked: Sequence[ModelAsked]
) -> tuple[list[ModelPlan], list[EmbeddingPlan]]:
    """What is served: see `plans_of`. ConfigError for what can be found before a model is loaded."""
    from reflex_runtime.telemetry.tracing import check_otel

    for path in _traces(config):
        check_trace(path)
    check_otel(config.otel)
    return plans_of(asked)


def serve_models(
    config: LLMServeConfig | EmbeddingServeConfig,
    batcher: GenerateBatcherConfig | None,
    asked: Sequence[ModelAsked],
    sock: socket.socket | None = None,
    parent: Parent | None = None,
) -> int:
    """The server itself: alone, or below a supervisor that has bound its socket. batcher: None where no model
    generates."""
    from reflex_runtime.llm.serving.local_models import opened
    from reflex_runtime.llm.serving.server import serving
    from reflex_runtime.llm.workers.line import one_bound
    from reflex_runtime.web import listen

    plans, embeddings = checked(config, asked)
    workers = isinstance(config, LLMServeConfig) and config.workers > 0
    if isinstance(config, LLMServeConfig) and workers:
        assert batcher is not None
        plans = [replace(plan, config=one_bound(plan.config, batcher)[0]) for plan in plans]
        open = _in_workers(config, plans, batcher)
        config, batcher = one_bound(plans[0].config if len(plans) == 1 else config, batcher)  # for all that is shown
    else:
        open = opened(lambda plan: load_model(plan.directory, plan.config), load_encoder)
    sock = sock or listen.bind(config.host, config.port)
    address = sock.getsockname()
    _announce(config, batcher, asked, address)
    for plan in plans:
        if told := str(plan.defaults):
            whose = f"{plan.name}: " if len(plans) > 1 else ""
            logging.info("%srequests that do not say how they are sampled: %s (generation_config.json)", whose, told)
    directories = ", ".join(str(model.directory) for model in asked)
    make = serving(config, plans, open, embeddings)
    warn = not workers  # processes of workers have ended
    return run_server(config, make, sock, address, directories, _ready, parent, warn)


def _in_workers(config: LLMServeConfig, plans: Sequence[ModelPlan], batcher: GenerateBatcherConfig) -> Open:
    """How to open the models in runtime processes."""
    from reflex_runtime.ipc.client_config import ClientConfig
    from reflex_runtime.ipc.spawn import spawned
    from reflex_runtime.llm.tokenizer import HFTokenizer
    from reflex_runtime.llm.workers.line import WorkersConfig
    from reflex_runtime.llm.workers.workers import opened

    command = [sys.executable, "-m", "reflex_runtime", "worker"]
    workers = WorkersConfig(
        count=config.workers,
        spawn=lambda number: spawned(command, env=gpu_of(config, number)),
        options=settings_of,
        batcher=batcher,
        client=ClientConfig(start_timeout_s=ClientConfig().start_timeout_s * len(plans)),
    )
    return opened(workers, {plan.name: HFTokenizer.load(plan.directory) for plan in plans})


def _traces(config: LLMServeConfig | EmbeddingServeConfig) -> list[str]:
    """The files of --trace: one, or one of each runtime process."""
    if not config.trace:
        return []
    workers = config.workers if isinstance(config, LLMServeConfig) else 0
    return [trace_of(config.trace, number) for number in range(workers)] or [config.trace]


def _announce(
    config: LLMServeConfig | EmbeddingServeConfig,
    batcher: GenerateBatcherConfig | None,
    asked: Sequence[ModelAsked],
    address: Any,
) -> None:
    """The settings in force, and what deserves a warning."""
    workers = isinstance(config, LLMServeConfig) and config.workers > 0
    rows = list(rows_of(asked))
    if workers and batcher is not None:
        own = asdict(batcher).items() - asdict(type(batcher)()).items()
        rows += [(f"{BATCHER}.{name}", one_line(value)) for name, value in sorted(own)]
    show_settings(config, ", ".join(model.name for model in asked), rows)
    warn_if_open(config, address)


def _ready(models: ModelRuntime, where: str) -> None:
    from reflex_runtime.llm.serving.served_model import ServedModel

    assert models.host is not None
    told = models.host.health()
    for model in models.all:
        runner = told.get("models", {}).get(model.name, told)["runner"]
        adapters = model.plan.adapters if isinstance(model, ServedModel) else ()
        names = ", ".join((model.name, *model.plan.aliases, *(f"{model.name}:{adapter}" for adapter in adapters)))
        what = _told_of(model, models.host)
        logging.info("ready on %s (%s, %s), as %s, pages: %s/dashboard and /docs", where, runner, what, names, where)


def _told_of(model: ServedModel | ServedEmbedding, host: ModelHost) -> str:
    """What a model takes and makes."""
    from reflex_runtime.llm.serving.served_model import ServedModel

    if isinstance(model, ServedModel):
        limits = host.generator(model.name).limits
        return f"context {limits.max_model_len:,} tokens, cache {limits.cache_tokens:,}"
    of = model.model
    ways = " + ".join(of.pooling)
    return f"{ways} of {of.max_model_len:,} tokens at most, {of.dimensions:,} dimensions"
