"""The kept-alive connections of the sync client, over http.client: one for each thread that asks at the same time."""

from __future__ import annotations

import http.client
from collections.abc import Callable

from reflex_runtime.client.exchange import (
    Address,
    Reply,
    Send,
    Stale,
    bounded,
    broken,
    not_connected,
    not_http,
    readable,
    too_late,
    why,
)


class Sockets:
    def __init__(self, address: Address, clock: Callable[[], float]) -> None:
        self._address, self._clock = address, clock
        self._idle: list[http.client.HTTPConnection] = []

    def close(self) -> None:
        while (kept := self._kept()) is not None:
            kept.close()

    def exchange(self, send: Send) -> Reply:
        """One attempt. If a kept-alive connection turns out to be closed, one more on a new connection."""
        until = self._clock() + send.limit
        while (kept := self._kept()) is not None:
            if not readable(kept.sock):
                try:
                    return self._over(kept, send, until)
                except Stale:
                    break
            kept.close()  # closed by the server, or with unexpected data
        fresh = self._connected(send.limit)
        try:
            return self._over(fresh, send, until)
        except Stale as error:
            raise broken(error, self._address) from None

    def _kept(self) -> http.client.HTTPConnection | None:
        try:
            return self._idle.pop()
        except IndexError:  # another thread may have been faster
            return None

    def _connected(self, limit: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._address.secure else http.client.HTTPConnection
        fresh = kind(self._address.host, self._address.port, timeout=limit)
        try:
            fresh.connect()
        except OSError as error:
            fresh.close()
            raise not_connected(error, self._address) from None
        return fresh

    def _over(self, connection: http.client.HTTPConnection, send: Send, until: float) -> Reply:
        """One request on one connection, which is kept if possible. Raises Stale if it closes before any of the
        answer."""
        sock = connection.sock
        response: http.client.HTTPResponse | None = None
        done = False
        try:
            sock.settimeout(self._left(until))
            connection.request(send.method, self._address.prefix + send.path, send.body, dict(send.headers))
            response = connection.getresponse()
            bounded(response.length or 0, response.status)
            parts, size = [], 0
            while part := response.read1(1 << 20):
                size = bounded(size + len(part), response.status)
                parts.append(part)
                sock.settimeout(self._left(until))
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            done = not response.will_close
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, b"".join(parts))
        except TimeoutError:
            raise too_late(send, self._address) from None
        except ConnectionError as error:  # RemoteDisconnected is one
            if response is not None:
                raise broken(error, self._address) from None
            raise Stale(why(error)) from None
        except (OSError, http.client.IncompleteRead) as error:
            raise broken(error, self._address) from None
        except (http.client.HTTPException, ValueError) as error:
            raise not_http(error) from None
        finally:
            if response is not None:
                response.close()  # its own handle of the socket
            if done:
                self._idle.append(connection)
            else:
                connection.close()

    def _left(self, until: float) -> float:
        return max(1e-3, until - self._clock())
