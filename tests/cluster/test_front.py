"""What stands around Ray's proxy: which episode a request belongs to, and the form of what the proxy itself refuses."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest

from reflex_runtime.cluster.front import KEY_VARIABLE, EpisodeFront, middlewares
from reflex_runtime.core.errors import ConfigError

JSON, PACKED = b"application/json", b"application/msgpack"


class Proxy:
    """Stands in for Ray's proxy: notes what it is asked, and answers with a status, or with nothing."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.scope: dict[str, Any] = {}
        self.body = b""
        self.replica = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        more = scope["type"] == "http"
        while more:
            message = await receive()
            self.body += message["body"]
            more = message["more_body"]
        if self.status:
            ids = [value for name, value in scope["headers"] if name == b"x-request-id"]
            headers = [(b"x-request-id", ids[0])]
            if self.status == 200:
                headers = [(b"x-request-id", b"of-the-request"), *headers, (b"x-reflex-replica", self.replica)]
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            await send({"type": "http.response.body", "body": b"its own words"})

    @property
    def episode(self) -> str | None:
        found = [value.decode() for name, value in self.scope["headers"] if name == b"x-reflex-episode"]
        assert len(found) < 2
        return unquote(found[0].partition(";")[0]) if found else None


def through(
    front: Proxy | EpisodeFront,
    body: bytes,
    path: str = "/act",
    kind: bytes = JSON,
    method: str = "POST",
    coming: list[Any] | None = None,
    **headers: bytes,
) -> list[Any]:
    """coming: the messages of the body, if they are not to be made of it."""
    given = [(b"content-type", kind), *((name.replace("_", "-").encode(), value) for name, value in headers.items())]
    scope = {"type": "http", "method": method, "path": path, "headers": given, "client": ("10.0.0.9", 4321)}
    if coming is None:
        half = len(body) // 2
        parts = [body[:10], body[10:half], body[max(10, half) :]]
        coming = [{"type": "http.request", "body": part, "more_body": n < 2} for n, part in enumerate(parts)]
    sent: list[Any] = []

    async def receive() -> Any:
        return coming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    front = front if isinstance(front, EpisodeFront) else EpisodeFront(front)
    asyncio.run(front(scope, receive, send))
    return sent


BODIES = [
    ({"image": "A" * 100_000, "robot_id": "arm", "episode_id": "ep 7/ä"}, "ep 7/ä"),
    ({"robot_id": "arm", "instruction": 'say "episode_id": "no"'}, "arm"),
    ({"episode_id": "e" * 200}, "e" * 200),
    ({"instruction": "nobody"}, "connection 10.0.0.9 4321"),
    ({"episode_id": None, "robot_id": 7}, "connection 10.0.0.9 4321"),
]


@pytest.mark.parametrize(("body", "episode"), BODIES)
@pytest.mark.parametrize("kind", [JSON, PACKED])
def test_x7_the_episode_is_read_from_the_body_which_is_passed_on_whole(body: Any, episode: str, kind: bytes) -> None:
    data = json.dumps(body).encode() if kind == JSON else msgspec.msgpack.encode(body)
    proxy = Proxy()
    through(proxy, data, kind=kind)
    assert (proxy.episode, proxy.body) == (episode, data)


def test_x7_a_header_or_a_path_names_the_episode_before_the_body_does() -> None:
    for path, headers, episode in (
        ("/act", {"x_reflex_episode": b"mine"}, "mine"),
        ("/episodes/ep 7/outcome", {}, "ep 7"),
        ("/policies/arm/episodes/ep 7/outcome", {}, "ep 7"),
    ):
        proxy = Proxy()
        through(proxy, b'{"episode_id": "another"}', path, **headers)
        assert proxy.episode == episode
    proxy = Proxy()
    through(proxy, b'{"parameters": {"sequence_id": 7}}', "/v2/models/arm/infer")  # of OIP
    assert proxy.episode == "7"
    proxy = Proxy()
    through(proxy, b"", "/health", method="GET")
    assert proxy.episode is None


@pytest.mark.parametrize(
    ("given", "knows"),
    [({}, False), ({"x_reflex_key": b"wrong"}, False), ({"authorization": b"Basic right"}, False),
     ({"x_reflex_key": b"right"}, True), ({"authorization": b"Bearer right"}, True)],
)  # fmt: skip
def test_x7_a_body_without_the_key_is_not_held(given: dict[str, bytes], knows: bool) -> None:
    """A replica refuses it at its head; the front would have had 16 MiB of it in memory."""
    body, held = b'{"episode_id": "e"}' + b" " * 1000, []

    class Looks(Proxy):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            held.append(len(coming) < 3)
            await super().__call__(scope, receive, send)

    coming = [{"type": "http.request", "body": body[n * 400 : (n + 1) * 400], "more_body": n < 2} for n in range(3)]
    proxy = Looks()
    front = EpisodeFront(proxy, key=hashlib.sha256(b"right").hexdigest())
    through(front, body, coming=coming, **given)
    assert held == [knows]
    assert proxy.episode == ("e" if knows else None)


