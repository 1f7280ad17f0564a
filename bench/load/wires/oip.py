"""The Open Inference Protocol over HTTP with its binary extension, as Triton's client speaks it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from bench.load.wires.connection import Connection, reply_of, request
from bench.load.wires.expected import Expected, Observed
from bench.load.wires.http import OK
from bench.load.wires.target import Target
from reflex_runtime.client.errors import BadAnswer, NotFound, ServerError
from reflex_runtime.client.exchange import Reply, decoded, refused

_HEAD: Final = "Inference-Header-Content-Length"
TYPES: Final = {"float32": "FP32", "float64": "FP64", "int64": "INT64", "uint8": "UINT8"}


class OipCaller:
    """A kept connection. The model is the one that /config names, otherwise the first of the repository."""

    schemes: ClassVar[tuple[str, ...]] = ("http", "https")
    config: ClassVar[str] = "oip"
    setting: ClassVar[str] = ""

    def __init__(self, target: Target) -> None:
        self.announced: Mapping[str, Any] = {}
        self._target, self._connection, self._model = target, Connection(target), target.model

    async def connect(self) -> None:
        """Read the inputs of the model."""
        if not self._model:
            listed = await self._exchange(self._request("POST", "/v2/repository/index", b"{}"))
            names = json.loads(listed.body or b"[]")
            if not names:
                raise NotFound("the server lists no model", code="not_found")
            self._model = str(names[0]["name"])
        self.announced = decoded(await self._exchange(self._request("GET", f"/v2/models/{self._model}")))

    def expected(self) -> Expected | None:
        """From the model's inputs: four dimensions are a picture, BYTES is the instruction, floats are the state."""
        images, state, prompt = {}, {}, ""
        for tensor in self.announced.get("inputs", ()):
            name, shape = tensor["name"], [size if size > 0 else 224 for size in tensor["shape"]]
            if tensor["datatype"] == "BYTES":
                prompt = name
            elif len(shape) == 4:
                images[name] = (shape[1], shape[2])
            elif tensor["datatype"].startswith("FP"):
                state[name] = shape[-1]
        return Expected("the model's metadata", images, state, prompt)

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """A request with one row."""
        inputs, parts = [], []
        for name, value in observed.items():
            if isinstance(value, str):
                text = value.encode()
                data, kind, shape = struct.pack("<I", len(text)) + text, "BYTES", [1, 1]
            else:
                data, kind, shape = value.tobytes(), TYPES[str(value.dtype)], [1, *value.shape]
            inputs.append(
                {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(data)}}
            )
            parts.append(data)
        parameters: dict[str, Any] = {"binary_data_output": True}
        if deadline_ms:
            parameters["timeout"] = round(1e3 * deadline_ms)
        head = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
        return self._request("POST", f"/v2/models/{self._model}/infer", b"".join((head, *parts)), str(len(head)))

    async def ask(self, frame: bytes) -> int:
        """POST it."""
        reply = await self._exchange(frame)
        try:
            head = json.loads(reply.body[: int(reply.headers.get(_HEAD.lower(), len(reply.body)))])
            told = json.loads(head.get("parameters", {}).get("reflex", "[{}]"))[0]
            return int(told.get("batch", {}).get("size", 0)) if head["outputs"] else 0
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise BadAnswer(f"no outputs in the answer: {error!r}", status=reply.status) from None

    async def close(self) -> None:
        self._connection.close()

    def _request(self, method: str, path: str, body: bytes = b"", head: str = "") -> bytes:
        headers = self._target.headers() | ({_HEAD: head} if head else {})
        del headers["Accept"]  # of what comes, a part is binary
        return request(method, f"{self._target.address.path}{path}", headers, body)

    async def _exchange(self, frame: bytes) -> Reply:
        answer = await self._connection.exchange(frame)
        if answer.startswith(OK):
            return reply_of(answer)
        raise _refused(reply_of(answer))


def _refused(reply: Reply) -> ServerError:
    """The error of an answer: on this wire `error` is the message, and our servers add `code`."""
    try:
        body = decoded(reply)
    except BadAnswer:
        return refused(reply)
    if "code" in body:
        body |= {"error": body["code"], "message": body["error"]}
        return refused(Reply(reply.status, {}, json.dumps(body).encode()))
    if isinstance(body.get("error"), str) and "message" not in body:
        return ServerError(body["error"][:300], code=f"http_{reply.status}", status=reply.status)
    return refused(reply)
