"""Hostile inputs: each must be answered as it should be, must not keep `/health` waiting, and must leave no memory.

A caller beside them asks plain questions, and gets right answers. What keeps `/health` waiting is tried again: a busy
machine does so once, an input does it every time.
"""

from __future__ import annotations

import json
import pickle
import random
import resource
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from bench.models import picture, write_export
from bench.report import say
from bench.servers import Server, reserved
from bench.soak.callers import Callers, Completions, Health, Question, resident, serve

LARGEST = 16 * 2**20 - 4096  # bytes of a body
STOP, STAYS = 0.25, 64.0  # seconds, MB
TIMES = 8  # that an input is tried as long as it keeps /health waiting
SETTLES = 15.0  # seconds for memory to come back
STATE = [0.1] * 8

REFUSED = frozenset({400, 404, 405, 408, 411, 413, 414, 415, 417, 422, 426, 431, 501, 503, 505})
ANY = REFUSED | {200}
OK = frozenset({200})


@dataclass(frozen=True)
class Input:
    """data: what is sent, whole. allowed: statuses of its answers; none at all and a closed connection is always
    allowed. clients: how many send it at once."""

    name: str
    data: Callable[[], bytes]
    allowed: frozenset[int] = REFUSED
    clients: int = 1


@dataclass
class Met:
    """What an input did. wrong: "" if its answers were right. stop: seconds that `/health` took. grew: MB."""

    name: str
    wrong: str
    stop: float
    grew: float

    @property
    def harmless(self) -> bool:
        return not self.wrong and self.stop <= STOP and self.grew <= STAYS


def request(
    path: str, body: bytes, kind: str = "application/json", more: bytes = b"", length: bool = True, version: str = "1.1"
) -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: {kind}\r\nConnection: close\r\n".encode()
    return head + (b"Content-Length: %d\r\n" % len(body) if length else b"") + more + b"\r\n" + body


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


def _chunks(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


# -- HTTP itself -------------------------------------------------------------------------------------------------------


def framing() -> Iterator[Input]:
    """Requests whose end is unclear: two readers must not see two different requests in them."""
    good = json.dumps({"state": STATE}).encode()
    health = _get("/health")
    chunked, chunks = b"Transfer-Encoding: chunked\r\n", _chunks(good)

    def of(
        name: str, more: bytes, body: bytes = good, length: bool = False, allowed: frozenset[int] = REFUSED
    ) -> Input:
        return Input(f"HTTP: {name}", lambda: request("/act", body, more=more, length=length), allowed)

    yield of("both lengths", chunked, chunks + health, True)
    yield of("two lengths", b"Content-Length: 5\r\n", length=True)
    for value in (b"+5", b"-5", b"0x10", b"5, 5", b"9" * 30, b"1 1", "٣".encode()):
        yield of(f"length {value.decode()}", b"Content-Length: %s\r\n" % value)
    for value in (b"xchunked", b"chunked, identity", b"\x0bchunked", b"gzip"):
        yield of(f"encoding {value!r}", b"Transfer-Encoding: %s\r\n" % value, chunks)
    for size in (b"zz", b"-5", b"0x5", b"f" * 18):
        yield of(f"chunk of {size.decode()}", chunked, size + b"\r\nabcde\r\n0\r\n\r\n")
    yield of("chunks end in LF", chunked, chunks.replace(b"\r\n", b"\n"))
    yield of("a request in a trailer", chunked, chunks[:-2] + b"Content-Length: 5\r\n\r\n", allowed=ANY)
    yield of("NUL in a header", b"X: a\0b\r\n", length=True)
    yield of("CR in a header", b"X: a\rContent-Length: 3\r\n", length=True)
    yield of("a folded header", b"Content-Length:\r\n 5\r\n")
    yield of("a header of 10 MB", b"X: %s\r\n" % (b"a" * 10_000_000), length=True)
    yield of("100,000 headers", b"X: y\r\n" * 100_000, length=True)
    yield of("expects what nobody knows", b"Expect: 200-maybe\r\n", length=True, allowed=ANY)
    yield of("a body of 5 that says 1 GB", b"Content-Length: 1073741824\r\n", b"hello")
    yield Input("HTTP: rubbish", lambda: random.Random(1).randbytes(100_000))
    yield Input("HTTP: a TLS hello", lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))
    yield Input("HTTP: of version 2", lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(500))
    yield Input("HTTP: 5,000 in a row", lambda: health.replace(b"Connection: close\r\n", b"") * 5000 + health, OK)
    yield Input("HTTP: CONNECT", lambda: b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + health, ANY)
    yield Input("HTTP: a path of 70 kB", lambda: _get("/" + "a" * 70_000))
    yield Input("HTTP: a path out of the root", lambda: _get("/%2e%2e/etc/passwd"))


