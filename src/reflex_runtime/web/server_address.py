"""GET from a running server, by an address that a person wrote. Errors name the remedy."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from reflex_runtime.core.errors import ConfigError, ReflexError
from reflex_runtime.observe.live import LiveSnapshot
from reflex_runtime.web.fields import printable

PATIENCE: Final = 10.0  # seconds to wait for an answer
MOST: Final = 64 * 2**20  # bytes of an answer that are read


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server. url: as given. path: prefix of every path."""

    url: str
    scheme: str
    host: str
    port: int
    path: str

    @property
    def secure(self) -> bool:
        return self.scheme in ("https", "wss", "grpcs")

    @property
    def netloc(self) -> str:
        """HOST:PORT, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of(cls, url: str, schemes: Sequence[str] = ("http", "https")) -> ServerAddress:
        """ConfigError if the text is no address. schemes: the allowed ones; the first is the default."""
        parts = urlsplit(url if "//" in url else "//" + url, scheme=schemes[0])
        try:
            port = parts.port if parts.port is not None else 443 if parts.scheme in ("https", "wss", "grpcs") else 80
        except ValueError:
            port = 0
        if parts.scheme not in schemes or not parts.hostname or parts.hostname.isdigit() or port == 0:
            raise ConfigError(f"URL={url!r:.200}: must be like http://127.0.0.1:8000")
        return cls(url, parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    def read(self, path: str, key: str = "") -> dict[str, Any]:
        """The JSON object at a path; empty if the answer is none. ReflexError if nothing answers."""
        with self.answer(path, key) as response:
            body = response.read(MOST)
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return {}

    @contextmanager
    def answer(self, path: str, key: str = "") -> Iterator[http.client.HTTPResponse]:
        """The answer, to be read in the `with`. ReflexError if nothing answers or the answer ends early."""
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=PATIENCE)
        try:
            connection.request("GET", self.path + path, headers={"Authorization": f"Bearer {key}"} if key else {})
            yield connection.getresponse()
        except ConnectionRefusedError:
            hint = "nothing listens there; start a server with reflex serve, or give another URL"
            raise ReflexError(f"{self.url}: {hint}") from None
        except TimeoutError:
            raise ReflexError(f"{self.url}: did not answer within {PATIENCE:g} s") from None
        except socket.gaierror as error:
            hint = f"no such host: {error.strerror}; a URL is like http://127.0.0.1:8000"
            raise ReflexError(f"{self.url}: {hint}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ReflexError(f"{self.url}: cannot be reached: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def refusal(self, response: http.client.HTTPResponse, path: str, key: str) -> ReflexError:
        """The error for an answer other than 200."""
        if response.status == 401:
            which = "another key than this one" if key else "a key: --api-key KEY, or REFLEX_API_KEY in the environment"
            return ConfigError(f"{self.url}: needs {which}")
        if response.status == 404:
            return ReflexError(f"{self.url}: has no {path}; is it a server of this version of reflex?")
        try:
            why = printable(str(msgspec.json.decode(response.read(4096))["message"]))
        except (msgspec.DecodeError, UnicodeError, RecursionError, KeyError, TypeError):
            why = f"answers {response.status} at {path}; is it a server of reflex?"
        return ReflexError(f"{self.url}: {why}")


_SNAPSHOT: Final = msgspec.json.Decoder(LiveSnapshot)


def snapshot_of(line: bytes, url: str) -> LiveSnapshot:
    """The snapshot in a line. ReflexError if it is incomplete, or from another version of reflex."""
    try:
        return _SNAPSHOT.decode(line)
    except msgspec.DecodeError as error:
        if not line.endswith(b"\n"):
            raise ReflexError(f"{url}: ended in the middle of a snapshot") from None
        raise ReflexError(f"{url}: runs another version of reflex: its snapshot cannot be read: {error}") from None
