"""What is known, what may be shown, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest

from reflex_runtime.core.errors import ConfigError
from reflex_runtime.ipc.messages import SamplingParams, ScoredToken
from reflex_runtime.llm.engine.sequence import Sequence
from reflex_runtime.llm.engine.toy import ByteTokenizer


def sequence(prompt: str = "p", eos: frozenset[int] = frozenset(), **params: Any) -> Sequence:
    params.setdefault("max_tokens", 1000)
    return Sequence(list(prompt.encode()), SamplingParams(**params), ByteTokenizer(), eos)


def say(sequence: Sequence, text: str | bytes) -> list[tuple[str, str | None]]:
    """(shown text, finish) of each byte, up to the end."""
    told: list[tuple[str, str | None]] = []
    for byte in text.encode() if isinstance(text, str) else text:
        output = sequence.append(ScoredToken(byte))
        told.append((output.text, output.finish))
        if output.finish is not None:
            break
    return told


def test_text_is_shown_as_it_comes_and_ends_with_max_tokens() -> None:
    s = sequence(max_tokens=3)
    assert say(s, "abcd") == [("a", None), ("b", None), ("c", "length")]
    assert (s.text, s.output_ids, s.finish_reason, s.num_tokens, s.num_output_tokens) == (
        "abc", (97, 98, 99), "length", 4, 3,
    )  # fmt: skip


def test_half_a_character_is_not_shown() -> None:
    s = sequence()
    assert [shown for shown, _ in say(s, "aé€")] == ["a", "", "é", "", "", "€"]


def test_the_end_of_sequence_token_ends_it_and_is_not_shown() -> None:
    s = sequence(eos=frozenset({0}))
    assert say(s, b"ab\0cd") == [("a", None), ("b", None), ("", "stop")]
    assert s.output_ids == (97, 98, 0)


def test_l7_ignore_eos_goes_on_but_a_stop_token_still_ends_it() -> None:
    s = sequence(eos=frozenset({0}), ignore_eos=True, stop_token_ids=(ord("!"),))
    assert [finish for _, finish in say(s, b"a\0b!c")] == [None, None, None, "stop"]


def test_l8_a_stop_text_ends_it_and_nothing_of_it_is_ever_shown() -> None:
    s = sequence(stop=("END", "\n\n"))
    told = say(s, "an ENEND x")
    assert "".join(shown for shown, _ in told) == s.text == "an EN"
    assert told[-1] == ("", "stop")
    assert len(told) == 8


def test_text_that_only_began_like_a_stop_text_is_shown_when_that_is_known() -> None:
    s = sequence(stop=("abc",))
    assert [shown for shown, _ in say(s, "xabdab")] == ["x", "", "", "abd", "", ""]
    assert s.text == "xabd"


def test_what_was_held_for_a_stop_text_is_shown_at_the_end_of_length_and_of_sequence() -> None:
    s = sequence(stop=("abc",), max_tokens=3)
    assert say(s, "xab") == [("x", None), ("", None), ("ab", "length")]
    s = sequence(stop=("abc",), eos=frozenset({0}))
    assert say(s, b"ab\0") == [("", None), ("", None), ("ab", "stop")]


def test_the_earliest_of_several_stop_texts_counts() -> None:
    s = sequence(stop=("yz", "xyz"))
    assert say(s, "axyz")[-1] == ("", "stop")
    assert s.text == "a"


@pytest.mark.parametrize("stop", [("aab",), ("abab", "b"), ("a", "ba")])
def test_stop_texts_agree_with_looking_at_the_whole(stop: tuple[str, ...]) -> None:
    for number in range(1 << 9):
        said = f"{number:09b}".replace("0", "a").replace("1", "b")
        s = sequence(stop=stop, max_tokens=9)
        told = say(s, said)
        ends = min((n for n in range(1, 10) if any(x in said[:n] for x in stop)), default=None)
        whole = said if ends is None else said[: min(at for x in stop if (at := said[:ends].find(x)) >= 0)]
        assert s.text == "".join(shown for shown, _ in told) == whole
        assert (len(told), s.finish_reason) == ((9, "length") if ends is None else (ends, "stop"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")), ("top_p", 0.0),
        ("top_p", 1.01), ("top_p", float("nan")), ("top_k", -1), ("seed", 1 << 64), ("stop", ("",)),
        ("stop", ("x",) * 17), ("logprobs", 21), ("logprobs", -1),
    ],
)  # fmt: skip
def test_invalid_sampling_values_are_named_with_their_range(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}=.*: must"):
        SamplingParams(**{field: value})


def test_a_seed_may_be_negative_and_without_one_each_sequence_draws_its_own() -> None:
    assert sequence(seed=-1).seed == (1 << 64) - 1
    assert sequence().seed != sequence().seed
