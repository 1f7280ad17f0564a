"""A real `reflex serve` in a process of its own, and clients that speak to it over real sockets.

Nothing here sleeps: a server is ready when its pipe says so, and a state is reached when /metrics shows it. They are
asked again when the server has rung: its scheduler took an input, or its sinks an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from forked import Forked, reflex
from reflex_runtime.cli.serving import kind_of

PATIENCE = 60.0  # seconds until a test gives up; nothing waits this long unless it is broken
UNHEARD = 0.05  # seconds until a test asks again for what rings no bell
STATE = [0.1, -0.2]


@dataclass
class Answer:
    """One HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float = 0.0

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"])


# Run in the server's process: a batch with the request `plug` waits for a byte of the pipe, and teaches nothing.
_HELD = """
import reflex_runtime.run.device as device
from reflex_runtime.core.cost import TimeCost
_run, _observe = device.run_batch, TimeCost.observe

def _plugged(batch):
    return any(ticket.request.id == "plug" for ticket in batch.grants)

def _held(processor, batch):
    if _plugged(batch):
        with open({pipe!r}, "rb", buffering=0) as gate:
            gate.read(1)
    return _run(processor, batch)

device.run_batch = _held
TimeCost.observe = lambda self, batch, elapsed: None if _plugged(batch) else _observe(self, batch, elapsed)
"""

# Run in the server's process: what is learned is that a batch takes what the test says.
_DECLARED = """
from reflex_runtime.core.cost import TimeCost
_learn = TimeCost.observe
TimeCost.observe = lambda self, batch, elapsed: _learn(self, batch, {takes})
"""


# Run in the process of a policy server: it rings when its scheduler took an input, or its sinks were told of one.
_RINGS = """
def _ringing():
    import os
    from reflex_runtime.core.scheduler import Scheduler
    from reflex_runtime.run.audience import Audience
    bell = os.open({pipe!r}, os.O_WRONLY | os.O_NONBLOCK)

    def rings(owner, name):
        plain = getattr(owner, name)
        def ringing(*given, **named):
            try:
                return plain(*given, **named)
            finally:
                try:
                    os.write(bell, b".")
                except OSError:  # nobody listens any more, or there are thousands that nobody has heard
                    pass
        setattr(owner, name, ringing)

    for name in ("submit", "prepared", "complete", "cancel", "abandon"):
        rings(Scheduler, name)
    for name in ("tell", "publish"):
        rings(Audience, name)

_ringing()
"""

_bells: set[int] = set()  # of the servers that run, for reading


def changed() -> None:
    """Wait until something has happened in a server, since this was last called.

    Only what happens in a policy server's own process rings. Replicas, models and what a clock alone changes are asked
    again after `UNHEARD`.
    """
    bells = select.poll()
    for bell in list(_bells):
        bells.register(bell, select.POLLIN)
    for bell, _ in bells.poll(1e3 * UNHEARD):
        with contextlib.suppress(OSError):  # another thread has heard it, or ended its server
            os.read(bell, 65536)


class Latch:
    """Keeps code of other processes waiting while it is shut: `wait` is Python that they run. It is open at first.

    A lock on a file: nobody polls, and it opens by itself when the test ends.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self.wait = f"with open({str(path)!r}) as latch: __import__('fcntl').flock(latch, {fcntl.LOCK_SH})"

    def shut(self) -> None:
        """From now on they wait."""
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self) -> None:
        """Let all of them go, and those that come later."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Open it for good."""
        self._file.close()


