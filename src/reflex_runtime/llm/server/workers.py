"""The model in runtime processes: the server parses and tokenises, the processes compute.

Each process has its own copy of the model, its own queue and its own places. A request goes to the process with the
fewest unfinished requests, and stays there. When a process dies its requests fail at once and it is started again; the
others go on.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from prometheus_client import Metric
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.core.events import Event
from reflex_runtime.ipc.client import start_all
from reflex_runtime.ipc.messages import LIVE, METRICS, STATE
from reflex_runtime.llm.engine.tokenizer import Tokenizer
from reflex_runtime.llm.server.model_host import Open, Opening
from reflex_runtime.llm.server.remote_generator import RemoteGenerator
from reflex_runtime.llm.server.worker_line import Line, TokenizerProcess, WorkersConfig
from reflex_runtime.observe.live import LiveParts, LiveProcess, LiveSnapshot, added, live_process
from reflex_runtime.observe.series import WORKERS, SeriesSet, rendered
from reflex_runtime.run.audience import Sink

ENDS_WITHIN, AT_LEAST = 10.0, 2.0  # seconds for a process to exit: at most, of the time that is left, and at least
WITHIN: Final = 2.0  # seconds for an answer of a process; one that takes longer shows nothing
_Told = dict[str, LiveSnapshot | None]


class Workers:
    """A `ModelHost` of runtime processes. Made by `opened`."""

    def __init__(self, config: WorkersConfig, tokenizer: Tokenizer, opening: Opening) -> None:
        self._opening, plan = opening, opening.plan
        path = str(plan.directory.resolve())
        self._tokenizing = TokenizerProcess(config.spawn(config.count), config.client, plan.name, path)
        self.lines = [Line(number, config, opening) for number in range(config.count)]
        self.generator = RemoteGenerator(plan.name, self.lines, tokenizer, self._tokenizing)
        self._series = SeriesSet(WORKERS, opening.registry)
        self._refresh()

    async def start(self) -> None:
        """Start all processes; returns when every one has loaded the model. Raises the error of the first that
        fails."""
        self._opening.reached("loading")
        clients = [*(line.client for line in self.lines), self._tokenizing.client]
        try:
            await start_all(clients)
        except BaseException:
            await self.close(0.0)
            raise
        self.generator.loaded()

    @property
    def state(self) -> str:
        """ready while one of the processes is."""
        return "ready" if any(line.client.ready for line in self.lines) else "restarting"

    def health(self) -> dict[str, Any]:
        """See `ModelHost.health`."""
        workers = [line.health() for line in self.lines]
        return {
            "runner": self.lines[0].about.get("runner", ""),
            "max_model_len": self.generator.limits.max_model_len,
            "running": sum(worker["running"] for worker in workers),
            "waiting": sum(worker["waiting"] for worker in workers),
            "model_loaded": self.state == "ready",
            "workers": workers,
            "tokenizer": {"state": self._tokenizing.client.state, "restarts": self._tokenizing.client.restarts},
        }

    async def status(self) -> dict[str, Any]:
        """The statistics of each line, and the state that its process reports."""
        states = await asyncio.gather(*(line.ask(STATE) for line in self.lines))
        lines = [
            {
                "name": line.name,
                "client": line.client.stats(),
                "streams": line.registry.snapshot(),
                "generate": line.batcher.get_stats(),
                "engine": state,
            }
            for line, state in zip(self.lines, states, strict=True)
        ]
        return {"lines": lines}

    def get_batch_stats(self) -> dict[str, Any]:
        """`generate`: `GenerateBatcher.get_stats` of each process."""
        return {"generate": {line.name: line.batcher.get_stats() for line in self.lines}}

    def _refresh(self) -> None:
        """Update the series in the registry."""
        for line in self.lines:
            self._series.gauge("reflex_worker_ready", line.name).set(line.client.ready)
            self._series.counter("reflex_worker_restarts_total", line.name).value = float(line.client.restarts)

    async def metrics(self) -> bytes:
        """The pages of the processes that answer, as one."""
        self._refresh()
        answers = await asyncio.gather(*(line.ask(METRICS) for line in self.lines))
        pages = {
            line.name: answer["text"] for line, answer in zip(self.lines, answers, strict=True) if answer is not None
        }
        return await asyncio.get_running_loop().run_in_executor(None, _page, pages)

    def add_sink(self, sink: Sink) -> None:
        """See `ModelHost.add_sink`: the batches are messages to the processes."""
        for line in self.lines:
            line.batcher.add_sink(sink)

    def remove_sink(self, sink: Sink) -> None:
        """See `ModelHost.remove_sink`."""
        for line in self.lines:
            line.batcher.remove_sink(sink)

    def fold(self) -> WorkersLive:
        """See `ModelHost.fold`: the steps of the processes."""
        return WorkersLive(self.lines)

    def processes(self) -> list[LiveProcess]:
        """The runtime processes, and that which tokenises long prompts."""
        tokenizing = self._tokenizing.client
        told = live_process("tokenizer", tokenizing.pid, tokenizing.state, tokenizing.restarts, None, None)
        return [*(line.process() for line in self.lines), told]

    def queues(self) -> dict[str, Any]:
        """What waits for each process."""
        return {line.name: line.batcher.queue() for line in self.lines}

    def turn(self) -> None:
        """See `ModelHost.turn`."""
        for line in self.lines:
            if line.client.ready and line.client.pid is not None:  # before that the signal would end it
                with suppress(ProcessLookupError):
                    os.kill(line.client.pid, signal.SIGHUP)

    async def close(self, timeout: float) -> bool:
        """See `ModelHost.close`. No process is left."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        await asyncio.gather(*(line.batcher.close(timeout > 0, timeout) for line in self.lines))
        await asyncio.gather(*(line.registry.wait_idle(max(0.0, until - loop.time())) for line in self.lines))
        within = min(ENDS_WITHIN, max(AT_LEAST, until - loop.time()))
        closing = [line.client.close(within, line.running == 0) for line in self.lines]
        await asyncio.gather(*closing, self._tokenizing.client.close(within))
        self.generator.close()
        return True


