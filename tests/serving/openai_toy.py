"""A server of the toy model in this process: real sockets, a real loop in a thread of its own, and a model that stops
where a test wants it to. Nothing here sleeps: whoever waits, waits for an event or a condition.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.batch import Event, RequestQueued, RequestSettled
from reflex_runtime.core.request import Ticket
from reflex_runtime.llm.app import serving as making
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.llm.runners.runner import Step
from reflex_runtime.llm.server.lifecycle import ServerState
from reflex_runtime.llm.server.local_model import open_model
from reflex_runtime.llm.server.model_host import ModelPlan, Open
from reflex_runtime.run.process import loop_factory
from reflex_runtime.settings import LLMServeConfig
from reflex_runtime.web.serve import Make, serve
from reflex_runtime.web.supervisor import bind

from .harness import Answer, Metrics

T = TypeVar("T")
PATIENCE = 60.0  # seconds until a test gives up; nothing waits this long unless it is broken
HEAD = {"Content-Type": "application/json"}

# A tool, a call of it, and an answer of a reasoning model that says something and calls it.
MOVE_PARAMETERS: dict[str, Any] = {
    "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False,
}  # fmt: skip
CALL = '<tool_call>\n{"name": "move", "arguments": {"x": 4}}\n</tool_call>'
TALK = f"<think>\nI should move.\n</think>\n\nI move it. {CALL}"


class Gate:
    """Where a model stops if a test wants it to. sizes: what each pass had, as its owner counts it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.allowed: float = float("inf")
        self.inside = False
        self.sizes: list[int] = []

    def pass_through(self, size: int) -> None:
        """Wait until it may go on."""
        with self.changed:
            self.sizes.append(size)
            self.inside = True
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.allowed > 0, PATIENCE), "the test never let the step go"
            self.allowed -= 1
            self.inside = False

    def stop(self) -> None:
        """From now on a step waits inside."""
        with self.changed:
            self.allowed = 0

    def go(self, steps: float = float("inf")) -> None:
        """Let so many steps go."""
        with self.changed:
            self.allowed += steps
            self.changed.notify_all()

    def wait_inside(self) -> None:
        """Returns once a step waits at the gate."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.inside and self.allowed <= 0, PATIENCE)

    def step(self) -> None:
        """Let the step that waits go, and wait for the next one at the gate."""
        with self.changed:
            seen = len(self.sizes)
            self.allowed += 1
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(self.sizes) > seen and self.inside, PATIENCE)


class Model(Gate, ToyRunner):
    """The toy, with a gate before each step. sizes: tokens of each step so far, those of the warm-up first."""

    def __init__(self, num_blocks: int = 4096, block_size: int = 16, max_model_len: int = 8192) -> None:
        Gate.__init__(self)
        ToyRunner.__init__(self, num_blocks, block_size, max_model_len)
        self.fails: Callable[[Step], Exception | None] = lambda step: None

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        self.pass_through(len(step.token_ids))
        error = self.fails(step)
        if error is not None:
            raise error
        return super().forward(step)


class Speaker(Model):
    """A model that always says the same, whatever the prompt."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text, self._begin = text.encode() + bytes(1), 0

    def forward(self, step: Step) -> Any:
        logits = super().forward(step)
        if len(step.token_ids) > 1:
            self._begin = int(step.positions[-1])
        at = int(step.positions[-1]) - self._begin
        logits[-1, self._text[min(at, len(self._text) - 1)]] = 1000.0
        return logits


def toy_model(runner: ToyRunner, config: LLMServeConfig | None = None) -> ServerState:
    """The toy as the model of a server that is to be started."""
    open = partial(open_model, lambda plan: (runner, ByteTokenizer()))
    return ServerState(ModelPlan("toy", config or LLMServeConfig()), open)


class Log:
    """A sink that keeps everything and can be waited for from another thread."""

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self.changed:
            self.seen.append(event)
            self.changed.notify_all()

    def of(self, kind: type[T]) -> list[T]:
        with self.changed:
            return [event for event in self.seen if isinstance(event, kind)]

    def wait(self, kind: type[T], count: int = 1, where: Callable[[T], bool] = lambda event: True) -> T:
        """The count-th event of a kind that fulfils a condition, come or still to come."""

        def found() -> list[T]:
            return [event for event in self.seen if isinstance(event, kind) and where(event)]

        with self.changed:
            assert self.changed.wait_for(lambda: len(found()) >= count, PATIENCE), (kind, self.seen[-5:])
            return found()[count - 1]


