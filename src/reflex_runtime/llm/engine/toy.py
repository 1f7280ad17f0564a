"""A toy in place of a model, for tests, docs and teaching: bytes as tokens, deterministic, no weights.

As in a real model, the next token depends on every token before it, and the toy reads these only from its cache blocks.
So the output changes if the scheduler or a block table is wrong by one row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.llm.engine.output_parsers import FORMS, ToolForm
from reflex_runtime.llm.engine.tokenizer import Conversation, Tokenizer
from reflex_runtime.llm.runners.runner import Step

_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
MODELLED = "2 ms + 0.05 ms a token"  # the time of a step of `TimedToy`
_VOWELS = frozenset(b"aeiou")
_LETTERS = b"abcdefghiklmnoprstuvz"


class ByteTokenizer(Tokenizer):
    """One token is one byte of UTF-8; the byte 0 ends a text."""

    vocab_size = 256
    eos_token_ids: frozenset[int] = frozenset({0})
    tool_format: ToolForm | None = FORMS["hermes"]
    reasons = True

    def encode(self, text: str, most: int | None = None) -> list[int]:
        return list(text.encode())

    def piece(self, id: int) -> bytes:
        return bytes((id,)) if id < self.vocab_size else b""

    def chat(self, conversation: Conversation, most: int | None = None) -> list[int]:
        lines = [f"tool: {tool['function']['name']}\n" for tool in conversation.tools]
        for message in conversation.messages:
            said = message["content"]
            text = said if isinstance(said, str) else "\n".join(part["text"] for part in said)
            lines.append(f"{message['role']}: {text}\n")
        return self.encode("".join([*lines, "assistant: "]))

    def split(self, text: str) -> list[int]:
        return self.encode(text)


class ToyRunner:
    """Runs steps on a cache of one number per token.

    num_blocks, block_size: of the cache. max_model_len: most tokens of a sequence.
    """

    vocab_size = ByteTokenizer.vocab_size
    name = "toy"
    adapters: tuple[str, ...] = ()

    def __init__(self, num_blocks: int = 4096, block_size: int = 16, max_model_len: int = 8192) -> None:
        if not (num_blocks >= 1 and block_size >= 1 and max_model_len >= 2):
            sizes = f"num_blocks={num_blocks!r}, block_size={block_size!r}, max_model_len={max_model_len!r}"
            raise ConfigError(f"ToyRunner: {sizes}: must be >= 1, >= 1 and >= 2")
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self._rows = np.zeros(num_blocks * block_size, np.uint64)
        self._ids = np.arange(256, dtype=np.uint64)
        self._after_vowel = _bias(set(_LETTERS) - _VOWELS | {ord(" ")})
        self._after_consonant = _bias(set(_VOWELS))

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        """Logits [n, 256]; see `Runner`. Raises ValueError for an inconsistent step."""
        size, picked = self.block_size, step.picked.tolist()
        found: list[npt.NDArray[np.float32]] = []
        for i, past in enumerate(step.past_lens.tolist()):
            begin, end = int(step.begins[i]), int(step.begins[i + 1])
            table = step.blocks[step.block_begins[i] : step.block_begins[i + 1]]
            length = past + end - begin
            if not (end > begin and (step.positions[begin:end] == np.arange(past, length)).all()):
                raise ValueError(f"sequence {i}: positions do not follow its {past} tokens in the cache")
            if len(table) != -(-length // size):
                raise ValueError(f"sequence {i}: {len(table)} blocks of {size} for {length} tokens")
            rows = (table.astype(np.int64)[:, None] * size + np.arange(size)).reshape(-1)[:length]
            tokens = step.token_ids[begin:end]
            self._rows[rows[past:]] = _mixed(tokens.astype(np.uint64), np.arange(past, length, dtype=np.uint64))
            while len(found) < len(picked) and picked[len(found)] < end:
                at = picked[len(found)] - begin
                found.append(self._logits(self._rows[rows[: past + at + 1]], int(tokens[at])))
        return np.array(found, np.float32).reshape(-1, self.vocab_size)

    def _logits(self, rows: npt.NDArray[np.uint64], last: int) -> npt.NDArray[np.float32]:
        state = np.add.reduce(rows)  # each row mixes a token with its place, so the sum depends on their order
        noise = (_mixed(self._ids, state) >> np.uint64(40)).astype(np.float32) * np.float32(6.0 / (1 << 24))
        return noise + (self._after_vowel if last in _VOWELS else self._after_consonant)

    def close(self) -> None:
        return


class TimedToy(ToyRunner):
    """The toy in virtual time: each step takes 2 ms, and 0.05 ms for each of its tokens."""

    _now = 0.0

    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def forward(self, step: Step) -> npt.NDArray[np.float32]:
        self._now += 0.002 + 0.00005 * len(step.token_ids)
        return super().forward(step)


def _bias(likely: set[int]) -> npt.NDArray[np.float32]:
    bias = np.full(256, -30.0, np.float32)
    bias[sorted(likely)] = 0.0
    return bias


def _mixed(value: npt.NDArray[np.uint64], with_: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    """Two numbers mixed into one; arithmetic is modulo 2^64."""
    a, b, c = _MIX
    with np.errstate(over="ignore"):
        x: npt.NDArray[np.uint64] = value * a + (with_ + np.uint64(1)) * b
        x = (x ^ (x >> np.uint64(30))) * b
        x = (x ^ (x >> np.uint64(27))) * c
        return x ^ (x >> np.uint64(31))