def _page(pages: Mapping[str, str]) -> bytes:
    """The Prometheus pages of the processes as one."""
    return labelled("worker", {name: text_string_to_metric_families(text) for name, text in pages.items()})


def opened(config: WorkersConfig, tokenizer: Tokenizer) -> Open:
    """How to open the model in runtime processes."""

    async def open(opening: Opening) -> Workers:
        workers = Workers(config, tokenizer, opening)
        await workers.start()
        return workers

    return open


def labelled(label: str, pages: Mapping[str, Iterable[Metric]]) -> bytes:
    """The families of each name as one page of Prometheus text, every sample with its name as this label."""
    families: dict[str, Metric] = {}
    for name, page in pages.items():
        for family in page:
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [
                Sample(s.name, {**s.labels, label: name}, s.value, s.timestamp, s.exemplar) for s in family.samples
            ]
    return rendered(families.values())


class WorkersLive:
    """The fold of a model in runtime processes. lines: all of them."""

    events: frozenset[type[Event]] = frozenset()

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._parts = LiveParts()
        self._asking: dict[str, asyncio.Task[None]] = {}

    def __call__(self, event: Event) -> None:
        """Nothing: its events come from the processes."""

    def snapshot(self, now: float, server: Mapping[str, Any]) -> LiveSnapshot:
        """What the processes have answered since the last one; and ask again."""
        for line in self._lines:
            if line.name not in self._asking:
                task = self._asking[line.name] = asyncio.get_running_loop().create_task(self._ask(line))
                task.add_done_callback(lambda _, name=line.name: self._asking.pop(name))  # type: ignore[misc]
        return self._parts.snapshot(now, {**server, **self._told(server)})

    async def _ask(self, line: Line) -> None:
        try:
            found: _Told = await line.client.request(LIVE, {}, _Told, WITHIN) if line.client.ready else {}
        except ReflexError:
            found = {}
        shown = next((snapshot for snapshot in found.values() if snapshot is not None), None)
        if shown is None:
            self._parts.forget(line.name)
        else:
            self._parts.take(line.name, shown)

    def _told(self, server: Mapping[str, Any]) -> dict[str, Any]:
        """The queues of the engines together, beside those of messages to each process, and how full the fullest cache
        is."""
        shown = [snapshot.server for snapshot in self._parts.newest.values()]
        queues: dict[str, Any] = {}
        for told in shown:
            for group, queue in told["queues"].items():
                queues[group] = added(queues[group], queue) if group in queues else queue
        usage = max((told["kv_cache_usage"] for told in shown), default=None)
        model = {**server.get("model", {}), **({} if usage is None else {"kv_cache_usage": usage})}
        return {"queues": {**queues, **server.get("queues", {})}, "model": model}