class Toy:
    """`reflex serve` of the toy. Use it in a with statement; `status` is its exit status afterwards."""

    def __init__(
        self, runner: Model | None = None, wait_ready: bool = True, send_buffer: int = 0, **config: Any
    ) -> None:
        """send_buffer: bytes the kernel keeps of an answer that is not read, 0 for its own choice."""
        self.runner = runner or Model()
        self.config = self.settings(**({"served_model_name": "toy", "drain_timeout_s": 5.0} | config))
        self.log = Log()
        self.model: Any = None
        self.batcher: Any = None
        self.pool: Any = None
        self.status: int | None = None
        self.clean: bool | None = None
        self._wait_ready, self._send_buffer = wait_ready, send_buffer
        self._listening, self._ready = threading.Event(), threading.Event()
        self._stop: Callable[[], object] = lambda: None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="toy-server", daemon=True)

    settings: type[Any] = LLMServeConfig

    def plan(self) -> ModelPlan:
        """The model that is served."""
        return ModelPlan(self.config.served_model_name, self.config)

    def making(self) -> Make:
        """What is served."""
        return partial(making, self.plan(), self.opening())

    def opening(self) -> Open:
        """How the model is opened: in this process."""
        return partial(open_model, self.load)

    def come(self, product: Any) -> None:
        """What is served is ready."""
        self.came(self.generator)

    def came(self, runtime: Any) -> None:
        """The model is ready."""
        self.batcher, self.pool = runtime.batcher, runtime.processor.pool
        self.batcher.add_sink(self.log)

    def load(self, plan: ModelPlan) -> tuple[Model, ByteTokenizer]:
        return self.runner, ByteTokenizer()

    @property
    def generator(self) -> Any:
        """What generates, once the model is ready."""
        assert self.model is not None
        assert self.model.host is not None
        return self.model.host

    def _run(self) -> None:
        sock = bind("127.0.0.1", 0)
        if self._send_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
        self.port = sock.getsockname()[1]

        def ready(model: Any) -> None:
            self.model = model
            if model.state == "ready":
                self.come(model)
            self._ready.set()

        async def main() -> None:
            stop = asyncio.Event()
            self.loop = asyncio.get_running_loop()
            self._stop = lambda: self.loop.call_soon_threadsafe(stop.set)
            self.status, self.clean = await serve(
                self.making(), [sock], self.config, self._listening.set, ready, stop=stop
            )

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listening.wait(PATIENCE)
        if self._wait_ready:
            assert self._ready.wait(PATIENCE)
        return self

    def __exit__(self, *exc: object) -> None:
        self.runner.go()
        self.end()

    def stop(self) -> None:
        """What SIGTERM does."""
        self._stop()

    def end(self) -> None:
        """Stop it and wait until it is gone."""
        with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended by itself
            self._stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def join(self) -> None:
        """Wait until it is gone by itself."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def on_loop(self, function: Callable[[], T]) -> T:
        """Call it on the server's loop and return what it does."""
        assert self.loop is not None

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(PATIENCE)

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read(), time.perf_counter() - began)
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, fields: Any, **headers: str) -> Answer:
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        return self.ask("POST", path, body, HEAD | headers)

    def complete(self, prompt: Any = "robots", **fields: Any) -> Answer:
        return self.post("/v1/completions", {"model": "toy", "prompt": prompt, "temperature": 0} | fields)

    def chat(self, *said: str, **fields: Any) -> Answer:
        messages = [{"role": "user", "content": text} for text in said]
        return self.post("/v1/chat/completions", {"model": "toy", "messages": messages, "temperature": 0} | fields)

    def error(self, answer: Answer) -> Any:
        """The error of an answer, whose body has the API's form."""
        found = answer.json
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "param", "code"}
        assert "x-request-id" in answer.headers
        return found["error"]

    def metrics(self) -> Metrics:
        return Metrics(self.get("/metrics").body.decode())

    def open(self, prompt: Any = "robots", *, name: str = "r", receive_buffer: int = 0, **fields: Any) -> Caller:
        """A connection on which a completion was asked for and nothing read. name: the request's id."""
        asked = {"model": "toy", "prompt": prompt, "temperature": 0} | fields
        return Caller(self.port, "/v1/completions", asked, name, receive_buffer)

    def ticket(self, name: str) -> Ticket:
        """The ticket of the request of this id, once it is queued."""
        self.until(lambda: self._flush() or self._named(name) is not None)
        ticket = self._named(name)
        assert ticket is not None
        return ticket

    def _named(self, name: str) -> Ticket | None:
        return next((e.ticket for e in self.log.of(RequestQueued) if e.ticket.id == name), None)

    def _flush(self) -> None:
        assert self.model is not None
        if self.batcher is not None:
            self.batcher._pump(all=True)  # a turn ends early where its time is over

    def settled(self, name: str) -> Ticket:
        """The same, once it has ended and everybody was told."""
        return self.log.wait(RequestSettled, where=lambda event: event.ticket.id == name).ticket

    def until(self, holds: Callable[[], bool]) -> None:
        """Ask the server's loop until it holds; each time it has turned."""
        end = time.monotonic() + PATIENCE
        while not self.on_loop(holds):
            assert time.monotonic() < end, "never held"

    def flush(self) -> None:
        """Hand the sinks what nobody waits for."""
        self.on_loop(self._flush)


class Caller:
    """A connection that has asked. read: what comes, as it comes."""

    def __init__(self, port: int, path: str, fields: Any, name: str = "r", receive_buffer: int = 0) -> None:
        self.sock = socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(("127.0.0.1", port))
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nX-Request-Id: {name}\r\n\r\n"
        self.sock.sendall(head.encode() + body)
        self.data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def hang_up(self) -> None:
        self.sock.close()

    def read_until(self, mark: bytes) -> bytes:
        """Read until the mark has come; everything read so far."""
        while mark not in self.data:
            part = self.sock.recv(65536)
            assert part, self.data
            self.data += part
        return self.data

    def read(self) -> bytes:
        """Everything until the server has said the last of it."""
        return self.read_until(b"0\r\n\r\n")

    @property
    def said(self) -> list[Any]:
        """The events of a stream read so far."""
        lines = [line[6:] for line in self.data.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line.strip() != b"[DONE]"]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.said for choice in event.get("choices", ()))