# -- bodies ------------------------------------------------------------------------------------------------------------


def bodies() -> Iterator[Input]:
    """Bodies of robots: the largest, the deepest, and lengths that lie."""
    half = LARGEST // 2

    def of(name: str, make: Callable[[], bytes], clients: int = 1, allowed: frozenset[int] = REFUSED) -> Input:
        kind = "application/msgpack" if name.startswith("msgpack") else "application/json"
        return Input(f"body: {name}", lambda: request("/act", make(), kind), allowed, clients)

    yield of("a million keys", lambda: b"{%s}" % b",".join(b'"k%06d":1' % i for i in range(10**6)), 4, ANY)
    yield of("numbers", lambda: b'{"state":[%s1]}' % (b"1," * (half - 20)), 4)
    yield of("an instruction", lambda: b'{"instruction":"%s"}' % (b"a" * (LARGEST - 100)), 4)
    yield of("words", lambda: b'{"instruction":"%s"}' % (b"open " * (LARGEST // 5 - 100)), 4)
    yield of("escapes", lambda: b'{"image":"%s","seed":NaN}' % (b"\\u0041" * (LARGEST // 6 - 50)), 4)
    yield of("a picture that is none", lambda: b'{"image":"%s"}' % (b"A" * (LARGEST // 4 * 4 - 100)), 4)
    yield of("empty arrays", lambda: b'{"x":[%s[]]}' % (b"[]," * (LARGEST // 3 - 20)), 4)
    yield of("arrays in arrays", lambda: b'{"state":%s' % (b"[" * (LARGEST - 100)), 4)
    yield of("objects in objects", lambda: b'{"a":' * (LARGEST // 5 - 100), 4)
    yield of("a million digits", lambda: b'{"state":[%s]}' % (b"9" * 10**6))
    yield of("a seed of a million digits", lambda: b'{"state":[1],"seed":%s}' % (b"9" * 10**6))
    yield of("not UTF-8", lambda: b'{"instruction":"\xff\xfe"}')
    yield of("half a surrogate", lambda: b'{"instruction":"\\ud800"}')
    yield of("msgpack: numbers", lambda: msgpack.packb({"state": [1] * (LARGEST - 100)}), 4)
    yield of("msgpack: arrays in arrays", lambda: b"\x81\xa5state" + b"\x91" * (LARGEST - 100), 4)
    yield of("msgpack: maps in maps", lambda: b"\x81\xa1a" * (LARGEST // 3 - 100), 4)
    for claim in (b"\xdd", b"\xdf", b"\xc6"):
        yield of(f"msgpack: {claim.hex()} of 4 GB", lambda claim=claim: b"\x81\xa5state" + claim + b"\xff" * 4)  # type: ignore[misc]
    for shape in ([2**62, 4], [0, 2**62], [-1, -4]):
        array = {"dtype": "<f4", "shape": shape, "data": b""}
        yield of(f"msgpack: an array of {shape}", lambda array=array: msgpack.packb({"state": array}))  # type: ignore[misc]
    objects = {"dtype": "|O8", "shape": [4], "data": bytes(32)}
    yield of("msgpack: an array of objects", lambda: msgpack.packb({"state": objects}))


def pictures() -> Iterator[Input]:
    """Pictures that are small to send and large to decode."""
    sides = ((20_000, 20_000, 1), (4096, 4096, 1), (4096, 4096, 16), (16_777_216, 1, 1), (1, 2_000_000, 1))
    made: list[tuple[str, Callable[[], str]]] = [
        (f"a PNG of {w} × {h}, {bits} bits", lambda w=w, h=h, bits=bits: png(w, h, bits))  # type: ignore[misc]
        for w, h, bits in sides
    ]
    made.append(("a progressive JPEG", lambda: picture("JPEG", (4096, 4096), progressive=True)))
    made.append(("a GIF", lambda: picture("GIF", (640, 480))))
    for name, make in made:
        yield Input(f"picture: {name}", lambda make=make: _looks(image=make()), ANY, 2)  # type: ignore[misc]
    many = {f"camera{i}": png(4096, 4096, 1) for i in range(40)}
    yield Input("picture: forty of 4096 × 4096", lambda: _looks(images=many), ANY)


def _looks(**images: Any) -> bytes:
    return request("/act", json.dumps({"state": STATE} | images).encode())


def png(width: int, height: int, bits: int) -> str:
    """A grey picture without light, made row by row, in base64."""
    import base64

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, row = zlib.compressobj(9), bytes(1 + (width * bits + 7) // 8)
    data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    whole = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return base64.b64encode(whole).decode()


# -- the language model ------------------------------------------------------------------------------------------------


def prompts() -> Iterator[Input]:
    """Fields, forms and messages that are costly to read."""

    def of(
        name: str, allowed: frozenset[int] = ANY, path: str = "/v1/completions", clients: int = 1, **more: Any
    ) -> Input:
        asked = {"model": "scribe", "max_tokens": 8} | ({} if "messages" in more else {"prompt": "Once"}) | more
        return Input(f"prompt: {name}", lambda: request(path, json.dumps(asked).encode()), allowed, clients)

    def schema(shape: Any) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": shape}}}

    def doubled(by: str, levels: int) -> dict[str, Any]:
        rules: dict[str, Any] = {
            f"d{i}": {by: [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "type": "array"} for i in range(levels)
        }
        return {"$ref": "#/$defs/d0", "$defs": rules | {f"d{levels}": {"type": "string"}}}

    numbered = {f"k{i}": {"type": "string"} for i in range(20_000)}
    yield of("20,000 properties", **schema({"type": "object", "properties": numbered, "required": [*numbered]}))
    yield of("a choice of 100,000", **schema({"enum": [f"value{i}" for i in range(100_000)]}))
    yield of("references that double", **schema(doubled("prefixItems", 40)))
    yield of("schemas that double", **schema(doubled("allOf", 30)))
    yield of("a reference to itself", **schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}))
    yield of("a reference to a file", **schema({"$ref": "file:///etc/passwd"}))
    yield of("a billion items", **schema({"type": "array", "items": {"type": "string"}, "minItems": 10**9}))
    for pattern in ("(a{1,1000}){1,1000}", "(.*a){60}", "(a|b)*a(a|b){40}", "(.*a.{40})&(.*b.{41})&(.*c.{42})"):
        yield of(f"regular expression {pattern}", clients=4, structured_outputs={"regex": pattern})
    ambiguous = 'start: s\ns: s s | s s s | "a" | ""'
    yield of("an ambiguous grammar", structured_outputs={"grammar": ambiguous}, max_tokens=100)
    yield of("a grammar that imports", structured_outputs={"grammar": '%import /etc/passwd\nstart: "x"'})
    deep = b'{"type":"array","items":' * 100_000 + b"{}" + b"}" * 100_000
    body = b'{"model":"scribe","prompt":"a","response_format":{"type":"json_schema","json_schema":{"schema":%s}}}'
    yield Input("prompt: a schema of 100,000 levels", lambda: request("/v1/completions", body % deep))
    for name, value in (("NaN", b"NaN"), ("1e999", b"1e999")):
        raw = b'{"model":"scribe","prompt":"a","max_tokens":4,"temperature":%s}' % value
        yield Input(f"prompt: temperature {name}", lambda raw=raw: request("/v1/completions", raw))  # type: ignore[misc]
    yield of("50,000 biases", logit_bias={str(i): 1 for i in range(50_000)})
    yield of("a bias beyond the vocabulary", REFUSED, logit_bias={"999999999": 100})
    yield of("128 choices", n=128)
    yield of("a million choices", REFUSED, n=10**6)
    yield of("2,000 prompts", prompt=["a"] * 2000)
    yield of("100,000 prompts", prompt=["a"] * 100_000)
    yield of("tokens that are none", REFUSED, prompt=[10**9, -1, 2**63])
    yield of("4 MB of text", clients=4, prompt="ab cd " * 650_000)
    yield of("4 MB of spaces", clients=4, prompt=" " * 3_900_000)
    yield of("100,000 stops", stop=["a"] * 100_000)
    yield of("a model's name as a path", REFUSED, model="../../etc/passwd")
    yield of("a model's name with a line of a log", REFUSED, model="a\nINFO root forged")
    chat = "/v1/chat/completions"
    yield of("10,000 messages", path=chat, clients=4, messages=[{"role": "user", "content": "a" * 300}] * 10_000)
    loop = "{% for i in range(10**9) %}a{% endfor %}"
    yield of("a template as text", path=chat, messages=[{"role": "user", "content": loop}])
    yield of("a template that does not end", path=chat, messages=[{"role": "user", "content": "a"}], chat_template=loop)
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(5000)]
    yield of("5,000 tools", path=chat, messages=[{"role": "user", "content": "a"}], tools=tools, tool_choice="required")


# -- the wires of robots -----------------------------------------------------------------------------------------------


def pickles() -> Iterator[tuple[str, bytes]]:
    """For LeRobot's wire: lists that hold the one before twice."""
    for levels in (20, 60):
        nested: Any = "x" * 10
        for _ in range(levels):
            nested = [nested, nested]
        yield f"pickle: {levels} levels of lists that double", pickle.dumps(nested)
    yield "pickle: 10 MB of rubbish", random.Random(1).randbytes(10**7)
    yield "pickle: it calls a function", b"cos\nsystem\n(S'exit 1'\ntR."


def crowds() -> Iterator[tuple[str, int, bytes]]:
    """(name, connections, what each sends before it stops in the middle)."""
    head = b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % LARGEST
    yield "2,000 connections that say nothing", 2000, b""
    yield "1,000 heads of 60 kB without an end", 1000, head + b"X: " + b"a" * 60_000
    yield "40 bodies of 16 MB without an end", 40, head + b'\r\n{"instruction":"' + b"a" * (LARGEST - 4096)


# -- how they are met --------------------------------------------------------------------------------------------------


def hostile(root: Path) -> list[Met]:
    """Give all of them to servers of both kinds, one after the other."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    export = str(write_export(root / "hostile", heavy=False, cameras=("image",)))
    found: list[Met] = []
    body = {"state": STATE, "image": picture("JPEG", (64, 64)), "seed": 1}
    with ExitStack() as ends:
        lerobot = ends.enter_context(reserved())
        server = serve(export, "--lerobot", f"127.0.0.1:{lerobot}")
        ends.callback(server.stop)

        def plain(i: int) -> Question:
            return Question("plain", "/act", body | {"request_id": "plain"}, lambda answer: len(answer["actions"]) == 4)

        inputs = [*framing(), *bodies(), *pictures()]
        found += _meet(server, plain, ((one.name, _sends(server, one)) for one in inputs))
        found += _meet(server, plain, ((name, _pickled(lerobot, data)) for name, data in pickles()))
        found += _meet(server, plain, ((name, _crowd(server.port, n, data)) for name, n, data in crowds()))
        ends.pop_all()
        server.stop()
    with ExitStack() as ends:
        server = serve("scribe")
        ends.callback(server.stop)
        found += _meet(server, Completions(server), ((one.name, _sends(server, one)) for one in prompts()))
    return found


def _meet(
    server: Server, plain: Callable[[int], Question], inputs: Iterable[tuple[str, Callable[[], str]]]
) -> list[Met]:
    """Give each to the server, with a plain caller and `/health` beside it."""
    found = []
    for name, send in inputs:
        before = resident(server)
        stops, wrong = [], ""
        neighbour = Callers(server.port, plain, 1)
        try:
            with Health(server.port) as health:
                while not stops or (stops[-1] > STOP and len(stops) < TIMES):
                    wrong = wrong or send()
                    stops.append(health.longest())
        finally:
            neighbour.stop()
        wrong = wrong or next(iter(neighbour.wrong), "")
        met = Met(name, wrong, min(stops), _stays(server, before))
        found.append(met)
        if not met.harmless:
            say(f"  {name}: /health {met.stop:.2f} s, memory {met.grew:+.0f} MB {wrong}")
    return found


def _stays(server: Server, before: float) -> float:
    """Memory that is not given back, in MB."""
    end = time.monotonic() + SETTLES
    while (grew := resident(server) - before) > STAYS and time.monotonic() < end:
        time.sleep(0.5)
    return grew


def _sends(server: Server, one: Input) -> Callable[[], str]:
    """Sends it from all its clients. Returns what was wrong with the answers."""
    data = one.data()  # now: nobody here asks /health meanwhile

    def send() -> str:
        told: list[str] = []
        threads = [
            threading.Thread(target=lambda: told.append(sends(server.port, data, one.allowed)))
            for _ in range(one.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return next((wrong for wrong in told if wrong), "")

    return send


def sends(port: int, data: bytes, allowed: frozenset[int], patience: float = 60.0) -> str:
    """What is wrong with the answers to some bytes; "" if nothing is."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as sock:
        try:
            sock.sendall(data)  # and no half-close: it says that nobody waits
            while part := sock.recv(1 << 16):
                answer += part
        except TimeoutError:
            return f"no answer and no end in {patience:g} s"
        except OSError:  # it was refused while it was sent
            pass
    statuses = {int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")}
    return "" if statuses <= allowed else f"answered with {sorted(statuses)}: {answer[-200:]!r}"


def _crowd(port: int, connections: int, data: bytes) -> Callable[[], str]:
    """Opens connections that send so much, and closes them a second later."""

    def send() -> str:
        with ExitStack() as ends:
            for _ in range(connections):
                sock = ends.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10.0))
                with suppress(OSError):  # it is refused
                    sock.sendall(data)
            time.sleep(1.0)
        return ""

    return send


def _pickled(port: int, data: bytes) -> Callable[[], str]:
    """Sends it as a robot's settings, to LeRobot's wire."""
    import grpc

    from reflex_runtime.web import messages

    def send() -> str:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask = channel.unary_unary("/transport.AsyncInference/SendPolicyInstructions")
            try:
                ask(messages.Pickle(data=data).SerializeToString(), timeout=30)
            except grpc.RpcError as error:
                refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
                return "" if error.code() in refused else f"answered with {error.code()}: {error.details()}"
        return "accepted"

    return send
