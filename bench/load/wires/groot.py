"""GR00T's REQ socket, as its clients of N1.6 speak it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from bench.load.wires.expected import Expected, Observed
from bench.load.wires.target import Target
from reflex_runtime.client.errors import BadAnswer, ServerError, TimedOut
from reflex_runtime.client.exchange import Reply, refused
from reflex_runtime.robots.wires.common import unpack
from reflex_runtime.robots.wires.groot import encode
from reflex_runtime.web.errors import ClientError
from reflex_runtime.web.fields import encode as encode_json

_LANGUAGE = "annotation.human.task_description"


class GrootCaller:
    """One REQ socket. After a time-out the next `ask` opens another, as clients of N1.7 do."""

    schemes: ClassVar[tuple[str, ...]] = ("http", "https", "tcp")
    config: ClassVar[str] = "gr00t"
    setting: ClassVar[str] = "gr00t"

    def __init__(self, target: Target) -> None:
        self.announced: Mapping[str, Any] = {}
        self._target = target
        self._socket: Any = None
        self._expected: Expected | None = None

    async def connect(self) -> None:
        """Ask for the modalities, and for their sizes, which our servers put into the answer to ping."""
        announced = await self._exchange(encode(self._message("get_modality_config")))
        if not isinstance(announced, dict):
            raise BadAnswer(f"no modalities, but {str(announced)[:200]}")
        self.announced = announced
        with suppress(ServerError):  # a server without ping
            pong = await self._exchange(encode(self._message("ping")))
            self._expected = Expected.of("ping", pong.get("reflex") if isinstance(pong, dict) else None)

    def expected(self) -> Expected | None:
        """From ping; otherwise from the modalities, with 224 × 224 pictures and one number for each state group."""
        if self._expected is not None:
            return self._expected
        told = {name: _keys(config) for name, config in self.announced.items()}
        images = {f"video.{name}": (224, 224) for name in told.get("video", ())}
        state = {f"state.{name}": 1 for name in told.get("state", ())}
        return Expected("the modalities", images, state, next(iter(told.get("language", ())), ""))

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """A request with one row of one step."""
        sent: dict[str, dict[str, Any]] = {"video": {}, "state": {}, "language": {}}
        for name, value in observed.items():
            if isinstance(value, str):
                sent["language"][_LANGUAGE if name == "prompt" else name] = [[value]]
            else:
                kind = "video" if value.ndim == 3 else "state"
                sent[kind][name.removeprefix(f"{kind}.")] = np.ascontiguousarray(value)[None, None]
        options = {"deadline_ms": deadline_ms} if deadline_ms else None
        return encode(self._message("get_action") | {"data": {"observation": sent, "options": options}})

    async def ask(self, frame: bytes) -> int:
        """Send it."""
        answer = await self._exchange(frame)
        try:
            groups, *info = answer if isinstance(answer, list) else [answer]
            batch = info[0].get("reflex", [{}])[0].get("batch", {}) if info else {}
            return int(batch.get("size", 0)) if next(iter(groups.values())).size else 0
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, StopIteration) as error:
            raise BadAnswer(f"no groups of actions in the answer: {error!r}") from None

    async def close(self) -> None:
        """Close without waiting for messages in flight."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close(linger=0)

    def _message(self, endpoint: str) -> dict[str, Any]:
        return {"endpoint": endpoint} | ({"api_token": self._target.key} if self._target.key else {})

    async def _exchange(self, message: bytes) -> Any:
        if self._socket is None:
            self._socket = _opened(self._target)
        whole = False
        try:
            async with asyncio.timeout(self._target.timeout):
                await self._socket.send(message)
                came = await self._socket.recv()
            whole = True
        except TimeoutError:
            where = self._target.address.netloc
            raise TimedOut(f"no answer from tcp://{where} within {self._target.timeout:g} s") from None
        finally:
            if not whole:
                await self.close()
        try:
            answer = unpack(came)
        except ClientError as error:
            raise BadAnswer(f"no message of GR00T: {error.message}") from None
        if isinstance(answer, dict) and "error" in answer:
            if "code" not in answer:
                raise ServerError(str(answer["error"])[:300])
            body = answer | {"error": answer["code"], "message": answer["error"]}
            raise refused(Reply(0, {}, encode_json(body)))
        return answer


def _opened(target: Target) -> Any:
    try:
        import zmq.asyncio
    except ImportError:
        raise BadAnswer("pyzmq is not installed: in a clone, pip install '.[gr00t]'") from None
    socket = zmq.asyncio.Context.instance().socket(zmq.REQ)
    socket.connect(f"tcp://{target.address.netloc}")
    return socket


def _keys(config: Any) -> list[str]:
    """The names in a ModalityConfig, which is a map or JSON text."""
    told = config.get("as_json") if isinstance(config, dict) else None
    if isinstance(told, str):
        told = json.loads(told)
    keys = told.get("modality_keys") if isinstance(told, dict) else None
    return [str(key).split(".", 1)[-1] if str(key).startswith(("video.", "state.")) else str(key) for key in keys or ()]
