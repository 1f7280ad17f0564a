"""A table of bounded size in which nobody loses an entry because of others who put more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Final, NamedTuple

NOBODY: Final = ""


class Caller(NamedTuple):
    """Whose an entry is. host: the machine; `NOBODY` for all wires that do not tell it. name: a robot or a connection
    there."""

    host: str = NOBODY
    name: str = NOBODY

    @classmethod
    def of(cls, client: Hashable, robot: str | None) -> Caller:
        """client: (address, port, …), or the name of a connection. robot: as it calls itself, if it does."""
        host, name = client[:2] if isinstance(client, tuple) and len(client) > 1 else (NOBODY, client)
        return cls(str(host), f"robot:{robot}" if robot else str(name))


class FairTable:
    """Text by text. Beyond `most` entries one is forgotten: of the host that has most of them, the caller that has most
    of those, its oldest. So a host with at most `most` / hosts entries keeps all of them, however many others put, and
    the same holds for the callers of one host. All steps take constant time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[str, tuple[str, Caller]] = {}
        self._keys: dict[Caller, OrderedDict[str, None]] = {}  # oldest first
        self._hosts = _EntryCounts()
        self._names: dict[str, _EntryCounts] = {}  # by host

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: str) -> str | None:
        found = self._values.get(key)
        return None if found is None else found[0]

    def items(self) -> Iterator[tuple[str, str]]:
        return ((key, value) for key, (value, _) in self._values.items())

    def put(self, key: str, value: str, caller: Caller) -> None:
        """It is the caller's newest entry from now on."""
        self.drop(key)
        self._values[key] = value, caller
        self._keys.setdefault(caller, OrderedDict())[key] = None
        self._hosts.add(caller.host, 1)
        self._names.setdefault(caller.host, _EntryCounts()).add(caller.name, 1)
        if len(self._values) > self._most:
            host = self._hosts.largest()
            self.drop(next(iter(self._keys[Caller(host, self._names[host].largest())])))

    def drop(self, key: str) -> None:
        """Forget it, if it is there."""
        found = self._values.pop(key, None)
        if found is None:
            return
        caller = found[1]
        keys, names = self._keys[caller], self._names[caller.host]
        del keys[key]
        if not keys:
            del self._keys[caller]
        self._hosts.add(caller.host, -1)
        names.add(caller.name, -1)
        if not names:
            del self._names[caller.host]


class _EntryCounts:
    """How many each has, and who has most."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._with: dict[int, dict[str, None]] = {}  # those that have so many, the first to have come there first
        self._most = 0

    def __len__(self) -> int:
        return len(self._of)

    def add(self, name: str, more: int) -> None:
        """more: 1 or -1, so that the largest count changes by no more."""
        before = self._of.pop(name, 0)
        if before:
            del self._with[before][name]
            if not self._with[before]:
                del self._with[before]
        now = before + more
        if now:
            self._of[name] = now
            self._with.setdefault(now, {})[name] = None
        if now > self._most or self._most not in self._with:
            self._most = now

    def largest(self) -> str:
        return next(iter(self._with[self._most]))
