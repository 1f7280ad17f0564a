"""`reflex probe`: sends one observation to a server as its clients would, and shows what each wire expects.

/act, openpi and LeRobot get an observation, which `Pick` makes from what the server announces, and answer with actions.
Other listeners get the first message of their protocol. Errors are those of `reflex_runtime.client`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from secrets import token_hex
from typing import Any, Final, NamedTuple, TypeAlias

from reflex_runtime.cli.console import add_key, console, key_of
from reflex_runtime.client import Client, ClientError
from reflex_runtime.client.calls import ActFields
from reflex_runtime.client.errors import BadAnswer, NotFound, ServerError, TimedOut, Unreachable
from reflex_runtime.client.exchange import Reply, refused
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.extras import needed_by
from reflex_runtime.robots.wires import groot, openpi
from reflex_runtime.settings.declare import one_line
from reflex_runtime.web.access import is_loopback
from reflex_runtime.web.server_address import ServerAddress

HTTP: Final = ("http", "https")
GRPC: Final = ("grpc", "grpcs")
Shape: TypeAlias = tuple[int, ...]
Ask: TypeAlias = "Callable[[ServerAddress, str, float, Pick], Shape | None]"  # server, key or "", seconds of a step


def ask_act(server: ServerAddress, key: str, timeout: float, pick: Pick) -> Shape:
    fields: dict[str, Any] = {}
    for name, value in pick().items():
        if isinstance(value, str):
            fields["instruction"] = value
        elif value.ndim == 3:
            fields.setdefault("images", {})[name] = value
        else:
            fields[name] = value
    unknown = fields.keys() - ActFields.__annotations__.keys()
    if unknown:
        raise ConfigError(f"--observation: /act has no field {one_line(min(unknown))}; a picture is uint8 [h, w, 3]")
    url = f"{server.scheme}://{server.netloc}{server.path}"
    with Client(url, key or None, timeout=timeout, retries=0) as client:
        pick.began = time.perf_counter()  # after the client was made, which reads the system's certificates
        return client.act(**fields).actions.shape


def ask_openpi(server: ServerAddress, key: str, timeout: float, pick: Pick) -> Shape:
    """Ask over the websocket. A text frame is an error: JSON from Reflex, a traceback from another server."""
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus
    from websockets.sync.client import ClientConnection, connect

    def receive(socket: ClientConnection) -> dict[str, Any]:
        frame = socket.recv(timeout)
        if isinstance(frame, bytes):
            return openpi.decode(frame)
        if frame.startswith("{"):
            raise refused(Reply(0, {}, frame.encode()))
        raise ServerError((frame.strip().splitlines() or ["an empty text frame"])[-1][:300])

    url = f"{'wss' if server.secure else 'ws'}://{server.netloc}{server.path}/"
    headers = {"Authorization": f"Api-Key {key}"} if key else {}
    try:
        more: Any = {"open_timeout": timeout, "close_timeout": 0.2, "compression": None, "max_size": None}
        more["proxy"] = None if is_loopback(server.host) else True  # True: the proxy of the environment
        with connect(url, additional_headers=headers, **more) as socket:
            announced = receive(socket)
            socket.send(openpi.encode(dict(pick(announced, announced.get("reflex")))))
            return tuple(receive(socket)["actions"].shape)
    except InvalidStatus as error:
        headers = {name.lower(): value for name, value in error.response.headers.raw_items()}
        raise refused(Reply(error.response.status_code, headers, bytes(error.response.body or b""))) from None
    except (InvalidHandshake, InvalidMessage, EOFError, KeyError, AttributeError) as error:
        raise BadAnswer(f"no websocket of openpi: {type(error).__name__}: {error}") from None
    except TimeoutError:
        raise TimedOut(f"no answer within {timeout:g} s: the policy may still be loading") from None
    except (ConnectionClosed, OSError) as error:
        raise Unreachable(f"cannot reach {url}: {error}") from None


def greet_groot(server: ServerAddress, key: str, timeout: float, pick: Pick) -> None:
    with needed_by("this wire"):
        import zmq
    socket: Any = zmq.Context.instance().socket(zmq.REQ)
    with closing(socket):
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://{server.netloc}")
        socket.send(groot.encode({"endpoint": "get_modality_config"} | ({"api_token": key} if key else {})))
        if not socket.poll(round(1e3 * timeout)):
            raise TimedOut(f"no answer from tcp://{server.netloc} within {timeout:g} s")
        answer = groot.decode(socket.recv())
    if "error" in answer:
        body = {"message": str(answer["error"]), "error": answer.get("code", "server_error")}
        raise refused(Reply(0, {}, json.dumps(body).encode()))
    pick(answer)


@contextmanager
def grpc_calls(server: ServerAddress, key: str, timeout: float) -> Iterator[Callable[..., bytes]]:
    """A function that calls the server, as a new robot: (method, one message or a stream of them) → answer."""
    with needed_by("this wire"):
        import grpc
    metadata = [("x-reflex-robot", f"probe-{token_hex(4)}"), *([("authorization", f"Bearer {key}")] if key else [])]
    more: dict[str, Any] = {"metadata": metadata, "timeout": timeout}
    try:
        trusted = grpc.ssl_channel_credentials() if server.secure else None
        place, options = server.netloc, [("grpc.enable_http_proxy", not is_loopback(server.host))]
        with (
            grpc.secure_channel(place, trusted, options) if trusted else grpc.insecure_channel(place, options)
        ) as channel:

            def call(method: str, sent: bytes | Sequence[bytes] = b"") -> bytes:
                if isinstance(sent, bytes):
                    return bytes(channel.unary_unary(method)(sent, **more))
                return bytes(channel.stream_unary(method)(iter(sent), **more))

            yield call
    except grpc.RpcError as error:
        body = dict(error.trailing_metadata() or ()).get("reflex-error")
        if body is not None:
            raise refused(Reply(0, {}, body if isinstance(body, bytes) else body.encode())) from None
        kinds = {"DEADLINE_EXCEEDED": TimedOut, "UNAVAILABLE": Unreachable, "UNIMPLEMENTED": NotFound}
        name = error.code().name
        raise kinds.get(name, ServerError)(f"grpc://{server.netloc}: {name}: {error.details()}"[:300]) from None


def greet_oip(server: ServerAddress, key: str, timeout: float, pick: Pick) -> None:
    with grpc_calls(server, key, timeout) as call:
        call("/inference.GRPCInferenceService/ServerReady")
    pick()


def ask_lerobot(server: ServerAddress, key: str, timeout: float, pick: Pick) -> Shape | None:
    """Ask for actions; without an observation only call `Ready`."""
    with grpc_calls(server, key, timeout) as call:
        from reflex_runtime.robots.wires.lerobot import SERVICE, sent_by_robot, shape_of  # protobuf, as gRPC

        call(f"/{SERVICE}/Ready")
        if not (observed := pick()):
            return None
        setup, parts = sent_by_robot(observed, str(pick.said.get("policy_type", "")))
        call(f"/{SERVICE}/SendPolicyInstructions", setup)
        call(f"/{SERVICE}/SendObservations", parts)
        answer = call(f"/{SERVICE}/GetActions")
    try:
        shape = shape_of(answer)
    except ValueError as error:
        raise BadAnswer(str(error)) from None
    if not shape:
        raise BadAnswer("no actions came for the observation")
    return shape


class ProbeWire(NamedTuple):
    """A wire. config: its name in /config. ask: None if only /config is read. setting: the option of its listener."""

    config: str
    ask: Ask | None = None
    schemes: tuple[str, ...] = HTTP
    setting: str = ""


WIRES: Final[dict[str, ProbeWire]] = {
    "act": ProbeWire("act", ask_act),
    "openpi": ProbeWire("openpi", ask_openpi, (*HTTP, "ws", "wss")),
    "json-numpy": ProbeWire("json-numpy"),
    "oip": ProbeWire("oip"),
    "vla-eval": ProbeWire("vla-eval"),
    "gr00t": ProbeWire("gr00t", greet_groot, (*HTTP, "tcp"), "gr00t"),
    "oip-grpc": ProbeWire("oip", greet_oip, (*HTTP, *GRPC), "oip_grpc"),
    "lerobot": ProbeWire("lerobot", ask_lerobot, (*HTTP, *GRPC), "lerobot"),
}

WIDE = 140  # columns if the output is not a terminal and COLUMNS is not set
SCHEMES = ("http", "https", "ws", "wss", "tcp", "grpc", "grpcs")

_EPILOG = """\
examples:
  reflex probe http://127.0.0.1:8000                                       a server and its wires
  reflex probe ws://10.0.0.7:8000 --wire openpi --observation seen.npz     any server of openpi

