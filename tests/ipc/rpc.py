"""Messages by their kind."""

from __future__ import annotations

from typing import Any

import msgspec

from reflex_runtime.ipc.frames import VERSION, RpcError, RpcMessage


def call(id: Any, method: str, params: Any = msgspec.UNSET) -> RpcMessage:
    return RpcMessage(VERSION, method, params, id)


def note(method: str, params: Any = msgspec.UNSET) -> RpcMessage:
    return RpcMessage(VERSION, method, params)


def answer(id: Any, result: Any) -> RpcMessage:
    return RpcMessage(VERSION, id=id, result=result)


def refusal(id: Any, error: RpcError) -> RpcMessage:
    return RpcMessage(VERSION, id=id, error=error)
