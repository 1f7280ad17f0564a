"""`reflex serve MODEL_DIR`, a language model behind HTTP, and `reflex worker`, a runtime process.

`reflex_runtime.cli` registers this form of `serve` if its argument is the directory of a language model.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reflex_runtime.cli.serving import (
    check_trace,
    options_of,
    run_server,
    serve_parser,
    show_settings,
    supervised,
)
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import model_directory, told_apart
from reflex_runtime.llm.server.model_host import adapters_of, check_model, gpu_of, load_model, settings_of, trace_of
from reflex_runtime.observe import logs
from reflex_runtime.settings import LLMServeConfig, ServeConfig
from reflex_runtime.settings.declare import one_line
from reflex_runtime.settings.read import environment, load
from reflex_runtime.web.access import warn_if_open

if TYPE_CHECKING:
    from reflex_runtime.ipc.generate_batcher import GenerateBatcherConfig
    from reflex_runtime.llm.server.lifecycle import ServerState
    from reflex_runtime.llm.server.model_host import ModelPlan, Open
    from reflex_runtime.web.supervisor import Parent

BATCHER = "generate_batcher"  # a table of the configuration file
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")

_EXAMPLES = """\
examples:
  reflex serve scribe                                          the bundled model: stories, and this project's words
  reflex serve ./my-model --max-num-batched-tokens 512         shorter steps: more even gaps between tokens
  reflex serve ./my-model --workers 1                          the model in a process of its own
  reflex serve ./my-model --trace steps.jsonl                  then: reflex trace steps.jsonl

