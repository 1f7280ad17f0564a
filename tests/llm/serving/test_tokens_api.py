"""L9 /tokenize, /detokenize and /version: what the tokenizer says, without the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from reflex_runtime.llm.api import decode, tokenize
from reflex_runtime.version import __version__
from serving.openai_toy import Model, Toy

HELLO = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def toy() -> Iterator[Toy]:
    with Toy(Model(max_model_len=512)) as server:
        yield server


def test_l9_tokenize_tells_the_tokens_of_a_text_and_of_a_conversation(toy: Toy) -> None:
    answer = toy.post("/tokenize", {"model": "toy", "prompt": "né"})
    assert answer.json == {"count": 3, "max_model_len": 512, "tokens": list("né".encode())}
    found = toy.post("/tokenize", {"messages": HELLO, "tools": [ADD]}).json
    assert bytes(found["tokens"]).decode() == "tool: add\nuser: hi\nassistant: "
    asked = toy.chat("hi", max_tokens=1).json["usage"]["prompt_tokens"]
    assert toy.post("/tokenize", {"messages": HELLO}).json["count"] == asked


def test_l9_detokenize_tells_the_text(toy: Toy) -> None:
    assert toy.post("/detokenize", {"tokens": list("né".encode())}).json == {"prompt": "né"}
    assert toy.post("/detokenize", {"model": "toy", "tokens": []}).json == {"prompt": ""}


def test_l9_a_large_conversation_is_read_beside_the_loop(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages and the JSON in their calls took 190 ms of the loop for 1.4 MB."""
    threads: list[str] = []
    read = tokenize.chat_conversation

    def noting(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(*given)

    monkeypatch.setattr(tokenize, "chat_conversation", noting)
    assert toy.post("/tokenize", {"messages": HELLO}).status == 200
    assert toy.post("/tokenize", {"messages": HELLO * 5000}).status == 200
    assert threads[0] == "toy-server"
    assert threads[1] != "toy-server"


def test_l9_many_token_ids_are_decoded_piece_by_piece(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two million took 85 ms at once, in which no other thread ran."""
    lengths: list[int] = []
    plain = decode._IDS.decode
    monkeypatch.setattr(decode, "PIECE", 8)
    monkeypatch.setattr(decode, "_IDS", SimpleNamespace(decode=lambda raw: lengths.append(len(raw)) or plain(raw)))
    assert toy.complete(list(b"a" * 100), max_tokens=1).json["usage"]["prompt_tokens"] == 100
    assert max(lengths) < 20
    monkeypatch.setattr(decode, "MOST_TOKENS", 99)
    assert "at most 99 are taken" in toy.error(toy.complete(list(b"a" * 100)))["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [ADD]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"promt": "a"}, "promt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": "x" * 70_000}, "tokens"),
        ("/detokenize", {"tokens": [0] * 513}, "tokens"),
        ("/detokenize", {"tokens": [0] * 60_000}, "tokens"),
    ],
)
def test_l9_what_has_no_tokens_is_refused_by_name(toy: Toy, path: str, fields: Any, param: str) -> None:
    answer = toy.post(path, fields)
    assert answer.status == (404 if param == "model" else 400)
    assert toy.error(answer)["param"] == param


def test_version_tells_the_version(toy: Toy) -> None:
    assert toy.get("/version").json == {"version": __version__}