def test_x7_the_key_of_rays_proxies_is_that_of_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray makes the front by its name, without arguments."""
    made: list[Any] = []
    starlette = ModuleType("starlette.middleware")
    starlette.Middleware = lambda kind, **more: made.append((kind, more))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "starlette", ModuleType("starlette"))
    monkeypatch.setitem(sys.modules, "starlette.middleware", starlette)
    digest = hashlib.sha256(b"right").hexdigest()
    for written in ("", digest, f"{digest}\n", digest.upper()):  # a file of a secret often ends with a line
        monkeypatch.setenv(KEY_VARIABLE, written)
        middlewares()
        assert made.pop() == (EpisodeFront, {"key": digest if written else ""})
    for wrong in ("right", f"{digest}  -", digest[1:], "\u00e9" * 64):
        monkeypatch.setenv(KEY_VARIABLE, wrong)
        with pytest.raises(ConfigError, match="RAY_REFLEX_KEY_SHA256: must be the SHA-256 of the key"):
            middlewares()
    assert not made


BROKEN = [b"", b"{", b'{"episode_id": "', b"\xaaepisode_id", b"\xaaepisode_id\xd9", b"\xff" * 99]


@pytest.mark.parametrize("body", BROKEN)
@pytest.mark.parametrize("kind", [JSON, PACKED, b""])
def test_x7_any_body_is_passed_on(body: bytes, kind: bytes) -> None:
    proxy = Proxy()
    through(proxy, body, kind=kind)
    assert (proxy.body, proxy.episode) == (body, "connection 10.0.0.9 4321")


def test_x7_a_request_has_one_id_and_a_caller_cannot_choose_it() -> None:
    proxy = Proxy()
    start, _ = through(proxy, b"{}", x_request_id=b"chosen")
    ids = [value for name, value in proxy.scope["headers"] if name == b"x-request-id"]
    assert len(ids) == 1
    assert ids != [b"chosen"]
    assert [value for name, value in start["headers"] if name == b"x-request-id"] == [b"of-the-request"]


@pytest.mark.parametrize("status", [0, 404, 408, 503])
def test_x7_what_ray_refuses_has_the_form_of_reflex(status: int) -> None:
    """Where a proxy or a replica has just started, or was lost."""
    start, body = through(Proxy(status), b"{}")
    told = json.loads(body["body"])
    headers = dict(start["headers"])
    assert (start["status"], told["error"], told["retry_safe"]) == (503, "not_ready", True)
    assert headers[b"x-request-id"].decode() == told["request_id"]
    assert headers[b"retry-after"] == b"1"


def test_x7_a_replica_is_told_which_one_answered_the_episode_before() -> None:
    proxy = Proxy()
    front = EpisodeFront(proxy)

    def last(body: bytes, replica: bytes, **given: bytes) -> bytes | None:
        """What the proxy was told of the episode's last replica; `replica` answers this time."""
        proxy.replica = replica
        through(front, body, **given)
        return next((value for name, value in proxy.scope["headers"] if name == b"x-reflex-last-replica"), None)

    assert last(b'{"episode_id": "e"}', b"r1") is None
    assert last(b'{"episode_id": "e"}', b"r2", x_reflex_last_replica=b"forged") == b"r1"
    assert last(b"{}", b"r3", x_reflex_episode=b"e") == b"r2"
    assert last(b'{"episode_id": "f"}', b"r1", x_reflex_last_replica=b"forged") is None


def test_x7_an_episode_that_runs_stays_with_its_replica_and_a_robot_may_move() -> None:
    proxy = Proxy()
    proxy.replica = b"r1"
    front = EpisodeFront(proxy)
    for body, given, session in (
        (b'{"episode_id": "e;1"}', {}, b"e%3B1;r1"),
        (b"{}", {"x_reflex_episode": b"ep"}, b"ep;r1"),
        (b'{"robot_id": "arm"}', {}, b"arm"),
        (b"{}", {}, b"connection%2010.0.0.9%204321"),
    ):
        for _ in range(2):
            through(front, body, **given)
        assert [value for name, value in proxy.scope["headers"] if name == b"x-reflex-episode"] == [session]


@pytest.mark.parametrize("named", ["e" * 60_000, "\ud800", "\U0001f916" * 80], ids=["long", "surrogate", "wide"])
def test_x7_a_name_of_any_length_and_text_is_passed_on_and_remembered_short(named: str) -> None:
    proxy = Proxy()
    proxy.replica = b"r1"
    front = EpisodeFront(proxy)
    given = {"x_reflex_episode": named.encode()} if len(named) > 1024 else {}
    for last in (None, b"r1"):
        proxy.body = b""
        body = json.dumps({"episode_id": named}).encode()
        assert through(front, body, **given)[0]["status"] == 200
        told = dict(proxy.scope["headers"])
        assert (proxy.body, told.get(b"x-reflex-last-replica")) == (body, last)
        assert len(told[b"x-reflex-episode"]) <= 256 + len(b";r1")


def test_x7_the_opener_of_a_websocket_cannot_write_what_the_front_tells() -> None:
    proxy = Proxy(status=0)
    given = [(b"x-reflex-episode", b"\xff;r2"), (b"x_reflex_episode", b"e;r2"), (b"x-reflex-last-replica", b"forged")]
    scope = {"type": "websocket", "path": "/ws", "headers": given, "client": ("10.0.0.9", 4321)}

    async def unused(*_: Any) -> Any:
        raise AssertionError

    asyncio.run(EpisodeFront(proxy)(scope, unused, unused))
    told = [header for header in proxy.scope["headers"] if header[0] != b"x-request-id"]
    assert told == [(b"x-reflex-episode", b"%EF%BF%BD%3Br2")]
