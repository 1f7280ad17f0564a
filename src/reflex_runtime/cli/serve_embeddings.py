"""`reflex serve MODEL_DIR …`, where every directory is that of an embedding model: serve them with the OpenAI API.

The verb is that of `serve`, with options of its own: `reflex_runtime.cli` registers it when it gets such directories.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from reflex_runtime.cli import logs
from reflex_runtime.cli.serve_llm import checked, serve_models
from reflex_runtime.cli.serve_models import models_of
from reflex_runtime.cli.serving import api_form, options_of, serve_parser, supervised
from reflex_runtime.config import EmbeddingServeConfig, LLMServeConfig
from reflex_runtime.sources import MODELS, environment, load

_EXAMPLES = """\
examples:
  reflex serve ./all-MiniLM-L6-v2
  reflex serve ./bge-small-en-v1.5 --max-batch-cost-ms 30    shorter batches: short texts wait less behind long ones
  reflex serve ./my-bert --pooling cls                       a bare encoder, which does not say how it pools
  reflex serve small=./all-MiniLM-L6-v2 large=./bge-m3       two models on one device; a request's model says which
  reflex serve chat=./Qwen3-0.6B embed=./all-MiniLM-L6-v2    beside a language model, whose options the command has then

then, with any client of the OpenAI API:
  curl localhost:8000/v1/embeddings -H 'Content-Type: application/json' \\
    -d '{"model": "all-MiniLM-L6-v2", "input": ["a robot arm", "a camera"]}'
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb for embedding models."""
    what = "Serve embedding models over HTTP with the OpenAI API. Texts share batches within a cost budget."
    tables = "a table [serve], [models.NAME] for several models"
    elsewhere = options_of(LLMServeConfig, "models that generate")
    parser = serve_parser(
        verbs, EmbeddingServeConfig, what, _EXAMPLES, tables, elsewhere=elsewhere, anywhere="model"
    )
    parser.add_argument(
        "model", nargs="*", metavar="[NAME=]MODEL_DIR",
        help="directory of sentence-transformers (modules.json), or of an encoder (BERT, RoBERTa and others). Several "
        "are served together, each by its name; none is named where the file of --config has tables [models.NAME]",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything that can be checked, then open the port, then load."""
    logs.begin()
    config = load(EmbeddingServeConfig, "serve", args.config, environment(), vars(args), (MODELS,))
    logs.use(config.log_format)
    asked = models_of(config, args.model, args.config)
    serve = partial(serve_models, config, None, asked)
    return supervised(config, lambda: checked(config, asked), serve, api_form)
