"""The bare ASGI hello: what uvicorn itself costs. It does not even read the body."""

from __future__ import annotations

import sys
from typing import Any

from bench.apps.uv import run

_START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]}
_BODY = {"type": "http.response.body", "body": b"hello"}


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Say hello."""
    await send(_START)
    await send(_BODY)


if __name__ == "__main__":
    run(app, int(sys.argv[2]))