class Server:
    """`reflex serve EXPORT --port 0 OPTIONS`. Use it in a with statement: on the way out no process is left."""

    def __init__(
        self,
        export: Path | str,
        *options: str,
        env: Mapping[str, str] | None = None,
        until: str = "ready on",
        before: str = "",
        held: bool = False,
        takes: str = "",
        supervised: bool = False,
        cold: bool = False,
    ) -> None:
        """until: the line of its log to wait for. before: Python to run in its process first (a drill from inside).

        held: the batch with the request `plug` runs when the test calls `release`, so that a queue can be arranged
        behind it without a race. takes: seconds that a `batch` is taken to have taken, as Python, however long it did;
        a millisecond where one is held, so that all that waits fits into a batch.
        supervised: whether it runs below a supervisor; otherwise `process` is the server itself. cold: in a new Python,
        as it is for a user; otherwise the server of a policy has its imports behind it (see `Forked`).
        """
        self._folder = tempfile.TemporaryDirectory()
        self._gate = -1
        if takes or held:
            before += _DECLARED.format(takes=takes or "0.001")
        if held:
            pipe = f"{self._folder.name}/gate"
            os.mkfifo(pipe)
            self._gate = os.open(pipe, os.O_RDWR)  # for both, so that neither end ever waits to be opened
            before += _HELD.format(pipe=pipe)
            options = ("--watchdog-s", "0", "--brief-ms", "0", *options)  # a busy machine takes its time
        warm = not cold and kind_of([str(export)]) != "model"
        self._bell = -1
        if warm:
            pipe = f"{self._folder.name}/bell"
            os.mkfifo(pipe)
            self._bell = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
            _bells.add(self._bell)
            before += _RINGS.format(pipe=pipe)
        alone = [] if supervised else ["--no-supervise"]
        arguments = ["serve", str(export), "--port", "0", *alone, *options]
        run = f"{before}\nimport sys; from reflex_runtime.cli import main; sys.exit(main({arguments!r}))"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("REFLEX_")}
        clean |= env or {}
        self.process: Forked | subprocess.Popen[bytes] = Forked(run, env=clean) if warm else _cold(run, clean)
        self.log: list[str] = []
        self.told = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._until = until
        self.port = 0
        self._killed = False

    def __enter__(self) -> Self:
        try:
            found = re.search(r"https?://[^ ,]*:(\d+)", self.wait_log(self._until))
            self.port = int(found[1]) if found else 0
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        died = self.process.poll()
        if died is not None and died < 0 and not self._killed:
            raise AssertionError(f"the server died of signal {-died}:\n" + "\n".join(self.log))
        family: list[Any] = [self.process]
        with contextlib.suppress(psutil.NoSuchProcess):
            family += psutil.Process(self.process.pid).children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with the one before
                process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        if self._gate >= 0:
            os.close(self._gate)
        if self._bell >= 0:
            _bells.remove(self._bell)
            os.close(self._bell)
        self._folder.cleanup()

    def release(self) -> None:
        """Let the plug go; see `held`."""
        os.write(self._gate, b".")

    def behind(self, bodies: Sequence[Any]) -> list[Answer]:
        """Answers of requests that all waited behind the plug, decoded, which goes once the last of them does."""
        decoded = self.metrics()("reflex_prepare_seconds_count")
        decoded += sum(isinstance(body, dict) and bool(body.keys() & {"image", "images"}) for body in bodies)
        with self.burst(bodies) as burst:
            burst.send()
            self.reach(
                lambda m: m("reflex_policy_runtime_queue_depth") == len(bodies)
                and m("reflex_prepare_seconds_count") >= decoded
            )
            self.release()
            return burst.answers()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.told:
                self.log.append(line.decode("utf-8", "replace").rstrip("\n"))
                self.told.notify_all()
        with self.told:
            self.log.append("<end>")
            self.told.notify_all()

    def wait_log(self, text: str) -> str:
        """The first line that holds `text`; fails when the log ends without it."""
        with self.told:
            while True:
                for line in self.log:
                    if text in line:
                        return line
                if self.log[-1:] == ["<end>"] or not self.told.wait(PATIENCE):
                    raise AssertionError(f"no {text!r} in the log:\n" + "\n".join(self.log))

    def wait_log_while(self, text: str, action: Callable[[], Any]) -> None:
        """Repeat an action until the log says it."""
        end = time.monotonic() + PATIENCE
        while not any(text in line for line in self.log):
            assert time.monotonic() < end, "\n".join(self.log)
            action()

    def wait_log_while_fewer(self, text: str, times: int) -> None:
        """Wait until so many lines hold `text`; fails when the log ends before."""
        with self.told:
            while sum(text in line for line in self.log) < times:
                if self.log[-1:] == ["<end>"] or not self.told.wait(PATIENCE):
                    raise AssertionError(f"fewer than {times} times {text!r} in the log:\n" + "\n".join(self.log))

    def wait_until(self, what: Callable[[], bool]) -> None:
        """Look again whenever something has happened until something is so."""
        end = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < end, "\n".join(self.log)
            changed()

    def kill(self) -> None:
        """Kill it without a word, as a test does on purpose: on the way out this is no surprise."""
        self._killed = True
        self.process.kill()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it, wait until it is gone, and return its exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait until it is gone; its exit status."""
        status = self.process.wait(PATIENCE)
        self._reader.join()
        return status

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One request on a connection of its own."""
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, dict(headers or {}))
            return _answer(connection.getresponse(), began)
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers=headers)

    def post(self, fields: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """POST /act with a JSON body; bytes go as they are."""
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        return self.ask("POST", "/act", body, {"Content-Type": "application/json"} | dict(headers or {}))

    def act(self, **fields: Any) -> Answer:
        """POST /act with a state that fits, and these fields."""
        return self.post({"state": STATE} | fields)

    def act_with(self, headers: Mapping[str, str]) -> Answer:
        """POST /act with these headers."""
        return self.post({"state": STATE}, headers)

    def metrics(self) -> Metrics:
        return Metrics(self.get("/metrics").body.decode())

    def reach(self, what: Callable[[Metrics], bool]) -> Metrics:
        """Read /metrics until they show it."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            seen = self.metrics()
            if what(seen):
                return seen
            changed()
        moved = "\n".join(k for k in seen.text.splitlines() if not k.startswith("#") and not k.endswith(" 0.0"))
        raise AssertionError("never reached; what is not zero:\n" + moved)

    def burst(self, requests: Sequence[Any], headers: Mapping[str, str] | None = None) -> Burst:
        """Connections for all of these bodies, open and ready to be sent at once."""
        return Burst(self.port, [encode(body, headers) for body in requests])

    def at_once(self, requests: Sequence[Any]) -> list[Answer]:
        """POST /act all of these together; the answers in their order."""
        with self.burst(requests) as burst:
            burst.send()
            return burst.answers()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def raw(self, data: bytes, half_close: bool = False) -> bytes:
        """Send bytes as they are and return everything that comes until the server closes."""
        with self.connect() as sock:
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
            return read_all(sock)


def _cold(run: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A Python that has nothing imported yet."""
    return subprocess.Popen([sys.executable, "-c", run], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)


def encode(body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """An HTTP request for /act as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    return f"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n{more}\r\n".encode() + data


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


def parse_answers(data: bytes) -> list[Answer]:
    """Every answer of a connection's bytes, in order."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        size = int(headers.get("content-length", "0"))
        found.append(Answer(int(status.split()[1]), headers, rest[:size]))
        data = rest[size:]
    return found


def _answer(response: http.client.HTTPResponse, began: float) -> Answer:
    body = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, body, time.perf_counter() - began)


class Burst:
    """Many connections, each with one request. The kernel carries them; one thread reads them."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self._requests = requests
        self.sockets = []
        for _ in requests:
            self.sockets.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
        self._sent: list[float] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for sock in self.sockets:
            sock.close()

    def send(self, first: int = 0, last: int | None = None) -> None:
        """Send the requests [first, last)."""
        for sock, data in list(zip(self.sockets, self._requests, strict=True))[first:last]:
            sock.sendall(data)
            self._sent.append(time.perf_counter())

    def hang_up(self, which: Sequence[int]) -> None:
        for i in which:
            self.sockets[i].close()

    @property
    def answered(self) -> bool:
        """Whether an answer has come."""
        waiting = select.poll()  # select knows only the first 1,024 descriptors of a process
        for sock in self.sockets:
            waiting.register(sock, select.POLLIN)
        return bool(waiting.poll(0))

    def answers(self, which: Sequence[int] | None = None) -> list[Answer]:
        """The answers of these requests (default all), in order; seconds from the sending of each."""
        chosen = list(range(len(self.sockets))) if which is None else list(which)

        async def one(i: int) -> Answer:
            reader, writer = await asyncio.open_connection(sock=self.sockets[i])
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                seconds = time.perf_counter() - self._sent[i]
                (answer,) = parse_answers(head)
                answer.body = await reader.readexactly(int(answer.headers["content-length"]))
                answer.seconds = seconds
                return answer
            finally:
                writer.close()

        async def every() -> list[Answer]:
            async with asyncio.timeout(PATIENCE):
                return await asyncio.gather(*(one(i) for i in chosen))

        return asyncio.run(every())


@dataclass
class Metrics:
    """One reading of /metrics."""

    text: str
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(init=False)

    def __post_init__(self) -> None:
        self.samples = {}
        for line in self.text.splitlines():
            if line.startswith("#") or not line:
                continue
            key, _, value = line.rpartition(" ")
            name, _, labels = key.partition("{")
            found = frozenset(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))
            self.samples[name, found] = float(value)

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name with these labels (and any others)."""
        wanted = set(labels.items())
        values = [value for (n, found), value in self.samples.items() if n == name and wanted <= found]
        if not values:
            raise AssertionError(f"no series {name} {labels}")
        return sum(values)




def refusal(export: Path | str, *options: str, env: Mapping[str, str] | None = None) -> str:
    """The one line with which `reflex serve` refuses to start, on any port. Asserts exit status 2 and one line."""
    done = reflex("serve", export, *options, env={"REFLEX_PORT": "0"} | dict(env or {}))
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done
    assert len(lines) == 1, lines
    assert done.stdout == ""
    return lines[0]
