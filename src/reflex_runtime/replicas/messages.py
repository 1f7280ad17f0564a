"""The messages between the front and a replica, beside those that every runtime process has (`ipc.messages`).

Connections go over a channel of their own (`web.handover`). The front calls; a replica only notifies.
"""

from __future__ import annotations

from typing import Any

import msgspec

SERVE, ASK, FORGET, NOTE = "serve", "ask", "forget", "note"
MEMBERS, ORDERS, UNWATCH, MOVED = "members", "orders", "unwatch", "moved"
SWITCH, DROP, BACK, SETTLE = "switch", "drop", "back", "settle"
PLACED, CRASHED, COMPUTED, ANSWERED, PROBES, OUTCOME = "placed", "crashed", "computed", "answered", "probes", "outcome"
LEAVES, PART = "leaves", "part"

HEADERS = list[tuple[bytes, bytes]]


class Serve(msgspec.Struct):
    """Params of `serve`: load and be ready. name: of the replica. config, places, asked: as `reflex serve` has read
    them. Answered when it is ready, or with what is wrong."""

    name: str
    config: dict[str, Any]
    places: dict[str, str]
    asked: list[dict[str, Any]]


class AskReplica(msgspec.Struct):
    """Params of `ask`: an HTTP request that concerns the whole server. watch: if its answer does not end, the number
    under which its parts come as `part`."""

    method: str
    path: str
    headers: HEADERS = []
    body: bytes = b""
    watch: int = 0


class ReplicaAnswer(msgspec.Struct):
    """The result of `ask`."""

    status: int
    headers: HEADERS
    body: bytes


class AnswerPart(msgspec.Struct, array_like=True):
    """`part`: of an answer that does not end."""

    watch: int
    data: bytes


class Members(msgspec.Struct):
    """`members`: the live replicas. settled: none has joined lately, so that an episode runs where its hash says."""

    names: list[str]
    settled: bool


class MovedEpisodes(msgspec.Struct):
    """`moved`: the replica of these episodes has left. The one that goes on with an episode tells its caller.
    slots: where it ran, by episode and policy."""

    slots: dict[str, dict[str, str]]


class SlotOf(msgspec.Struct):
    """`switch`: new requests of a slot go to what was loaded beside; `drop`: that is not needed. `back`: the version
    before is in the slot again; `settle`: it is needed no more."""

    policy: str
    slot: str


class ReplicaReport(msgspec.Struct, omit_defaults=True):
    """`placed`, `crashed`, `computed`, `answered`, `probes` and `outcome`: see `RolloutReports`. text: the episode, the
    key or the outcome; number: the share of bad requests, or seconds; caller: see `Caller`, of `placed`."""

    policy: str
    slot: str = ""
    text: str = ""
    number: float = 0.0
    caller: tuple[str, str] = ("", "")


class Noted(msgspec.Struct):
    """`note`: a line for the journals of this replica."""

    kind: str
    fields: dict[str, Any]


class Forget(msgspec.Struct):
    """`forget`: an episode has ended."""

    policy: str
    episode: str
