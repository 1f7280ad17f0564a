"""A runtime process without this package, which says the words of a prompt. Without an argument this is its server."""

import json
import os
import socket
import sys
from typing import Any


def runtime() -> None:
    """Standard input is a socket: frames of JSON come and go there."""
    server = socket.socket(fileno=0)
    frames = server.makefile("rb")

    def say(**message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        server.sendall(b"J" + len(body).to_bytes(4, "big") + body)

    while head := frames.read(5):  # the connection ends when the server does
        body = json.loads(frames.read(int.from_bytes(head[1:], "big")))
        for message in body if isinstance(body, list) else [body]:
            method, params = message["method"], message.get("params") or {}
            if method == "runtime/info":
                info = {"name": "own", "version": "1", "protocol": 1, "capabilities": []}
                say(id=message["id"], result={**info, "pid": os.getpid()})
            elif method == "generate":  # one at a time, and within the 64 tokens of its credit
                id, words = params["stream_id"], params["prompt"].split()[: params.get("max_tokens", 16)]
                say(id=message["id"], result={"stream_id": id, "prompt_tokens": len(words)})
                tokens = [{"text": f"{word} ", "token_id": n} for n, word in enumerate(words)]
                say(method="stream.chunk", params={"stream_id": id, "tokens": tokens, "is_final": True})
                say(method="stream.event", params={"stream_id": id, "event": "completed"})
            elif method == "shutdown":
                return
            elif "id" in message:
                say(id=message["id"], error={"code": -32601, "message": f"{method}: there is no such method"})


async def main() -> None:
    from reflex_runtime.ipc import GenerateBatcher, GenerateParams, RuntimeClient, StreamRegistry, spawned

    registry = StreamRegistry()
    command = [sys.executable, __file__, "runtime"]
    client = RuntimeClient(spawned(command), on_note=registry.note, on_lost=registry.lost)
    batcher = GenerateBatcher(client, registry)
    await client.start()
    handle = registry.register()
    await batcher.enqueue(GenerateParams(stream_id=handle.id, prompt="a runtime of one's own"))
    print("".join([token.text async for token in handle]))
    await client.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["runtime"]:
        runtime()
    else:
        import asyncio

        asyncio.run(main())
