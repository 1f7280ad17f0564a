"""Hot swap with replicas: every replica loads the new policy beside its own; then all of them switch, or none does."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from reflex_runtime.core.errors import ReflexError
from reflex_runtime.drivers.in_thread import in_thread
from reflex_runtime.policies import PolicySource
from reflex_runtime.policies.serving.kept_exchanges import KeptExchanges
from reflex_runtime.policies.serving.served import ServedPolicy
from reflex_runtime.policies.source import read_source
from reflex_runtime.replicas.messages import BACK, DROP, SETTLE, SWITCH, ReplicaAnswer, SlotOf
from reflex_runtime.replicas.replica import Replica
from reflex_runtime.web.errors import Conflict, InvalidRequest, NotFound

Ask = Callable[[], Awaitable[Mapping[str, ReplicaAnswer]]]


class ReplicaExchanges:
    """Exchanges the policies in the slots of one policy of a front. served: the front's, without slots of its own."""

    def __init__(self, served: ServedPolicy, replicas: Sequence[Replica]) -> None:
        self._served, self._replicas = served, replicas
        self._before: dict[str, PolicySource] = {}  # what each slot had, while its guard watches
        self.kept = KeptExchanges(served.config, served.rollout, self._go_back, self._settle)

    async def exchange(self, slot: str, source: str, load: Ask) -> dict[str, Any]:
        """Put the policy of a source into the slot of every replica. Returns what is now in the slot.

        load: has every live replica load it beside, and returns their answers. Raises the error of a replica, and
        Conflict if one is not ready or was lost meanwhile; then no replica has switched. A replica that cannot be
        started with what it had is started with the new policy.
        """
        self._served.rollout.may_exchange()
        waiting = [replica.name for replica in self._replicas if not (replica.live or replica.client.start_failed)]
        if waiting:
            raise Conflict(f"{', '.join(waiting)}: not ready, and every replica must load the policy; try again later")
        lives = self._lives()
        if not any(lives.values()):
            raise Conflict("no replica is left that could load the policy: restart the server with it")
        try:
            found = await load()
            told = self._loaded([name for name, pid in lives.items() if pid is not None], found)
            spec = await in_thread(lambda: read_source(source))
            if lives != self._lives():
                raise Conflict("a replica was lost while the policy was loaded; no replica has switched")
        except BaseException:
            self._tell(DROP, slot)
            raise
        before = self._served.specs[slot]
        self._put(slot, spec)
        if self.kept.guarded(slot):
            self._before[slot] = before
        self._tell(SWITCH, slot)
        self.kept.exchanged(slot, told["model_version"], source)
        return told

    def _lives(self) -> dict[str, int | None]:
        """The process of each live replica, None for the others."""
        return {replica.name: replica.client.pid if replica.live else None for replica in self._replicas}

    @staticmethod
    def _loaded(names: Sequence[str], found: Mapping[str, ReplicaAnswer]) -> dict[str, Any]:
        """What these replicas have loaded. Raises if one has not, or they differ."""
        missing = [name for name in names if name not in found]
        if missing:
            raise Conflict(f"{', '.join(missing)}: lost while the policy was loaded; no replica has switched")
        bodies = {name: msgspec.json.decode(answer.body) for name, answer in found.items()}
        for name, answer in found.items():
            if answer.status != 200:
                raise _refused(name, answer.status, bodies[name])
        versions = {body["model_version"] for body in bodies.values()}
        if len(versions) != 1:
            raise Conflict(f"replicas have read different policies ({', '.join(sorted(versions))}); load it again")
        loaded: dict[str, Any] = next(iter(bodies.values()))
        return loaded

    def _put(self, slot: str, spec: PolicySource) -> None:
        """This is in the slot from now on, also in replicas that start later."""
        self._served.specs[slot] = spec
        self._served.rollout.exchanged(slot, time.monotonic())
        for replica in self._replicas:
            replica.serves(self._served.name, sources={slot: spec.source})
            if replica.client.start_failed:
                replica.client.retry()

    def _go_back(self, slot: str) -> str | None:
        """Replicas that have the version before go back to it, others start again with it."""
        before = self._before.pop(slot, None)
        if before is None:
            return None
        self._put(slot, before)
        self._tell(BACK, slot)
        return f"{before.model_id}@{before.model_hash}"

    def _settle(self, slot: str) -> None:
        self._before.pop(slot, None)
        self._tell(SETTLE, slot)

    def _tell(self, what: str, slot: str) -> None:
        for replica in self._replicas:
            if replica.live:
                replica.client.notify(what, SlotOf(self._served.name, slot))


def _refused(name: str, status: int, body: Mapping[str, Any]) -> ReflexError:
    """The error of a replica that could not load a policy, with its name."""
    message = f"{name}: {body['message']}; no replica has switched"
    if status == 422:
        return InvalidRequest(message, body.get("field", "path"))
    kind = {404: NotFound, 409: Conflict}.get(status, ReflexError)
    return kind(message, replica=name)
