"""Stock clients of every wire through pauses, cuts and restarts of the server: each action is for its observation.

Two of each kind ask at once, with messages of other shapes each time. The policy answers what it saw, so an answer of
another observation shows. After each trouble every client must get right answers again.
"""

from __future__ import annotations

import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from serving.harness import PATIENCE, Server
from serving.relay import Relay, relay

from .stock_clients import KINDS, Client, Doors, Lerobot, Lost, Refused, Seen

# The stock client was written for an earlier version of websockets.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning"),
]
OPTIONS = ("--gr00t", "tcp://127.0.0.1:0", "--oip-grpc", "127.0.0.1:0", "--lerobot", "127.0.0.1:0")
OPTIONS += ("--idle-timeout-s", "1", "--brief-ms", "0")
LINES = {"groot": "clients of GR00T: tcp://", "oip": "clients of OIP over gRPC: ", "lerobot": "clients of LeRobot: "}
OF_EACH = 2
ANSWERS = 15  # right ones of each client, after each trouble


class Fleet:
    """Clients in threads that ask until the end. answers: right ones by client; losses: connections, by kind."""

    def __init__(self, doors: Doors) -> None:
        self.doors = doors
        self.answers: Counter[str] = Counter()
        self.losses: Counter[type[Client]] = Counter()
        self.errors: list[BaseException] = []
        self.changed = threading.Condition()
        self._may_ask = True
        self._paused: set[str] = set()
        self._ends = False
        self._threads = {
            f"{kind.__name__} {i}": threading.Thread(target=self._run, args=(kind, f"{kind.__name__} {i}"))
            for kind in KINDS
            for i in range(OF_EACH)
        }

    def begin(self) -> None:
        for thread in self._threads.values():
            thread.start()

    def end(self) -> None:
        with self.changed:
            self._ends = self._may_ask = True
            self.changed.notify_all()
        for thread in self._threads.values():
            thread.join(PATIENCE)

    def pause(self) -> None:
        """Returns when no client asks."""
        with self.changed:
            self._may_ask = False
            self._wait(lambda: len(self._paused) == len(self._threads), "some still ask")

    def go_on(self) -> None:
        with self.changed:
            self._may_ask = True
            self.changed.notify_all()

    def each_is_answered(self) -> None:
        """So many right answers more for each of them."""
        with self.changed:
            before = Counter(self.answers)
            self._wait(
                lambda: all(self.answers[name] >= before[name] + ANSWERS for name in self._threads),
                f"not all were answered: {before}, {self.losses}",
            )

    def wait_lost(self, kind: type[Client]) -> None:
        with self.changed:
            before = self.losses[kind]
            self._wait(lambda: self.losses[kind] > before, f"no {kind.__name__} gave up")

    def _wait(self, what: Callable[[], bool], why: str) -> None:
        assert self.changed.wait_for(lambda: self.errors or what(), PATIENCE), f"{why}: {self.answers}"
        if self.errors:
            raise self.errors[0]

    def _run(self, kind: type[Client], name: str) -> None:
        number = list(self._threads).index(name)
        try:
            self._ask(kind, name, random.Random(number), number)
        except BaseException as error:
            with self.changed:
                self.errors.append(error)
                self.changed.notify_all()

    def _ask(self, kind: type[Client], name: str, rng: random.Random, number: int) -> None:
        asked = 0
        while self._goes_on(name):
            with suppress(Lost), closing(kind(self.doors)) as client:
                while self._goes_on(name):
                    seen = observations(rng, kind, number, asked)
                    asked += 1
                    if self._answered(client, name, seen):
                        self._count(self.answers, name)

    def _answered(self, client: Client, name: str, seen: list[Seen]) -> bool:
        """Whether the answer came, and was right. Lost where the client is to connect anew."""
        try:
            check(name, seen, client.ask(seen))
        except Refused as refusal:
            if not refusal.retry_safe:
                raise
        except Lost:
            self._count(self.losses, type(client))
            if not isinstance(client, Lerobot):
                raise
        else:
            return True
        return False

    def _count(self, counter: Counter[Any], key: Any) -> None:
        with self.changed:
            counter[key] += 1
            self.changed.notify_all()

    def _goes_on(self, name: str) -> bool:
        with self.changed:
            if not self._may_ask:
                self._paused.add(name)
                self.changed.notify_all()
                self.changed.wait_for(lambda: self._may_ask)
                self._paused.discard(name)
            return not self._ends


