"""The Open Inference Protocol over HTTP with its binary extension, as Triton's client speaks it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from reflex_runtime.bench.caller import WireAnswer
from reflex_runtime.bench.expected import Expected, Observed
from reflex_runtime.bench.streams import Streams
from reflex_runtime.bench.target import HTTP, Target
from reflex_runtime.client.answers import decoded, refused
from reflex_runtime.client.errors import BadAnswer, NotFound, ServerError
from reflex_runtime.client.exchange import Reply, Send

_HEAD: Final = "Inference-Header-Content-Length"
_LENGTH: Final = struct.Struct("<I")  # length of the JSON; precedes it in a frame
TYPES: Final = {"float32": "FP32", "float64": "FP64", "int64": "INT64", "uint8": "UINT8"}


class OipCaller:
    """A kept-alive connection. The model is the one that /config names, otherwise the first of the repository."""

    schemes: ClassVar[tuple[str, ...]] = HTTP
    config: ClassVar[str] = "oip"
    setting: ClassVar[str] = ""

    def __init__(self, target: Target) -> None:
        self.announced: Mapping[str, Any] = {}
        self._target, self._streams, self._model = target, Streams(target.address), target.model

    async def connect(self) -> None:
        """Read the inputs of the model."""
        if not self._model:
            listed = await self._sent("POST", "/v2/repository/index", b"{}")
            names = json.loads(listed.body or b"[]")
            if not names:
                raise NotFound("the server lists no model", code="not_found")
            self._model = str(names[0]["name"])
        self.announced = decoded(await self._sent("GET", f"/v2/models/{self._model}", None))

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
        """A request with one row. The length of its JSON comes first; `ask` sends it as a header."""
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
        return b"".join((_LENGTH.pack(len(head)), head, *parts))

    async def ask(self, frame: bytes) -> WireAnswer:
        """POST it and read the shape of the actions."""
        if not self._model:
            await self.connect()
        (length,) = _LENGTH.unpack_from(frame)
        reply = await self._sent("POST", f"/v2/models/{self._model}/infer", frame[_LENGTH.size :], {_HEAD: str(length)})
        try:
            head = json.loads(reply.body[: int(reply.headers.get(_HEAD.lower(), len(reply.body)))])
            shape = next(output["shape"] for output in head["outputs"])
            told = json.loads(head.get("parameters", {}).get("reflex", "[{}]"))[0]
            return WireAnswer(tuple(shape), int(told.get("batch", {}).get("size", 0)))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, StopIteration) as error:
            raise BadAnswer(f"no outputs in the answer: {error!r}", status=reply.status) from None

    async def close(self) -> None:
        await self._streams.close()

    async def _sent(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        sent = self._target.send(method, path, "application/json", body)
        told = {name: value for name, value in sent.headers.items() if name != "Accept"} | dict(headers or {})
        reply = await self._streams.exchange(Send(method, path, told, body, sent.limit))
        if 200 <= reply.status < 300:
            return reply
        raise _refused(reply)


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
