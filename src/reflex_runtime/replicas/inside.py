"""A replica: a whole policy server whose connections come from the front, and that decides nothing for the others."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.ipc.frames import METHOD_NOT_FOUND, Codec, Notification, Reader, RpcError, RpcRequest
from reflex_runtime.ipc.messages import INFO, PROTOCOL, SHUTDOWN, Info, Shutdown
from reflex_runtime.ipc.peer import Peer
from reflex_runtime.placing import asks_policy, opens_websocket
from reflex_runtime.policies.rollout.following import FollowingRollout, RolloutOrders, RolloutReports
from reflex_runtime.policies.rollout.rollout import Rollout
from reflex_runtime.policies.serving.admin import Admin, Load, loaded
from reflex_runtime.policies.serving.app import application
from reflex_runtime.policies.serving.asking import Asking
from reflex_runtime.policies.serving.exchanging import LoadedBeside
from reflex_runtime.policies.serving.runtime import PolicyRuntime
from reflex_runtime.policies.serving.served import PolicyPlan, ServedPolicy
from reflex_runtime.rendezvous import owner
from reflex_runtime.replicas import messages as say
from reflex_runtime.replicas.fair_table import Caller
from reflex_runtime.replicas.messages import (
    AnswerPart,
    AskReplica,
    Forget,
    Members,
    MovedEpisodes,
    Noted,
    ReplicaAnswer,
    ReplicaReport,
    Serve,
    SlotOf,
)
from reflex_runtime.settings import ServeConfig
from reflex_runtime.version import __version__
from reflex_runtime.web.app import App
from reflex_runtime.web.connection import HttpConnection
from reflex_runtime.web.errors import NotReady
from reflex_runtime.web.exchange import Exchange, Route
from reflex_runtime.web.form import Headers
from reflex_runtime.web.handover import HandedConnection, HandedOver, HandoverChannel, hand_on, handing_on
from reflex_runtime.web.serve import serving
from reflex_runtime.web.supervisor import Lives

log = logging.getLogger("reflex.server")

HOMES: Final = 10_000  # identities whose owner is kept
_SERVE, _ASK, _SHUTDOWN = Reader(Serve), Reader(AskReplica), Reader(Shutdown)
_MEMBERS, _FORGET, _NOTED = Reader(Members), Reader(Forget), Reader(Noted)
_ORDERS, _WATCH, _MOVED = Reader(dict[str, RolloutOrders]), Reader(int), Reader(MovedEpisodes)
_SLOT = Reader(SlotOf)
Plan = Callable[[Serve], tuple[ServeConfig, Sequence[PolicyPlan]]]


class ReplicaProcess:
    """See the module. It is the handler of the connection to the front, the `Home` of its runtime, where its rollouts
    report, and the `Door` of its server.

    plan: reads what it is told to serve.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._asked: asyncio.Future[tuple[Peer, RpcRequest, Serve]] = asyncio.get_running_loop().create_future()
        self._peer: Peer | None = None
        self._sock: socket.socket | None = None
        self._channel: HandoverChannel | None = None
        self._runtime: PolicyRuntime | None = None
        self._app: App | None = None
        self._stop = asyncio.Event()
        self._members = Members([], True)
        self._here: dict[str, bool] = {}
        self._watched: dict[int, Exchange] = {}
        self._beside: dict[tuple[str, str], LoadedBeside] = {}  # by policy and slot: what may be switched to
        self._tasks: set[asyncio.Task[Any]] = set()
        self.name = ""

    @property
    def reports(self) -> RolloutReports:
        """Itself."""
        return self

    async def run(self, channel: socket.socket) -> tuple[int, bool]:
        """Serve until the front says so. Returns the exit status, and whether every thread ended."""
        self._sock = channel
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, number)
        peer, request, asked = await self._asked
        self.name = asked.name
        try:
            config, plans = self._plan(asked)
        except ReflexError as error:
            peer.refuse(request, error)
            await peer.ended
            return 2, True
        self._config = config

        def make(on_lost: Callable[[], None], lives: Lives | None) -> tuple[App, PolicyRuntime]:
            runtime = self._runtime = PolicyRuntime(config, plans, on_lost, home=self)
            app = self._app = application(runtime, admin=partial(ReplicaAdmin, self._beside))
            app.elsewhere = self._elsewhere
            app.marks = [(b"x-reflex-replica", self.name.encode())]
            runtime.on_drain.append(self._leaves)
            return app, runtime

        def ready(runtime: PolicyRuntime) -> None:
            if runtime.error:
                kind = ConfigError if runtime.unusable else ReflexError
                peer.refuse(request, kind(runtime.error))
                self._stop.set()
            else:
                peer.respond(request, {})

        try:
            status, clean = await serving(make, self, config.drain_timeout_s, self._stop, on_ready=ready)
        except ConfigError as error:  # of a listener: its port is taken
            peer.refuse(request, error)
            await peer.ended
            return 2, True
        peer.flush()
        return status, clean

    def _signalled(self, number: int) -> None:
        if number == signal.SIGHUP:
            if self._runtime is not None and self._runtime.writes_files:
                self._runtime.turn_files()
        else:
            self._stop.set()

    def _leaves(self) -> None:
        self._say(say.LEAVES, {})

    def _say(self, method: str, params: Any) -> None:
        if self._peer is not None:
            self._peer.notify(method, params)

    # -- the door ------------------------------------------------------------------------------------------------------

    async def open(self, app: App) -> None:
        """Take the connections that the front hands over."""
        assert self._sock is not None
        self._channel = HandoverChannel(self._sock, self._taken, self._stop.set)

    def close(self) -> None:
        """Take no more."""
        if self._channel is not None:
            self._channel.close()

    def _taken(self, sock: socket.socket, said: HandedOver) -> None:
        assert self._runtime is not None
        assert self._app is not None
        app = self._app
        self._adopt(said.episode, said.slots, said.moved)
        loop = asyncio.get_running_loop()
        task = loop.create_task(_connected(lambda: HandedConnection(app, said), sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _adopt(self, episode: str, slots: Mapping[str, str], moved: bool) -> None:
        """An episode that ran in another process may come here. slots: its slot there, by policy."""
        assert self._runtime is not None
        now = time.monotonic()
        for policy, slot in slots.items():
            router = self._runtime.policies[policy].rollout.router
            if router is not None and router.running(episode) is None:
                router.adopt(episode, slot, now)
        if moved:
            for served in self._runtime.policies.values():
                _following(served.rollout).arrives(episode)

    # -- whose a request is --------------------------------------------------------------------------------------------

    def serves(self, identity: str, episode: str) -> bool:
        """Whether a request is to be answered here: its episode runs here, or it begins here by its hash."""
        assert self._runtime is not None
        if episode:
            if any(served.rollout.knows(episode) for served in self._runtime.policies.values()):
                return True
            if not self._members.settled:
                return False  # it may run elsewhere: the front knows
        here = self._here.get(identity)
        if here is None:
            if len(self._here) >= HOMES:
                self._here.clear()
            here = self._here[identity] = owner(identity, self._members.names) in (self.name, None)
        return here

    def hand_on(self, exchange: Exchange, body: bytes, identity: str, episode: str) -> bool:
        """Give the request back to the front. False where the front has chosen this replica, or where it cannot."""
        carrier = exchange.carrier
        if isinstance(carrier, HandedConnection):
            placed, carrier.placed = carrier.placed, ""
            if placed == identity:
                return False
        return self._channel is not None and hand_on(exchange, body, self._channel, identity, episode)

    def _elsewhere(self, exchange: Exchange) -> Route | None:
        """Requests of the whole server go to the front."""
        if not isinstance(exchange.carrier, HttpConnection) or asks_policy(exchange.method, exchange.path):
            return None
        if opens_websocket(exchange.method, exchange.headers.get(b"upgrade", b"")):
            return None
        assert self._runtime is not None
        return handing_on(exchange.method, self._runtime.config.max_body_bytes, self._whole_server)

    def _whole_server(self, exchange: Exchange, body: bytes) -> None:
        if self._channel is None or not self._channel.takes:
            raise NotReady("the front takes no connections now", retry_after=1.0)
        if not hand_on(exchange, body, self._channel):
            raise NotReady("this request came among others of its connection; send it on one of its own")

    # -- reports of rollouts -------------------------------------------------------------------------------------------

    def placed(self, policy: str, episode: str, slot: str, client: Hashable, robot: str | None) -> None:
        self._say(say.PLACED, ReplicaReport(policy, slot, episode, caller=Caller.of(client, robot)))

    def crashed(self, policy: str, slot: str, poison: float) -> None:
        self._say(say.CRASHED, ReplicaReport(policy, slot, number=poison))

    def computed(self, policy: str, slot: str) -> None:
        self._say(say.COMPUTED, ReplicaReport(policy, slot))

    def answered(self, policy: str, slot: str, outcome: str, latency: float) -> None:
        self._say(say.ANSWERED, ReplicaReport(policy, slot, outcome, latency))

    def probes(self, policy: str, slot: str, key: str) -> None:
        self._say(say.PROBES, ReplicaReport(policy, slot, key))

    def outcome(self, policy: str, episode: str, success: bool) -> None:
        self._say(say.OUTCOME, ReplicaReport(policy, text=episode, number=float(success)))

    # -- the connection to the front -----------------------------------------------------------------------------------

    def called(self, peer: Peer, request: RpcRequest, codec: Codec) -> None:
        self._peer, peer.codec = peer, codec
        if request.method == INFO:
            codecs = [codec.label for codec in Codec]
            peer.respond(request, Info("reflex", __version__, PROTOCOL, os.getpid(), codecs, ["replica"], {}))
        elif request.method == say.SERVE and not self._asked.done():
            self._asked.set_result((peer, request, _SERVE.read(request.params, codec)))
        elif request.method == say.ASK and self._app is not None:
            self._ask(peer, request, _ASK.read(request.params, codec))
        elif request.method == SHUTDOWN:
            _SHUTDOWN.read(request.params, codec)
            self._stop.set()
            peer.respond(request, {"clean": True})
        else:
            peer.refuse(request, RpcError(METHOD_NOT_FOUND, f"{request.method[:100]!r}: there is no such method"))

    def notified(self, peer: Peer, note: Notification, codec: Codec) -> None:
        self._peer, peer.codec = peer, codec
        runtime = self._runtime
        if runtime is None:
            return
        if note.method == say.MEMBERS:
            self._members = _MEMBERS.read(note.params, codec)
            self._here.clear()
        elif note.method == say.ORDERS:
            for policy, orders in _ORDERS.read(note.params, codec).items():
                _following(runtime.policies[policy].rollout).obey(orders, time.monotonic())
        elif note.method == say.MOVED:
            for episode, slots in _MOVED.read(note.params, codec).slots.items():
                self._adopt(episode, slots, True)
        elif note.method == say.FORGET:
            ended = _FORGET.read(note.params, codec)
            for slot in runtime.policies[ended.policy].slots.values():
                slot.policy.forget(ended.episode)
        elif note.method == say.NOTE:
            noted = _NOTED.read(note.params, codec)
            runtime.note(noted.kind, **noted.fields)
        elif note.method in (say.SWITCH, say.DROP, say.BACK, say.SETTLE):
            self._exchange(note.method, _SLOT.read(note.params, codec))
        elif note.method == say.UNWATCH:
            watched = self._watched.pop(_WATCH.read(note.params, codec), None)
            if watched is not None:
                watched.leave()

    def _exchange(self, what: str, of: SlotOf) -> None:
        """What the front has decided of a slot. Without what it takes, this process ends and is started with that."""
        assert self._runtime is not None
        served = self._runtime.policies[of.policy]
        ends_load = what in (say.SWITCH, say.DROP)  # the other two are of an earlier one, whose guard has decided
        beside = self._beside.pop((of.policy, of.slot), None) if ends_load else None
        if what == say.SWITCH and beside is not None:
            served.switch(of.slot, beside)
        elif what == say.SETTLE:
            served.exchanging.settle(of.slot)
        elif what == say.SWITCH or (what == say.BACK and served.exchanging.go_back(of.slot) is None):
            log.warning("slot %s: the version in force is not here; ending, to be started with it", of.slot)
            self._stop.set()

    def lost(self, peer: Peer, error: Exception | None) -> None:
        """The front is gone: nobody could reach what this process goes on with."""
        stopping = self._stop.is_set()
        if not stopping:
            log.error("the front is gone: leaving")
        logging.shutdown()
        sys.stderr.flush()
        os._exit(0 if stopping else 1)

    def _ask(self, peer: Peer, request: RpcRequest, asked: AskReplica) -> None:
        assert self._app is not None
        carrier = _Asked(peer, request, asked.watch)
        exchange = Exchange(self._app, carrier, asked.method, asked.path, dict(asked.headers), ("127.0.0.1", 0))
        exchange.opened = exchange.whole = True
        if asked.watch:
            self._watched[asked.watch] = exchange
        if self._app.open(exchange):
            self._app.run(exchange, asked.body)


class ReplicaAdmin(Admin):
    """`Admin` of a policy in a replica, which only the front asks. beside: what was loaded, by policy and slot."""

    def __init__(self, beside: dict[tuple[str, str], LoadedBeside], asking: Asking) -> None:
        super().__init__(asking)
        self._beside = beside

    async def _exchanged(self, exchange: Exchange, served: ServedPolicy, asked: Load) -> dict[str, Any]:
        """It is loaded; the front says whether the slot has it."""
        found = self._beside[served.name, asked.slot] = await served.exchanging.load(asked.slot, asked.path)
        return loaded(asked, found.version)


class _Asked:
    """Carries the answer to a request of the front."""

    def __init__(self, peer: Peer, request: RpcRequest, watch: int) -> None:
        self._peer, self._request, self._watch = peer, request, watch

    @property
    def writable(self) -> bool:
        return not self._peer.congested

    def reply(self, exchange: Exchange, status: int, headers: Headers, body: bytes) -> None:
        self._peer.respond(self._request, ReplicaAnswer(status, headers, body))

    def begin(self, exchange: Exchange, status: int, headers: Headers) -> None:
        self._peer.respond(self._request, ReplicaAnswer(status, headers, b""))

    def write(self, exchange: Exchange, data: bytes) -> None:
        self._peer.notify(say.PART, AnswerPart(self._watch, data))

    def end(self, exchange: Exchange) -> None:
        pass

    async def drained(self) -> None:
        pass

    def abort(self) -> None:
        pass


def _following(rollout: Rollout) -> FollowingRollout:
    assert isinstance(rollout, FollowingRollout)
    return rollout


async def _connected(make: Callable[[], HandedConnection], sock: socket.socket) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(make, sock)
    except OSError:  # its caller has gone
        sock.close()


async def serve_replica(plan: Plan, control: socket.socket, channel: socket.socket) -> tuple[int, bool]:
    """Run a replica on the two sockets that its front gave it. Returns as `web.serve.serve`."""
    process = ReplicaProcess(plan)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: Peer(process), control)
    return await process.run(channel)


def settings_of(config: ServeConfig, number: int, **changed: Any) -> dict[str, Any]:
    """The settings of one replica, as a message: files of its own, and less time to end than the front has."""
    own = {"replicas": 1, "devices": "", "supervise": False, **changed}
    own["drain_timeout_s"] = 0.75 * config.drain_timeout_s
    if config.trace:
        stem, ending = os.path.splitext(config.trace)
        own["trace"] = f"{stem}-{number}{ending}"
    if config.record:
        own["record"] = os.path.join(config.record, f"replica-{number}")
    made: dict[str, Any] = msgspec.to_builtins(replace(config, **own))
    return made
