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
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reflex_runtime.cli import serving
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.demo import model_directory, told_apart
from reflex_runtime.llm.server.model_host import adapters_of, check_model, gpu_of, load_model, settings_of, trace_of
from reflex_runtime.observe import logs
from reflex_runtime.settings import LLMServeConfig, ServeConfig
from reflex_runtime.settings.declare import check_needs, one_line
from reflex_runtime.settings.read import load

if TYPE_CHECKING:
    from reflex_runtime.ipc.generate_batcher import GenerateBatcherConfig
    from reflex_runtime.llm.server.lifecycle import ServerState
    from reflex_runtime.llm.server.model_host import Open

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
    elsewhere = serving.options_of(ServeConfig, "policies")
    parser = serving.serve_parser(verbs, run, LLMServeConfig, what, _EXAMPLES, tables, elsewhere=elsewhere)
    parser.add_argument(
        "model", metavar="MODEL_DIR",
        help="directory: config.json, tokenizer.json, and safetensors or an export to OpenVINO (openvino_model.xml); "
        "scribe is the bundled model",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Check the settings, then open the port, then load."""
    from reflex_runtime.ipc.generate_batcher import GenerateBatcherConfig

    config, places = serving.settings(LLMServeConfig, args, (BATCHER,))
    check_needs(config, places)
    if "served_model_name" in places and not config.served_model_name.strip():
        raise ConfigError(f"{places['served_model_name']} is empty: give a name, or leave it out")
    if config.log_format != "text":
        os.environ["REFLEX_LOG_FORMAT"] = config.log_format  # for all lines of runtime processes
    batcher = load(GenerateBatcherConfig, BATCHER, args.config, {}, {}, beside=("serve",))
    if batcher != GenerateBatcherConfig() and not config.workers:
        logging.warning("%s: [%s] has no effect without --workers", args.config, BATCHER)
    config = replace(config, lora=tuple(_adapters(config.lora)))
    return serving.supervised(config, partial(_plan, config, batcher, model_directory(args.model)))


def _adapters(given: tuple[str, ...]) -> Iterator[str]:
    """The values of --lora with absolute directories, as runtime processes need them. Raises ConfigError."""
    names = set[str]()
    for text in given:
        name, equals, directory = text.partition("=")
        where = f"--lora={one_line(text)}"
        if not (equals and directory):
            raise ConfigError(f"{where}: must be NAME=DIR, where DIR is of peft and has adapter_config.json")
        if not _NAME.fullmatch(name):
            what = "must be 1 to 64 letters, digits, and . _ / -, and begin with a letter or a digit"
            raise ConfigError(f"{where}: the name {one_line(name)!r} {what}")
        if name in names:
            raise ConfigError(f"--lora={name}=…: two adapters have this name")
        names.add(name)
        yield f"{name}={Path(directory).resolve()}"


def _plan(
    config: LLMServeConfig, batcher: GenerateBatcherConfig, directory: Path, changed: Mapping[str, Any]
) -> serving.Served:
    """The server of the model. changed: settings of this process; always empty."""
    from reflex_runtime.ipc.spawn import spawned
    from reflex_runtime.llm import app
    from reflex_runtime.llm.engine.load import authors_said, describe, sampling_defaults
    from reflex_runtime.llm.engine.tokenizer import HFTokenizer
    from reflex_runtime.llm.server.local_model import open_model
    from reflex_runtime.llm.server.model_host import ModelPlan
    from reflex_runtime.llm.server.workers import WorkersConfig, one_bound, open_workers

    traces = [trace_of(config.trace, number) for number in range(config.workers) if config.trace]
    for trace in traces or [config.trace]:  # each runtime process has its own
        serving.check_outputs(replace(config, trace=trace))
    check_model(config, describe(directory))
    tokenizer = HFTokenizer.load(directory, quiet=True)  # without --workers only a check: the model has its own
    open: Open = partial(open_model, load_model)
    rows = list[tuple[str, str]]()
    if config.workers:
        config, batcher = one_bound(config, batcher)
        command = [sys.executable, "-m", "reflex_runtime", "worker"]
        workers = WorkersConfig(
            spawn=lambda number: spawned(command, env=gpu_of(config, number)), options=settings_of, batcher=batcher
        )
        open = partial(open_workers, workers, tokenizer)
        own = asdict(batcher).items() - asdict(type(batcher)()).items()
        rows = [(f"{BATCHER}.{name}", one_line(value)) for name, value in sorted(own)]
    name, defaults = config.served_model_name or directory.resolve().name, sampling_defaults(directory)
    plan = ModelPlan(name, config, directory, tuple(adapters_of(config)), defaults)
    fields = authors_said(defaults)
    notes = [(logging.INFO, f"requests without these fields get {fields} (generation_config.json)")] if fields else []
    make = partial(app.serving, plan, open)
    return serving.Served(config, make, name, told_apart(str(directory)), _ready, rows, notes)


def _ready(model: ServerState) -> str:
    assert model.host is not None
    runner, limits = model.host.health()["runner"], model.host.limits
    what = f"context {limits.max_model_len:,} tokens, cache {limits.cache_tokens:,}"
    return f" ({runner}, {what}), as {', '.join(model.names)}"


# -- reflex worker -----------------------------------------------------------------------------------------------------

_WORKER_EPILOG = """\
`reflex serve MODEL_DIR --workers N` starts this command with one end of a socket pair as its standard input. Any
program can do so; docs/workers.md has the messages. The process ends when the connection ends.
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
    # Signals are ignored: if the whole group gets one, the parent still needs this process to drain, and ends it later.
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
            logs.leave(status)  # a thread hangs in a model: a normal exit might crash
    return status
