"""Whose a request is, read from its head and from the bytes of its body. Pure.

Bodies are searched for the names of fields, not decoded: a wrong guess costs the request its place, and makes no answer
wrong.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

EPISODE_HEADER: Final = b"x-reflex-episode"  # an episode, percent-encoded; see docs/deploying.md
MAX_HEAD: Final = 64 * 1024  # bytes of a head
SCANNED: Final = 64 * 1024  # bytes of a body that are looked at

_TEXT: Final = rb'\s*:\s*"((?:[^"\\\x00-\x1f]|\\.){1,1280})"'  # escapes included: an id of 256 bytes
_ROBOT, _EPISODE = re.compile(rb'"robot_id"' + _TEXT), re.compile(rb'"(?:episode_id|sequence_id)"' + _TEXT)
_NUMBER: Final = re.compile(rb'"sequence_id"\s*:\s*([0-9]{1,20})')
_PACKED: Final = {name: bytes([0xA0 + len(name)]) + name for name in (b"robot_id", b"episode_id")}
_ASKS: Final = re.compile(r"(?:/policies/[^/]*)?/(?:act|reset|v2/models/.+/infer)")


@dataclass(frozen=True, slots=True)
class Begun:
    """What the first bytes of a request say.

    asks: whether it asks a policy, or opens a websocket to ask one; anything else concerns the whole server.
    identity: see `identity_of`. episode: its id, "" if it is not seen. enough: whether more bytes could change nothing;
    otherwise they cannot once there are `until`.
    """

    asks: bool
    identity: str = ""
    episode: str = ""
    enough: bool = True
    until: int = 0

    @property
    def robot(self) -> str | None:
        """The robot that is named."""
        return self.identity.removeprefix("robot:") if self.identity.startswith("robot:") else None


def identity_of(robot_id: str | None, episode_id: str | None) -> str:
    """The name under which a caller is placed: what a scheduler counts as one client. "" if there is neither."""
    return f"robot:{robot_id}" if robot_id else f"episode:{episode_id}" if episode_id else ""


def begun(data: bytes) -> Begun | None:
    """What the bytes of a connection's next request say; None until its head is there.

    A head that is no HTTP/1 concerns the server, which refuses it. A body is looked at in its first 64 KiB; where that
    names nobody, the header X-Reflex-Episode does.
    """
    end = data.find(b"\r\n\r\n")
    line = data.find(b"\n")
    if not data[:1].isalpha() or (line >= 0 and data[line - 1 : line] != b"\r"):
        return Begun(False)  # TLS, for one: its caller is told at once
    if end < 0:
        return Begun(False) if len(data) > MAX_HEAD else None
    first, *lines = data[:end].split(b"\r\n")
    words = first.split(b" ")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    method, path = words[0].decode("latin-1"), words[1].partition(b"?")[0].decode("latin-1") if words[1:] else ""
    if len(words) != 3 or not asks_policy(method, path):
        return Begun(opens_websocket(method, headers.get(b"upgrade", b"")))
    body, length = data[end + 4 : end + 4 + SCANNED], headers.get(b"content-length", b"")
    needed = min(int(length), SCANNED) if length.isdigit() and b"expect" not in headers else 0
    if b"transfer-encoding" in headers:
        needed = 1
    robot, episode = names_in(body, headers.get(b"content-type", b""))
    enough = len(body) >= needed or bool(robot and episode)
    if not robot and not episode:
        episode = named_by(headers.get(EPISODE_HEADER, b""))
    return Begun(True, identity_of(robot, episode), episode, enough, 0 if enough else end + 4 + needed)


def asks_policy(method: str, path: str) -> bool:
    """Whether a request asks a policy, and so goes to the process that serves its caller."""
    return method == "POST" and _ASKS.fullmatch(path) is not None


def opens_websocket(method: str, upgrade: bytes) -> bool:
    """Whether a request opens a websocket, which goes to a replica. upgrade: its header of that name."""
    return method == "GET" and upgrade.lower() == b"websocket"


def named_by(header: bytes) -> str:
    """The episode that the value of X-Reflex-Episode names."""
    return unquote_to_bytes(header).decode("utf-8", "replace")


def names_in(body: bytes, content_type: bytes) -> tuple[str, str]:
    """robot_id, and episode_id or OIP's sequence_id, in a body of JSON or msgpack; "" where they are not seen."""
    if b"msgpack" in content_type.lower():
        return _unpacked(body, b"robot_id"), _unpacked(body, b"episode_id")
    robot, episode = _ROBOT.search(body), _EPISODE.search(body) or _NUMBER.search(body)
    return _read(robot), _read(episode)


def _read(found: re.Match[bytes] | None) -> str:
    if found is None:
        return ""
    try:
        text = str(json.loads(b'"%b"' % found[1] if found.re is not _NUMBER else found[1]))
        text.encode()  # JSON can write lone surrogates, which no message to a replica can hold
    except ValueError:
        return ""
    return text


def _unpacked(body: bytes, name: bytes) -> str:
    """The text behind a key of a msgpack map, "" if it is longer than 64 KiB."""
    at = body.find(_PACKED[name])
    if at < 0:
        return ""
    at += len(name) + 1
    kind = body[at] if at < len(body) else 0
    if 0xA0 <= kind <= 0xBF:
        begin, size = at + 1, kind - 0xA0
    elif kind == 0xD9 and at + 1 < len(body):
        begin, size = at + 2, body[at + 1]
    elif kind == 0xDA and at + 2 < len(body):
        begin, size = at + 3, int.from_bytes(body[at + 1 : at + 3])
    else:
        return ""
    return body[begin : begin + size].decode("utf-8", "replace") if len(body) >= begin + size else ""