def observations(rng: random.Random, kind: type[Client], client: int, asked: int) -> list[Seen]:
    """A message. No other client has one like it, nor this one at another time."""
    rows = rng.randint(1, kind.rows)
    sides = rng.choices([(6, 8), (12, 16), (48, 64), (5, 9)], (3, 1, 1, 1), k=rows)
    return [
        Seen(
            (float(client), float(asked), row + rng.random()),
            rng.randrange(256),
            sides[0 if kind.one_size else row],
            "go" * rng.randint(1, 9),
        )
        for row in range(rows)
    ]


def check(name: str, seen: list[Seen], found: list[Any]) -> None:
    assert len(found) == len(seen), name
    for one, actions in zip(seen, found, strict=True):
        wanted = np.broadcast_to(np.float32(one.action), np.shape(actions))
        assert np.allclose(actions, wanted, rtol=1e-5, atol=[1e-4] * 3 + [1.5, 1e-4]), f"{name}: {one} got {actions}"


class Place:
    """Where the clients find a server, whichever it is."""

    def __init__(self, source: str, stack: ExitStack) -> None:
        self._source, self._stack = source, stack
        self.server = self._begun()
        self._relays: dict[str, Relay] = {
            name: stack.enter_context(relay(address)) for name, address in self._addresses().items()
        }
        self.doors = Doors(**{name: one.address for name, one in self._relays.items()})

    def _begun(self) -> Server:
        return self._stack.enter_context(Server(self._source, *OPTIONS))

    def _addresses(self) -> dict[str, str]:
        found = {name: self.server.wait_log(line).rpartition(line)[2] for name, line in LINES.items()}
        return {"http": f"127.0.0.1:{self.server.port}"} | found

    def cut(self) -> None:
        """All connections end."""
        for one in self._relays.values():
            one.cut()

    def restart(self, end: Callable[[Server], Any]) -> None:
        """Another server on other ports."""
        end(self.server)
        self.server = self._begun()
        for name, address in self._addresses().items():
            self._relays[name].target = address
        self.cut()

    def idle(self) -> None:
        """Returns when the server ends a connection that was opened now and asks nothing, for its silence."""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE) as silent:
            silent.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            while silent.recv(65_536):
                pass


@contextmanager
def asking(source: str) -> Iterator[tuple[Fleet, Place]]:
    with ExitStack() as stack:
        place = Place(f"python:robots.wires.echo_policy:{source}", stack)
        fleet = Fleet(place.doors)
        stack.callback(fleet.end)
        fleet.begin()
        yield fleet, place


@pytest.mark.timeout(600)
def test_every_client_gets_the_action_for_its_observation_whatever_happens() -> None:
    with asking("make") as (fleet, place):
        fleet.each_is_answered()
        ran, name = place.server.metrics(), "reflex_batch_size_per_flush"
        assert ran(f"{name}_sum") > ran(f"{name}_count")

        fleet.pause()
        place.idle()
        fleet.go_on()
        fleet.each_is_answered()

        for _ in range(5):
            place.cut()
            fleet.each_is_answered()

        place.server.process.send_signal(signal.SIGSTOP)
        fleet.wait_lost(KINDS[5])
        place.server.process.send_signal(signal.SIGCONT)
        fleet.each_is_answered()

        for end in (Server.stop, Server.kill, Server.stop):
            place.restart(end)
            fleet.each_is_answered()


@pytest.mark.parametrize("source", ["swapped", "late"])
def test_the_checks_see_answers_of_others(source: str) -> None:
    with asking(source) as (fleet, _), pytest.raises(AssertionError, match="got"):
        fleet.each_is_answered()
