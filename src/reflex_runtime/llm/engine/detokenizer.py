"""From tokens to text, whole and as a stream: in one place, so that both are equal.

A token adds bytes to a text, and a text is the bytes of its tokens as UTF-8; invalid bytes become U+FFFD. A special
token adds none, unless it is a mark that parsers read (`output_parsers.MARKS`): those are no special tokens here. Some
tokenizers write a space before each word: the first space of a text is dropped. An output continues its prompt, so its
first word keeps the space, and a character that the prompt began belongs to the output.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Sequence as Seq
from typing import Any, Final, Protocol

_TAIL: Final = 3  # bytes at the end of a prompt that may be the beginning of a character
_BYTE: Final = re.compile("<0x([0-9A-F]{2})>")
_BESIDE: Final = "a"  # a token that is decoded beside another, to find the bytes that the other adds to a text


class Detokenizer(Protocol):
    """The bytes that tokens add to a text."""

    def piece(self, id: int) -> bytes:
        """The bytes of a token that is not the first of a text; b"" for a special or unknown one."""

    def first(self, id: int) -> bytes:
        """Its bytes as the first token of a text."""
        return self.piece(id)

    def token(self, id: int) -> str:
        """One token for people, special ones too."""
        return self.piece(id).decode(errors="replace")

    def decode(self, ids: Seq[int], whole: bool = True) -> str:
        """The text of tokens. whole: False leaves out an incomplete character at the end."""
        pieces = [self.piece(id) for id in ids]
        first = next((at for at, piece in enumerate(pieces) if piece), None)
        if first is not None:
            pieces[first] = self.first(ids[first])
        return utf_8_decode(b"".join(pieces), "replace", whole)[0]

    def stream(self, prompt: Seq[int] = (), stop: Seq[str] = (), include_stop: bool = False) -> TextStream:
        """The text of an output, by tokens. prompt: the tokens before it. stop, include_stop: see `SamplingParams`."""
        return TextStream(self, prompt, stop, include_stop)


class TextStream:
    """The text of one output, token by token. stopped: a stop text has ended it."""

    __slots__ = ("_first", "_held", "_include_stop", "_rest", "_stop", "_tokens", "stopped")

    def __init__(self, tokens: Detokenizer, prompt: Seq[int], stop: Seq[str], include_stop: bool) -> None:
        self._tokens, self._stop, self._include_stop = tokens, stop, include_stop
        tail = b""
        for id in reversed(prompt):
            if len(tail) >= _TAIL:
                break
            tail = tokens.piece(id) + tail
        self._first = not tail
        self._rest = b""  # the beginning of a character
        self._characters(tail[-_TAIL:])
        self._held = ""  # complete characters that may be the beginning of a stop text
        self.stopped = False

    @property
    def held(self) -> int:
        """Complete characters that are not returned yet."""
        return len(self._held)

    def feed(self, id: int, may_stop: bool = True) -> str:
        """The text that is certain after this token. may_stop: whether the token may complete a stop text."""
        piece = self._tokens.piece(id)
        if not piece:
            return self._special(id) if may_stop and self._stop else ""
        if self._first:
            self._first, piece = False, self._tokens.first(id)
        text = self._characters(piece)
        return self._until_stop(text) if may_stop and self._stop else text

    def end(self) -> str:
        """The rest of an output that no stop text has ended."""
        text = self._held + self._rest.decode(errors="replace")
        self._held, self._rest = "", b""
        return text

    def _characters(self, piece: bytes) -> str:
        data = self._rest + piece
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def _special(self, id: int) -> str:
        """End the text at a special token whose name is a stop text."""
        name = self._tokens.token(id)
        if name not in self._stop:
            return ""
        self.stopped = True
        return self.end() + (name if self._include_stop else "")

    def _until_stop(self, piece: str) -> str:
        text, self._held = self._held + piece, ""
        found = [(at, len(stop)) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            at, length = min(found)
            return text[: at + length if self._include_stop else at]
        sure = len(text) - max(overlap(text, stop) for stop in self._stop)
        self._held = text[sure:]
        return text[:sure]


def overlap(text: str, mark: str) -> int:
    """Characters at the end of the text that may be the beginning of the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


class CoreDetokenizer(Detokenizer):
    """The decoder of a `tokenizers.Tokenizer`, used for one token at a time, so that a stream is equal to the text
    decoded whole. A byte that is part of no character becomes one U+FFFD, whatever its neighbours are."""

    def __init__(self, core: Any) -> None:
        decoder, added = core.decoder, core.get_added_tokens_decoder()
        kinds = b"" if decoder is None else decoder.__getstate__()
        self._core, self._join = core, " ".join if decoder is None else decoder.decode
        self._added = {id: token.special for id, token in added.items()}
        self._bytes = _byte_alphabet() if b'"type":"ByteLevel"' in kinds else None
        self._falls_back = b'"type":"ByteFallback"' in kinds
        self._before = len(self._join([_BESIDE]))
        self._behind = len(self._join([_BESIDE, _BESIDE])) - self._before
        self._pieces: dict[int, bytes] = {}  # of used tokens: a vocabulary has 100,000 and more

    def piece(self, id: int) -> bytes:
        found = self._pieces.get(id)
        if found is None:
            found = self._pieces[id] = self._made(id)
        return found

    def first(self, id: int) -> bytes:
        piece, raw = self.piece(id), self._core.id_to_token(id)
        if not piece or self._bytes is not None or (self._falls_back and _BYTE.fullmatch(raw)):
            return piece
        text = self._join([raw, _BESIDE])
        return str(text[: len(text) - self._behind]).encode()

    def token(self, id: int) -> str:
        return self._core.id_to_token(id) if self._added.get(id) else super().token(id)

    def _made(self, id: int) -> bytes:
        raw = self._core.id_to_token(id)
        if raw is None or self._added.get(id):
            return b""
        if self._bytes is not None:
            own = None if id in self._added else [self._bytes.get(character) for character in raw]
            return bytes(own) if own is not None and None not in own else raw.encode()  # type: ignore[arg-type]
        if self._falls_back and (byte := _BYTE.fullmatch(raw)):
            return bytes((int(byte[1], 16),))
        text = self._join([_BESIDE, raw, _BESIDE])
        return str(text[self._before : len(text) - self._behind]).encode()


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character in byte-level vocabularies: printable bytes stand for themselves, characters from 256
    on for the others, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
