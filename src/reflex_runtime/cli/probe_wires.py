"""How `reflex probe` asks. /act and openpi get one observation, which `pick` chooses by what the server announces, and
answer with actions. A listener of its own is greeted as its protocol does. Errors are those of `reflex_runtime.client`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from reflex_runtime.cli.server_address import ServerAddress
from reflex_runtime.client import Client
from reflex_runtime.client.answers import refused
from reflex_runtime.client.errors import BadAnswer, NotFound, ServerError, TimedOut, Unreachable
from reflex_runtime.client.exchange import Reply
from reflex_runtime.robots.wires import groot, openpi

HTTP: Final = ("http", "https")
Pick: TypeAlias = Callable[..., Mapping[str, Any]]  # (announced, its part on observations) → arrays, and a text
Shape: TypeAlias = tuple[int, ...]
Ask: TypeAlias = Callable[[ServerAddress, str, float, Pick], Shape | None]  # key: "" for none; seconds of a step


def ask_act(server: ServerAddress, key: str, timeout: float, pick: Pick) -> Shape:
    fields: dict[str, Any] = {}
    for name, value in pick().items():
        if isinstance(value, str):
            fields["instruction"] = value
        elif value.ndim == 3:
            fields.setdefault("images", {})[name] = value
        else:
            fields[name] = value
    url = f"{server.scheme}://{server.netloc}{server.path}"
    with Client(url, key or None, timeout=timeout, retries=0) as client:
        return client.act(**fields).actions.shape


def ask_openpi(server: ServerAddress, key: str, timeout: float, pick: Pick) -> Shape:
    """A text frame is an error: our JSON, or another server's traceback."""
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
        with connect(url, additional_headers=headers, **more) as socket:
            announced = receive(socket)
            socket.send(openpi.encode(dict(pick(announced, announced.get("reflex")))))
            return tuple(receive(socket)["actions"].shape)
    except InvalidStatus as error:
        told = {name.lower(): value for name, value in error.response.headers.raw_items()}
        raise refused(Reply(error.response.status_code, told, bytes(error.response.body or b""))) from None
    except (InvalidHandshake, InvalidMessage, EOFError, KeyError, AttributeError) as error:
        raise BadAnswer(f"no websocket of openpi: {error!r}") from None
    except TimeoutError:
        raise TimedOut(f"no answer within {timeout:g} s: the policy may still be loading") from None
    except (ConnectionClosed, OSError) as error:
        raise Unreachable(f"cannot ask {url}: {error}") from None


def greet_groot(server: ServerAddress, key: str, timeout: float, pick: Pick) -> None:
    try:
        import zmq
    except ImportError:
        raise BadAnswer("pyzmq is not installed: in a clone, pip install '.[gr00t]'") from None
    socket: Any = zmq.Context.instance().socket(zmq.REQ)
    with closing(socket):
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://{server.netloc}")
        socket.send(groot.encode({"endpoint": "get_modality_config"} | ({"api_token": key} if key else {})))
        if not socket.poll(round(1e3 * timeout)):
            raise TimedOut(f"no answer from tcp://{server.netloc} within {timeout:g} s")
        answer = groot.decode(socket.recv())
    if "error" in answer:
        told = {"message": str(answer["error"]), "error": answer.get("code", "server_error")}
        raise refused(Reply(0, {}, json.dumps(told).encode()))
    pick(answer)


def greet_grpc(method: str, server: ServerAddress, key: str, timeout: float, pick: Pick) -> None:
    try:
        import grpc
    except ImportError:
        raise BadAnswer("grpcio is not installed: in a clone, pip install '.[grpc]'") from None
    try:
        with grpc.insecure_channel(server.netloc) as channel:
            secret = (("authorization", f"Bearer {key}"),) if key else ()
            channel.unary_unary(method)(b"", metadata=secret, timeout=timeout)
    except grpc.RpcError as error:
        told = dict(error.trailing_metadata() or ()).get("reflex-error")
        if told is not None:
            raise refused(Reply(0, {}, told if isinstance(told, bytes) else told.encode())) from None
        kinds = {"DEADLINE_EXCEEDED": TimedOut, "UNAVAILABLE": Unreachable, "UNIMPLEMENTED": NotFound}
        name = error.code().name
        raise kinds.get(name, ServerError)(f"grpc://{server.netloc}: {name}: {error.details()}"[:300]) from None
    pick()


class ProbeWire(NamedTuple):
    """config: its name in /config. ask: None where reading /config is all. setting: option of its own listener."""

    config: str
    ask: Ask | None = None
    schemes: tuple[str, ...] = HTTP
    setting: str = ""


_OIP, _LEROBOT = "/inference.GRPCInferenceService/ServerReady", "/transport.AsyncInference/Ready"
WIRES: Final[dict[str, ProbeWire]] = {
    "act": ProbeWire("act", ask_act),
    "openpi": ProbeWire("openpi", ask_openpi, (*HTTP, "ws", "wss")),
    "json-numpy": ProbeWire("json-numpy"),
    "oip": ProbeWire("oip"),
    "vla-eval": ProbeWire("vla-eval"),
    "gr00t": ProbeWire("gr00t", greet_groot, (*HTTP, "tcp"), "gr00t"),
    "oip-grpc": ProbeWire("oip", partial(greet_grpc, _OIP), (*HTTP, "grpc"), "oip_grpc"),
    "lerobot": ProbeWire("lerobot", partial(greet_grpc, _LEROBOT), (*HTTP, "grpc"), "lerobot"),
}
