"""The colour and the name of a request or its client, the same in tables and pictures."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from reflex_runtime.observe.journal import BatchLine, Member
from reflex_runtime.observe.journal_reader import Journal

# Paul Tol's "muted" scheme, safe for colour-blind readers; beyond it the colours repeat under a hatching.
PALETTE = (
    "#88CCEE", "#CC6677", "#117733", "#DDCC77", "#332288", "#AA4499", "#44AA99", "#882255", "#999933",
)  # fmt: skip
HATCHES = ("", "////", "\\\\\\\\", "xxxx")  # lines only: a hatching of dots weighs megabytes in an SVG
OTHERS = "#BBBBBB"
INK, FAINT, RULE = "#222222", "#6B7280", "#E5E7EB"
DPI = 200  # of a PNG

_CONNECTION = re.compile(r"""[(\[](['"])([^'"]+)\1, (\d+)[)\]]""")



@dataclass(frozen=True, slots=True)
class Colours:
    """One colour per client, or per request where all are of one client. by: `client` or `request`."""

    by: str
    names: tuple[str, ...]
    _index: dict[Hashable, int]

    @classmethod
    def of(cls, trace: Journal, batches: Sequence[BatchLine]) -> Colours:
        """In order of appearance: clients in the trace, so that a window of it shows the same colours; requests in the
        batches shown, so that few of them need no hatching."""
        by = "client" if len({m.client for b in trace.batches for m in b.members}) > 1 else "request"
        index: dict[Hashable, int] = {}
        names = []
        for batch in trace.batches if by == "client" else batches:
            for m in batch.members:
                key: Hashable = m.client if by == "client" else m.seq
                if key not in index:
                    index[key] = len(index)
                    names.append(client_name(m) if by == "client" else request_name(m))
        return cls(by, tuple(names), index)

    def index(self, member: Member) -> int:
        """Number of the member's colour."""
        return self._index[member.client if self.by == "client" else member.seq]

    def knows(self, member: Member) -> bool:
        """Whether it has a colour, because it is in the shown part."""
        return (member.client if self.by == "client" else member.seq) in self._index

    def hex(self, member: Member) -> str:
        """The member's colour, without its hatching."""
        return PALETTE[self.index(member) % len(PALETTE)]


def request_name(member: Member) -> str:
    """The request's id, or the number of its arrival when it has none."""
    return plain(member.id) if member.id else f"#{member.seq}"


def client_name(member: Member) -> str:
    """The client; one known only by its connection is `host:port`, which a server writes as the repr of a pair."""
    return client_label(member.client)


def client_label(client: str, width: int = 18) -> str:
    """The same for a client's text alone. width: characters of a name."""
    connection = _CONNECTION.fullmatch(client)
    if connection is None:
        return plain(client or "no client", width)
    host, port = connection.group(2, 3)
    name = plain(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", 99)
    return name if len(name) <= 21 else "…" + name[-20:]  # two of them differ in the port


def plain(text: str, width: int = 18) -> str:
    """A caller's text on one line: unprintable characters become dots, and a long text is cut with an ellipsis."""
    shown = "".join(c if c.isprintable() else "·" for c in text)
    return shown if len(shown) <= width else shown[: width - 1] + "…"


def ink(face: str) -> str:
    """Dark or white, whichever reads better on a colour."""
    r, g, b = (int(face[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "#FFFFFF" if 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.45 else INK


def pale(face: str, share: float = 0.62) -> str:
    """A colour mixed with white: for requests that get one token."""
    parts = (int(face[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 * share + part * (1 - share)):02X}" for part in parts)


def fill(colour: int, light: bool = False) -> dict[str, Any]:
    """Face, hatching and a white edge that separates neighbours. light: pale, and outlined in the colour itself."""
    if colour < 0:
        return {"facecolor": OTHERS, "edgecolor": "white", "linewidth": 0.5}
    face = PALETTE[colour % len(PALETTE)]
    if light:
        hatch = HATCHES[colour // len(PALETTE) % len(HATCHES)]
        return {"facecolor": pale(face), "hatch": hatch, "edgecolor": face, "linewidth": 0.8}
    return {
        "facecolor": face,
        "hatch": HATCHES[colour // len(PALETTE) % len(HATCHES)],
        "edgecolor": "white",
        "linewidth": 0.5,
    }
