"""One websocket to `reflex serve`, in openpi's protocol: msgpack, arrays as bytes, no pickle.

The server sends first: metadata with the fields of an observation and the form of an action. An answer is a binary
frame, an error a text frame, after which the websocket stays open. docs/wires.md of Reflex has every field.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgpack
import numpy as np
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

Observation = Mapping[str, Any]  # arrays and texts by the server's names
Actions = NDArray[np.float32]  # [steps, dim]

_STALE: Final = ("deadline_exceeded", "deadline_unreachable", "superseded")  # a newer observation is needed
_TOO_LARGE: Final = 1009  # close code of websockets
_MOST_ROWS: Final = 256  # in a frame, as the server allows
_MOST_BYTES: Final = 12_000_000  # in a frame of several rows; the server's default is 16 MiB
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between two attempts, doubling


class ReflexError(RuntimeError):
    """The server gave no actions; the message has one line. code: of Reflex's docs/errors.md, or `unreachable`,
    `timed_out`, `bad_answer`. retry_safe: the policy did not run the request."""

    def __init__(self, code: str, message: str, request_id: str = "", retry_safe: bool = False) -> None:
        told = f"{code}: {' '.join(message.split())}"
        super().__init__(told + (f" [request {request_id}]" if request_id else ""))
        self.code, self.request_id, self.retry_safe = code, request_id, retry_safe


class Connection:
    """A websocket that is opened again after a loss. Not for several threads.

    said: fields of the URL for all requests of this robot: robot_id, deadline_ms, priority. metadata: the server's, of
    the last time that the websocket was opened.
    """

    def __init__(
        self, url: str, said: Mapping[str, Any], key: str, timeout: float, connect_timeout: float, retries: int
    ) -> None:
        self.metadata: dict[str, Any] = {}
        self._url, self._key = _websocket_url(url, said), key
        self._timeout, self._connect_timeout, self._retries = timeout, connect_timeout, retries
        self._socket: ClientConnection | None = None
        self._stack = ExitStack()  # closes the websocket

    def open(self) -> None:
        """Connect, and wait until the server's policy is ready. ReflexError if that fails."""
        self.close()
        end = time.monotonic() + self._connect_timeout
        try:
            socket = self._stack.enter_context(self._connected())
            first = socket.recv(max(0.0, end - time.monotonic()))
            self.metadata = _announced(first, self._url)
        except InvalidStatus as error:
            raise _refused(bytes(error.response.body or b"").decode(errors="replace")) from None
        except TimeoutError:
            self.close()
            message = f"{self._url}: the policy was not ready within {self._connect_timeout:g} s"
            raise ReflexError("timed_out", message) from None
        except (OSError, WebSocketException) as error:
            self.close()
            message = f"{self._url}: {error}; is `reflex serve` running there?"
            raise ReflexError("unreachable", message, retry_safe=True) from None
        except ReflexError:
            self.close()
            raise
        self._socket = socket

    def close(self) -> None:
        """Leave the server; the next request connects again."""
        self._socket = None
        with suppress(OSError, WebSocketException):
            self._stack.close()

    def ask(self, observations: Sequence[Observation]) -> list[Actions]:
        """The actions for each observation: a request each, in as few frames as the server allows; raises the error of
        one. A request that was refused without a run is sent again, at most `retries` times."""
        found: dict[int, Actions] = {}
        for attempt in range(self._retries + 1):
            rows = [row for row in range(len(observations)) if row not in found]
            try:
                answers = [
                    answer for part in _frames([observations[row] for row in rows]) for answer in self._exchange(part)
                ]
                errors = [answer for answer in answers if isinstance(answer, ReflexError)]
                found |= {
                    row: answer
                    for row, answer in zip(rows, answers, strict=True)
                    if not isinstance(answer, ReflexError)
                }
                if not errors:
                    break
                raise next((error for error in errors if not _again(error)), errors[0])
            except ReflexError as error:
                if attempt == self._retries or not _again(error):
                    raise
                time.sleep(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE))
        return [found[row] for row in range(len(observations))]

    def _exchange(self, observations: Sequence[Observation]) -> list[Actions | ReflexError]:
        batched = len(observations) > 1
        answer = self._answer(_encoded({"batch": observations} if batched else observations[0]))
        if isinstance(answer, str):
            return [_refused(answer)] * len(observations)
        rows = answer.get("batch") if batched and isinstance(answer, dict) else [answer]
        if not isinstance(rows, list) or len(rows) != len(observations):
            raise ReflexError("bad_answer", f"{len(observations)} answers expected, came {str(answer)[:200]}")
        return [_actions(row) for row in rows]

    def _connected(self) -> ClientConnection:
        return connect(
            self._url,
            compression=None,
            max_size=None,
            open_timeout=self._connect_timeout,
            additional_headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
        )

    def _answer(self, frame: bytes) -> Any:
        """Send a frame and wait for the answer. A websocket that was lost since the last frame is opened again."""
        lost = self._socket is not None
        if self._socket is None:
            self.open()
        while True:
            assert self._socket is not None
            try:
                self._socket.send(frame)
                came = self._socket.recv(self._timeout)
                return came if isinstance(came, str) else _decoded(came)
            except TimeoutError:
                self.close()  # else the late answer would count as the next one
                raise ReflexError("timed_out", f"{self._url}: no answer within {self._timeout:g} s") from None
            except (ConnectionClosed, OSError) as error:
                code = error.rcvd.code if isinstance(error, ConnectionClosed) and error.rcvd else None
                self.close()
                if code == _TOO_LARGE:
                    message = f"{len(frame)} bytes: send less, or start the server with a larger --max-body-bytes"
                    raise ReflexError("too_large", message) from None
                if not lost or code not in (None, 1001, 1006, 1012):
                    raise ReflexError("unreachable", f"{self._url}: closed before it answered: {error}") from None
                lost = False
                self.open()


