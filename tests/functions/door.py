"""A server of the functions in `served.py`, and how the tests ask it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.harness import Answer, Burst, Server

TESTS = str(Path(__file__).parents[1])
JSON = {"Content-Type": "application/json"}


def source(name: str) -> str:
    return f"python:functions.served:{name}"


class Functions(Server):
    """`reflex serve` of these functions of `served.py`."""

    def __init__(self, *names: str, options: Sequence[str] = (), **how: Any) -> None:
        self.names = names
        env = {"PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])} | how.pop("env", {})
        sources = [name if ":" in name or "/" in name else source(name) for name in names]
        super().__init__(sources[0], *sources[1:], *options, env=env, until=how.pop("until", "reflex ready"), **how)

    def path(self, name: str = "", **query: Any) -> str:
        asked = "&".join(f"{key}={value}" for key, value in query.items())
        return "/predict" + (f"/{name}" if name else "") + (f"?{asked}" if asked else "")

    def send(
        self, name: str, body: bytes, kind: str = "", headers: Mapping[str, str] | None = None, **query: Any
    ) -> Answer:
        """POST a body as it is."""
        given = ({"Content-Type": kind} if kind else {}) | dict(headers or {})
        return self.ask("POST", self.path(name, **query), body, given)

    def predict(self, name: str, item: Any, headers: Mapping[str, str] | None = None, **query: Any) -> Answer:
        """POST an item as JSON."""
        return self.send(name, json.dumps(item).encode(), "application/json", headers, **query)

    def together(
        self, name: str, items: Sequence[Any], headers: Sequence[Mapping[str, str]] = (), **query: Any
    ) -> Burst:
        """Connections for all of these items, open and ready to be sent at once."""
        given = headers or [{}] * len(items)
        return Burst(
            self.port, [request(self.path(name, **query), item, one) for item, one in zip(items, given, strict=True)]
        )


def request(path: str, item: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """A request as it goes over the wire."""
    body = json.dumps(item).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in (JSON | dict(headers or {})).items())
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def parts_of(text: bytes) -> Iterator[tuple[str, Any]]:
    """The events of a stream: (name, data)."""
    for event in text.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.splitlines() if ": " in line)
        if "data" in fields:
            yield fields.get("event", "message"), json.loads(fields["data"])
