"""The server's end of one runtime process: starts it, calls it, and starts it again when it is lost.

When a process is lost, its unanswered calls fail and are not repeated: the process may have executed them. Calls while
there is no process fail with `WorkerUnavailable`; they can safely be retried.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Raw

from reflex_runtime.core.errors import Closed, ConfigError, CutShort, ReflexError, Rejected, WaitTimeout
from reflex_runtime.ipc.frames import METHOD_NOT_FOUND, ProtocolError, Reader, RpcError, RpcMessage
from reflex_runtime.ipc.messages import CHUNK, EVENT, INFO, PROMPT, PROTOCOL, SHUTDOWN, STATS, Info, Shutdown
from reflex_runtime.ipc.peer import ConnectionLost, Peer
from reflex_runtime.ipc.spawn import Link, Opener, StartFailed, beat, unheard
from reflex_runtime.pacing import Restarts
from reflex_runtime.settings.declare import option, validate

log = logging.getLogger("reflex.ipc")

State = Literal["starting", "ready", "restarting", "open", "stopped"]

GRACE = 1.0  # seconds for a process to exit after its connection ended, so that its exit status is known
SOON = 1.0  # seconds until a retry while a start is under way
_COUNTED = frozenset({CHUNK, PROMPT, STATS, EVENT})  # notifications counted by name; others could have many names
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Limits of one runtime process, in seconds.

    call_timeout_s: of a `request` without its own. start_timeout_s: from the start of the process until it is prepared.
    heartbeat_s: between heartbeats; 0: none. hung_after_s: longest silence. backoff_s, backoff_max_s: wait before the
    first restart, and the longest one; it begins anew after a run of steady_s. most_failures: failed starts and shorter
    runs in a row that open the breaker; then there is one start every cooldown_s.
    """

    call_timeout_s: float = option(30.0, within=(0, _DAY, "seconds"), above=True)
    start_timeout_s: float = option(600.0, within=(0, _DAY, "seconds"), above=True)
    heartbeat_s: float = option(5.0, within=(0, _DAY, "seconds"))
    hung_after_s: float = option(20.0, within=(0, _DAY, "seconds"), above=True)
    backoff_s: float = option(0.2, within=(0, _DAY, "seconds"), above=True)
    backoff_max_s: float = option(10.0, within=(0, _DAY, "seconds"), above=True)
    steady_s: float = option(30.0, within=(0, _DAY, "seconds"))
    most_failures: int = option(5, within=(1, 1000))
    cooldown_s: float = option(60.0, within=(0, _DAY, "seconds"), above=True)

    def __post_init__(self) -> None:
        validate(self, "ClientConfig")
        for low, high in (("heartbeat_s", "hung_after_s"), ("backoff_s", "backoff_max_s")):
            if getattr(self, low) > getattr(self, high):
                raise ConfigError(
                    f"ClientConfig.{low}={getattr(self, low)!r}: must be at most {high}={getattr(self, high)!r}"
                )


class WorkerUnavailable(Rejected):
    """There is no runtime process at the moment. retry_after: seconds until the next start."""

    code = "worker_unavailable"


_PREPARES: ContextVar[RuntimeClient | None] = ContextVar("prepares", default=None)


