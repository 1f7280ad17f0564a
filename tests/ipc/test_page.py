"""The examples of docs/workers.md are the protocol: each is read by the code that reads it from a socket."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from reflex_runtime.ipc import messages
from reflex_runtime.ipc.frames import FrameDecoder, Reader, RpcMessage, encode
from reflex_runtime.ipc.generate_batcher import GenerateBatcherConfig

PAGE = (Path(__file__).parents[2] / "docs" / "workers.md").read_text(encoding="utf-8")
PARAMS: dict[str, Any] = {
    messages.LOAD: messages.LoadModel,
    messages.BATCH_GENERATE: messages.BatchGenerate,
    messages.CANCEL: messages.StreamId,
    messages.CHUNK: messages.StreamChunk,
    messages.PROMPT: messages.StreamPrompt,
    messages.STATS: messages.StreamStats,
    messages.EVENT: messages.StreamEvent,
    messages.CREDIT: messages.Credit,
}
RESULTS: dict[str, Any] = {
    messages.INFO: messages.Info,
    messages.LOAD: dict[str, Any],
    messages.BATCH_GENERATE: messages.BatchResult,
}


def examples() -> list[tuple[str, list[RpcMessage]]]:
    """(who says it, the messages of the frame), in the order of the page."""
    found = []
    for who, body in re.findall(r"^([→←])\n```json\n(.+?)\n```", PAGE, re.MULTILINE | re.DOTALL):
        decoder = FrameDecoder()
        data = body.encode()
        decoder.feed(b"J" + len(data).to_bytes(4, "big") + data)
        found += [(who, several) for several in decoder]
    return found


def strictly(raw: Any, kind: Any, name: str) -> None:
    """It is read as this kind, and says nothing that the kind does not know."""
    read = Reader(kind).read(raw)
    known, said = json.loads(msgspec.json.encode(read)), json.loads(bytes(raw))
    assert known.keys() >= said.keys(), name


def test_g15_the_examples_of_the_page_are_the_protocol() -> None:
    called: dict[Any, str] = {}
    seen: set[str] = set()
    for who, several in examples():
        for message in several:
            if message.result is not msgspec.UNSET:
                assert who == "←"
                strictly(message.result, RESULTS[called.pop(message.id)], str(message.id))
                continue
            assert message.method is not msgspec.UNSET
            seen.add(message.method)
            if message.id is not msgspec.UNSET:
                assert who == "→"
                called[message.id] = message.method
            if message.params:
                strictly(message.params, PARAMS[message.method], message.method)
            assert encode([message])
    assert not called, "calls without an answer on the page"
    assert seen == {messages.INFO, *PARAMS}


def test_g9_the_requests_of_the_batch_on_the_page_are_requests() -> None:
    batch = next(m for _, several in examples() for m in several if getattr(m, "method", "") == messages.BATCH_GENERATE)
    items = Reader(messages.BatchGenerate).read(batch.params).requests  # type: ignore[union-attr]
    read = [Reader(messages.GenerateParams).read(item) for item in items]
    assert [one.stream_id for one in read] == ["a-1", "a-2", "a-2"]


def test_every_method_field_and_setting_is_on_the_page() -> None:
    for name in vars(messages):
        value = getattr(messages, name)
        if name.isupper() and isinstance(value, str):
            assert f"{value}" in PAGE, value
    for field in msgspec.structs.fields(messages.GenerateParams):
        assert f"`{field.name}`" in PAGE, field.name
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", PAGE, re.MULTILINE))
    for setting in fields(GenerateBatcherConfig):
        default = json.dumps(setting.default)
        assert rows.get(setting.name) == default, (setting.name, default)
