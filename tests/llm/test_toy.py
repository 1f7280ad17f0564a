"""The toy model says something else as soon as anything about its cache is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.engine.tokenizer import Conversation
from reflex_runtime.llm.engine.toy import ByteTokenizer, ToyRunner
from reflex_runtime.llm.runners.runner import Step


def step(tokens: bytes, past: int, blocks: list[int]) -> Step:
    n = len(tokens)
    return Step(
        np.frombuffer(tokens, np.uint8).astype(np.int64),
        np.arange(past, past + n),
        np.array([past], np.int32),
        np.array([0, n], np.int32),
        np.array(blocks, np.int32),
        np.array([0, len(blocks)], np.int32),
    )


def test_a_prompt_in_chunks_is_the_prompt_whole() -> None:
    whole = ToyRunner(8, 4).forward(step(b"hello world", 0, [0, 1, 2]))
    runner = ToyRunner(8, 4)
    runner.forward(step(b"hello", 0, [7, 2]))
    assert (runner.forward(step(b" world", 5, [7, 2, 5])) == whole).all()


@pytest.mark.parametrize("change", ["token", "order", "block"])
def test_it_depends_on_every_token_its_place_and_its_block(change: str) -> None:
    whole = ToyRunner(8, 4).forward(step(b"hello world", 0, [0, 1, 2]))
    runner = ToyRunner(8, 4)
    runner.forward(step({"token": b"jello", "order": b"ehllo", "block": b"hello"}[change], 0, [0, 1]))
    assert (runner.forward(step(b" world", 5, [3 if change == "block" else 0, 1, 2])) != whole).any()


def test_what_no_scheduler_may_form_is_refused() -> None:
    good = step(b"hello", 0, [0, 1])
    with pytest.raises(ValueError, match="blocks"):
        ToyRunner(8, 4).forward(replace(good, blocks=good.blocks[:1], block_begins=np.array([0, 1], np.int32)))
    with pytest.raises(ValueError, match="positions"):
        ToyRunner(8, 4).forward(replace(good, positions=good.positions + 1))


def test_bytes_as_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve €")) == "naïve €"
    stream = tokenizer.stream().feed
    assert "".join(map(stream, tokenizer.encode("naïve €"))) == "naïve €"
    hello = Conversation([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(tokenizer.chat(hello)) == "user: hi\nassistant: "
    assert (tokenizer.token(65), tokenizer.token(0xE2)) == ("A", "\ufffd")


def test_a_cache_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks=0"):
        ToyRunner(num_blocks=0)
