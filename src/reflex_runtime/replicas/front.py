"""The front of several replicas: the server that accepts, places callers, and answers what concerns all replicas.

It is a `PolicyRuntime` without a device. Its rollouts are those of record: replicas report crashes, clean batches and
episodes, the front decides, and tells all replicas what it has decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import count
from typing import Any, Final

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.drivers.in_thread import in_thread
from reflex_runtime.ipc.frames import Codec, Notification, Reader
from reflex_runtime.ipc.messages import INFO
from reflex_runtime.placing import Begun, begun
from reflex_runtime.policies.rollout.following import orders_of
from reflex_runtime.policies.rollout.rollout import Rollout
from reflex_runtime.policies.serving.runtime import TICK, PolicyRuntime
from reflex_runtime.policies.serving.served import PolicyPlan
from reflex_runtime.replicas import messages as say
from reflex_runtime.replicas.arriving import ArrivingConnection
from reflex_runtime.replicas.exchanging import ReplicaExchanges
from reflex_runtime.replicas.fair_table import Caller
from reflex_runtime.replicas.messages import Forget, Members, MovedEpisodes, Noted, ReplicaReport
from reflex_runtime.replicas.placing_table import ReplicaTable
from reflex_runtime.replicas.quiet_start import may_leave_idle
from reflex_runtime.replicas.replica import Replica, ReplicaPlan, closed, started
from reflex_runtime.settings import ServeConfig
from reflex_runtime.telemetry.files import LineTarget
from reflex_runtime.telemetry.journal_writer import JournalWriter
from reflex_runtime.web.app import App
from reflex_runtime.web.connection import HttpConnection
from reflex_runtime.web.errors import Conflict, NotReady
from reflex_runtime.web.exchange import Exchange
from reflex_runtime.web.handover import HandedOver

log = logging.getLogger("reflex.server")

_REPORT: Final = Reader(ReplicaReport)


class FrontRuntime(PolicyRuntime):
    """See the module. replicas: in the order of their devices. swaps: by policy. on_lost: called with the name of a
    replica that has ended. app: the application around it, once it is made."""

    def __init__(
        self,
        config: ServeConfig,
        plans: Sequence[PolicyPlan],
        replicas: Sequence[ReplicaPlan],
        on_fatal: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(config, plans, on_fatal)
        self.replicas = [Replica(plan, self._taken, self._noted, self._changed) for plan in replicas]
        self.swaps = {name: ReplicaExchanges(served, self.replicas) for name, served in self.policies.items()}
        self.table = ReplicaTable()
        self.on_lost: list[Callable[[str], None]] = []
        self.app: App | None = None
        self._rollbacks = dict.fromkeys(self.policies, 0)
        self._probing = count()  # which replica may probe next
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ends = False
        self._reports: dict[str, Callable[[Rollout, ReplicaReport, float], Any]] = {
            say.PLACED: lambda rollout, told, now: rollout.placed(told.text, told.slot, now),
            say.CRASHED: lambda rollout, told, now: rollout.crashed(told.slot, now, told.number),
            say.COMPUTED: lambda rollout, told, now: rollout.computed(told.slot, now),
            say.ANSWERED: lambda rollout, told, now: rollout.answered(told.slot, told.text, told.number),
            say.PROBES: lambda rollout, told, now: rollout.breaker.place(told.slot, told.text, now),
            say.OUTCOME: lambda rollout, told, now: rollout.outcome(told.text, bool(told.number)),
        }

    # -- the host ------------------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[Replica]:
        """The replicas that take requests."""
        return [replica for replica in self.replicas if replica.live]

    @property
    def loaded(self) -> bool:
        """Whether any replica has the policies."""
        return bool(self.live)

    @property
    def health(self) -> str:
        if self.state == "ready" and not self.live:
            return "restarting"
        return super().health

    async def start(self) -> None:
        """Start every replica; returns when all are ready, or one cannot be started."""
        self.state = "loading"
        try:
            await started(self.replicas)
        except Exception as error:
            self.state = "warmup_failed"
            self.unusable = isinstance(error, ConfigError)
            self.error = str(error)
            log.error("a replica could not be started: %s", self.error)
            return
        await in_thread(may_leave_idle)
        self._started = True
        self.state = "ready"
        self.table.began_with([replica.name for replica in self.live])
        now = time.monotonic()
        for served in self.policies.values():
            served.rollout.begin(now)
        self._tell_members()
        self._order()
        asyncio.get_running_loop().call_later(TICK, self._tick)
        self._tell_started()

    def drain(self) -> None:
        self._ends = True
        super().drain()

    async def stop(self, until: float, answered: Callable[[], Awaitable[None]]) -> bool:
        self._stopped = True
        loop = asyncio.get_running_loop()
        await closed(self.replicas, max(0.1, until - loop.time()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(max(until, loop.time() + 0.5)):
                await answered()
        self.preparing.close()
        if self.spans is not None:
            await in_thread(self.spans.close)
        return True

    def journaled(self, to: LineTarget) -> JournalWriter:
        """Conflict: every replica has a schedule of its own."""
        raise Conflict(
            "with --replicas there is no journal of the whole server, as each replica has a device of its own; "
            "--trace FILE writes one for each"
        )

    def turn_files(self) -> None:
        """Every replica goes on in new files."""
        for replica in self.live:
            if replica.client.pid is not None:
                os.kill(replica.client.pid, signal.SIGHUP)

    def need_policy(self) -> None:
        """Raise NotReady unless a replica takes requests."""
        if self._started and not self.live and not self._ends:
            raise NotReady("every replica was lost and is started again", retry_after=1.0, state="restarting")
        super().need_policy()

    def note(self, kind: str, **fields: object) -> None:
        """A change, or the end of an episode: the replicas learn of it, and one of them writes it down."""
        if kind == "outcome":
            forget = Forget(str(fields.get("policy", self.first.name)), str(fields["episode_id"]))
            for replica in self.live:
                replica.client.notify(say.FORGET, forget)
        elif kind == "decision":
            if fields.get("action") == "rollback":
                self._rollbacks[str(fields.get("policy", self.first.name))] += 1
            self._order()
        for replica in self.live[:1]:
            replica.client.notify(say.NOTE, Noted(kind, dict(fields)))

    # -- connections ---------------------------------------------------------------------------------------------------

    def arriving(self, app: App) -> ArrivingConnection:
        """What takes a new connection."""
        return ArrivingConnection(app, self.give)

    def give(self, known: Begun, peer: Any, file: int, data: bytes) -> bool:
        """Give a connection to the replica of its caller. peer: its address, by which it is placed if it names nobody.
        False if no replica takes requests; then the descriptor stays open."""
        moved = known.episode in self.table.moved
        placed = known.identity or repr(peer)
        name = self.table.place(placed, known.episode, Caller.of(peer, known.robot)) if self._started else None
        if name is None:
            return False
        slots = self._slots_of(known.episode) if known.episode else {}
        said = HandedOver(known.identity, known.episode, True, slots, moved, data)
        next(replica for replica in self.replicas if replica.name == name).give(file, said)
        return True

    def hand_over(self, exchange: Exchange, body: bytes) -> None:
        """The same for a connection that was the front's so far."""
        self.need_policy()
        carrier = exchange.carrier
        given = carrier.give_away(exchange, body) if isinstance(carrier, HttpConnection) else None
        if given is None:
            raise NotReady("this request came among others of its connection; send it on one of its own")
        file, data = given
        if not self.give(begun(data) or Begun(True), exchange.client, file, data):
            os.close(file)  # the last replica has gone in this moment

    def _taken(self, sock: socket.socket, said: HandedOver) -> None:
        """A replica passes a connection back: its caller is another's, or it asks something of the whole server."""
        data = said.data or b""
        known = Begun(True, said.identity, said.episode) if said.identity else None
        app = self.app
        assert app is not None
        connected = asyncio.get_running_loop().connect_accepted_socket(
            lambda: ArrivingConnection(app, self.give, data, known), sock
        )
        task = asyncio.get_running_loop().create_task(_ignoring(connected, sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _slots_of(self, episode: str) -> dict[str, str]:
        """The slots in which an episode runs, for a replica that does not know it."""
        routers = {name: served.rollout.router for name, served in self.policies.items()}
        found = {name: router.running(episode) for name, router in routers.items() if router is not None}
        return {name: slot for name, slot in found.items() if slot is not None}

    # -- replicas ------------------------------------------------------------------------------------------------------

    def _changed(self, replica: Replica) -> None:
        """It has become ready, takes no more, or has ended."""
        now = time.monotonic()
        if replica.live and self._started:
            self.table.join(replica.name, now)
            self._tell_members()
            self._order()  # and then where episodes run: an earlier rollback must not move them
            self._tell_moved([replica], self.table.moved)
        elif not replica.live:
            self._without(replica)
        if not replica.client.ready:
            for tell in self.on_lost:
                tell(replica.name)

    def _without(self, replica: Replica) -> None:
        if replica.name in self.table.live:
            left = self.table.leave(replica.name)
            self._tell_moved(self.live, left)
            self._tell_members()

    def _tell_moved(self, replicas: Sequence[Replica], episodes: Iterable[str]) -> None:
        """Also of episodes that the front will not see begin elsewhere: those in messages of a websocket."""
        moved = MovedEpisodes({episode: self._slots_of(episode) for episode in episodes})
        if moved.slots and not self._ends:
            for replica in replicas:
                replica.client.notify(say.MOVED, moved)

    def _tell_members(self) -> None:
        members = Members(list(self.table.live), self.table.settled(time.monotonic()))
        for replica in self.live:
            replica.client.notify(say.MEMBERS, members)

    def _noted(self, replica: Replica, note: Notification, codec: Codec) -> None:
        if note.method == say.LEAVES:
            if not self._ends:
                log.warning("%s ends: it takes no more requests", replica.name)
            replica.leaving = True
            self._without(replica)
            return
        report = self._reports.get(note.method)
        if report is None:
            log.warning("%s says %r, which nobody understands", replica.name, note.method[:100])
            return
        told: ReplicaReport = _REPORT.read(note.params, codec)
        if note.method == say.PLACED:
            self.table.runs(told.text, replica.name, Caller(*told.caller))
        report(self.policies[told.policy].rollout, told, time.monotonic())

    def _order(self) -> None:
        """Tell every replica what is decided. One of them, in turn, may probe the drained slots whose time has come."""
        live = self.live
        if not live:
            return
        due = {name: served.rollout.breaker.due for name, served in self.policies.items()}
        prober = next(self._probing) % len(live) if any(due.values()) else -1
        for number, replica in enumerate(live):
            orders = {
                name: orders_of(served.rollout, self._rollbacks[name], due[name] if number == prober else ())
                for name, served in self.policies.items()
            }
            replica.client.notify(say.ORDERS, orders)

    async def heard(self, timeout: float) -> None:
        """Return once every live replica has read what was sent to it so far, or after `timeout` seconds."""
        asked = [asyncio.create_task(replica.client.request(INFO, {}, timeout=timeout)) for replica in self.live]
        await asyncio.gather(*asked, return_exceptions=True)

    def _tick(self) -> None:
        if self._stopped:
            return
        now = time.monotonic()
        try:
            for name, served in self.policies.items():
                self.swaps[name].kept.look(now)
                served.rollout.breaker.look(now)
            if any(served.rollout.breaker.due for served in self.policies.values()):
                self._order()
        except Exception:
            log.exception("the look at ramps and breakers failed, and comes again in a second")
        asyncio.get_running_loop().call_later(TICK, self._tick)


async def _ignoring(connected: Awaitable[Any], sock: socket.socket) -> None:
    try:
        await connected
    except OSError:  # its caller has gone
        sock.close()
