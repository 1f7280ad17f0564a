"""openpi's websocket, as its stock client speaks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as open_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus

from reflex_runtime.bench.caller import WireAnswer
from reflex_runtime.bench.expected import Observed
from reflex_runtime.bench.target import HTTP, WEBSOCKET, Target
from reflex_runtime.client.answers import refused
from reflex_runtime.client.errors import BadAnswer, ServerError, TimedOut, Unreachable
from reflex_runtime.client.exchange import Reply, broken, not_connected
from reflex_runtime.policies.wires.openpi_codec import decode, encode
from reflex_runtime.web.errors import ClientError


class OpenpiCaller:
    """One websocket: the metadata comes first, then an answer to each observation."""

    schemes: ClassVar[tuple[str, ...]] = (*HTTP, *WEBSOCKET)
    config: ClassVar[str] = "openpi"

    def __init__(self, target: Target) -> None:
        self.announced: Mapping[str, Any] = {}
        self._target = target
        self._socket: ClientConnection | None = None

    async def connect(self) -> None:
        """Open the websocket and wait for the metadata."""
        async with self._within("the websocket was opened, and no metadata came: the policy may still be loading"):
            socket = await self._opened()
            frame = await socket.recv()
            if isinstance(frame, str):
                raise BadAnswer(f"metadata expected, a text frame came: {frame[:200]!r}")
            try:
                self.announced = decode(frame)
            except ClientError as error:
                raise BadAnswer(f"the metadata cannot be read: {error.message}") from None

    def frame(self, observed: Observed, deadline_ms: float) -> bytes:
        """Names with `images/` in front go out as the map `images`, as clients of ALOHA send them."""
        nested = {name.removeprefix("images/"): v for name, v in observed.items() if name.startswith("images/")}
        fields = {name: value for name, value in observed.items() if not name.startswith("images/")}
        if nested:
            fields["images"] = nested
        if deadline_ms and "reflex" in self.announced:
            fields["reflex/deadline_ms"] = deadline_ms
        return encode(fields)

    async def ask(self, frame: bytes) -> WireAnswer:
        """One observation."""
        if self._socket is None:
            await self.connect()
        assert self._socket is not None, "connected"
        async with self._within("no answer came"):
            await self._socket.send(frame)
            came = await self._socket.recv()
        if isinstance(came, str):
            if "reflex" not in self.announced:  # other servers close the websocket after an error
                await self.close()
            raise _refusal(came)
        try:
            answer = decode(came)
            batch = answer.get("batch")
            size = batch.get("size", 0) if isinstance(batch, dict) else 0
            return WireAnswer(tuple(answer["actions"].shape), int(size))
        except (ClientError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise BadAnswer(f"no array `actions` in the answer: {error!r}") from None

    async def close(self) -> None:
        """Leave without a word, as stock clients do at their end."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.transport.abort()
            await socket.wait_closed()

    async def _opened(self) -> ClientConnection:
        target = self._target
        headers = {"Authorization": f"Api-Key {target.key}"} if target.key else {}
        try:
            self._socket = await open_websocket(
                target.websocket, compression=None, max_size=None, open_timeout=None, additional_headers=headers
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
        """A time limit. After what leaves a message on its way, the next `ask` opens another websocket."""
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


def _refusal(text: str) -> ServerError:
    """A text frame as an error: our JSON, or what another server says, mostly a traceback."""
    with suppress(ValueError):
        body = json.loads(text)
        if isinstance(body, dict) and "error" in body:
            return refused(Reply(int(body.get("status", 0)), {"content-type": "application/json"}, text.encode()))
    lines = text.strip().splitlines() or ["an empty text frame"]
    return ServerError(lines[-1][:300], code="server_error")
