"""Guesses of a sequence's next tokens: those that followed the same tokens earlier (prompt lookup).

The last three tokens, or two, are looked up in the text so far. While guesses are right, they go on from there through
the old text, token by token. Every sampled token is compared with the guess, even if no step computed the guess: so the
share of right guesses is known before any is computed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

MOST: Final = 16  # tokens guessed at a time
LONGEST: Final = 16_384  # tokens of a sequence in the lookup: about 300 bytes each
LEAST: Final = 0.05  # smallest chance of a guess
_CLASSES: Final = (2, 3, 4, 8, 16, 32)  # lengths of a match: the longer, the more often guesses are right
_CLASS: Final = [sum(length >= bound for bound in _CLASSES[1:]) for length in range(_CLASSES[-1] + 1)]
_PRIOR: Final = (0.2, 0.3, 0.5, 0.7, 0.8, 0.9)  # shares of right guesses, until they are measured
_OWN, _ALL = 1 / 8, 1 / 64  # weight of one guess in the share of its sequence, and in that of all


class Rates:
    """Shares of right guesses, by the length of the match: of all sequences, or of one, which starts with theirs."""

    __slots__ = ("_all", "_of")

    def __init__(self, all: Rates | None = None) -> None:
        self._all = all
        self._of: list[float] = list(_PRIOR if all is None else all._of)

    def compared(self, length: int, right: bool) -> None:
        """Count a guess after a match of this length as right or wrong."""
        at = _CLASS[min(length, 32)]
        self._of[at] += ((1.0 if right else 0.0) - self._of[at]) * (_ALL if self._all is None else _OWN)
        if self._all is not None:
            self._all.compared(length, right)

    def chances(self, length: int, most: int) -> tuple[float, ...]:
        """The chances that the next guess is right, that the next two are, and so on, for at most `most` guesses."""
        found: list[float] = []
        chance, of = 1.0, self._of
        for at in range(length, length + most):
            chance *= of[_CLASS[at if at < 32 else 32]]
            if chance < LEAST:
                break
            found.append(chance)
        return tuple(found)


class Lookup:
    """The guesses of one sequence. prompt: its tokens so far. rates: of all sequences."""

    __slots__ = ("_at", "_known", "_length", "_pairs", "_rates", "_text", "_triples")

    def __init__(self, prompt: Seq[int], rates: Rates) -> None:
        self._text, self._rates = list(prompt), Rates(rates)
        self._pairs: dict[int, int] = {}  # two tokens, as one number → the place behind them
        self._triples: dict[int, int] = {}
        self._known = 0  # tokens of the text that were added to the lookup
        self._at = -1  # the place of the next guess in the text, or -1: there is none
        self._length = 0  # tokens before that place that equal the last ones

    def learn(self, end: int) -> None:
        """Add the prompt up to here to the lookup. O(new tokens)."""
        for place in range(self._known, min(end, LONGEST)):
            self._at, self._length = self._remember(place)
        self._known = end

    def follow(self, token: int) -> None:
        """Compare one more token of output with the guess, and add it to the lookup."""
        place = len(self._text)
        if self._known < place:
            self.learn(place)
        self._text.append(token)
        self._known += 1
        if place >= LONGEST:
            self._at = -1
            return
        at, length = self._at, self._length
        right = at >= 0 and self._text[at] == token
        if at >= 0:
            self._rates.compared(length, right)
        found = self._remember(place)
        self._at, self._length = (at + 1, length + 1) if right else found

    def guess(self, most: int) -> tuple[list[int], tuple[float, ...]]:
        """The next tokens, at most `most`, and for each the chance that it and all before it are right."""
        if self._at < 0 or most <= 0:
            return [], ()
        chances = self._rates.chances(self._length, min(most, MOST))
        period = self._known - self._at  # after its last token the text is guessed to repeat from there
        return [self._text[self._at + i % period] for i in range(len(chances))], chances

    def _remember(self, place: int) -> tuple[int, int]:
        """Add the token there. Returns the place after an earlier match of three or two tokens, or -1, and how many."""
        text, pairs = self._text, self._pairs
        if not place:
            return -1, 0
        pair = text[place - 1] << 32 | text[place]
        found = pairs.get(pair, -1)
        pairs[pair] = place + 1
        if place > 1:
            triple = text[place - 2] << 64 | pair
            longer = self._triples.get(triple, -1)
            self._triples[triple] = place + 1
            if longer >= 0:
                return longer, 3
        return found, 2
