"""Posts results to an HTTP server as lines of JSON; those that come before an answer go into the next request."""

from __future__ import annotations

import base64
import random
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Final

from reflex_runtime.feeds.outputs.output import ResultLine, ResultOutput, address_of, unreachable
from reflex_runtime.pacing import doubled
from reflex_runtime.version import __version__

GROUP: Final = 100  # results in a request
GROUP_BYTES: Final = 1_000_000  # of a request, to which no further result is then added
TIMEOUT_S: Final = 10.0  # to connect, and between two parts of an answer
FIRST_S: Final = 0.5  # pause before the second attempt; doubles, and is shortened by up to half at random
LONGEST_S: Final = 30.0
ATTEMPTS: Final = 8  # for a group, in about a minute
ANSWER_BYTES: Final = 65_536  # of an answer's body; after a longer one the connection is closed
BODY_S: Final = 0.5  # for an answer's body; likewise
_RETRIED: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


class Webhook(ResultOutput):
    """Posts groups of results as application/x-ndjson, with the lines of --results, to
    http[s]://[user:password@]host[:port]/path?query. Raises ConfigError for another address.

    A status of 200 to 299 is success. After 408, 425, 429, 500, 502, 503, 504 and a lost connection the group is sent
    again, after 0.5, then 1, 2 … 30 s, and not before Retry-After (at most 30 s): it may arrive twice. Any other status
    refuses the group. Redirects are not followed.
    """

    kind = "webhook"

    def __init__(self, url: str, name: str = "") -> None:
        self._address = address = address_of(url, "http", "http[s]://HOST[:PORT]/PATH", query=True)
        super().__init__(address.shown, name=name)
        self._headers = {"Content-Type": "application/x-ndjson", "User-Agent": f"reflex/{__version__}"}
        if address.user is not None:
            words = f"{address.user}:{address.password or ''}".encode()
            self._headers["Authorization"] = "Basic " + base64.b64encode(words).decode()
        self._connection: HTTPConnection | None = None
        self._failures = 0  # in a row
        self._chance = random.Random()

    def join(self) -> bool:
        """See `ResultOutput`. Cuts off a request that takes longer than the time left."""
        cut = threading.Timer(max(0.0, self.time_left or 0.0), self._cut)
        cut.daemon = True
        cut.start()
        try:
            return super().join()
        finally:
            cut.cancel()

    # -- on the output's thread ----------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        while lines := self._next(GROUP, GROUP_BYTES):
            self._send(lines)
        self._close()

    def _send(self, lines: Sequence[ResultLine]) -> None:
        try:
            answer = self._post(b"".join(line.data + b"\n" for line in lines))
        except (OSError, HTTPException) as error:
            self._retry(lines, unreachable(error))
            return
        if 200 <= answer.status < 300:
            self._failures = 0
            self._sent(len(lines))
            self._set_connected()
        elif answer.status in _RETRIED:
            self._retry(lines, f"answers {answer.status}", _seconds(answer.getheader("Retry-After")))
        else:
            self._failures = 0
            more = "; redirects are not followed" if 300 <= answer.status < 400 else ""
            self._set_away(f"answers {answer.status}{more}", again=False)
            self._drop("refused", len(lines))

    def _retry(self, lines: Sequence[ResultLine], why: str, wait: float = 0.0) -> None:
        """Put a group back, or give it up after the last attempt, and pause. wait: seconds of Retry-After."""
        self._failures += 1
        self._set_away(why)
        if self._failures % ATTEMPTS:
            self._back(lines)
        else:
            self._drop("lost", len(lines))
        if self.time_left is not None:
            self.signal(0.0)  # there is no time to try again
            return
        pause = doubled(FIRST_S, LONGEST_S, self._failures - 1) * (1 - self._chance.random() / 2)
        self._pause(min(LONGEST_S, max(pause, wait)))

    def _post(self, body: bytes) -> HTTPResponse:
        """The answer to a request. If a kept connection fails, a new one is tried, unless the time is over (`_cut`)."""
        fresh = self._connection is None
        try:
            self._connection = self._connection or self._connect()
            self._connection.request("POST", self._address.path, body, self._headers)
            answer = self._connection.getresponse()
        except (OSError, HTTPException):
            self._close()
            if fresh or (self.time_left or 1.0) <= 0.0:
                raise
            return self._post(body)
        self._finish(self._connection, answer)
        return answer

    def _finish(self, connection: HTTPConnection, answer: HTTPResponse) -> None:
        """Read the body, so that the connection can be used again. Only the status counts, even if the body fails."""
        until, left = time.monotonic() + BODY_S, ANSWER_BYTES
        with suppress(OSError, HTTPException):
            if connection.sock is not None:  # None: the connection ends with the body
                connection.sock.settimeout(BODY_S)
                while left > 0 and time.monotonic() < until and (part := answer.read1(left)):
                    left -= len(part)
                if answer.length == 0:
                    answer.read()
                connection.sock.settimeout(TIMEOUT_S)
        if not answer.isclosed():
            self._close()

    def _connect(self) -> HTTPConnection:
        host, port = self._address.host, self._address.port
        if not self._address.secure:
            return HTTPConnection(host, port, timeout=TIMEOUT_S)
        return HTTPSConnection(host, port, timeout=TIMEOUT_S, context=ssl.create_default_context())

    def _close(self) -> None:
        self._connection, connection = None, self._connection
        if connection is not None:
            connection.close()

    def _cut(self) -> None:
        """On another thread: end the request in progress."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def _seconds(retry_after: str | None) -> float:
    return float(retry_after) if retry_after and retry_after.isdecimal() and len(retry_after) < 9 else 0.0