def _frames(observations: Sequence[Observation]) -> list[list[Observation]]:
    """The rows of each frame."""
    found: list[list[Observation]] = [[]]
    size = 0
    for observation in observations:
        own = sum(value.nbytes for value in observation.values() if isinstance(value, np.ndarray))
        if found[-1] and (len(found[-1]) == _MOST_ROWS or size + own > _MOST_BYTES):
            found.append([])
            size = 0
        found[-1].append(observation)
        size += own
    return found


def _websocket_url(url: str, said: Mapping[str, Any]) -> str:
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    query = "&".join(part for part in (parts.query, urlencode(said)) if part)
    return urlunsplit((scheme, parts.netloc, parts.path or "/", query, ""))


def _announced(frame: bytes | str, url: str) -> dict[str, Any]:
    """The metadata in the server's first frame."""
    metadata = _decoded(frame) if isinstance(frame, bytes) else None
    told = metadata.get("reflex") if isinstance(metadata, dict) else None
    if not isinstance(told, dict) or not isinstance(told.get("images"), dict):
        message = f"{url}: sends no metadata of a policy: is it `reflex serve`, and not of RoboArena's dialect?"
        raise ReflexError("bad_answer", message)
    return told


def _again(error: ReflexError) -> bool:
    return error.retry_safe and error.code not in _STALE


def _refused(text: str) -> ReflexError:
    """The server's error, in JSON or as text."""
    try:
        body = json.loads(text)
        code, message, request_id = str(body["error"]), str(body["message"]), str(body.get("request_id") or "")
        return ReflexError(code, message, request_id, body.get("retry_safe") is True)
    except (ValueError, KeyError, TypeError, AttributeError):
        return ReflexError("server_error", text[:300] or "an error without a text")


def _actions(answer: Any) -> Actions | ReflexError:
    if isinstance(answer, dict) and "error" in answer:
        error = answer["error"]
        return _refused(json.dumps(error if isinstance(error, dict) else answer, default=str))
    actions = answer.get("actions") if isinstance(answer, dict) else None
    if not isinstance(actions, np.ndarray) or actions.ndim != 2 or not len(actions):
        raise ReflexError("bad_answer", f"no actions in the answer: {str(answer)[:200]}")
    if not np.isfinite(actions).all():
        raise ReflexError("bad_answer", "the actions are not all finite")
    return actions.astype(np.float32, copy=False)


def _encoded(value: Any) -> bytes:
    return bytes(msgpack.packb(value, default=_array_out))


def _array_out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _decoded(frame: bytes) -> Any:
    try:
        return msgpack.unpackb(frame, object_hook=_array_in, strict_map_key=False)
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise ReflexError("bad_answer", f"a frame that cannot be read: {error!r}") from None


def _array_in(found: dict[Any, Any]) -> Any:
    if b"__ndarray__" not in found:
        return found
    dtype = np.dtype(found[b"dtype"])
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(found[b"data"], dtype).reshape(found[b"shape"])