docs/measure.md explains the table.
Exit status: 0 when at least one wire answered, 1 when none did, 2 when nothing listens there or the command is wrong.
"""


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    what = "Send one request on each wire of a server, and show what they expect."
    parser = verbs.add_parser("probe", description=what, epilog=_EPILOG)
    add = parser.add_argument
    add("url", metavar="URL", help="where the server is: http, https, ws, wss (openpi), tcp (GR00T), grpc or grpcs")
    add("--wire", choices=WIRES, metavar="NAME", action="append", help="only this one; may be given again")
    add_key(parser)
    add("--observation", metavar="FILE", help="an .npz file with the names of the wire (needs --wire)")
    add("--timeout-s", type=float, default=10.0, metavar="S", help="of each step (default %(default)g, 0.1 to 600)")
    add("--json", action="store_true", help="everything, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Probe and print; returns the exit status."""
    if not 0.1 <= args.timeout_s <= 600.0:
        raise ConfigError(f"--timeout-s={args.timeout_s:g}: must be in [0.1, 600] s")
    server, key = ServerAddress.of(args.url, SCHEMES), key_of(args)
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("--api-key: must be printable ASCII")
    for name in args.wire or ():
        if server.scheme not in WIRES[name].schemes:
            schemes = ", ".join(f"{scheme}://" for scheme in WIRES[name].schemes)
            raise ConfigError(f"--wire={name}: not at {server.scheme}://; give the URL as {schemes}")
    if args.observation is not None and not args.wire:
        raise ConfigError("--observation needs --wire: its names are those of one wire")
    own = None if args.observation is None else read_observation(args.observation)
    seen = look(server, key) if server.scheme in HTTP else ServerLook()
    there = [
        name for name, wire in WIRES.items()
        if server.scheme in wire.schemes and (server.scheme not in HTTP or not wire.setting or wire.setting in seen.on)
    ]  # fmt: skip
    found = [probe(server, key, args.timeout_s, name, seen, own) for name in args.wire or there]
    works = any(wire.works for wire in found)
    if args.json:
        result = {"url": args.url, "works": works, "server": seen._asdict() if seen.state else None}
        print(json.dumps(result | {"wires": [asdict(wire) for wire in found]}, indent=1, default=_shown))
    else:
        show(args.url, seen, found)
    return 0 if works else 1


