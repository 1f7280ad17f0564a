"""Guesses by what was said before: which they are, how often they are right, and what it costs to make them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from reflex_runtime.llm.engine.ngram_proposer import LONGEST, MOST, Lookup, Rates


def guesser(
    prompt: Sequence[int], output: Sequence[int] = (), rates: Rates | None = None
) -> Lookup:
    lookup = Lookup(prompt, rates or Rates())
    lookup.learn(len(prompt))
    for token in output:
        lookup.follow(token)
    return lookup


def sure() -> Rates:
    """Every guess was right so far."""
    rates = Rates()
    for length in (2, 3, 4, 8, 16, 32):
        for _ in range(500):
            rates.compared(length, True)
    return rates


def obvious(tokens: Sequence[int]) -> int | None:
    """The place behind the last three tokens where they were said last, else behind the last two."""
    for n in (3, 2):
        for end in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[end - n : end]) == list(tokens[-n:]):
                return end
    return None


def test_the_guess_is_what_followed_the_last_three_tokens_or_two() -> None:
    assert guesser([1, 2, 3, 4, 5, 6, 1, 2, 3]).guess(3)[0] == [4, 5, 6]
    assert guesser([7, 2, 3, 4, 1, 2, 3, 5, 7, 2, 3]).guess(1)[0] == [4]  # three are preferred to a later two
    assert guesser([9, 2, 3, 4, 1, 2, 3, 5, 7, 2, 3]).guess(1)[0] == [5]  # and of two the later
    assert guesser([1, 2, 3, 4]).guess(5) == ([], ())
    assert guesser([1]).guess(5) == ([], ())


def test_behind_its_end_a_text_goes_on_as_it_repeats() -> None:
    assert guesser([1, 2, 3, 1, 2, 3], rates=sure()).guess(7)[0] == [1, 2, 3, 1, 2, 3, 1]
    assert guesser([5, 5, 5], rates=sure()).guess(4)[0] == [5, 5, 5, 5]


def test_a_guess_goes_on_from_where_it_was_right() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 3, 4, 9, 1, 2, 3]
    assert guesser(prompt, [4]).guess(2)[0] == [5, 6]  # although 3, 4 was followed by 9 later on
    assert guesser(prompt, [8]).guess(2) == ([], ())
    assert guesser(prompt, [8, 3, 4]).guess(1)[0] == [9]


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_the_obvious_way_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.llm.engine.ngram_proposer.LEAST", 0.0)
    rng = random.Random(seed)
    prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
    output = [rng.randrange(4) for _ in range(30)]
    for n in range(len(output)):
        said = [*prompt, *output[:n]]
        guessed = guesser(prompt, output[:n]).guess(1)[0]
        if not n or guesser(prompt, output[: n - 1]).guess(1)[0] != output[n - 1 : n]:  # no guess goes on
            expected = obvious(said)
            assert guessed == ([] if expected is None else [said[expected]])


def test_the_prompt_is_learned_by_the_first_token_at_the_latest() -> None:
    lookup = Lookup([1, 2, 3, 4, 1], Rates())
    lookup.learn(1)
    lookup.follow(2)
    assert lookup.guess(1)[0] == [3]


def test_chances_are_learned_of_all_and_of_each() -> None:
    rates = Rates()
    for _ in range(300):
        rates.compared(2, False)
        rates.compared(40, True)
    assert rates.chances(2, 5) == ()
    assert rates.chances(40, 3) == pytest.approx((1.0, 1.0, 1.0), abs=0.01)
    own = Rates(rates)
    for _ in range(20):
        own.compared(2, True)
    assert own.chances(2, 1)[0] > 0.9
    assert rates.chances(2, 1)[0] < 0.5
    longer = own.chances(16, MOST)
    assert list(longer) == sorted(longer, reverse=True)


def test_chances_are_those_of_what_was_really_said() -> None:
    """Of a text that repeats itself but for every tenth token, nine guesses of ten are right."""
    rng, rates = random.Random(1), Rates()
    phrase = [rng.randrange(1000) for _ in range(60)]
    output = [token if rng.random() < 0.9 else rng.randrange(1000) for token in phrase * 20]
    lookup = guesser(phrase, output, rates)
    right = tried = 0
    for token in phrase[3:]:
        guessed, chances = lookup.guess(1)
        if guessed:
            tried += 1
            right += chances[0] > 0.6
        lookup.follow(token)
    assert right > 0.7 * tried > 30


@pytest.mark.parametrize("most", [0, 1, 3, 100])
def test_no_more_is_guessed_than_asked(most: int) -> None:
    guessed, chances = guesser([5] * 30, [5] * 40).guess(most)
    assert len(guessed) == len(chances) <= min(most, MOST)


def test_a_very_long_sequence_is_looked_up_no_further() -> None:
    lookup = guesser([1, 2, 3] * (LONGEST // 3 + 2), [1, 2, 3])
    assert lookup.guess(5) == ([], ())
    assert len(lookup._triples) == 3


def test_what_a_sequence_says_beyond_its_longest_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflex_runtime.llm.engine.ngram_proposer.LONGEST", 50)
    lookup = guesser(range(100, 180), range(200, 280))
    assert len(lookup._pairs) <= 50
    assert len(lookup._triples) <= 50