class RuntimeClient:
    """See the module. Only on one event loop. It is the `Handler` of its connection.

        client = RuntimeClient(spawned(command), prepare=load, on_note=registry.note, on_lost=registry.lost)
        await client.start()

    prepare: called after every start, to load the model. Until it returns, only its own calls and those of its tasks
    are sent. It must return within start_timeout_s. on_note: called for every notification. on_lost: called once when a
    process that was ready is lost. Exceptions of both are logged.

    capabilities, info: of the last process that answered `runtime/info`. restarts: starts after the first. last_error:
    why the last process was lost or did not start.
    """

    def __init__(
        self,
        open: Opener,
        config: ClientConfig | None = None,
        *,
        name: str = "worker-0",
        prepare: Callable[[RuntimeClient], Awaitable[None]] | None = None,
        on_note: Callable[[RpcMessage], None] | None = None,
        on_lost: Callable[[ReflexError], None] | None = None,
    ) -> None:
        self.config, self.name = config or ClientConfig(), name
        self.on_note, self.on_lost = on_note, on_lost
        self.state: State = "starting"
        self.capabilities: frozenset[str] = frozenset()
        self.info: Info | None = None
        self.restarts = 0
        self.last_error = ""
        self._open, self._prepare = open, prepare
        given = self.config
        self._restarts = Restarts(
            given.backoff_s, given.backoff_max_s, given.steady_s, given.most_failures, given.cooldown_s, random.random
        )
        self._link: Link | None = None  # set from before the process is prepared until it is reaped
        self._since = math.nan  # when it became ready
        self._next_start = math.nan
        self._life: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._sent: Counter[str] = Counter()  # of earlier connections
        self._frames = 0
        self._received: Counter[str] = Counter()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process; returns when it is ready. Raises StartFailed, ProtocolError, ConnectionLost, Closed, or
        the error of `prepare`; then no process is left."""
        if self._life is not None or self._closing is not None:
            raise ConfigError(f"{self.name}: can be started only once, and not after close; make a new client")
        self._life = starting = asyncio.create_task(self._ready_link(), name=self.name)
        try:
            link = await starting
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closing is None or (caller is not None and caller.cancelling()):  # else `close` has cancelled it
                await self.close(0)
                raise
        except Exception as error:
            self.last_error = str(error) or type(error).__name__
            self._become("stopped")
            raise
        if self._closing is not None:
            raise Closed(f"{self.name} was closed before it was ready")
        self._life = asyncio.create_task(self._live(link), name=self.name)

    async def close(self, timeout: float = 10.0, drain: bool = True) -> None:
        """End the process. drain: it may finish its streams; else they end with an error. It is killed if it does not
        exit within `timeout` seconds. Unanswered calls fail. Idempotent; continues if its caller is cancelled."""
        if self._closing is None:
            ready = self._link if self.ready else None
            self._become("stopped")
            self._closing = asyncio.create_task(self._close(ready, timeout, drain), name=f"{self.name}-closes")
        await asyncio.shield(self._closing)

    # -- sending -------------------------------------------------------------------------------------------------------

    def call(self, method: str, params: Any) -> asyncio.Future[Raw]:
        """A future of the answer. It raises the runtime's error, ConnectionLost, or WorkerUnavailable if there is no
        process. Cancelling it drops the answer; the runtime still executes the call."""
        if self._link is not None and (self.ready or _PREPARES.get() is self):
            return self._link.peer.call(method, params)
        refused: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()
        refused.set_exception(self.unavailable())
        return refused

    async def request(self, method: str, params: Any, kind: Any = Any, timeout: float | None = None) -> Any:
        """The result of a call as a `kind`. timeout: seconds; None: call_timeout_s, or no limit inside of `prepare`.
        Also raises WaitTimeout, and ProtocolError for a result of another kind."""
        limit = timeout
        if limit is None and _PREPARES.get() is not self:
            limit = self.config.call_timeout_s
        try:
            async with asyncio.timeout(limit):
                answer = await self.call(method, params)
        except TimeoutError:
            raise WaitTimeout(f"{self.name} did not answer {method} within {limit:g} s") from None
        return Reader(kind).read(answer)

    def notify(self, method: str, params: Any) -> None:
        """Send a notification, also during `close`. Without a process it is dropped."""
        if self._link is not None and (not math.isnan(self._since) or _PREPARES.get() is self):
            self._link.peer.notify(method, params)

    def flush(self) -> None:
        """Write the messages of this turn of the loop now."""
        if self._link is not None:
            self._link.peer.flush()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether requests can be sent."""
        return self.state == "ready"

    @property
    def pid(self) -> int | None:
        """The process id, if there is a process."""
        if self._link is None:
            return None
        if self._link.process is not None:
            return self._link.process.pid
        return None if self.info is None else self.info.pid

    def unavailable(self) -> WorkerUnavailable:
        """The error while it is not ready."""
        why = f": {self.last_error}" if self.last_error else ""
        return WorkerUnavailable(f"{self.name} is {_WORDS[self.state]}{why}", retry_after=self._retry_after())

    def stats(self) -> dict[str, Any]:
        """JSON-safe; counts are over all processes. sent, received: messages by method. frames: frames that were
        written. buffered: bytes that wait to be sent. up_s: seconds since the process became ready."""
        sent, frames, buffered = Counter(self._sent), self._frames, 0
        if self._link is not None:
            sent += self._link.peer.calls + self._link.peer.notes
            frames += self._link.peer.frames
            buffered = self._link.peer.buffered if self.ready else 0
        return {
            "name": self.name,
            "state": self.state,
            "pid": self.pid,
            "up_s": asyncio.get_running_loop().time() - self._since if self.ready else 0.0,
            "restarts": self.restarts,
            "failures": self._restarts.failures,
            "last_error": self.last_error,
            "sent": dict(sent),
            "received": dict(self._received),
            "frames": frames,
            "buffered": buffered,
        }

    # -- of the connection ---------------------------------------------------------------------------------------------

    def called(self, peer: Peer, request: RpcMessage) -> None:
        """Refuse a call: the front answers none."""
        peer.refuse(request, RpcError(METHOD_NOT_FOUND, f"{request.method}: a front answers no calls"))

    def notified(self, peer: Peer, note: RpcMessage) -> None:
        self._received[note.method if note.method in _COUNTED else "other"] += 1
        if self.on_note is not None:
            self.on_note(note)

    def lost(self, peer: Peer, error: Exception | None) -> None:
        if math.isnan(self._since) or self._link is None or peer is not self._link.peer:
            return  # the process was not ready: `_ready_link` raises
        lived, self._since = asyncio.get_running_loop().time() - self._since, math.nan
        if self.state == "stopped":
            self._tell_lost(CutShort(f"{self.name} was shut down"))
            return
        self._restarts.lived(lived)
        self.last_error = "its connection ended" if error is None else str(error)
        log.warning("%s was lost: %s", self.name, self.last_error)
        self._become("restarting")
        self._tell_lost(ConnectionLost(f"{self.name} was lost: {self.last_error}"))

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _live(self, link: Link | None) -> None:
        """Run one process after another until `close`. link: that of the first process, which is ready."""
        try:
            while True:
                if link is not None:
                    hung = await self._until_lost(link)
                    if self.state == "stopped":
                        return  # `_close` ends the process
                    await self._drop(link, 0.0 if hung else GRACE)
                    if link.process is not None:
                        self.last_error += f"; its process {link.process.ending}"
                        log.warning("%s: its process %s", self.name, link.process.ending)
                await self._rest()
                try:
                    link = await self._ready_link()
                except Exception as error:
                    link, self.last_error = None, str(error) or type(error).__name__
                    log.warning("%s could not be started again: %s", self.name, self.last_error)
                    self._restarts.failed()
        finally:
            self._become("stopped")
            if self._link is not None and self._closing is None:  # this task was cancelled, but not by `close`
                await self._drop(self._link)

    async def _ready_link(self) -> Link:
        """Start a process, read its `runtime/info`, and prepare it; on failure no process is left."""
        limit = asyncio.timeout(self.config.start_timeout_s)
        try:
            async with limit:
                link = self._link = await self._open(self)
                info: Info = Reader(Info).read(await link.peer.call(INFO, {}))
                if info.protocol != PROTOCOL:
                    what = f"{self.name} speaks protocol {info.protocol}, but this server protocol {PROTOCOL}"
                    raise ProtocolError(f"{what}; use the same version of Reflex for both")
                self.info, self.capabilities = info, frozenset(info.capabilities)
                if self._prepare is not None:
                    mark = _PREPARES.set(self)
                    try:
                        await self._prepare(self)
                    finally:
                        _PREPARES.reset(mark)
            if link.peer.ended.done():
                raise ConnectionLost("the connection was lost")
        except BaseException as error:
            died = self._link.process if self._link is not None and isinstance(error, ConnectionLost) else None
            if self._link is not None:
                await self._drop(self._link, GRACE if died is not None else 0.0)  # its exit status says why
            if died is not None:
                why = f"{error}, before it was ready; its process {died.ending}"
                raise StartFailed(f"{self.name}: {why}") from error
            if isinstance(error, TimeoutError) and limit.expired():
                within = f"{self.config.start_timeout_s:g} s (start_timeout_s)"
                raise StartFailed(f"{self.name} was not ready within {within}") from None
            raise
        self._since = asyncio.get_running_loop().time()
        log.info("%s is ready, process %s", self.name, self.pid)
        self._become("ready")
        return link

    async def _until_lost(self, link: Link) -> bool:
        """Wait until the connection ends. Returns whether it was ended because the process hangs."""
        every, ended = self.config.heartbeat_s, {link.peer.ended}
        if not every:
            await asyncio.wait(ended)
            return False
        beating = asyncio.create_task(beat(link.peer, every, self.config.hung_after_s))
        try:
            await asyncio.wait(ended)
            return beating.done()
        finally:
            beating.cancel()

    async def _rest(self) -> None:
        wait = self._restarts.wait()
        if self._restarts.open and self.state != "open":
            log.error("%s ended too often: it is started again every %g s", self.name, self.config.cooldown_s)
        self._become("open" if self._restarts.open else "restarting")
        self._next_start = asyncio.get_running_loop().time() + wait
        await asyncio.sleep(wait)
        self._next_start = math.nan
        self._become("restarting")
        self.restarts += 1

    async def _close(self, ready: Link | None, timeout: float, drain: bool) -> None:
        try:
            if ready is not None and timeout > 0:
                await self._shut_down(ready, timeout, drain)
        finally:
            if self._life is not None:
                self._life.cancel()
                await asyncio.wait({self._life})
                if not self._life.cancelled():
                    self._life.exception()  # so that asyncio does not log it: `start` has raised it
            if self._link is not None:
                await self._drop(self._link)

    async def _shut_down(self, link: Link, timeout: float, drain: bool) -> None:
        """End the process: 0.8 of the time for its streams, 0.1 for its exit, 0.1 after SIGTERM."""
        unheard(link.peer.call(SHUTDOWN, Shutdown(drain, 0.8 * timeout)))
        await asyncio.wait({link.ended}, timeout=0.9 * timeout)
        if not link.ended.done() and link.process is not None:
            log.warning("%s did not end by itself within %g s", self.name, 0.9 * timeout)
            link.process.terminate()
            await asyncio.wait({link.ended}, timeout=0.1 * timeout)

    async def _drop(self, link: Link, grace: float = 0.0) -> None:
        """End a link and its process, and keep its counts."""
        await link.kill(grace)
        if link is self._link:
            self._link = None
            self._sent += link.peer.calls + link.peer.notes
            self._frames += link.peer.frames

    def _retry_after(self) -> float | None:
        if self.state == "stopped":
            return None
        if math.isnan(self._next_start):
            return SOON
        return max(0.0, self._next_start - asyncio.get_running_loop().time())

    def _become(self, state: State) -> None:
        if self.state != "stopped":
            self.state = state

    def _tell_lost(self, error: ReflexError) -> None:
        if self.on_lost is not None:
            try:
                self.on_lost(error)
            except Exception:
                log.exception("%s: on_lost failed", self.name)


_WORDS: dict[State, str] = {
    "starting": "starting",
    "ready": "ready",
    "restarting": "being started again",
    "open": "not started again for a while, because it ended too often",
    "stopped": "shut down",
}