@dataclass(slots=True)
class WireProbe:
    """The result of one wire. sent: name → type and shape. known: where the names come from. actions: the answer's
    shape; None if no observation was sent."""

    wire: str
    works: bool = False
    answer_ms: float | None = None
    announced: Mapping[str, Any] = field(default_factory=dict)
    known: str = ""
    sent: dict[str, str] = field(default_factory=dict)
    actions: tuple[int, ...] | None = None
    error: str = ""
    message: str = ""
    advice: str = ""


class ServerLook(NamedTuple):
    """What /health and /config tell; empty if it is no Reflex server. wires: what each expects. on: listeners."""

    state: str = ""
    version: str = ""
    model: str = ""
    wires: Mapping[str, Any] = {}
    on: Mapping[str, str] = {}


def look(server: ServerAddress, key: str) -> ServerLook:
    """Read /health and /config. Raises ReflexError if nothing answers, ConfigError for a server without robot wires."""
    health = server.read("/health")
    if "feeds" in health and "coordinators" in health:
        raise ConfigError(f"{server.url}: runs feeds; {server.url}/feeds shows them, {server.url}/docs has all paths")
    if health.get("error") == "not_found" and "/policies/" in server.url:
        raise ConfigError(f"{server.url}: {health.get('message')}")
    if not isinstance(health.get("state"), str):
        return ServerLook()
    if other := [kind for key, kind in (("model", "a language model"), ("functions", "functions")) if key in health]:
        raise ConfigError(f"{server.url}: serves {other[0]}; {server.url}/docs has a command that calls it")
    config = server.read("/config", key)
    policy, on = config.get("policy") or {}, config.get("server") or {}
    model = f"{policy.get('model_id', '')}@{policy.get('model_hash', '')}".strip("@")
    on = {name: str(on[name]) for name in ("gr00t", "oip_grpc", "lerobot") if on.get(name)}
    return ServerLook(health["state"], str(config.get("reflex_version", "")), model, config.get("wires") or {}, on)


