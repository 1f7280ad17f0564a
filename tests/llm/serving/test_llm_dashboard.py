"""What a language model's server shows to those who watch it, over real sockets, on the toy model."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from reflex_runtime.cli.top import watched
from reflex_runtime.web.server_address import ServerAddress
from serving.openai_toy import Model, Toy


def snapshots(port: int) -> Generator[Any]:
    for line in watched(ServerAddress.of(f"http://127.0.0.1:{port}")):
        yield json.loads(line)


def test_x4_tokens_steps_and_callers_are_shown() -> None:
    runner = Model()
    with Toy(runner) as toy:
        seen = snapshots(toy.port)
        first = next(seen)
        assert (first["server"]["product"], first["server"]["state"], first["batches"]) == ("llm", "ready", [])
        runner.stop()
        with toy.open("a" * 20, name="one", max_tokens=4, stream=True, user="chat-7") as caller:
            runner.wait_inside()
            told = next(s for s in seen if s["running"])
            assert told["running"][0]["members"][0][:2] == ["chat-7", 20.0]  # the whole prompt
            assert told["server"]["model"]["running"] == 1
            runner.go()
            caller.read()
        told = next(s for s in seen if s["clients"])
        assert [client["name"] for client in told["clients"]] == ["chat-7"]
        (group,) = told["groups"]
        assert group["first_p50"] > 0.0
        assert group["gap_p99"] > 0.0
        assert group["tokens"] > 0.0
        assert told["server"]["queues"]["default"]["queued"] == 0
        seen.close()


def test_x4_the_stream_ends_when_the_server_does() -> None:
    with Toy(Model()) as toy:
        seen = snapshots(toy.port)
        next(seen)
        toy.stop()
        for _ in seen:
            pass
