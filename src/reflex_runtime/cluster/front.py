"""Around Ray's proxy: names the episode of each request, for `EpisodeRouter`, and gives the proxy's own refusals
Reflex's form. It is plain ASGI, and runs in the process of the proxy."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.placing import EPISODE_HEADER, named_by, names_in
from reflex_runtime.web.asgi import Receive, Scope, Send
from reflex_runtime.web.errors import NotReady
from reflex_runtime.web.form import PLAIN
from reflex_runtime.web.trust import keys_in

KEY_VARIABLE: Final = "RAY_REFLEX_KEY_SHA256"  # of proxies: the digest of the key that callers need
LAST_HEADER: Final = b"x-reflex-last-replica"  # tells a replica which one answered the episode before
REPLICA_HEADER: Final = b"x-reflex-replica"
REMEMBERED: Final = 100_000  # episodes
MOST: Final = 16 << 20  # bytes of a body that are looked at
LONGEST: Final = 256  # characters of a name, percent-encoded; a longer one is remembered by its digest
_ID: Final = b"x-request-id"
_OURS: Final = frozenset({_ID, EPISODE_HEADER, LAST_HEADER})  # not taken from a caller; Ray reads _ like -
_OUTCOME: Final = re.compile(r"(?:/policies/[^/]+)?/episodes/(.+)/outcome")


class EpisodeFront:
    """ASGI middleware. The episode is what the header `X-Reflex-Episode` says, else `episode_id` in the body or in the
    path. Where there is none, `robot_id` or the connection stands for it.

    It remembers which replica answered each of the latest of them. An episode that runs stays there while that replica
    is there; a robot or a connection goes to a new owner at once. A replica is told when another one had it before.

    key: the SHA-256 of the key that callers need, in hexadecimal. A body that comes without that key is not held here;
    the replica refuses it. "" holds all bodies.
    """

    def __init__(self, app: Any, key: str = "") -> None:
        self._app, self._key = app, key
        self._last: OrderedDict[str, bytes] = OrderedDict()  # the replica that answered last, by episode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = secrets.token_hex(16)  # of ours: Ray repeats whatever a caller sends
        headers = scope.get("headers", ())
        given = next((value for name, value in headers if name == EPISODE_HEADER), b"")
        kept = [header for header in headers if header[0].replace(b"_", b"-") not in _OURS]
        scope["headers"] = [*kept, (_ID, request_id.encode())]
        named, ends = _key(named_by(given)), True
        if scope["type"] == "http" and scope["method"] == "POST" and not named and self._knows_key(headers):
            messages = await read_body(receive)
            named, ends = _named(scope, b"".join(message.get("body", b"") for message in messages))
            named, receive = _key(named), replayed(messages, receive)
        if named:
            self._place(scope, named, ends)
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answering = _Answering(send, request_id, partial(self._remember, named))
        await self._app(scope, receive, answering.send)
        if not answering.begun:  # Ray has nothing to say where a replica is lost with a request
            error = NotReady("the replica that had this request was lost; ask again", retry_after=1.0)
            await answering.refuse(error, 503)

    def _knows_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        if not self._key:
            return True
        digests = [hashlib.sha256(key).hexdigest() for key in keys_in(dict(headers))]
        return any(hmac.compare_digest(digest, self._key) for digest in digests)

    def _place(self, scope: Scope, named: str, ends: bool) -> None:
        """Tell Ray's router whose request it is. ends: it is an episode, and not a robot or a connection: while it
        runs it stays where it is."""
        last = self._last.get(named)
        session = named.encode()
        if last is not None:
            scope["headers"].append((LAST_HEADER, last))
            session += b";" + last if ends else b""
        scope["headers"].append((EPISODE_HEADER, session))

    def _remember(self, episode: str, replica: bytes) -> None:
        if not episode:
            return
        self._last[episode] = replica
        self._last.move_to_end(episode)
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)


def _key(named: str) -> str:
    """A name as text that fits into a header and into memory, however long it is and whatever it holds."""
    key = quote(named, safe="", errors="replace")  # JSON can write lone surrogates
    return key if len(key) <= LONGEST else hashlib.sha256(key.encode()).hexdigest()


def _named(scope: Scope, body: bytes) -> tuple[str, bool]:
    """The episode of a POST, or what stands for it, "" where there is nothing; and whether it is an episode."""
    found = _OUTCOME.fullmatch(scope["path"])
    if found:
        return found[1], True
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    robot, episode = names_in(body, kind)
    if episode or robot:
        return episode or robot, bool(episode)
    client = scope.get("client")
    return (f"connection {client[0]} {client[1]}" if client else ""), False


async def read_body(receive: Receive) -> list[Any]:
    """The messages of the body, or the first `MOST` bytes of it."""
    messages, size = [], 0
    while size < MOST:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if not message.get("more_body", False):
            break
    return messages


def replayed(messages: list[Any], receive: Receive) -> Receive:
    """`receive` as if nothing had been read."""
    messages.reverse()

    async def again() -> Any:
        return messages.pop() if messages else await receive()

    return again


class _Answering:
    """Passes an answer on. One that is Ray's own is replaced by the error that it stands for.

    answers: called with the replica that answers with success, before its answer is sent. begun: whether the answer
    has begun.
    """

    def __init__(self, send: Send, request_id: str, answers: Callable[[bytes], None]) -> None:
        self._send, self._id, self._answers = send, request_id, answers
        self.begun = self._replaced = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            replica = next((value for name, value in message["headers"] if name == REPLICA_HEADER), b"")
            if message["status"] == 200 and replica:
                self._answers(replica)
            ids = [header for header in message["headers"] if header[0].lower() == _ID]
            kept = [header for header in message["headers"] if header[0].lower() != _ID]
            if len(ids) > 1:  # ours, and behind it Ray's
                message = {**message, "headers": [*kept, ids[0]]}
            elif message["status"] in (404, 408, 429, 503):
                self._replaced = True
                error = NotReady("Ray has no replica for this request yet; ask again", retry_after=1.0)
                await self.refuse(error, 503)
                return
        if not self._replaced:
            await self._send(message)

    async def refuse(self, error: ReflexError, status: int) -> None:
        """Answer with an error in the form of Reflex."""
        self.begun = True
        told = PLAIN.refuse(error, self._id, False)
        headers = [(b"content-type", told.content_type), (b"content-length", b"%d" % len(told.body))]
        headers.append((_ID, self._id.encode()))
        if error.retry_after is not None:
            headers.append((b"retry-after", b"1"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": told.body})


def middlewares() -> list[Any]:
    """For Ray, which asks for them by the name in RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    from starlette.middleware import Middleware  # comes with Ray

    return [Middleware(EpisodeFront, key=_digest(os.environ.get(KEY_VARIABLE, "")))]


def _digest(text: str) -> str:
    """The digest as it is compared, from how files and tools write it. ConfigError for what is none: no key would fit,
    and no request would be placed."""
    digest = text.strip().lower()
    if digest and not re.fullmatch("[0-9a-f]{64}", digest):
        raise ConfigError(f"{KEY_VARIABLE}: must be the SHA-256 of the key in hexadecimal, 64 digits and no more")
    return digest