def example(spec: Any) -> dict[str, Any] | None:
    """Grey pictures, small numbers and an empty text, as the server describes them; None if it does not."""
    import numpy as np

    try:
        found: dict[str, Any] = {n: np.full((int(h), int(w), 3), 127, np.uint8) for n, (h, w) in spec["images"].items()}
        if "state" in spec:
            first, *others = spec["state"]["names"]
            sizes = {first: int(spec["state"]["dim"]) - len(others), **dict.fromkeys(others, 1)}
            sizes |= dict(zip(sizes, spec["state"].get("sizes", ()), strict=False))
            found |= {name: np.full(size, 0.1, np.float32) for name, size in sizes.items()}
        return found | ({str(spec["prompt"]): ""} if spec.get("prompt") else {})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None


def read_observation(path: str) -> dict[str, Any]:
    """The user's observation, with the names of the wire. Raises ConfigError if it cannot be read."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        why = getattr(error, "strerror", None) or "numpy.savez(FILE, **observation) writes one"
        raise ConfigError(f"--observation={path}: cannot be read as .npz: {why}") from None
    return {name: value.item() if value.dtype.kind in "US" else value for name, value in found.items()}


def probe(
    server: ServerAddress, key: str, timeout: float, name: str, seen: ServerLook, own: Mapping[str, Any] | None = None
) -> WireProbe:
    """Send one request on one wire. own: the observation; None: as /config or the wire itself describes it."""
    wire, found = WIRES[name], WireProbe(name)
    pick = Pick(found, seen.wires.get(wire.config), own)
    try:
        if wire.ask is None:  # a wire on the port of /act
            pick()
            found.works = seen.state == "ready" and wire.config in seen.wires
            return found
        found.actions = wire.ask(listener(server, wire.setting, seen), key, timeout, pick)
        spent, found.works = time.perf_counter() - pick.began, True
        found.answer_ms = None if found.actions is None else 1e3 * spent
    except ClientError as error:
        found.error, found.message, found.advice = error.code, " ".join(error.message.split()), advice(error)
        if "<html" in found.message.lower():
            found.message = "the answer is a page of HTML"
        if error.body.get("field") == "policy":
            found.advice = f"probe one policy: reflex probe {server.url}/policies/NAME"
    return found


class Pick:
    """Chooses the observation for one wire. said: the wire's part of /config. began: when the answer's time begins."""

    def __init__(self, found: WireProbe, said: Any, own: Mapping[str, Any] | None) -> None:
        self.said: Mapping[str, Any] = said if isinstance(said, dict) else {}
        self.began, self._found, self._own = time.perf_counter(), found, own

    def __call__(self, announced: Mapping[str, Any] = {}, said: Any = None) -> Mapping[str, Any]:
        """The observation to send. announced: by the server on the wire itself. said: its part about observations."""
        found = self._found
        sources = {"--observation": self._own, "/config": example(self.said), "metadata": example(said)}
        found.known, sent = next(((k, v) for k, v in sources.items() if v is not None), ("", {}))
        optional = self.said.get("optional_images") if found.known == "/config" else None
        if optional and isinstance(optional, list):
            found.known += f"; may be left out: {', '.join(map(one_line, optional))}"
        found.announced, found.sent = announced, {key: _shown(value) for key, value in sent.items()}
        self.began = time.perf_counter()
        return sent


def listener(server: ServerAddress, setting: str, seen: ServerLook) -> ServerAddress:
    """The address of a wire: the URL, or the wire's own listener in /config, with the URL's host for a wildcard."""
    if not setting or server.scheme not in ("http", "https"):
        return server
    if setting not in seen.on:
        option = f"--{setting.replace('_', '-')}"
        raise ConfigError(f"/config has no {option}: start the server with it, or give the listener's own URL")
    found = ServerAddress.of(seen.on[setting], SCHEMES)
    if server.secure and found.scheme == SCHEMES[0]:  # HOST:PORT of gRPC, which has the certificate of HTTP
        found = replace(found, scheme="grpcs")
    return replace(found, host=server.host) if found.host in ("*", "0.0.0.0", "::") else found


def advice(error: ClientError) -> str:
    """What to do about an error. Codes http_… stand for errors without a code, as other servers send them."""
    code = "bad_answer" if error.code.startswith("http_") else error.code
    return {
        "unauthorized": "give the server's key: --api-key KEY, or REFLEX_API_KEY in the environment",
        "not_ready": "wait until the state in /health is ready; if it never is, look into the server's log",
        "bad_answer": "no server of this protocol listens there; check the port",
        "invalid_request": "send an observation of your own: --wire NAME --observation FILE.npz",
    }.get(code, "docs/errors.md has what to do")


def _shown(value: Any) -> str:
    """A type and shape, or `text`."""
    return "text" if isinstance(value, str) else f"{value.dtype} {list(value.shape)}"


def show(url: str, seen: ServerLook, found: list[WireProbe]) -> None:
    """Print the server, a table of its wires, and each error with its wires and what to do."""
    from rich.table import Table
    from rich.text import Text

    shown = console(WIDE)
    name = " ".join(part for part in ("reflex", seen.version, seen.model) if part)
    other = "one listener" if url.startswith(("tcp:", "grpc")) else "not a Reflex server"  # a listener has no /health
    shown.print(Text(f"{url}: {f'{name}: {seen.state}' if seen.state else other}"))
    table = Table(box=None, pad_edge=False)
    for title in ("wire", "answer", "actions", "expects", "known from"):
        table.add_column(title, justify="right" if title == "answer" else "left", overflow="fold")
    failed: dict[tuple[str, str], list[str]] = {}
    for wire in found:
        if wire.error:
            failed.setdefault((f"{wire.error}: {wire.message}", wire.advice), []).append(wire.wire)
        actions = wire.error or ("yes" if wire.works else "no") if wire.actions is None else str([*wire.actions])
        took = "" if wire.answer_ms is None else f"{wire.answer_ms:.1f} ms"
        sent = Text("\n".join(f"{key}: {value}" for key, value in wire.sent.items()))
        table.add_row(Text(wire.wire, "green" if wire.works else "red"), took, actions, sent, wire.known)
    shown.print(table)
    for (error, what), names in failed.items():
        shown.print(Text(f"{', '.join(names)}: {error}", "red"))
        shown.print(Text(f"  {what}"))
