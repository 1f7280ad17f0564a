"""The wires on POST /act: JSON, msgpack, and json-numpy."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

import msgspec
import numpy as np

from reflex_runtime.bench.caller import WireAnswer
from reflex_runtime.bench.expected import Expected, Observed
from reflex_runtime.bench.streams import Streams
from reflex_runtime.bench.target import HTTP, Target
from reflex_runtime.client.answers import chunk, refused
from reflex_runtime.client.errors import BadAnswer
from reflex_runtime.client.exchange import Reply
from reflex_runtime.client.requests import Wire, encoded, observation


class _HttpCaller:
    """A kept-alive connection to POST /act."""

    schemes: ClassVar[tuple[str, ...]] = HTTP
    setting: ClassVar[str] = ""
    kind: ClassVar[str] = "application/json"

    def __init__(self, target: Target) -> None:
        self.announced: Mapping[str, Any] = {}
        self._target, self._streams = target, Streams(target.address)

    async def connect(self) -> None:
        """Nothing: the first request opens the connection."""

    def expected(self) -> Expected | None:
        """None: HTTP announces nothing."""
        return None

    async def close(self) -> None:
        await self._streams.close()

    async def _post(self, body: bytes) -> Reply:
        """POST it; raises the error of a status that is not 2xx."""
        reply = await self._streams.exchange(self._target.send("POST", "/act", self.kind, body))
        if not 200 <= reply.status < 300:
            raise refused(reply)
        return reply


class ActCaller(_HttpCaller):
    """POST /act as JSON, pictures as PNG."""

    config: ClassVar[str] = "act"
    wire: ClassVar[Wire] = "json"

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """A body of /act: the cameras under `images`, `state`, `instruction`."""
        fields: dict[str, Any] = {}
        for name, value in observed.items():
            if isinstance(value, str):
                fields["instruction"] = value
            elif value.ndim == 3:
                fields.setdefault("images", {})[name] = value
            else:
                fields[name] = value
        if deadline_ms:
            fields["deadline_ms"] = deadline_ms
        sent = observation(fields, self.wire, "raw")
        del sent["request_id"]  # otherwise all requests would have the same id
        return encoded(sent, self.wire)

    async def ask(self, frame: bytes) -> WireAnswer:
        """POST it and read the shape of the actions."""
        came = chunk(await self._post(frame), "", 1)
        return WireAnswer(came.actions.shape, int(came.batch.get("size", 0)))


class ActMsgpackCaller(ActCaller):
    """POST /act as msgpack, pictures as raw bytes."""

    kind: ClassVar[str] = "application/msgpack"
    wire: ClassVar[Wire] = "msgpack"


class JsonNumpyCaller(_HttpCaller):
    """POST /act as json-numpy, as clients of OpenVLA do."""

    config: ClassVar[str] = "json-numpy"

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """JSON with arrays as maps."""
        fields = {
            name: _numpy_map(value) if isinstance(value, np.ndarray) else value for name, value in observed.items()
        }
        return json.dumps(fields | ({"deadline_ms": deadline_ms} if deadline_ms else {})).encode()

    async def ask(self, frame: bytes) -> WireAnswer:
        """POST it. The answer is an array, a list of arrays, or a text with the JSON of an array."""
        reply = await self._post(frame)
        with suppress(msgspec.DecodeError, KeyError, TypeError, ValueError):
            found = msgspec.json.decode(reply.body)
            if isinstance(found, str):
                found = msgspec.json.decode(found)
            if isinstance(found, list):
                return WireAnswer((len(found), *_numpy_shape(found[0])))
            return WireAnswer(_numpy_shape(found))
        raise BadAnswer(f"no array of json-numpy: {reply.body[:100].decode(errors='replace')!r}", status=reply.status)


def _numpy_map(value: Any) -> dict[str, Any]:
    data = np.ascontiguousarray(value)
    return {"__numpy__": base64.b64encode(data.tobytes()).decode(), "dtype": data.dtype.str, "shape": list(data.shape)}


def _numpy_shape(found: Mapping[str, Any]) -> tuple[int, ...]:
    np.frombuffer(base64.b64decode(found["__numpy__"]), found["dtype"]).reshape(found["shape"])
    return tuple(found["shape"])
