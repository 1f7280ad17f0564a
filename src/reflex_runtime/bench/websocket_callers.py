"""The wires on websockets, as their stock clients speak them: openpi, vla-eval and XPolicyLab."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, Final

import numpy as np
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus

from reflex_runtime.bench.caller import WireAnswer
from reflex_runtime.bench.expected import Expected, Observed
from reflex_runtime.bench.streams import broken, not_connected
from reflex_runtime.bench.target import HTTP, WEBSOCKET, Target
from reflex_runtime.client.answers import refused
from reflex_runtime.client.errors import BadAnswer, ServerError, TimedOut, Unreachable
from reflex_runtime.client.exchange import Reply
from reflex_runtime.policies.wires import openpi, vla_eval, xpolicylab_codec
from reflex_runtime.policies.wires.vla_eval import EvalMessage
from reflex_runtime.policies.wires.xpolicylab_codec import LabFrame
from reflex_runtime.web.errors import ClientError


class _WebsocketCaller:
    """One websocket, opened by `connect`. After an error that makes it unusable, the next `ask` opens a new one."""

    schemes: ClassVar[tuple[str, ...]] = (*HTTP, *WEBSOCKET)
    setting: ClassVar[str] = ""
    path: ClassVar[str] = "/"
    first: ClassVar[str]  # message of the error if the server's first frame does not arrive

    def __init__(self, target: Target) -> None:
        self.announced: Mapping[str, Any] = {}
        self._target = target
        self._socket: ClientConnection | None = None

    async def connect(self) -> None:
        """Open the websocket and wait for the server's first frame."""
        async with self._within(self.first):
            await self._greet(await self._opened())

    async def close(self) -> None:
        """Abort the connection without a close frame, as stock clients do when they exit."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.transport.abort()
            await socket.wait_closed()

    async def _greet(self, socket: ClientConnection) -> None:
        """Exchange the first frames and set `announced`."""
        raise NotImplementedError

    async def _exchange(self, frame: bytes) -> str | bytes:
        """Send a frame and wait for the next one."""
        if self._socket is None:
            await self.connect()
        assert self._socket is not None, "connected"
        async with self._within("no answer came"):
            await self._socket.send(frame)
            return await self._socket.recv()
        raise AssertionError("unreachable")

    async def _opened(self) -> ClientConnection:
        target = self._target
        headers = {"Authorization": f"Api-Key {target.key}"} if target.key else {}
        try:
            self._socket = await open_websocket(
                target.websocket(self.path),
                compression=None,
                max_size=None,
                open_timeout=None,
                additional_headers=headers,
            )
        except InvalidStatus as error:
            answered = error.response
            told = {name.lower(): value for name, value in answered.headers.raw_items()}
            raise refused(Reply(answered.status_code, told, bytes(answered.body or b""))) from None
        except (InvalidHandshake, InvalidMessage, EOFError) as error:
            raise BadAnswer(f"no websocket: {error}") from None
        except OSError as error:
            raise not_connected(error, target.address) from None
        return self._socket

    @asynccontextmanager
    async def _within(self, late: str) -> AsyncIterator[None]:
        """A time limit. On any error the websocket is closed, because an answer may still be on its way."""
        whole = False
        try:
            async with asyncio.timeout(self._target.timeout):
                yield
            whole = True
        except TimeoutError:
            raise TimedOut(f"{late} within {self._target.timeout:g} s") from None
        except ConnectionClosed as error:
            code, reason = (error.rcvd.code, error.rcvd.reason) if error.rcvd else (1006, "")
            raise Unreachable(f"{self._target.url} closed the websocket: {code} {reason}".rstrip()) from None
        except OSError as error:
            raise broken(error, self._target.address) from None
        finally:
            if not whole:
                await self.close()


class OpenpiCaller(_WebsocketCaller):
    """openpi: the metadata comes first, then an answer to each observation."""

    config: ClassVar[str] = "openpi"
    first: ClassVar[str] = "the websocket was opened, and no metadata came: the policy may still be loading"

    def expected(self) -> Expected | None:
        """From the metadata of our own servers."""
        return Expected.of("metadata", self.announced.get("reflex"))

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """A frame with one observation."""
        fields = _nested(observed)
        if deadline_ms and "reflex" in self.announced:
            fields["reflex/deadline_ms"] = deadline_ms
        return openpi.encode(fields)

    async def ask(self, frame: bytes) -> WireAnswer:
        """Send it. Answers are binary frames, errors are text frames."""
        came = await self._exchange(frame)
        if isinstance(came, str):
            if "reflex" not in self.announced:  # other servers close the websocket after an error
                await self.close()
            raise _refusal(came)
        try:
            answer = openpi.decode(came)
            batch = answer.get("batch")
            size = batch.get("size", 0) if isinstance(batch, dict) else 0
            return WireAnswer(tuple(answer["actions"].shape), int(size))
        except (ClientError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise BadAnswer(f"no array `actions` in the answer: {error!r}") from None

    async def _greet(self, socket: ClientConnection) -> None:
        frame = await socket.recv()
        if isinstance(frame, str):
            raise BadAnswer(f"metadata expected, a text frame came: {frame[:200]!r}")
        try:
            self.announced = openpi.decode(frame)
        except ClientError as error:
            raise BadAnswer(f"the metadata cannot be read: {error.message}") from None


class VlaEvalCaller(_WebsocketCaller):
    """vla-eval: a hello in each direction, an episode, and one action for each observation."""

    config: ClassVar[str] = "vla-eval"
    path: ClassVar[str] = "/vla-eval"
    first: ClassVar[str] = "no hello came: the policy may still be loading"

    def expected(self) -> Expected | None:
        """None: the hello of vla-eval does not name pictures."""
        return None

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """An observation with raw pictures. The protocol has no field for a deadline."""
        payload = _nested(observed)
        for pictures in (payload, payload.get("images", {})):
            pictures |= {name: _raw(value) for name, value in pictures.items() if _is_picture(value)}
        return vla_eval.encode(EvalMessage("observation", payload, 2))

    async def ask(self, frame: bytes) -> WireAnswer:
        """Send it. The answer is one action, usually from the chunk that the server buffers."""
        answer = self._message(await self._exchange(frame))
        if answer.type == "error":
            error = answer.payload.get("error")
            raise _refused(answer.payload) if "message" in answer.payload else ServerError(str(error)[:300])
        actions = answer.payload.get("actions")
        if answer.type != "action" or not isinstance(actions, np.ndarray):
            raise BadAnswer(f"no action, but {answer.type}: {str(answer.payload)[:200]}")
        return WireAnswer(actions.shape)

    async def _greet(self, socket: ClientConnection) -> None:
        await socket.send(
            vla_eval.encode(EvalMessage("hello", {"harness_version": "", "protocol_version": 1}, 0))
        )
        answer = self._message(await socket.recv())
        if answer.type != "hello":
            raise BadAnswer(f"hello expected, {answer.type} came")
        self.announced = answer.payload
        await socket.send(vla_eval.encode(EvalMessage("episode_start", {}, 1)))

    def _message(self, frame: str | bytes) -> EvalMessage:
        try:
            if isinstance(frame, bytes):
                return vla_eval.decode(frame)
        except ClientError as error:
            raise BadAnswer(f"no message of vla-eval: {error.message}") from None
        raise BadAnswer(f"no message of vla-eval, but text: {frame[:200]!r}")


_TRIAL: Final = f"reflex-{'0' * 32}"  # placeholder in frames; `ask` puts the caller's own evaluation in its place


class XPolicyLabCaller(_WebsocketCaller):
    """XPolicyLab: a hello, the reset of a trial, and a chunk of actions for each observation. Each caller is a separate
    evaluation, because the server names episodes after it."""

    config: ClassVar[str] = "xpolicylab"
    path: ClassVar[str] = "/xpolicylab"
    first: ClassVar[str] = "no hello_ack came: the policy may still be loading"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._trial = f"reflex-{uuid.uuid4().hex}"

    def expected(self) -> Expected | None:
        """From the hello_ack of our own servers."""
        return Expected.of("hello_ack", self.announced.get("reflex"))

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """A frame with pictures by slot and the state by group."""
        sent: dict[str, Any] = {"vision": {}, "state": {}}
        for name, value in observed.items():
            if isinstance(value, str):
                sent["instruction"] = value
            elif value.ndim == 3:
                sent["vision"][name.removeprefix("vision/")] = {"color": value}
            else:
                group = "arm_joint_state" if name == "state" else name.removeprefix("state/")
                sent["state"][group] = value
        if deadline_ms and "reflex" in self.announced:
            sent["reflex/deadline_ms"] = deadline_ms
        return _lab_frame("infer", _TRIAL, {"observation": sent})

    async def ask(self, frame: bytes) -> WireAnswer:
        """Send it. The shape is that of all groups joined."""
        answer = self._message(await self._exchange(frame.replace(_TRIAL.encode(), self._trial.encode(), 1)))
        if answer.type != "infer_result":
            raise BadAnswer(f"no actions, but {answer.type}: {str(answer.payload)[:200]}")
        try:
            steps = answer.payload["actions"]
            batch = (answer.payload.get("reflex") or {}).get("batch") or {}
            width = sum(np.size(group) for group in steps[0].values())
            return WireAnswer((len(steps), width), int(batch.get("size", 0)))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise BadAnswer(f"no groups of actions in the answer: {error!r}") from None

    async def _greet(self, socket: ClientConnection) -> None:
        await socket.send(_lab_frame("hello", self._trial, {}))
        self.announced = self._awaited("hello_ack", await socket.recv())
        await socket.send(_lab_frame("reset", self._trial, {}))
        self._awaited("reset_result", await socket.recv())

    def _awaited(self, kind: str, frame: str | bytes) -> Mapping[str, Any]:
        answer = self._message(frame)
        if answer.type != kind:
            raise BadAnswer(f"{kind} expected, {answer.type} came")
        return answer.payload

    def _message(self, frame: str | bytes) -> LabFrame:
        try:
            if not isinstance(frame, bytes):
                raise BadAnswer(f"no message of XPolicyLab, but text: {frame[:200]!r}")
            answer = xpolicylab_codec.decode(frame)
        except ClientError as error:
            raise BadAnswer(f"no message of XPolicyLab: {error.message}") from None
        if answer.type == "error":
            details = answer.payload.get("details")
            if isinstance(details, dict) and "message" in details:
                raise _refused(details)
            raise ServerError(str(answer.payload.get("message"))[:300])
        return answer


def _lab_frame(kind: str, trial: str, payload: dict[str, Any]) -> bytes:
    envelope = {"message_id": kind, "evaluation_id": trial, "trial_id": "0", "step": 0}
    return xpolicylab_codec.encode(LabFrame(kind, envelope, payload))


def _nested(observed: Observed) -> dict[str, Any]:
    """Move names with the prefix `images/` into a map `images`."""
    fields = {name: value for name, value in observed.items() if not name.startswith("images/")}
    nested = {name.removeprefix("images/"): v for name, v in observed.items() if name.startswith("images/")}
    return fields | ({"images": nested} if nested else {})


def _is_picture(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 3


def _raw(picture: Any) -> dict[str, Any]:
    data = {"data": picture.tobytes(), "dtype": picture.dtype.str, "shape": picture.shape}
    return {"__image__": True, "format": "raw"} | data


def _refused(body: Mapping[str, Any]) -> ServerError:
    """The exception for the JSON error of our servers."""
    return refused(Reply(0, {}, json.dumps(body, default=str).encode()))


def _refusal(text: str) -> ServerError:
    """The exception for a text frame: our JSON, or another server's text, usually a traceback."""
    with suppress(ValueError):
        body = json.loads(text)
        if isinstance(body, dict) and "error" in body:
            return _refused(body)
    lines = text.strip().splitlines() or ["an empty text frame"]
    return ServerError(lines[-1][:300], code="server_error")
