"""`reflex worker`: a runtime process, as `reflex serve MODEL_DIR --workers N` starts them; so may any program."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from typing import Any

from reflex_runtime.observe import logs

_EPILOG = """\
`reflex serve MODEL_DIR --workers N` starts this command with one end of a socket pair as its standard input; your
program may do the same. The messages are JSON-RPC 2.0 in length-prefixed frames (docs/workers.md). `load_model` names
the model. The process ends when the connection ends.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "worker",
        description="Run language models for the process that started this one.",
        epilog=_EPILOG,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve the connection until it ends."""
    from reflex_runtime.ipc.worker import serve
    from reflex_runtime.llm.server.local_model import loading
    from reflex_runtime.llm.server.model_host import load_model
    from reflex_runtime.observe.journal_writer import turn_all
    from reflex_runtime.run.process import loop_factory

    form = f"%(asctime)s %(levelname)s %(name)s[{os.getpid()}] %(message)s"
    logs.begin(form)
    logs.use(os.environ.get("REFLEX_LOG_FORMAT", "text"))
    # The parent decides when to end: one that drains, because the whole group got a signal, still needs this process.
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
            logs.leave(status)  # a thread is stuck in a model: an interpreter that shuts down around it may crash
    return status