then, with any client of the OpenAI API:
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "scribe", "prompt": "Once there was", "max_tokens": 60}'
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    """Register the verb for a language model."""
    what = "Serve a language model over HTTP with the OpenAI API, by continuous batching."
    tables = "a table [serve], [generate_batcher] for --workers"
    elsewhere = options_of(ServeConfig, "policies")
    parser = serve_parser(verbs, LLMServeConfig, what, _EXAMPLES, tables, elsewhere=elsewhere)
    parser.add_argument(
        "model", metavar="MODEL_DIR",
        help="directory: config.json, tokenizer.json, and safetensors or an export to OpenVINO (openvino_model.xml); "
        "scribe is the bundled model",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the settings, then open the port, then load."""
    from reflex_runtime.ipc.generate_batcher import GenerateBatcherConfig

    logs.begin()
    config = load(LLMServeConfig, "serve", args.config, environment(), vars(args), (BATCHER,))
    logs.use(config.log_format)
    if config.log_format != "text":
        os.environ["REFLEX_LOG_FORMAT"] = config.log_format  # for runtime processes, from their first line on
    batcher = load(GenerateBatcherConfig, BATCHER, args.config, {}, {}, beside=("serve",))
    if batcher != GenerateBatcherConfig() and not config.workers:
        logging.warning("%s: [%s] has no effect without --workers", args.config, BATCHER)
    config = replace(config, lora=tuple(_adapters(config.lora)))
    directory = model_directory(args.model)
    serve = partial(_serve, config, batcher, directory)
    return supervised(config, lambda: plan_of(config, directory), serve)


def _adapters(given: tuple[str, ...]) -> Iterator[str]:
    """--lora with absolute directories, for runtime processes."""
    names = set[str]()
    for text in given:
        name, equals, directory = text.partition("=")
        where = f"--lora={one_line(text)}"
        if not (equals and directory):
            raise ConfigError(f"{where}: must be NAME=DIR, DIR a directory of peft with adapter_config.json")
        if not _NAME.fullmatch(name):
            what = "must be 1 to 64 letters, digits, and . _ / -, and begin with a letter or a digit"
            raise ConfigError(f"{where}: the name {one_line(name)!r} {what}")
        if name in names:
            raise ConfigError(f"--lora={name}=…: two adapters have this name")
        names.add(name)
        yield f"{name}={Path(directory).resolve()}"


def plan_of(config: LLMServeConfig, directory: Path) -> ModelPlan:
    """The plan of the model. Raises ConfigError for errors that show before it is loaded."""
    from reflex_runtime.llm.engine.load import describe, sampling_defaults
    from reflex_runtime.llm.engine.tokenizer import HFTokenizer
    from reflex_runtime.llm.server.model_host import ModelPlan
    from reflex_runtime.observe.tracing import check_otel

    for path in _traces(config):
        check_trace(path)
    check_otel(config.otel)
    check_model(config, describe(directory))
    HFTokenizer.load(directory, quiet=True)  # a check; it is loaded again with the model
    name = config.served_model_name or directory.resolve().name
    return ModelPlan(name, config, directory, tuple(adapters_of(config)), sampling_defaults(directory))


def _serve(
    config: LLMServeConfig,
    batcher: GenerateBatcherConfig,
    directory: Path,
    sockets: Sequence[socket.socket],
    parent: Parent | None,
) -> int:
    """Run the server, with or without a supervisor."""
    from reflex_runtime.ipc.spawn import spawned
    from reflex_runtime.llm.app import serving
    from reflex_runtime.llm.engine.tokenizer import HFTokenizer
    from reflex_runtime.llm.server.local_model import open_model
    from reflex_runtime.llm.server.workers import WorkersConfig, one_bound, open_workers

    plan = plan_of(config, directory)
    if config.workers:
        config, batcher = one_bound(config, batcher)  # as they are shown
        plan = replace(plan, config=config)
        command = [sys.executable, "-m", "reflex_runtime", "worker"]
        workers = WorkersConfig(
            spawn=lambda number: spawned(command, env=gpu_of(config, number)), options=settings_of, batcher=batcher
        )
        open: Open = partial(open_workers, workers, HFTokenizer.load(plan.directory, quiet=True))
    else:
        open = partial(open_model, load_model)
    _announce(plan, batcher)
    warn = not config.workers  # runtime processes have ended
    return run_server(config, serving(plan, open), sockets, told_apart(str(directory)), _ready, parent, warn)


def _traces(config: LLMServeConfig) -> list[str]:
    """The files of --trace: one, or one for each runtime process."""
    if not config.trace:
        return []
    return [trace_of(config.trace, number) for number in range(config.workers)] or [config.trace]


def _announce(plan: ModelPlan, batcher: GenerateBatcherConfig) -> None:
    """Log the settings and warnings."""
    rows = list[tuple[str, str]]()
    if plan.config.workers:
        own = asdict(batcher).items() - asdict(type(batcher)()).items()
        rows = [(f"{BATCHER}.{name}", one_line(value)) for name, value in sorted(own)]
    show_settings(plan.config, plan.name, rows)
    warn_if_open(plan.config)
    from reflex_runtime.llm.engine.load import authors_said

    if said := authors_said(plan.defaults):
        logging.info("requests without these fields get %s (generation_config.json)", said)


def _ready(model: ServerState, where: str) -> None:
    assert model.host is not None
    runner, limits = model.host.health()["runner"], model.host.limits
    what = f"context {limits.max_model_len:,} tokens, cache {limits.cache_tokens:,}"
    names = ", ".join(model.names)
    logging.info("ready on %s (%s, %s), as %s, pages: %s/dashboard and /docs", where, runner, what, names, where)


# -- reflex worker -----------------------------------------------------------------------------------------------------

_WORKER_EPILOG = """\
`reflex serve MODEL_DIR --workers N` starts this command with one end of a socket pair as its standard input, and so may
any program. docs/workers.md has the messages. The process ends when the connection ends.
"""


def add_worker(verbs: argparse._SubParsersAction[Any]) -> None:
    what = "Run language models for the process that started this one."
    parser = verbs.add_parser("worker", description=what, epilog=_WORKER_EPILOG)
    parser.set_defaults(run=worker)


def worker(args: argparse.Namespace) -> int:
    """Serve the connection until it ends."""
    from reflex_runtime.ipc.worker import serve
    from reflex_runtime.llm.server.local_model import loading
    from reflex_runtime.observe.journal_writer import turn_all
    from reflex_runtime.run.process import loop_factory

    form = f"%(asctime)s %(levelname)s %(name)s[{os.getpid()}] %(message)s"
    logs.begin(form)
    logs.use(os.environ.get("REFLEX_LOG_FORMAT", "text"))
    # The parent ends this process: in a drain after a signal to the whole group it still needs it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    def lost() -> None:
        logging.error("the model is lost; the process ends")
        logs.leave(1)

    async def main() -> tuple[int, bool]:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, turn_all)
        return await serve(loading(load_model, lost))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        status, clean = runner.run(main())
        if not clean:
            logs.leave(status)  # a thread hangs in a model: a usual exit might crash
    return status
